"""A plan for a person: in lines that reports and screens share, and as Markdown.

A model's plan and a command's have the same parts; a command has no closed form, so what only that knows is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.techniques import COST_ORDER, STAGES
from gpumem_tui.memory import ALLOCATED_BUCKETS, Breakdown, Bucket, Unknown, format_bytes, format_range
from gpumem_tui.plan.answers import (
    Answer,
    LargestOnGpu,
    TracedAnswer,
    answer,
    cache_words,
    differing_phase,
    lacking,
    traced_answer,
)
from gpumem_tui.plan.combination import Combination, Effect, Recommended, Techniques
from gpumem_tui.plan.combining import command_of
from gpumem_tui.plan.command import (
    SHARDING_NOT_RUN,
    CommandPlan,
    batch_note,
    exactness,
    few_gpus,
    not_run_lines,
    on_every_gpu,
    ranks_line,
    techniques_of_command,
)
from gpumem_tui.plan.curves import Curve, CurveSeries
from gpumem_tui.plan.export import all_curves, command_line
from gpumem_tui.plan.goals import Quantity
from gpumem_tui.plan.judgement import Judgement, judgements, span
from gpumem_tui.plan.limits import Limit
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.recommended import (
    Known,
    all_techniques,
    command_answer,
    judged_at_once,
    plan_answer,
    untraced,
)
from gpumem_tui.plan.replayed import assignment_of
from gpumem_tui.plan.speed import by_cost
from gpumem_tui.report.markdown import bullets, document, sentence, shell, table
from gpumem_tui.report.objects import reason_of
from gpumem_tui.report.tables import counted
from gpumem_tui.search import report
from gpumem_tui.search.assumed import momentary_line, not_reached_line
from gpumem_tui.search.beside import share_line
from gpumem_tui.search.prediction import Traced
from gpumem_tui.search.words import ENGINE, FIT_ANSWERS, PHASE_WORDS, largest_words, range_line, room_words
from gpumem_tui.workload.spec import WorkloadSpec

_CURVE_POINTS = 12
"""Points of a line that are printed; the JSON has all."""
_PLACES = 12

# Lines that reports and screens share

NAMES: dict[Quantity, str] = {
    "batch-size": "largest micro-batch",
    "seq-len": "longest sequence",
    "gpus": "fewest GPUs",
    "accumulation": "fewest passes of a step",
}
_UNITS: dict[Quantity, tuple[str, str]] = {
    "batch-size": ("sample", "samples"),
    "seq-len": ("token", "tokens"),
    "gpus": ("GPU", "GPUs"),
    "accumulation": ("pass", "passes"),
}


def capitalized(text: str) -> str:
    """Return a text as a line begins with it."""
    return text[:1].upper() + text[1:]


def value_words(found: Limit) -> str:
    """Say what was solved for, and its source.

    >>> value_words(Limit("seq-len", 8192, 8064, "verified", None, 8320))
    '8,192 tokens, verified: it was traced and fits, 8,320 was traced and does not'
    >>> value_words(Limit("gpus", 8, 8, "formula", None))
    '≈8 GPUs, by formula: an estimate'
    """
    if found.value is None:
        return "none"
    one, many = _UNITS[found.quantity]
    words = f"{found.value:,} {one if found.value == 1 else many}"
    if found.how == "formula":
        return f"≈{words}, by formula: an estimate"
    if found.how == "traced":
        return f"{words}, by trace"
    beyond = "" if found.beyond is None else f", {found.beyond:,} was traced and does not"
    return f"{words}, verified: it was traced and fits{beyond}"


def lift_words(found: Limit) -> str:
    """Say what would give a number a value that has none; empty where it has one or is not settled yet."""
    if found.value is not None or found.wanted:
        return ""
    if found.lift is not None:
        return f"to lift it, by formula: {found.lift.words}"
    return f"no {'other ' * ('; --' in found.note)}known change would lift it"


def limit_answer(plan: Plan, found: Limit) -> str:
    """Say in one line what was solved for: the value, or why it is missing and what would give it one."""
    answer = f"{capitalized(NAMES[found.quantity])} of {plan.shape.name} on {plan.gpu.title}: {value_words(found)}"
    if found.value is not None:
        return f"{answer}."
    return f"{'; '.join(filter(None, (answer, found.note, lift_words(found))))}."


def limit_lines(plan: Plan, found: Limit) -> list[str]:
    """Return what was solved for, what it is of, and how to open it, a line each."""
    lines = [limit_answer(plan, found), *(f"  {line}" for line in _limit_notes(plan, found))]
    if (command := _limit_command(found)) is not None:
        lines.append(f"  {command}")
    return lines


def _limit_command(found: Limit) -> str | None:
    """Return the command that opens the plan with the value, or with what would give it one; None for neither."""
    with_it = found.plan if found.lift is None else found.lift.plan
    command = None if with_it is None else command_line(with_it)
    return command if isinstance(command, str) else None


def _limit_notes(plan: Plan, found: Limit) -> Iterator[str]:
    if found.note and found.value is not None:
        yield found.note
    if found.how != "formula":
        yield f"formula: {'none' if found.formula is None else f'≈{found.formula:,}'}"
    yield report.workload_line(WorkloadSpec(plan.recipe, shape=plan.shape))
    yield given_words(found.quantity, plan)


def given_words(quantity: Quantity, plan: Plan) -> str:
    """Return the numbers that were given, all but the one that was solved for, and the GPU."""
    count = "" if quantity == "gpus" or plan.recipe.gpus == 1 else f"{plan.recipe.gpus:,} × "
    given = [f"{count}{plan.gpu.title}, {100 * plan.headroom:g} % of it left free"]
    if quantity not in ("batch-size", "accumulation"):
        given.insert(0, f"micro-batch {plan.batch_size:,}")
    if plan.target_batch is not None:
        given.append(f"target batch {plan.target_batch:,}")
    return ", ".join(given)


# Markdown


def plan_markdown(plan: Plan, traced: Traced | Unknown, known: Known = untraced, network: str = "") -> str:
    """Return the whole plan of a model.

    Args:
        traced: of this plan, made on any GPU of its architecture; or why it is missing.
        known: what traces say of plans that may be recommended.
        network: what was traced, as `plan_answer` takes it.
    """
    now = answer(plan)
    by_trace = traced_answer(plan, traced) if isinstance(traced, Traced) else traced
    best, on_gpus = judged_at_once(plan, traced, by_trace, known)
    largest = by_trace.known_batch_size if isinstance(by_trace, TracedAnswer) else None
    layers = report.layers_line(traced) if isinstance(traced, Traced) else ""
    command = command_line(plan)
    return document(
        (
            plan_answer(now, by_trace, best, on_gpus, network),
            f"# Plan: {plan.shape.name} on {plan.gpu.title}",
            _workload(plan),
            "## Memory of one GPU",
            _compared_ledger(now, by_trace),
            bullets([*_verdict(now, by_trace), *map(sentence, filter(None, (layers, *lacking(plan))))]),
            "## Changes that help",
            *_combinations(by_trace, best),
            _techniques(all_techniques(plan, by_trace, known)),
            "## GPUs",
            _largest_on_gpus(on_gpus, plan),
            *_costs(on_gpus, plan),
            "## Curves",
            *(_curve(curve) for curve in all_curves(plan, traced, on_gpus)),
            "## Batch size",
            *(_judgement(judgement) for judgement in judgements(plan, largest)),
            "## This plan again",
            shell(command) if isinstance(command, str) else f"There is no command for it: {command.reason}.",
        )
    )


def command_plan_markdown(plan: CommandPlan) -> str:
    """Return the whole plan of a command."""
    found = plan.answer()
    where = report.device_line(plan.config.device, plan.config.limit_bytes)
    note = batch_note(plan)
    return document(
        (
            command_answer(plan, found),
            f"# Plan: {report.workload_line(plan.config.workload, plan.base.done.parameters)}",
            f"On {where}; torch {plan.predicted.ready.torch_version}, "
            f"profile {plan.base.ready.profile}, traced in {plan.base.done.seconds:.0f} s",
            f"## Memory at {plan.size}",
            _ledger(found),
            bullets(_command_verdict(plan, found)),
            "## Changes that help",
            *_together(plan),
            *_tried(plan, found),
            "## Batch sizes",
            _batches(plan, found),
            *([sentence(note)] if note else []),
            "## Memory at the peak",
            _places(found),
            "## GPUs",
            _on_gpus(plan),
            "## Ranks",
            sentence(ranks_line(plan)),
        )
    )


def limit_markdown(plan: Plan, found: Limit) -> str:
    """Return what a plan was solved for, under a heading."""
    parts = [
        limit_answer(plan, found),
        f"# {capitalized(NAMES[found.quantity])}: {plan.shape.name} on {plan.gpu.title}",
        bullets(_limit_notes(plan, found)),
    ]
    if (command := _limit_command(found)) is not None:
        parts.append(shell(command))
    return document(parts)


def _workload(plan: Plan) -> str:
    line = report.workload_line(WorkloadSpec(plan.recipe, shape=plan.shape))
    extras = f" · {', '.join(sorted(plan.extras))} (formula only)" if plan.extras else ""
    target = f", target batch {plan.target_batch:,}" if plan.target_batch is not None else ""
    return (
        f"{line}{extras}\n\n"
        f"Batch {plan.batch_size:,} on each of {plan.recipe.gpus} × {plan.gpu.title} "
        f"({format_bytes(plan.gpu.total_bytes)}), headroom {100 * plan.headroom:g} %{target}"
    )


# The ledger and the verdict


def _bucket_rows(*breakdowns: Breakdown | None, highest: Mapping[Bucket, int]) -> list[tuple[str, ...]]:
    return [
        (
            bucket.title,
            *(format_bytes(one[bucket] if one else None) for one in breakdowns),
            format_bytes(highest.get(bucket, 0)),
        )
        for bucket in ALLOCATED_BUCKETS
    ]


def _compared_ledger(now: Answer, traced: TracedAnswer | Unknown) -> str:
    known = traced if isinstance(traced, TracedAnswer) else None
    unknown = format_bytes(None)
    rows = [
        *_bucket_rows(
            now.breakdown,
            known.breakdown if known else None,
            highest=known.highest if known else now.prediction.highest.buckets,
        ),
        ("= allocated", format_bytes(now.peak_bytes), format_bytes(known.peak_allocated_bytes if known else None), ""),
        ("reserved", unknown, format_bytes(known.peak_reserved_bytes if known else None), ""),
        ("device used", unknown, format_bytes(known.device_used_bytes if known else None), ""),
        *_engine_row(now.plan.gpu, 2),
        (
            f"largest batch, {100 * now.plan.headroom:g} % left free",
            f"{now.max_batch_size:,}",
            _largest(known) if known else unknown,
            "",
        ),
    ]
    most = "most in the step" if known else "most in the step, by formula"
    return table((f"at batch {now.plan.batch_size:,}", "Formula", "Traced", most), rows)


def _engine_row(gpu: Gpu, columns: int) -> list[tuple[str, ...]]:
    """Return the row of an inference engine in the GPU, with its bytes in each column; none without one."""
    return [] if gpu.engine is None else [(ENGINE, *columns * (format_bytes(gpu.engine_bytes),), "")]


def _ledger(found: TracedAnswer) -> str:
    rows = [
        *_bucket_rows(found.breakdown, highest=found.highest),
        ("= allocated", format_bytes(found.peak_allocated_bytes), ""),
        ("reserved", format_bytes(found.peak_reserved_bytes), ""),
        (f"{found.traced.gpu.runtime} context", format_bytes(found.traced.ready.context_bytes), ""),
        ("device used", format_bytes(found.device_used_bytes), ""),
        ("– at least and at most", format_range(found.device_used_range), ""),
        *_engine_row(found.plan.gpu, 1),
    ]
    return table(("bucket", "traced at the peak", "most in the step"), rows)


def _verdict(now: Answer, traced: TracedAnswer | Unknown) -> Iterator[str]:
    if isinstance(traced, TracedAnswer):
        yield from _traced_verdict(now, traced)
    elif now.fits:
        yield f"By formula it fits, with {format_bytes(now.spare_bytes)} of {format_bytes(now.usable_bytes)} to spare."
    else:
        yield f"By formula it does not fit: {format_bytes(-now.spare_bytes)} are missing."
    if isinstance(traced, Unknown):
        if now.obstacle is not None:
            yield sentence(now.obstacle)
        yield f"No trace: {traced.reason}."
    steps = now.accumulation
    passes = "1 pass a step makes" if steps.steps == 1 else f"{steps.steps} passes a step make"
    tokens = f", {now.global_batch_tokens:,} tokens" if now.global_batch_tokens else ""
    rounded = "" if steps.exact else f"; {steps.target_batch:,} is not a multiple of a pass"
    yield f"{passes} a global batch of {steps.global_batch_size:,}{tokens}{rounded}."


def _traced_verdict(now: Answer, traced: TracedAnswer) -> Iterator[str]:
    """Yield what the trace reports, and nothing that the formula states otherwise."""
    room = room_words(traced.free_range, of=f" of {format_bytes(traced.total_bytes)}")
    yield f"By trace ({traced.traced.ready.profile}) it {traced.fit}: {room}."
    if share := share_line(traced.traced, now.plan.batch_size):
        yield sentence(share)
    if between := range_line(traced.device_used_range, traced.unknowns):
        yield sentence(between)
    yield sentence(report.context_line(traced.traced))
    if traced.fit == "fits" and not traced.keeps_headroom:
        yield f"It runs, but does not leave {100 * now.plan.headroom:g} % of the GPU free."
    if traced.frees_cache:
        yield f"{cache_words(traced)}."
    if (phase := differing_phase(now, traced)) is not None:
        yield (
            f"The columns are of two moments: the traced peak is {PHASE_WORDS[phase]}, the formula's "
            f"{now.prediction.moment.value}."
        )
    yield from map(str, traced.traced.notes(now.plan.batch_size))


def _command_verdict(plan: CommandPlan, found: TracedAnswer) -> Iterator[str]:
    traced = found.traced
    if traced.done.ran_out is not None:
        yield "It catches out-of-memory errors, so on another GPU it may settle at another batch."
    if missing := not_reached_line(traced):
        yield sentence(missing)
    if share := share_line(traced, plan.batch_size):
        yield sentence(share)
    yield sentence(report.peak_line(traced, plan.batch_size))
    yield from filter(None, (momentary_line(traced, plan.batch_size),))
    yield from report.notes_lines(traced.notes(plan.batch_size))
    yield from report.details_lines(plan.config, traced, plan.batch_size)
    if plan.config.target_batch is not None and plan.accumulation is not None:
        yield f"{report.accumulation_line(plan.config.workload, plan.accumulation)}."


# Changes that help


def _combinations(now: TracedAnswer | Unknown, best: Recommended) -> Iterator[str]:
    """Yield the cheapest combinations, by trace as far as there are traces, else by formula."""
    if isinstance(now, TracedAnswer) and now.fits:
        yield "By trace it fits as it is: nothing is needed. For a larger batch:"
        return
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
    what = found.words or "none needed, it fits as it is"
    command = command_line(found.plan)
    needs = f"Needs ≈{format_bytes(found.by_formula.prediction.needed_bytes)}"
    largest = f"≈{found.by_formula.max_batch_size:,}"
    if traced is not None:
        needs, largest = f"Device used {format_bytes(traced.device_used_bytes)}", _largest(traced)
    only = ", by formula only" if found.formula_only else ""
    line = f"{heading}: **{what}**. {needs} at batch {found.plan.batch_size}, largest batch {largest}{only}."
    return f"{line}\n\n{shell(assignment_of(found.changes) + command)}" if isinstance(command, str) else line


def _techniques(judged: Techniques) -> str:
    rows = [
        (
            technique.change.name,
            f"`{technique.change.option}`",
            format_bytes(technique.saved_bytes),
            "yes" if technique.fits else "no",
            f"{technique.largest:,}" if isinstance(technique.largest, int) else "–",
            f"{technique.change.cost} ({technique.change.source}){_known_by(technique)}",
        )
        for technique in judged.helping
    ]
    found = table(("technique", "option", "saves ≈", "fits ≈", "largest batch a GPU ≈", "cost"), rows)
    return f"{found}\n\n{bullets(f'{entry.name}: {entry.reason}' for entry in judged.not_applicable)}"


def _known_by(technique: Effect) -> str:
    return "; formula only" if technique.formula_only else "; by trace" if technique.by == "traced" else ""


def _together(plan: CommandPlan) -> Iterator[str]:
    """Yield the cheapest that makes the command fit, and the command with it."""
    best = None if plan.there(plan.base).fits_leaving(plan.batch_size, 0) else plan.fitting
    if best is None or isinstance(best.traced, Unknown):
        return
    there = plan.there(best.traced)
    used, left = plan.device_used_bytes(best), there.free_range(best.batch_size)
    assert isinstance(used, int), "it was traced"
    room = room_words(left)
    if best.beside_bytes:
        room += f" and of that {format_bytes(best.beside_bytes)} for the gradients of earlier passes"
    takes = f"device used {format_bytes(used)}{' on each GPU' if best.gpus > 1 else ''}, {room}"
    yield f"The cheapest that {plan.fit_with(best)}: **{best.words}**. Traced: {takes}."
    line, written = command_of(plan, best)
    yield shell(line)
    if written:
        yield f"And in the program:\n\n{bullets(written)}"


def _tried(plan: CommandPlan, found: TracedAnswer) -> Iterator[str]:
    judged = techniques_of_command(plan, found)
    rows = [
        (
            row.change.name,
            format_bytes(row.saved_bytes),
            format_bytes(row.device_used_bytes),
            FIT_ANSWERS[row.fit],
            f"{row.largest:,}" if isinstance(row.largest, int) else "–",
            f"{row.change.cost} ({row.change.source})",
            row.by,
            row.change.how,
        )
        for row in judged.helping
    ]
    columns = ("technique", "saves", "device used", "fits", "largest batch", "cost", "by", "how")
    yield table(columns, rows) if rows else "Nothing was tried."
    notes = list(not_run_lines(judged.not_applicable))
    if any(row.change.key in STAGES for row in judged.helping):
        notes.append(SHARDING_NOT_RUN)
    if notes:
        yield bullets(notes)


# Other batch sizes and GPUs, places and curves


def _batches(plan: CommandPlan, found: TracedAnswer) -> str:
    rows = [
        (
            _size(plan, row.plan.batch_size),
            format_bytes(row.peak_allocated_bytes),
            format_bytes(row.peak_reserved_bytes),
            format_bytes(row.device_used_bytes),
            FIT_ANSWERS[row.fit],
        )
        for row in found.batches()
    ]
    return table(("batch", "peak", "reserved", "device used", "fits"), rows)


def _size(plan: CommandPlan, batch_size: int) -> str:
    if not plan.says_batch:
        return "its own"
    return f"{batch_size:,}{' (here)' if batch_size == plan.batch_size else ''}"


def _places(found: TracedAnswer) -> str:
    rows = [
        (place.bucket.title, place.module or "–", place.source or "–", format_bytes(place.size_bytes))
        for place in found.places()[:_PLACES]
    ]
    return table(("bucket", "module", "source", "size"), rows)


def _largest_on_gpus(found: Sequence[LargestOnGpu], plan: Plan) -> str:
    here = next((reason_of(row.traced) for row in found if row.gpu == plan.gpu), None)
    listed = [row for row in found if row.traced != 0 or row.formula or row.gpu == plan.gpu]
    rows = [
        (
            f"`{row.gpu.name}`",
            f"{row.traced:,}" if isinstance(row.traced, int) else format_bytes(None),
            f"{row.formula:,}",
            reason if (reason := reason_of(row.traced)) and reason != here else "; ".join(row.lacks),
        )
        for row in listed
    ]
    columns = ("GPU", f"largest batch traced, {100 * plan.headroom:g} % left free", "formula", "note")
    untraced = f"\n\nNone is traced here: {here}." if here else ""
    too_small = len(found) - len(listed)
    return (
        table(columns, rows)
        + untraced
        + (f"\n\nNo batch fits on {counted(too_small, 'more GPU')}." if too_small else "")
    )


def _costs(found: Sequence[LargestOnGpu], plan: Plan) -> Iterator[str]:
    """Yield what it costs on every GPU that it fits on and that has a price, the cheapest first."""
    costs = by_cost(plan, found)
    if not costs:
        return
    of = "tokens" if plan.shape.seq_len else "samples"
    rows = [(f"`{row.gpu.name}`", span(*one.per_million), one.price.words, one.price.source) for row, one in costs]
    yield (
        f"Cost where batch {plan.batch_size:,} fits, at the roofline's speed and without losses "
        "between GPUs; set your own prices under `[prices]` in the settings:"
    )
    yield table(("GPU", f"cost of a million {of}", "an hour", "by"), rows)


def _on_gpus(plan: CommandPlan) -> str:
    every = on_every_gpu(plan)
    few = few_gpus(plan, every)
    rows = [
        (
            there.gpu.whole.title,
            format_bytes(there.gpu.total_bytes),
            FIT_ANSWERS[found.fit],
            format_bytes(found.spare_bytes),
            largest_words(found.full_batch_size, found.may_fit_batch_size) or "–",
            exactness(there),
        )
        for there, found in few
    ]
    listed = table(("GPU", "memory", "fits", "free", "largest batch", "kernels"), rows)
    more = counted(len(every) - len(few), "more GPU")
    return f"{listed}\n\n{more}: {report.line_of(plan.config, plan.batch_size, 'plan', '--json')}; on the screen `p`."


def _curve(curve: Curve) -> str:
    """Return a table with a column a line, at points of the first; a line without a point there leaves a cell empty."""
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
    """Return evenly chosen points with the plan's own and the last; where phases are marked, the fullest of each."""
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


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:,.2f}"


def _largest(traced: TracedAnswer) -> str:
    largest = traced.max_batch_size
    if isinstance(largest, Unknown):
        return f"unknown: {largest.reason}"
    return f"{largest:,} ({largest_words(traced.full_batch_size, traced.may_fit_batch_size)} on the whole GPU)"
