"""The caching allocator's rules, one fact a test. Sizes are those of c10/cuda/CUDACachingAllocator.cpp."""

from __future__ import annotations

import pytest

from gpumem_tui.memory import GIB, KIB, MIB
from gpumem_tui.simulator.allocator.blocks import Block
from gpumem_tui.simulator.allocator.caching import CachingAllocator, OutOfMemory
from gpumem_tui.simulator.allocator.settings import AllocatorSettings
from gpumem_tui.simulator.device.gpu import size_text

NO_SPLIT_FROM_32_MIB = AllocatorSettings(max_split_size_bytes=32 * MIB)
EXPANDABLE = AllocatorSettings(expandable_segments=True)


def allocator(capacity_bytes: int = GIB, settings: AllocatorSettings | None = None) -> CachingAllocator:
    return CachingAllocator(capacity_bytes, settings)


# Sizes


@pytest.mark.parametrize(
    ("requested", "block"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB - 1, MIB), (10 * MIB, 10 * MIB)]
)
def test_requests_round_up_to_512_bytes(requested: int, block: int) -> None:
    assert allocator().malloc(requested).size_bytes == block


@pytest.mark.parametrize(
    ("requested", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_what_a_request_takes_from_the_driver(requested: int, segment: int) -> None:
    device = allocator()
    device.malloc(requested)
    assert device.stats.reserved_bytes == segment
    assert device.stats.num_device_alloc == 1


def test_large_segments_are_settable() -> None:
    device = allocator(settings=AllocatorSettings(large_segment_bytes=64 * MIB))
    device.malloc(2 * MIB)
    assert device.stats.reserved_bytes == 64 * MIB


@pytest.mark.parametrize(
    ("divisions", "requested", "block"),
    [
        (4, 1200 * KIB, 1280 * KIB),
        (4, 1024 * KIB, 1024 * KIB),
        (4, 2000 * KIB, 2048 * KIB),
        (8, 1200 * KIB, 1280 * KIB),
        (2, 1200 * KIB, 1536 * KIB),
        (1, 1200 * KIB + 1, 1200 * KIB + 512),
        (4, 2048, 2048),
        (4, 2049, 2560),
    ],
)
def test_requests_round_up_to_power_of_two_divisions(divisions: int, requested: int, block: int) -> None:
    settings = AllocatorSettings.parse(f"roundup_power2_divisions:{divisions}")
    assert allocator(settings=settings).round_size(requested) == block


def test_divisions_may_differ_by_size() -> None:
    device = allocator(settings=AllocatorSettings.parse("roundup_power2_divisions:[2:1,4:2,>:4]"))
    assert device.round_size(3 * MIB - 1) == 3 * MIB
    assert device.round_size(5 * MIB) == 6 * MIB
    assert device.round_size(17 * MIB) == 20 * MIB


# Splitting and merging


def test_small_blocks_split_down_to_512_bytes() -> None:
    device = allocator()
    first = device.malloc(MIB)
    second = device.malloc(MIB - 512)
    third = device.malloc(1)
    assert [first.size_bytes, second.size_bytes, third.size_bytes] == [MIB, MIB - 512, 512]
    assert device.stats.reserved_bytes == 2 * MIB


@pytest.mark.parametrize(("requested", "block"), [(19 * MIB, 20 * MIB), (19 * MIB - 512, 19 * MIB - 512)])
def test_a_large_block_keeps_a_remainder_of_up_to_one_mib(requested: int, block: int) -> None:
    device = allocator()
    device.free(device.malloc(20 * MIB))
    taken = device.malloc(requested)
    assert taken.size_bytes == block
    assert device.stats.allocated_bytes == block, "the slack of an unsplit block counts as allocated"
    assert device.stats.requested_bytes == requested


def test_a_freed_block_merges_with_both_neighbours_at_once() -> None:
    device = allocator()
    left, middle, right = (device.malloc(5 * MIB) for _ in range(3))
    device.free(left)
    device.free(right)
    assert sorted(block.size_bytes for block in device.cached_blocks()) == [5 * MIB, 10 * MIB]
    device.free(middle)
    assert [block.size_bytes for block in device.cached_blocks()] == [20 * MIB]


def test_the_smallest_block_that_fits_serves_lowest_address_first() -> None:
    device = allocator()
    blocks = [device.malloc(size) for size in (16 * MIB, 12 * MIB, 14 * MIB, 12 * MIB)]
    assert blocks[3].address < blocks[1].address  # a driver puts most segments below the last one
    for block in blocks:
        device.free(block)
    assert device.malloc(12 * MIB) is blocks[3]
    assert device.malloc(12 * MIB) is blocks[1]
    assert device.malloc(12 * MIB).address == blocks[2].address


def test_pools_and_streams_share_no_blocks() -> None:
    device = allocator()
    device.free(device.malloc(20 * MIB))
    device.malloc(512)
    assert device.stats.reserved_bytes == 22 * MIB
    device.malloc(20 * MIB, stream=1)
    assert device.stats.reserved_bytes == 42 * MIB


def test_freeing_twice_is_refused() -> None:
    device = allocator()
    block = device.malloc(1)
    device.free(block)
    with pytest.raises(ValueError, match="not allocated"):
        device.free(block)


def test_inactive_split_counts_free_blocks_that_share_a_segment() -> None:
    device = allocator()
    block = device.malloc(5 * MIB)
    assert device.stats.inactive_split_bytes == 15 * MIB
    device.malloc(15 * MIB)
    assert device.stats.inactive_split_bytes == 0
    device.free(block)
    assert device.stats.inactive_split_bytes == 5 * MIB
    assert device.stats.peak_inactive_split_bytes == 15 * MIB


# Out of memory


def test_cached_segments_are_given_back_before_memory_is_out() -> None:
    device = allocator(100 * MIB)
    kept = device.malloc(5 * MIB)
    device.free(device.malloc(60 * MIB))
    device.malloc(70 * MIB)
    assert device.stats.reserved_bytes == 90 * MIB
    assert device.stats.num_alloc_retries == 1
    assert device.stats.num_ooms == 0
    assert kept.allocated


def test_out_of_memory_says_what_was_asked_and_what_is_held() -> None:
    device = allocator(100 * MIB)
    device.malloc(5 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        device.malloc(90 * MIB)
    assert caught.value.segment_bytes == 90 * MIB
    assert caught.value.allocated_bytes == 5 * MIB
    assert caught.value.reserved_bytes == 20 * MIB
    assert caught.value.capacity_bytes == 100 * MIB
    assert device.stats.num_ooms == 1
    device.malloc(80 * MIB)


def test_a_partly_used_segment_is_not_given_back() -> None:
    device = allocator(100 * MIB)
    first, second = device.malloc(9 * MIB), device.malloc(9 * MIB)
    device.free(first)
    device.empty_cache()
    assert device.stats.reserved_bytes == 20 * MIB
    device.free(second)
    device.empty_cache()
    assert device.stats.reserved_bytes == 0
    assert device.stats.num_device_free == 1


def test_a_memory_fraction_limits_what_is_reserved() -> None:
    device = CachingAllocator(GIB, allowed_bytes=30 * MIB)
    device.malloc(2 * MIB)
    with pytest.raises(OutOfMemory):
        device.malloc(18 * MIB + 1)
    device.malloc(18 * MIB)
    device.malloc(10 * MIB)
    assert device.stats.reserved_bytes == 30 * MIB


# max_split_size_mb


@pytest.mark.parametrize("oversize", [32, 40])
def test_an_oversize_block_serves_no_smaller_request(oversize: int) -> None:
    device = allocator(settings=NO_SPLIT_FROM_32_MIB)
    device.free(device.malloc(oversize * MIB))
    device.malloc(30 * MIB)
    assert device.stats.reserved_bytes == (oversize + 30) * MIB


@pytest.mark.parametrize(
    ("rounding", "cached", "reserved"),
    [
        ("", 50, 50),
        ("", 54, 88),  # larger by just the rounding, 20 MiB
        ("", 55, 90),
        (",max_non_split_rounding_mb:64", 55, 56),
        (",max_non_split_rounding_mb:64", 98, 132),
        (",max_non_split_rounding_mb:64", 99, 134),
    ],
)
def test_an_oversize_block_serves_whole_what_is_nearly_as_large(rounding: str, cached: int, reserved: int) -> None:
    device = allocator(settings=AllocatorSettings.parse("max_split_size_mb:32" + rounding))
    device.free(device.malloc(cached * MIB))
    block = device.malloc(34 * MIB)
    assert device.stats.reserved_bytes == reserved * MIB
    assert block.next is None


def test_a_full_device_releases_one_sufficient_oversize_block_and_keeps_the_rest() -> None:
    device = allocator(150 * MIB, NO_SPLIT_FROM_32_MIB)
    device.free(device.malloc(20 * MIB))
    for block in [device.malloc(size * MIB) for size in (34, 40, 56)]:
        device.free(block)
    device.malloc(24 * MIB)
    assert sorted(block.size_bytes for block in device.cached_blocks()) == [20 * MIB, 40 * MIB, 56 * MIB]
    assert device.stats.num_alloc_retries == 0


def test_a_full_device_releases_the_largest_oversize_blocks_when_none_suffices() -> None:
    device = allocator(150 * MIB, NO_SPLIT_FROM_32_MIB)
    device.free(device.malloc(20 * MIB))
    for block in [device.malloc(size * MIB) for size in (34, 40, 56)]:
        device.free(block)
    device.malloc(90 * MIB)
    assert sorted(block.size_bytes for block in device.cached_blocks()) == [20 * MIB, 34 * MIB]
    assert device.stats.num_alloc_retries == 0


# garbage_collection_threshold


def collecting(allowed_bytes: int | None) -> CachingAllocator:
    return CachingAllocator(GIB, AllocatorSettings(garbage_collection_threshold=0.5), allowed_bytes)


def cached(device: CachingAllocator, *sizes_mib: int) -> list[Block]:
    """Segments of these sizes, all taken first, then freed in this order with a search between two frees."""
    blocks = [device.malloc(size * MIB) for size in sizes_mib]
    for block in blocks:
        device.free(block)
        device.free(device.malloc(MIB + 1))
    return blocks


def test_garbage_collection_releases_what_was_unused_longest() -> None:
    device = collecting(200 * MIB)
    cached(device, 30, 28, 26, 24)
    device.malloc(40 * MIB)
    assert sorted(block.size_bytes for block in device.cached_blocks()) == [24 * MIB, 26 * MIB]


def test_garbage_collection_releases_all_of_an_age_even_beyond_the_threshold() -> None:
    device = collecting(200 * MIB)
    for block in [device.malloc(size * MIB) for size in (60, 50)]:
        device.free(block)
    device.malloc(70 * MIB)
    assert device.stats.reserved_bytes == 70 * MIB


def test_garbage_collection_releases_what_is_as_old_as_the_mean_and_keeps_what_is_younger() -> None:
    device = collecting(300 * MIB)
    blocks = [device.malloc(size * MIB) for size in (30, 50, 60)]
    device.malloc(2 * MIB)  # what is left of its segment serves the searches between
    for block in blocks:
        device.free(block)
        device.free(device.malloc(2 * MIB))
    device.malloc(90 * MIB)
    assert sorted(block.size_bytes for block in device.cached_blocks()) == [18 * MIB, 60 * MIB]


def test_garbage_collection_needs_a_memory_fraction_and_a_surplus() -> None:
    without_fraction, below = collecting(None), collecting(GIB)
    for device in (without_fraction, below):
        cached(device, 60, 50)
        device.malloc(70 * MIB)
        assert device.stats.num_device_free == 0


def test_garbage_collection_leaves_small_and_shared_segments() -> None:
    device = collecting(200 * MIB)
    small = device.malloc(512)
    shared = [device.malloc(9 * MIB), device.malloc(9 * MIB)]
    device.malloc(90 * MIB)
    device.free(small)
    device.free(shared[0])
    device.malloc(40 * MIB)
    assert device.stats.num_device_free == 0


# expandable_segments


def test_an_expandable_segment_grows_by_chunks() -> None:
    device = allocator(settings=EXPANDABLE)
    device.malloc(30 * MIB)
    assert device.stats.reserved_bytes == 40 * MIB
    device.malloc(15 * MIB)
    assert device.stats.reserved_bytes == 60 * MIB, "what was mapped and free is used first"
    device.malloc(512)
    assert device.stats.reserved_bytes == 62 * MIB


def test_an_expandable_segment_splits_to_512_bytes_and_has_no_inactive_split() -> None:
    device = allocator(settings=EXPANDABLE)
    first = device.malloc(19 * MIB)
    second = device.malloc(MIB + 512)
    assert first.size_bytes == 19 * MIB
    assert second.address == first.address + first.size_bytes
    assert second.size_bytes == MIB + 512
    assert device.stats.inactive_split_bytes == 0


def test_whole_chunks_of_an_expandable_segment_are_unmapped() -> None:
    device = allocator(settings=EXPANDABLE)
    low, high, last = device.malloc(30 * MIB), device.malloc(45 * MIB), device.malloc(5 * MIB)
    device.free(high)
    device.empty_cache()
    assert device.stats.reserved_bytes == 80 * MIB - 20 * MIB, "40 to 60 MiB is the only whole chunk within 30 to 75"
    assert [block.size_bytes for block in device.cached_blocks()] == [10 * MIB, 15 * MIB]
    between = device.malloc(12 * MIB)
    assert between.address == low.address + 60 * MIB, "what is left before the gap is too small"
    device.free(between)
    device.free(low)
    device.free(last)
    device.empty_cache()
    assert device.stats.reserved_bytes == 0
    assert device.cached_blocks() == []


def test_the_growing_end_of_an_expandable_segment_is_used_last() -> None:
    device = allocator(settings=EXPANDABLE)
    inner, _ = device.malloc(25 * MIB), device.malloc(5 * MIB)
    device.free(inner)
    assert sorted(block.size_bytes for block in device.cached_blocks()) == [10 * MIB, 25 * MIB]
    assert device.malloc(8 * MIB).address == inner.address


def test_unmapped_gaps_of_an_expandable_segment_are_filled_before_it_grows() -> None:
    device = allocator(settings=EXPANDABLE)
    low, _ = device.malloc(40 * MIB), device.malloc(20 * MIB)
    start = low.address
    device.free(low)
    device.empty_cache()
    assert device.stats.reserved_bytes == 20 * MIB
    again = device.malloc(40 * MIB)
    assert again.address == start
    assert device.stats.reserved_bytes == 60 * MIB


def test_expandable_segments_hold_what_fixed_segments_are_too_fragmented_for() -> None:
    def grow(device: CachingAllocator) -> None:
        """One block after another, each larger than the last, which is then freed."""
        held = device.malloc(10 * MIB)
        for size in range(20, 70, 10):
            larger = device.malloc(size * MIB)
            device.free(held)
            held = larger

    fixed, expandable = allocator(), allocator(settings=EXPANDABLE)
    grow(fixed)
    grow(expandable)
    assert expandable.stats.peak_allocated_bytes == fixed.stats.peak_allocated_bytes
    assert expandable.stats.peak_reserved_bytes < fixed.stats.peak_reserved_bytes


def test_an_expandable_segment_out_of_memory_releases_other_streams_chunks() -> None:
    device = allocator(100 * MIB, EXPANDABLE)
    device.free(device.malloc(60 * MIB, stream=1))
    device.malloc(80 * MIB)
    assert device.stats.reserved_bytes == 80 * MIB
    with pytest.raises(OutOfMemory):
        device.malloc(40 * MIB)


# Statistics


def test_peaks_start_anew_from_the_current_values() -> None:
    device = allocator()
    kept, gone = device.malloc(10 * MIB), device.malloc(30 * MIB)
    device.free(gone)
    device.stats.reset_peaks()
    assert device.stats.peak_allocated_bytes == kept.size_bytes
    assert device.stats.peak_reserved_bytes == 40 * MIB


@pytest.mark.parametrize(
    ("size", "text"), [(512, "512 bytes"), (1536, "1.50 KiB"), (20 * MIB, "20.00 MiB"), (3 * GIB, "3.00 GiB")]
)
def test_sizes_read_as_in_pytorchs_own_message(size: int, text: str) -> None:
    assert size_text(size) == text
