"""Leaves out of a run what it does again and again alike: calls of a model that were answered from memory.

An evaluation of 200 batches, or 64 micro-batches that accumulate, tells no more than the first few do, and takes as
much longer to send and to replay. Standard library only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from gpumem_tui.simulator.allocator.timeline import Mark, Timeline

KEPT = 4
"""Rounds that stay of those that are alike, at least; before them the same calls were run."""

_PERIOD = 2
"""Rounds after which the allocator's blocks lie as before: a program holds the last batch while it loads the next, so
that the two change places. The whole period is left out, or a multiple."""


@dataclass(frozen=True)
class Round:
    """A call that was answered from memory, and what followed up to the next one.

    Attributes:
        event: how many events were before it.
        allocations: how many allocations were before it.
        state: what the allocator's free blocks are, as one number.
    """

    event: int
    allocations: int
    state: int


@dataclass(frozen=True)
class _Cut:
    """A run of equal rounds to drop: [start, end) of its events and allocations.

    Attributes:
        alike: allocations at their end that represent equally many before them.
        times: how often the last rounds that stay follow once more.
        marks: [start, end) of the marks of the last rounds kept.
    """

    events: tuple[int, int]
    allocations: tuple[int, int]
    alike: int
    times: int
    marks: tuple[int, int]


def folded(timeline: Timeline, rounds: Sequence[Round], *, is_exact: bool) -> Timeline:
    """Return the run with some of all rounds that follow each other and are alike; `Timeline.folds` shows how often.

    Rounds are alike if they make the same allocations, in the same buckets, places and phases, and release equal
    blocks.

    Args:
        is_exact: leave out only those that begin with the allocator's blocks where they lay; else the run of another
            batch size, where they may lie otherwise, has the same left out.
    """
    cuts = list(_cuts(timeline, rounds, is_exact=is_exact)) if not timeline.completions else []
    if not cuts:
        return timeline
    numbers = _renumbered(cuts, len(timeline.sizes))
    stays = _kept([cut.events for cut in cuts], len(timeline.events))
    events = tuple(
        numbers[event] if event > 0 else -numbers[-event] for a, b in stays for event in timeline.events[a:b]
    )
    if 0 in events:  # something is released much later than it was made
        return timeline
    made = _kept([cut.allocations for cut in cuts], len(timeline.sizes))
    starts, ends = [cut.events[0] for cut in cuts], [cut.events[1] for cut in cuts]

    def moved(event: int) -> int | None:
        """Return where an event is now; None if it is left out."""
        before = bisect_left(ends, event + 1)
        if before < len(cuts) and starts[before] <= event:
            return None
        return event - sum(end - start for start, end in zip(starts[:before], ends[:before], strict=True))

    marks: list[Mark] = []
    positions: list[int] = []
    for mark in timeline.marks:
        positions.append(len(marks))
        event = moved(mark.event)
        if event is not None:
            marks.append(replace(mark, event=event))
    return replace(
        timeline,
        events=events,
        sizes=tuple(size for a, b in made for size in timeline.sizes[a:b]),
        buckets=tuple(bucket for a, b in made for bucket in timeline.buckets[a:b]),
        marks=tuple(marks),
        sites=tuple(site for a, b in made for site in timeline.sites[a:b]),
        computed=tuple(
            (numbers[number], rule)
            for number, rule in timeline.computed
            if any(a < number <= b for a, b in made)
        ),
        emptied=tuple(event for event in map(moved, timeline.emptied) if event is not None),
        streams=tuple(stream for a, b in made for stream in timeline.streams[a:b]),
        folds=tuple((positions[cut.marks[0]], positions[cut.marks[1]], cut.times) for cut in cuts if _has_marks(cut)),
    )  # fmt: skip


def _has_marks(cut: _Cut) -> bool:
    return cut.marks[0] < cut.marks[1]


def _cuts(timeline: Timeline, rounds: Sequence[Round], *, is_exact: bool) -> Iterator[_Cut]:
    """Yield what is left out, in order."""
    mark_events = [mark.event for mark in timeline.marks]
    rules = sorted(number for number, _ in timeline.computed)
    rule_of = dict(timeline.computed)

    def looks(number: int) -> tuple[object, ...]:
        """Return all that a round does, told from its start."""
        this, following = rounds[number], rounds[number + 1]
        start, end = this.event, following.event
        first, last = this.allocations, following.allocations
        marks: list[Mark] = list(timeline.marks[bisect_left(mark_events, start) : bisect_left(mark_events, end)])
        return (
            [event - first if event > 0 else event + first for event in timeline.events[start:end]],
            timeline.sizes[first:last],
            timeline.buckets[first:last],
            timeline.sites[first:last],
            timeline.streams[first:last],
            [(mark.event - start, mark.step, mark.phase, mark.stage) for mark in marks],
            [(n - first, rule_of[n]) for n in rules[bisect_left(rules, first + 1) : bisect_left(rules, last + 1)]],
            number if any(start <= event < end for event in timeline.emptied) else None,
        )

    numbers = iter(range(len(rounds) - 1))
    for _, alike in groupby(numbers, looks):
        run = [*alike]
        times = (len(run) - KEPT) // _PERIOD
        stay = len(run) - times * _PERIOD
        behind = rounds[run[-1] + 1]
        states = [rounds[number].state for number in (*run[stay - _PERIOD :], run[-1] + 1)]
        if times < 1 or (is_exact and states[:-_PERIOD] != states[_PERIOD:]):
            continue
        left_out, again = rounds[run[stay]], rounds[run[stay - _PERIOD]]
        of_one = rounds[run[1]].allocations - rounds[run[0]].allocations
        yield _Cut(
            (left_out.event, behind.event),
            (left_out.allocations, behind.allocations),
            min(KEPT, times * _PERIOD) * of_one,
            times,
            (bisect_left(mark_events, again.event), bisect_left(mark_events, left_out.event)),
        )


def _kept(cuts: Sequence[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """Return what stays between the cuts, from each start to each end."""
    edges = [0, *(edge for cut in cuts for edge in cut), end]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _renumbered(cuts: Sequence[_Cut], allocations: int) -> list[int]:
    """Return by allocation its new number; of the last rounds left out the numbers of those that stay, else 0."""
    numbers, position = [0], 0
    following = 1
    for cut in cuts:
        first, last = cut.allocations
        numbers += range(following, following + first - position)
        following += first - position
        numbers += [0] * (last - first - cut.alike)
        numbers += range(following - cut.alike, following)
        position = last
    numbers += range(following, following + allocations - position)
    return numbers
