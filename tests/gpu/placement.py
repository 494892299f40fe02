"""Holds a recorded history against the model of the allocator: same segments, same addresses, same peaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpumem_tui.simulator.allocator.blocks import SMALL_SEGMENT_BYTES, Block, Pool, cut
from gpumem_tui.simulator.allocator.caching import CachingAllocator
from gpumem_tui.simulator.allocator.settings import AllocatorSettings
from tests.gpu.history import History, Segment

_UNLIMITED = 1 << 60


class Differs(Exception):
    """The allocator's model does something else than what was recorded; one line with event, phase and sizes."""


@dataclass(frozen=True, slots=True)
class StartSegment:
    """A segment from before the recording, with the allocations in it by ascending address; the rest is free."""

    address: int
    size_bytes: int
    stream: int
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Placed:
    """The result of a replay that agreed with its recording.

    Attributes:
        requested_bytes, allocated_bytes, reserved_bytes: the highest of the run.
        segments: how many were taken from the driver.
        end_blocks: (address, size in bytes, whether it is in use) of every block at the end, by address.
        end_reserved_bytes: what was reserved then.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    segments: int
    end_blocks: tuple[tuple[int, int, bool], ...]
    end_reserved_bytes: int


def check(history: History, settings: AllocatorSettings | None = None, start: Sequence[StartSegment] = ()) -> Placed:
    """Make every recorded request of the allocator's model, each segment lying where the real one lay.

    Args:
        start: what the allocator held before the first event; empty if the recording begins with the process.

    Raises:
        Differs: a block at another address, or a segment that only one of the two took or gave back.
    """
    allocator = FollowingAllocator(history, settings or AllocatorSettings())
    timeline = history.timeline
    blocks = allocator.begin_with(start)
    for event, number in enumerate(timeline.events):
        allocator.reach(event)
        if number < 0:
            allocator.free(blocks.pop(-number))
            continue
        size_bytes, address = timeline.sizes[number - 1], history.addresses[number - 1]
        block = blocks[number] = allocator.malloc(size_bytes, history.streams[number - 1])
        if block.address != address:
            raise Differs(
                f"{allocator.place}: {size_bytes} bytes lie at {address:#x}, in the model at {block.address:#x}"
            )
        allocator.expect_no_segment()
    allocator.reach(len(timeline.events))
    stats = allocator.stats
    end = [
        (block.address, block.size_bytes, block.allocated) for block in (*blocks.values(), *allocator.cached_blocks())
    ]
    return Placed(
        stats.peak_requested_bytes,
        stats.peak_allocated_bytes,
        stats.peak_reserved_bytes,
        stats.num_device_alloc,
        tuple(sorted(end)),
        stats.reserved_bytes,
    )


class FollowingAllocator(CachingAllocator):
    """Takes segments only where the recording did, at the recorded addresses."""

    def __init__(self, history: History, settings: AllocatorSettings) -> None:
        super().__init__(_UNLIMITED, settings)
        self._history = history
        self._pending = list(reversed(history.segments))
        self._event = 0
        self._released: set[tuple[int, int]] = set()

    @property
    def place(self) -> str:
        """The event at hand, in words."""
        marks = [mark for mark in self._history.timeline.marks if mark.event <= self._event]
        return f"event {self._event}" + (f" (step {marks[-1].step}, {marks[-1].phase.value})" if marks else "")

    def begin_with(self, segments: Sequence[StartSegment]) -> dict[int, Block]:
        """Hold these segments. Returns the blocks in use, by allocation number."""
        blocks: dict[int, Block] = {}
        for segment in segments:
            key = (segment.stream, segment.size_bytes == SMALL_SEGMENT_BYTES)
            pool = self._pools.get(key) or self._new_pool(*key)
            self._reserve(segment.size_bytes)
            rest = Block(segment.address, segment.size_bytes, pool)
            for number in segment.numbers:
                address, size_bytes = self._history.addresses[number - 1], self._history.timeline.sizes[number - 1]
                if address > rest.address:
                    free, rest = rest, cut(rest, address - rest.address)
                    pool.insert(free)
                block, block.allocated, block.requested_bytes = rest, True, size_bytes
                self.stats.allocated_bytes += size_bytes
                self.stats.requested_bytes += size_bytes
                blocks[number] = block
                if size_bytes == block.size_bytes:
                    break
                rest = cut(block, size_bytes)
            else:
                pool.insert(rest)
        return blocks

    def reach(self, event: int) -> None:
        """Continue to an event; what the recording gave back before it, the model gives back too."""
        self._event = event
        given_back = set()
        while self._pending and self._pending[-1].event == event and self._pending[-1].size_bytes < 0:
            segment = self._pending.pop()
            given_back.add((segment.address, -segment.size_bytes))
        if given_back:
            self._released = set()
            self.empty_cache()
            if self._released != given_back:
                raise Differs(
                    f"{self.place}: {len(given_back)} segments given back, by the model {len(self._released)}"
                )

    def expect_no_segment(self) -> None:
        """After an event: the model took every segment that the recording took for it."""
        if self._pending and self._pending[-1].event == self._event:
            raise Differs(
                f"{self.place}: a segment of {self._pending[-1].size_bytes} bytes that the model did not take"
            )

    def _new_range(self, size_bytes: int) -> int:
        recorded = self._pending[-1] if self._pending else Segment(-1, 0, 0, 0)
        if recorded.event != self._event:
            raise Differs(f"{self.place}: the model took a segment of {size_bytes} bytes that was not recorded")
        if recorded.size_bytes != size_bytes:
            raise Differs(f"{self.place}: a segment of {recorded.size_bytes} bytes, in the model {size_bytes}")
        self._pending.pop()
        return recorded.address

    def _release(self, block: Block) -> None:
        self._released.add((block.address, block.size_bytes))
        super()._release(block)


class HistoryKeepingAllocator(CachingAllocator):
    """Keeps entries as `torch.cuda.memory._snapshot()` has them in ``device_traces``."""

    def __init__(self, capacity_bytes: int, settings: AllocatorSettings | None = None) -> None:
        super().__init__(capacity_bytes, settings)
        self.entries: list[dict[str, Any]] = []

    def malloc(self, size_bytes: int, stream: int = 0) -> Block:
        block = super().malloc(size_bytes, stream)
        self._note("alloc", block.address, size_bytes, stream)
        return block

    def free(self, block: Block) -> None:
        self._note("free_requested", block.address, block.requested_bytes, block.pool.stream)
        super().free(block)

    def _take_from_driver(self, pool: Pool, size: int) -> Block | None:
        block = super()._take_from_driver(pool, size)
        if block is not None:
            self._note("segment_alloc", block.address, block.size_bytes, pool.stream)
        return block

    def _release(self, block: Block) -> None:
        self._note("segment_free", block.address, block.size_bytes, block.pool.stream)
        super()._release(block)

    def _note(self, action: str, address: int, size_bytes: int, stream: int) -> None:
        self.entries.append({"action": action, "addr": address, "size": size_bytes, "stream": stream})
