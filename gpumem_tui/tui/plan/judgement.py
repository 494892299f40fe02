"""What the field says about this batch size: each piece of advice with this plan's numbers and its source."""

from __future__ import annotations

from collections.abc import Sequence

from gpumem_tui.plan.advice_text import Judgement, Table
from gpumem_tui.plan.curves import Curve
from gpumem_tui.tui.kit.figures import MUTED
from gpumem_tui.tui.kit.rows import ListRow, paragraph, row
from gpumem_tui.tui.plan.curves import open_curve

_READABLE = 96
"""Cells beyond which a line of text is hard to follow."""


def judgement_rows(judgements: Sequence[Judgement], throughput: Curve, width: int) -> list[ListRow]:
    """Every judgement open, one below the other; the throughput's with its curve."""
    width = min(width, _READABLE)
    lines: list[ListRow] = []
    for judgement in judgements:
        mark = ("! ", "bold $text-warning") if judgement.warning else ("  ", "")
        lines.append(row(mark, (judgement.title, "bold $primary"), key=judgement.key))
        lines += paragraph(judgement.text, width, "", indent=2)
        if judgement.key == "throughput":
            lines += open_curve(throughput, width)
        if judgement.table is not None:
            lines += _table_rows(judgement.table, width)
        lines += [*paragraph(judgement.source, width, MUTED, indent=2), row()]
    return lines


def _table_rows(table: Table, width: int) -> list[ListRow]:
    """Columns as wide as what is in them; what does not fit is left out at the right."""
    widths = [max(map(len, column)) + 2 for column in zip(table.columns, *table.rows, strict=True)]
    lines = [row(("  " + _cells(table.columns, widths), f"bold {MUTED}"))]
    lines += [row(("  " + _cells(cells, widths), "")) for cells in table.rows]
    return [ListRow(tuple((text[:width], style) for text, style in line.spans)) for line in lines]


def _cells(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
