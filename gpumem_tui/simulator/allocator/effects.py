"""Replays the effect of many requests at once where the free blocks lie as they did before. Standard library only.

An allocator that takes the best fit has no two free blocks side by side, so that the blocks in use say all of where its
free ones are. After an evaluation's forward, which gives nearly all back, few blocks stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from gpumem_tui.simulator.allocator.blocks import Block, Pool
from gpumem_tui.simulator.allocator.caching import CachingAllocator


@dataclass
class AtOnce:
    """The requests that stay in use, and how far the statistics rose above what they were at first.

    Attributes:
        is_known: it can be done again: no memory was asked of the driver, or given back.
        places: by pool, for each block by the number of its request: where it is, its size, and what was asked for.
    """

    is_known: bool = False
    places: dict[Pool, dict[int, tuple[int, int, int]]] = field(default_factory=dict)
    rises: tuple[int, ...] = ()
    inactive_bytes: int = 0


def is_at_once(allocator: CachingAllocator) -> bool:
    """Return whether an allocator's requests can be done at once now."""
    return allocator.takes_best_fit and not allocator.pending


@contextmanager
def observed(allocator: CachingAllocator, effect: AtOnce, stays: Mapping[int, Block | None]) -> Iterator[None]:
    """Learn what the requests within the context do, of which `stays` has the blocks in the end."""
    stats = allocator.stats
    peaks, before, driver = stats.peaks, stats.current, (stats.num_device_alloc, stats.num_device_free)
    stats.reset_peaks()
    try:
        yield
        if driver != (stats.num_device_alloc, stats.num_device_free):
            return
        effect.rises = tuple(peak - start for peak, start in zip(stats.peaks, before, strict=True))
        effect.inactive_bytes = stats.inactive_split_bytes - before[-1]
        for number, block in stays.items():
            if block is not None:
                place = block.address, block.size_bytes, block.requested_bytes
                effect.places.setdefault(block.pool, {})[number] = place
        effect.is_known = True
    finally:
        stats.raise_peaks(peaks)


def do_again(allocator: CachingAllocator, effect: AtOnce) -> dict[int, Block]:
    """Do requests whose effect was recorded, from free blocks that lie as they did; return the blocks that stay."""
    stats, made = allocator.stats, {}
    stats.raise_peaks([start + rise for start, rise in zip(stats.current, effect.rises, strict=True)])
    for pool, places in effect.places.items():
        blocks = pool.carve((address, size) for address, size, _ in places.values())
        for (number, (_, size, requested)), block in zip(places.items(), blocks, strict=True):
            block.allocated, block.requested_bytes = True, requested
            stats.allocated_bytes += size
            stats.requested_bytes += requested
            made[number] = block
    stats.inactive_split_bytes += effect.inactive_bytes
    return made
