"""Memory against batch size: the lines, the trials and the capacity, in GiB and clipped to the axes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from textual.events import Resize

from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.search.prediction import Prediction
from gpumem_tui.tui.kit.chart import Plot, Point, number, ticks
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
from gpumem_tui.tui.kit.lines import Lines
from gpumem_tui.tui.search.state import SearchState

_STEPS = 12
_SMALLEST_RANGE = 4
_ROOM = 1.2
_BEYOND = 1.1
"""Where trials that did not fit are marked, in capacities, if no trace tells what they needed: clear of the line."""
_ROWS_A_TICK, _COLUMNS_A_TICK = 2, 5
_LEAST_ROWS = 3


@dataclass(frozen=True)
class PlotView:
    """The lines, marks and axes of the plot of memory against batch size.

    Attributes:
        capacity: GiB the step can take in all: what CUDA sees of the device, or less under a user's cap.
        formula, traced: points of a line, batch size and GiB. `fits`, `ooms`, `failures`: the trials, those out of
            memory at what they would have needed by trace.
    """

    x_max: float
    y_max: float
    capacity: float
    formula: tuple[Point, ...]
    traced: tuple[Point, ...]
    fits: tuple[Point, ...]
    ooms: tuple[Point, ...]
    failures: tuple[Point, ...]
    tried_title: str


def curve_sizes(predicted_size: int | None, tried: Iterable[int] = ()) -> list[int]:
    """Return the batch sizes of the traced line: evenly to beyond the prediction, and every trial's."""
    top = int(max(_SMALLEST_RANGE, predicted_size or 0) * _ROOM) + 1
    step = max(1, top // _STEPS)
    return sorted({1, *range(step, top + step, step), *tried})


def warm(prediction: Prediction, tried: Iterable[int] = ()) -> None:
    """Replay the sizes of the traced line and of both largest batches now, so that drawing finds them done."""
    if isinstance(prediction.traced, Unknown):
        return
    _ = prediction.with_headroom
    for size in (*curve_sizes(prediction.best_max_batch_size), *tried):
        prediction.traced.at(size)


def plot_view(state: SearchState) -> PlotView:
    """Return the chart of a state."""
    device = state.config.device
    sizes = curve_sizes(state.predicted_size, (trial.result.batch_size for trial in state.trials))
    by_formula = ((size, state.formula.at(size)) for size in sizes)
    formula: list[Point] = [(size, at.peak_bytes / GIB) for size, at in by_formula if not isinstance(at, Unknown)]
    traced: list[Point] = []
    if not isinstance(state.traced, Unknown):
        traced = [(size, state.traced.device_used_bytes(size) / GIB) for size in sizes]
    capacity = device.gpu.cuda_total_bytes / GIB
    if state.config.limit_bytes is not None:
        context_bytes = state.predicted.ready.context_bytes if state.predicted is not None else 0
        capacity = min(capacity, (state.config.limit_bytes + context_bytes) / GIB)
    starts = [line[0][1] for line in (formula, traced) if line]
    y_max = _ROOM * max(capacity, *starts) if starts else _ROOM * capacity
    by_outcome: dict[str, list[Point]] = {"fit": [], "oom": [], "error": []}
    for trial in state.trials:
        height = trial.result.device_used_bytes / GIB
        if trial.result.outcome != "fit":
            height = _BEYOND * capacity
        if trial.result.outcome == "oom" and not isinstance(state.traced, Unknown):
            needed = state.traced.device_used_bytes(trial.result.batch_size) / GIB
            height = min(max(needed, capacity), y_max)
        by_outcome[trial.result.outcome].append((trial.result.batch_size, height))
    return PlotView(
        x_max=float(sizes[-1]),
        y_max=y_max,
        capacity=capacity,
        formula=clipped(formula, y_max),
        traced=clipped(traced, y_max),
        fits=tuple(by_outcome["fit"]),
        ooms=tuple(by_outcome["oom"]),
        failures=tuple(by_outcome["error"]),
        tried_title=device.measured_title.lower(),
    )


def clipped(line: list[Point], y_max: float) -> tuple[Point, ...]:
    """Return the rising line up to where it leaves the chart."""
    kept: list[Point] = []
    for x, y in line:
        if y <= y_max:
            kept.append((x, y))
            continue
        if kept:
            x0, y0 = kept[-1]
            kept.append((x0 + (x - x0) * (y_max - y0) / (y - y0), y_max))
        break
    return tuple(kept)


def height_at(line: tuple[Point, ...], x: float) -> float | None:
    """Return the line's height at `x`; None outside it."""
    for (x0, y0), (x1, y1) in pairwise(line):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None


class BatchPlot(Lines):
    """A legend in words over the chart."""

    _state: SearchState | None = None

    def show(self, state: SearchState) -> None:
        """Render a state."""
        self._state = state
        if self.size.width and self.size.height:
            self.show_rows(plot_rows(plot_view(state), self.size.width, self.size.height))

    def on_resize(self, event: Resize) -> None:
        """Draw the chart at another size."""
        super().on_resize(event)
        if self._state is not None:
            self.show(self._state)


def plot_rows(view: PlotView, width: int, height: int) -> list[Row]:
    """Return the legend and the chart in so many cells; the legend alone where there is no room for both."""
    legend = _legend(view, width)
    rows = height - len(legend) - 2
    if rows < _LEAST_ROWS:
        return legend[:height]
    y_ticks = ticks(view.y_max, 1 + rows // _ROWS_A_TICK)
    tick_width = max(len(number(y)) for y in y_ticks)
    plot = Plot(max(8, width - tick_width - 2), rows, lambda x: x / view.x_max, view.y_max)
    plot.line(view.traced, TRACED_COLOUR)
    plot.across(lambda x: height_at(view.formula, x), view.x_max, FORMULA_MARK, f"bold {FORMULA_COLOUR}")
    plot.across(lambda _x: view.capacity, view.x_max, CAPACITY_MARK, CAPACITY_COLOUR)
    above = view.capacity + view.y_max / rows  # the line itself is where the largest that fits is
    for points, glyph in ((view.failures, OUTCOME_SYMBOLS["error"]), (view.ooms, OUTCOME_SYMBOLS["oom"])):
        for x, y in points:
            plot.mark(x, max(y, above), glyph, f"bold {CAPACITY_COLOUR}")
    for x, y in view.fits:
        plot.mark(x, y, FIT_MARK, f"bold {TRIED_COLOUR}")
    x_labels = [(x, number(x), len(number(x)) // 2) for x in ticks(view.x_max, 1 + plot.columns // _COLUMNS_A_TICK, 1)]
    return [*legend, *plot.framed(y_ticks, tick_width, x_labels)]


def _legend(view: PlotView, width: int) -> list[Row]:
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
    return wrapped(items, width, gap=2)
