"""Memory against batch size. Brings numpy with it: import this only after the first frame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.reactive import reactive
from textual.widgets import Static
from textual_plot import HiResMode, NumericAxisFormatter, PlotWidget

from gpumem_tui.tui.kit.figures import Row, wrapped
from gpumem_tui.tui.kit.glyphs import (
    CAPACITY_COLOUR,
    CAPACITY_MARK,
    FIT_MARK,
    FORMULA_COLOUR,
    FORMULA_MARK,
    OUTCOME_SYMBOLS,
    TRACED_COLOUR,
    TRACED_MARK,
    TRIED_COLOUR,
)
from gpumem_tui.tui.kit.text import assembled
from gpumem_tui.tui.search.plot import PlotView, Point, height_at, plot_view
from gpumem_tui.tui.search.state import SearchState

_MARGIN_LEFT = 5
_EDGE = 1e-6
"""Keeps the tick at 0 off the frame's corner."""


class _ShortLabels(NumericAxisFormatter):
    """Large numbers in thousands and so on: what is left of the frame has room for four characters."""

    def get_labels_for_ticks(self, ticks: Sequence[float]) -> list[str]:
        """The labels of ticks at equal distances."""
        for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if ticks and max(map(abs, ticks)) >= 10 * size:
                return [f"{tick / size:.0f}{unit if round(tick) else ''}" for tick in ticks]
        return super().get_labels_for_ticks(ticks)


class _Chart(PlotWidget, can_focus=False):
    """The axes; its keys would hide the log's."""

    margin_left = reactive(_MARGIN_LEFT)
    margin_top = reactive(0)
    margin_bottom = reactive(1)


class BatchPlot(Vertical):
    """A legend in words over the chart."""

    def __init__(self) -> None:
        super().__init__()
        self._view: PlotView | None = None

    def compose(self) -> ComposeResult:
        """The legend and the chart."""
        yield Static(id="plot-legend")
        chart = _Chart(allow_pan_and_zoom=False)
        chart.set_x_formatter(_ShortLabels())
        chart.set_y_formatter(_ShortLabels())
        yield chart

    def show(self, state: SearchState) -> None:
        """Render a state; a chart takes tens of milliseconds, so only when it changed."""
        view = plot_view(state)
        if view != self._view:
            self._view = view
            self._draw()

    def on_resize(self) -> None:
        """The dots of the formula's line are one a column."""
        self._draw()

    def _draw(self) -> None:
        view = self._view
        if view is None:
            return
        self.query_one("#plot-legend", Static).update(_legend(view, self.size.width))
        chart = self.query_one(_Chart)
        chart.clear()
        chart.set_xlimits(-_EDGE * view.x_max, view.x_max)
        chart.set_ylimits(-_EDGE * view.y_max, view.y_max)
        columns = max(8, self.size.width - _MARGIN_LEFT - 2)
        across = [view.x_max * (column + 0.5) / columns for column in range(columns)]
        if view.traced:
            chart.plot(*_axes(view.traced), line_style=TRACED_COLOUR, hires_mode=HiResMode.BRAILLE)
        dots = [(x, y) for x in across if (y := height_at(view.formula, x)) is not None]
        self._scatter(dots, FORMULA_MARK, f"bold {FORMULA_COLOUR}")
        self._scatter([(x, view.capacity) for x in across], CAPACITY_MARK, CAPACITY_COLOUR)
        self._scatter(view.failures, OUTCOME_SYMBOLS["error"], f"bold {CAPACITY_COLOUR}")
        self._scatter(view.ooms, OUTCOME_SYMBOLS["oom"], f"bold {CAPACITY_COLOUR}")
        self._scatter(view.fits, FIT_MARK, f"bold {TRIED_COLOUR}")

    def _scatter(self, points: Iterable[Point], marker: str, style: str) -> None:
        xs, ys = _axes(points)
        if xs:
            self.query_one(_Chart).scatter(xs, ys, marker=marker, marker_style=style)


def _axes(points: Iterable[Point]) -> tuple[list[float], list[float]]:
    listed = list(points)
    return [x for x, _ in listed], [y for _, y in listed]


def _legend(view: PlotView, width: int) -> Content:
    entries = [
        (bool(view.formula), FORMULA_MARK * 3, FORMULA_COLOUR, "formula"),
        (bool(view.traced), TRACED_MARK * 3, TRACED_COLOUR, "traced"),
        (bool(view.fits), f" {FIT_MARK} ", TRIED_COLOUR, view.tried_title),
        (bool(view.ooms), f" {OUTCOME_SYMBOLS['oom']} ", CAPACITY_COLOUR, "OOM"),
        (bool(view.failures), f" {OUTCOME_SYMBOLS['error']} ", CAPACITY_COLOUR, "failed"),
        (True, CAPACITY_MARK * 3, CAPACITY_COLOUR, f"{view.capacity:.1f} GiB"),
    ]
    items: list[Row] = [
        [(mark, f"bold {colour}"), (f" {words}", "")] for wanted, mark, colour, words in entries if wanted
    ]
    return assembled(wrapped(items, width, gap=2))
