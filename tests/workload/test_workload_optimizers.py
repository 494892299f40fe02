"""Which optimizer each name makes, by what its state holds after a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpumem_tui.formula.recipe import Optimizer
from gpumem_tui.formula.records import OPTIMIZER_RECORDS
from gpumem_tui.step.workload import WorkloadError
from gpumem_tui.workload.optimizers import matrices_of, optimizer_factory, optimizer_of

ROWS, COLUMNS = 8, 4
OF_THEIR_OWN: tuple[Optimizer, ...] = ("adamw-8bit", "muon")
"""Tested one by one below: they do not treat every weight alike."""
ALIKE = [name for name in OPTIMIZER_RECORDS if name not in OF_THEIR_OWN]
OF_TORCH = [name for name in ALIKE if hasattr(torch.optim, OPTIMIZER_RECORDS[name].class_names[0])]

_KEPT_IN = (torch.uint8, torch.float32)


@pytest.mark.parametrize("name", ALIKE)
def test_state_after_a_step(name: Optimizer) -> None:
    record = OPTIMIZER_RECORDS[name]
    elements = ROWS + COLUMNS if record.states is None else record.states * ROWS * COLUMNS
    weight = nn.Parameter(torch.randn(ROWS, COLUMNS))
    before = weight.detach().clone()
    optimizer = optimizer_factory(name)([weight])
    assert type(optimizer).__name__ == record.class_names[0]
    weight.square().sum().backward()
    optimizer.step()
    assert not torch.equal(weight, before)
    state = [value for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.numel() for tensor in state if tensor.dim() > 0) == elements


@pytest.mark.parametrize("name", sorted(set(OF_TORCH) - {"adamw-for-loop"}))
def test_leaves_foreach_to_torch(name: Optimizer) -> None:
    optimizer = optimizer_factory(name)([nn.Parameter(torch.zeros(1))])
    assert optimizer.param_groups[0]["foreach"] is None


def test_eight_bit_adamw_keeps_two_bytes_a_value_and_a_scale_a_block() -> None:
    large, small = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(100))
    optimizer = optimizer_factory("adamw-8bit")([large, small])
    for weight in (large, small):
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    kept = {id(value): value for state in optimizer.state.values() for value in state.values()}
    by_type = {dtype: sum(one.numel() for one in kept.values() if one.dtype is dtype) for dtype in _KEPT_IN}
    assert by_type == {torch.uint8: 2 * 64 * 64, torch.float32: 2 * 64 * 64 // 256 + 2 * 100 + 2 * 256}


def test_muon_updates_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    model = nn.Module()
    model.embedding = nn.Embedding(10, COLUMNS)
    model.blocks = nn.ModuleList([nn.Linear(COLUMNS, ROWS), nn.Embedding(3, COLUMNS)])
    model.head = nn.Linear(ROWS, 2)
    assert [tuple(one.shape) for one in matrices_of(model)] == [(ROWS, COLUMNS)]
    before = [one.detach().clone() for one in model.parameters()]
    optimizer = optimizer_of("muon", model)
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert not any(torch.equal(one, then) for one, then in zip(model.parameters(), before, strict=True))
    states = {len([v for v in optimizer.state[one].values() if v.dim()]): one for one in model.parameters()}
    assert tuple(states[1].shape) == (ROWS, COLUMNS)
    assert set(states) == {1, 2}


def test_muon_wants_to_know_the_model() -> None:
    with pytest.raises(WorkloadError, match="one GPU"):
        optimizer_factory("muon")


@pytest.mark.parametrize(("name", "states"), [("adamw", 2), ("adam", 2), ("lion", 1), ("sgd", 0), ("sgd-momentum", 1),
                                              ("adagrad", 1), ("rmsprop", 1), ("adamw-fused", 2),
                                              ("adamw-for-loop", 2)])  # fmt: skip
def test_the_records_of_known_optimizers(name: Optimizer, states: int) -> None:
    assert OPTIMIZER_RECORDS[name].states == states
