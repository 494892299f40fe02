"""Two plans side by side: the controls that differ, and what each comes to by the closed form."""

from __future__ import annotations

from gpumem_tui.memory import ALLOCATED_BUCKETS
from gpumem_tui.plan.answers import Answer
from gpumem_tui.plan.controls import controls
from gpumem_tui.plan.draft import draft_of
from gpumem_tui.plan.plan import Plan
from gpumem_tui.tui.figures import MUTED, Span, compact_bytes, signed
from gpumem_tui.tui.glyphs import BUCKET_LOOKS
from gpumem_tui.tui.views.plan_numbers import short_count
from gpumem_tui.tui.views.plan_rows import Row, heading, paragraph, row
from gpumem_tui.tui.views.readings import fit, fit_right

OTHER = "other"
"""The key of the line that chooses what to compare with."""

_TITLE_WIDTH = 18
_DIFFERENCE_WIDTH = 9
_SAME = "·"


def compare_rows(this: Answer, other: Answer, name: str, width: int) -> list[Row]:
    """What differs between the plan on the screen and the one called `name`."""
    column = min(18, (width - _TITLE_WIDTH - _DIFFERENCE_WIDTH) // 2)
    heads = (f"{'':<{_TITLE_WIDTH}}", f"{'this plan':>{column}}", f" {fit_right(name, column - 1)}")
    lines = [heading(f"Compared with: {name}"), row(("enter chooses another", MUTED), key=OTHER)]
    lines += [row(), row(("".join(heads), f"bold {MUTED}"))]
    settings = _differing(this.plan, other.plan)
    if not settings:
        lines += paragraph("every control is the same", width)
    for label, mine, theirs in settings:
        lines.append(
            row(
                (fit(label, _TITLE_WIDTH), ""),
                (fit_right(mine, column), "bold"),
                (" " + fit_right(theirs, column - 1), ""),
            )
        )
    lines += [row(), row((f"{'GiB by formula':<{_TITLE_WIDTH}}", f"bold {MUTED}"))]
    for bucket in ALLOCATED_BUCKETS:
        mine_bytes, their_bytes = this.breakdown[bucket], other.breakdown[bucket]
        if mine_bytes or their_bytes:
            lines.append(_bytes_row(bucket.title, mine_bytes, their_bytes, column, BUCKET_LOOKS[bucket]))
    lines.append(_bytes_row("= peak", this.peak_bytes, other.peak_bytes, column))
    lines.append(_bytes_row("to spare", this.spare_bytes, other.spare_bytes, column))
    lines.append(row())
    for label, mine_count, their_count in (
        ("largest batch", this.max_batch_size, other.max_batch_size),
        ("passes a step", this.accumulation.steps, other.accumulation.steps),
        ("samples a step", this.accumulation.global_batch_size, other.accumulation.global_batch_size),
        ("tokens a step", this.global_batch_tokens, other.global_batch_tokens),
    ):
        lines.append(_count_row(label, mine_count, their_count, column))
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


def _bytes_row(title: str, mine: int, theirs: int, column: int, mark: Span = (" ", "")) -> Row:
    difference = signed(mine - theirs) if mine != theirs else _SAME
    return row(
        mark,
        (f" {fit(title, _TITLE_WIDTH - 2)}", ""),
        (f"{compact_bytes(mine):>{column}}", "bold" if mine >= 0 else "bold $text-error"),
        (f"{compact_bytes(theirs):>{column}}", "" if theirs >= 0 else "$text-error"),
        (f"{difference:>{_DIFFERENCE_WIDTH}}", MUTED),
    )


def _count_row(title: str, mine: int, theirs: int, column: int) -> Row:
    more = "+" if mine > theirs else "−"
    difference = f"{more}{short_count(abs(mine - theirs))}" if mine != theirs else _SAME
    return row(
        (fit(title, _TITLE_WIDTH), ""),
        (f"{mine:>{column},}", "bold"),
        (f"{theirs:>{column},}", ""),
        (f"{difference:>{_DIFFERENCE_WIDTH}}", MUTED),
    )
