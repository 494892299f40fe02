"""VGG-16, whose convolutions' workspaces others measured in benchmark mode: within the predicted range.

Source: itu-rad/GPUMemNet, Related_works/FakeTensor/fake_tensor.xlsx, the most that nvidia-smi showed on an A100 40 GB
while timm's train.py ran. What the context takes there, and why so much, is in peaks.toml.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.memory import MIB, Range
from gpumem_tui.simulator.allocator.finder import BatchFinder
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.allocator.replay import UNLIMITED_BYTES, AffineTrace
from gpumem_tui.simulator.device.gpu import SimulatedGpu, simulate

_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
_CONTEXT = Range(1429 * MIB, 1709 * MIB)
_STEPS = 3


def _vgg16() -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for width, count in _STAGES:
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    hidden = [nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    hidden += [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, nn.Flatten(), *hidden)


@pytest.fixture(autouse=True)
def _benchmark_mode() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    yield
    torch.backends.cudnn.benchmark = before


@pytest.mark.parametrize(("batch", "measured_mib"), [(8, 4425), (32, 7507), (64, 13123), (128, 24761)])
def test_vgg16_lies_within_its_range(batch: int, measured_mib: int) -> None:
    gpu = find_gpu("a100-40gb")
    simulated = SimulatedGpu(gpu, profile_for(torch.__version__, gpu), unlimited=True)
    gc.collect()
    with simulate(simulated) as device, torch.device(device):
        model = _vgg16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        next_images = torch.randn(batch, 3, 224, 224)
        for _ in range(_STEPS):
            images, next_images = next_images, torch.randn(batch, 3, 224, 224)
            nn.functional.cross_entropy(model(images), torch.zeros(batch, dtype=torch.long)).backward()
            optimizer.step()
            optimizer.zero_grad()
    finder = BatchFinder(AffineTrace.constant(simulated.finish()))
    without_limit = Range(UNLIMITED_BYTES, UNLIMITED_BYTES)
    found = finder.reserved_range(batch, UNLIMITED_BYTES, without_limit) + _CONTEXT
    assert measured_mib * MIB in found
