"""The search and the predictions as JSON objects: schema 1, whose keys are a public contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gpumem_tui.formula.accumulation import Accumulation, accumulation
from gpumem_tui.formula.adapters import trained_parameters
from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.memory import ALLOCATED_BUCKETS, Bucket, Unknown
from gpumem_tui.search.config import Device, SearchConfig
from gpumem_tui.search.headroom import WithHeadroom
from gpumem_tui.search.prediction import Formula, Prediction, Traced
from gpumem_tui.search.ranges import range_json
from gpumem_tui.search.verdict import Verdict
from gpumem_tui.simulator.replay import Replay
from gpumem_tui.trial.events import TrialDone
from gpumem_tui.workload.spec import WorkloadSpec

SCHEMA = 1
_FORMULA_BUCKETS = tuple(bucket for bucket in ALLOCATED_BUCKETS if bucket is not Bucket.OTHER)


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
        body["trained_parameters"] = trained_parameters(workload.shape, workload.recipe)
        body["shape"] = {
            key: value
            for key, value in asdict(workload.shape).items()
            if value and key not in ("name", "source", "published_parameters", "part")
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
        "host": device.host or None,
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
    spare_bytes = formula.usable_bytes() - prediction.needed_bytes
    return {
        "buckets": prediction.breakdown.as_json(_FORMULA_BUCKETS),
        "peak_bytes": prediction.peak_bytes,
        "moment": prediction.moment.value,
        "cache_bytes": prediction.cache_bytes,
        "max_batch_size": formula.max_batch_size,
        "fits": spare_bytes >= 0,
        "spare_bytes": spare_bytes,
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
        "traced_layers": list(traced.traced_layers),
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
        "traced": {
            **traced_json(prediction.traced, batch_size),
            "with_headroom": {"share": prediction.formula.headroom, "max_batch_size": _count(prediction.with_headroom)},
        },
    }


def _count(value: int | Unknown) -> int | None:
    return value if isinstance(value, int) else None


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
    return accumulation(config.target_batch, batch_size, config.workload.recipe.data_parallel)


def accumulation_json(steps: Accumulation) -> dict[str, int]:
    """How the found batch reaches the wanted one."""
    return {
        "steps": steps.steps,
        "global_batch_size": steps.global_batch_size,
        "target_batch": steps.target_batch,
    }
