"""A snapshot taken apart, device by device: memory over time, what the peak consists of, how it is laid out."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpumem_tui.memory import format_bytes
from gpumem_tui.snapshots import model
from gpumem_tui.snapshots.fragmentation import FailedRequest, out_of_memory
from gpumem_tui.snapshots.model import EventHistory, MemorySnapshot, Segment, SnapshotBlock
from gpumem_tui.snapshots.pickles import Progress
from gpumem_tui.snapshots.states import BlockState, Places, Rules, first_state, frame_text, last_state
from gpumem_tui.step import RunStage

_POINTS = 600
"""Points of the timeline: as many as a wide screen has columns, times a few."""
_MOST_OOMS = 20
_MOST_MARKS = 400
_MOST_FRAMES = 60
_REPORT_EVENTS = 50_000
_TRAINS = RunStage.TRAIN.value


@dataclass(frozen=True, slots=True)
class Point:
    """The highest moment of a stretch of events.

    Attributes:
        by_category: the allocated bytes divided as `Analysis.categories`.
    """

    event: int
    allocated_bytes: int
    reserved_bytes: int
    by_category: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """The memory that one place, category or stack holds at the peak.

    Attributes:
        categories: its bytes by category, the largest first.
        frames: of a stack, the innermost first; else empty.
    """

    name: str
    size_bytes: int
    blocks: int
    categories: tuple[tuple[str, int], ...] = ()
    frames: tuple[str, ...] = ()


@dataclass(frozen=True)
class Analysis:
    """The analysis of one device of a snapshot.

    Attributes:
        duration_s: from the first event to the last; None where the file has no times.
        peak_event: after which most bytes are allocated; -1 for before the first.
        end_allocated_bytes, end_reserved_bytes: when the snapshot was taken; `end_by_line`: what was held then.
        difference_bytes: what the file's end has beyond what its events lead to: 0 unless the file lacks events.
        categories_from: whether the file names categories, or stacks tell them.
        segments: when the snapshot was taken, the largest first.
        marks: annotations, each at the number of the event that follows.
        stages: of the run, by the functions on the stacks: the most that was allocated as one allocated, and the event;
            empty where they name none but training.
        is_recorded: whether there are events; else the peak is what was held as the file was written.
        missing: what the file lacks and how to record it, a sentence each.
    """

    device: int
    events: int
    allocations: int
    duration_s: float | None
    peak_event: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    end_allocated_bytes: int
    end_reserved_bytes: int
    difference_bytes: int
    categories: tuple[str, ...]
    categories_from: str
    timeline: tuple[Point, ...]
    by_category: tuple[Part, ...]
    by_line: tuple[Part, ...]
    by_stack: tuple[Part, ...]
    end_by_line: tuple[Part, ...]
    segments: tuple[Segment, ...]
    ooms: tuple[FailedRequest, ...]
    marks: tuple[tuple[int, str], ...]
    stages: tuple[tuple[str, int, int], ...]
    is_recorded: bool
    missing: tuple[str, ...]

    @property
    def stranded_bytes(self) -> int:
        """The bytes that are free, but between blocks in use: nobody but this process can have them."""
        return sum(segment.free_bytes for segment in self.segments if segment.taken)

    @property
    def returnable_bytes(self) -> int:
        """The bytes in wholly free segments, which `torch.cuda.empty_cache()` gives back."""
        return sum(segment.free_bytes for segment in self.segments if not segment.taken)

    @property
    def largest_free_bytes(self) -> int:
        """The largest request that would be served without asking the driver."""
        return max((segment.largest_free_bytes for segment in self.segments), default=0)

    @property
    def notes(self) -> tuple[str, ...]:
        """The facts to know about the file besides the answer, which has the first of `missing` without events."""
        return *self._gap(), *self.missing[0 if self.is_recorded else 1 :]

    def _gap(self) -> Iterator[str]:
        """Yield the meaning of `difference_bytes` in words, if it has one."""
        if not self.difference_bytes:
            return
        size = format_bytes(abs(self.difference_bytes))
        way = "less" if self.difference_bytes > 0 else "more"
        yield f"the events lead to {size} {way} than the file has at its end: its history is not whole"


def analyse(snapshot: MemorySnapshot, device: int, progress: Progress = lambda _: None) -> Analysis:
    """Take a device of a snapshot apart; `progress` gets the share that is done."""
    history, places, rules = snapshot.history(device), Places(snapshot), Rules(snapshot)
    course = _Course(first_state(snapshot, device), history, places, rules, progress)
    course.run()
    at_peak = first_state(snapshot, device)
    for _ in range(course.peak_event + 1):
        at_peak.step()
    held = [block for block in at_peak.held.values() if block.is_allocated]
    segments = [segment for segment in snapshot.segments if segment.device == device]
    allocated = sum(block.size_bytes for segment in segments for block in segment.blocks if block.is_allocated)
    end_held = [block for block in last_state(snapshot, device)[0].values() if block.is_allocated]
    times = [time for time in (history.times_us[:1] + history.times_us[-1:]) if time]
    return Analysis(
        device=device,
        events=len(history),
        allocations=history.actions.count(model.ALLOC),
        duration_s=(times[1] - times[0]) / 1e6 if len(times) == 2 and times[1] > times[0] else None,
        peak_event=course.peak_event,
        peak_allocated_bytes=course.peak_bytes,
        peak_reserved_bytes=course.peak_reserved_bytes,
        end_allocated_bytes=allocated,
        end_reserved_bytes=sum(segment.size_bytes for segment in segments),
        difference_bytes=allocated - course.state.allocated_bytes,
        categories=tuple(course.categories),
        categories_from="the file" if places.are_categories_named else "the stacks",
        timeline=tuple(course.points()),
        by_category=_parts(held, places, places.category),
        by_line=_parts(held, places, places.place),
        by_stack=_stacks(held, places),
        end_by_line=_parts(end_held, places, places.place),
        segments=tuple(sorted(segments, key=lambda segment: (-segment.size_bytes, segment.address))),
        ooms=tuple(course.ooms),
        marks=tuple(_marks(snapshot, device)),
        stages=tuple((name, *peak) for name, peak in course.stages.items()) if {*course.stages} - {_TRAINS} else (),
        is_recorded=history.is_recorded,
        missing=tuple(_missing(snapshot, device)),
    )


_RECORD = "call torch.cuda.memory._record_memory_history() before the model is made"


def _missing(snapshot: MemorySnapshot, device: int) -> Iterator[str]:
    """Yield what was not recorded (the arguments of `_record_memory_history` in torch/cuda/memory.py)."""
    history = snapshot.history(device)
    has_stacks = len(snapshot.stacks) > 1
    if not history.is_recorded and not any(segment.device == device for segment in snapshot.segments):
        yield f"the file holds no memory and no events: {_RECORD}, and write the file while the model is on the GPU"
    elif not history.is_recorded and not has_stacks:
        yield f"no history was recorded, so the peak and the source lines are unknown: {_RECORD}"
    elif not history.is_recorded:
        yield (
            "no events were recorded (enabled='state'), so the peak is unknown: "
            "call torch.cuda.memory._record_memory_history(enabled='all')"
        )
    elif not has_stacks and snapshot.kind != "reduced JSON":
        yield (
            "no stacks were recorded, so source lines are unknown: "
            "call torch.cuda.memory._record_memory_history(context='all')"
        )
    if snapshot.unused_devices:
        names = ", ".join(f"cuda:{number}" for number in snapshot.unused_devices)
        yield f"nothing of {names} is in the file: no memory held, no events"


class _Course:
    """A pass over all events."""

    def __init__(
        self, state: BlockState, history: EventHistory, places: Places, rules: Rules, progress: Progress
    ) -> None:
        self.state = state
        self._history, self._places, self._rules, self._progress = history, places, rules, progress
        self.categories: dict[str, int] = {}
        self._totals: list[int] = []
        for block in state.held.values():
            self._count(block, 1)
        self.peak_event = -1
        self.peak_bytes, self.peak_reserved_bytes = state.allocated_bytes, state.reserved_bytes
        self.ooms: list[FailedRequest] = []
        self.stages: dict[str, tuple[int, int]] = {}
        self._points: list[Point] = [self._point()]

    def run(self) -> None:
        """Walk up to the last event."""
        state, history, total = self.state, self._history, len(self._history)
        filled = -1
        for event in range(total):
            if not event % _REPORT_EVENTS:
                self._progress(event / total)
            self._do()
            allocated = state.allocated_bytes
            if allocated > self.peak_bytes:
                self.peak_bytes, self.peak_event = allocated, event
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, state.reserved_bytes)
            if history.actions[event] == model.ALLOC:
                stage = self._places.stage(history.stacks[event])
                if allocated > self.stages.get(stage, (-1, 0))[0]:
                    self.stages[stage] = allocated, event
            if event * _POINTS // total != filled:
                filled = event * _POINTS // total
                self._points.append(self._point())
            elif allocated > self._points[-1].allocated_bytes:
                self._points[-1] = self._point()
            if history.actions[event] == model.OOM and len(self.ooms) < _MOST_OOMS:
                self.ooms.append(out_of_memory(state, history, self._rules, self._places))
        self._progress(1.0)

    def _do(self) -> None:
        """Apply the next event, and update the categories."""
        state, address = self.state, self._history.addresses[self.state.event + 1]
        action = self._history.actions[state.event + 1]
        if action > model.FREE_COMPLETED:
            state.step()
            return
        before = state.held.get(address)
        if before is not None:
            self._count(before, -1)
        state.step()
        after = state.held.get(address)
        if after is not None:
            self._count(after, 1)

    def _count(self, block: SnapshotBlock, sign: int) -> None:
        if not block.is_allocated:
            return
        name = self._places.category(block)
        index = self.categories.setdefault(name, len(self.categories))
        if index == len(self._totals):
            self._totals.append(0)
        self._totals[index] += sign * block.size_bytes

    def _point(self) -> Point:
        state = self.state
        return Point(state.event, state.allocated_bytes, state.reserved_bytes, tuple(self._totals))

    def points(self) -> Iterator[Point]:
        """Yield the timeline; categories that came later count as 0 before."""
        for point in self._points:
            missing = len(self.categories) - len(point.by_category)
            yield Point(point.event, point.allocated_bytes, point.reserved_bytes, (*point.by_category, *[0] * missing))


def _parts(
    held: Iterable[SnapshotBlock], places: Places, name_of: Callable[[SnapshotBlock], Hashable]
) -> tuple[Part, ...]:
    """Sum what is held, by name, the largest first."""
    found: defaultdict[Hashable, list[SnapshotBlock]] = defaultdict(list)
    for block in held:
        found[name_of(block)].append(block)
    parts = [_part(str(name), blocks, places) for name, blocks in found.items()]
    return tuple(sorted(parts, key=lambda part: (-part.size_bytes, part.name)))


def _part(name: str, blocks: Sequence[SnapshotBlock], places: Places, frames: tuple[str, ...] = ()) -> Part:
    categories: Counter[str] = Counter()
    for block in blocks:
        categories[places.category(block)] += block.size_bytes
    return Part(name, categories.total(), len(blocks), tuple(categories.most_common()), frames)


def _stacks(held: Iterable[SnapshotBlock], places: Places) -> tuple[Part, ...]:
    found: defaultdict[tuple[int, str], list[SnapshotBlock]] = defaultdict(list)
    for block in held:
        found[block.stack, places.place(block)].append(block)
    parts = [
        _part(
            " ← ".join(dict.fromkeys(filter(None, (places.operator(stack), place)))),
            blocks,
            places,
            tuple(frame_text(frame) for frame in places.frames(stack)[:_MOST_FRAMES]),
        )
        for (stack, place), blocks in found.items()
    ]
    return tuple(sorted(parts, key=lambda part: (-part.size_bytes, part.name)))


def _marks(snapshot: MemorySnapshot, device: int) -> Iterator[tuple[int, str]]:
    """Yield what the program said that begins, each with the number of the first event from then on."""
    times = snapshot.history(device).times_us
    for note in snapshot.annotations[:_MOST_MARKS]:
        if note.stage == "START" and note.device == device:
            yield bisect_left(times, note.time_us), note.name
