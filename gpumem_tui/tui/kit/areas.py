"""Stacked areas over a row of columns, eight steps a cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpumem_tui.tui.kit.figures import Row, Span, joined
from gpumem_tui.tui.kit.glyphs import EIGHTHS


@dataclass(frozen=True)
class Band:
    """One area: what its upper edge is, and its colour."""

    title: str
    colour: str


Stack = Sequence[tuple[int, Band]]
"""The upper edge of each area of a column in eighths of a row, from the bottom up."""


def eighths(size: float, total: float, rows: int) -> int:
    """The height of a size. What is there at all shows."""
    exact = min(1.0, size / total) * rows * 8 if total > 0 else 0.0
    return max(1, round(exact)) if size > 0 else 0


def area_column(stack: Stack, rows: int) -> tuple[Span, ...]:
    """The cells of a column from the top down."""
    return tuple(_cell(stack, row) for row in range(rows - 1, -1, -1))


def drawn(columns: Sequence[Sequence[Span]]) -> list[Row]:
    """Columns of cells as rows."""
    return [joined(cells) for cells in zip(*columns, strict=True)]


def _cell(stack: Stack, row: int) -> Span:
    """One cell of a column: its lowest area, and above the edge what is there."""
    bottom, top = row * 8, row * 8 + 8
    below = next(((edge, band) for edge, band in stack if edge > bottom), None)
    if below is None:
        return " ", ""
    edge, band = below
    if edge >= top:
        return "█", band.colour
    above = next((other for other_edge, other in stack if other_edge > edge), None)
    ground = "" if above is None else f" on {above.colour}"
    return EIGHTHS[edge - bottom], f"{band.colour}{ground}"
