"""Transformer Engine's layers, stood in for: what they save and make, in bytes that are counted by hand."""

from __future__ import annotations

import importlib

import pytest
import torch

from gpumem_tui.simulator.standins.register import named
from tests.simulator.test_standins import FLOAT, HALF, made, stood_in

TOKENS, BATCH, WIDTH, WIDE = 512, 8, 1024, 4096
ROWS = TOKENS * BATCH
BF16 = {"params_dtype": torch.bfloat16}
ENGINE = "transformer_engine.pytorch"


def given() -> torch.Tensor:
    return torch.randn(TOKENS, BATCH, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize(("gpu_name", "workspace"), [("a100-80gb", 4 << 20), ("h100-80gb", (32 << 20) + 1024)])
def test_a_product_takes_one_workspace_that_stays(gpu_name: str, workspace: int) -> None:
    with stood_in(gpu_name) as gpu:
        layer = importlib.import_module(ENGINE).Linear(WIDTH, WIDE, **BF16)
        x, first = given(), gpu.recorder.allocations
        out = layer(x)
        layer(x)
        gradient = torch.ones_like(out)
        assert made(gpu, first) == [workspace, *3 * [ROWS * WIDE * HALF]]
        first = gpu.recorder.allocations
        out.backward(gradient)
        assert made(gpu, first) == [ROWS * WIDTH * HALF, WIDTH * WIDE * HALF, WIDE * HALF]
    assert named("transformer-engine").note in gpu.notes


@pytest.mark.parametrize(("normalization", "figures"), [("LayerNorm", 2), ("RMSNorm", 1)])
def test_a_norm_and_a_product_keep_the_normed_input(normalization: str, figures: int) -> None:
    with stood_in() as gpu:
        layer = importlib.import_module(ENGINE).LayerNormLinear(WIDTH, WIDE, normalization=normalization, **BF16)
        x, before = given(), gpu.allocator.stats.requested_bytes
        out = layer(x)
        kept = gpu.allocator.stats.requested_bytes - before
        out.backward(torch.ones_like(out))
    assert kept == ROWS * (WIDTH + WIDE) * HALF + figures * ROWS * FLOAT + (4 << 20)
    assert all(parameter.grad is not None for parameter in layer.parameters())


@pytest.mark.parametrize(("activation", "halves"), [("gelu", 1), ("swiglu", 2)])
def test_an_mlp_keeps_both_sides_of_its_activation(activation: str, halves: int) -> None:
    with stood_in() as gpu:
        layer = importlib.import_module(ENGINE).LayerNormMLP(WIDTH, WIDE, activation=activation, **BF16)
        x, before = given(), gpu.allocator.stats.requested_bytes
        out = layer(x)
        kept = gpu.allocator.stats.requested_bytes - before
        out.backward(torch.ones_like(out))
        left = gpu.allocator.stats.requested_bytes - before
        peak = gpu.allocator.stats.peak_requested_bytes - before
    normed, wide = ROWS * WIDTH * HALF, ROWS * WIDE * HALF
    assert kept == 2 * normed + (1 + halves) * wide + 2 * ROWS * FLOAT + (4 << 20)
    second = WIDTH * (WIDE + 1) * HALF
    at_peak = 3 * normed + (1 + 2 * halves) * wide + second + 2 * ROWS * FLOAT + (4 << 20)
    assert peak == at_peak, "what the activation gave is freed before its gradient is made"
    gradients = sum(parameter.nbytes for parameter in layer.parameters()) + normed
    assert left - gradients - normed - (4 << 20) == 0, "out, gradients and the workspace are left"


def test_a_layer_trains_and_8_bits_are_refused() -> None:
    with stood_in():
        engine = importlib.import_module(ENGINE)
        layer = engine.TransformerLayer(WIDTH, WIDE, 16, num_gqa_groups=4, **BF16)
        x = given()
        layer(x).float().sum().backward()
        assert x.grad is not None
        assert all(parameter.grad is not None for parameter in layer.parameters())
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert engine.Linear(WIDTH, WIDE)(torch.randn(4, WIDTH, device="cuda")).dtype == torch.bfloat16
        recipe = importlib.import_module("transformer_engine.common.recipe")
        in_8_bits = recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID)
        with engine.fp8_autocast(enabled=False), pytest.raises(NotImplementedError, match="trace with enabled=False"):
            engine.fp8_autocast(enabled=True, fp8_recipe=in_8_bits).__enter__()
