"""Plans to ask about, and a trace made by hand."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from gpumem_tui.catalog.loader import find_gpu, find_model, gpus, models
from gpumem_tui.formula.changes import BF16_SINCE
from gpumem_tui.formula.extras import EXTRAS, why_not
from gpumem_tui.formula.recipe import ATTENTIONS, OPTIMIZERS, PRECISIONS, RECOMPUTES, SHARDINGS, Recipe
from gpumem_tui.memory import MIB, Bucket
from gpumem_tui.plan.plan import Plan
from gpumem_tui.search.prediction import Traced
from gpumem_tui.simulator.replay import AffineTrace
from gpumem_tui.simulator.timeline import Phase, Timeline, TimelineRecorder

CONTEXT_BYTES = 426 * MIB
PROFILE = "torch 2.13 sm_80"

GPT2 = Plan(find_model("gpt2"), Recipe(), find_gpu("a100-80gb"), batch_size=8)
LLAMA_ON_FOUR = Plan(find_model("llama-3-8b"), Recipe(gpus=4), find_gpu("rtx-4090-24gb"))

RECIPES = st.builds(
    Recipe,
    precision=st.sampled_from(PRECISIONS),
    optimizer=st.sampled_from(OPTIMIZERS),
    recompute=st.sampled_from(RECOMPUTES),
    attention=st.sampled_from(ATTENTIONS),
    sharding=st.sampled_from(SHARDINGS),
    gpus=st.integers(1, 16),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan that the controls allow."""
    shape = draw(st.sampled_from(list(models().values())))
    recipe = draw(RECIPES)
    if recipe.gpus == 1:
        recipe = replace(recipe, sharding="none")
    batch_size = draw(st.integers(1, 64))
    gpu = draw(st.sampled_from([gpu for gpu in gpus().values() if gpu.compute_capability >= BF16_SINCE]))
    target = draw(st.none() | st.integers(batch_size * recipe.gpus, 4096))
    wanted = draw(st.frozensets(st.sampled_from(EXTRAS)))
    extras = frozenset(extra for extra in wanted if why_not(extra, shape, recipe) is None)
    return Plan(shape, recipe, gpu, batch_size, draw(st.sampled_from([0.0, 0.05, 0.1])), target, extras)


def timeline(batch_size: int) -> Timeline:
    """Three steps: 400 MiB of weights, 100 MiB of activations a sample, in four parts."""
    recorder = TimelineRecorder()

    def allocate(bucket: Bucket, size_bytes: int) -> int:
        number = recorder.allocate(size_bytes)
        recorder.tag(number, bucket)
        return number

    recorder.mark(0, Phase.BUILD)
    allocate(Bucket.PARAMETERS, 400 * MIB)
    for step in (1, 2, 3):
        recorder.mark(step, Phase.BATCH)
        batch = allocate(Bucket.BATCH_DATA, 16_384 * batch_size)
        recorder.mark(step, Phase.FORWARD)
        kept = [allocate(Bucket.ACTIVATIONS, 25 * MIB * batch_size) for _ in range(4)]
        recorder.mark(step, Phase.BACKWARD)
        gradients = allocate(Bucket.GRADIENTS, 400 * MIB)
        for number in kept:
            recorder.release(number)
        recorder.mark(step, Phase.OPTIMIZER)
        if step == 1:
            allocate(Bucket.OPTIMIZER, 800 * MIB)
        recorder.release(gradients)
        recorder.release(batch)
    return recorder.finish()


TRACED = Traced(
    AffineTrace.fit((2, timeline(2)), (3, timeline(3))),
    find_gpu("a100-80gb").cuda_total_bytes - CONTEXT_BYTES,
    None,
    PROFILE,
    CONTEXT_BYTES,
    2.5,
)
