"""A plan for a program: as a JSON object, and as the command line that opens it again."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any

from gpumem_tui.catalog.loader import models
from gpumem_tui.formula.predict import DEFAULT_HEADROOM
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.techniques import why_not
from gpumem_tui.memory import Unknown
from gpumem_tui.plan.answers import (
    Answer,
    LargestOnGpu,
    TracedAnswer,
    answer,
    lacking,
    on_gpu,
    traced_answer,
)
from gpumem_tui.plan.combination import Combination, Effect
from gpumem_tui.plan.combining import command_of
from gpumem_tui.plan.command import CommandPlan, on_every_gpu, ranks_line, techniques_of_command
from gpumem_tui.plan.curves import Curve, curves, memory_over_step
from gpumem_tui.plan.goals import Goals
from gpumem_tui.plan.judgement import judgements
from gpumem_tui.plan.limits import Limit
from gpumem_tui.plan.plan import Draft, Plan, device_option, draft_of
from gpumem_tui.plan.recommended import (
    Known,
    all_techniques,
    command_answer,
    judged_at_once,
    plan_answer,
    untraced,
)
from gpumem_tui.plan.speed import cost_of, price_of, rate, run, throughput
from gpumem_tui.report.objects import SCHEMA, known, picked, reason_of
from gpumem_tui.search import report
from gpumem_tui.search.config import Device, SearchConfig
from gpumem_tui.search.prediction import Formula, Prediction, Traced
from gpumem_tui.simulator.allocator.profile import beside_allocator_bytes
from gpumem_tui.workload.spec import WorkloadSpec

# Command line


def command_line(plan: Plan) -> str | Unknown:
    """Return the command that opens this plan, or why there is none.

    Options at their default are left out, and so are extras that change nothing of such a network.
    """
    draft, recipe = draft_of(plan), plan.recipe
    if recipe.sharding != "none" and recipe.gpus == 1:
        return Unknown(f"no command has sharding {recipe.sharding} on one GPU: set GPUs to 2 or more")
    model, device = model_words(draft), device_option(plan)
    if isinstance(model, Unknown):
        return model
    if isinstance(device, Unknown):
        return device
    words = ["gpumem-tui", "plan", *model]
    words += _options(draft.changes.items())
    words += _options((name, value) for name, value in asdict(recipe).items() if value != getattr(Recipe(), name))
    words += ["--batch-size", str(plan.batch_size), "--gpu", device]
    if plan.headroom != DEFAULT_HEADROOM:
        words += ["--headroom", repr(plan.headroom)]
    if plan.target_batch is not None:
        words += ["--target-batch", str(plan.target_batch)]
    for extra in sorted(plan.extras):
        if why_not(extra, plan.shape, recipe) is None:
            words += ["--extra", extra]
    goals = ((field, getattr(plan.goals, field.name)) for field in fields(Goals) if field.name != "prices")
    words += _options((field.name, value) for field, value in goals if value != field.default)
    return shlex.join(words)


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


# JSON


def plan_json(
    plan: Plan, traced: Traced | Unknown, device: Device | None = None, known: Known = untraced, network: str = ""
) -> dict[str, Any]:
    """Return what `plan --json` prints: the object of `predict --json`, and what only a plan has.

    Args:
        traced: of this plan, made on any GPU of its architecture; or why there is none.
        device: where it would run; None for the plan's GPU, simulated.
        known: what traces say of plans that may be recommended.
        network: what was traced, as `plan_answer` takes it.
    """
    if isinstance(traced, Traced):
        traced = on_gpu(plan, traced)
    config = SearchConfig(WorkloadSpec(plan.recipe, shape=plan.shape), device or Device(plan.gpu, simulated=True))
    now = answer(plan)
    by_trace = traced_answer(plan, traced) if isinstance(traced, Traced) else traced
    largest = by_trace.known_batch_size if isinstance(by_trace, TracedAnswer) else None
    best, on_gpus = judged_at_once(plan, traced, by_trace, known)
    judged = all_techniques(plan, by_trace, known)
    beside_bytes = beside_allocator_bytes(plan.gpu)
    formula = Formula(config.workload, plan.gpu.total_bytes, plan.headroom, plan.extras, beside_bytes)
    body = report.prediction_json(config, Prediction(formula, traced), plan.batch_size)
    body["workload"]["extras"] = sorted(plan.extras)
    command = command_line(plan)
    return {
        **body,
        "answer": plan_answer(now, by_trace, best, on_gpus, network),
        **_verdict_json(now, by_trace),
        "accumulation": {
            **report.accumulation_json(now.accumulation),
            "target_batch": plan.target_batch,
            "global_batch_tokens": now.global_batch_tokens or None,
        },
        "speed": _speed_json(plan),
        "run": _run_json(plan),
        "notes": list(lacking(plan)),
        "gpus": [_largest_json(row, plan) for row in on_gpus],
        "techniques": [_technique_json(technique) for technique in judged.helping],
        "not_applicable": [picked(entry, "name", "reason") for entry in judged.not_applicable],
        "combination": _combination_json(best.formula_only or best.combination, best.traced),
        "traceable_combination": _combination_json(best.traceable, best.traced),
        "curves": [_curve_json(curve) for curve in all_curves(plan, traced, on_gpus)],
        "judgements": [asdict(judgement) for judgement in judgements(plan, largest)],
        "command": command if isinstance(command, str) else None,
    }


def _technique_json(effect: Effect) -> dict[str, Any]:
    return {
        **picked(effect.change, "name", "option"),
        **picked(effect, "saved_bytes", "peak_bytes", "fits"),
        "max_batch_size": effect.known_largest,
        **picked(effect.change, "cost", "source"),
        "formula_only": effect.formula_only,
        "is_traced": effect.by == "traced",
    }


def command_plan_json(plan: CommandPlan) -> dict[str, Any]:
    """Return what `plan --json -- COMMAND` prints: the object of `predict --json`, and what follows from it."""
    found = plan.answer()
    judged = techniques_of_command(plan, found)
    return {
        **report.prediction_json(plan.config, plan.predicted.prediction, plan.batch_size),
        "answer": command_answer(plan, found),
        "accumulation": None if plan.accumulation is None else report.accumulation_json(plan.accumulation),
        "techniques": [_tried_json(plan, row) for row in judged.helping],
        "not_applicable": [picked(entry, "key", "name", "reason") for entry in judged.not_applicable],
        "together": [_together_json(plan, one) for one in plan.together],
        "gpus": [_on_gpu_json(there, found) for there, found in on_every_gpu(plan)],
        "batch_sizes": [
            {
                "batch_size": row.plan.batch_size,
                **picked(row, "peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes"),
                "device_used_range": row.device_used_range.as_json(),
                "fits": row.fit == "fits",
                "fit": row.fit,
            }
            for row in found.batches()
        ],
        "ranks": {"ranks": plan.ranks, "sharded": plan.base.done.is_sharded, "note": ranks_line(plan)},
    }


def limit_json(plan: Plan, found: Limit) -> dict[str, Any]:
    """Return what a plan was solved for, as an object of schema 1."""
    command = Unknown("no value") if found.plan is None else command_line(found.plan)
    return {
        "schema": SCHEMA,
        "solve": found.quantity,
        "value": found.value,
        "how": found.how if found.value is not None else None,
        "beyond": found.beyond,
        "formula": found.formula,
        "note": found.note or None,
        "lift": None if found.lift is None else _combination_json(found.lift, Unknown("by formula")),
        "model": plan.shape.name,
        "gpu": plan.gpu.name,
        "headroom": plan.headroom,
        "command": command if isinstance(command, str) else None,
    }


def _verdict_json(now: Answer, by_trace: TracedAnswer | Unknown) -> dict[str, Any]:
    """Return the verdict by trace where there is one; the formula's own is with the formula."""
    if isinstance(by_trace, Unknown):
        return {"fits": now.fits, "keeps_headroom": now.fits, "spare_bytes": now.spare_bytes, "verdict_by": "formula"}
    return {
        "fits": by_trace.fit == "fits",
        "keeps_headroom": by_trace.fits,
        "spare_bytes": by_trace.free_range.low_bytes,
        "verdict_by": "trace",
    }


def _largest_json(row: LargestOnGpu, plan: Plan) -> dict[str, Any]:
    cost = cost_of(plan, row.gpu)
    return {
        **picked(row.gpu, "name", "title", "total_bytes"),
        "formula_max_batch_size": row.formula,
        "traced_max_batch_size": known(row.traced),
        "unavailable": reason_of(row.traced),
        "same_architecture": row.same_architecture,
        "cost_per_million": None if isinstance(cost, Unknown) else list(cost.per_million),
        "price_per_hour": None if isinstance(cost, Unknown) else asdict(cost.price),
        "notes": list(row.lacks),
    }


def _on_gpu_json(plan: CommandPlan, there: TracedAnswer) -> dict[str, Any]:
    return {
        **picked(plan.gpu, "name", "title", "total_bytes"),
        "fits": there.fit == "fits",
        "fit": there.fit,
        "free_bytes": there.spare_bytes,
        "free_range": there.free_range.as_json(),
        "max_batch_size": known(there.full_batch_size),
        "may_fit_batch_size": known(there.may_fit_batch_size),
        "traced_on": plan.config.device.gpu.name,
        "exact": plan.is_exact,
    }


def _tried_json(plan: CommandPlan, row: Effect) -> dict[str, Any]:
    command, written = command_of(plan, Combination((row.change,), plan.batch_size))
    return {
        **picked(row.change, "key", "name", "how"),
        "command": command,
        "in_the_program": list(written),
        **picked(row, "saved_bytes", "peak_bytes"),
        "peak_reserved_bytes": row.reserved_bytes,
        "buckets": None if row.buckets is None else row.buckets.as_json(),
        "fits": row.fits,
        "max_batch_size": known(row.largest),
        "cost": row.change.cost,
        "cost_source": row.change.source,
        "source": row.by,
        **({"unavailable": row.largest.reason} if isinstance(row.largest, Unknown) else {}),
    }


def _together_json(plan: CommandPlan, one: Combination) -> dict[str, Any]:
    command, written = command_of(plan, one)
    body: dict[str, Any] = {
        "changes": [change.key for change in one.changes],
        "batch_size": one.batch_size,
        "passes": one.passes,
        "fits": None,
        "peak_bytes": None,
        "command": command,
        "in_the_program": list(written),
    }
    if isinstance(one.traced, Unknown):
        return {**body, "unavailable": one.traced.reason}
    peak_bytes = one.traced.at(one.batch_size).peak_allocated_bytes
    return {**body, "fits": plan.fit_with(one) == "fits", "peak_bytes": peak_bytes + one.beside_bytes}


def _speed_json(plan: Plan) -> dict[str, Any]:
    """Return the least and the most of one GPU's speed, never measured here."""
    found = rate(plan)
    if isinstance(found, Unknown):
        return {"samples_per_s": None, "unavailable": found.reason}
    tokens, share = plan.shape.seq_len, found.engine.share
    return {
        "samples_per_s": [found.least, found.most],
        "tokens_per_s": [found.least * tokens, found.most * tokens] if tokens else None,
        "assumed_share": [share.least, share.most],
        "assumed_from": share.source,
        "peak_tflops": found.engine.tflops,
        "computed_by": found.engine.name,
    }


def _run_json(plan: Plan) -> dict[str, Any]:
    """Return the least and the most that the wanted tokens take."""
    found = run(plan)
    if isinstance(found, Unknown):
        return {"hours": None, "unavailable": found.reason}
    return {
        "tokens": found.tokens,
        "link": None if found.link is None else found.link.name,
        "hours": list(found.hours),
        "gpu_hours": list(found.gpu_hours),
        "cost": None if found.cost is None else list(found.cost),
        "price_per_hour": None if (price := price_of(plan)) is None else asdict(price),
    }


def _combination_json(found: Combination | Unknown, traced: TracedAnswer | Unknown) -> dict[str, Any]:
    """Return the JSON object of a combination of techniques.

    Args:
        traced: of the combination, unless only the formula knows it; or why there is no trace.
    """
    if isinstance(found, Unknown):
        return {"techniques": None, "unavailable": found.reason}
    command = command_line(found.plan)
    if found.formula_only:
        traced = Unknown("only the formula knows it")
    by_trace: dict[str, Any] = {"fits": None, "peak_allocated_bytes": None, "max_batch_size": None}
    if isinstance(traced, Unknown):
        by_trace["unavailable"] = traced.reason
    else:
        by_trace = picked(traced, *by_trace)
        by_trace["max_batch_size"] = known(traced.max_batch_size)
    return {
        "techniques": [change.name for change in found.changes],
        "batch_size": found.batch_size,
        **picked(found.by_formula, "peak_bytes", "max_batch_size"),
        "accumulation": report.accumulation_json(found.by_formula.accumulation),
        "formula_only": found.formula_only,
        "traced": by_trace,
        "command": command if isinstance(command, str) else None,
    }


def _curve_json(curve: Curve) -> dict[str, Any]:
    return {
        **picked(curve, "key", "title"),
        "x": curve.x_label,
        "y": curve.y_label,
        "note": curve.note,
        "series": [asdict(series) for series in curve.series],
        "marks": [asdict(mark) for mark in curve.marks],
    }


def all_curves(plan: Plan, traced: Traced | Unknown, on_gpus: Sequence[LargestOnGpu]) -> tuple[Curve, ...]:
    """Return the curves of the closed form, by trace too where there is one, memory over a step and throughput.

    Args:
        on_gpus: of `largest_by_gpu`, with the same trace.
    """
    over_step = memory_over_step(plan, traced if isinstance(traced, Traced) else None)
    return (*curves(plan, on_gpus), over_step, throughput(plan))
