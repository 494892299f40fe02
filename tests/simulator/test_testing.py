"""A test of a user's that asserts on the memory of a step: the fixture, in the process that runs the tests."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

if TYPE_CHECKING:
    from gpumem_tui.run.testing import GpuMemory

pytest_plugins = ["gpumem_tui.run.testing"]
PARAMETERS = 256 * 1024 + 1024 + 1024 * 256 + 256


def train(batch_size: int = 64) -> None:
    net = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(2):
        net(torch.empty(batch_size, 256).cuda()).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_step_is_accounted_and_nothing_is_left_behind(gpu_memory: GpuMemory) -> None:
    before = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
    found = []
    for batch_size in (64, 4096, 64):
        with gpu_memory("sim:a100-40gb") as memory:
            train(batch_size)
            assert torch.cuda.is_available()
        found.append(memory)
        assert {name: getattr(torch.cuda, name) for name in before} == before
    first, larger, again = found
    assert first == again
    assert first.peak_allocated_bytes < larger.peak_allocated_bytes < larger.peak_reserved_bytes
    assert larger.peak_reserved_bytes < larger.device_used_bytes
    assert PARAMETERS * 4 <= first.buckets["parameters"] < PARAMETERS * 4 + 4 * 512
    assert sum(first.buckets.values()) == first.peak_allocated_bytes
    assert torch.ones(3).sum().item() == 3


def test_what_does_not_fit_raises_as_on_a_gpu(gpu_memory: GpuMemory) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"), gpu_memory("sim:t4-16gb"):
        train(2 * 10**6)
    with pytest.raises(pytest.UsageError, match="did you mean a100-40gb"), gpu_memory("a100-41gb"):
        train()


def test_pytest_starts_without_torch() -> None:
    code = "import gpumem_tui.run.testing, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
