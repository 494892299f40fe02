"""Block sizes from an allocator's events, next to an allocator that knows them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpumem_tui.memory import MIB
from gpumem_tui.probe.recorders import Segments, step_history
from gpumem_tui.simulator.allocator.blocks import Block
from gpumem_tui.simulator.allocator.caching import CachingAllocator

SIZES = st.one_of(
    st.integers(1, 4096), st.integers(1, 2 * MIB), st.integers(1 * MIB, 30 * MIB), st.sampled_from([512, MIB, 10 * MIB])
)
ACTIONS = st.lists(
    st.one_of(SIZES, st.integers(0, 50).map(lambda index: -index - 1), st.just("empty")), min_size=1, max_size=60
)


class Driver:
    """An exact model of the allocator, driven by actions, that writes down what CUDA's would."""

    def __init__(self) -> None:
        self.allocator = CachingAllocator(1 << 50)
        self.live: list[tuple[Block, int]] = []
        self.segments: dict[int, int] = {}
        self.trace: list[dict[str, Any]] = []
        self.allocated: list[int] = []

    def act(self, action: int | str) -> None:
        """Allocate so many bytes, release the block of this index from the end (negative), or empty the cache."""
        if action == "empty":
            self.allocator.empty_cache()
            held = {block.address for block in self.allocator.cached_blocks()} | {b.address for b, _ in self.live}
            for start, size in list(self.segments.items()):
                if not any(start <= address < start + size for address in held):
                    self._write("segment_free", start, self.segments.pop(start))
        elif isinstance(action, int) and action > 0:
            reserved = self.allocator.stats.reserved_bytes
            block = self.allocator.malloc(action)
            grown = self.allocator.stats.reserved_bytes - reserved
            if grown:
                self.segments[block.address] = grown
                self._write("segment_alloc", block.address, grown)
            self.live.append((block, action))
            self._write("alloc", block.address, action)
        elif isinstance(action, int) and -action <= len(self.live):
            block, requested = self.live.pop(action)
            address = block.address  # once free, the block may be part of another
            self.allocator.free(block)
            for name in ("free_requested", "free_completed"):
                self._write(name, address, requested)

    def _write(self, action: str, address: int, size: int) -> None:
        self.trace.append({"action": action, "addr": address, "size": size})
        self.allocated.append(self.allocator.stats.allocated_bytes)

    def snapshot(self) -> list[dict[str, Any]]:
        """The segments as `torch.cuda.memory._snapshot` tells them."""
        blocks = [(b.address, b.size_bytes, "active_allocated") for b, _ in self.live]
        blocks += [(b.address, b.size_bytes, "inactive") for b in self.allocator.cached_blocks()]
        return [
            {
                "address": start,
                "blocks": [
                    {"address": address, "size": size, "state": state}
                    for address, size, state in sorted(blocks)
                    if start <= address < start + length
                ],
            }
            for start, length in self.segments.items()
        ]


@given(before=ACTIONS, during=ACTIONS)
def test_every_block_has_the_size_that_the_allocator_gave_it(before: list[int | str], during: list[int | str]) -> None:
    driver = Driver()
    for action in before:
        driver.act(action)
    segments = Segments(driver.snapshot(), {})
    start_bytes = driver.allocator.stats.allocated_bytes
    driver.trace.clear()
    driver.allocated.clear()
    for action in during:
        driver.act(action)
    history = step_history(segments, driver.trace, [])
    assert segments.live == {block.address: block.size_bytes for block, _ in driver.live}
    assert history.live_bytes() == driver.allocator.stats.allocated_bytes
    found = history.result(0, "")
    assert found.peak_bytes == max([start_bytes, *driver.allocated])
    assert sum(found.buckets.values()) == found.peak_bytes


def test_an_expandable_segment_grows_at_its_end() -> None:
    segments = Segments([], {"expandable_segments": True})
    segments.segment_made(1 << 30, 2 * MIB)
    assert segments.take(1 << 30, 3 * MIB // 2) == 3 * MIB // 2
    segments.segment_made((1 << 30) + 2 * MIB, 20 * MIB)
    assert segments.take((1 << 30) + 3 * MIB // 2, 20 * MIB) == 20 * MIB  # over the seam, and the rest split off
    assert segments.take((1 << 30) + 43 * MIB // 2, 100) == 512


def test_a_block_that_waits_for_a_stream_is_not_allocated_and_not_given_again() -> None:
    segments = Segments([{"address": 0, "blocks": [{"address": 0, "size": 2 * MIB, "state": "inactive"}]}], {})
    segments.take(0, 1000)
    segments.release(0)
    assert segments.live == {}
    assert segments.take(1024, 512) == 512
    segments.reuse(0)
    assert segments.take(0, 512) == 512
