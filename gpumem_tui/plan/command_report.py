"""A plan for a command as a JSON object, and for a person to read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpumem_tui.memory import ALLOCATED_BUCKETS, Bucket, Unknown, format_bytes, format_range
from gpumem_tui.plan.command import BatchRow, CommandAnswers, CommandPlan, GpuRow, TechniqueRow, gpu_rows
from gpumem_tui.plan.markdown import bullets, table
from gpumem_tui.search import json_report, report
from gpumem_tui.search.ranges import FIT_ANSWERS, largest_words, range_line, room_words, up_to

_PLACES = 12


# JSON


def command_plan_json(plan: CommandPlan) -> dict[str, Any]:
    """The object that `plan --json -- COMMAND` prints: that of `predict --json`, and what follows from it."""
    answers = CommandAnswers(plan)
    tried, others = answers.techniques()
    return {
        **json_report.prediction_json(plan.config, plan.predicted.prediction, plan.batch_size),
        "accumulation": None if plan.accumulation is None else json_report.accumulation_json(plan.accumulation),
        "techniques": [_technique_json(row) for row in tried],
        "not_applicable": [{"key": row.change.key, "name": row.change.name, "reason": row.reason} for row in others],
        "gpus": [_gpu_json(plan, row) for row in gpu_rows(plan)],
        "batch_sizes": [_batch_json(row) for row in answers.batches()],
        "ranks": {"ranks": plan.ranks, "sharded": plan.base.is_sharded, "note": ranks_line(plan)},
    }


def _technique_json(row: TechniqueRow) -> dict[str, Any]:
    body: dict[str, Any] = {
        "key": row.change.key,
        "name": row.change.name,
        "how": row.change.how,
        "saved_bytes": row.saved_bytes,
        "peak_bytes": row.peak_bytes,
        "peak_reserved_bytes": row.reserved_bytes,
        "buckets": None if row.buckets is None else row.buckets.as_json(),
        "fits": row.fits,
        "max_batch_size": row.largest if isinstance(row.largest, int) else None,
        "cost": row.change.cost,
        "cost_source": row.change.source,
        "source": row.by,
    }
    if isinstance(row.largest, Unknown):
        body["unavailable"] = row.largest.reason
    return body


def _batch_json(row: BatchRow) -> dict[str, Any]:
    return {
        "batch_size": row.batch_size,
        "peak_allocated_bytes": row.peak_allocated_bytes,
        "peak_reserved_bytes": row.peak_reserved_bytes,
        "device_used_bytes": row.device_used_bytes,
        "device_used_range": row.device_used_range.as_json(),
        "fits": row.fits,
        "fit": row.fit,
    }


def _gpu_json(plan: CommandPlan, row: GpuRow) -> dict[str, Any]:
    return {
        "name": row.gpu.name,
        "title": row.gpu.title,
        "total_bytes": row.gpu.total_bytes,
        "fits": row.fits,
        "fit": row.fit,
        "free_bytes": row.free_bytes,
        "free_range": row.free.as_json(),
        "max_batch_size": row.largest if isinstance(row.largest, int) else None,
        "may_fit_batch_size": row.may_fit if isinstance(row.may_fit, int) else None,
        "traced_on": plan.config.device.gpu.name,
        "exact": row.is_exact,
    }


# For a person


def ranks_line(plan: CommandPlan) -> str:
    """What is known of other numbers of ranks."""
    if plan.base.is_sharded:
        return f"each of {plan.ranks} ranks holds its part; another number of ranks is another run (--gpus)"
    if plan.ranks > 1:
        return f"each rank holds the same, however many of them there are: {plan.ranks} or another number"
    phases = plan.base.at(plan.batch_size).phases
    gradients = max((phase.breakdown[Bucket.GRADIENTS] for phase in phases), default=0)
    return (
        f"one rank; under DistributedDataParallel each of several would hold this and its buckets: "
        f"{format_bytes(gradients)} more, by formula (the gradients once more)"
    )


def verdict_line(answers: CommandAnswers, *, with_gpu: bool = True) -> str:
    """Whether the command fits, and how large a batch would."""
    gpu, largest = answers.gpu, answers.largest
    room = room_words(answers.fit, answers.free, of=f" of {format_bytes(gpu.cuda_total_bytes)}")
    most = ""
    if isinstance(largest, int):
        most = f"; the largest that fits is {largest:,}{up_to(largest, answers.may_fit)}"
    where = f" on {gpu.title}" if with_gpu else ""
    return f"{answers.plan.size} {answers.fit}{where}, {room}{most}"


def batch_note(plan: CommandPlan) -> str:
    """Why there is no other batch size; empty where there are."""
    command = plan.config.workload.command
    if not plan.base.only_at:
        return ""
    if command is None or command.takes_batch:
        return f"only this batch size is known: {plan.base.not_affine}"
    return f"only this batch size is known: {command.rewriting}, and every other one will be"


def exactness(plan: CommandPlan, row: GpuRow) -> str:
    """What a GPU's figures rest on."""
    return "exact" if row.is_exact else f"traced on {plan.config.device.gpu.title}"


def command_plan_markdown(plan: CommandPlan) -> str:
    """The whole plan."""
    answers = CommandAnswers(plan)
    where = report.device_line(plan.config.device, plan.config.limit_bytes)
    parts = [
        f"# Plan: {report.workload_line(plan.config.workload, plan.base.parameters)}",
        f"On {where}; torch {plan.predicted.ready.torch_version}, "
        f"profile {plan.base.profile}, traced in {plan.base.seconds:.0f} s",
        f"## Memory at {plan.size}",
        _ledger(answers),
        bullets(_verdict(answers)),
        "## What would help",
        *_techniques(answers),
        "## Batch sizes",
        _batches(answers),
        "## What holds the peak",
        _places(answers),
        "## GPUs",
        _gpus(plan),
        "## Ranks",
        f"{ranks_line(plan)[:1].upper()}{ranks_line(plan)[1:]}.",
    ]
    return "\n\n".join(parts) + "\n"


def _ledger(answers: CommandAnswers) -> str:
    replay = answers.traced.at(answers.plan.batch_size)
    rows = [(bucket.title, format_bytes(replay.breakdown[bucket])) for bucket in ALLOCATED_BUCKETS]
    rows += [
        ("= allocated", format_bytes(replay.peak_allocated_bytes)),
        ("reserved", format_bytes(replay.peak_reserved_bytes)),
        ("CUDA context", format_bytes(answers.traced.context_bytes)),
        ("device used", format_bytes(answers.traced.device_used_bytes(answers.plan.batch_size))),
        ("– at least and at most", format_range(answers.traced.device_used_range(answers.plan.batch_size))),
    ]
    return table(("bucket", "traced"), rows)


def _verdict(answers: CommandAnswers) -> Iterator[str]:
    plan, traced = answers.plan, answers.traced
    yield f"{verdict_line(answers)}."
    if said := range_line(traced.device_used_range(plan.batch_size), traced.unknowns(plan.batch_size)):
        yield f"{said[:1].upper()}{said[1:]}."
    yield f"{report.peak_line(traced, plan.batch_size)}."
    yield from report.assumed_lines(traced)
    yield from traced.notes
    if plan.config.target_batch is not None and plan.accumulation is not None:
        yield f"{report.accumulation_line(plan.config.workload, plan.accumulation)}."


def _techniques(answers: CommandAnswers) -> Iterator[str]:
    tried, others = answers.techniques()
    rows = [
        (
            row.change.name,
            format_bytes(row.saved_bytes),
            format_bytes(row.peak_bytes),
            "yes" if row.fits else "no",
            f"{row.largest:,}" if isinstance(row.largest, int) else "–",
            f"{row.change.cost} ({row.change.source})",
            row.by,
            row.change.how,
        )
        for row in tried
    ]
    columns = ("technique", "saves", "peak", "fits", "largest batch", "cost", "by", "how")
    yield table(columns, rows) if rows else "Nothing was tried."
    if others:
        yield bullets(f"{row.change.name}: {row.reason}" for row in others)


def _batches(answers: CommandAnswers) -> str:
    rows = [
        (
            _size(answers.plan, row.batch_size),
            format_bytes(row.peak_allocated_bytes),
            format_bytes(row.peak_reserved_bytes),
            format_bytes(row.device_used_bytes),
            FIT_ANSWERS[row.fit],
        )
        for row in answers.batches()
    ]
    found = table(("batch", "peak", "reserved", "device used", "fits"), rows)
    note = batch_note(answers.plan)
    return f"{found}\n\n{note[:1].upper()}{note[1:]}." if note else found


def _size(plan: CommandPlan, batch_size: int) -> str:
    if not plan.says_batch:
        return "its own"
    return f"{batch_size:,}{' (here)' if batch_size == plan.batch_size else ''}"


def _places(answers: CommandAnswers) -> str:
    rows = [
        (place.bucket.title, place.module or "–", place.source or "–", format_bytes(place.size_bytes))
        for place in answers.places()[:_PLACES]
    ]
    return table(("bucket", "module", "source", "size"), rows)


def _gpus(plan: CommandPlan) -> str:
    rows = [
        (
            row.gpu.title,
            format_bytes(row.gpu.total_bytes),
            FIT_ANSWERS[row.fit],
            format_bytes(row.free_bytes),
            largest_words(row.largest, row.may_fit) or "–",
            exactness(plan, row),
        )
        for row in gpu_rows(plan)
    ]
    return table(("GPU", "memory", "fits", "free", "largest batch", "kernels"), rows)
