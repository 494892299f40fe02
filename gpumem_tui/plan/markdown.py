"""A plan for a person to read, or to paste into an issue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gpumem_tui.formula.price import COST_ORDER
from gpumem_tui.memory import ALLOCATED_BUCKETS, Unknown, format_bytes
from gpumem_tui.plan.advice_text import Judgement
from gpumem_tui.plan.answers import Answer, TracedAnswer, answer, cache_words, differing_phase, traced_answer
from gpumem_tui.plan.by_gpu import LargestOnGpu, largest_by_gpu
from gpumem_tui.plan.curves import Curve, CurveSeries
from gpumem_tui.plan.export import all_curves, command_line
from gpumem_tui.plan.judgement import judgements
from gpumem_tui.plan.lacking import lacking
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.recommended import Known, recommended, untraced
from gpumem_tui.plan.techniques import Combination, Techniques, techniques
from gpumem_tui.search import report
from gpumem_tui.search.prediction import Traced
from gpumem_tui.search.ranges import largest_words, range_line, room_words
from gpumem_tui.workload.spec import WorkloadSpec

_CURVE_POINTS = 12
"""Points of a line that are printed; the JSON has all."""


def plan_markdown(plan: Plan, traced: Traced | Unknown, known: Known = untraced) -> str:
    """The whole plan.

    Args:
        traced: of this plan, made on any GPU of its architecture; or why there is none.
        known: what traces say of plans that may be recommended.
    """
    now = answer(plan)
    by_trace = traced_answer(plan, traced) if isinstance(traced, Traced) else traced
    command = command_line(plan)
    on_gpus = largest_by_gpu(plan, traced if isinstance(traced, Traced) else None)
    said = [line for line in (report.layers_line(traced) if isinstance(traced, Traced) else "", *lacking(plan)) if line]
    parts = [
        f"# Plan: {plan.shape.name} on {plan.gpu.title}",
        _workload(plan),
        "## Memory of one GPU",
        _ledger(now, by_trace),
        bullets([*_verdict(now, by_trace), *(f"{line[:1].upper()}{line[1:]}." for line in said)]),
        "## What would help",
        *_combinations(plan, by_trace, known),
        _techniques(techniques(plan)),
        "## Every GPU",
        _by_gpu(on_gpus, plan),
        "## Curves",
        *(_curve(curve) for curve in all_curves(plan, traced, on_gpus)),
        "## Batch size",
        *(_judgement(judgement) for judgement in judgements(plan)),
        "## This plan again",
        f"```sh\n{command}\n```" if isinstance(command, str) else f"There is no command for it: {command.reason}.",
    ]
    return "\n\n".join(parts) + "\n"


def _workload(plan: Plan) -> str:
    line = report.workload_line(WorkloadSpec(plan.recipe, shape=plan.shape))
    extras = f" · {', '.join(sorted(plan.extras))} (formula only)" if plan.extras else ""
    target = f", target batch {plan.target_batch:,}" if plan.target_batch is not None else ""
    return (
        f"{line}{extras}\n\n"
        f"Batch {plan.batch_size:,} on each of {plan.recipe.gpus} × {plan.gpu.title} "
        f"({format_bytes(plan.gpu.total_bytes)}), headroom {100 * plan.headroom:g} %{target}"
    )


def _ledger(now: Answer, traced: TracedAnswer | Unknown) -> str:
    known = traced if isinstance(traced, TracedAnswer) else None

    def cell(size_bytes: int | None) -> str:
        return format_bytes(size_bytes)

    rows = [
        (bucket.title, cell(now.breakdown[bucket]), cell(known.breakdown[bucket] if known else None))
        for bucket in ALLOCATED_BUCKETS
    ]
    rows += [
        ("= allocated", cell(now.peak_bytes), cell(known.peak_allocated_bytes if known else None)),
        ("reserved", cell(None), cell(known.peak_reserved_bytes if known else None)),
        ("device used", cell(None), cell(known.device_used_bytes if known else None)),
        (
            f"largest batch, {100 * now.plan.headroom:g} % left free",
            f"{now.max_batch_size:,}",
            _largest(known) if known else cell(None),
        ),
    ]
    return table((f"at batch {now.plan.batch_size:,}", "Formula", "Traced"), rows)


def _verdict(now: Answer, traced: TracedAnswer | Unknown) -> Iterator[str]:
    if now.fits:
        yield f"By formula it fits, with {format_bytes(now.spare_bytes)} of {format_bytes(now.usable_bytes)} to spare."
    else:
        yield f"By formula it does not fit: {format_bytes(-now.spare_bytes)} are missing."
    if now.obstacle is not None and not (isinstance(traced, TracedAnswer) and traced.fits):
        yield f"{now.obstacle[:1].upper()}{now.obstacle[1:]}."
    if isinstance(traced, Unknown):
        yield f"No trace: {traced.reason}."
    else:
        room = room_words(traced.fit, traced.free_range, of=f" of {format_bytes(traced.total_bytes)}")
        yield f"By trace ({traced.profile}) it {traced.fit}: {room}."
        if said := range_line(traced.device_used_range, traced.unknowns):
            yield f"{said[:1].upper()}{said[1:]}."
        if traced.fit == "fits" and not traced.keeps_headroom:
            yield f"It runs, but does not leave {100 * now.plan.headroom:g} % of the GPU free."
        if traced.frees_cache:
            yield f"{cache_words(traced)}."
    if isinstance(traced, TracedAnswer) and (phase := differing_phase(now, traced)) is not None:
        yield (
            f"The columns are of two moments: the traced peak is {report.PHASE_WORDS[phase]}, the formula's "
            f"{now.prediction.moment.value}."
        )
    steps = now.accumulation
    passes = "1 pass a step makes" if steps.steps == 1 else f"{steps.steps} passes a step make"
    tokens = f", {now.global_batch_tokens:,} tokens" if now.global_batch_tokens else ""
    rounded = "" if steps.exact else f"; {steps.target_batch:,} is not a multiple of a pass"
    yield f"{passes} a global batch of {steps.global_batch_size:,}{tokens}{rounded}."


def _combinations(plan: Plan, now: TracedAnswer | Unknown, known: Known) -> Iterator[str]:
    """By trace as far as `known` tells, else by formula."""
    if isinstance(now, TracedAnswer) and now.fits:
        yield "By trace it fits as it is: nothing is needed."
        return
    best = recommended(plan, now, known)
    if best.formula_only is not None:
        yield _combination("By formula, the cheapest combination that fits", best.formula_only)
    found, what = best.combination, "combination that fits" if best.formula_only is None else "that a trace can confirm"
    if isinstance(found, Unknown):
        yield f"No combination: {found.reason}."
        return
    if isinstance(best.traced, TracedAnswer):
        yield _combination(f"By trace, the cheapest {what}", found, best.traced)
    else:
        untraced_words = "" if found.formula_only else ", not traced"
        yield _combination(f"By formula{untraced_words}, the cheapest {what}", found)
        if isinstance(now, TracedAnswer) and not found.formula_only:
            yield f"There is no trace of it: {best.traced.reason}."
    yield f"Cheapest means: {COST_ORDER}."


def _combination(heading: str, found: Combination, traced: TracedAnswer | None = None) -> str:
    names = [change.name for change in found.changes]
    if found.smaller_passes:
        names.append(f"{found.accumulation.steps} passes of {found.plan.batch_size}")
    said = " + ".join(names) if names else "none needed, it fits as it is"
    command = command_line(found.plan)
    peak, largest = f"≈{format_bytes(found.peak_bytes)}", f"≈{found.max_batch_size:,}"
    if traced is not None:
        peak, largest = format_bytes(traced.peak_allocated_bytes), _largest(traced)
    only = ", by formula only" if found.formula_only else ""
    lines = [f"{heading}: **{said}**. Peak {peak} at batch {found.plan.batch_size}, largest batch {largest}{only}."]
    if isinstance(command, str):
        lines.append(f"```sh\n{command}\n```")
    return "\n\n".join(lines)


def _techniques(judged: Techniques) -> str:
    rows = [
        (
            technique.name,
            f"`{technique.option}`",
            format_bytes(technique.saved_bytes),
            "yes" if technique.fits else "no",
            f"{technique.max_batch_size:,}",
            f"{technique.cost} ({technique.source}){'; formula only' if technique.formula_only else ''}",
        )
        for technique in judged.helping
    ]
    found = table(("technique", "option", "saves ≈", "fits ≈", "largest batch a GPU ≈", "cost"), rows)
    return f"{found}\n\n{bullets(f'{entry.name}: {entry.reason}' for entry in judged.not_applicable)}"


def _by_gpu(found: Sequence[LargestOnGpu], plan: Plan) -> str:
    rows = [
        (
            f"`{row.gpu.name}`",
            f"{row.traced:,}" if isinstance(row.traced, int) else format_bytes(None),
            f"{row.formula:,}",
            row.traced.reason if isinstance(row.traced, Unknown) else "; ".join(row.lacks),
        )
        for row in found
    ]
    return table(("GPU", f"largest batch traced, {100 * plan.headroom:g} % left free", "formula", "note"), rows)


def _curve(curve: Curve) -> str:
    """A table with a column a line, at points of the first; a line that has none there leaves its cell empty."""
    columns = [dict(series.points) for series in curve.series]
    xs = [x for x, _ in curve.series[0].points]
    rows = [
        (_label(curve, index), *(_number(points[xs[index]]) if xs[index] in points else "" for points in columns))
        for index in _shown(curve)
    ]
    named = bool(curve.series[0].names)
    heading = (curve.x_label if not named else f"{curve.x_label}: which", *(series.name for series in curve.series))
    return f"### {curve.title}\n\n{curve.y_label}; {curve.note}\n\n{table(heading, rows)}"


def _shown(curve: Curve) -> Sequence[int]:
    """Evenly chosen points, the plan's own and the last among them; where phases are marked, the fullest of each."""
    points = curve.series[0].points
    if curve.marks:
        ends = [mark.x for mark in curve.marks[1:]] + [points[-1][0] + 1]
        spans = [(mark.x, end) for mark, end in zip(curve.marks, ends, strict=True)]
        inside = [[i for i, (x, _) in enumerate(points) if start <= x < end] for start, end in spans]
        return [max(found, key=lambda i: sum(s.points[i][1] for s in curve.series)) for found in inside if found]
    step = max(1, -(-len(points) // _CURVE_POINTS))
    here = [index for index, (x, _) in enumerate(points) if x == curve.x_here]
    return sorted({*range(0, len(points), step), *here, len(points) - 1})


def _label(curve: Curve, index: int) -> str:
    series: CurveSeries = curve.series[0]
    x = series.points[index][0]
    if curve.marks:
        return next((mark.label for mark in reversed(curve.marks) if mark.x <= x), "before")
    here = " (here)" if x == curve.x_here else ""
    return f"{_number(x)}{f': {series.names[index]}' if series.names else ''}{here}"


def _judgement(judgement: Judgement) -> str:
    heading = f"### {judgement.title}{' (warning)' if judgement.warning else ''}"
    parts = [heading, f"{judgement.text} Source: {judgement.source}."]
    if judgement.table is not None:
        parts.append(table(judgement.table.columns, judgement.table.rows))
    return "\n\n".join(parts)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows under their headings."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bullets(lines: Iterable[str]) -> str:
    """A list, an entry a line."""
    return "\n".join(f"- {line}" for line in lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:,.2f}"


def _largest(traced: TracedAnswer) -> str:
    largest = traced.max_batch_size
    if isinstance(largest, Unknown):
        return f"unknown: {largest.reason}"
    return f"{largest:,} ({largest_words(traced.full_batch_size, traced.may_fit_batch_size)} on the whole GPU)"
