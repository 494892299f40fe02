"""A timeline's requests to an allocator beyond those on one stream. Standard library only."""

from __future__ import annotations

from itertools import repeat

from gpumem_tui.simulator.allocator import CachingAllocator
from gpumem_tui.simulator.blocks import Block
from gpumem_tui.simulator.timeline import Timeline

_EMPTY_CACHE = 0
"""Among the numbers of allocations, which count from 1."""


def interruptions_of(timeline: Timeline) -> list[tuple[int, int]]:
    """What happens between events, the last first: before which event, and what (see `interrupt`)."""
    return sorted([*((event, _EMPTY_CACHE) for event in timeline.emptied), *timeline.completions], reverse=True)


def interrupt(allocator: CachingAllocator, number: int) -> None:
    """Complete the release of an allocation, or empty the cache."""
    if number == _EMPTY_CACHE:
        allocator.empty_cache()
    else:
        allocator.complete_free(number)


class RequestsOnStreams:
    """What a timeline asks of an allocator, on each allocation's stream; its allocations are numbered as they are made.

    Apart, since most programs know one stream only, and their replays are to be fast.
    """

    def __init__(self, allocator: CachingAllocator, timeline: Timeline) -> None:
        self._allocator = allocator
        streams = timeline.streams or repeat(0)
        self._requests = (
            (number, stream)
            for number, (size, stream) in enumerate(zip(timeline.sizes, streams, strict=False), 1)
            if size
        )
        self._in_use = {number for _, number in timeline.completions}
        self._numbers: dict[Block, int] = {}

    def malloc(self, size_bytes: int) -> Block:
        number, stream = next(self._requests)
        block = self._allocator.malloc(size_bytes, stream)
        if number in self._in_use:
            self._numbers[block] = number
        return block

    def free(self, block: Block) -> None:
        number = self._numbers.pop(block, 0)
        if number:
            self._allocator.request_free(block, number)
        else:
            self._allocator.free(block)
