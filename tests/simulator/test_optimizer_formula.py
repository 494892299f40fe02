"""Every optimizer by formula next to its trace: what it keeps, and the peak of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.predict import predict
from gpumem_tui.formula.recipe import OPTIMIZERS, Optimizer, Recipe
from gpumem_tui.memory import MIB, Bucket
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.allocator.replay import Replay, replay
from gpumem_tui.simulator.device.gpu import SimulatedGpu, register
from gpumem_tui.step.eight_bit import EightBitAdamW
from gpumem_tui.workload.optimizers import optimizer_factory
from gpumem_tui.workload.standard import CatalogWorkload
from tests.in_process import as_cuda, timeline_of
from tests.pairs import slow_beyond

GPT2 = replace(find_model("gpt2"), layers=2, seq_len=128)
UPDATED = replace(GPT2, seq_len=16, tied_head=False)
"""Networks whose update is the highest moment, so that an optimizer's temporaries count."""
VIT = replace(find_model("vit-b-32"), layers=2)
_WORKSPACES_BYTES = 20 * MIB
"""cuBLAS's, and rounding: the formula counts none."""


def traced(shape: ModelShape, recipe: Recipe) -> Replay:
    return replay(timeline_of(CatalogWorkload(shape, recipe), 2, 2, recipe))


@pytest.mark.parametrize("shape", slow_beyond(1, [GPT2, UPDATED, VIT]), ids=["gpt2", "updated", "vit"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_formula_is_near_the_trace(optimizer: Optimizer, shape: ModelShape) -> None:
    recipe = Recipe(optimizer=optimizer)
    found, said = traced(shape, recipe), predict(shape, recipe, 2)
    kept = max(phase.breakdown[Bucket.OPTIMIZER] for phase in found.phases)
    assert kept == pytest.approx(said.breakdown[Bucket.OPTIMIZER], abs=MIB // 4)
    peak = found.peak_allocated_bytes
    # Adafactor holds what it made of one tensor while it makes as much of the next: by formula both are the largest.
    over = 1.15 if optimizer == "adafactor" else 1.05
    assert 0.93 * peak - _WORKSPACES_BYTES <= said.peak_bytes <= over * peak, (said.peak_bytes / MIB, peak / MIB)


def test_eight_bit_adamw_needs_no_bitsandbytes_on_a_simulated_gpu() -> None:
    """Although that is presented as CUDA, and its tensors have addresses."""
    register()
    shape = find_gpu("a100-80gb")
    with as_cuda(SimulatedGpu(shape, profile_for(torch.__version__, shape))):
        weight = torch.nn.Parameter(torch.zeros(8192, device="cuda"))
        assert weight.device.type == "cuda"
        assert weight.data_ptr()
        assert type(optimizer_factory("adamw-8bit")([weight])) is EightBitAdamW
