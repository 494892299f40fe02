"""ZeRO by PyTorch's own engines on a world of which only rank 0 exists."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.formula.predict import predict
from gpumem_tui.formula.recipe import Precision, Recipe, Recompute, Sharding
from gpumem_tui.formula.weights import block_parameters
from gpumem_tui.memory import ALLOCATED_BUCKETS, Bucket
from gpumem_tui.search import predicting
from gpumem_tui.search.config import Device, SearchConfig
from gpumem_tui.search.prediction import Traced
from gpumem_tui.simulator.allocator.replay import Replay, replay
from gpumem_tui.simulator.allocator.timeline import Timeline
from gpumem_tui.step import Phase
from gpumem_tui.workload.spec import WorkloadSpec
from gpumem_tui.workload.standard import CatalogWorkload
from tests.in_process import timeline_of
from tests.pairs import pairwise

GPUS, STEPS = 8, 3
SHAPE = find_model("gpt2").overridden(layers=4, hidden=512, heads=8, vocab=8192, seq_len=64)
LLAMA = replace(
    find_model("smollm2-135m").overridden(layers=4, hidden=512, heads=8, kv_heads=4, ffn=1408, vocab=8192, seq_len=64),
    tied_head=False,
)
WORKSPACES = 2 * 8_519_680
"""cuBLAS's, of forward's thread and of backward's, on an A100: no row has them."""


def _recipe(sharding: Sharding, precision: Precision = "fp32") -> Recipe:
    return Recipe(precision, sharding=sharding, gpus=1 if sharding == "none" else GPUS)


def _run(recipe: Recipe, shape: ModelShape = SHAPE) -> Timeline:
    """One run at a batch size of 2."""
    return timeline_of(CatalogWorkload(shape, recipe), 2, STEPS, recipe)


@pytest.fixture(scope="module")
def timelines() -> dict[str, Timeline]:
    return {name: _run(_recipe(name)) for name in ("none", "zero1", "zero2", "zero3")}


@pytest.fixture(scope="module")
def stages(timelines: dict[str, Timeline]) -> dict[str, Replay]:
    return {name: replay(timeline) for name, timeline in timelines.items()}


@pytest.fixture(scope="module")
def mixed() -> dict[str, Timeline]:
    """FSDP2 by its own mixed precision, and under autocast."""
    return {name: _run(_recipe(name, "amp-bf16")) for name in ("zero3", "fsdp2")}


def _most(timeline: Timeline, bucket: Bucket) -> int:
    """The most bytes a bucket ever holds."""
    index = ALLOCATED_BUCKETS.index(bucket)
    live = most = 0
    for number in timeline.events:
        if timeline.buckets[abs(number) - 1] == index:
            live += timeline.sizes[abs(number) - 1] * (1 if number > 0 else -1)
            most = max(most, live)
    return most


def _at(result: Replay, phase: Phase, bucket: Bucket) -> int:
    """Bytes of a bucket at the peak of a phase of the last step."""
    return next(p.breakdown[bucket] for p in result.phases if p.step == STEPS and p.phase is phase)


@pytest.mark.slow
def test_a_sharded_step_is_traced_at_every_batch_size(stages: dict[str, Replay]) -> None:
    gpu = find_gpu("a100-80gb")
    workload = WorkloadSpec(_recipe("zero3"), shape=SHAPE)
    traced = predicting.predict(SearchConfig(workload, Device(gpu, simulated=True), steps=STEPS)).prediction.traced
    assert isinstance(traced, Traced), traced
    here, there = stages["zero3"], replay(traced.trace.at(2))
    assert there.peak_allocated_bytes == here.peak_allocated_bytes
    assert there.breakdown == here.breakdown


def test_fsdp_shards_parameters_and_state_to_an_eighth(stages: dict[str, Replay]) -> None:
    whole = 4 * count_parameters(SHAPE)
    for stage in ("zero2", "zero3"):
        assert _at(stages[stage], Phase.BACKWARD, Bucket.PARAMETERS) == pytest.approx(whole / GPUS, rel=0.02)
        assert _at(stages[stage], Phase.OPTIMIZER, Bucket.OPTIMIZER) == pytest.approx(2 * whole / GPUS, rel=0.02)
        assert _at(stages[stage], Phase.OPTIMIZER, Bucket.GRADIENTS) == pytest.approx(whole / GPUS, rel=0.02)


def test_zero1_keeps_parameters_and_gradients_whole_and_spreads_the_state_by_tensor(stages: dict[str, Replay]) -> None:
    whole = 4 * count_parameters(SHAPE)
    largest_tensor = 4 * SHAPE.vocab * SHAPE.hidden
    assert _at(stages["zero1"], Phase.BACKWARD, Bucket.PARAMETERS) == pytest.approx(whole, rel=0.01)
    state = _at(stages["zero1"], Phase.OPTIMIZER, Bucket.OPTIMIZER)
    assert 2 * largest_tensor <= state < 2 * whole / 2


def test_resharding_after_forward_is_what_zero3_saves_over_zero2(stages: dict[str, Replay]) -> None:
    assert stages["zero3"].peak_allocated_bytes < stages["zero2"].peak_allocated_bytes
    assert stages["zero2"].peak_allocated_bytes < stages["none"].peak_allocated_bytes


def test_gathered_weights_are_temporary_not_activations(timelines: dict[str, Timeline]) -> None:
    alone = _most(timelines["none"], Bucket.ACTIVATIONS)
    assert _most(timelines["zero2"], Bucket.ACTIVATIONS) == pytest.approx(alone, rel=0.01)
    assert _most(timelines["zero3"], Bucket.ACTIVATIONS) == pytest.approx(alone, rel=0.01)
    assert _most(timelines["zero2"], Bucket.TEMPORARY) > 0.9 * 4 * count_parameters(SHAPE)


STAGES: tuple[Sharding, ...] = ("zero1", "zero2", "zero3", "fsdp2")
FURTHER = (("bf16", "none"), ("fp32", "none"), ("fp32", "full"), ("amp-bf16", "full"), ("bf16", "full"))


@pytest.mark.parametrize(
    ("step", "sharding", "shape"),
    [
        *pairwise((("amp-bf16", "none"),), STAGES, (SHAPE, LLAMA)),
        *pairwise(FURTHER, STAGES, (SHAPE, LLAMA), pytest.mark.slow),
    ],
)
def test_formula_and_trace_put_the_same_in_the_same_buckets(
    step: tuple[Precision, Recompute], sharding: Sharding, shape: ModelShape
) -> None:
    """Autocast's copies, gathered weights, gradients on their way and buffers to send them: the most of each bucket."""
    precision, recompute = step
    recipe = replace(_recipe(sharding, precision), recompute=recompute)
    traced, formula = _run(recipe, shape), predict(shape, recipe, 2)
    by_autocast = precision == "amp-bf16" and sharding != "fsdp2"
    near = dict.fromkeys(ALLOCATED_BUCKETS, 0.015)
    if recompute == "full":  # of a block that is recomputed the copies of some weights are gone as others are made
        near[Bucket.ACTIVATIONS] = 0.25 if by_autocast else 0.1
        near[Bucket.TEMPORARY] = 0.09 if by_autocast else near[Bucket.TEMPORARY]
    elif (
        sharding == "zero1" and by_autocast and shape.tied_head
    ):  # the head's gradient was made in 16 bits, for a while
        near[Bucket.TEMPORARY] = 0.2
    for bucket in (Bucket.PARAMETERS, Bucket.GRADIENTS, Bucket.OPTIMIZER, Bucket.ACTIVATIONS, Bucket.TEMPORARY):
        most = _most(traced, bucket) - (WORKSPACES if bucket is Bucket.TEMPORARY else 0)
        assert formula.highest[bucket] == pytest.approx(most, rel=near[bucket]), bucket
    # All at once the formula has the last block's with all activations, of which four blocks have a fourth each.
    assert formula.peak_bytes == pytest.approx(replay(traced).peak_allocated_bytes - WORKSPACES, rel=0.15)


@pytest.mark.slow
def test_fsdp2_keeps_its_shards_in_fp32_and_gathers_in_16_bits(mixed: dict[str, Timeline]) -> None:
    whole = count_parameters(SHAPE)
    own = mixed["fsdp2"]
    assert _most(own, Bucket.PARAMETERS) == pytest.approx(4 * whole / GPUS, rel=0.02)
    assert _most(own, Bucket.GRADIENTS) == pytest.approx(4 * whole / GPUS, rel=0.02)
    assert _most(own, Bucket.OPTIMIZER) == pytest.approx(8 * whole / GPUS, rel=0.02)
    # Rows outside the blocks is reduced last: 16-bit gradients, and the fp32 copy that is sent.
    outside = whole - 4 * block_parameters(SHAPE)
    assert _most(own, Bucket.TEMPORARY) >= (2 + 4) * outside


def test_autocast_keeps_16_bit_copies_that_fsdp2s_own_precision_does_not(mixed: dict[str, Timeline]) -> None:
    multiplied = 4 * block_parameters(SHAPE)
    difference = _most(mixed["zero3"], Bucket.ACTIVATIONS) - _most(mixed["fsdp2"], Bucket.ACTIVATIONS)
    assert difference > 2 * multiplied * 0.9
