"""Memory that grows from step to step, as where something keeps each step's graph. Standard library only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from gpumem_tui.memory import ALLOCATED_BUCKETS, MIB
from gpumem_tui.simulator.allocator.timeline import Timeline, rounded
from gpumem_tui.step import Site
from gpumem_tui.step.buckets import STEADY_BUCKETS

_STEADY = {ALLOCATED_BUCKETS.index(bucket) for bucket in STEADY_BUCKETS}

_LEAST_BYTES = MIB
"""A step's: less is a list of losses, of which a thousand steps make no difference."""


@dataclass(frozen=True)
class KeptBySteps:
    """Memory that every step of a run keeps after its releases: bytes a step, and the place that makes most of it."""

    size_bytes: int
    site: Site

    @property
    def place(self) -> str:
        """Return the place in words."""
        return " in ".join(filter(None, (self.site.source, self.site.module))) or "an unknown place"


def growth(timeline: Timeline) -> KeptBySteps | None:
    """Return how memory grows from step to step, and where that is made; None where it does not.

    A step keeps what it makes beyond what it releases, of itself and of others. The first one is not looked at: it
    makes what stays. Each of the others must keep as much at that place, which a buffer that is made once does
    not, nor a batch that is loaded in the step before, and must keep more allocations there, not larger ones, as where
    each batch is larger than the last.
    """
    kept = _kept(timeline)
    if len(kept) < 2:
        return None
    by_site = {
        site: grown
        for site in kept[0][0]
        if (grown := min(sizes[site] for sizes, _ in kept)) > 0 and min(counts[site] for _, counts in kept) > 0
    }
    grows_bytes = sum(by_site.values())
    if grows_bytes < _LEAST_BYTES:
        return None
    largest = timeline.site_table[max(by_site, key=lambda site: by_site[site])] if timeline.site_table else Site()
    return KeptBySteps(grows_bytes, largest)


def kept_from(timeline: Timeline, site: Site) -> list[int]:
    """Return the allocations that a place has made in a step, the last one excepted, and that live at the end."""
    begins = [next((mark.event for mark in timeline.marks if mark.step == step), 0) for step in (2, timeline.steps)]
    released = {-number for number in timeline.events if number < 0}
    made = (number for number in timeline.events[begins[0] : begins[1]] if number > 0 and number not in released)
    return [number for number in made if timeline.site_table[timeline.sites[number - 1]] == site]


def _kept(timeline: Timeline) -> list[tuple[Counter[int], Counter[int]]]:
    """Return by step from the second on how many bytes and allocations more are live at its end, by number of site."""
    begins: dict[int, int] = {}
    for mark in timeline.marks:
        begins.setdefault(mark.step, mark.event)
    later = [event for step, event in sorted(begins.items()) if step > 1]
    found = []
    for start, end in pairwise([*later, len(timeline.events)]):
        sizes: Counter[int] = Counter()
        counts: Counter[int] = Counter()
        for number in timeline.events[start:end]:
            index = abs(number) - 1
            if timeline.buckets[index] not in _STEADY:
                size_bytes = rounded(timeline.sizes[index])
                site = timeline.sites[index] if timeline.sites else -1
                sizes[site] += size_bytes if number > 0 else -size_bytes
                counts[site] += 1 if number > 0 else -1
        found.append((sizes, counts))
    return found
