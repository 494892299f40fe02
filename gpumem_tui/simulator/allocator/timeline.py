"""One training run as the allocator saw it: every allocation and release in order, with its bucket and phase.

Recorded on the simulated GPU and on a real one alike, replayed by `replay`. Standard library only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Any

from gpumem_tui.memory import ALLOCATED_BUCKETS, Breakdown, Bucket
from gpumem_tui.simulator.allocator.caching import MIN_BLOCK_BYTES
from gpumem_tui.simulator.allocator.rules import Computed, Level, size_bytes_of
from gpumem_tui.step import Phase, RunStage, Site
from gpumem_tui.step.buckets import untagged_bucket

_NEVER = -2
"""Stand-in for the mark of a release that did not come; -1 is the time before the first mark."""

CHECKPOINT = "checkpoint"
"""The part of `Bucket.OTHER` that was loaded from a file of weights and that the program has not made its own.

It may be weights and an optimizer's state alike, so it belongs to neither bucket."""

_INDEX = {bucket: index for index, bucket in enumerate(ALLOCATED_BUCKETS)}


def rounded(size_bytes: int) -> int:
    """Round a request up to the allocator's smallest step. The rest of a block is slack."""
    return -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Mark:
    """`phase` of step `step` begins before event number `event`. Steps count from 1; building is step 0.

    Attributes:
        stage: of the run, where that is more than the phase shows; it may begin or end while the phase continues.
    """

    event: int
    step: int
    phase: Phase
    stage: RunStage | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """The bytes that one site holds of one bucket at a moment."""

    bucket: Bucket
    site: Site
    size_bytes: int
    allocations: int


@dataclass(frozen=True, slots=True)
class BucketPeak:
    """The most that one bucket holds at any moment of the steps; `mark`: the phase and step in which that is first."""

    size_bytes: int
    mark: Mark


@dataclass(frozen=True)
class Timeline:
    """The allocations and releases of a recorded run.

    Attributes:
        events: ``i`` when allocation number i is made, ``-i`` when it is released; allocations are numbered from 1 in
            the order in which they are made.
        sizes: requested bytes of allocation i at ``sizes[i - 1]``.
        buckets: the bucket of allocation i, as an index into `ALLOCATED_BUCKETS`.
        marks: where each phase of each step begins, in order.
        sites: where allocation i comes from, as an index into `site_table`; empty if that was not recorded.
        computed: of a trace, the allocations whose size a rule gives, by number; of no bytes where none are taken.
        emptied: before which events the program gave its cached segments back (`torch.cuda.empty_cache`), in order.
        streams: the stream in whose pool allocation i is, 0 for the default one; empty if all are there.
        completions: (event, allocation) in order, for allocations that other streams use when they are released
            (`Tensor.record_stream`): before which event these are done with it. Until then its memory serves nobody.
        folds: of marks, from one to before another, how often more they followed each other alike before what follows;
            these rounds are left out (see `folding`).
    """

    events: tuple[int, ...]
    sizes: tuple[int, ...]
    buckets: tuple[int, ...]
    marks: tuple[Mark, ...]
    sites: tuple[int, ...] = ()
    site_table: tuple[Site, ...] = ()
    computed: tuple[tuple[int, Computed], ...] = ()
    emptied: tuple[int, ...] = ()
    streams: tuple[int, ...] = ()
    completions: tuple[tuple[int, int], ...] = ()
    folds: tuple[tuple[int, int, int], ...] = ()

    @property
    def steps(self) -> int:
        """The number of the last step that began."""
        return max((mark.step for mark in self.marks), default=0)

    def stream_of(self, number: int) -> int:
        """Return the stream in whose pool an allocation is."""
        return self.streams[number - 1] if self.streams else 0

    @property
    def canonical_events(self) -> tuple[int, ...]:
        """The events with neighbouring releases sorted, which leaves the allocator the same free blocks.

        Runs of one program differ in it: an autograd graph releases its tensors in any order.
        """
        edges = {0, len(self.events), *self.emptied, *(mark.event for mark in self.marks)}
        edges.update(event for event, _ in self.completions)
        found: list[int] = []
        for start, end in pairwise(sorted(edges)):
            for is_release, group in groupby(self.events[start:end], (0).__gt__):
                together = list(group)
                found += sorted(together) if is_release else together
        return tuple(found)

    def follows(self, other: Timeline) -> bool:
        """Return whether another run makes and releases as many allocations in this order; their sizes may differ."""
        return self.events == other.events or self.canonical_events == other.canonical_events

    def is_alike(self, other: Timeline) -> bool:
        """Return whether another run makes and releases allocations of these sizes in this order."""
        return self.sizes == other.sizes and self.follows(other)

    def at_level(self, level: Level) -> Timeline:
        """Return the same run with other sizes than expected, where they are not known or taken for a moment only."""
        other = {number: size.bytes_at(level) for number, size in self.computed}
        sizes = tuple(other.get(number, size) for number, size in enumerate(self.sizes, 1))
        return self if sizes == self.sizes else replace(self, sizes=sizes)

    def with_workspaces(self, sizes: Collection[int]) -> Timeline:
        """Return a recorded run with cuBLAS's workspaces as traces have them: temporary, whoever made them.

        Nothing in a history shows what they are. A thread takes one of each size at its first product and keeps it
        (`getCurrentCUDABlasHandle`, aten/src/ATen/cuda/CublasHandlePool.cpp), and autograd's thread is another than
        the forward's. So they are the first that stay, of those that are not known by name: one of each size that is
        made in backward, and one that is made elsewhere.

        Args:
            sizes: of the workspaces, in bytes.
        """
        kinds = {_INDEX[bucket] for bucket in (Bucket.ACTIVATIONS, Bucket.TEMPORARY, Bucket.OTHER)}
        released = {-number for number in self.events if number < 0}
        buckets, seen = list(self.buckets), set()
        for mark, following in pairwise([*self.marks, Mark(len(self.events), 0, Phase.BUILD)]):
            for index in (number - 1 for number in self.events[mark.event : following.event] if number > 0):
                key = mark.phase is Phase.BACKWARD, self.sizes[index]
                is_kept = key[1] in sizes and index + 1 not in released
                if is_kept and buckets[index] in kinds and key not in seen:
                    seen.add(key)
                    buckets[index] = _INDEX[Bucket.TEMPORARY]
        return replace(self, buckets=tuple(buckets))

    def forward_only(self) -> Timeline:
        """Return the same run with its evaluations and forward passes as what they are where nothing is trained."""
        phases = Phase.FORWARD, Phase.EVALUATION
        marks = [replace(mark, phase=Phase.FORWARD_ONLY) if mark.phase in phases else mark for mark in self.marks]
        return replace(self, marks=tuple(marks))

    def held_after(self, event: int) -> list[Held]:
        """Return what is live after event number `event`, by bucket and site, the largest first."""
        live: set[int] = set()
        for number in self.events[: event + 1]:
            (live.add if number > 0 else live.discard)(abs(number) - 1)
        sizes: dict[tuple[int, int], list[int]] = {}
        for index in live:
            if not self.sizes[index]:
                continue
            sizes.setdefault((self.buckets[index], self.sites[index] if self.sites else -1), []).append(
                rounded(self.sizes[index])
            )
        held = [
            Held(ALLOCATED_BUCKETS[bucket], self.site_table[site] if site >= 0 else Site(), sum(found), len(found))
            for (bucket, site), found in sizes.items()
        ]
        return sorted(held, key=lambda entry: -entry.size_bytes)

    def most_made_in(self, phase: Phase, *buckets: Bucket) -> int:
        """Return the most bytes that are live at once of those that a phase makes of some buckets."""
        kinds = {_INDEX[bucket] for bucket in buckets}
        begins = {mark.event: mark.phase for mark in self.marks}
        made, now, total, most = set[int](), Phase.BUILD, 0, 0
        for position, number in enumerate(self.events):
            now = begins.get(position, now)
            if number > 0 and now is phase and self.buckets[number - 1] in kinds:
                made.add(number)
                total += rounded(self.sizes[number - 1])
                most = max(most, total)
            elif -number in made:
                total -= rounded(self.sizes[-number - 1])
        return most

    def peak_event(self) -> int:
        """Return the event after which most bytes are live, requests rounded up to the allocator's step; -1 if none."""
        live = highest = 0
        found = -1
        for event, number in enumerate(self.events):
            size = rounded(self.sizes[abs(number) - 1])
            live += size if number > 0 else -size
            if live > highest:
                highest, found = live, event
        return found

    def most_live_bytes(self) -> int:
        """Return the most that is ever live, requests rounded up to the allocator's step: a least of the peak."""
        steps = [rounded(size) for size in self.sizes]
        changes = (steps[number - 1] if number > 0 else -steps[-number - 1] for number in self.events)
        return max(accumulate(changes, initial=0))

    def breakdown_after(self, event: int, allocated_bytes: int) -> Breakdown:
        """Return the buckets of what is live after event number `event` (0-based), when the allocator holds so much."""
        return self.breakdowns_after({event: allocated_bytes})[event]

    def breakdowns_after(self, allocated_at: Mapping[int, int]) -> dict[int, Breakdown]:
        """Return the buckets after each of these events, in one pass.

        The allocator's bytes beyond the live ones are slack of unsplit blocks and go to `OTHER`.
        """
        totals = [0] * len(ALLOCATED_BUCKETS)
        other = ALLOCATED_BUCKETS.index(Bucket.OTHER)
        found = {}
        position = 0
        for event in sorted(allocated_at):
            for number in self.events[position : event + 1]:
                index = abs(number) - 1
                size = rounded(self.sizes[index])
                totals[self.buckets[index]] += size if number > 0 else -size
            position = max(position, event + 1)
            with_slack = list(totals)
            with_slack[other] += max(0, allocated_at[event] - sum(totals))
            found[event] = Breakdown(dict(zip(ALLOCATED_BUCKETS, with_slack, strict=True)))
        return found

    def bucket_peaks(self) -> dict[Bucket, BucketPeak]:
        """Return the most that each bucket holds at any moment from the first step on; empty for a run without steps.

        The moments differ, so they sum to more than the allocated peak. A bucket that never holds anything is left out.
        """
        steps = [mark for mark in self.marks if mark.step]
        if not steps:
            return {}
        totals = [0] * len(ALLOCATED_BUCKETS)
        for number in self.events[: steps[0].event]:
            index = abs(number) - 1
            totals[self.buckets[index]] += rounded(self.sizes[index]) if number > 0 else -rounded(self.sizes[index])
        highest = [BucketPeak(total, steps[0]) for total in totals]
        for mark, end in zip(steps, [*(mark.event for mark in steps[1:]), len(self.events)], strict=True):
            for number in self.events[mark.event : end]:
                index = abs(number) - 1
                bucket = self.buckets[index]
                totals[bucket] += rounded(self.sizes[index]) if number > 0 else -rounded(self.sizes[index])
                if totals[bucket] > highest[bucket].size_bytes:
                    highest[bucket] = BucketPeak(totals[bucket], mark)
        return {bucket: one for bucket, one in zip(ALLOCATED_BUCKETS, highest, strict=True) if one.size_bytes}


class TimelineRecorder:
    """Collects a run while it happens; `finish` decides buckets that only all of it tells. `parts`: as `name` said."""

    def __init__(self) -> None:
        self._events: list[int] = []
        self._sizes: list[int] = []
        self._born_in: list[int] = []
        self._recomputed: list[bool] = []
        self._tags: dict[int, Bucket] = {}
        self.parts: dict[int, str] = {}
        self._marks: list[Mark] = []
        self._end: int | None = None
        self._trying: int | None = None
        self._tries: list[tuple[int, int]] = []
        self._sites: list[int] = []
        self._site_numbers: dict[Site, int] = {}
        self._computed_sizes: dict[int, Computed] = {}
        self._from_host: set[int] = set()
        self.made_of_data: set[int] = set()  # numbers of what was made of the program's data alone
        self._loaded: dict[int, str] = {}
        self._emptied: list[int] = []
        self._streams: dict[int, int] = {}
        self._pending: set[int] = set()
        self._completions: list[tuple[int, int]] = []

    @property
    def position(self) -> int:
        """The number of allocations and releases that were recorded."""
        return len(self._events)

    @property
    def allocations(self) -> int:
        """The number of allocations that were recorded, which is the number of the last one."""
        return len(self._sizes)

    def between(self, start: int, end: int) -> list[int]:
        """Return the events from one position to another, as in `Timeline.events`."""
        return self._events[start:end]

    def releases_around(self, position: int, least: int) -> list[int]:
        """Return what is released right before and after a position, from `least` on, with nothing made between."""
        start = end = position
        while start > least and self._events[start - 1] < 0:
            start -= 1
        while end < len(self._events) and self._events[end] < 0:
            end += 1
        return [-event for event in self._events[start:end]]

    def size_bytes(self, number: int) -> int:
        """Return what an allocation asked for."""
        return self._sizes[number - 1]

    def allocate(
        self,
        size: int | Computed,
        recomputed: bool = False,
        site: Site | None = None,
        bucket: Bucket | None = None,
        stream: int = 0,
    ) -> int:
        """Record an allocation of so many bytes, or as a rule states, and return its number.

        Args:
            recomputed: made by a forward repeated in backward.
            bucket: what it is, if known at once.
            stream: in whose pool it is.
        """
        self._end_try()
        if isinstance(size, Computed):
            self._computed_sizes[len(self._sizes) + 1] = size
            self._sizes.append(size.size_bytes)
        else:
            self._sizes.append(size)
        self._sites.append(self._site_numbers.setdefault(site or Site(), len(self._site_numbers)))
        self._born_in.append(len(self._marks) - 1)
        self._recomputed.append(recomputed)
        number = len(self._sizes)
        self._events.append(number)
        if bucket is not None:
            self.tag(number, bucket)
        if stream:
            self._streams[number] = stream
        return number

    def held_bytes(self, numbers: Collection[int]) -> int:
        """Return what those of some allocations that were not released take."""
        released = {-event for event in self._events if event < 0}
        return sum(rounded(self._sizes[number - 1]) for number in numbers if number not in released)

    def place_of(self, number: int) -> str:
        """Return ``file:line`` that made an allocation; empty where unknown."""
        return tuple(self._site_numbers)[self._sites[number - 1]].source

    def rule_of(self, number: int) -> Computed | None:
        """Return the rule by which an allocation has its size, where one gives it."""
        return self._computed_sizes.get(number)

    def allocate_again(self, source: int, size: int | Computed | None = None) -> int:
        """Record an allocation that is as number `source` was, perhaps of another size, and return its number."""
        self._end_try()
        index = source - 1
        number = len(self._sizes) + 1
        self._sizes.append(self._sizes[index] if size is None else size_bytes_of(size))
        self._sites.append(self._sites[index])
        self._recomputed.append(self._recomputed[index])
        self._born_in.append(len(self._marks) - 1)
        self._events.append(number)
        if isinstance(size, Computed):
            self._computed_sizes[number] = size
        elif source in self._computed_sizes:
            self._computed_sizes[number] = self._computed_sizes[source]
        if source in self._tags:
            self._tags[number] = self._tags[source]
        if source in self.parts:
            self.parts[number] = self.parts[source]
        if source in self._streams:
            self._streams[number] = self._streams[source]
        return number

    def repeat(self, events: Sequence[int], sources: Sequence[int]) -> int:
        """Record allocations as `sources` were, and releases of them: as events, numbered from 1.

        Returns how many allocations were recorded before.
        """
        self._end_try()
        before = len(self._sizes)
        self._sizes += [self._sizes[source - 1] for source in sources]
        self._sites += [self._sites[source - 1] for source in sources]
        self._recomputed += [self._recomputed[source - 1] for source in sources]
        self._born_in += [len(self._marks) - 1] * len(sources)
        self._events += [event + before if event > 0 else event - before for event in events]
        known: Any
        for known in (self._computed_sizes, self._tags, self.parts, self._streams):
            if known:
                known.update([(before + n, known[source]) for n, source in enumerate(sources, 1) if source in known])
        return before

    def stream_of(self, number: int) -> int:
        """Return the stream in whose pool an allocation is."""
        return self._streams.get(number, 0)

    def release(self, number: int) -> None:
        """Record the release of an allocation."""
        self._events.append(-number)

    def release_in_use(self, number: int) -> None:
        """Record the release of an allocation that other streams use, to be completed later."""
        self._events.append(-number)
        self._pending.add(number)

    def complete(self, number: int) -> None:
        """Record that other streams are done with an allocation that was released."""
        self._pending.discard(number)
        self._completions.append((len(self._events), number))

    def empty_cache(self) -> None:
        """Record that cached segments are given back here."""
        self._emptied.append(len(self._events))

    def mark(self, step: int, phase: Phase, stage: RunStage | None = None) -> None:
        """State that the run is in `phase` of `step` from here on, and in that stage of the whole."""
        self._marks.append(Mark(len(self._events), step, phase, stage))

    def tag(self, number: int, bucket: Bucket, part: str = "") -> None:
        """Say what an allocation is, and which part of that. Later calls for the same one change nothing."""
        if self._tags.setdefault(number, bucket) is bucket and part:
            self.parts.setdefault(number, part)

    def name(self, number: int, part: str) -> None:
        """Say which part of its bucket an allocation is, whichever that bucket comes to be."""
        self.parts.setdefault(number, part)

    def came_from_host(self, number: int) -> None:
        """State that an allocation holds data that was copied here, unless it is tagged."""
        self._from_host.add(number)

    def is_data(self, number: int) -> bool:
        """Return whether an allocation holds either, as far as known by now."""
        is_known = number in self._from_host or number in self.made_of_data
        return is_known and number not in self._tags and number not in self._loaded

    def came_from_file(self, number: int, source: str) -> None:
        """State that an allocation holds what a line of the program loaded from a checkpoint, unless it is tagged."""
        self._loaded.setdefault(number, source)

    def cut(self) -> None:
        """Note an out-of-memory, before which cached segments are given back.

        If the run fails, what is released while the error travels does not count; else the next allocation ends what
        the program tried.
        """
        self._end = self._trying = len(self._events)
        self.empty_cache()

    def _end_try(self) -> None:
        if self._trying is not None:
            self._tries.append((self._trying, len(self._events)))
            self._trying = None

    @property
    def tries(self) -> tuple[tuple[int, int], ...]:
        """Return before which event memory ran out, and before which the program went on, each time that it did."""
        return tuple(self._tries)

    def finish(self, failed: bool = False) -> Timeline:
        """Return the run so far, or if it failed up to where memory ran out, with every allocation in its bucket.

        Tagged allocations keep their tag, and the rest is as `untagged_bucket` states. Batch data is what came from the
        host, and what was made before a step, held in it and released since. If the run ended while the model was
        built, all that it held are parameters.
        """
        events = tuple(self._events[: self._end] if failed else self._events)
        begun_at = _phases_begun(self._marks)
        released_in = [begun_at[mark] for mark in self._marks_at_release(events)]
        step_of = [*(mark.step for mark in self._marks), 0]
        only_built = all(mark.phase is Phase.BUILD for mark in self._marks)
        last_batch = max((begun_at[at] for at, mark in enumerate(self._marks) if mark.phase is Phase.BATCH), default=-1)
        buckets = []
        by_rule: dict[tuple[int, int, bool, bool], Bucket] = {}
        for number, (made_in, recomputed) in enumerate(zip(self._born_in, self._recomputed, strict=True), 1):
            born_in = begun_at[made_in]
            released = released_in[number]
            case = born_in, released, recomputed, number in self._from_host
            if number in self._tags:
                bucket = self._tags[number]
            elif number in self._loaded:
                bucket = Bucket.OTHER
                self.parts.setdefault(number, CHECKPOINT)
            elif only_built and released == _NEVER and not recomputed:
                bucket = Bucket.PARAMETERS
            elif number in self.made_of_data and (released == _NEVER or step_of[released] > step_of[born_in]):
                bucket = Bucket.BATCH_DATA
            elif case in by_rule:
                bucket = by_rule[case]
            else:
                phase = self._marks[born_in].phase if born_in >= 0 else None
                is_held = released not in (born_in, _NEVER) or (released == _NEVER and born_in == last_batch)
                is_before_step = phase in (Phase.BUILD, Phase.BATCH) and is_held and not only_built
                bucket = by_rule[case] = untagged_bucket(
                    phase,
                    outlives_phase=released != born_in,
                    stays=released == _NEVER,
                    recomputed=recomputed,
                    is_data=(number in self._from_host and not only_built) or is_before_step,
                )
            buckets.append(_INDEX[bucket])
        sites, places = self._sites_with_parts()
        return Timeline(
            events=events,
            sizes=tuple(self._sizes),
            buckets=tuple(buckets),
            marks=tuple(self._marks),
            sites=sites,
            site_table=places,
            computed=tuple(self._computed_sizes.items()),
            emptied=tuple(self._emptied),
            streams=tuple(self.stream_of(number) for number in range(1, len(self._sizes) + 1)) if self._streams else (),
            completions=(*self._completions, *((len(self._events), number) for number in sorted(self._pending))),
        )

    def _sites_with_parts(self) -> tuple[tuple[int, ...], tuple[Site, ...]]:
        """Return by allocation the number of its place, which names its part as well, and the places as they come.

        A place that all its allocations name a part of is not among them: both serve runs of other depths equally well.
        """
        table = tuple(self._site_numbers)
        if not self.parts:
            return tuple(self._sites), table
        places: dict[Site, int] = {}
        known: dict[tuple[int, str, str], int] = {}
        sites = []
        for number, site in enumerate(self._sites, 1):
            part = self.parts.get(number, "")
            key = site, part, self._loaded.get(number, "") if part == CHECKPOINT else ""
            if key not in known:
                place = replace(table[site], part=part, source=key[2] or table[site].source) if part else table[site]
                known[key] = places.setdefault(place, len(places))
            sites.append(known[key])
        return tuple(sites), tuple(places)

    def _marks_at_release(self, events: tuple[int, ...]) -> list[int]:
        """Return by allocation the number of the mark in whose phase it was released."""
        found = [_NEVER] * (len(self._sizes) + 1)
        starts = [0, *(mark.event for mark in self._marks), len(events)]
        for mark, (start, end) in enumerate(pairwise(starts), -1):
            for number in events[start:end]:
                if number < 0:
                    found[-number] = mark
        return found


def _phases_begun(marks: Sequence[Mark]) -> dict[int, int]:
    """Return by number of a mark that of the one with which its phase began, before stages divided it."""
    found = {-1: -1, _NEVER: _NEVER}
    for index, mark in enumerate(marks):
        before = marks[max(0, index - 1)]
        continues = index > 0 and (before.step, before.phase) == (mark.step, mark.phase)
        found[index] = found[index - 1] if continues and (before.stage or mark.stage) else index
    return found
