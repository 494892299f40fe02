"""Shared by the tests of a look: a model, a step of it, and the checks of every answer."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

from gpumem_tui.probe.wire import LookAnswer, PostMortem, encode_document

BATCH = 4096
HIDDEN_BYTES = BATCH * 64 * 4
INPUT_BYTES = BATCH * 16 * 4
PARAMETERS_BYTES = (16 * 64 + 64 + 64 * 16 + 16) * 4


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.randn(BATCH, 16)
    optimizer.zero_grad()
    loss = (model(x) - x).pow(2).mean()
    loss.backward()
    optimizer.step()


def as_written(document: LookAnswer | PostMortem | None) -> Any:
    """A document as a viewer finds it in its file."""
    return None if document is None else json.loads(encode_document(document))


def only_device(document: Any) -> Any:
    assert "look" not in document["unavailable"]
    (device,) = document["devices"]
    assert sum(device["buckets"].values()) == device["peak_bytes"] == sum(row["bytes"] for row in device["held"])
    assert max(live for _, live in device["timeline"]) == device["peak_bytes"]
    assert all(
        size_bytes <= device["highest"][bucket] <= device["peak_bytes"]
        for bucket, size_bytes in device["buckets"].items()
    )
    return device


def assert_nothing_left() -> None:
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not module_hooks._global_forward_pre_hooks
    assert not module_hooks._global_forward_hooks
    assert not optimizer_hooks._global_optimizer_pre_hooks
    assert torch.autograd.backward.__module__ == "torch.autograd"
