"""Linear layers on weights of 8 bits: what bitsandbytes' operators take on a GPU, beside what they give."""

from __future__ import annotations

import pytest
import torch

from tests.in_process import as_cuda
from tests.pairs import slow_beyond
from tests.simulator.simulated_steps import simulated_gpu

TOKENS, INPUTS, OUTPUTS = 512, 1024, 2048


@pytest.mark.parametrize("threshold", slow_beyond(1, [0.0, 6.0]))
def test_a_layer_takes_what_its_operators_run_on_a_gpu(threshold: float) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    gpu = simulated_gpu(unlimited=True)
    with as_cuda(gpu):
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
