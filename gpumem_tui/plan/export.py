"""A plan as the command line that opens it again, and all its curves."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields

from gpumem_tui.catalog.loader import models
from gpumem_tui.catalog.shapes import TYPED_CONTEXT
from gpumem_tui.formula.predict import DEFAULT_HEADROOM
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.techniques import why_not
from gpumem_tui.memory import Unknown
from gpumem_tui.plan.answers import LargestOnGpu
from gpumem_tui.plan.curves import Curve, curves, memory_over_step
from gpumem_tui.plan.goals import Goals
from gpumem_tui.plan.plan import Draft, Plan, device_option, draft_of
from gpumem_tui.plan.speed import throughput
from gpumem_tui.search.prediction import Traced

# Command line


def command_line(plan: Plan) -> str | Unknown:
    """Return the command that opens this plan, or why it is missing.

    Options at their default are left out, and so are extras that change nothing of such a network.
    """
    draft, recipe = draft_of(plan), plan.recipe
    if recipe.sharding != "none" and recipe.gpus == 1:
        return Unknown(f"no command has sharding {recipe.sharding} on one GPU: set GPUs to 2 or more")
    model, device = model_words(draft), device_option(plan.gpu)
    if isinstance(model, Unknown):
        return model
    if isinstance(device, Unknown):
        return device
    words = ["gpumem-tui", "plan", *model]
    words += _options(draft.changes.items())
    words += _options((name, value) for name, value in asdict(recipe).items() if value != getattr(Recipe(), name))
    words += ["--batch-size", str(plan.batch_size), "--gpu", device]
    if plan.gpu.context is not None and plan.gpu.context.typed_bytes is not None:
        words += [TYPED_CONTEXT, str(plan.gpu.context.typed_bytes)]
    if plan.gpu.engine is not None:
        words += ["--beside", plan.gpu.engine.typed]
    if plan.headroom != DEFAULT_HEADROOM:
        words += ["--headroom", repr(plan.headroom)]
    if plan.target_batch is not None:
        words += ["--target-batch", str(plan.target_batch)]
    for extra in sorted(plan.extras):
        if why_not(extra, plan.shape, recipe) is None:
            words += ["--extra", extra]
    goals = ((field, getattr(plan.goals, field.name)) for field in fields(Goals) if field.name != "prices")
    words += _options((field.name, value) for field, value in goals if value != field.default)
    return shlex.join([*words, *plan.how])


def model_words(draft: Draft) -> list[str] | Unknown:
    """Return the options that name a draft's model without its changes, or why none do."""
    file = draft.model_file
    if file is not None and file.shape == draft.shape:
        return ["--config", file.path, *(["--dequantize"] if file.dequantize else [])]
    if models().get(draft.shape.name) == draft.shape:
        return ["--model", draft.shape.name]
    return Unknown("the model is none of the catalog's: give its configuration with --config")


def _options(values: Iterable[tuple[str, object]]) -> list[str]:
    given = ((f"--{name.replace('_', '-')}", value) for name, value in values)
    return [word for option, value in given for word in ([option] if value is True else [option, str(value)])]


# Curves


def all_curves(plan: Plan, traced: Traced | Unknown, on_gpus: Sequence[LargestOnGpu]) -> tuple[Curve, ...]:
    """Return the curves of the closed form, by trace too where there is one, memory over a step and throughput.

    Args:
        on_gpus: of `largest_by_gpu`, with the same trace.
    """
    over_step = memory_over_step(plan, traced if isinstance(traced, Traced) else None)
    return (*curves(plan, on_gpus), over_step, throughput(plan))
