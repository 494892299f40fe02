"""What the caching allocator keeps: blocks, the pools of free ones, and statistics. Standard library only."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """Running statistics, each named as in `torch.cuda.memory_stats` (``allocated_bytes.all.current`` …)."""

    requested_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    inactive_split_bytes: int = 0
    peak_requested_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    peak_inactive_split_bytes: int = 0
    num_alloc_retries: int = 0
    num_ooms: int = 0
    num_device_alloc: int = 0
    num_device_free: int = 0

    @property
    def active_bytes(self) -> int:
        """Bytes in active blocks. Equal to allocated: no block waits for another stream here."""
        return self.allocated_bytes

    def reset_peaks(self) -> None:
        """Start the peaks anew from the current values, like `torch.cuda.reset_peak_memory_stats`."""
        self.peak_requested_bytes = self.requested_bytes
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes
        self.peak_inactive_split_bytes = self.inactive_split_bytes


class Block:
    """A run of bytes within a segment: in use, free, or (expandable segments) without memory behind it."""

    __slots__ = (
        "address",
        "allocated",
        "freed_at",
        "mapped",
        "next",
        "pool",
        "prev",
        "requested_bytes",
        "size_bytes",
    )

    def __init__(self, address: int, size_bytes: int, pool: Pool) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.requested_bytes = 0
        self.pool = pool
        self.allocated = False
        self.mapped = True
        self.freed_at = 0
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def is_split(self) -> bool:
        """True if this block shares its segment with others."""
        return self.prev is not None or self.next is not None


class Pool:
    """The free blocks of one stream and size class, ordered by (size, address) for best fit."""

    __slots__ = ("blocks", "free", "is_small", "stream", "unmapped")

    def __init__(self, stream: int, is_small: bool) -> None:
        self.stream = stream
        self.is_small = is_small
        self.free: list[tuple[int, int]] = []
        self.blocks: dict[int, Block] = {}
        self.unmapped: list[Block] = []

    def insert(self, block: Block) -> None:
        insort(self.free, (block.size_bytes, block.address))
        self.blocks[block.address] = block

    def remove(self, block: Block) -> None:
        key = (block.size_bytes, block.address)
        index = bisect_left(self.free, key)
        assert self.free[index] == key, "a free block is missing from its pool"
        del self.free[index]
        del self.blocks[block.address]

    def at_least(self, size_bytes: int) -> int:
        """Index of the smallest free block of at least this size."""
        return bisect_left(self.free, (size_bytes, 0))


def absorb(block: Block, neighbour: Block) -> None:
    """Extend `block` over an adjacent block, which then no longer exists."""
    if neighbour is block.prev:
        block.address = neighbour.address
        block.prev = neighbour.prev
        if block.prev is not None:
            block.prev.next = block
    else:
        block.next = neighbour.next
        if block.next is not None:
            block.next.prev = block
    block.size_bytes += neighbour.size_bytes
