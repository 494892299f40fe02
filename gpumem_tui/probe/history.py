"""One training step's memory on one device: allocations and releases in order, and what the peak was made of.

Standard library only: what records a step (`operators` on the CPU, `cuda_history` on a GPU) needs torch, this does not.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from gpumem_tui.memory import Bucket
from gpumem_tui.probe.wire import HeldPlace, KeptPlace, LookedDevice
from gpumem_tui.step import Phase, Site
from gpumem_tui.step.buckets import STEADY_BUCKETS, untagged_bucket

TIMELINE_POINTS = 400
LISTED_PLACES = 2000
_BEFORE = -1
_Place = tuple[str, Site, bool]
"""A bucket, where in the program, and whether from before the step."""


@dataclass
class _Allocation:
    """`made` and `released` are positions in the order of events, the latter None while it lives on.

    `made_in` numbers the phases as they came.
    """

    size_bytes: int
    site: Site
    made: int
    made_in: int
    recomputed: bool = False
    released: int | None = None
    bucket: Bucket | None = None


class StepHistory:
    """Collects a step while it happens, or from what an allocator wrote down.

    Args:
        phases_known: whether `enter` is called; without it forward cannot be told from the rest of the step.
    """

    def __init__(self, phases_known: bool = True) -> None:
        self._phases_known = phases_known
        self._allocations: list[_Allocation] = []
        self._events: list[tuple[float, int]] = []
        self._phases: list[tuple[int, float, Phase]] = [(0, 0.0, Phase.BATCH)]
        self._step_ends: list[int] = []

    @property
    def phase(self) -> Phase:
        """The phase that the step is in."""
        return self._phases[-1][2]

    @property
    def events(self) -> int:
        """Allocations and releases so far."""
        return len(self._events)

    def existing(self, size_bytes: int, bucket: Bucket | None = None, site: Site | None = None) -> int:
        """Add something that was there before the step; return its number."""
        self._allocations.append(_Allocation(size_bytes, site or Site(), _BEFORE, 0, bucket=bucket))
        return len(self._allocations) - 1

    def allocate(self, size_bytes: int, time_s: float, site: Site | None = None, recomputed: bool = False) -> int:
        """Add an allocation, `time_s` after the step began; return its number. `recomputed`: a forward in backward."""
        made = len(self._events)
        self._events.append((time_s, size_bytes))
        self._allocations.append(_Allocation(size_bytes, site or Site(), made, len(self._phases) - 1, recomputed))
        return len(self._allocations) - 1

    def release(self, number: int, time_s: float) -> None:
        """End an allocation."""
        self._allocations[number].released = len(self._events)
        self._events.append((time_s, -self._allocations[number].size_bytes))

    def enter(self, phase: Phase, time_s: float) -> None:
        """Begin a phase."""
        if phase is not self.phase:
            self._phases.append((len(self._events), time_s, phase))

    def end_step(self) -> None:
        """End a step; what follows is the next one's."""
        self._step_ends.append(len(self._events))

    def tag(self, number: int, bucket: Bucket) -> None:
        """Say what bucket an allocation is in. Later calls for the same one change nothing."""
        allocation = self._allocations[number]
        allocation.bucket = allocation.bucket or bucket

    def own(self, number: int, module: str) -> None:
        """Say whose an allocation is, if the module that made it is not known. The first call decides."""
        allocation = self._allocations[number]
        if not allocation.site.module:
            allocation.site = replace(allocation.site, module=module)

    def result(self, device: int, device_uuid: str) -> LookedDevice:
        """Work out the peak and what it was made of."""
        peak, peak_bytes = self._peak()
        at_peak = [a for a in self._allocations if a.made <= peak and (a.released is None or a.released > peak)]
        buckets: dict[str, int] = defaultdict(int)
        places: dict[_Place, list[int]] = defaultdict(list)
        for allocation in at_peak:
            bucket = self._bucket(allocation).value
            buckets[bucket] += allocation.size_bytes
            places[bucket, allocation.site, allocation.made == _BEFORE].append(allocation.size_bytes)
        return LookedDevice(
            device=device,
            device_uuid=device_uuid,
            peak_bytes=peak_bytes,
            buckets=dict(buckets),
            held=tuple(_listed(places)),
            timeline=tuple(self._timeline()),
            phases=tuple((time_s, phase.value) for _, time_s, phase in self._phases) if self._phases_known else (),
            peak_s=self._events[peak][0] if peak >= 0 else 0.0,
            highest=self._highest(),
        )

    def _highest(self) -> dict[str, int]:
        """Return the most bytes of each bucket that lived at once."""
        changes = []
        for allocation in self._allocations:
            bucket, size_bytes = self._bucket(allocation).value, allocation.size_bytes
            changes.append((allocation.made, bucket, size_bytes))
            if allocation.released is not None:
                changes.append((allocation.released, bucket, -size_bytes))
        live: dict[str, int] = defaultdict(int)
        highest: dict[str, int] = defaultdict(int)
        for _, bucket, change in sorted(changes):
            live[bucket] += change
            highest[bucket] = max(highest[bucket], live[bucket])
        return dict(highest)

    def kept(self) -> dict[Site, list[int]]:
        """Return the sizes of what each step left behind, by place; called at the end of a step.

        Each step before the last must keep something at that place: a buffer that is made once is no
        growth, and of several steps the one counts that keeps least. Parameters, gradients and optimizer state are
        left out: they are made once, or anew in each step instead of the old.
        """
        starts = [0, *self._step_ends]
        steps = [self._left_of(start, end) for start, end in zip(starts, self._step_ends[:-1])]  # noqa: B905  Python 3.9
        if len(steps) < 2:
            return {}
        return {
            site: min((step.get(site, []) for step in steps), key=sum)
            for site in steps[0]
            if all(site in step for step in steps)
        }

    def _left_of(self, start: int, end: int) -> dict[Site, list[int]]:
        left: dict[Site, list[int]] = defaultdict(list)
        for allocation in self._allocations:
            if (
                start <= allocation.made < end
                and allocation.released is None
                and allocation.bucket not in STEADY_BUCKETS
            ):
                left[allocation.site].append(allocation.size_bytes)
        return left

    def live_bytes(self) -> int:
        """Sum what lives at the end."""
        return sum(allocation.size_bytes for allocation in self._allocations if allocation.released is None)

    def _before_bytes(self) -> int:
        return sum(allocation.size_bytes for allocation in self._allocations if allocation.made == _BEFORE)

    def _peak(self) -> tuple[int, int]:
        """Find the event after which most bytes live (`_BEFORE` if that is the start), and how many do."""
        live = highest = self._before_bytes()
        found = _BEFORE
        for event, (_, change) in enumerate(self._events):
            live += change
            if live > highest:
                highest, found = live, event
        return found, highest

    def _bucket(self, allocation: _Allocation) -> Bucket:
        """Return an allocation's bucket: untagged, by when it was made and released (`untagged_bucket`).

        Memory from before the step is unexplained. Blocks from before forward that were still there when it began,
        is batch data.
        """
        if allocation.bucket is not None:
            return allocation.bucket
        if allocation.made == _BEFORE:
            return Bucket.OTHER
        if not self._phases_known:
            return Bucket.OTHER if allocation.released is None else Bucket.ACTIVATIONS
        outlived = allocation.released is None or self._phase_at(allocation.released) != allocation.made_in
        phase = self._phases[allocation.made_in][2]
        return untagged_bucket(
            phase,
            outlives_phase=outlived,
            stays=allocation.released is None,
            recomputed=allocation.recomputed,
            is_data=phase is Phase.BATCH and outlived and not allocation.recomputed,
        )

    def _phase_at(self, event: int) -> int:
        return next(number for number in range(len(self._phases) - 1, -1, -1) if self._phases[number][0] <= event)

    def _timeline(self) -> list[tuple[float, int]]:
        """Thin live bytes over time out to the highest point of each equal part of the step, so that the peak stays."""
        live = self._before_bytes()
        highest: dict[int, tuple[float, int]] = {-1: (0.0, live)}
        end_s = self._events[-1][0] if self._events else 0.0
        for time_s, change in self._events:
            live += change
            part = int(time_s / end_s * (TIMELINE_POINTS - 2)) if end_s > 0 else 0
            if part not in highest or live > highest[part][1]:
                highest[part] = (time_s, live)
        points = sorted(highest.values())
        return points if points[-1] == (end_s, live) else [*points, (end_s, live)]


def _of_site(site: Site, sizes: list[int]) -> dict[str, Any]:
    """Return the fields of a place, and of what was allocated there."""
    place = {"operator": site.operator, "module": site.module, "source": site.source}
    return {**place, "bytes": sum(sizes), "allocations": len(sizes)}


def listed_as_kept(device: int, kept: dict[Site, list[int]]) -> list[KeptPlace]:
    """List what `StepHistory.kept` found on a device, the largest first."""
    rows = [KeptPlace(device=device, **_of_site(site, sizes)) for site, sizes in kept.items() if sum(sizes)]
    return sorted(rows, key=lambda row: -row.bytes)[:LISTED_PLACES]


def _listed(places: dict[_Place, list[int]]) -> list[HeldPlace]:
    """List the places that hold most; of the others, one row for each bucket and age."""
    ordered = sorted(places.items(), key=lambda item: -sum(item[1]))
    rows = ordered[:LISTED_PLACES]
    rest: dict[_Place, list[int]] = defaultdict(list)
    for (bucket, _, before_step), sizes in ordered[LISTED_PLACES:]:
        rest[bucket, Site(), before_step] += sizes
    return [
        HeldPlace(bucket=bucket, **_of_site(site, sizes), before_step=before_step)
        for (bucket, site, before_step), sizes in [*rows, *rest.items()]
    ]
