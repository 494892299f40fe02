"""Expandable segments: virtual ranges in which the allocator maps memory as it is needed (`ExpandableSegment`).

Follows PyTorch's c10/cuda/CUDACachingAllocator.cpp, as `allocator` does. Standard library only.
"""

from __future__ import annotations

from bisect import insort

from gpumem_tui.simulator.blocks import SMALL_SEGMENT_BYTES, Block, Pool, Stats, absorb, cut
from gpumem_tui.simulator.settings import AllocatorSettings

_FIRST_ADDRESS = 1 << 62


class ExpandableSegments:
    """The part of `CachingAllocator` that grows and shrinks expandable segments.

    Args:
        capacity_bytes: what the driver can hand out.
    """

    def __init__(self, capacity_bytes: int, settings: AllocatorSettings) -> None:
        self.capacity_bytes = capacity_bytes
        self.settings = settings
        self.stats = Stats()
        self._next_virtual_address = _FIRST_ADDRESS

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """Map more of the pool's virtual range; None if the device has no memory left for it."""
        block = self._growable(pool, size)
        if not block.mapped and not self._map(block, min(block.size_bytes, size)):
            return None
        while block.size_bytes < size:
            after = block.next
            assert after is not None
            if not self._map(after, min(size - block.size_bytes, after.size_bytes)):
                return None
            block = after
        pool.remove(block)
        return block

    def _growable(self, pool: Pool, size: int) -> Block:
        """The first run of free and unmapped blocks with room for `size`, or a new virtual range."""
        for unmapped in pool.unmapped:
            before = unmapped.prev
            start = before if before is not None and not before.allocated else unmapped
            room, block = 0, start
            while room < size:
                room += block.size_bytes
                if block.next is None or block.next.allocated:
                    break
                block = block.next
            if room >= size:
                return start
        granule = self._expandable_granule(pool)
        virtual_bytes = (self.capacity_bytes + self.capacity_bytes // 8 + granule) // granule * granule
        fresh = Block(self._next_virtual_address, virtual_bytes, pool)
        fresh.mapped = False
        self._next_virtual_address += virtual_bytes
        self._insert_unmapped(pool, fresh)
        return fresh

    def _expandable_granule(self, pool: Pool) -> int:
        return SMALL_SEGMENT_BYTES if pool.is_small else self.settings.large_segment_bytes

    def _map(self, block: Block, size: int) -> bool:
        """Put memory behind the first `size` bytes of an unmapped block, rounded up to whole chunks."""
        pool = block.pool
        granule = self._expandable_granule(pool)
        mapped_bytes = min(-(-size // granule) * granule, block.size_bytes)
        if self.stats.reserved_bytes + mapped_bytes > self.capacity_bytes:
            return False
        pool.unmapped.remove(block)
        if mapped_bytes < block.size_bytes:
            rest = cut(block, mapped_bytes)
            rest.mapped = False
            self._insert_unmapped(pool, rest)
        block.mapped = True
        for neighbour in (block.prev, block.next):
            if neighbour is not None and not neighbour.allocated and neighbour.mapped:
                pool.remove(neighbour)
                absorb(block, neighbour)
        pool.insert(block)
        self._reserve(mapped_bytes)
        self.stats.num_device_alloc += 1
        return True

    def _unmap(self, block: Block) -> None:
        """Take the memory away from the whole chunks inside a free block."""
        pool = block.pool
        first, last = self._whole_chunks(block)
        if last <= first:
            return
        pool.remove(block)
        if last < block.address + block.size_bytes:
            pool.insert(cut(block, last - block.address))
        if first > block.address:
            head, block = block, cut(block, first - block.address)
            pool.insert(head)
        block.mapped = False
        self.stats.reserved_bytes -= last - first
        self.stats.num_device_free += 1
        for neighbour in (block.prev, block.next):
            if neighbour is not None and not neighbour.mapped:
                pool.unmapped.remove(neighbour)
                absorb(block, neighbour)
        if block.is_split:  # else the whole virtual range is empty and is given up
            self._insert_unmapped(pool, block)

    def _whole_chunks(self, block: Block) -> tuple[int, int]:
        """From where to where a block of an expandable segment covers whole chunks."""
        granule = self._expandable_granule(block.pool)
        base = self._range_start(block)
        first = base + -(-(block.address - base) // granule) * granule
        return first, base + (block.address + block.size_bytes - base) // granule * granule

    @staticmethod
    def _insert_unmapped(pool: Pool, block: Block) -> None:
        insort(pool.unmapped, block, key=lambda b: b.address)

    @staticmethod
    def _range_start(block: Block) -> int:
        while block.prev is not None:
            block = block.prev
        return block.address

    def _reserve(self, size_bytes: int) -> None:
        self.stats.reserved_bytes += size_bytes
        self.stats.peak_reserved_bytes = max(self.stats.peak_reserved_bytes, self.stats.reserved_bytes)
