"""Memory that grows from step to step, as where something keeps each step's graph. Standard library only."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from gpumem_tui.memory import ALLOCATED_BUCKETS, MIB, format_bytes
from gpumem_tui.simulator.timeline import Timeline, rounded
from gpumem_tui.step import Site
from gpumem_tui.step.buckets import STEADY_BUCKETS

_STEADY = {ALLOCATED_BUCKETS.index(bucket) for bucket in STEADY_BUCKETS}

_LEAST_BYTES = MIB
"""A step's: less is a list of losses, of which a thousand steps make no difference."""


def growth_line(timeline: Timeline) -> str:
    """That every step of a run keeps memory, how much and where it was made; empty where none does.

    A step keeps what it makes beyond what it releases, of itself and of others. The first one is not looked at: it
    makes what stays. Of the others each must keep as much at the same place, which a buffer that is made once does
    not, nor a batch that is loaded in the step before.
    """
    kept = _kept(timeline)
    if len(kept) < 2:
        return ""
    by_site = {site: grown for site in kept[0] if (grown := min(step[site] for step in kept)) > 0}
    grows_bytes = sum(by_site.values())
    if grows_bytes < _LEAST_BYTES:
        return ""
    largest = timeline.site_table[max(by_site, key=lambda site: by_site[site])] if timeline.site_table else Site()
    place = " in ".join(word for word in (largest.source, largest.module) if word) or "an unknown place"
    return f"memory grows by {format_bytes(grows_bytes)} a step: something keeps what {place} makes"


def _kept(timeline: Timeline) -> list[Counter[int]]:
    """By step from the second on: by how many bytes more is live at its end than before, by number of site."""
    begins: dict[int, int] = {}
    for mark in timeline.marks:
        begins.setdefault(mark.step, mark.event)
    later = [event for step, event in sorted(begins.items()) if step > 1]
    found = []
    for start, end in pairwise([*later, len(timeline.events)]):
        step: Counter[int] = Counter()
        for number in timeline.events[start:end]:
            index = abs(number) - 1
            if timeline.buckets[index] not in _STEADY:
                size_bytes = rounded(timeline.sizes[index])
                step[timeline.sites[index] if timeline.sites else -1] += size_bytes if number > 0 else -size_bytes
        found.append(step)
    return found
