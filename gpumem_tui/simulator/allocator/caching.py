"""The CUDA caching allocator, rule by rule, without CUDA.

Follows PyTorch's c10/cuda/CUDACachingAllocator.cpp (2.10 to 2.14): which block serves a request, when a block is
split, when segments are taken from the driver and given back, and what the statistics then say. One device, any
number of streams. Standard library only, so that the viewer replays traces without torch.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterator

from gpumem_tui.memory import MIB
from gpumem_tui.simulator.allocator.blocks import SMALL_SEGMENT_BYTES, Block, Pool, Stats, absorb, cut
from gpumem_tui.simulator.allocator.settings import AllocatorSettings, next_division

MIN_BLOCK_BYTES = 512
SMALL_REQUEST_BYTES = MIB
MIN_LARGE_SEGMENT_REQUEST_BYTES = 10 * MIB
SEGMENT_GRANULE_BYTES = 2 * MIB
"""kMinBlockSize, kSmallSize, kMinLargeAlloc, kRoundLarge in c10/core/AllocatorConfig.h."""

GRAPH_POOL = 129
"""No stream: the first number that represents a private pool of CUDA graphs, whose memory serves nobody else."""

_UNSPLIT_SLACK_BYTES = SMALL_REQUEST_BYTES
_NO_LIMIT = 1 << 62
_FIRST_ADDRESS = 1 << 62


class OutOfMemory(Exception):
    """The device cannot serve a request, after every cached segment has been given back.

    Attributes:
        segment_bytes: what the driver was asked for, which PyTorch's message states was tried to be allocated.
    """

    def __init__(self, requested_bytes: int, allocator: CachingAllocator) -> None:
        super().__init__(f"{requested_bytes} bytes do not fit")
        self.segment_bytes = allocator.segment_size(allocator.round_size(requested_bytes))
        self.allocated_bytes = allocator.stats.allocated_bytes
        self.reserved_bytes = allocator.stats.reserved_bytes
        self.capacity_bytes = allocator.capacity_bytes
        self.allowed_bytes = allocator.allowed_bytes


class CachingAllocator:
    """`malloc` and `free` on a device that gives this process at most `capacity_bytes`.

    Args:
        capacity_bytes: what the driver can hand out: the device's total less context, reserve and others' use.
        settings: what `PYTORCH_CUDA_ALLOC_CONF` states, or what to ask for it once memory is first taken.
        allowed_bytes: the memory fraction's limit on reserved bytes (fraction · device total), None for no limit.
        detailed: keep the statistics of requested and inactive split bytes too, a fifth of the time.

    Attributes:
        pending: blocks that were freed while other streams use them, by the number under which that is completed.
        least_refused_bytes: the least that would have been reserved with a segment that the device lacked memory for;
            None for none, and for expandable segments.
        takes_best_fit: a request takes the smallest free block that is large enough, also where others are free.
    """

    def __init__(
        self,
        capacity_bytes: int,
        settings: AllocatorSettings | Callable[[], AllocatorSettings] | None = None,
        allowed_bytes: int | None = None,
        *,
        detailed: bool = True,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.allowed_bytes = allowed_bytes
        self.stats = Stats()
        self._detailed = detailed
        self._asked = settings if callable(settings) else lambda: settings or AllocatorSettings()
        self._configure()
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._requests: defaultdict[int, dict[int, tuple[int, Pool]]] = defaultdict(dict)
        self._lowest_address = self._next_virtual_address = _FIRST_ADDRESS
        self._large_lookups = 0
        self.pending: dict[int, Block] = {}
        self.least_refused_bytes: int | None = None

    def _configure(self) -> None:
        """Take over what the settings are now; torch reads them as it first allocates, which a program may do late."""
        self.settings = self._asked()
        self._max_split_bytes = self.settings.max_split_size_bytes or _NO_LIMIT
        self._max_rounding_bytes = self.settings.max_non_split_rounding_bytes or self.settings.large_segment_bytes
        self._rounds_to_power2 = any(self.settings.roundup_power2_divisions)
        self._expandable = self.settings.expandable_segments
        self.takes_best_fit = not (
            self._expandable or self.settings.max_split_size_bytes or self.settings.garbage_collection_threshold
        )

    # Requests

    def malloc(self, size_bytes: int, stream: int = 0) -> Block:
        """Return a block of at least `size_bytes` (> 0).

        Raises:
            OutOfMemory: the device is full even after all cached segments were released.
        """
        size, pool = self._requests[stream].get(size_bytes) or self._prepare(size_bytes, stream)
        block = pool.take(size) if self.takes_best_fit else self._find_free(pool, size)
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
        """Free a block that other streams than its own use; `complete_free` of this number ends it (`insert_events`).

        Until then it serves nobody, though it no longer counts as allocated.
        """
        self.stats.allocated_bytes -= block.size_bytes
        self.stats.pending_bytes += block.size_bytes
        self.pending[number] = block

    def complete_free(self, number: int) -> None:
        """Return a block to its pool once other streams are done with it, unless that happened as memory ran short."""
        block = self.pending.pop(number, None)
        if block is not None:
            self.stats.pending_bytes -= block.size_bytes
            self.stats.allocated_bytes += block.size_bytes
            CachingAllocator.free(self, block)

    def empty_cache(self) -> None:
        """Give every wholly free segment back to the driver, like `torch.cuda.empty_cache`."""
        self._release_cached()

    def cached_blocks(self) -> list[Block]:
        """Return every free block that has memory behind it; with the blocks in use, these are all reserved bytes."""
        return [block for pool in self._pools.values() for block in pool]

    def cached_in_graph_pools(self) -> dict[int, int]:
        """Return by private pool of CUDA graphs the bytes of free blocks, which serve no other pool."""
        found: dict[int, int] = {}
        for (stream, _), pool in self._pools.items():
            if stream >= GRAPH_POOL:
                free_bytes = sum(block.mapped if self._expandable else block.size_bytes for block in pool)
                found[stream] = found.get(stream, 0) + free_bytes
        return found

    def state(self) -> int:
        """Return one number for where all free blocks are, and how often the driver was asked for memory."""
        free = tuple((key, pool.addresses()) for key, pool in self._pools.items())
        return hash((free, self.stats.num_device_alloc, self.stats.num_device_free))

    def round_size(self, size_bytes: int) -> int:
        """Return the block size that serves a request: a multiple of 512 B, or of a power-of-two division if set."""
        if self._rounds_to_power2 and size_bytes >= MIN_BLOCK_BYTES:
            divisions = self.settings.divisions_for(size_bytes)
            if divisions > 1 and size_bytes > MIN_BLOCK_BYTES * divisions:
                return next_division(size_bytes, divisions)
        return (size_bytes + MIN_BLOCK_BYTES - 1) // MIN_BLOCK_BYTES * MIN_BLOCK_BYTES or MIN_BLOCK_BYTES

    def segment_size(self, size_bytes: int) -> int:
        """Return the bytes that are taken from the driver to serve a block of this (rounded) size."""
        if size_bytes <= SMALL_REQUEST_BYTES:
            return SMALL_SEGMENT_BYTES
        if size_bytes < MIN_LARGE_SEGMENT_REQUEST_BYTES:
            return self.settings.large_segment_bytes
        return (size_bytes + SEGMENT_GRANULE_BYTES - 1) // SEGMENT_GRANULE_BYTES * SEGMENT_GRANULE_BYTES

    # Serving a request

    def _prepare(self, size_bytes: int, stream: int) -> tuple[int, Pool]:
        """Work out the block size and the pool that serve a request, and remember both, as sizes come again."""
        if not self._pools:
            self._configure()
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
        """Take the best fit out of a pool; None if missing, or the settings forbid to use it."""
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
        """Choose a block; one at the end of an expandable segment counts as large as it could grow: others go first."""

        def could_grow_to(block: Block) -> int:
            after = block.next
            return block.size_bytes + (after.size_bytes if after is not None and not after.mapped else 0)

        found = next(fitting, None)
        while found is not None and could_grow_to(found) > found.size_bytes:
            block = next(fitting, None)
            if block is None or could_grow_to(block) >= could_grow_to(found):
                break
            found = block
        return found

    def _take_from_driver(self, pool: Pool, size: int) -> Block | None:
        segment = self.segment_size(size)
        if self.allowed_bytes is not None and self.stats.reserved_bytes + segment > self.allowed_bytes:
            return None
        if self._expandable:
            return self._grow(pool, size)
        if (wanted := self.stats.reserved_bytes + segment) > self.capacity_bytes:
            self.least_refused_bytes = min(wanted, self.least_refused_bytes or wanted)
            return None
        self._reserve(segment)
        self.stats.num_device_alloc += 1
        return Block(self._new_range(segment), segment, pool)

    def _obtain(self, pool: Pool, size: int) -> Block | None:
        """Take new memory from the driver, giving back what is cached if need be; None if that is not enough."""
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
        """Count a request in the detailed statistics; `block` and `rest` were one free block before."""
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
        """Count free parts of segments in partial use; PyTorch leaves out those of expandable segments."""
        if not self._expandable:
            stats = self.stats
            stats.inactive_split_bytes += more_bytes
            if stats.inactive_split_bytes > stats.peak_inactive_split_bytes:
                stats.peak_inactive_split_bytes = stats.inactive_split_bytes

    def _new_range(self, size_bytes: int) -> int:
        """Return the address of a new segment: below the last, as in two of three recorded pairs (tests/recordings)."""
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
        for (stream, _), pool in self._pools.items():
            if stream >= GRAPH_POOL:  # kept as long as a graph is, which may be replayed (`release_cached_blocks`)
                continue
            for block in list(pool):
                if self._expandable:
                    self._unmap(block)
                elif not block.is_split:
                    self._release(block)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Make room by releasing unsplit blocks beyond the split limit. Returns whether enough went."""
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

        Age counts the searches of the large pools since a block became free. Segments older than the mean go,
        even beyond the threshold, so that collections stay rare.
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

    # Expandable segments: virtual ranges in which memory is mapped as it is needed (`ExpandableSegment`)

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
        """Find the first run of free and unmapped blocks with room for `size`, or make a new virtual range."""
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
        """Return the addresses between which a block of an expandable segment covers whole chunks."""
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
