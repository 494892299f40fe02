"""The time under a chart, and the two bands of an allocator in it."""

from __future__ import annotations

from dataclasses import dataclass

from gpumem_tui.tui.kit.areas import Band

LABEL_WIDTH = 6
SPANS_S = (120, 600, 3600, 6 * 3600, 24 * 3600)
ALLOCATED = Band("allocated", "$gradients")
CACHED = Band("reserved", "$history-reserved")


@dataclass(frozen=True)
class TimeAxis:
    """Which moment each column of a chart stands for.

    Attributes:
        start_s: where the first column begins, in seconds since the epoch; step_s: how long each is.
        labels: cells left of the first.
    """

    start_s: float
    step_s: float
    columns: int
    labels: int = LABEL_WIDTH

    @property
    def last_s(self) -> float:
        """The middle of the last column."""
        return self.start_s + (self.columns - 0.5) * self.step_s

    def time_at(self, x: int) -> float | None:
        """The middle of what is drawn at a column of the widget; None beside the chart."""
        column = x - self.labels
        return self.start_s + (column + 0.5) * self.step_s if 0 <= column < self.columns else None

    def column_at(self, time_s: float | None) -> int | None:
        """The inverse, without the labels; None beyond the chart."""
        if time_s is None:
            return None
        column = int((time_s - self.start_s) // self.step_s)
        return column if 0 <= column < self.columns else None


def duration(seconds: float) -> str:
    """A length of time in its largest units: "90s" is "1m30s", two hours are "2h"."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    parts = [f"{hours}h" if hours else "", f"{minutes}m" if minutes else "", f"{rest}s" if rest else ""]
    return "".join(part for part in parts if part)[: LABEL_WIDTH + 2] or "0s"
