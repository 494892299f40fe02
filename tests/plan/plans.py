"""Plans to ask about, and a trace made by hand."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from gpumem_tui.catalog.loader import find_gpu, find_model, gpus, models
from gpumem_tui.formula.recipe import ATTENTIONS, EXTRAS, OPTIMIZERS, PRECISIONS, RECOMPUTES, SHARDINGS, Recipe
from gpumem_tui.formula.records import BF16_SINCE
from gpumem_tui.formula.techniques import why_not
from gpumem_tui.memory import ALLOCATED_BUCKETS, MIB, Bucket
from gpumem_tui.plan.answers import TracedAnswer, predicted
from gpumem_tui.plan.plan import Plan
from gpumem_tui.search.prediction import Traced
from gpumem_tui.simulator.allocator.replay import AffineTrace
from gpumem_tui.simulator.allocator.timeline import Timeline
from tests.search.traces import NO_SETTING, traced, training

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
    if shape.sinks and recipe.attention in ("flash", "efficient"):
        recipe = replace(recipe, attention="auto")
    batch_size = draw(st.integers(1, 64))
    gpu = draw(st.sampled_from([gpu for gpu in gpus().values() if gpu.compute_capability >= BF16_SINCE]))
    target = draw(st.none() | st.integers(batch_size * recipe.gpus, 4096))
    wanted = draw(st.frozensets(st.sampled_from(EXTRAS)))
    extras = frozenset(extra for extra in wanted if why_not(extra, shape, recipe) is None)
    return Plan(shape, recipe, gpu, batch_size, draw(st.sampled_from([0.0, 0.05, 0.1])), target, extras)


def timeline(batch_size: int) -> Timeline:
    """400 MiB of weights, 100 MiB of activations a sample, in four parts."""
    sizes = {
        Bucket.PARAMETERS: 400 * MIB,
        Bucket.BATCH_DATA: 16_384 * batch_size,
        Bucket.ACTIVATIONS: 100 * MIB * batch_size,
        Bucket.GRADIENTS: 400 * MIB,
        Bucket.OPTIMIZER: 800 * MIB,
    }
    return training(sizes, layers=4)


_FORM = AffineTrace.fit((2, timeline(2)), (3, timeline(3)))
TRACED = replace(traced(_FORM, find_gpu("a100-80gb")), settings=NO_SETTING)


# By the closed form

GPT2_FOR_64 = replace(GPT2, target_batch=64)
LLAMA = Plan(
    find_model("llama-3-8b"),
    Recipe("amp-bf16", sharding="zero3", gpus=4),
    find_gpu("rtx-4090-24gb"),
    headroom=0.05,
    target_batch=64,
)
FITS = replace(LLAMA, recipe=Recipe("bf16", "adamw", "full", "auto", "zero3", 4))
RESNET = Plan(find_model("resnet-50"), Recipe("amp-bf16"), find_gpu("t4-16gb"), batch_size=8)


def timeline_of(plan: Plan, batch_size: int, steps: int = 2) -> Timeline:
    """Steps that take what the closed form states, the gradients only as the activations go."""
    sizes = predicted(plan, batch_size).breakdown
    return training({bucket: sizes[bucket] for bucket in ALLOCATED_BUCKETS}, layers=4, steps=steps, interleaved=True)


def traced_of(plan: Plan, steps: int = 2) -> Traced:
    """The answer of a trace of the plan."""
    form = AffineTrace.fit((4, timeline_of(plan, 4, steps)), (8, timeline_of(plan, 8, steps)))
    return replace(traced(form, plan.gpu), settings=NO_SETTING)


def with_figures(found: TracedAnswer, **figures: object) -> TracedAnswer:
    """Return an answer by trace whose figures are these."""
    other = replace(found)
    vars(other).update(figures)
    return other
