"""What a plan comes to: the first line, whether it fits, the ledger by both predictions; and the names of the panes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from textual.events import Click
from textual.message import Message

from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.memory import ALLOCATED_BUCKETS, Bucket, Unknown, Value, format_bytes, format_count
from gpumem_tui.plan.answers import Answer, TracedAnswer, cache_words, differing_phase, headroom_of
from gpumem_tui.plan.tracing import Pending, TraceFailed, TraceReady, TraceState
from gpumem_tui.report.tables import counted
from gpumem_tui.search.words import PHASE_WORDS, room_words
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
"""Cells from which the verdict also says what of."""
_LIMIT = "│"
_PEAK, _HEADROOM = "= allocated peak", "headroom"


@dataclass(frozen=True)
class _Line:
    """A row of the ledger by both predictions, in bytes."""

    title: str
    formula: Value
    traced: Value
    key: str
    bucket: Bucket | None = None
    most: int | None = None


def verdict_rows(answer: Answer, traced: TraceState, width: int, waited: str = "") -> list[ListRow]:
    """Return two lines and two bars: the closed form's and the traced step's.

    Args:
        waited: how long a trace that is under way takes so far.
    """
    by_formula = {bucket: answer.breakdown[bucket] for bucket in ALLOCATED_BUCKETS}
    by_trace: Row = [("·" * width, BUCKET_LOOKS[Bucket.FREE][1])]
    if isinstance(traced, TraceReady):
        by_trace = _bar(answer, traced.answer.ledger.known(), answer.plan.gpu.total_bytes, width)
    return [
        row(("formula  ", "bold"), *_formula_verdict(answer, traced, width)),
        row(*_bar(answer, by_formula, answer.usable_bytes, width)),
        row(("traced   ", "bold"), *_traced_verdict(traced, waited)),
        row(*by_trace),
    ]


def ledger_rows(answer: Answer, traced: TraceState, width: int) -> list[ListRow]:
    """Return Formula | Traced | difference | most in the step, as many as there is room for, a row a bucket.

    The first two columns sum to the GPU's memory; the most that a bucket holds is not at one moment.
    """
    heads = ("Formula", "Traced", "differ", "most")
    head = f"{'GiB':<{_TITLE_WIDTH + 2}}" + "".join(f"{name:>{_VALUE_WIDTH}}" for name in heads)
    columns = min(len(heads), max(2, (width - _TITLE_WIDTH - 2) // _VALUE_WIDTH))
    lines = [_ledger_row(line, traced, columns) for line in _lines(answer, traced)]
    return [row((head[: _TITLE_WIDTH + 2 + columns * _VALUE_WIDTH], f"bold {MUTED}")), *lines]


def fact_rows(answer: Answer, traced: TraceState, width: int) -> list[ListRow]:
    """Return what follows: the largest batch, the passes and samples of an optimizer step, and what is in the way."""
    steps, plan = answer.accumulation, answer.plan
    passes = f"{steps.steps:,} pass{'' if steps.steps == 1 else 'es'} × {plan.batch_size:,}"
    gpus = f" × {plan.recipe.gpus:,} GPUs" if plan.recipe.gpus > 1 else ""
    batch = counted(steps.global_batch_size, "sample")
    if not steps.exact:
        batch += f" for {steps.target_batch:,}"
    if answer.global_batch_tokens:
        batch += f", {format_count(answer.global_batch_tokens)} tokens"
    facts = [
        ("largest batch", _largest_words(answer, traced), "max-batch"),
        ("one step", passes + gpus, "accumulation"),
        ("global batch", batch, "global-batch"),
    ]
    found = traced.answer if isinstance(traced, TraceReady) else None
    if found is not None and (phase := differing_phase(answer, found)) is not None:
        facts.insert(1, ("differ", f"traced peak {PHASE_WORDS[phase]}", "moment"))
    lines: list[ListRow] = []
    for name, text, key in facts:
        if width >= _FACT_WIDTH:
            lines.append(row((f"{name:<{_FACT_NAME_WIDTH}}", MUTED), (text, ""), key=key))
        else:
            lines += [row((name, MUTED), key=key), *paragraph(text, width, "bold", indent=2)]
    notes = []
    if answer.obstacle is not None and not (found is not None and found.fits):
        notes.append(answer.obstacle)
    if found is not None and found.frees_cache:
        notes.append(cache_words(found))
    if found is not None and isinstance(largest := found.max_batch_size, Unknown):
        notes.append(f"traced at batch {plan.batch_size:,} alone: {largest.reason}")
    return lines + [line for note in notes for line in (row(), *paragraph(note, width))]


def _formula_verdict(answer: Answer, traced: TraceState, width: int) -> Row:
    """Return the closed form's verdict; its figure alone where a trace has the verdict."""
    if isinstance(traced, TraceReady):
        of = f" of {compact_bytes(answer.usable_bytes)} GiB usable" if width >= _VERDICT_WIDTH else ""
        return [(f"≈ {format_bytes(answer.prediction.needed_bytes)} needed{of}", MUTED)]
    usable = f" of {compact_bytes(answer.usable_bytes)} GiB usable" if width >= _VERDICT_WIDTH else ""
    spare, short = f" · {format_bytes(answer.spare_bytes)} to spare", f" by {format_bytes(-answer.spare_bytes)}"
    return [_verdict(answer), (f"{spare if answer.fits else short}{usable}", "")]


def _traced_verdict(traced: TraceState, waited: str) -> Row:
    match traced:
        case TraceReady(_, found, _):
            room = room_words(found.fit, found.free_range)
            if found.fit == "does not fit":
                return [_verdict(found), (f" by {room.removesuffix(' missing')}", "")]
            return [_verdict(found), (f" · {'' if found.fits or found.fit == 'may fit' else 'runs, '}{room}", "")]
        case Pending():
            how_long = f", {waited}; esc ends it" if waited else ""
            return [(f"{PENDING} tracing one step without a GPU{how_long}", MUTED)]
        case TraceFailed(_, reason):
            return [(f"{ABSENT} {reason}", MUTED)]


def _bar(answer: Answer, segments: Mapping[Bucket, int], limit_bytes: int, width: int) -> Row:
    """Return the segments on the GPU's scale, or on their own where they exceed it; a stroke at what may be used."""
    if width <= 0:
        return []
    total_bytes = answer.plan.gpu.total_bytes
    used_bytes = sum(segments.get(bucket, 0) for bucket in BAR_ORDER if bucket is not Bucket.FREE)
    scale_bytes = max(total_bytes, used_bytes)
    drawn = bucket_cells({**segments, Bucket.FREE: scale_bytes - used_bytes}, width)
    limit = min(width - 1, limit_bytes * width // scale_bytes)
    if limit_bytes < scale_bytes:
        drawn[limit] = (_LIMIT, "bold $text-error" if used_bytes > limit_bytes else "bold")
    return joined(drawn)


def _lines(answer: Answer, traced: TraceState) -> list[_Line]:
    plan, gpu = answer.plan, answer.plan.gpu
    headroom_bytes = headroom_of(plan)
    not_counted = Unknown("left out of the usable bytes")
    beside_bytes = gpu.total_bytes - headroom_of(plan) - answer.usable_bytes
    found = traced.answer if isinstance(traced, TraceReady) else None
    waiting = Unknown("no trace")
    ledger = found.ledger if found else None
    # One figure by formula: context, workspaces and the driver's reserve at most.
    estimated: dict[Bucket, Value] = {Bucket.CACHE: answer.prediction.cache_bytes, Bucket.CONTEXT: beside_bytes}

    highest = found.highest if found else answer.prediction.highest.buckets

    def line(bucket: Bucket, formula: Value) -> _Line:
        traced = ledger.size_bytes(bucket) if ledger else waiting
        most = highest.get(bucket, 0) if bucket in ALLOCATED_BUCKETS else None
        return _Line(bucket.title, formula, traced, bucket.value, bucket, most)

    beside = (Bucket.CACHE, Bucket.CONTEXT, Bucket.DRIVER_RESERVED)
    return [
        *(line(bucket, answer.breakdown[bucket]) for bucket in ALLOCATED_BUCKETS),
        _Line(_PEAK, answer.peak_bytes, found.peak_allocated_bytes if found else waiting, "peak"),
        *(line(bucket, estimated.get(bucket, not_counted)) for bucket in beside),
        _Line(f"{_HEADROOM} {plan.headroom * 100:g} %", headroom_bytes, Unknown("counted row by row"), "usable"),
        line(Bucket.FREE, answer.spare_bytes),
    ]


def _ledger_row(line: _Line, traced: TraceState, columns: int) -> ListRow:
    mark: Span = BUCKET_LOOKS[line.bucket] if line.bucket is not None else (" ", "")
    weight = "bold" if line.bucket is None and line.key == "peak" else ""
    waits = isinstance(traced, Pending) and line.key != "usable"
    difference: Value = Unknown("nothing to compare")
    if isinstance(line.formula, int) and isinstance(line.traced, int):
        difference = line.traced - line.formula
    spans: Row = [mark, (f" {fit(line.title, _TITLE_WIDTH)}", weight), _figure(line.formula, weight)]
    spans.append((f"{PENDING:>{_VALUE_WIDTH}}", MUTED) if waits else _figure(line.traced, weight))
    spans.append((f"{signed(difference) if isinstance(difference, int) else '':>{_VALUE_WIDTH}}", MUTED))
    spans.append((f"{compact_bytes(line.most) if line.most is not None else '':>{_VALUE_WIDTH}}", MUTED))
    return row(*spans[: 2 + columns], key=line.key)


def _figure(value: Value, weight: str) -> Span:
    text = f"{compact_bytes(value):>{_VALUE_WIDTH}}"
    if isinstance(value, Unknown) or value == 0:
        return text, MUTED
    return text, "bold $text-error" if value < 0 else weight


def _largest_words(answer: Answer, traced: TraceState) -> str:
    """Return the largest batch by both, with the same headroom."""
    kept = f", {100 * answer.plan.headroom:g} % free"
    match traced:
        case TraceReady(_, found, _) if isinstance(found.max_batch_size, int):
            return f"{found.max_batch_size:,} traced, formula ≈{answer.max_batch_size:,}{kept}"
        case Pending():
            return f"{PENDING} traced, formula ≈{answer.max_batch_size:,}{kept}"
        case _:
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
    "limits": "l",
    "judgement": "j",
    "compare": "c",
}
"""What the right side shows, by the key that shows it."""
_SHORT = {"techniques": "tech", "judgement": "judge"}
"""Names for a narrow line."""
_GAP = 1
_FEWEST_LETTERS = 3


def header_row(answer: Answer, traced: TraceState, time: str, width: int, *, stale: bool = False) -> ListRow:
    """Return the first line; what matters least is dropped where it is too short.

    Args:
        stale: the controls describe no plan now, and the numbers are those of the last one.
    """
    plan = answer.plan
    gpus = f"{plan.recipe.gpus:,} × " if plan.recipe.gpus > 1 else ""
    if stale:
        verdict = ("! last plan that can be", "bold $text-error")
    elif isinstance(traced, TraceReady):
        verdict = _verdict(traced.answer)
    else:
        verdict = _verdict(answer, f", tracing {PENDING}" if isinstance(traced, Pending) else " by formula")
    right: Row = [verdict, ("  ", ""), (time, MUTED), (" ", "")]
    facts = [plan.shape.name, f"{gpus}{plan.gpu.title}", f"{format_count(count_parameters(plan.shape))} parameters"]
    if plan.recipe.has_adapters:
        facts.append(plan.recipe.adapter_words)
    if plan.recipe.has_frozen_layers:
        facts.append(plan.recipe.freeze_words)
    subject, *others = facts
    return row(*header_line((subject, "bold"), [(fact, "") for fact in others], right, width))


def _verdict(found: Answer | TracedAnswer, how: str = "") -> Span:
    """Return the verdict in a word with its mark, and how it is known."""
    if isinstance(found, TracedAnswer) and found.fit == "may fit":
        return "? may fit", "bold $text-warning"
    if isinstance(found, TracedAnswer) and found.fit == "fits" and not found.keeps_headroom:
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
