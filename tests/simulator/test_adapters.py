"""LoRA and QLoRA on the simulated GPU: what is held is what the closed form counts."""

from __future__ import annotations

import pytest
import torch

from gpumem_tui.formula.recipe import BASE_QUANTIZATIONS, BaseQuantization, Recipe
from gpumem_tui.formula.weights import kept_bytes, trained_parameters
from gpumem_tui.memory import Bucket
from gpumem_tui.workload.quantized import QuantizedLinear
from tests.simulator.simulated_steps import LLAMA, held, on, trained

_BLOCK_BYTES = 512
"""What the allocator rounds a small request up to."""


@pytest.mark.parametrize("quantization", BASE_QUANTIZATIONS)
def test_weights_gradients_and_state_are_the_formulas(quantization: BaseQuantization) -> None:
    recipe = Recipe("bf16", adapter="lora", base_quantization=quantization)

    timeline = trained(LLAMA, recipe, 2).finish()

    adapters = 2 * trained_parameters(LLAMA, recipe)
    for bucket, counted in (
        (Bucket.PARAMETERS, kept_bytes(LLAMA, recipe)),
        (Bucket.GRADIENTS, adapters),
        (Bucket.OPTIMIZER, 2 * adapters),
    ):
        size, allocations = held(timeline, bucket)
        assert counted <= size <= counted + allocations * _BLOCK_BYTES


def test_a_packed_weight_is_unpacked_by_one_kernel_as_bitsandbytes_does() -> None:
    with on() as (device, cuda):
        layer = QuantizedLinear(torch.nn.Linear(256, 256, bias=False), "nf4").to(device)
        before = cuda.max_memory_allocated()
        weight = layer.unpacked(torch.bfloat16)
        assert cuda.max_memory_allocated() == before + 2 * weight.numel()
