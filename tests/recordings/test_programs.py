"""Recorded programs traced here: the simulated GPU is asked for what the real one was asked for, event by event.

The most allocated can differ a little although all requests agree: which free block serves a request, and so how
much of it is left over, can depend on where the driver put the segments (README.md next to this).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.allocator.timeline import Timeline, rounded
from gpumem_tui.simulator.device.gpu import SimulatedGpu, simulate
from tests.gpu.placement import check
from tests.pairs import slow_beyond
from tests.recordings import decoder, snapshots

Program = Callable[[int, torch.device], tuple[object, ...]]


def _requests(timeline: Timeline) -> list[int]:
    """The size of every request, and of every release below zero, in whole blocks."""
    sizes = (rounded(timeline.sizes[abs(number) - 1]) for number in timeline.events)
    return [size if number > 0 else -size for size, number in zip(sizes, timeline.events, strict=True)]


def _traced(program: Program, context: int) -> tuple[list[int], int]:
    """The requests, and the reserved peak in bytes."""
    gpu = find_gpu("a100-80gb")
    simulated = SimulatedGpu(gpu, profile_for(torch.__version__, gpu))
    with simulate(simulated) as device:
        alive = program(context, device)
        timeline = simulated.finish()
        reserved_bytes = simulated.allocator.stats.peak_reserved_bytes
        del alive
    return _requests(timeline), reserved_bytes


def _recorded(name: str) -> tuple[list[int], int]:
    path = next(path for path in snapshots.PATHS if name in path.name)
    snapshot = snapshots.load(path)
    assert not snapshot.start
    return _requests(snapshot.history.timeline), check(snapshot.history).reserved_bytes


@pytest.mark.parametrize("context", slow_beyond(1, [100, 150, 200]))
def test_every_event_of_three_forward_passes(context: int) -> None:
    traced, recorded = _traced(decoder.forward, context), _recorded(f"__forward_memory_snapshot_{context}.")
    assert len(recorded[0]) == 1_529
    assert traced == recorded


@pytest.mark.parametrize(("context", "events"), slow_beyond(1, [(100, 7_544), (150, 7_652), (200, 7_652)]))
def test_every_event_of_three_training_steps(context: int, events: int) -> None:
    recorded = _recorded(f"__forward_and_backward_memory_snapshot_{context}.")
    assert len(recorded[0]) == events
    assert _traced(decoder.forward_and_backward, context) == recorded


def _attention(_: int, device: torch.device) -> tuple[object, ...]:
    """The `silmont2000` recording of one head's attention: 8 sequences of 4,096 tokens, 16 wide, and its backward."""
    query, key, value = (torch.randn(8, 4096, 16, device=device, requires_grad=True) for _ in range(3))

    def attend() -> torch.Tensor:
        scores = torch.einsum("...qd,...kd->...qk", query, key)
        scores = scores / (query.shape[-1] ** 0.5)
        weights = softmax(scores)
        return torch.einsum("...qk,...kd->...qd", weights, value)

    def softmax(x: torch.Tensor) -> torch.Tensor:
        highest = x.max(dim=-1, keepdim=True).values
        exponentials = torch.exp(x - highest)
        return exponentials / torch.sum(exponentials, dim=-1, keepdim=True)

    mixed = attend()
    loss = mixed.sum()
    loss.backward()
    return query, key, value, mixed, loss


def test_every_event_of_an_attention_and_its_backward() -> None:
    recorded = _recorded("__mem_snapshot.")
    assert len(recorded[0]) == 62
    assert _traced(_attention, 0) == recorded
