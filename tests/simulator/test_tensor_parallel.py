"""Networks cut over GPUs by PyTorch's DTensor on the simulated GPU: one rank holds what the closed form counts."""

from __future__ import annotations

import pytest

from gpumem_tui.catalog.loader import find_model
from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.parallel import stages
from gpumem_tui.formula.predict import predict
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.weights import trained_parameters
from gpumem_tui.memory import Bucket
from gpumem_tui.step.workload import WorkloadError
from gpumem_tui.workload.standard import CatalogWorkload
from tests.pairs import slow_beyond
from tests.simulator.simulated_steps import CUBLAS_WORKSPACE_BYTES, held, most_held, on, trained

GPT2 = find_model("gpt2").overridden(layers=2, hidden=256, heads=4, vocab=4097, seq_len=256)
LLAMA = find_model("mistral-7b").overridden(layers=2, hidden=256, heads=8, kv_heads=4, vocab=4096, seq_len=256)
SAMPLES = 128
_BLOCK_BYTES = 512
"""The size to which the allocator rounds up a small request."""


@pytest.mark.parametrize(
    ("shape", "recipe"),
    slow_beyond(
        2,
        [
            (LLAMA, Recipe("bf16", tensor_parallel=4, gpus=4)),
            (GPT2, Recipe("fp32", tensor_parallel=2, gpus=2, optimizer="sgd-momentum")),
            (GPT2, Recipe("bf16", tensor_parallel=2, gpus=2, sequence_parallel=True)),
            (LLAMA, Recipe("amp-bf16", tensor_parallel=2, gpus=2, sequence_parallel=True)),
            (LLAMA, Recipe("bf16", tensor_parallel=2, gpus=2, sequence_parallel=True, recompute="full")),
        ],
    ),
    ids=lambda one: one.name if isinstance(one, ModelShape) else f"{one.precision}-{one.sequence_parallel}",
)
def test_one_rank_holds_what_the_formula_says(shape: ModelShape, recipe: Recipe) -> None:
    timeline = trained(shape, recipe, SAMPLES).finish()

    counted = predict(shape, recipe, SAMPLES)
    assert counted.peak_bytes == pytest.approx(most_held(timeline) - 2 * CUBLAS_WORKSPACE_BYTES, rel=0.01)
    (stage,) = stages(shape, recipe)
    weights = trained_parameters(stage.share.shape, recipe) * (4 if recipe.precision != "bf16" else 2)
    size, allocations = held(timeline, Bucket.PARAMETERS)
    assert size == pytest.approx(weights, abs=_BLOCK_BYTES * allocations)
    size, allocations = held(timeline, Bucket.OPTIMIZER)
    states = 1 if recipe.optimizer == "sgd-momentum" else 2
    assert size == pytest.approx(states * weights, abs=_BLOCK_BYTES * allocations)


def test_outside_of_its_ranks_it_is_not_built() -> None:
    workload = CatalogWorkload(LLAMA, Recipe("bf16", tensor_parallel=4, gpus=4))
    with on() as (device, _), pytest.raises(WorkloadError, match="--tensor-parallel 4: this process is one of 1 ranks"):
        workload.build(device)
