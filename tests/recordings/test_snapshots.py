"""Allocators of real GPUs that others recorded, replayed: every block is where it lay, in the segment it lay in.

tests/recordings/README.md shows where the recordings come from and what this proves.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from gpumem_tui.memory import KIB, MIB
from gpumem_tui.simulator.allocator import caching as allocator
from gpumem_tui.simulator.allocator.blocks import Block, Pool
from gpumem_tui.simulator.allocator.caching import CachingAllocator
from gpumem_tui.simulator.allocator.settings import AllocatorSettings
from tests.gpu.placement import Differs, FollowingAllocator, check
from tests.recordings import snapshots

_GROWING = [path for path in snapshots.PATHS if b'"segment_alloc"' in gzip.decompress(path.read_bytes())]
"""Every test process makes this list: reading the events themselves takes it seconds."""


def test_all_recordings_are_here() -> None:
    loaded = [snapshots.load(path) for path in snapshots.PATHS]
    allocations = sum(number > 0 for snapshot in loaded for number in snapshot.history.timeline.events)
    assert len(loaded) == 62
    assert allocations == 157_303
    growing = [any(segment.size_bytes > 0 for segment in snapshot.history.segments) for snapshot in loaded]
    assert [path for path, grows in zip(snapshots.PATHS, growing, strict=True) if grows] == _GROWING


@pytest.mark.parametrize("path", snapshots.PATHS, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_every_event_and_the_end_are_as_recorded(path: Path) -> None:
    snapshot = snapshots.load(path)
    placed = check(snapshot.history, start=snapshot.start)
    assert placed.end_blocks == snapshot.end_blocks
    assert placed.end_reserved_bytes == snapshot.end_reserved_bytes


def test_what_is_live_at_the_start_of_a_process_is_nothing() -> None:
    empty = [path.name.split("+")[0] for path in snapshots.PATHS if not snapshots.load(path).start]
    assert empty == ["NiuHuangxiaozi"] * 6 + ["rishabh-ranjan", "silmont2000"]


# Rules of the allocator, each broken on purpose: the recordings must tell.


def _take_highest(pool: Pool, size: int) -> Block | None:
    """Best fit with the other order of addresses."""
    fitting = list(pool.at_least(size))
    if not fitting:
        return None
    block = max((block for block in fitting if block.size_bytes == fitting[0].size_bytes), key=lambda b: b.address)
    pool.remove(block)
    return block


def _set(name: str, value: int) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setattr(allocator, name, value)


def _break_ties_by_highest_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "take", _take_highest)


@pytest.mark.parametrize(
    ("break_rule", "recordings_that_tell"),
    [
        pytest.param(_break_ties_by_highest_address, 61, id="ties-by-highest-address"),
        pytest.param(_set("_UNSPLIT_SLACK_BYTES", 512 * KIB), 22, id="split-when-more-than-512-KiB-is-left"),
        pytest.param(
            _set("_UNSPLIT_SLACK_BYTES", MIB - allocator.MIN_BLOCK_BYTES), 11, id="split-when-at-least-1-MiB-is-left"
        ),
        pytest.param(_set("SEGMENT_GRANULE_BYTES", MIB), 20, id="segments-rounded-to-1-MiB"),
        pytest.param(_set("MIN_LARGE_SEGMENT_REQUEST_BYTES", 10 * MIB + 1), 3, id="requests-of-10-MiB-in-20-MiB"),
        pytest.param(_set("SMALL_REQUEST_BYTES", MIB - 1), 15, id="small-pool-below-1-MiB"),
        pytest.param(_set("MIN_BLOCK_BYTES", 256), 40, id="rounding-to-256-B"),
    ],
)
def test_a_broken_rule_is_detected(
    break_rule: Callable[[pytest.MonkeyPatch], None], recordings_that_tell: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_rule(monkeypatch)
    assert sum(_is_told(path) for path in snapshots.PATHS) == recordings_that_tell


def _is_told(path: Path) -> bool:
    snapshot = snapshots.load(path)
    try:
        placed = check(snapshot.history, start=snapshot.start)
    except Differs:
        return True
    return (placed.end_blocks, placed.end_reserved_bytes) != (snapshot.end_blocks, snapshot.end_reserved_bytes)


# Where the driver will put a segment is not known: as far as these recordings go, it does not decide what is reserved.


class _Growing(FollowingAllocator):
    """Takes segments where its own rule states, below the others, and when it needs them."""

    def __init__(self, snapshot: snapshots.Snapshot) -> None:
        super().__init__(snapshot.history, AllocatorSettings())
        self._lowest_address = min((segment.address for segment in snapshot.start), default=1 << 62)
        self.taken: list[int] = []

    def _new_range(self, size_bytes: int) -> int:
        self.taken.append(size_bytes)
        return CachingAllocator._new_range(self, size_bytes)


@pytest.mark.parametrize("path", _GROWING, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_segments_of_our_own_addresses_are_as_many_and_as_large(path: Path) -> None:
    snapshot = snapshots.load(path)
    recorded = [segment for segment in snapshot.history.segments if segment.size_bytes > 0]
    assert recorded
    releases = {segment.event for segment in snapshot.history.segments if segment.size_bytes < 0}
    growing = _Growing(snapshot)
    blocks = growing.begin_with(snapshot.start)
    timeline = snapshot.history.timeline
    for event, number in enumerate(timeline.events):
        if event in releases:
            growing.empty_cache()
        if number < 0:
            growing.free(blocks.pop(-number))
        else:
            blocks[number] = growing.malloc(timeline.sizes[number - 1])
    assert growing.taken == [segment.size_bytes for segment in recorded]
    assert growing.stats.peak_reserved_bytes == check(snapshot.history, start=snapshot.start).reserved_bytes
