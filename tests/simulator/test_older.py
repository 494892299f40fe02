"""A step by the rules of an older torch: what it takes more or less, to the byte where the rule is one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.simulator.allocator.profile import followed_as, profile_for
from gpumem_tui.simulator.allocator.replay import Replay, replay
from gpumem_tui.simulator.device.gpu import SimulatedGpu, simulate

_WIDTH, _LAYERS = 1024, 4
_PARAMETERS_BYTES = 4 * _LAYERS * _WIDTH * _WIDTH
_GPU = find_gpu("a100-40gb")
_WORKSPACE_BYTES = 8_519_680
_ROWS = 8192
_LARGE_BYTES = _ROWS * _WIDTH * 4


def _traced(version: str, use: Callable[[torch.nn.Module, torch.optim.Optimizer, torch.Tensor], None]) -> Replay:
    """Two steps of some matrices."""
    gpu = SimulatedGpu(_GPU, profile_for(version, _GPU), unlimited=True)
    gc.collect()
    with simulate(gpu) as device:
        layers = [torch.nn.Linear(_WIDTH, _WIDTH, bias=False, device=device) for _ in range(_LAYERS)]
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            use(model, optimizer, torch.ones(8, _WIDTH).to(device))
        del model, optimizer, layers
        return replay(gpu.finish())


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    model(inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _peak_bytes(version: str) -> int:
    return _traced(version, _step).peak_allocated_bytes


def test_adam_held_a_second_copy_of_its_roots_in_2_0() -> None:
    assert _peak_bytes("2.0.1") - _peak_bytes("2.1.0") == _PARAMETERS_BYTES


def test_updates_went_one_by_one_before_2_0() -> None:
    assert _peak_bytes("1.13.1") <= _peak_bytes("2.1.0") - _PARAMETERS_BYTES // _LAYERS


def test_optimizers_that_torch_jit_compiles_go_one_by_one_too() -> None:
    """As torch.distributed.optim does once it is imported; what represents torch's choice is compiled with them."""
    with simulate(SimulatedGpu(_GPU, profile_for("1.13.1", _GPU))):
        update: Any = torch.jit.script(import_module("torch.optim.adam").adam)
    assert "_single_tensor_adam" in update.code


def _activated(name: str, version: str) -> int:
    def use(model: torch.nn.Module, _: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
        many = model(inputs).repeat(_ROWS // 8, 1)
        result = getattr(many, name)(*([-1] if "softmax" in name else []))
        del many
        result.square().sum().backward()

    return _traced(version, use).peak_allocated_bytes


@pytest.mark.parametrize(
    ("name", "before", "since"),
    [("softmax", "1.10.2", "1.11.0"), ("log_softmax", "1.10.2", "1.11.0"), ("relu", "1.9.1", "1.10.0")],
)
def test_what_results_were_made_of_was_kept(name: str, before: str, since: str) -> None:
    """Measured of mmaction2's non-local networks: 663 MiB, one copy of what softmax is given."""
    more_bytes = _activated(name, before) - _activated(name, since)
    assert abs(more_bytes - _LARGE_BYTES) < _LARGE_BYTES / 500


def test_losses_kept_their_logits_before_1_11() -> None:
    def use(model: torch.nn.Module, _: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
        logits = model(inputs).repeat(_ROWS // 8, 1)
        loss = torch.nn.functional.cross_entropy(logits, torch.zeros(_ROWS, dtype=torch.long, device=logits.device))
        del logits
        loss.backward()

    more_bytes = _traced("1.10.2", use).peak_allocated_bytes - _traced("1.11.0", use).peak_allocated_bytes
    assert abs(more_bytes - _LARGE_BYTES) < _LARGE_BYTES / 500


@pytest.mark.skipif(
    "aten::rms_norm" not in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"),
    reason="the autocast of this torch leaves rms_norm alone",
)
def test_autocast_left_rms_norm_alone_before_2_12() -> None:
    kinds = []
    for version in ("2.11.0", "2.12.0"):
        gpu = SimulatedGpu(_GPU, profile_for(version, _GPU), unlimited=True)
        with simulate(gpu) as device, torch.autocast(device.type, torch.bfloat16):
            kinds.append(torch.nn.functional.rms_norm(torch.ones(8, 8, dtype=torch.bfloat16).to(device), (8,)).dtype)
        gpu.finish()
    assert kinds == [torch.bfloat16, torch.float32]


def test_zero_grad_kept_gradients_before_2_0() -> None:
    kept = []

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
        _step(model, optimizer, inputs)
        kept.append(all(parameter.grad is not None for parameter in model.parameters()))
        model.zero_grad()
        kept.append(all(parameter.grad is not None for parameter in model.parameters()))
        optimizer.zero_grad(set_to_none=True)
        kept.append(any(parameter.grad is not None for parameter in model.parameters()))

    for version, expected in (("1.13.1", [True, True, False]), ("2.0.0", [False, False, False])):
        kept.clear()
        _traced(version, step)
        assert kept[:3] == expected


def test_cublas_had_its_own_memory_before_1_13() -> None:
    assert _peak_bytes("1.13.0") - _peak_bytes("1.12.1") == 2 * _WORKSPACE_BYTES


def test_torch_is_as_it_was_afterwards() -> None:
    before = torch.optim.Optimizer.zero_grad, torch._foreach_sqrt
    _peak_bytes("1.12.1")
    assert (torch.optim.Optimizer.zero_grad, torch._foreach_sqrt) == before


def test_it_is_said_only_where_another_version_is_followed() -> None:
    assert "as torch 1.13 would" in followed_as("1.13", "2.13.0+cpu")
    assert not followed_as("2.13.1", "2.13.0+cpu")
    assert not followed_as("", "2.13.0+cpu")
