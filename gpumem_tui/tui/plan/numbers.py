"""The result of a plan: the first line, whether it fits, the ledger by both predictions; and the names of the panes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from textual.events import Click
from textual.message import Message

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.accumulation import Accumulation
from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.memory import ALLOCATED_BUCKETS, Bucket, Unknown, Value, format_bytes, format_count
from gpumem_tui.plan.answers import Answer, TracedAnswer, cache_words, differing_phase, headroom_of
from gpumem_tui.plan.command import CommandPlan, batch_note, ranks_line
from gpumem_tui.plan.command_state import CommandPlanState, progress_words
from gpumem_tui.plan.tracing import TraceFailed, TraceReady, TraceState
from gpumem_tui.report.tables import counted
from gpumem_tui.search import report
from gpumem_tui.search.assumed import not_reached_line
from gpumem_tui.search.words import PHASE_WORDS, largest_words, range_line, room_words
from gpumem_tui.tui.kit.figures import (
    ABSENT,
    MUTED,
    ListRow,
    Row,
    Span,
    compact_bytes,
    fit,
    header_line,
    joined,
    paragraph,
    row,
    signed,
)
from gpumem_tui.tui.kit.glyphs import BAR_ORDER, BUCKET_LOOKS
from gpumem_tui.tui.kit.row_list import CURSOR, FixedRows
from gpumem_tui.tui.kit.shares import bucket_cells

PENDING = "…"
_TITLE_WIDTH = 16
_VALUE_WIDTH = 9
_FACT_NAME_WIDTH = 14
_FACT_WIDTH = 44
"""Cells from which a fact's name and text share a line."""
_VERDICT_WIDTH = 60
"""Cells from which the verdict also shows what of."""
_LIMIT = "│"
_PEAK, _HEADROOM = "= allocated peak", "headroom"


@dataclass(frozen=True)
class Shown:
    """The figures of a plan; a command, which has no closed form, has fewer.

    Attributes:
        name, facts: the first line: what is planned, and what else to know of it, what matters most first.
        formula: the closed form's answer; None for a command.
        traced: the answer by trace; why it is missing; None while the trace is under way.
        waiting: what is traced, while it is. `doing`: a command's runs, in a line; empty for a model.
        gpus: that it is planned on; `accumulation`, `tokens`: of an optimizer step, if known.
        notes: what else the trace reports, a paragraph each.
        stale: the controls describe no plan now, and the numbers are those of the last one.
    """

    name: str
    facts: tuple[str, ...]
    gpu: Gpu
    batch_size: int
    formula: Answer | None
    traced: TracedAnswer | Unknown | None
    waiting: str = "tracing one step without a GPU"
    doing: str = ""
    gpus: int = 1
    accumulation: Accumulation | None = None
    tokens: int = 0
    notes: tuple[str, ...] = ()
    stale: bool = False

    @property
    def by_trace(self) -> TracedAnswer | None:
        """The answer by trace where there is one."""
        return self.traced if isinstance(self.traced, TracedAnswer) else None


def shown_model(answer: Answer, traced: TraceState, *, stale: bool = False) -> Shown:
    """Return what a model's numbers are drawn from."""
    plan = answer.plan
    gpus = f"{plan.recipe.gpus:,} × " if plan.recipe.gpus > 1 else ""
    facts = [f"{gpus}{plan.gpu.title}", f"{format_count(count_parameters(plan.shape))} parameters"]
    if plan.recipe.has_adapters:
        facts.append(plan.recipe.adapter_words)
    if plan.recipe.has_frozen_layers:
        facts.append(plan.recipe.freeze_words)
    found: TracedAnswer | Unknown | None = None
    if isinstance(traced, TraceReady):
        found = traced.answer
    elif isinstance(traced, TraceFailed):
        found = Unknown(traced.reason)
    return Shown(
        plan.shape.name, tuple(facts), plan.gpu, plan.batch_size, answer, found,
        gpus=plan.recipe.gpus, accumulation=answer.accumulation, tokens=answer.global_batch_tokens, stale=stale,
    )  # fmt: skip


def shown_command(state: CommandPlanState, elapsed_s: int) -> Shown:
    """Return what a command's numbers are drawn from.

    Args:
        elapsed_s: since its runs began.
    """
    workload, plan, found = state.config.workload, state.plan, state.answer
    name, noun = workload.name, workload.noun
    if workload.hugging_face is not None:
        name = report.workload_line(workload, 0 if plan is None else plan.base.done.parameters)
    traced: TracedAnswer | Unknown | None = found
    if found is None and not state.busy and not state.works_out:
        traced = Unknown(state.failure or f"{noun} as it is has not been traced")
    return Shown(
        name,
        (state.gpu.title, *([] if plan is None else [plan.size])),
        state.gpu,
        state.batch_size,
        None,
        traced,
        waiting=f"tracing {noun} as it is" if plan is None else "working it out",
        doing=progress_words(state, elapsed_s),
        gpus=1 if plan is None else plan.ranks,
        accumulation=None if plan is None else plan.accumulation,
        notes=() if plan is None or found is None else tuple(_command_notes(plan, found)),
    )


def _command_notes(plan: CommandPlan, found: TracedAnswer) -> Iterator[str]:
    size, traced = plan.batch_size, found.traced
    between = range_line(found.device_used_range, found.unknowns)
    yield from filter(None, (not_reached_line(traced), batch_note(plan), between, report.peak_line(traced, size)))
    yield from report.parts_lines(traced, size)
    yield from filter(None, (report.frozen_line(traced, size), ranks_line(plan), *map(str, traced.notes(size))))


@dataclass(frozen=True)
class _Line:
    """A row of the ledger by both predictions, in bytes."""

    title: str
    formula: Value
    traced: Value
    key: str
    bucket: Bucket | None = None
    most: int | None = None


def verdict_rows(shown: Shown, width: int, waited: str = "") -> list[ListRow]:
    """Return a line and a bar for each prediction there is; of a command also what runs now.

    Args:
        waited: how long a trace that is under way takes so far.
    """
    lines, found = list[ListRow](), shown.by_trace
    if (formula := shown.formula) is not None:
        by_formula = {bucket: formula.breakdown[bucket] for bucket in ALLOCATED_BUCKETS}
        lines.append(row(("formula  ", "bold"), *_formula_verdict(formula, found, width)))
        lines.append(row(*_bar(shown.gpu, by_formula, formula.usable_bytes, width)))
    by_trace: Row = [("·" * width, BUCKET_LOOKS[Bucket.FREE][1])]
    if found is not None:
        by_trace = _bar(shown.gpu, found.ledger.known(), shown.gpu.total_bytes, width)
    lines += [row(("traced   ", "bold"), *_traced_verdict(shown, waited)), row(*by_trace)]
    return [*lines, row((fit(shown.doing, width), "$primary"))] if shown.doing else lines


def ledger_rows(shown: Shown, width: int) -> list[ListRow]:
    """Return Formula | Traced | difference | most in the step, as many as there is room for, a row a bucket.

    The first two columns sum to the GPU's memory; the most that a bucket holds is not at one moment. Without a closed
    form, what compares with it is left out.
    """
    heads = ("Formula", "Traced", "differ", "most")
    wanted = range(len(heads)) if shown.formula is not None else (1, 3)
    columns = list(wanted)[: max(min(2, len(wanted)), (width - _TITLE_WIDTH - 2) // _VALUE_WIDTH)]
    head = f"{'GiB':<{_TITLE_WIDTH + 2}}" + "".join(f"{heads[column]:>{_VALUE_WIDTH}}" for column in columns)
    lines = [_ledger_row(line, shown, columns) for line in _lines(shown)]
    return [row((head, f"bold {MUTED}")), *lines]


def fact_rows(shown: Shown, width: int) -> list[ListRow]:
    """Return what follows: the largest batch, the passes and samples of an optimizer step, and what is in the way."""
    steps, found, formula = shown.accumulation, shown.by_trace, shown.formula
    facts = [("largest batch", _largest_words(shown), "max-batch")]
    if formula is not None and found is not None and (phase := differing_phase(formula, found)) is not None:
        facts.append(("differ", f"traced peak {PHASE_WORDS[phase]}", "moment"))
    if steps is not None:
        gpus = f" × {shown.gpus:,} GPUs" if shown.gpus > 1 else ""
        batch = counted(steps.global_batch_size, "sample")
        if not steps.exact:
            batch += f" for {steps.target_batch:,}"
        if shown.tokens:
            batch += f", {format_count(shown.tokens)} tokens"
        passes = f"{steps.steps:,} pass{'' if steps.steps == 1 else 'es'} × {shown.batch_size:,}{gpus}"
        facts += [("one step", passes, "accumulation"), ("global batch", batch, "global-batch")]
    lines: list[ListRow] = []
    for name, text, key in facts:
        if width >= _FACT_WIDTH:
            lines.append(row((f"{name:<{_FACT_NAME_WIDTH}}", MUTED), (text, ""), key=key))
        else:
            lines += [row((name, MUTED), key=key), *paragraph(text, width, "bold", indent=2)]
    return lines + [line for note in _notes(shown) for line in (row(), *paragraph(note, width))]


def _notes(shown: Shown) -> Iterator[str]:
    found, formula = shown.by_trace, shown.formula
    if formula is not None and formula.obstacle is not None and not (found is not None and found.fits):
        yield formula.obstacle
    if found is not None and found.frees_cache:
        yield cache_words(found)
    if formula is not None and found is not None and isinstance(largest := found.max_batch_size, Unknown):
        yield f"traced at batch {shown.batch_size:,} alone: {largest.reason}"
    yield from shown.notes


def _formula_verdict(answer: Answer, traced: TracedAnswer | None, width: int) -> Row:
    """Return the closed form's verdict; its figure alone where a trace has the verdict."""
    usable = f" of {compact_bytes(answer.usable_bytes)} GiB usable" if width >= _VERDICT_WIDTH else ""
    if traced is not None:
        return [(f"≈ {format_bytes(answer.prediction.needed_bytes)} needed{usable}", MUTED)]
    spare, short = f" · {format_bytes(answer.spare_bytes)} to spare", f" by {format_bytes(-answer.spare_bytes)}"
    return [_verdict(answer), (f"{spare if answer.fits else short}{usable}", "")]


def _traced_verdict(shown: Shown, waited: str) -> Row:
    found = shown.traced
    if found is None:
        how_long = f", {waited}; x ends it" if waited else ""
        return [(f"{PENDING} {shown.waiting}{how_long}", MUTED)]
    if isinstance(found, Unknown):
        return [(f"{ABSENT} {found.reason}", MUTED)]
    room = room_words(found.free_range)
    where = "" if shown.formula is not None else f" on {shown.gpu.title}"  # which no control states
    if found.fit == "does not fit":
        return [_verdict(found), (f" by {room.removesuffix(' missing')}{where}", "")]
    return [_verdict(found), (f" · {'runs, ' if found.verdict is None else ''}{room}{where}", "")]


def _bar(gpu: Gpu, segments: Mapping[Bucket, int], limit_bytes: int, width: int) -> Row:
    """Return the segments on the GPU's scale, or on their own where they exceed it; a stroke at what may be used."""
    if width <= 0:
        return []
    total_bytes = gpu.total_bytes
    used_bytes = sum(segments.get(bucket, 0) for bucket in BAR_ORDER if bucket is not Bucket.FREE)
    scale_bytes = max(total_bytes, used_bytes)
    drawn = bucket_cells({**segments, Bucket.FREE: scale_bytes - used_bytes}, width)
    limit = min(width - 1, limit_bytes * width // scale_bytes)
    if limit_bytes < scale_bytes:
        drawn[limit] = (_LIMIT, "bold $text-error" if used_bytes > limit_bytes else "bold")
    return joined(drawn)


def _lines(shown: Shown) -> list[_Line]:
    found, answer = shown.by_trace, shown.formula
    missing = Unknown("a command has no closed form" if answer is None else "left out of the usable bytes")
    waiting = Unknown("no trace")
    ledger = found.ledger if found else None
    estimated: dict[Bucket, Value] = {}
    headroom: list[_Line] = []
    highest: Mapping[Bucket, int] = {}
    if answer is not None:
        estimated = {bucket: answer.breakdown[bucket] for bucket in ALLOCATED_BUCKETS}
        headroom_bytes = headroom_of(answer.plan)
        # One figure by formula: context, workspaces and the driver's reserve at most.
        beside_bytes = shown.gpu.total_bytes - headroom_bytes - answer.usable_bytes
        estimated |= {Bucket.CACHE: answer.prediction.cache_bytes, Bucket.CONTEXT: beside_bytes}
        estimated[Bucket.FREE] = answer.spare_bytes
        title = f"{_HEADROOM} {answer.plan.headroom * 100:g} %"
        headroom.append(_Line(title, headroom_bytes, Unknown("counted row by row"), "usable"))
        highest = answer.prediction.highest.buckets
    highest = found.highest if found else highest

    def line(bucket: Bucket) -> _Line:
        traced = ledger.size_bytes(bucket) if ledger else waiting
        most = highest.get(bucket, 0) if bucket in ALLOCATED_BUCKETS and highest else None
        return _Line(bucket.title, estimated.get(bucket, missing), traced, bucket.value, bucket, most)

    peak = _Line(
        _PEAK,
        missing if answer is None else answer.peak_bytes,
        found.peak_allocated_bytes if found else waiting,
        "peak",
    )
    beside = (Bucket.CACHE, Bucket.CONTEXT, Bucket.DRIVER_RESERVED)
    return [*map(line, ALLOCATED_BUCKETS), peak, *map(line, beside), *headroom, line(Bucket.FREE)]


def _ledger_row(line: _Line, shown: Shown, columns: Sequence[int]) -> ListRow:
    mark: Span = BUCKET_LOOKS[line.bucket] if line.bucket is not None else (" ", "")
    weight = "bold" if line.bucket is None and line.key == "peak" else ""
    waits = shown.traced is None and line.key != "usable"
    difference: Value = Unknown("nothing to compare")
    if isinstance(line.formula, int) and isinstance(line.traced, int):
        difference = line.traced - line.formula
    figures: list[Span] = [
        _figure(line.formula, weight),
        (f"{PENDING:>{_VALUE_WIDTH}}", MUTED) if waits else _figure(line.traced, weight),
        (f"{signed(difference) if isinstance(difference, int) else '':>{_VALUE_WIDTH}}", MUTED),
        (f"{compact_bytes(line.most) if line.most is not None else '':>{_VALUE_WIDTH}}", MUTED),
    ]
    return row(mark, (f" {fit(line.title, _TITLE_WIDTH)}", weight), *(figures[i] for i in columns), key=line.key)


def _figure(value: Value, weight: str) -> Span:
    text = f"{compact_bytes(value):>{_VALUE_WIDTH}}"
    if isinstance(value, Unknown) or value == 0:
        return text, MUTED
    return text, "bold $text-error" if value < 0 else weight


def _largest_words(shown: Shown) -> str:
    """Return the largest batch by both, with the same headroom."""
    found, answer = shown.by_trace, shown.formula
    if answer is None:
        if found is None:
            return PENDING if shown.traced is None else ABSENT
        words = largest_words(found.full_batch_size, found.may_fit_batch_size)
        return f"{words} traced" if words else "only this batch size"
    kept = f", {100 * answer.plan.headroom:g} % free"
    if found is not None and isinstance(found.max_batch_size, int):
        return f"{found.max_batch_size:,} traced, formula ≈{answer.max_batch_size:,}{kept}"
    if shown.traced is None:
        return f"{PENDING} traced, formula ≈{answer.max_batch_size:,}{kept}"
    return f"≈{answer.max_batch_size:,} by formula{kept}"


_BESIDE = 160
_ABOVE = (110, 36)
_WITH_STEP = 48


def layout_classes(width: int, height: int) -> dict[str, bool]:
    """Return the style sheet's classes for a terminal of so many columns and rows.

    ``-wide``: controls, numbers and pane side by side; ``-step``: memory over a step below the numbers too;
    ``-single``: numbers and panes take turns; none of them: the pane below the numbers; ``-tiny``: nothing fits.
    """
    wide = width >= _BESIDE
    return {
        "-wide": wide,
        "-step": wide and height >= _WITH_STEP,
        "-single": not wide and (width < _ABOVE[0] or height < _ABOVE[1]),
    }


PANES = {
    "numbers": "n",
    "techniques": "t",
    "curves": "v",
    "gpus": "p",
    "batches": "b",
    "places": "a",
    "limits": "l",
    "judgement": "j",
    "compare": "c",
}
"""The panes of the right side by their key; a command has those that need no closed form."""
OF_EVERY_SUBJECT = ("numbers", "techniques", "gpus", "batches", "places")
"""The panes that need no closed form."""
_SHORT = {"techniques": "tech", "judgement": "judge"}
"""Names for a narrow line."""
_GAP = 1
_FEWEST_LETTERS = 2


def header_row(shown: Shown, time: str, width: int) -> ListRow:
    """Return the first line; what matters least is dropped where it is too short."""
    pending = shown.traced is None
    if shown.stale:
        verdict = ("! last plan that can be", "bold $text-error")
    elif shown.by_trace is not None:
        verdict = _verdict(shown.by_trace)
    elif shown.formula is not None:
        verdict = _verdict(shown.formula, f", tracing {PENDING}" if pending else " by formula")
    else:
        verdict = (f"tracing {PENDING}", MUTED) if pending else (f"{ABSENT} not traced", "bold $text-error")
    right: Row = [verdict, ("  ", ""), (time, MUTED), (" ", "")]
    return row(*header_line((shown.name, "bold"), [(fact, "") for fact in shown.facts], right, width))


def _verdict(found: Answer | TracedAnswer, how: str = "") -> Span:
    """Return the verdict in a word with its mark, and its source."""
    if isinstance(found, TracedAnswer) and found.fit in ("may fit", "may not fit"):
        return f"? {found.fit}", "bold $text-warning"
    if isinstance(found, TracedAnswer) and found.verdict is None:
        return "! over headroom", "bold $text-warning"
    return (f"✓ fits{how}", "bold $text-success") if found.fits else (f"✗ too large{how}", "bold $text-error")


def pane_places(panes: list[str], width: int) -> list[tuple[str, int, int]]:
    """Return each pane's name with its first cell and the one after its last, as `pane_row` draws them."""
    names = _names(panes, width)
    places, x = [], 0
    for pane in panes:
        end = x + len(names[pane])
        places.append((pane, x, end))
        x = end + _GAP
    return places


def pane_row(panes: list[str], shown: str, width: int) -> ListRow:
    """Return the panes' names, the letter that shows each underlined, the one that is shown reversed."""
    names = _names(panes, width)
    spans: Row = []
    for pane in panes:
        name, at = names[pane], pane.index(PANES[pane])
        style = "bold reverse" if pane == shown else "$primary"
        parts = (name[:at], style), (name[at], f"{style} underline"), (name[at + 1 :], style)
        spans += [span for span in (*parts, (" " * _GAP, "")) if span[0]]
    return ListRow(tuple(spans[:-1]))


def _names(panes: list[str], width: int) -> dict[str, str]:
    """Return the names as there is room for: whole, short, or cut; each with the letter that shows its pane."""
    whole, short = {pane: pane for pane in panes}, {pane: _SHORT.get(pane, pane) for pane in panes}
    cut = (
        {pane: name[: max(letters, pane.index(PANES[pane]) + 1)] for pane, name in short.items()}
        for letters in range(max(map(len, short.values())) - 1, _FEWEST_LETTERS, -1)
    )
    fewest = {pane: pane[: max(_FEWEST_LETTERS, pane.index(PANES[pane]) + 1)] for pane in panes}
    fitting = (
        names for names in (whole, short, *cut) if sum(map(len, names.values())) + _GAP * (len(panes) - 1) <= width
    )
    return next(fitting, fewest)


class PaneNames(FixedRows):
    """A line of the panes' names; posts which one was clicked."""

    @dataclass
    class Wanted(Message):
        """A name was clicked."""

        pane: str

    def __init__(self, *, classes: str) -> None:
        super().__init__()
        self.set_classes(classes)
        self._panes: list[str] = []

    def show_panes(self, panes: list[str], shown: str) -> None:
        """Show these panes' names, one of them as shown."""
        self._panes = panes
        self.show(lambda width, _: [pane_row(panes, shown, width)])

    def on_click(self, event: Click) -> None:
        """Ask for the pane under the pointer."""
        x = event.x - len(CURSOR)
        for pane, first, after in pane_places(self._panes, self.size.width - len(CURSOR)):
            if first <= x < after:
                self.post_message(self.Wanted(pane))
