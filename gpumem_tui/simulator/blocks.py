"""What the caching allocator keeps: blocks, the pools of free ones, and statistics. Standard library only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

_ADDRESS_BITS = 80


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
    """A run of bytes within a segment: in use, free, or (expandable segments) without memory behind it.

    `requested_bytes` is set while it is in use; `freed_at` and `key`, its pool's, while it is free.
    """

    __slots__ = (
        "address",
        "allocated",
        "freed_at",
        "key",
        "mapped",
        "next",
        "pool",
        "prev",
        "requested_bytes",
        "size_bytes",
    )

    requested_bytes: int
    freed_at: int
    key: int

    def __init__(
        self, address: int, size_bytes: int, pool: Pool, prev: Block | None = None, following: Block | None = None
    ) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.pool = pool
        self.allocated = False
        self.mapped = True
        self.prev = prev
        self.next = following

    @property
    def is_split(self) -> bool:
        """True if this block shares its segment with others."""
        return self.prev is not None or self.next is not None


class Pool:
    """The free blocks of one stream and size class, a sequence in best-fit order: by size, then by address.

    Attributes:
        least_rest_bytes: a block is split if at least this would be left of it.
        unmapped: runs without memory behind them, by address (expandable segments).
    """

    __slots__ = ("_blocks", "_keys", "is_small", "least_rest_bytes", "stream", "unmapped")

    def __init__(self, stream: int, is_small: bool, least_rest_bytes: int) -> None:
        self.stream = stream
        self.is_small = is_small
        self.least_rest_bytes = least_rest_bytes
        self.unmapped: list[Block] = []
        self._keys: list[int] = []  # size and address in one number: a replay's time goes into comparing these
        self._blocks: list[Block] = []  # each at the index of its key

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> Block:
        return self._blocks[index]

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def insert(self, block: Block, now: int) -> None:
        """Add a block that became free at `now`."""
        block.freed_at = now
        block.key = key = block.size_bytes << _ADDRESS_BITS | block.address
        index = bisect_left(self._keys, key)
        self._keys.insert(index, key)
        self._blocks.insert(index, block)

    def remove(self, block: Block) -> None:
        """Take a free block out."""
        index = bisect_left(self._keys, block.key)
        assert self._keys[index] == block.key, "a free block is missing from its pool"
        del self._keys[index]
        del self._blocks[index]

    def first_of(self, size: int) -> int:
        """The index of the first block of at least `size` bytes; the pool's length if there is none."""
        return bisect_left(self._keys, size << _ADDRESS_BITS)

    def take(self, size: int) -> Block | None:
        """Take out the smallest block that is large enough, lowest address first."""
        keys = self._keys
        index = bisect_left(keys, size << _ADDRESS_BITS)
        if index == len(keys):
            return None
        del keys[index]
        return self._blocks.pop(index)


def cut(block: Block, size_bytes: int) -> Block:
    """Divide a block after `size_bytes`, and return the rest."""
    following = block.next
    rest = block.next = Block(block.address + size_bytes, block.size_bytes - size_bytes, block.pool, block, following)
    if following is not None:
        following.prev = rest
    block.size_bytes = size_bytes
    return rest


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
