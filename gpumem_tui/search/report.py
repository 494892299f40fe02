"""The search and the predictions as JSON objects (schema 1, keys are a public contract) and as plain lines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gpumem_tui.formula.accumulation import Accumulation, accumulation, tokens_per_global_batch
from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.formula.predict import FormulaPrediction
from gpumem_tui.formula.recipe import Recipe, Sharding
from gpumem_tui.memory import ALLOCATED_BUCKETS, Bucket, Unknown, format_bytes, format_range
from gpumem_tui.search.comparison import compared, peak_error
from gpumem_tui.search.config import Device, SearchConfig
from gpumem_tui.search.headroom import WithHeadroom
from gpumem_tui.search.ledger import signed
from gpumem_tui.search.prediction import Formula, Prediction, Traced
from gpumem_tui.search.ranges import range_json, up_to
from gpumem_tui.search.shortfall import shortfall
from gpumem_tui.search.verdict import Verdict
from gpumem_tui.simulator.replay import Replay
from gpumem_tui.simulator.rules import NOT_EXAMINED
from gpumem_tui.step import Phase
from gpumem_tui.trial.events import Outcome, TrialDone
from gpumem_tui.workload.spec import WorkloadSpec

SCHEMA = 1
_FORMULA_BUCKETS = tuple(bucket for bucket in ALLOCATED_BUCKETS if bucket is not Bucket.OTHER)
OUTCOME_WORDS: dict[Outcome, str] = {"fit": "fits", "oom": "out of memory", "error": "failed"}
_COMPOSITION_LINES = 20
_SHARDING_NOTES: dict[Sharding, str] = {
    "zero1": "ZeRO-1: ZeroRedundancyOptimizer hands out whole parameters, so rank 0 can hold more than its share",
    "zero2": "ZeRO-2: FSDP2 without resharding after forward, so between steps parameters are sharded too",
}
PHASE_WORDS = {
    Phase.BUILD: "while the model is built",
    Phase.BATCH: "before forward",
    Phase.FORWARD: "in forward",
    Phase.BACKWARD: "in backward",
    Phase.OPTIMIZER: "in the optimizer step",
}


# JSON


def workload_json(workload: WorkloadSpec, batch_size: int | None = None) -> dict[str, Any]:
    """What is trained."""
    body: dict[str, Any] = {"model": workload.name}
    command = workload.command
    if command is not None:
        body["command"] = list(command.words)
        body["gpus"] = workload.recipe.gpus
        if not command.takes_batch:
            batch_size = None if command.proposal is None else command.proposal.batch_size
            body["batch_size"] = batch_size
    if batch_size is not None:
        body["batch_size"] = batch_size
    if workload.hugging_face is not None:
        model = workload.hugging_face
        body.update(model_type=model.model_type, architecture=model.architecture, seq_len=model.seq_len)
        body.update(asdict(workload.recipe))
    if workload.shape is not None:
        body["parameters"] = count_parameters(workload.shape)
        body["shape"] = {
            key: value
            for key, value in asdict(workload.shape).items()
            if value and key not in ("name", "source", "published_parameters")
        }
        body.update(asdict(workload.recipe))
    return body


def device_json(device: Device) -> dict[str, Any]:
    """Where it runs."""
    return {
        "name": device.gpu.title,
        "total_bytes": device.gpu.total_bytes,
        "simulated": device.simulated,
        "reason": device.reason or None,
    }


def _moment_json(replay: Replay) -> dict[str, Any] | None:
    if replay.peak_moment is None:
        return None
    mark, site = replay.peak_moment
    return {"step": mark.step, "phase": mark.phase.value, **asdict(site)}


def formula_json(formula: Formula, batch_size: int) -> dict[str, Any]:
    """The closed form at a batch size; null figures carry their reason under `unavailable`."""
    prediction = formula.at(batch_size)
    if isinstance(prediction, Unknown):
        return {"buckets": None, "peak_bytes": None, "max_batch_size": None, "unavailable": prediction.reason}
    return {
        "buckets": prediction.breakdown.as_json(_FORMULA_BUCKETS),
        "peak_bytes": prediction.peak_bytes,
        "max_batch_size": formula.max_batch_size,
        "headroom": formula.headroom,
        "rows": [
            {"bucket": r.bucket.value, "name": r.name, "size_bytes": r.size_bytes, "formula": r.expression,
             "source": r.source, "note": r.note}
            for r in prediction.rows
        ],
        "assumptions": list(prediction.assumptions),
    }  # fmt: skip


def traced_json(traced: Traced | Unknown, batch_size: int) -> dict[str, Any]:
    """The traced step at a batch size."""
    keys = ("buckets", "peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "max_batch_size", "profile")
    if isinstance(traced, Unknown):
        return {**dict.fromkeys(keys), "unavailable": traced.reason}
    replay = traced.at(batch_size)
    largest = traced.max_batch_size
    body: dict[str, Any] = {
        "buckets": replay.breakdown.as_json(),
        "peak_allocated_bytes": replay.peak_allocated_bytes,
        "peak_reserved_bytes": replay.peak_reserved_bytes,
        "device_used_bytes": traced.device_used_bytes(batch_size),
        "max_batch_size": largest if isinstance(largest, int) else None,
        "parameters": traced.parameters or None,
        "profile": traced.profile,
        **range_json(
            traced.fit(batch_size),
            traced.device_used_range(batch_size),
            traced.may_fit_batch_size,
            traced.unknowns(batch_size),
        ),
        "peak": _moment_json(replay),
        "context_bytes": traced.context_bytes,
        "context_source": traced.context_source,
        "notes": list(traced.notes),
        "assumed": [{"operator": name, "times": times, "why": why} for name, times, why in traced.assumed],
        "phases": [
            {"step": p.step, "phase": p.phase.value, "peak_allocated_bytes": p.peak_allocated_bytes,
             "reserved_bytes": p.reserved_bytes, "buckets": p.breakdown.as_json()}
            for p in replay.phases
        ],
        "composition": [
            {"bucket": held.bucket.value, "module": held.site.module, "operator": held.site.operator,
             "source": held.site.source, "bytes": held.size_bytes, "allocations": held.allocations}
            for held in traced.held_at_peak(batch_size)
        ],
    }  # fmt: skip
    if isinstance(largest, Unknown):
        body["unavailable"] = largest.reason
    return body


def prediction_json(config: SearchConfig, prediction: Prediction, batch_size: int) -> dict[str, Any]:
    """The object that `predict --json` prints."""
    return {
        "schema": SCHEMA,
        "workload": workload_json(config.workload, batch_size),
        "device": device_json(config.device),
        "formula": formula_json(prediction.formula, batch_size),
        "traced": traced_json(prediction.traced, batch_size),
    }


def trial_json(number: int, result: TrialDone, device: Device) -> dict[str, Any]:
    """One line of `search --json`."""
    return {
        "event": "trial",
        "schema": SCHEMA,
        "number": number,
        "batch_size": result.batch_size,
        "outcome": result.outcome,
        "simulated": device.simulated,
        "peak_allocated_bytes": result.peak_allocated_bytes,
        "peak_reserved_bytes": result.peak_reserved_bytes,
        "device_used_bytes": result.device_used_bytes,
        "buckets": result.buckets,
        "buckets_unavailable": result.buckets_unknown or None,
        "steps": result.steps,
        "step_seconds": list(result.step_seconds),
        "seconds": round(result.seconds, 3),
        "alloc_retries": result.alloc_retries,
        "detail": result.detail or None,
        "notes": list(result.notes),
    }


def result_json(
    config: SearchConfig, verdict: Verdict, prediction: Prediction | None, advice: Sequence[str]
) -> dict[str, Any]:
    """The last line of `search --json`."""
    body: dict[str, Any] = {
        "event": "result",
        "schema": SCHEMA,
        "outcome": verdict.outcome,
        "max_batch_size": verdict.max_batch_size,
        "first_failing": verdict.first_failing,
        "verified": verdict.verified,
        "with_headroom": _headroom_json(verdict.with_headroom),
        "trials": verdict.trials,
        "ooms": verdict.ooms,
        "message": verdict.message,
        "workload": workload_json(config.workload),
        "device": device_json(config.device),
        "advice": list(advice),
    }
    if prediction is not None:
        at = max(1, verdict.max_batch_size)
        body["formula"] = formula_json(prediction.formula, at)
        body["traced"] = traced_json(prediction.traced, at)
    if (steps := wanted_accumulation(config, verdict.max_batch_size)) is not None:
        body["accumulation"] = accumulation_json(steps)
    return body


def _headroom_json(found: WithHeadroom | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "headroom": found.share,
        "max_batch_size": found.batch_size,
        "free_bytes": found.free_bytes,
        "known_by": found.known_by,
    }


def wanted_accumulation(config: SearchConfig, batch_size: int) -> Accumulation | None:
    """How a micro-batch reaches the wanted global batch; None if none is wanted, or not one sample fits."""
    if config.target_batch is None or not batch_size:
        return None
    return accumulation(config.target_batch, batch_size, config.workload.recipe.gpus)


def accumulation_json(steps: Accumulation) -> dict[str, int]:
    """How the found batch reaches the wanted one."""
    return {
        "steps": steps.steps,
        "global_batch_size": steps.global_batch_size,
        "target_batch": steps.target_batch,
    }


# Plain lines


def workload_line(workload: WorkloadSpec, parameters: int = 0) -> str:
    """The workload in one line. `parameters`: as a trace has counted them, where there is no closed form."""
    shape, recipe, model = workload.shape, workload.recipe, workload.hugging_face
    if model is not None:
        counted = f"{parameters:,} parameters" if parameters else ""
        size = f"sequence length {model.seq_len:,}" if model.seq_len else ""
        how = (recipe.precision, recipe.optimizer, f"recompute {recipe.recompute}", f"attention {recipe.attention}")
        return " · ".join(part for part in (model.name, model.kind, counted, size, *how) if part)
    if workload.command is not None:
        ranks = f" · rank 0 of {recipe.gpus}" if recipe.gpus > 1 else ""
        return f"{workload.name}{ranks}"
    if shape is None:
        return f"workload file {workload.name}"
    parts = [shape.name, f"{count_parameters(shape):,} parameters"]
    if shape.seq_len:
        parts.append(f"sequence length {shape.seq_len:,}")
    if shape.image_size:
        parts.append(f"{shape.image_size} px")
    parts += [recipe.precision, recipe.optimizer, f"recompute {recipe.recompute}", f"attention {recipe.attention}"]
    if recipe.sharding != "none" or recipe.gpus > 1:
        parts.append(f"sharding {recipe.sharding} over {recipe.gpus} GPUs")
    return " · ".join(parts)


def device_line(device: Device, limit_bytes: int | None = None) -> str:
    """The device in one line, saying in words when it is simulated, and when less of it may be used."""
    reason = f" ({device.reason})" if device.reason else ""
    kind = "SIMULATED " if device.simulated else ""
    limit = f", limited to {format_bytes(limit_bytes)}" if limit_bytes is not None else ""
    return f"{kind}{device.gpu.title}{reason}, {format_bytes(device.gpu.total_bytes)}, {device.gpu.sm}{limit}"


def predicted_line(prediction: Prediction) -> str:
    """Both predicted largest batches."""
    traced = prediction.traced
    said = f"predicted largest batch: formula {_value(prediction.formula.max_batch_size)}, traced "
    if isinstance(traced, Unknown):
        return said + _value(traced)
    return said + _value(traced.max_batch_size) + up_to(traced.max_batch_size, traced.may_fit_batch_size)


def gap_line(prediction: Prediction) -> str:
    """Why the formula's largest batch is larger than the traced one, in figures; empty where it is not."""
    formula, traced = prediction.formula, prediction.traced
    if not isinstance(traced, Traced):
        return ""
    by_formula, by_trace = formula.max_batch_size, traced.max_batch_size
    if isinstance(by_formula, Unknown) or isinstance(by_trace, Unknown) or by_formula <= by_trace:
        return ""
    at = max(1, by_trace)
    counted, replay = formula.at(at), traced.at(at)
    assert isinstance(counted, FormulaPrediction), "a formula with a largest batch has rows"
    return (
        f"the formula counts {format_bytes(counted.peak_bytes)} at batch {at}, the traced step"
        f" {format_bytes(replay.peak_allocated_bytes)}, for which the allocator reserves"
        f" {format_bytes(replay.peak_reserved_bytes)}"
    )


def fits_line(workload: WorkloadSpec, traced: Traced, batch_size: int) -> str:
    """Whether the traced step fits on the device."""
    largest = traced.max_batch_size
    verdict = f"{workload.batch_words(batch_size)} {traced.fit(batch_size)}"
    if workload.command is not None and not workload.command.takes_batch:
        return f"by trace {verdict}; for the largest batch that does, {workload.command.rewriting}"
    if isinstance(largest, Unknown):
        return f"by trace {verdict}; the largest that does is not known: {largest.reason}"
    return f"by trace {verdict}; the largest that does is {largest}{up_to(largest, traced.may_fit_batch_size)}"


def peak_line(traced: Traced, batch_size: int) -> str:
    """The moment of the traced peak: what is not held then (gradients, most often) counts nothing."""
    moment = traced.at(batch_size).peak_moment
    if moment is None:
        return "the traced step allocates nothing"
    mark, site = moment
    place = f", at {site.operator} ({site.source or 'unknown line'})" if site.operator else ""
    return f"traced peak: {PHASE_WORDS[mark.phase]}{f' of step {mark.step}' if mark.step else ''}{place}"


def context_words(traced: Traced) -> str:
    """How large the CUDA context is taken to be, and how that is known."""
    between = traced.context_range
    said = "" if between is None or between.is_exact else f" ({format_range(between)})"
    return f"{format_bytes(traced.context_bytes)}{said}: {traced.context_source}"


def sharding_line(recipe: Recipe) -> str:
    """How a sharded step is traced, where PyTorch's engine differs from the textbook; empty where it does not."""
    return _SHARDING_NOTES.get(recipe.sharding, "")


def trial_line(config: SearchConfig, number: int, result: TrialDone, prediction: Prediction | None) -> str:
    """One trial of the log."""
    line = f"trial {number:>2}  batch {result.batch_size:>5}  {OUTCOME_WORDS[result.outcome]:<13}"
    if result.peak_allocated_bytes:
        line += (
            f"  peak {format_bytes(result.peak_allocated_bytes):>10} allocated"
            f" {format_bytes(result.peak_reserved_bytes):>10} reserved"
            f" {format_bytes(result.device_used_bytes):>10} of the device"
        )
    if prediction is not None:
        error = peak_error(config, prediction.formula, prediction.traced, result)
        if not isinstance(error, Unknown):
            line += f"  {compared(config, prediction.traced)} {signed(error)}"
    return f"{line}  {result.seconds:.1f} s  {shortfall(result, config.limit_bytes)}".rstrip()


def headroom_line(found: WithHeadroom) -> str:
    """Which batch leaves the headroom free, how much that is, and how it is known."""
    share = f"the headroom of {found.share * 100:g} %"
    if not found.batch_size:
        return f"no batch leaves {share} free, by trace"
    known = "as it ran" if found.known_by == "trial" else "by trace"
    return f"batch {found.batch_size:,} leaves {share} free, too: {format_bytes(found.free_bytes)}, {known}"


def accumulation_line(workload: WorkloadSpec, steps: Accumulation) -> str:
    """How the micro-batches reach the wanted global batch, or the next larger one and what smaller ones would do."""
    shape, gpus = workload.shape, workload.recipe.gpus
    passes, wanted = steps.steps * gpus, f"{steps.target_batch:,}"
    one = steps.steps == 1
    line = f"{steps.steps:,} accumulation step{'' if one else 's'} of batch {steps.global_batch_size // passes:,}"
    line += f" on {gpus:,} GPUs" if gpus > 1 else ""
    line += f" make{'s' if one else ''} a global batch of {steps.global_batch_size:,}"
    if shape is not None and shape.seq_len:
        line += f" sequences, {tokens_per_global_batch(shape, steps):,} tokens"
    if steps.exact:
        return line
    smaller, rest = divmod(steps.target_batch, passes)
    if smaller and not rest:
        return f"{line}; batch {smaller:,} would make exactly {wanted}"
    return f"{line}; {wanted} cannot be split evenly"


def assumed_lines(traced: Traced) -> list[str]:
    """The operators whose kernels' scratch is counted as none: known to take some, a line each, and not examined."""
    known = [entry for entry in traced.assumed if entry[2] != NOT_EXAMINED]
    unknown = [name for name, _, why in traced.assumed if why == NOT_EXAMINED]
    lines = [f"assumed without scratch: aten.{name} ({times} times; {why})" for name, times, why in known]
    if unknown:
        one = len(unknown) == 1
        lines.append(f"{len(unknown)} operator{'' if one else 's'} not examined: {', '.join(unknown)}")
    return lines


def assumed_line(traced: Traced) -> str:
    """The same in one line; empty if nothing was assumed."""
    names = [f"aten.{name}" for name, _, _ in traced.assumed]
    return f"counted without scratch, which is not known: {', '.join(names)}" if names else ""


def composition_lines(traced: Traced, batch_size: int, by: str) -> list[str]:
    """What holds the peak, by ``module``, ``operator`` or ``source`` line; layers of one kind are counted together."""
    totals: Counter[tuple[str, str]] = Counter()
    for held in traced.held_at_peak(batch_size):
        place = re.sub(r"\b\d+\b", "*", str(getattr(held.site, by))) if by == "module" else str(getattr(held.site, by))
        totals[held.bucket.title, place or "–"] += held.size_bytes
    return [
        f"{bucket:<16}  {place:<32}  {format_bytes(size_bytes):>10}"
        for (bucket, place), size_bytes in totals.most_common(_COMPOSITION_LINES)
    ]


def _value(value: int | Unknown) -> str:
    return f"none ({value.reason})" if isinstance(value, Unknown) else str(value)
