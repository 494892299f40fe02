"""The state of an optimizer and the extra memory of its step, by PyTorch's CUDA defaults."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

from gpumem_tui.memory import MIB
from gpumem_tui.workload.optimizers import OptimizerFactory, optimizer_factory
from tests.simulator.simulated_steps import CUBLAS_WORKSPACE_BYTES, on

LAYERS = 6
WEIGHT_BYTES = 1024 * 1024 * 4


class Step(NamedTuple):
    """The bytes one optimizer step adds: for good, and at its highest."""

    state_bytes: int
    scratch_bytes: int


def steps(make: OptimizerFactory, count: int = 2) -> list[Step]:
    """The first steps of an optimizer over `LAYERS` square weights."""
    taken = []
    with on() as (device, memory):
        weights = nn.ParameterList(torch.randn(1024, 1024, device=device) for _ in range(LAYERS))
        optimizer = make(weights.parameters())
        for _ in range(count):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            before = memory.memory_allocated()
            memory.reset_peak_memory_stats()
            optimizer.step()
            after = memory.memory_allocated()
            taken.append(Step(after - before, memory.max_memory_allocated() - after))
    return taken


def test_adamw_keeps_two_moments_and_takes_scratch_for_all_weights_at_once() -> None:
    everything = LAYERS * WEIGHT_BYTES
    assert steps(optimizer_factory("adamw")) == [Step(2 * everything, everything), Step(0, everything)]


def test_adamw_without_foreach_takes_scratch_for_one_weight() -> None:
    _, second = steps(lambda parameters: torch.optim.AdamW(parameters, foreach=False))
    assert second.state_bytes == 0
    assert second.scratch_bytes <= 3 * WEIGHT_BYTES


def test_fused_adamw_takes_no_scratch() -> None:
    _, second = steps(lambda parameters: torch.optim.AdamW(parameters, fused=True))
    assert second == Step(0, 0)


@pytest.mark.parametrize(("momentum", "copies"), [(0.0, 0), (0.9, 1)])
def test_sgd_keeps_its_momentum(momentum: float, copies: int) -> None:
    first, second = steps(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=momentum))
    assert first.state_bytes == copies * LAYERS * WEIGHT_BYTES
    assert second == Step(0, 0)


def test_adafactor_keeps_a_row_and_a_column() -> None:
    first, second = steps(optimizer_factory("adafactor"))
    assert first.state_bytes == LAYERS * 2 * 1024 * 4 + CUBLAS_WORKSPACE_BYTES
    assert second.state_bytes == 0
    assert second.scratch_bytes < 3.1 * WEIGHT_BYTES


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_gradients_are_clipped_in_place(clip: object) -> None:
    assert callable(clip)
    with on() as (device, memory):
        weight = nn.Parameter(torch.randn(1024, 1024, device=device))
        weight.grad = torch.randn_like(weight)
        before = memory.memory_allocated()
        memory.reset_peak_memory_stats()
        clip([weight], 1.0)
        assert memory.max_memory_allocated() - before < MIB
