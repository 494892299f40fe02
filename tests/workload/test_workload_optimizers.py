"""Which optimizer each name makes, by what its state holds after a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpumem_tui.formula.recipe import OPTIMIZERS, Optimizer
from gpumem_tui.step.workload import WorkloadError
from gpumem_tui.workload.optimizers import optimizer_factory

ROWS, COLUMNS = 8, 4
STATE_ELEMENTS: dict[Optimizer, tuple[type[torch.optim.Optimizer], int]] = {
    "adamw": (torch.optim.AdamW, 2 * ROWS * COLUMNS),
    "adamw-fused": (torch.optim.AdamW, 2 * ROWS * COLUMNS),
    "adam": (torch.optim.Adam, 2 * ROWS * COLUMNS),
    "sgd": (torch.optim.SGD, 0),
    "sgd-momentum": (torch.optim.SGD, ROWS * COLUMNS),
    "adafactor": (torch.optim.Adafactor, ROWS + COLUMNS),
    "adagrad": (torch.optim.Adagrad, ROWS * COLUMNS),
    "rmsprop": (torch.optim.RMSprop, ROWS * COLUMNS),
}
"""The class, and the elements of state beside step counters for a weight of ROWS × COLUMNS."""

ELSEWHERE: dict[Optimizer, str] = {"lion": "lion-pytorch", "adamw-8bit": "bitsandbytes"}


@pytest.mark.parametrize("name", STATE_ELEMENTS)
def test_state_after_a_step(name: Optimizer) -> None:
    kind, elements = STATE_ELEMENTS[name]
    weight = nn.Parameter(torch.randn(ROWS, COLUMNS))
    before = weight.detach().clone()
    optimizer = optimizer_factory(name)([weight])
    assert type(optimizer) is kind
    weight.square().sum().backward()
    optimizer.step()
    assert not torch.equal(weight, before)
    state = [value for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.numel() for tensor in state if tensor.dim() > 0) == elements


@pytest.mark.parametrize("name", STATE_ELEMENTS)
def test_leaves_foreach_to_torch(name: Optimizer) -> None:
    optimizer = optimizer_factory(name)([nn.Parameter(torch.zeros(1))])
    assert optimizer.param_groups[0]["foreach"] is None


@pytest.mark.parametrize("name", ELSEWHERE)
def test_says_where_else_to_find_it(name: Optimizer) -> None:
    with pytest.raises(WorkloadError) as refusal:
        optimizer_factory(name)
    assert str(refusal.value) == (
        f"--optimizer {name}: PyTorch does not implement it, so only the formula knows it; "
        f"use {ELSEWHERE[name]} in a workload file (--workload)"
    )


def test_every_name_is_made_or_refused() -> None:
    assert STATE_ELEMENTS.keys() | ELSEWHERE.keys() == set(OPTIMIZERS)
