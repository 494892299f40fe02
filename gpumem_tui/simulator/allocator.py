"""The CUDA caching allocator, rule by rule, without CUDA.

Follows PyTorch's c10/cuda/CUDACachingAllocator.cpp (2.10 to 2.14): which block serves a request, when a block is
split, when segments are taken from the driver and given back, and what the statistics then say. One device, any
number of streams. Standard library only, so that the viewer replays traces without torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from gpumem_tui.memory import MIB
from gpumem_tui.simulator.blocks import SMALL_SEGMENT_BYTES, Block, Pool, absorb, cut
from gpumem_tui.simulator.expandable import ExpandableSegments
from gpumem_tui.simulator.settings import AllocatorSettings, next_division

MIN_BLOCK_BYTES = 512
SMALL_REQUEST_BYTES = MIB
MIN_LARGE_SEGMENT_REQUEST_BYTES = 10 * MIB
SEGMENT_GRANULE_BYTES = 2 * MIB
"""kMinBlockSize, kSmallSize, kMinLargeAlloc, kRoundLarge in c10/core/AllocatorConfig.h."""

_UNSPLIT_SLACK_BYTES = SMALL_REQUEST_BYTES
_NO_LIMIT = 1 << 62


class OutOfMemory(Exception):
    """The device cannot serve a request, after every cached segment has been given back."""

    def __init__(self, requested_bytes: int, allocator: CachingAllocator) -> None:
        super().__init__(f"{requested_bytes} bytes do not fit")
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocator.stats.allocated_bytes
        self.reserved_bytes = allocator.stats.reserved_bytes
        self.capacity_bytes = allocator.capacity_bytes


class CachingAllocator(ExpandableSegments):
    """`malloc` and `free` on a device that gives this process at most `capacity_bytes`.

    Args:
        capacity_bytes: what the driver can hand out: the device's total less context, reserve and others' use.
        settings: what `PYTORCH_CUDA_ALLOC_CONF` says.
        allowed_bytes: the memory fraction's limit on reserved bytes (fraction · device total), None for no limit.
        detailed: keep the statistics of requested and inactive split bytes too, a fifth of the time.

    Attributes:
        pending: blocks that were freed while other streams use them, by the number under which that is completed.
    """

    def __init__(
        self,
        capacity_bytes: int,
        settings: AllocatorSettings | None = None,
        allowed_bytes: int | None = None,
        *,
        detailed: bool = True,
    ) -> None:
        self._detailed = detailed
        super().__init__(capacity_bytes, settings or AllocatorSettings())
        self.allowed_bytes = allowed_bytes
        self._max_split_bytes = self.settings.max_split_size_bytes or _NO_LIMIT
        self._max_rounding_bytes = self.settings.max_non_split_rounding_bytes or self.settings.large_segment_bytes
        self._rounds_to_power2 = any(self.settings.roundup_power2_divisions)
        self._expandable = self.settings.expandable_segments
        self._takes_best_fit = not (
            self._expandable or self.settings.max_split_size_bytes or self.settings.garbage_collection_threshold
        )
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._requests: defaultdict[int, dict[int, tuple[int, Pool]]] = defaultdict(dict)
        self._lowest_address = self._next_virtual_address
        self._large_lookups = 0
        self.pending: dict[int, Block] = {}

    # Requests

    def malloc(self, size_bytes: int, stream: int = 0) -> Block:
        """A block of at least `size_bytes` (> 0).

        Raises:
            OutOfMemory: the device is full even after all cached segments were released.
        """
        size, pool = self._requests[stream].get(size_bytes) or self._prepare(size_bytes, stream)
        block = pool.take(size) if self._takes_best_fit else self._find_free(pool, size)
        if block is None:
            block = self._obtain(pool, size)
            if block is None:
                self.stats.num_ooms += 1
                raise OutOfMemory(size_bytes, self)
        stats = self.stats
        remaining = block.size_bytes - size
        rest = None
        if remaining >= pool.least_rest_bytes and (size < self._max_split_bytes or self._expandable):
            rest = cut(block, size)
            pool.insert(rest)
        block.allocated = True
        stats.allocated_bytes += block.size_bytes
        if stats.allocated_bytes > stats.peak_allocated_bytes:
            stats.peak_allocated_bytes = stats.allocated_bytes
        if self._detailed:
            self._count_taken(block, size_bytes, rest)
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its pool and merge it with its free neighbours.

        Raises:
            ValueError: the block is not in use.
        """
        if not block.allocated:
            raise ValueError(f"block at {block.address:#x} is not allocated")
        stats = self.stats
        freed_bytes = block.size_bytes
        stats.allocated_bytes -= freed_bytes
        block.allocated = False
        before, after, pool = block.prev, block.next, block.pool
        if before is not None and not before.allocated and before.mapped:
            pool.remove(before)
            absorb(block, before)
        if after is not None and not after.allocated and after.mapped:
            pool.remove(after)
            absorb(block, after)
        block.freed_at = self._large_lookups
        pool.insert(block)
        if self._detailed:
            stats.requested_bytes -= block.requested_bytes
            merged_bytes = block.size_bytes - freed_bytes
            self._count_inactive(freed_bytes if block.is_split else -merged_bytes)

    def request_free(self, block: Block, number: int) -> None:
        """Free a block that other streams than its own use, to be completed under this number (`insert_events`).

        Until then it serves nobody, though it no longer counts as allocated.
        """
        self.stats.allocated_bytes -= block.size_bytes
        self.stats.pending_bytes += block.size_bytes
        self.pending[number] = block

    def complete_free(self, number: int) -> None:
        """The streams are done with a block: it goes back to its pool, unless it did as memory ran short."""
        block = self.pending.pop(number, None)
        if block is not None:
            self.stats.pending_bytes -= block.size_bytes
            self.stats.allocated_bytes += block.size_bytes
            CachingAllocator.free(self, block)

    def empty_cache(self) -> None:
        """Give every wholly free segment back to the driver, like `torch.cuda.empty_cache`."""
        self._release_cached()

    def cached_blocks(self) -> list[Block]:
        """Every free block that has memory behind it; with the blocks in use, all that is reserved."""
        return [block for pool in self._pools.values() for block in pool]

    def round_size(self, size_bytes: int) -> int:
        """The block size that serves a request: a multiple of 512 B, or of a power-of-two division if set."""
        if self._rounds_to_power2 and size_bytes >= MIN_BLOCK_BYTES:
            divisions = self.settings.divisions_for(size_bytes)
            if divisions > 1 and size_bytes > MIN_BLOCK_BYTES * divisions:
                return next_division(size_bytes, divisions)
        return (size_bytes + MIN_BLOCK_BYTES - 1) // MIN_BLOCK_BYTES * MIN_BLOCK_BYTES or MIN_BLOCK_BYTES

    def segment_size(self, size_bytes: int) -> int:
        """What is taken from the driver to serve a block of this (rounded) size."""
        if size_bytes <= SMALL_REQUEST_BYTES:
            return SMALL_SEGMENT_BYTES
        if size_bytes < MIN_LARGE_SEGMENT_REQUEST_BYTES:
            return self.settings.large_segment_bytes
        return (size_bytes + SEGMENT_GRANULE_BYTES - 1) // SEGMENT_GRANULE_BYTES * SEGMENT_GRANULE_BYTES

    # Serving a request

    def _prepare(self, size_bytes: int, stream: int) -> tuple[int, Pool]:
        """What size a request is served with, and from which pool; kept, as sizes come again."""
        size = self.round_size(size_bytes)
        key = (stream, size <= SMALL_REQUEST_BYTES)
        pool = self._pools[key] if key in self._pools else self._new_pool(*key)
        found = self._requests[stream][size_bytes] = size, pool
        return found

    def _new_pool(self, stream: int, is_small: bool) -> Pool:
        splits_finely = is_small or self._expandable
        pool = Pool(stream, is_small, MIN_BLOCK_BYTES if splits_finely else _UNSPLIT_SLACK_BYTES + MIN_BLOCK_BYTES)
        self._pools[stream, is_small] = pool
        return pool

    def _find_free(self, pool: Pool, size: int) -> Block | None:
        """The best fit, as far as the settings allow to use it."""
        self._large_lookups += not pool.is_small
        fitting = pool.at_least(size)
        block = self._prefer_not_to_grow(fitting) if self._expandable else next(fitting, None)
        if block is None:
            return None
        if size < self._max_split_bytes <= block.size_bytes:
            return None
        if size >= self._max_split_bytes and block.size_bytes >= size + self._max_rounding_bytes:
            return None
        pool.remove(block)
        return block

    @staticmethod
    def _prefer_not_to_grow(fitting: Iterator[Block]) -> Block | None:
        """A block at the end of an expandable segment counts as large as it could grow, so others go first."""

        def could_grow_to(block: Block) -> int:
            after = block.next
            return block.size_bytes + (after.size_bytes if after is not None and not after.mapped else 0)

        found = next(fitting, None)
        for block in fitting:
            if found is None or could_grow_to(block) >= could_grow_to(found):
                break
            found = block
        return found

    def _take_from_driver(self, pool: Pool, size: int) -> Block | None:
        segment = self.segment_size(size)
        if self.allowed_bytes is not None and self.stats.reserved_bytes + segment > self.allowed_bytes:
            return None
        if self._expandable:
            return self._grow(pool, size)
        if self.stats.reserved_bytes + segment > self.capacity_bytes:
            return None
        self._reserve(segment)
        self.stats.num_device_alloc += 1
        return Block(self._new_range(segment), segment, pool)

    def _obtain(self, pool: Pool, size: int) -> Block | None:
        """New memory from the driver, giving back what is cached if need be; None if that is not enough."""
        if self.allowed_bytes is not None and self.settings.garbage_collection_threshold > 0:
            self._collect_garbage()
        block = self._take_from_driver(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._take_from_driver(pool, size)
        if block is None:
            self._release_cached()
            self.stats.num_alloc_retries += 1
            block = self._take_from_driver(pool, size)
        return block

    def _count_taken(self, block: Block, requested_bytes: int, rest: Block | None) -> None:
        """`rest` is what `block` was split from; both were one free block before."""
        stats = self.stats
        block.requested_bytes = requested_bytes
        stats.requested_bytes += requested_bytes
        if stats.requested_bytes > stats.peak_requested_bytes:
            stats.peak_requested_bytes = stats.requested_bytes
        if stats.active_bytes > stats.peak_active_bytes:
            stats.peak_active_bytes = stats.active_bytes
        rest_bytes = rest.size_bytes if rest is not None else 0
        was_split = block.prev is not None or (rest or block).next is not None
        self._count_inactive(rest_bytes - (block.size_bytes + rest_bytes if was_split else 0))

    def _count_inactive(self, more_bytes: int) -> None:
        """Free parts of segments that are partly in use; PyTorch does not count those of expandable segments."""
        if not self._expandable:
            stats = self.stats
            stats.inactive_split_bytes += more_bytes
            if stats.inactive_split_bytes > stats.peak_inactive_split_bytes:
                stats.peak_inactive_split_bytes = stats.inactive_split_bytes

    def _new_range(self, size_bytes: int) -> int:
        """Where the driver puts a segment: below the last one, as in two of three recorded pairs (tests/recordings)."""
        self._lowest_address -= size_bytes
        return self._lowest_address

    # Giving back

    def _release(self, block: Block) -> None:
        """Give a wholly free segment back to the driver."""
        block.pool.remove(block)
        self.stats.reserved_bytes -= block.size_bytes
        self.stats.num_device_free += 1

    def _release_cached(self) -> None:
        for number in list(self.pending):  # `synchronize_and_free_events`
            self.complete_free(number)
        for pool in self._pools.values():
            for block in list(pool):
                if self._expandable:
                    self._unmap(block)
                elif not block.is_split:
                    self._release(block)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Make room by releasing unsplit blocks beyond the split limit; True if enough went."""
        if self._max_split_bytes == _NO_LIMIT or self._expandable:
            return False
        wanted = max(size, self._max_split_bytes)
        fitting = next(pool.at_least(wanted), None)
        if fitting is not None:
            self._release(fitting)
            return True
        released = 0
        for block in reversed(list(pool.at_least(self._max_split_bytes))):
            if released >= wanted:
                break
            released += block.size_bytes
            self._release(block)
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Release the older half of the unused large segments, again and again down to the threshold.

        Age counts the searches of the large pools since a block became free. What is older than the mean goes, even
        beyond the threshold, so that collections stay rare.
        """
        assert self.allowed_bytes is not None
        surplus = self.stats.reserved_bytes - int(self.settings.garbage_collection_threshold * self.allowed_bytes)
        segments = [
            block for (_, is_small), pool in self._pools.items() if not is_small for block in pool if not block.is_split
        ]
        while surplus > 0 and segments:
            mean_freed_at = sum(block.freed_at for block in segments) / len(segments)
            old = [block for block in segments if block.freed_at <= mean_freed_at]
            segments = [block for block in segments if block.freed_at > mean_freed_at]
            for block in old:
                surplus -= block.size_bytes
                self._release(block)
