"""Recorded programs traced here: the simulated GPU is asked for what the real one was asked for, event by event."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.simulator.device import SimulatedGpu, simulate
from gpumem_tui.simulator.profile import profile_for
from gpumem_tui.simulator.timeline import Timeline, rounded
from tests.gpu.placement import check
from tests.recordings import decoder, snapshots

Program = Callable[[int, torch.device], tuple[object, ...]]


def _requests(timeline: Timeline) -> list[int]:
    """The size of every request, and of every release below zero, in whole blocks."""
    sizes = (rounded(timeline.sizes[abs(number) - 1]) for number in timeline.events)
    return [size if number > 0 else -size for size, number in zip(sizes, timeline.events, strict=True)]


def _traced(program: Program, context: int) -> tuple[list[int], int, int]:
    """The requests, the allocated peak and the reserved peak, in bytes."""
    gpu = find_gpu("a100-80gb")
    simulated = SimulatedGpu(gpu, profile_for(torch.__version__, gpu))
    with simulate(simulated) as device:
        alive = program(context, device)
        timeline = simulated.finish()
        stats = simulated.allocator.stats
        peaks = stats.peak_allocated_bytes, stats.peak_reserved_bytes
        del alive
    return _requests(timeline), *peaks


def _recorded(name: str) -> tuple[list[int], int, int]:
    path = next(path for path in snapshots.PATHS if name in path.name)
    snapshot = snapshots.load(path)
    assert not snapshot.start
    placed = check(snapshot.history)
    return _requests(snapshot.history.timeline), placed.allocated_bytes, placed.reserved_bytes


@pytest.mark.parametrize("context", [100, 150, 200])
def test_every_event_of_three_forward_passes(context: int) -> None:
    traced, recorded = _traced(decoder.forward, context), _recorded(f"__forward_memory_snapshot_{context}.")
    assert len(recorded[0]) == 1_529
    assert traced == recorded


@pytest.mark.parametrize(("context", "events"), [(100, 7_544), (150, 7_652), (200, 7_652)])
def test_every_event_of_three_training_steps(context: int, events: int) -> None:
    recorded = _recorded(f"__forward_and_backward_memory_snapshot_{context}.")
    assert len(recorded[0]) == events
    assert _traced(decoder.forward_and_backward, context) == recorded
