"""causal-conv1d and mamba-ssm, stood in for: what they save and make, in bytes that are counted by hand.

Blocks of both kinds and both paths gave the same peak, to the byte, with mamba-ssm's own Python (2.3.2, its Triton
kernels not run) and with what replaces it.
"""

from __future__ import annotations

import importlib
import math

import pytest
import torch

from gpumem_tui.simulator.standins.register import named
from tests.simulator.test_standins import FLOAT, HALF, made, stood_in

BATCH, TOKENS, WIDTH = 4, 2560, 512
CHANNELS, ROWS = 2 * WIDTH, BATCH * TOKENS


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_convolution_saves_its_input_and_sums_gradients_in_fp32(deterministic: bool) -> None:
    with stood_in() as gpu:
        convolve = importlib.import_module("causal_conv1d").causal_conv1d_fn
        x = torch.randn(BATCH, CHANNELS, TOKENS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight, bias = (
            torch.nn.Parameter(torch.randn(*shape, device="cuda", dtype=torch.bfloat16))
            for shape in ((CHANNELS, 4), (CHANNELS,))
        )
        first = gpu.recorder.allocations
        out = convolve(x, weight, bias, activation="silu")
        assert made(gpu, first) == [BATCH * CHANNELS * TOKENS * HALF]
        gradient = torch.ones_like(out)
        first = gpu.recorder.allocations
        torch.use_deterministic_algorithms(deterministic)
        try:
            out.backward(gradient)
        finally:
            torch.use_deterministic_algorithms(False)
        sizes = made(gpu, first)
    sums = [CHANNELS * 4 * FLOAT, CHANNELS * FLOAT]
    assert sizes[:3] == [BATCH * CHANNELS * TOKENS * HALF, *sums]
    assert (sizes[3:5] == [BATCH * size for size in sums]) == deterministic
    with stood_in(), pytest.raises(RuntimeError, match="width between 2 and 4"):
        importlib.import_module("causal_conv1d").causal_conv1d_fn(x, weight.repeat(1, 2), bias)


def test_a_selective_scan_keeps_states_between_chunks_and_its_output_before_the_gate() -> None:
    states = 16
    with stood_in() as gpu:
        scan = importlib.import_module("mamba_ssm.ops.selective_scan_interface").selective_scan_fn
        u, delta, z = (
            torch.randn(BATCH, CHANNELS, TOKENS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        a = torch.randn(CHANNELS, states, device="cuda", requires_grad=True)
        b, c = (
            torch.randn(BATCH, states, TOKENS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(2)
        )
        first, before = gpu.recorder.allocations, gpu.allocator.stats.requested_bytes
        out = scan(u, delta, a, b, c, None, z, None, True)
        one = BATCH * CHANNELS * TOKENS * HALF
        between = BATCH * CHANNELS * math.ceil(TOKENS / 2048) * 2 * states * FLOAT
        assert made(gpu, first) == [one, one, between]
        assert gpu.allocator.stats.requested_bytes - before == 2 * one + between
        gradient = torch.ones_like(out)
        first = gpu.recorder.allocations
        out.backward(gradient)
        of_states = BATCH * states * TOKENS
        wide = [CHANNELS * states * FLOAT, of_states * FLOAT, of_states * FLOAT]
        assert made(gpu, first) == [one, one, one, *wide, of_states * HALF, of_states * HALF]
        assert b.grad is not None
        assert b.grad.shape == b.shape
    assert named("mamba-ssm").note in gpu.notes


def test_a_block_of_mamba_keeps_its_projection_and_figures_alone() -> None:
    """Values of `MambaInnerFn`: 2 projections wide, x_dbl, B and C copied, states between chunks, the output."""
    states, rank = 16, WIDTH // 16
    with stood_in() as gpu:
        block = importlib.import_module("mamba_ssm").Mamba(WIDTH).cuda().to(torch.bfloat16)
        block.A_log.data, block.D.data = block.A_log.data.float(), block.D.data.float()
        x = torch.randn(BATCH, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        before = gpu.allocator.stats.requested_bytes
        out = block(x)
        kept = gpu.allocator.stats.requested_bytes - before
        out.backward(torch.ones_like(out))
    tokens = ROWS * HALF * (WIDTH + 2 * CHANNELS + CHANNELS + (rank + 2 * states) + 2 * states)
    between = BATCH * CHANNELS * 2 * 2 * states * FLOAT
    small = 2 * CHANNELS * states * FLOAT + CHANNELS * FLOAT  # A, exp and its negative; the steps' bias in fp32
    workspace = 8_519_680
    assert kept == tokens + between + small + workspace
    assert all(parameter.grad is not None for parameter in block.parameters())


@pytest.mark.parametrize("is_gated_first", [True, False])
def test_a_block_of_mamba_2_keeps_its_projection_and_the_scans_output(is_gated_first: bool) -> None:
    heads, states = CHANNELS // 64, 128
    with stood_in() as gpu:
        block = importlib.import_module("mamba_ssm").Mamba2(WIDTH, rmsnorm=not is_gated_first).cuda()
        block.to(torch.bfloat16)
        x = torch.randn(BATCH, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        before = gpu.allocator.stats.requested_bytes
        out = block(x)
        kept = gpu.allocator.stats.requested_bytes - before
        out.backward(torch.ones_like(out))
    projected = 2 * CHANNELS + 2 * states + heads
    tokens = ROWS * HALF * (WIDTH + projected + CHANNELS)
    workspace = 8_519_680
    assert 0 <= kept - tokens - workspace - (0 if is_gated_first else ROWS * FLOAT) <= 4 * 512
    assert all(parameter.grad is not None for parameter in block.parameters())


def test_a_language_model_trains() -> None:
    with stood_in() as gpu:
        models = importlib.import_module("mamba_ssm.models.mixer_seq_simple")
        config = importlib.import_module("mamba_ssm.models.config_mamba").MambaConfig(
            d_model=WIDTH, n_layer=2, vocab_size=1001, ssm_cfg={"layer": "Mamba2"}
        )
        model = models.MambaLMHeadModel(config, device="cuda", dtype=torch.bfloat16)
        before = gpu.allocator.stats.requested_bytes
        logits = model(torch.zeros(2, 256, dtype=torch.long, device="cuda")).logits
        assert logits.shape == (2, 256, 1008)
        logits.float().sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        residuals = 2 * (2 * 256 * WIDTH * FLOAT)
        assert gpu.allocator.stats.peak_requested_bytes > before + residuals, "residuals are kept in fp32"
        with pytest.raises(NotImplementedError, match="layers of Mamba1 and Mamba2 alone"):
            models.create_block(WIDTH, 0, {"layer": "Mamba3"})
