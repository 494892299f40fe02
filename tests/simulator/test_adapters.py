"""LoRA and QLoRA on the simulated GPU: what is held is what the closed form counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import BASE_QUANTIZATIONS, BaseQuantization, Recipe
from gpumem_tui.formula.weights import kept_by_adapters, kept_bytes, trained_parameters
from gpumem_tui.memory import Bucket
from gpumem_tui.workload.quantized import QuantizedLinear
from tests.pairs import slow_beyond
from tests.simulator.simulated_steps import GPT2, LLAMA, held, on, trained

_BLOCK_BYTES = 512
"""The size to which the allocator rounds up a small request."""


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


def kept_a_token(shape: ModelShape, recipe: Recipe) -> float:
    """Bytes of activations that a step of one sample more keeps more, a token of a block."""
    few, many = (held(trained(shape, recipe, size, 1).finish(), Bucket.ACTIVATIONS)[0] for size in (1, 2))
    return (many - few) / (shape.tokens * shape.layers)


BF16, AMP, WIDER = Recipe("bf16"), Recipe("amp-bf16"), Recipe("bf16", adapter_dtype="fp32")
BIASED_QUERIES = replace(LLAMA, name="qwen2", qkv_bias=True)


@pytest.mark.parametrize(
    ("shape", "recipe"),
    slow_beyond(3, [(GPT2, BF16), (GPT2, WIDER), (LLAMA, AMP), (LLAMA, BF16), (BIASED_QUERIES, AMP), (GPT2, AMP)]),
    ids=lambda value: value.name if isinstance(value, ModelShape) else value.precision,
)
def test_what_magnitudes_scale_is_kept_as_the_formula_counts(shape: ModelShape, recipe: Recipe) -> None:
    shape = replace(shape, layers=1)
    lora, dora = (replace(recipe, adapter=adapter) for adapter in ("lora", "dora"))
    traced = kept_a_token(shape, dora) - kept_a_token(shape, lora)
    assert traced == kept_by_adapters(shape, dora) - kept_by_adapters(shape, lora) > 0


def test_a_packed_weight_is_unpacked_by_one_kernel_as_bitsandbytes_does() -> None:
    with on() as (device, cuda):
        layer = QuantizedLinear(torch.nn.Linear(256, 256, bias=False), "nf4").to(device)
        before = cuda.max_memory_allocated()
        weight = layer.unpacked(torch.bfloat16)
        assert cuda.max_memory_allocated() == before + 2 * weight.numel()
