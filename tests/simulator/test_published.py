"""Operators measured on a real A100, by others: the simulated GPU must give the same allocated peak.

Source of every figure: linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv (liger 0.2.1, 2024-09-03,
A100-SXM4-80GB, provider "huggingface", mode "full", `torch.cuda.max_memory_allocated`, median of 10), with the
programs in benchmark/scripts next to it: a forward and a backward with ``retain_graph``, repeated, while gradients
accumulate.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.device.gpu import SimulatedGpu, simulate

Step = Callable[[], None]


class _GatedMlp(nn.Module):
    """Llama's feed-forward network at 7B size, as the benchmark instantiates it."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.activation = activation
        self.gate = nn.Linear(4096, 11008, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(4096, 11008, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(11008, 4096, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.activation(self.gate(x)) * self.up(x))
        return result


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _mlp(activation: Callable[[torch.Tensor], torch.Tensor], batch: int, tokens: int) -> Step:
    layer = _GatedMlp(activation)
    x = torch.randn(batch, tokens, 4096, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(x)
    return lambda: layer(x).backward(gradient, retain_graph=True)


def _layer_norm(width: int) -> Step:
    """The benchmark holds its own kernel's layer (weight and bias) on the device next to PyTorch's."""
    other = nn.LayerNorm(width)
    layer = nn.LayerNorm(width)
    x = torch.randn(4096, width)
    gradient = torch.randn_like(x)
    x.requires_grad_(True)

    def step() -> None:
        assert other.weight is not layer.weight
        layer(x).backward(gradient, retain_graph=True)

    return step


def _cross_entropy(vocabulary: int) -> Step:
    x = torch.randn(8 * 2048, vocabulary, requires_grad=True)
    target = torch.randint(vocabulary, (8 * 2048, 1)).squeeze(1)
    return lambda: F.cross_entropy(x, target).backward(retain_graph=True)


def _median_peak_bytes(make: Callable[[], Step]) -> int:
    gpu = find_gpu("a100-80gb")
    simulated = SimulatedGpu(gpu, profile_for(torch.__version__, gpu))
    peaks = []
    with simulate(simulated) as device, torch.device(device):
        step = make()
        for _ in range(10):
            simulated.allocator.stats.reset_peaks()
            step()
            peaks.append(simulated.allocator.stats.peak_allocated_bytes)
    return int(statistics.median(peaks))


@pytest.mark.parametrize(
    ("make", "published_bytes"),
    [
        pytest.param(lambda: _mlp(F.silu, 4, 1024), 1_357_119_488, id="swiglu-1024"),
        pytest.param(lambda: _mlp(F.silu, 4, 4096), 3_619_946_496, id="swiglu-4096"),
        pytest.param(lambda: _mlp(_gelu, 8, 1024), 2_089_025_536, id="geglu-1024"),
        pytest.param(lambda: _layer_norm(1024), 83_951_616, id="layer-norm-1024"),
        pytest.param(lambda: _layer_norm(16384), 1_342_734_336, id="layer-norm-16384"),
    ],
)
def test_exact_to_the_byte(make: Callable[[], Step], published_bytes: int) -> None:
    assert _median_peak_bytes(make) == published_bytes


@pytest.mark.parametrize(
    ("vocabulary", "published_bytes"),
    [(4096, 1_342_309_376), (131_072, 42_949_804_032)],
)
def test_cross_entropy_within_a_few_blocks(vocabulary: int, published_bytes: int) -> None:
    """The published table holds 32-bit floats: above 8 GiB they are multiples of 4 KiB."""
    assert abs(_median_peak_bytes(lambda: _cross_entropy(vocabulary)) - published_bytes) <= 2048
