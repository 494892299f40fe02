"""The largest batch that leaves the headroom free, too: the largest that runs may leave next to nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.memory import Unknown
from gpumem_tui.search.prediction import Traced
from gpumem_tui.simulator.profile import beside_allocator_bytes
from gpumem_tui.trial.events import TrialDone


@dataclass(frozen=True)
class WithHeadroom:
    """The largest batch that leaves a share of the memory free at its peak.

    Attributes:
        share: the headroom. `batch_size`: 0 if not even one sample leaves that.
        free_bytes: what the batch leaves, of the device or of a user's cap.
        known_by: ``trial``: it ran so; ``trace``: the trace predicts it.
    """

    share: float
    batch_size: int
    free_bytes: int
    known_by: Literal["trial", "trace"]


@dataclass(frozen=True)
class Room:
    """The memory that a headroom is a share of.

    Attributes:
        limit_bytes: a user's cap on reserved bytes; None for the whole device.
    """

    gpu: Gpu
    limit_bytes: int | None

    @property
    def total_bytes(self) -> int:
        """The device's memory, or the cap."""
        return self.limit_bytes or self.gpu.total_bytes

    @property
    def beside_bytes(self) -> int:
        """What of it the allocator cannot have, as far as is known at most; a cap counts what is reserved only."""
        beside_bytes = beside_allocator_bytes(self.gpu)
        return max(0, beside_bytes - (self.gpu.total_bytes - self.total_bytes))

    def free_bytes(self, reserved_bytes: int, device_used_bytes: int) -> int:
        """What a step leaves."""
        left = self.gpu.cuda_total_bytes - device_used_bytes
        return left if self.limit_bytes is None else min(left, self.limit_bytes - reserved_bytes)


def with_headroom(
    room: Room, share: float, traced: Traced | Unknown, results: Iterable[TrialDone], largest: int
) -> WithHeadroom | None:
    """The largest batch up to `largest`, which ran, that leaves `share` free; None if none is wanted or known.

    By trial, if the largest itself leaves it; else by trace, which answers for sizes that were not tried; else by the
    trials.
    """
    wanted_bytes = room.total_bytes * share
    if not share or not largest:
        return None
    ran = {r.batch_size: room.free_bytes(r.peak_reserved_bytes, r.device_used_bytes)
           for r in results if r.outcome == "fit"}  # fmt: skip
    enough = [size for size, free_bytes in ran.items() if free_bytes >= wanted_bytes]
    if largest not in enough and isinstance(traced, Traced) and not traced.only_at:
        return _by_trace(room, share, traced, largest)
    if not enough:
        return None
    return WithHeadroom(share, max(enough), ran[max(enough)], "trial")


def _by_trace(room: Room, share: float, traced: Traced, beyond: int) -> WithHeadroom:
    def free_bytes(size: int) -> int:
        return room.free_bytes(traced.at(size).peak_reserved_bytes, traced.device_used_bytes(size))

    low, high = 0, beyond
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if free_bytes(middle) >= room.total_bytes * share else (low, middle)
    return WithHeadroom(share, low, free_bytes(low) if low else 0, "trace")
