"""Linear layers on weights of 8 bits: what bitsandbytes' operators take on a GPU, next to what they give."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from tests.in_process import as_cuda
from tests.pairs import slow_beyond
from tests.simulator.simulated_steps import simulated_gpu

TOKENS, INPUTS, OUTPUTS = 512, 1024, 2048


def on_cuda() -> Any:
    """Import bitsandbytes with its operators on CUDA, which it leaves out where it is imported without."""
    found = pytest.importorskip("bitsandbytes")
    import_module("bitsandbytes.backends.cuda.ops")
    return found


@pytest.mark.parametrize("threshold", slow_beyond(1, [0.0, 6.0]))
def test_a_layer_takes_what_its_operators_run_on_a_gpu(threshold: float) -> None:
    gpu = simulated_gpu(unlimited=True)
    with as_cuda(gpu):
        bitsandbytes = on_cuda()
        layer = bitsandbytes.nn.Linear8bitLt(INPUTS, OUTPUTS, bias=False, has_fp16_weights=False, threshold=threshold)
        layer.cuda()
        values = torch.randn(TOKENS, INPUTS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        before = gpu.recorder.allocations
        output = layer(values)
        sizes = list(gpu.finish().sizes[before:])
        output.sum().backward()
    large = [size for size in sizes if TOKENS * INPUTS <= size <= 4 * TOKENS * OUTPUTS]  # cuBLAS's workspace is larger
    given = TOKENS * INPUTS  # elements: in float16, quantized, and where they are compared with the threshold
    compared = [2 * given, given] if threshold else []
    made = TOKENS * OUTPUTS  # summed in int32, as float16, as bfloat16, and with the columns that have outliers
    assert large == [2 * given, given, *compared, 4 * made, 2 * made, 2 * made, *([2 * made] if threshold else [])]
    assert any("8 bits: 7 columns" in note for note in gpu.notes) == bool(threshold)
    assert values.grad is not None


@pytest.mark.parametrize(("rows", "unpacks"), [(2048, True), (1, False)])
def test_a_weight_of_4_bits_is_unpacked_for_many_rows_and_not_for_few(rows: int, unpacks: bool) -> None:
    gpu = simulated_gpu(unlimited=True)
    with as_cuda(gpu):
        layer = on_cuda().nn.Linear4bit(INPUTS, OUTPUTS, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
        layer.cuda()
        values = torch.randn(rows, INPUTS, device="cuda", dtype=torch.bfloat16)
        before = gpu.recorder.allocations
        with torch.no_grad():
            layer(values)
        sizes = gpu.finish().sizes[before:]
    scales, weight, product = 4 * INPUTS * OUTPUTS // 64, 2 * INPUTS * OUTPUTS, 2 * rows * OUTPUTS
    made = [size for size in sizes if size in (scales, weight, product)]
    assert made == ([scales, scales, weight, product] if unpacks else [product])  # scales by block, and with their mean
    assert layer.weight.numel() == INPUTS * OUTPUTS // 2  # two weights a byte


@pytest.mark.parametrize(
    ("name", "kept_bytes"),
    [
        ("AdamW8bit", 2 * (1 + 4 / 256)),
        ("PagedAdamW8bit", 2 * 4 / 256),
        ("PagedAdamW32bit", 0),
        *[pytest.param(*row, marks=pytest.mark.slow) for row in (("Lion8bit", 1 + 4 / 256), ("LAMB32bit", 8))],
    ],
)
def test_an_optimizer_keeps_what_it_does_on_a_gpu(name: str, kept_bytes: float) -> None:
    gpu = simulated_gpu(unlimited=True)
    with as_cuda(gpu):
        weight = torch.nn.Parameter(torch.randn(OUTPUTS, INPUTS, device="cuda"))
        optimizer = getattr(on_cuda().optim, name)([weight], lr=1e-4)
        for _ in range(2):
            weight.square().sum().backward()
            before = gpu.allocator.stats.allocated_bytes
            optimizer.step()
            optimizer.zero_grad()
            after = gpu.allocator.stats.allocated_bytes
        state = [value for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor)]
        kept = sum(value.nbytes for value in state if value.is_cuda and not value.numel() <= 256)
    assert kept == kept_bytes * weight.numel()
    assert before - after == weight.nbytes  # a second step makes nothing that stays: the gradient alone goes
    assert any("managed memory" in note for note in gpu.notes) == name.startswith("Paged")


def test_an_optimizer_without_a_kernel_of_8_bits_is_refused_as_on_a_gpu() -> None:
    with as_cuda(simulated_gpu(unlimited=True)):
        weight = torch.nn.Parameter(torch.randn(OUTPUTS, INPUTS, device="cuda"))
        optimizer = on_cuda().optim.LAMB8bit([weight], lr=1e-4)
        weight.square().sum().backward()
        with pytest.raises(ValueError, match="Unsupported optimizer name: lamb"):
            optimizer.step()
