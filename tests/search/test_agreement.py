"""One rule for every verb: search, predict and plan agree on the safe batch, and what is missing is what is missing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import MIB, Bucket, Range
from gpumem_tui.plan.answers import traced_answer
from gpumem_tui.plan.plan import Plan
from gpumem_tui.run.events import Outcome, TrialDone
from gpumem_tui.search import strategy, verdict
from gpumem_tui.search.config import Device, SearchConfig
from gpumem_tui.search.predicting import Predicted
from gpumem_tui.search.prediction import BatchSizes, Formula, Prediction, Traced
from gpumem_tui.search.printed import PredictObject
from gpumem_tui.search.report import answer_line
from gpumem_tui.search.runner import search
from gpumem_tui.search.verdict import Verdict
from gpumem_tui.simulator.allocator.caching import SEGMENT_GRANULE_BYTES
from gpumem_tui.simulator.allocator.replay import AffineTrace, replay
from gpumem_tui.simulator.allocator.rules import Workspace
from gpumem_tui.simulator.allocator.timeline import Timeline, TimelineRecorder
from gpumem_tui.step import Phase
from gpumem_tui.workload.spec import WorkloadSpec
from tests.search.traces import traced

CARDS = ("rtx-2060-6gb", "rtx-3070-8gb", "t4-16gb", "rtx-4090-24gb", "a100-40gb", "h100-80gb")
SEEDS = range(40)
GPT2 = WorkloadSpec(Recipe(), shape=find_model("gpt2"))


def steps_of(seed: int) -> Callable[[int], Timeline]:
    """Return a made-up program: tensors of any sizes that come and go, some with workspaces of unknown size."""

    def steps(batch: int) -> Timeline:
        draw, recorder = random.Random(seed), TimelineRecorder()
        recorder.mark(0, Phase.BUILD)
        for _ in range(draw.randint(1, 8)):
            recorder.allocate(draw.randint(1, 200 * MIB), bucket=Bucket.PARAMETERS)
        for step in range(1, draw.randint(2, 4)):
            recorder.mark(step, Phase.FORWARD)
            live = list[int]()
            for _ in range(draw.randint(5, 40)):
                if live and draw.random() < 0.4:
                    recorder.release(live.pop(draw.randrange(len(live))))
                size = int(2 ** draw.uniform(12, 26))
                if draw.random() < 0.2:
                    unsure = Workspace(most=batch * size, chosen=batch * size * draw.randint(0, 2))
                    recorder.release(recorder.allocate(unsure.computed("unknown"), bucket=Bucket.TEMPORARY))
                fixed, grows = draw.randint(0, 8 * MIB), size if draw.random() < 0.8 else 0
                live.append(recorder.allocate(fixed + grows * batch, bucket=Bucket.ACTIVATIONS))
            for number in live:
                recorder.release(number)
        return recorder.finish()

    return steps


def on_a_card(seed: int) -> Traced:
    """Return a made-up program on a card whose context is a range."""
    draw, steps = random.Random(seed), steps_of(seed)
    found = traced(AffineTrace.fit((2, steps(2)), (3, steps(3))), find_gpu(draw.choice(CARDS)))
    context = found.ready.context_bytes
    between = Range(context - draw.randint(0, 100) * MIB, context + draw.randint(0, 500) * MIB)
    profile = f"torch 2.13 {found.gpu.sm}"
    return replace(found, ready=replace(found.ready, profile=profile, context_range=between))


def sizes_of(found: Traced) -> BatchSizes:
    sizes = found.sizes
    assert isinstance(sizes, BatchSizes)
    return sizes


def searched(found: Traced) -> Verdict:
    """Return the verdict of a search on the simulated card, whose trials are replays up to its end."""

    def trial(size: int) -> TrialDone:
        ran = replay(found.trace.at(size), found.capacity_bytes)
        reserved = ran.peak_reserved_bytes
        outcome: Outcome = "fit" if ran.fits else "oom"
        used = reserved + found.ready.context_bytes
        return TrialDone(size, outcome, ran.peak_allocated_bytes, reserved, used, {}, "", 1.0, 3)

    results = list[TrialDone]()
    settings = strategy.StrategySettings(predicted=sizes_of(found).expected, capacity_bytes=found.capacity_bytes)
    while (size := strategy.next_size(verdict.tried(results), settings)) is not None:
        results.append(trial(size))
    return verdict.concluded(results, "the card", grows=True, known=verdict.Known(found))


@pytest.mark.parametrize("seed", SEEDS)
def test_search_predict_and_plan_agree_to_the_batch(seed: int) -> None:
    found = on_a_card(seed)
    sizes = sizes_of(found)
    config = SearchConfig(GPT2, Device(found.gpu, simulated=True))
    prediction = Prediction(Formula(GPT2, found.gpu.total_bytes), found)
    at = max(1, sizes.safe)
    predicted = PredictObject.of(config, prediction, at)
    planned = traced_answer(Plan(find_model("gpt2"), Recipe(), found.gpu, at), found)
    ended = searched(found)
    assert ended.max_batch_size == sizes.expected == predicted.traced.expected_batch_size
    assert ended.safe_batch_size == sizes.safe == predicted.traced.max_batch_size == planned.full_batch_size
    assert ended.at_most_batch_size == sizes.at_most == predicted.traced.may_fit_batch_size
    if ended.verified and sizes.at_most > sizes.expected:  # it ran out of memory, and yet may fit elsewhere
        assert f", up to {sizes.at_most:,} may fit where unknown sizes are at their least" in ended.message
    assert predicted.answer == answer_line(config, prediction, at)
    if sizes.safe:
        assert (found.fit(at), planned.fit, predicted.traced.fit) == ("fits", "fits", "fits")
        assert f"safe batch {sizes.safe:,}" in predicted.answer
        assert ended.message.startswith(f"safe batch {sizes.safe:,} on the card")
        assert ended.exit_code == 0
    else:
        assert ended.exit_code == 3
    if sizes.expected > sizes.safe:
        assert found.fit(sizes.expected) == "may fit", "what runs only as expected is never called safe"


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_left_at_both_ends_is_the_verdict(seed: int) -> None:
    found = on_a_card(seed)
    sizes = sizes_of(found)
    for size in {
        max(1, size) for size in (sizes.safe, sizes.safe + 1, sizes.expected, sizes.at_most, sizes.at_most + 1)
    }:
        free, fit = found.free_range(size), found.fit(size)
        assert fit == ("fits" if free.low_bytes >= 0 else "may fit" if free.high_bytes >= 0 else "does not fit")
        used, total = found.device_used_range(size), found.gpu.cuda_total_range
        assert (fit == "fits") == (used.high_bytes <= total.low_bytes)
        assert found.device_used_bytes(size) in used


@pytest.mark.parametrize("seed", SEEDS)
def test_a_card_with_what_is_missing_fits_and_one_with_a_segment_less_does_not(seed: int) -> None:
    found = on_a_card(seed)
    beyond = sizes_of(found).at_most + 1
    too_large = [size for size in (beyond, beyond + 3, 4 * beyond) if found.fit(size) == "does not fit"]
    assert beyond in too_large  # pieces of the cache differ by size: a larger one may fit anyway
    for size in too_large:
        free = found.free_range(size)
        assert _with_more(found, -free.low_bytes).fit(size) == "fits"
        assert _with_more(found, -free.low_bytes - SEGMENT_GRANULE_BYTES).fit(size) != "fits"
        assert _with_more(found, -free.high_bytes).fit(size) != "does not fit"
        assert _with_more(found, -free.high_bytes - SEGMENT_GRANULE_BYTES).fit(size) == "does not fit"


def _with_more(found: Traced, more_bytes: int) -> Traced:
    gpu = found.gpu
    larger = replace(gpu, total_bytes=gpu.total_bytes + more_bytes, cuda_total_bytes=gpu.cuda_total_bytes + more_bytes)
    return replace(found, gpu=larger, _runs={})


def test_what_is_missing_is_not_what_an_endless_card_would_reserve() -> None:
    """An evaluation that appends to what it has: each tensor is larger than every piece that the ones before leave."""
    recorder = TimelineRecorder()
    recorder.mark(0, Phase.BUILD)
    kept = 0
    recorder.mark(1, Phase.EVALUATION)
    for number in range(1, 41):
        piece = recorder.allocate(100 * MIB, bucket=Bucket.ACTIVATIONS)
        longer = recorder.allocate(number * 100 * MIB, bucket=Bucket.ACTIVATIONS)
        recorder.release(piece)
        if kept:
            recorder.release(kept)
        kept = longer
    found = traced(AffineTrace.constant(recorder.finish()), find_gpu("rtx-2060-6gb"))
    endless = replay(found.trace.at(1)).peak_reserved_bytes + found.ready.context_bytes - found.gpu.cuda_total_bytes
    missing = -found.free_range(1).low_bytes
    assert 0 < 3 * missing < endless
    assert _with_more(found, missing).fit(1) == "fits"


def small_searches() -> list[object]:
    """Forty searches of catalog models; two of them are tried each time that slow ones are."""
    models = {"mlp": {"hidden": 64}, "gpt2": {"layers": 2}, "resnet-50": {}, "vit-b-16": {"layers": 2}}
    recipes = (Recipe(), Recipe(optimizer="sgd"))
    found = [
        (model, changed, recipe, card) for model, changed in models.items() for recipe in recipes for card in CARDS[:5]
    ]
    slow = {("mlp", "adamw", "t4-16gb"), ("gpt2", "sgd", "rtx-3070-8gb")}
    return [
        pytest.param(
            *one,
            marks=pytest.mark.slow if (one[0], one[2].optimizer, one[3]) in slow else pytest.mark.exhaustive,
            id=f"{one[0]}-{one[2].optimizer}-{one[3]}",
        )
        for one in found
    ]


@pytest.mark.parametrize(("model", "changed", "recipe", "card"), small_searches())
def test_a_search_of_real_steps_agrees(model: str, changed: dict[str, int], recipe: Recipe, card: str) -> None:
    shape, gpu = find_model(model).overridden(**changed), find_gpu(card)
    events = list(search(SearchConfig(WorkloadSpec(recipe, shape=shape), Device(gpu, simulated=True))))
    ended = events[-1]
    assert isinstance(ended, Verdict)
    found = next(event.prediction.traced for event in events if isinstance(event, Predicted))
    assert isinstance(found, Traced)
    sizes = sizes_of(found)
    assert (ended.safe_batch_size, ended.max_batch_size, ended.at_most_batch_size) == (
        sizes.safe, sizes.expected, sizes.at_most,
    )  # fmt: skip
    planned = traced_answer(Plan(shape, recipe, gpu, max(1, sizes.safe)), found)
    assert (planned.full_batch_size, planned.fit) == (sizes.safe, "fits" if sizes.safe else planned.fit)
