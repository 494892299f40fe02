"""A run without what it tried and could not have: a program that runs out of memory may let go of it, and continue."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

from gpumem_tui.memory import ALLOCATED_BUCKETS, Bucket
from gpumem_tui.simulator.allocator.timeline import Timeline
from gpumem_tui.step import Phase

_Value = TypeVar("_Value")

_OF_A_RUN = {ALLOCATED_BUCKETS.index(bucket) for bucket in (Bucket.PARAMETERS, Bucket.OPTIMIZER)}
"""A program that gives these up begins anew, and not with the next batch of the same training."""


def settled(timeline: Timeline, tries: Sequence[tuple[int, int]], whole: Container[int] = ()) -> Timeline:
    """Return the run as if each try had not been made: what lives on is what the program settled at.

    A try begins with the first of the allocations that were live as memory ran out and that the program then let go of;
    all that was made since and is released by its end is left out. It begins no earlier than the step, unless the
    program let go of the model or the optimizer, or the steps since the last try are part of it.

    Args:
        tries: before which event memory ran out, and before which the next allocation was made.
        whole: the numbers of those that steps are part of: allocations count that were live as the first one began.
    """
    dropped: set[int] = set()
    inside: list[tuple[int, int]] = []
    made = [0, *accumulate(int(number > 0) for number in timeline.events)]
    born = {number: event for event, number in enumerate(timeline.events) if number > 0}
    for position, (ran_out, end) in enumerate(tries):
        released = [-number for number in timeline.events[ran_out:end] if number < 0]
        begins = [mark.event for mark in timeline.marks if mark.phase is Phase.BATCH and mark.event < ran_out]
        is_anew = any(timeline.buckets[number - 1] in _OF_A_RUN for number in released)
        least = 0 if is_anew or not begins else made[begins[-1]]
        if position in whole:
            before = tries[position - 1][1] if position else 0
            forwards = (mark.event for mark in timeline.marks if mark.phase is Phase.FORWARD and mark.event >= before)
            least, forward = made[before], next(forwards, ran_out)
            gone = (-number for number in timeline.events[forward:end] if number < 0)
            released = [number for number in gone if born[number] < forward] or released
        first = min((number for number in released if number > least), default=0)
        if first:
            ended = (-number for number in timeline.events[born[first] : end] if number < 0)
            dropped.update(number for number in ended if number >= first)
            inside.append((born[first], ran_out))
    return _without(timeline, dropped, inside) if dropped else timeline


def _without(timeline: Timeline, dropped: set[int], inside: Sequence[tuple[int, int]]) -> Timeline:
    """Return a run without some allocations and their releases, and without the marks inside of these events."""
    stays = [number not in dropped for number in range(1, len(timeline.sizes) + 1)]
    new = [0, *accumulate(map(int, stays))]
    left = [event for event, number in enumerate(timeline.events) if stays[abs(number) - 1]]

    def only(values: Sequence[_Value]) -> tuple[_Value, ...]:
        return tuple(value for value, is_kept in zip(values, stays, strict=True) if is_kept) if values else ()

    def moved(event: int) -> int:
        return bisect_left(left, event)

    marks = [mark for mark in timeline.marks if not any(start < mark.event < end for start, end in inside)]
    numbers = (timeline.events[event] for event in left)
    return replace(
        timeline,
        events=tuple(new[number] if number > 0 else -new[-number] for number in numbers),
        sizes=only(timeline.sizes),
        buckets=only(timeline.buckets),
        marks=tuple(replace(mark, event=moved(mark.event)) for mark in marks),
        sites=only(timeline.sites),
        computed=tuple((new[number], rule) for number, rule in timeline.computed if number not in dropped),
        emptied=tuple(sorted({moved(event) for event in timeline.emptied})),
        streams=only(timeline.streams),
        completions=tuple(
            (moved(event), new[number]) for event, number in timeline.completions if number not in dropped
        ),
    )
