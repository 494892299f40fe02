"""Allocator settings with which a traced run reserves less: each is replayed on the trace that is there.

Tensors that differ in size from step to step leave pieces in the allocator's segments that serve nobody. How much that
is, and what a setting makes of it, a replay states exactly; no second run is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpumem_tui.memory import MIB, Unknown, format_bytes
from gpumem_tui.report.objects import JsonObject
from gpumem_tui.search.prediction import Fit, Traced
from gpumem_tui.search.strategy import Sizes
from gpumem_tui.simulator.allocator.caching import GRAPH_POOL
from gpumem_tui.simulator.allocator.settings import NAMES, AllocatorSettings, variable_for, with_option
from gpumem_tui.step import Phase
from gpumem_tui.text import minor_of

EXPANDABLE = "expandable_segments:True"
_OTHERS = (
    *(f"max_split_size_mb:{size}" for size in (32, 64, 128, 256, 512)),
    *(f"roundup_power2_divisions:{count}" for count in (2, 4, 8)),
    *(f"garbage_collection_threshold:{share}" for share in (0.6, 0.8)),
)
"""The setting that saves most is chosen. Smaller values of the first cost time: more requests to the driver."""

_EXPANDABLE_SINCE = (2, 1)

_FRAGMENTED = 1.1
"""Times what is allocated, from which on what is reserved is worth a replay."""

_WORTH = 0.02
"""The share of what is reserved that a setting has to save, and `_WORTH_BYTES`, two of the allocator's segments."""
_WORTH_BYTES = 40 * MIB
_MORE_SAMPLES = 0.01
"""The share by which a largest batch has to grow."""

_EVERY = Sizes()
_SURENESS: tuple[Fit, ...] = ("does not fit", "may not fit", "may fit", "fits")


@dataclass(frozen=True)
class AllocatorRemedy:
    """An option of the allocator with which a traced run takes less, by a replay of its trace.

    Attributes:
        option: what is set, as `expandable_segments:True`.
        before, after: the trace under the settings that it was made with, and with the option too.
        batch_size: at which it is judged. `free_bytes`: what the step has to leave free.
        sizes: the batch sizes that are taken.
    """

    option: str
    before: Traced
    after: Traced
    batch_size: int
    free_bytes: int = 0
    sizes: Sizes = field(default_factory=Sizes)

    @property
    def assignment(self) -> str:
        """The variable with its whole value, other options of the user's too."""
        return f"{variable_for(self.before.ready.torch_version)}={self.after.settings.text}"

    @property
    def is_of_program(self) -> bool:
        """Return whether the program sets the variable itself, so that an export has no effect."""
        return self.before.done.allocator not in ("", AllocatorSettings.from_environment().text)

    @property
    def how(self) -> str:
        """The line to type, or to write in a program that sets the variable itself."""
        if not self.is_of_program:
            return f"export {self.assignment}"
        return f'"{self.after.settings.text}" where the program sets {" or ".join(NAMES)}'

    @property
    def reserved_bytes(self) -> tuple[int, int]:
        """The highest reserved bytes without and with it."""
        before, after = (one.at(self.batch_size).peak_reserved_bytes for one in (self.before, self.after))
        return before, after

    @property
    def fit(self) -> Fit:
        """Return whether the step fits with it, by the same rule as without."""
        return self.after.fit(self.batch_size, self.free_bytes)

    @property
    def largest(self) -> tuple[int, int] | None:
        """The largest batches that fit without and with it; None where they are not known."""
        before, after = self.before.max_batch_size, self.after.max_batch_size
        if isinstance(before, Unknown) or isinstance(after, Unknown):
            return None
        return self.sizes.at_most(before), self.sizes.at_most(after)

    @property
    def words(self) -> str:
        """Say what it gains: the verdict where that changes, the reserved bytes, and the largest batch."""
        found = []
        if self.fit != self.before.fit(self.batch_size, self.free_bytes):
            found.append(f"it {self.fit}")
        before, after = map(format_bytes, self.reserved_bytes)
        if before != after:
            found.append(f"reserved {before} → {after}")
        if self.largest is not None and self.largest[0] != self.largest[1]:
            found.append("largest batch {:,} → {:,}".format(*self.largest))
        return ", ".join(found)

    @property
    def line(self) -> str:
        """Say what to set and what it gains, in a line."""
        return f"at no cost: {self.how}; then {self.words}"

    @property
    def larger_line(self) -> str:
        """Say which batch is safe with it."""
        return "" if self.largest is None else f"batch {self.largest[1]:,} at no cost: {self.how}"


def remedy(traced: Traced, batch_size: int, free_bytes: int = 0) -> AllocatorRemedy | None:
    """Return the option that helps a step most where pieces of segments lie idle or decide whether it fits; else None.

    Expandable segments come first. Others are replayed where they cannot be used, or leave as much idle.

    Args:
        free_bytes: what the step has to leave free.
    """
    best, now = None, traced
    for options in ((EXPANDABLE,), _OTHERS):
        if not _is_worth_replays(now, batch_size, free_bytes):
            break
        for option in _usable(traced, options):
            after = traced.under(AllocatorSettings.parse(with_option(traced.settings.text, option)))
            if _is_better(now, after, batch_size, free_bytes):
                best, now = AllocatorRemedy(option, traced, after, batch_size, free_bytes), after
    return best


def larger_batch(traced: Traced | Unknown, sizes: Sizes = _EVERY) -> AllocatorRemedy | None:
    """Return the option by which the largest batch grows most; None where none does, or there is no largest.

    A size just beyond the largest is replayed first, so that an option that helps nothing costs one replay.

    Args:
        sizes: the batch sizes that are taken.
    """
    if isinstance(traced, Unknown) or isinstance(largest := traced.max_batch_size, Unknown):
        return None
    largest = sizes.at_most(largest)
    best: tuple[int, AllocatorRemedy] | None = None
    for options in ((EXPANDABLE,), _OTHERS):
        for option in _usable(traced, options):
            known = largest if best is None else best[0]
            after = traced.under(AllocatorSettings.parse(with_option(traced.settings.text, option)))
            least = sizes.after(known + int(known * _MORE_SAMPLES))
            if after.fits(least) and isinstance(size := after.max_batch_size, int) and size >= least:
                best = size, AllocatorRemedy(option, traced, after, max(1, largest), sizes=sizes)
        if best is not None:
            break
    return None if best is None else best[1]


def _usable(traced: Traced, options: tuple[str, ...]) -> Iterator[str]:
    """Yield those of the options that change something here.

    Expandable segments need mapping of virtual memory, which PyTorch has for CUDA on Linux (c10/cuda/driver_api.h), and
    are left out in private pools of CUDA graphs (pytorch/pytorch#128068). Garbage is collected under a memory fraction
    only (`garbage_collect_cached_blocks`).
    """
    settings = traced.settings
    if "cudaMallocAsync" in settings.text:
        return
    for option in options:
        key, _, _ = option.partition(":")
        if key == "expandable_segments":
            older = minor_of(traced.ready.torch_version) < _EXPANDABLE_SINCE
            in_graphs = any(stream >= GRAPH_POOL for stream in traced.trace.at_none.streams)
            if settings.expandable_segments or older or traced.gpu.arch or in_graphs or sys.platform == "win32":
                continue
        elif key in settings.text or (key == "garbage_collection_threshold" and traced.allowed_bytes is None):
            continue
        yield option


def _is_worth_replays(traced: Traced, batch_size: int, free_bytes: int) -> bool:
    """Return whether what is idle in segments is much, grows from step to step, or decides whether the step fits."""
    run = traced.at(batch_size)
    if run.peak_reserved_bytes - run.peak_allocated_bytes < _WORTH_BYTES:
        return False
    if run.peak_reserved_bytes >= _FRAGMENTED * run.peak_allocated_bytes:
        return True
    if traced.fit(batch_size, free_bytes) != "fits":
        least_bytes = traced.trace.at(batch_size).at_level("least").most_live_bytes() + free_bytes
        return least_bytes <= traced.capacity_range.high_bytes
    peaks = {one.peak_allocated_bytes for one in run.phases if one.phase is Phase.FORWARD and one.step > 1}
    return len(peaks) > 1  # sizes differ from step to step, so further steps leave further pieces


def _is_better(now: Traced, after: Traced, batch_size: int, free_bytes: int) -> bool:
    is_sure, was_sure = (_SURENESS.index(one.fit(batch_size, free_bytes)) for one in (after, now))
    surer = is_sure - was_sure
    if surer:
        return surer > 0
    reserved = now.at(batch_size).peak_reserved_bytes
    saved_bytes = reserved - after.at(batch_size).peak_reserved_bytes
    return saved_bytes >= max(_WORTH_BYTES, _WORTH * reserved)


class AllocatorObject(JsonObject, frozen=True):
    """An option of the allocator that is worth setting, and what it gains, by a replay of the trace."""

    option: str
    how: str
    reserved_bytes_before: int
    reserved_bytes: int
    fit_before: Fit
    fit: Fit
    max_batch_size_before: int | None
    max_batch_size: int | None

    @classmethod
    def of(cls, found: AllocatorRemedy | None) -> AllocatorObject | None:
        """Describe an option; None for none."""
        if found is None:
            return None
        before, after = found.reserved_bytes
        largest_before, largest = found.largest or (None, None)
        return cls(
            option=found.option,
            how=found.how,
            reserved_bytes_before=before,
            reserved_bytes=after,
            fit_before=found.before.fit(found.batch_size, found.free_bytes),
            fit=found.fit,
            max_batch_size_before=largest_before,
            max_batch_size=largest,
        )
