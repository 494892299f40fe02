"""A simulated run as the CUDA allocator's own history: every event with its address, and the segments at the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpumem_tui.simulator.allocator import CachingAllocator, OutOfMemory
from gpumem_tui.simulator.blocks import Block, Pool
from gpumem_tui.simulator.requests import interrupt, interruptions_of
from gpumem_tui.simulator.settings import AllocatorSettings
from gpumem_tui.simulator.timeline import Timeline

_UNLIMITED = 1 << 60
_FIRST_ADDRESS = 0x7F00_0000_0000
"""About where drivers begin (the recordings): viewers in a browser count exactly up to 2**53 only."""


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the allocator's history.

    Attributes:
        action: as PyTorch names it: ``alloc``, ``free_requested``, ``free_completed``, ``segment_alloc``,
            ``segment_free``, ``segment_map``, ``segment_unmap``, ``oom``.
        address: where; of ``oom``, the bytes that the device has free instead.
        allocation: the number of the allocation that it is about, or that it was made for.
    """

    action: str
    address: int
    size_bytes: int
    stream: int
    allocation: int


@dataclass(frozen=True)
class RecordedSegment:
    """Memory that the allocator holds in one piece, with its blocks in order of address.

    Attributes:
        blocks: each with the number of the allocation that is in it; 0 for a free one, or one that was freed while
            other streams use it.
    """

    address: int
    size_bytes: int
    stream: int
    is_small: bool
    blocks: tuple[tuple[Block, int], ...]


@dataclass(frozen=True)
class Recording:
    """What the allocator did with a timeline.

    Attributes:
        starts: by mark of the timeline, the number of the first event of its phase; as many as were reached.
        fits: False if memory ran out: the last event is then the one that says so.
    """

    timeline: Timeline
    settings: AllocatorSettings
    events: tuple[Event, ...]
    segments: tuple[RecordedSegment, ...]
    starts: tuple[int, ...]
    fits: bool


def record(
    timeline: Timeline,
    capacity_bytes: int | None = None,
    settings: AllocatorSettings | None = None,
    allowed_bytes: int | None = None,
) -> Recording:
    """Run a timeline through the caching allocator, as `replay` does, and keep what the allocator writes down.

    Ends with the last step: what the program releases as it ends is left out, so that the segments at the end are those
    of training.

    Args:
        capacity_bytes: what the device can give; None for no limit.
        allowed_bytes: a memory fraction's limit on reserved bytes; None for none.
    """
    settings = settings or AllocatorSettings()
    allocator = _RecordingAllocator(_UNLIMITED if capacity_bytes is None else capacity_bytes, settings, allowed_bytes)
    live: dict[int, Block] = {}
    starts: list[int] = []
    marks = [mark.event for mark in timeline.marks]
    fits = True
    interruptions = interruptions_of(timeline)
    in_use = {number for _, number in timeline.completions}
    for event, number in enumerate(timeline.events[: _end_of_last_step(timeline)]):
        while interruptions and interruptions[-1][0] <= event:
            interrupt(allocator, interruptions.pop()[1])
        while len(starts) < len(marks) and marks[len(starts)] <= event:
            starts.append(len(allocator.events))
        allocator.allocation = abs(number)
        if number < 0:
            if (block := live.pop(-number, None)) is not None:
                if -number in in_use:
                    allocator.request_free(block, -number)
                else:
                    allocator.free(block)
        elif size_bytes := timeline.sizes[number - 1]:
            try:
                live[number] = allocator.malloc(size_bytes, timeline.stream_of(number))
            except OutOfMemory:
                fits = False
                break
    segments = tuple(_segments([*live.values(), *allocator.pending.values(), *allocator.cached_blocks()], live))
    return Recording(timeline, settings, tuple(allocator.events), segments, tuple(starts), fits)


def _end_of_last_step(timeline: Timeline) -> int:
    """Where, after the last allocation, the first that was there before the last step is released."""
    start = next((mark.event for mark in timeline.marks if mark.step == timeline.marks[-1].step), 0)
    made_before = sum(number > 0 for number in timeline.events[:start])
    end = len(timeline.events)
    for event in range(len(timeline.events) - 1, start - 1, -1):
        number = timeline.events[event]
        if number > 0:
            break
        if -number <= made_before:
            end = event
    return end


class _RecordingAllocator(CachingAllocator):
    """Writes down what `CUDACachingAllocator.cpp` does (`record_trace`), in the same order.

    Attributes:
        allocation: the number of the allocation at hand.
    """

    def __init__(self, capacity_bytes: int, settings: AllocatorSettings, allowed_bytes: int | None) -> None:
        super().__init__(capacity_bytes, settings, allowed_bytes)
        self._lowest_address = self._next_virtual_address = _FIRST_ADDRESS
        self.events: list[Event] = []
        self.allocation = 0

    def malloc(self, size_bytes: int, stream: int = 0) -> Block:
        try:
            block = super().malloc(size_bytes, stream)
        except OutOfMemory:
            device_free = max(0, self.capacity_bytes - self.stats.reserved_bytes)
            self._note("oom", device_free, self.round_size(size_bytes), stream)
            raise
        self._note("alloc", block.address, size_bytes, stream)
        return block

    def free(self, block: Block) -> None:
        address, stream = block.address, block.pool.stream
        self._note("free_requested", address, block.requested_bytes, stream)
        self._note("free_completed", address, block.requested_bytes, stream)
        super().free(block)

    def request_free(self, block: Block, number: int) -> None:
        self._note("free_requested", block.address, block.requested_bytes, block.pool.stream)
        super().request_free(block, number)

    def complete_free(self, number: int) -> None:
        block = self.pending.get(number)
        if block is not None:
            self._note("free_completed", block.address, block.requested_bytes, block.pool.stream, number)
        super().complete_free(number)

    def _take_from_driver(self, pool: Pool, size: int) -> Block | None:
        block = super()._take_from_driver(pool, size)
        if block is not None and not self._expandable:
            self._note("segment_alloc", block.address, block.size_bytes, pool.stream)
        return block

    def _release(self, block: Block) -> None:
        self._note("segment_free", block.address, block.size_bytes, block.pool.stream)
        super()._release(block)

    def _map(self, block: Block, size: int) -> bool:
        address, reserved = block.address, self.stats.reserved_bytes
        is_mapped = super()._map(block, size)
        if is_mapped:
            self._note("segment_map", address, self.stats.reserved_bytes - reserved, block.pool.stream)
        return is_mapped

    def _unmap(self, block: Block) -> None:
        first, last = self._whole_chunks(block)
        if last > first:
            self._note("segment_unmap", first, last - first, block.pool.stream)
        super()._unmap(block)

    def _note(self, action: str, address: int, size_bytes: int, stream: int, allocation: int = 0) -> None:
        self.events.append(Event(action, address, size_bytes, stream, allocation or self.allocation))


def _segments(blocks: list[Block], live: dict[int, Block]) -> Iterator[RecordedSegment]:
    """Runs of blocks with memory behind them, by address (`snapshot` in CUDACachingAllocator.cpp)."""
    numbers = {block.address: number for number, block in live.items()}
    for head in sorted(blocks, key=lambda block: block.address):
        if head.prev is not None and head.prev.mapped:
            continue
        found: list[tuple[Block, int]] = []
        block: Block | None = head
        while block is not None and block.mapped:
            found.append((block, numbers.get(block.address, 0)))
            block = block.next
        size_bytes = sum(block.size_bytes for block, _ in found)
        yield RecordedSegment(head.address, size_bytes, head.pool.stream, head.pool.is_small, tuple(found))
