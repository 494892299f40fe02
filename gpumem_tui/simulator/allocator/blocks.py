"""The caching allocator's state: blocks, the pools of free ones, and statistics. Standard library only."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpumem_tui.memory import MIB

SMALL_SEGMENT_BYTES = 2 * MIB
"""kSmallBuffer in c10/core/AllocatorConfig.h."""


_PEAKS = ("requested", "allocated", "active", "reserved", "inactive_split")


@dataclass(slots=True)
class Stats:
    """Running statistics, each named as in `torch.cuda.memory_stats` (``allocated_bytes.all.current`` …).

    Attributes:
        pending_bytes: what was freed while other streams use it; with what is allocated, the active bytes.
    """

    requested_bytes: int = 0
    allocated_bytes: int = 0
    pending_bytes: int = 0
    reserved_bytes: int = 0
    inactive_split_bytes: int = 0
    peak_requested_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_active_bytes: int = 0
    peak_reserved_bytes: int = 0
    peak_inactive_split_bytes: int = 0
    num_alloc_retries: int = 0
    num_ooms: int = 0
    num_device_alloc: int = 0
    num_device_free: int = 0

    @property
    def active_bytes(self) -> int:
        """The bytes that are allocated, or freed while other streams use them."""
        return self.allocated_bytes + self.pending_bytes

    @property
    def peaks(self) -> tuple[int, ...]:
        """Return the peaks, in the order of `_PEAKS`."""
        return tuple(getattr(self, f"peak_{name}_bytes") for name in _PEAKS)

    @property
    def current(self) -> tuple[int, ...]:
        """Return what counts now, in the order of `_PEAKS`."""
        return tuple(getattr(self, f"{name}_bytes") for name in _PEAKS)

    def raise_peaks(self, others: Sequence[int]) -> None:
        """Have each peak be at least another one, in the order of `_PEAKS`."""
        for name, other in zip(_PEAKS, others, strict=True):
            setattr(self, f"peak_{name}_bytes", max(getattr(self, f"peak_{name}_bytes"), other))

    def reset_peaks(self) -> None:
        """Start the peaks anew from the current values, like `torch.cuda.reset_peak_memory_stats`."""
        self.peak_requested_bytes = self.requested_bytes
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_active_bytes = self.active_bytes
        self.peak_reserved_bytes = self.reserved_bytes
        self.peak_inactive_split_bytes = self.inactive_split_bytes


class Block:
    """A run of bytes within a segment: in use, free, or (expandable segments) without memory behind it.

    `requested_bytes` is set while it is in use, `freed_at` once it was given back.
    """

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

    requested_bytes: int
    freed_at: int

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
    """The free blocks of one stream and size class, in best-fit order: by size, then by address.

    Kept by size, since a program asks for few sizes again and again, and finds its own freed blocks.

    Attributes:
        least_rest_bytes: a block is split if at least this would be left of it.
        unmapped: runs without memory behind them, by address (expandable segments).
    """

    __slots__ = ("_addresses", "_blocks", "_sizes", "is_small", "least_rest_bytes", "stream", "unmapped")

    def __init__(self, stream: int, is_small: bool, least_rest_bytes: int) -> None:
        self.stream = stream
        self.is_small = is_small
        self.least_rest_bytes = least_rest_bytes
        self.unmapped: list[Block] = []
        self._sizes: list[int] = []  # ascending; one that is used up stays until a search comes across it
        self._addresses: dict[int, list[int]] = {}  # by size, ascending
        self._blocks: dict[int, Block] = {}  # by address

    def __iter__(self) -> Iterator[Block]:
        return self.at_least(0)

    def at_least(self, size: int) -> Iterator[Block]:
        """Yield the blocks of `size` bytes and more, in order. The pool must not change meanwhile."""
        index = bisect_left(self._sizes, size)
        while index < len(self._sizes):
            if addresses := self._addresses[self._sizes[index]]:
                index += 1
                for address in addresses:
                    yield self._blocks[address]
            else:
                del self._addresses[self._sizes.pop(index)]

    def addresses(self) -> tuple[tuple[int, ...], ...]:
        """Return the addresses of the blocks, for each size by itself, with the size before them."""
        found = self._addresses
        return tuple((size, *found[size]) for size in self._sizes if found[size])

    def insert(self, block: Block) -> None:
        """Add a block that became free."""
        address, size = block.address, block.size_bytes
        self._blocks[address] = block
        addresses = self._addresses.get(size)
        if addresses is None:
            self._addresses[size] = [address]
            insort(self._sizes, size)
        else:
            insort(addresses, address)

    def remove(self, block: Block) -> None:
        """Take a free block out.

        Raises:
            KeyError: it is not in the pool.
        """
        del self._blocks[block.address]
        addresses = self._addresses[block.size_bytes]
        del addresses[bisect_left(addresses, block.address)]

    def carve(self, places: Iterable[tuple[int, int]]) -> Iterator[Block]:
        """Take out the block at each address with so many bytes, of the free one that it is in."""
        starts = sorted(self._blocks)
        for address, size in places:
            block = self._blocks[starts[bisect_right(starts, address) - 1]]
            self.remove(block)
            if block.address < address:
                before, block = block, cut(block, address - block.address)
                self.insert(before)
            else:
                starts.remove(address)
            if block.size_bytes > size:
                rest = cut(block, size)
                self.insert(rest)
                insort(starts, rest.address)
            yield block

    def take(self, size: int) -> Block | None:
        """Take out the smallest block that is large enough, lowest address first."""
        addresses = self._addresses.get(size)
        if not addresses:
            index = bisect_left(self._sizes, size)
            while index < len(self._sizes) and not (addresses := self._addresses[self._sizes[index]]):
                del self._addresses[self._sizes.pop(index)]
        return self._blocks.pop(addresses.pop(0)) if addresses else None


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
