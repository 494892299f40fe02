"""A recorded run held against a traced one: the first event that differs, and what every difference sums to.

`python -m tests.gpu.against RECORDED TRACED` compares what `torch.cuda.memory._dump_snapshot` wrote on a GPU with what
`gpumem-tui predict --snapshot TRACED` wrote of the same program.

Addresses are the driver's affair, so what is compared is the order of requests and releases and their sizes, rounded as
the smallest block is: some versions of PyTorch write down the request, others the block. A recording may begin
anywhere. Where the two differ they are brought together again at the next stretch that both have, and what is between
is counted; the same event at another place of such a gap is another order and no difference.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpumem_tui.memory import format_bytes
from gpumem_tui.report.tables import largest_first
from gpumem_tui.simulator.allocator.timeline import rounded
from gpumem_tui.snapshots import model
from gpumem_tui.snapshots.model import MemorySnapshot
from gpumem_tui.snapshots.read import read_snapshot
from gpumem_tui.snapshots.states import Places

_ANCHORS = (32, 16, 8, 4)
"""Events that must agree for the two to be taken for the same stretch at the start: as many as can be had."""
_AGREE = 8
"""Events that must agree for them to continue together."""
_NEAR, _FAR = 256, 1 << 16
_MOST_LINES = 20

Key = tuple[bool, int]


@dataclass(frozen=True, slots=True)
class AllocationRequest:
    """An allocation, or a release.

    Attributes:
        size_bytes: rounded up to the smallest block.
        event: its number among all events of its side.
        place: where in the program; empty where unknown.
    """

    is_allocation: bool
    size_bytes: int
    event: int
    place: str

    @property
    def key(self) -> Key:
        """The part of an event that is compared."""
        return self.is_allocation, self.size_bytes


@dataclass(frozen=True)
class Differing:
    """Allocations of one size and place that only one side has.

    Attributes:
        in_file: whether that side is the file.
    """

    in_file: bool
    size_bytes: int
    place: str
    count: int

    @property
    def total_bytes(self) -> int:
        """The bytes of all of them."""
        return self.size_bytes * self.count


@dataclass(frozen=True)
class Comparison:
    """The common part of two runs, and where they differ.

    Attributes:
        file_events, traced_events: how many events of each side were compared, from where they first agree.
        file_start, traced_start: the events at which they do.
        equal: events that agree; `reordered`: that both have, in another order.
        first: the first event of either side that differs; None for a side that has none there.
        differing: allocations that one side has, the most bytes first.
        aligned: False if the two have no stretch in common; all else is then empty.
    """

    aligned: bool
    file_events: int = 0
    traced_events: int = 0
    file_start: int = 0
    traced_start: int = 0
    equal: int = 0
    reordered: int = 0
    first: tuple[AllocationRequest | None, AllocationRequest | None] | None = None
    differing: tuple[Differing, ...] = ()

    def bytes_only(self, *, in_file: bool) -> int:
        """Sum the allocations that only one side has."""
        return sum(one.total_bytes for one in self.differing if one.in_file == in_file)


def requests_of(snapshot: MemorySnapshot, device: int) -> list[AllocationRequest]:
    """List the allocations and releases of a recording, in order."""
    history, places = snapshot.history(device), Places(snapshot)
    return [
        AllocationRequest(
            action == model.ALLOC, rounded(history.sizes[event]), event, places.line(history.stacks[event])
        )
        for event, action in enumerate(history.actions)
        if action in (model.ALLOC, model.FREE_REQUESTED)
    ]


def compare(
    file: Sequence[AllocationRequest], traced: Sequence[AllocationRequest], *, is_whole: bool = False
) -> Comparison:
    """Hold a recording against a trace, from where they first agree to the end of the one that ends first.

    Args:
        is_whole: the recording begins with nothing allocated, as the trace does: compare from the first event.
    """
    start = (0, 0) if is_whole and file and traced else _start([one.key for one in file], [one.key for one in traced])
    if start is None:
        return Comparison(aligned=False)
    walk = _Walk(file, traced, *start)
    walk.go()
    return Comparison(
        aligned=walk.equal > 0,
        file_events=walk.at - start[0],
        traced_events=walk.traced_at - start[1],
        file_start=file[start[0]].event,
        traced_start=traced[start[1]].event,
        equal=walk.equal,
        reordered=walk.reordered,
        first=walk.first,
        differing=walk.differing(),
    )


def _start(file: Sequence[Key], traced: Sequence[Key]) -> tuple[int, int] | None:
    """Find where the two first agree.

    The longest stretch that can be had decides which parts of them are equal, and where both have something before
    it, a shorter one there is the start.
    """
    start: tuple[int, int] | None = None
    for length in _ANCHORS:
        if start is not None and length < _AGREE:
            break
        end, traced_end = (len(file), len(traced)) if start is None else start
        start = _first_stretch(file[:end], traced[:traced_end], length) or start
    return start


def _first_stretch(file: Sequence[Key], traced: Sequence[Key], length: int) -> tuple[int, int] | None:
    """Find the earliest stretch of the file that the trace has too, where the trace continues alike for longest."""
    places: defaultdict[tuple[Key, ...], list[int]] = defaultdict(list)
    for index in range(len(traced) - length + 1):
        places[tuple(traced[index : index + length])].append(index)
    for index in range(len(file) - length + 1):
        found = places.get(tuple(file[index : index + length]))
        if found:
            return index, max(found, key=lambda at: (_common(file, traced, index, at), -at))
    return None


def _common(file: Sequence[Key], traced: Sequence[Key], at: int, traced_at: int) -> int:
    """Count the events that agree from there on."""
    length = 0
    for one, other in zip(file[at:], traced[traced_at:], strict=False):
        if one != other:
            break
        length += 1
    return length


class _Walk:
    """A pass over both runs together."""

    def __init__(
        self, file: Sequence[AllocationRequest], traced: Sequence[AllocationRequest], at: int, traced_at: int
    ) -> None:
        self._file, self._traced = file, traced
        self.at, self.traced_at = at, traced_at
        self.equal = self.reordered = 0
        self.first: tuple[AllocationRequest | None, AllocationRequest | None] | None = None
        self._only: Counter[tuple[bool, int, str]] = Counter()

    def go(self) -> None:
        """Walk to the end of the side that ends first."""
        file, traced = self._file, self._traced
        while self.at < len(file) and self.traced_at < len(traced):
            if file[self.at].key == traced[self.traced_at].key:
                self.equal += 1
                self.at += 1
                self.traced_at += 1
            else:
                self._skip(*self._next_common())

    def differing(self) -> tuple[Differing, ...]:
        """List what only one side has."""
        found = [Differing(in_file, size, place, count) for (in_file, size, place), count in self._only.items()]
        return tuple(sorted(found, key=lambda one: (-one.total_bytes, one.place)))

    def _next_common(self) -> tuple[int, int]:
        """Count the events to pass over on each side until they agree again; all that are left if they never do."""
        reach = _NEAR
        while True:
            found = self._common_within(reach)
            if found is not None:
                return found
            left = len(self._file) - self.at, len(self._traced) - self.traced_at
            if reach >= max(left) or reach >= _FAR:
                return left
            reach *= 4

    def _common_within(self, reach: int) -> tuple[int, int] | None:
        file = [one.key for one in self._file[self.at : self.at + reach + _AGREE]]
        traced = [one.key for one in self._traced[self.traced_at : self.traced_at + reach + _AGREE]]
        places: dict[tuple[Key, ...], int] = {}
        for index in range(len(traced) - _AGREE, -1, -1):
            places[tuple(traced[index : index + _AGREE])] = index
        best: tuple[int, int] | None = None
        for index in range(len(file) - _AGREE + 1):
            if best is not None and index >= sum(best):
                break
            other = places.get(tuple(file[index : index + _AGREE]))
            if other is not None and (best is None or index + other < sum(best)):
                best = index, other
        return best

    def _skip(self, file_count: int, traced_count: int) -> None:
        """Count what is between, but for what both have in another order."""
        file = self._file[self.at : self.at + file_count]
        traced = self._traced[self.traced_at : self.traced_at + traced_count]
        in_file, in_traced = Counter(one.key for one in file), Counter(one.key for one in traced)
        both = in_file & in_traced
        self.reordered += both.total()
        self._count(file, both, in_file=True)
        self._count(traced, both, in_file=False)
        if self.first is None:
            self.first = (file[0] if file else None, traced[0] if traced else None)
        self.at += file_count
        self.traced_at += traced_count

    def _count(self, requests: Sequence[AllocationRequest], both: Counter[Key], *, in_file: bool) -> None:
        left = Counter(both)
        for one in requests:
            if left[one.key] > 0:
                left[one.key] -= 1
            elif one.is_allocation:
                self._only[in_file, one.size_bytes, one.place] += 1


def report(comparison: Comparison) -> Iterator[str]:
    """How a recording differs from a trace, as lines."""
    if not comparison.aligned:
        yield "the file and the trace have no stretch of events in common: another model, batch size or optimizer?"
        return
    yield (
        f"{comparison.file_events:,} allocations and releases of the file, from event {comparison.file_start:,}, "
        f"against {comparison.traced_events:,} of the trace, from event {comparison.traced_start:,}"
    )
    yield f"{comparison.equal:,} agree in order and size, {comparison.reordered:,} come in another order"
    if comparison.first is None:
        yield "first difference: none"
    else:
        file, traced = comparison.first
        yield f"first difference: the file {_request_text(file)}"
        yield f"                  the trace {_request_text(traced)}"
    for in_file, whose in ((True, "only in the file"), (False, "only in the trace")):
        yield f"allocations {whose}: {format_bytes(comparison.bytes_only(in_file=in_file))}"
        yield from largest_first(
            [one for one in comparison.differing if one.in_file == in_file],
            _MOST_LINES,
            lambda one: f"  {one.count:,} of {one.size_bytes:,} bytes, {one.place}",
            lambda rest: f"  {len(rest):,} smaller ones, {sum(one.total_bytes for one in rest):,} bytes",
        )


def _request_text(request: AllocationRequest | None) -> str:
    if request is None:
        return "continues where the other one is again"
    verb = "allocates" if request.is_allocation else "releases"
    return f"{verb} {request.size_bytes:,} bytes at event {request.event:,}, {request.place}"


def main(recorded: Path, traced: Path) -> int:
    """Print the comparison of the first device of each; return 1 where an event differs, else 0."""
    file, trace = read_snapshot(recorded), read_snapshot(traced)
    comparison = compare(requests_of(file, file.devices[0]), requests_of(trace, trace.devices[0]))
    print("\n".join(report(comparison)))
    return 0 if comparison.aligned and comparison.first is None else 1


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
