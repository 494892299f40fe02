"""Two plans side by side: the controls that differ, and what each comes to by formula and by trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpumem_tui.memory import ALLOCATED_BUCKETS, Unknown, Value, format_count
from gpumem_tui.plan.answers import Answer, TracedAnswer
from gpumem_tui.plan.controls import controls
from gpumem_tui.plan.draft import draft_of
from gpumem_tui.plan.plan import Plan
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

OTHER = "other"
"""The key of the line that chooses what to compare with."""

_TITLE_WIDTH = 18
_DIFFERENCE_WIDTH = 9
_SAME = "·"


@dataclass(frozen=True)
class Compared:
    """One of the two plans. `traced`: None where there is no trace of it."""

    formula: Answer
    traced: TracedAnswer | None = None


def compare_rows(mine: Compared, theirs: Compared, name: str, width: int) -> list[ListRow]:
    """What differs between the plan on the screen and the one called `name`."""
    this, other = mine.formula, theirs.formula
    column = min(18, (width - _TITLE_WIDTH - _DIFFERENCE_WIDTH) // 2)
    heads = (f"{'':<{_TITLE_WIDTH}}", f"{'this plan':>{column}}", f" {fit_right(name, column - 1)}")
    lines = [heading(f"Compared with: {name}"), row(("enter chooses another", MUTED), key=OTHER)]
    lines += [row(), row(("".join(heads), f"bold {MUTED}"))]
    settings = _differing(this.plan, other.plan)
    if not settings:
        lines += paragraph("every control is the same", width)
    for label, my_text, their_text in settings:
        lines.append(
            row(
                (fit(label, _TITLE_WIDTH), ""),
                (fit_right(my_text, column), "bold"),
                (" " + fit_right(their_text, column - 1), ""),
            )
        )
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
    """The same by trace; of two plans the screen traces only the one that it shows."""
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
    """Label and both values of every control that is not the same; a control only one of them has is a dash there."""
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


def _difference(mine: Value, theirs: Value, said: Callable[[int], str]) -> str:
    if isinstance(mine, Unknown) or isinstance(theirs, Unknown):
        return ""
    return said(mine - theirs) if mine != theirs else _SAME


def _count(value: Value) -> str:
    return ABSENT if isinstance(value, Unknown) else f"{value:,}"


def _alarm(value: Value) -> str:
    return "$text-error" if isinstance(value, int) and value < 0 else ""
