"""The panes' lists: every GPU, batch sizes, places, how far each number goes, and two plans side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.memory import ALLOCATED_BUCKETS, Unknown, Value, format_bytes, format_count
from gpumem_tui.plan.answers import Answer, LargestOnGpu, Place, TracedAnswer
from gpumem_tui.plan.controls import controls
from gpumem_tui.plan.judgement import span
from gpumem_tui.plan.limits import Limit
from gpumem_tui.plan.plan import Plan, Subject, draft_of
from gpumem_tui.plan.report import NAMES, capitalized, lift_words
from gpumem_tui.plan.speed import Cost, cost_of
from gpumem_tui.search.prediction import Fit
from gpumem_tui.search.words import largest_words
from gpumem_tui.tui.kit.figures import (
    ABSENT,
    MUTED,
    ListRow,
    Span,
    compact_bytes,
    fit,
    fit_right,
    heading,
    paragraph,
    row,
    signed,
)
from gpumem_tui.tui.kit.glyphs import BUCKET_LOOKS
from gpumem_tui.tui.plan.numbers import PENDING

_FIGURE_WIDTH = 12
_FITS = "$text-success"
_MAY: Span = ("? ", "$text-warning")
MARKS: Mapping[Fit, Span] = {
    "fits": ("✓ ", _FITS),
    "may fit": _MAY,
    "may not fit": _MAY,
    "does not fit": ("✗ ", "$text-error"),
}
"""The mark before a row that fits, or does not."""
_OVER_HEADROOM: Span = ("! ", "$text-warning")
"""Before one that fits, but does not leave the headroom free: as the headline has it."""

# Every GPU

_GPU_NAME_WIDTH = 34
_ROOMY_GPUS = 52
"""Cells from which the memory has a column."""
_PRICED_GPUS = 64
"""Cells from which the cost has one."""


def gpu_rows(found: Sequence[LargestOnGpu], plan: Subject, width: int, selected: str) -> list[ListRow]:
    """Return a line a GPU; the one under the cursor also shows what it lacks. The plan's own is marked.

    For a model: the largest batch by trace, by formula, and its cost; for a command, whose batch may be its own, what
    is left of the GPU and the largest batch, with a tilde where kernels may differ.
    """
    columns = _gpu_columns(plan, width)
    name_width = max(8, min(_GPU_NAME_WIDTH, width - 2 - len(columns) * _FIGURE_WIDTH))
    what = "largest batch of one GPU" if isinstance(plan, Plan) else ""
    head = f"  {fit(what, name_width)}" + "".join(f"{one:>{_FIGURE_WIDTH}}" for one in columns)
    kept = f", {100 * plan.headroom:g} % left free" if plan.headroom else ""
    lines = [heading(f"Every GPU{kept}"), row((head, f"bold {MUTED}"))]
    for one in found:
        lines.append(_gpu(one, plan, columns, name_width))
        if one.gpu.name == selected:
            lines += _indented(_gpu_notes(one, plan), width)
    return lines


def gpu_words(gpu: Gpu, found: TracedAnswer | None) -> str:
    """Return the note of a GPU in the list that one is picked from; `found`: what we know about a command there."""
    what = f"{gpu.title}, {format_bytes(gpu.total_bytes)}"
    if found is None:
        return what
    most = largest_words(found.full_batch_size, found.may_fit_batch_size)
    return f"{MARKS[found.fit][0]}{what}{f', up to batch {most}' if most else ''}"


def _gpu_columns(plan: Subject, width: int) -> tuple[str, ...]:
    if not isinstance(plan, Plan):
        return ("GiB", "free GiB", "largest")[0 if width >= _ROOMY_GPUS else 1 :]
    heads = ("GiB", "traced", "formula")[0 if width >= _ROOMY_GPUS else 1 :]
    return (*heads, "cost of 1M") if width >= _PRICED_GPUS else heads


def _gpu(one: LargestOnGpu, plan: Subject, columns: Sequence[str], name_width: int) -> ListRow:
    fit_there = one.fit_of(plan)
    fits = fit_there == "fits"
    mark = MARKS[fit_there] if fit_there in ("fits", "may fit") else ("! " if one.lacks else "  ", MUTED)
    about = "~" if one.answer is not None and not one.same_architecture else ""
    largest = f"{about}{one.traced:,}" if isinstance(one.traced, int) else ABSENT
    cells: dict[str, Span] = {
        "GiB": (compact_bytes(one.gpu.total_bytes), MUTED),
        "traced": (largest, "bold" if fits else ""),
        "largest": (largest, "bold" if fits else ""),
        "formula": (ABSENT if one.formula is None else f"≈{one.formula:,}", MUTED),
    }
    if one.answer is not None:
        mark, spare_bytes = MARKS[fit_there], one.answer.spare_bytes
        cells["free GiB"] = (about + compact_bytes(spare_bytes), "" if fits else "$text-error")
    if isinstance(plan, Plan):
        cells["cost of 1M"] = (_cost(one, plan), "")
    name = (fit(one.gpu.whole.title, name_width), "bold" if one.gpu == plan.gpu else "")
    figures = [(f"{text:>{_FIGURE_WIDTH}}", style) for text, style in (cells[column] for column in columns)]
    return row(mark, name, *figures, key=one.gpu.name)


def _cost(one: LargestOnGpu, plan: Plan) -> str:
    cost = cost_of(plan, one.gpu)
    if plan.batch_size > one.largest or isinstance(cost, Unknown):
        return ABSENT
    return f"≈{sum(cost.per_million) / 2:.2g}"


def _gpu_notes(one: LargestOnGpu, plan: Subject) -> Iterator[str]:
    if isinstance(plan, Plan) and isinstance(cost := cost_of(plan, one.gpu), Cost):
        of = "tokens" if plan.shape.seq_len else "samples"
        by = f"at {cost.price.words} an hour, {cost.price.source}"
        yield f"a million {of} cost {span(*cost.per_million)} by the roofline, {by}"
    yield from one.lacks
    if one.answer is not None and not one.same_architecture:
        yield "from the trace of another kind of GPU: kernels here may take more or less scratch memory"
    if isinstance(one.traced, Unknown):
        yield one.traced.reason
    elif one.answer is None and one.traced is not None and not one.same_architecture:
        yield "from the trace of another architecture, with this one's context"


def _indented(texts: Iterator[str], width: int) -> list[ListRow]:
    return [line for text in texts for line in paragraph(text, width, indent=2)]


# Other batch sizes, and what holds the peak

_NUMBER = 10


def batch_rows(found: Sequence[TracedAnswer], planned: int, size: str, note: str, width: int) -> list[ListRow]:
    """Return batch sizes by trace; the one of `planned` samples is marked.

    Args:
        size: the batch in the place of its number, where the subject does not say it. `note`: why there is one only.
    """
    head = f"  {'batch':<{_NUMBER}}" + "".join(f"{one:>{_NUMBER}}" for one in ("peak", "reserved", "device"))
    over = ", ! over headroom" if any(one.verdict is None for one in found) else ""
    lines = [heading(f"Batch sizes, traced, in GiB{over}"), row((head, f"bold {MUTED}"))]
    for one in found:
        here = one.plan.batch_size
        sizes = (one.peak_allocated_bytes, one.peak_reserved_bytes, one.device_used_bytes)
        lines.append(
            row(
                _OVER_HEADROOM if one.verdict is None else MARKS[one.verdict],
                (f"{size or format(here, ','):<{_NUMBER}}", "bold $primary" if here == planned else ""),
                *((f"{compact_bytes(size_bytes):>{_NUMBER}}", "") for size_bytes in sizes),
            )
        )
    return [*lines, *(paragraph(note, width) if note else [])]


_BUCKET_WIDTH = 17


def place_rows(found: Sequence[Place], width: int) -> list[ListRow]:
    """Return what holds the peak, the largest first."""
    where = max(10, (width - _NUMBER - _BUCKET_WIDTH) // 2)
    head = f"{fit('bucket', _BUCKET_WIDTH)}{fit('module', where)}{fit('source', where)}{'GiB':>{_NUMBER}}"
    lines = [heading("Memory at the peak"), row((head, f"bold {MUTED}"))]
    for one in found:
        lines.append(
            row(
                (fit(one.bucket.title, _BUCKET_WIDTH), MUTED),
                (fit(one.module or ABSENT, where), ""),
                (fit(one.source or ABSENT, where), ""),
                (f"{compact_bytes(one.size_bytes):>{_NUMBER}}", ""),
            )
        )
    return lines


# How far each number goes

_LIMIT_NAME_WIDTH = 26
_ROOMY_LIMITS = _LIMIT_NAME_WIDTH + 2 * _FIGURE_WIDTH + 14
"""Cells from which its source has a column."""
_HOW = {"verified": "verified", "traced": "by trace", "formula": "estimate"}


def limit_rows(found: Sequence[Limit], plan: Plan, width: int, selected: str) -> list[ListRow]:
    """Return a line a number; the one under the cursor also shows what bounds it and its source."""
    name_width = max(10, min(_LIMIT_NAME_WIDTH, width - 2 - 2 * _FIGURE_WIDTH))
    head = f"  {fit('others as they are', name_width)}{'':>{_FIGURE_WIDTH}}{'formula':>{_FIGURE_WIDTH}}"
    lines = [heading(f"How far each number goes, {100 * plan.headroom:g} % left free"), row((head, f"bold {MUTED}"))]
    for one in found:
        lines.append(_limit(one, width, name_width))
        if one.quantity == selected:
            lines += _indented(_limit_notes(one, width), width)
    return lines


def _limit(one: Limit, width: int, name_width: int) -> ListRow:
    value = "none" if one.value is None else f"{'≈' if one.how == 'formula' else ''}{one.value:,}"
    if one.wanted:
        value = f"{PENDING} {value}"
    formula = ABSENT if one.formula is None else f"≈{one.formula:,}"
    return row(
        ("✓ " if one.how == "verified" and not one.wanted else "  ", _FITS),
        (fit(capitalized(NAMES[one.quantity]), name_width), ""),
        (f"{value:>{_FIGURE_WIDTH}}", "bold"),
        (f"{formula:>{_FIGURE_WIDTH}}", MUTED),
        (f"  {_how(one)}" if width >= _ROOMY_LIMITS else "", MUTED),
        key=one.quantity,
    )


def _how(one: Limit) -> str:
    return f"{PENDING} tracing" if one.wanted else _HOW[one.how]


def _limit_notes(one: Limit, width: int) -> Iterator[str]:
    if width < _ROOMY_LIMITS:
        yield _how(one)
    if one.how == "verified" and not one.wanted:
        yield "traced, and it fits" if one.beyond is None else f"traced, and it fits; {one.beyond:,} does not"
    yield from filter(None, (one.note, lift_words(one)))


# Two plans side by side

OTHER = "other"
"""The key of the line that chooses what to compare with."""

_TITLE_WIDTH = 18
_DIFFERENCE_WIDTH = 9
_SAME = "·"


@dataclass(frozen=True)
class Compared:
    """A plan of two that are compared. `traced`: None where there is no trace of it."""

    formula: Answer
    traced: TracedAnswer | None = None


def compare_rows(mine: Compared, theirs: Compared, name: str, width: int) -> list[ListRow]:
    """Return what differs between the plan on the screen and the one called `name`."""
    this, other = mine.formula, theirs.formula
    column = min(18, (width - _TITLE_WIDTH - _DIFFERENCE_WIDTH) // 2)
    heads = (f"{'':<{_TITLE_WIDTH}}", f"{'this plan':>{column}}", f" {fit_right(name, column - 1)}")
    lines = [heading(f"Compared with: {name}"), row(("enter compares with this plan from now on", MUTED), key=OTHER)]
    lines += [row(), row(("".join(heads), f"bold {MUTED}"))]
    settings = _differing(this.plan, other.plan)
    if not settings:
        lines += paragraph("all controls are equal", width)
    for label, mine_said, theirs_said in settings:
        shown = (fit_right(mine_said, column), "bold"), (f" {fit_right(theirs_said, column - 1)}", "")
        lines.append(row((fit(label, _TITLE_WIDTH), ""), *shown))
    lines += [row(), row((f"{'GiB by formula':<{_TITLE_WIDTH}}", f"bold {MUTED}"))]
    for bucket in ALLOCATED_BUCKETS:
        mine_bytes, their_bytes = this.breakdown[bucket], other.breakdown[bucket]
        if mine_bytes or their_bytes:
            lines.append(_bytes_row(bucket.title, mine_bytes, their_bytes, column, BUCKET_LOOKS[bucket]))
    lines.append(_bytes_row("= peak", this.peak_bytes, other.peak_bytes, column))
    lines.append(_bytes_row("to spare", this.spare_bytes, other.spare_bytes, column))
    lines.append(_count_row("largest batch", this.max_batch_size, other.max_batch_size, column))
    lines += [row(), *_traced_rows(mine.traced, theirs.traced, name, column, width), row()]
    for label, mine_count, their_count in (
        ("passes a step", this.accumulation.steps, other.accumulation.steps),
        ("samples a step", this.accumulation.global_batch_size, other.accumulation.global_batch_size),
        ("tokens a step", this.global_batch_tokens, other.global_batch_tokens),
    ):
        lines.append(_count_row(label, mine_count, their_count, column))
    return lines


def _traced_rows(
    mine: TracedAnswer | None, theirs: TracedAnswer | None, name: str, column: int, width: int
) -> list[ListRow]:
    """Return what both come to by trace; of two plans the screen traces only the one that it shows."""
    head = row((f"{'GiB by trace':<{_TITLE_WIDTH}}", f"bold {MUTED}"))
    if mine is None and theirs is None:
        return [head, *paragraph("neither plan has been traced", width)]

    def both(value: Callable[[TracedAnswer], Value]) -> tuple[Value, Value]:
        without = Unknown("no trace")
        return without if mine is None else value(mine), without if theirs is None else value(theirs)

    lines = [
        head,
        _bytes_row("= peak", *both(lambda found: found.peak_allocated_bytes), column),
        _bytes_row("left", *both(lambda found: found.spare_bytes), column),
        _count_row("largest batch", *both(lambda found: found.max_batch_size), column),
    ]
    if mine is None or theirs is None:
        lines += paragraph(f"{'this plan' if mine is None else name} has not been traced", width)
    return lines


def _differing(this: Plan, other: Plan) -> list[tuple[str, str, str]]:
    """Return label and both values of each control that differs; a control only one of them has is a dash there."""
    mine, theirs = draft_of(this), draft_of(other)
    labels = {control.key: control.label for draft in (theirs, mine) for control in controls(draft)}
    my_texts = {control.key: control.text(mine) for control in controls(mine)}
    their_texts = {control.key: control.text(theirs) for control in controls(theirs)}
    return [
        (label, my_texts.get(key, "–"), their_texts.get(key, "–"))
        for key, label in labels.items()
        if my_texts.get(key) != their_texts.get(key)
    ]


def _bytes_row(title: str, mine: Value, theirs: Value, column: int, mark: Span = (" ", "")) -> ListRow:
    return row(
        mark,
        (f" {fit(title, _TITLE_WIDTH - 2)}", ""),
        (f"{compact_bytes(mine):>{column}}", f"bold {_alarm(mine)}".strip()),
        (f"{compact_bytes(theirs):>{column}}", _alarm(theirs)),
        (f"{_difference(mine, theirs, signed):>{_DIFFERENCE_WIDTH}}", MUTED),
    )


def _count_row(title: str, mine: Value, theirs: Value, column: int) -> ListRow:
    def more(count: int) -> str:
        return f"{'+' if count > 0 else '−'}{format_count(abs(count))}"

    return row(
        (fit(title, _TITLE_WIDTH), ""),
        (f"{_count(mine):>{column}}", "bold"),
        (f"{_count(theirs):>{column}}", ""),
        (f"{_difference(mine, theirs, more):>{_DIFFERENCE_WIDTH}}", MUTED),
    )


def _difference(mine: Value, theirs: Value, words: Callable[[int], str]) -> str:
    if isinstance(mine, Unknown) or isinstance(theirs, Unknown):
        return ""
    return words(mine - theirs) if mine != theirs else _SAME


def _count(value: Value) -> str:
    return ABSENT if isinstance(value, Unknown) else f"{value:,}"


def _alarm(value: Value) -> str:
    return "$text-error" if isinstance(value, int) and value < 0 else ""
