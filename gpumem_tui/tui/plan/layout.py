"""How the Plan screen divides a terminal."""

from __future__ import annotations

SMALLEST = (72, 18)
"""Columns and rows below which the screen only says so."""

_BESIDE = 160
_ABOVE = (110, 36)
_WITH_STEP = 48


def layout_classes(width: int, height: int) -> dict[str, bool]:
    """The style sheet's classes for a terminal of so many columns and rows.

    ``-wide``: controls, numbers and pane side by side; ``-step``: memory over a step below the numbers too;
    ``-single``: numbers and panes take turns; none of them: the pane below the numbers; ``-tiny``: nothing fits.
    """
    wide = width >= _BESIDE
    return {
        "-tiny": width < SMALLEST[0] or height < SMALLEST[1],
        "-wide": wide,
        "-step": wide and height >= _WITH_STEP,
        "-single": not wide and (width < _ABOVE[0] or height < _ABOVE[1]),
    }
