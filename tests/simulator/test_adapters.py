"""LoRA and QLoRA on the simulated GPU: what is held is what the closed form counts."""

from __future__ import annotations

import pytest

from gpumem_tui.formula.adapters import kept_bytes, trained_parameters
from gpumem_tui.formula.recipe import BASE_QUANTIZATIONS, BaseQuantization, Recipe
from gpumem_tui.memory import ALLOCATED_BUCKETS, Bucket
from gpumem_tui.simulator.timeline import Timeline
from tests.simulator.simulated_steps import LLAMA, trained

_BLOCK_BYTES = 512
"""What the allocator rounds a small request up to."""


def _held(timeline: Timeline, bucket: Bucket) -> tuple[int, int]:
    """The most bytes that lay in a bucket at once, and how many allocations these were."""
    index = ALLOCATED_BUCKETS.index(bucket)
    live = count = 0
    most = (0, 0)
    for number in timeline.events:
        if timeline.buckets[abs(number) - 1] == index:
            sign = 1 if number > 0 else -1
            live, count = live + sign * timeline.sizes[abs(number) - 1], count + sign
            most = max(most, (live, count))
    return most


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
        held, allocations = _held(timeline, bucket)
        assert counted <= held <= counted + allocations * _BLOCK_BYTES
