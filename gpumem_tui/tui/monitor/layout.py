"""Which parts of the Monitor stand where at a terminal's size. Processes always keep their place."""

from __future__ import annotations

from dataclasses import dataclass

CARD_WIDTH = 78
"""Cells below which a GPU gets a line instead of a card."""

_LINE_WIDTH = 38
_TABLE_LEAST = 5
_HISTORY_LEAST = 7
_HISTORY_MOST = 34
_TABLE_STEP = 4
_CARD_LEGENDS = (4, 3, 2, 1)
_CARD_HEAD = 2
_HEADING = 1
_PROCESS_CARD = 4
"""Lines of the watched process that stands in the GPUs' place where there are none."""


@dataclass(frozen=True)
class Layout:
    """Rows and columns of each part.

    Attributes:
        columns: GPUs beside one another.
        card: lines of a GPU's card; 0 where each has a single line.
        detail: lines on the GPU in focus below the list; 0 for none.
        gpus, history, table: rows of each part, headings included; 0 where it is left out.
    """

    columns: int
    card: int
    detail: int
    gpus: int
    history: int
    table: int


def layout(
    width: int, height: int, gpus: int, processes: int, *, prefer_history: bool = False, history_alone: bool = False
) -> Layout:
    """Divide `width` × `height` cells (header and footer are not among them) between GPUs, history and processes.

    Args:
        processes: lines that the table would fill. Its height goes in steps, so that one that ends moves nothing.
        prefer_history: where there is room for one of history and table, it is the history.
        history_alone: it is the history even where there is room for both.
    """
    columns, card, rows = _gpu_rows(width, height, gpus)
    if not gpus and height >= 2 * _TABLE_LEAST + _PROCESS_CARD:
        rows = _PROCESS_CARD
    left = height - rows
    detail = 0
    if not card and gpus and left >= 2 * _TABLE_LEAST + 3:
        detail = min(4, left // 6)
        left -= detail
    wanted = 2 + -(-processes // _TABLE_STEP) * _TABLE_STEP
    if history_alone and left >= _TABLE_LEAST:
        history = left
    elif left >= _HISTORY_LEAST + min(wanted, 2 * _TABLE_LEAST):
        history = max(_HISTORY_LEAST, round(left * 0.42), min(left - wanted, round(left * 0.6), _HISTORY_MOST))
    else:
        history = left if prefer_history and left >= _TABLE_LEAST else 0
    return Layout(columns, card, detail, rows + detail, history, left - history)


def _gpu_rows(width: int, height: int, gpus: int) -> tuple[int, int, int]:
    """Columns, lines of a card and rows: cards where all of them fit in their part of the height, else lines."""
    if not gpus:
        return 1, 0, 0
    for columns in (1, 2):
        if width // columns < CARD_WIDTH or columns > gpus:
            continue
        for legend in _CARD_LEGENDS:
            card = _CARD_HEAD + legend
            rows = -(-gpus // columns) * card
            if rows <= height * (0.3 if gpus == 1 else 0.48):
                return columns, card, rows
    most = max(1, min(height - _TABLE_LEAST - _HEADING, height * 6 // 10))
    columns = 1
    while -(-gpus // columns) > most and width // (columns + 1) >= _LINE_WIDTH:
        columns += 1
    return columns, 0, min(most, -(-gpus // columns)) + _HEADING
