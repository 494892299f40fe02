"""Whether a process's memory after each step rises steadily, how fast, and when that fills what there is: a leak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from gpumem_tui.memory import GIB, MIB, format_bytes
from gpumem_tui.watch.records import ProbedProcess, ProbeSample, device_name

_SHORTEST_S = 30.0
_LONGEST_S = 600.0
"""The window is the later half of what was seen, so that no warm-up is in it, of at most this length."""
_PARTS = 6
_LEAST_IN_PART = 4
_STEADY = (0.3, 3.0)
"""Each part of the window rises by so many times the mean: one jump, as of a larger batch, is no leak."""
_LEAST_DEVICE_BYTES = 4 * MIB
_LEAST_HOST_BYTES = 16 * MIB
_LEAST_SHARE = 0.002
"""Least rise over the window, in bytes and as a share of what is held: less is noise."""


@dataclass(frozen=True)
class Growth:
    """A steady rise of one device's memory after each step.

    Attributes:
        device: as the process numbers it, or `wire.CPU` for host memory.
        bytes_per_s: how fast.
        over_s: for how long it was seen.
        left_s: seconds until it has filled what is left; None where that is not known.
    """

    device: int
    bytes_per_s: float
    over_s: float
    left_s: float | None = None

    @property
    def phrase(self) -> str:
        """The growth in a few words, as a process's title continues."""
        left = "" if self.left_s is None else f", full in {span(self.left_s)}"
        where = "host memory" if self.device < 0 else device_name(self.device)
        per_hour = format_bytes(round(self.bytes_per_s * 3600))
        return f"{where} after each step grows by {per_hour} an hour{left}"


def span(seconds: float) -> str:
    """Say a length of time as a person does.

    >>> span(150), span(9000)
    ('2 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.0f} days"


def growth_of(history: Sequence[ProbeSample]) -> tuple[Growth, ...]:
    """Find the devices of a process whose memory rises; of one that trains in host memory alone, its resident memory.

    Args:
        history: its samples, oldest first.
    """
    devices = sorted({sample.record.device for sample in history if sample.record.has_allocator})
    found = []
    for device in devices:
        points = _points(history, device)
        found.append(_rise(device, points, _LEAST_DEVICE_BYTES))
    if not devices and history:
        found.append(_rise(-1, _points(history, -1), _LEAST_HOST_BYTES))
    return tuple(growth for growth in found if growth is not None)


def growth_line(process: ProbedProcess, growth: Growth) -> str:
    """Return one line for a person, with what to do."""
    return f"{process.title}: {growth.phrase}; `gpumem-tui look {process.known_pid}` names what keeps it"


def fill_s(growth: Growth, left_bytes: int) -> float:
    """Return the seconds until so many bytes more are held."""
    return max(0, left_bytes) / growth.bytes_per_s


def _points(history: Sequence[ProbeSample], device: int) -> list[tuple[float, int]]:
    """List seconds and bytes after each sampled step, without the sample at the interpreter's exit."""
    records = [sample.record for sample in history if sample.record.device == device and sample.record.phase]
    sizes = [(one.monotonic_ns / 1e9, one.host_bytes if device < 0 else one.allocated_bytes) for one in records]
    return [(time_s, size_bytes) for time_s, size_bytes in sizes if size_bytes >= 0]


def _rise(device: int, points: Sequence[tuple[float, int]], least_bytes: int) -> Growth | None:
    """Find a steady rise: the median of each part of the window is above that of the part before by about as much."""
    if not points:
        return None
    end_s = points[-1][0]
    start_s = max(end_s - _LONGEST_S, (points[0][0] + end_s) / 2)
    length_s = end_s - start_s
    if length_s < _SHORTEST_S:
        return None
    parts: list[list[int]] = [[] for _ in range(_PARTS)]
    for time_s, size_bytes in points:
        if time_s >= start_s:
            parts[min(_PARTS - 1, int((time_s - start_s) / length_s * _PARTS))].append(size_bytes)
    if min(map(len, parts)) < _LEAST_IN_PART:
        return None
    levels = [median(part) for part in parts]
    rises = [after - before for before, after in pairwise(levels)]
    mean = (levels[-1] - levels[0]) / len(rises)
    whole = mean * _PARTS
    if whole < max(least_bytes, levels[-1] * _LEAST_SHARE):
        return None
    least, most = _STEADY
    if not all(least * mean <= rise <= most * mean for rise in rises):
        return None
    return Growth(device, whole / length_s, length_s)


_LEAST_STEP_BYTES = MIB
"""Less is a list of losses, of which a thousand steps make no difference (as the simulated GPU has it)."""
_LEAST_SAMPLES = 3


@dataclass(frozen=True)
class StepGrowth:
    """By how much a device's memory grew in each step since one of them; `since_step` is 0 where none was seen."""

    bytes: int = 0
    since_step: int = 0


def step_growth(samples: Sequence[Mapping[str, object]], device: int) -> StepGrowth:
    """Find by how much a device's memory grew from step to step, up to the last sample.

    Args:
        samples: as in `PostMortem.samples`, oldest first. Where all of them do not rise steadily the later half may:
            the first steps of a program make what stays.
    """
    points = _held_after(samples, device)
    for found in (points, points[len(points) // 2 :]):
        if len(found) >= _LEAST_SAMPLES:
            mean = _mean(found)
            rises = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(found)]
            least, most = _STEADY
            if mean >= _LEAST_STEP_BYTES and all(least * mean <= rise <= most * mean for rise in rises):
                return StepGrowth(round(mean), found[0][0])
    return StepGrowth()


def mean_step_growth(samples: Sequence[Mapping[str, object]], device: int) -> float | None:
    """Return the bytes by which memory grew in a step on average, steadily or not; None with too few samples to tell.

    Args:
        samples: as in `step_growth`.
    """
    points = _held_after(samples, device)
    return _mean(points) if len(points) >= _LEAST_SAMPLES else None


def _held_after(samples: Sequence[Mapping[str, object]], device: int) -> list[tuple[int, int]]:
    """Return what a device held after each step seen, besides parameters, gradients and optimizer state."""
    points: list[tuple[int, int]] = []
    for one in samples:
        names = ("step", "allocated_bytes", "parameters_bytes", "gradients_bytes", "optimizer_bytes")
        step, allocated_bytes, *fixed = (one.get(name) for name in names)
        if one.get("device") == device and isinstance(step, int) and isinstance(allocated_bytes, int):
            held_bytes = allocated_bytes - sum(value for value in fixed if isinstance(value, int))
            if allocated_bytes >= 0 and (not points or step > points[-1][0]):
                points.append((step, held_bytes))
    return points


def _mean(points: Sequence[tuple[int, int]]) -> float:
    return (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])


def is_worth_an_alert(growth: Growth) -> bool:
    """Return whether growth fills the memory within days, or, where that is not known, is fast."""
    if growth.left_s is None:
        return growth.bytes_per_s * 3600 >= GIB / 4
    return growth.left_s <= 7 * 86400
