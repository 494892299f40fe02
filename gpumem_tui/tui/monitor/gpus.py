"""The GPUs: a line each where there are many, a card with its legend where there is room; a click puts one in focus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from textual.events import Click
from textual.message import Message

from gpumem_tui.memory import Unknown, format_bytes
from gpumem_tui.monitor.snapshot import DeviceState, GpuReading
from gpumem_tui.tui.kit.figures import ABSENT, MUTED, Row, fit, fit_right, ruled, span_width
from gpumem_tui.tui.kit.glyphs import BUCKET_LOOKS
from gpumem_tui.tui.kit.lines import Lines
from gpumem_tui.tui.kit.shares import Share, bar, legend
from gpumem_tui.tui.monitor.entries import charted
from gpumem_tui.tui.monitor.layout import Layout
from gpumem_tui.tui.monitor.readings import (
    known,
    power_span,
    short_name,
    state_span,
    temperature_span,
    used_share,
    used_span,
    utilization_span,
)
from gpumem_tui.tui.monitor.shares import shares
from gpumem_tui.tui.monitor.state import MonitorState, device_key
from gpumem_tui.tui.process.probed import age_text, seconds
from gpumem_tui.watch.published import WatchedProcess

_GUTTER = 2
"""Cells between GPUs that stand beside one another."""

_ROOMY = 60
"""Cells from which a line has power and temperature."""

_NAMES = ((150, 30), (110, 18), (70, 14), (0, 0))
"""From this many cells upward, a line's GPU name has so many."""


@dataclass(frozen=True)
class GpusView:
    """The panel's rows, and where each GPU stands.

    Attributes:
        places: device key by (first row, rows, first column, columns).
    """

    rows: tuple[Row, ...]
    places: dict[tuple[int, int, int, int], str]

    def at(self, x: int, y: int) -> str | None:
        """The GPU drawn at a cell."""
        for (top, rows, left, columns), key in self.places.items():
            if top <= y < top + rows and left <= x < left + columns:
                return key
        return None


def gpus_view(state: MonitorState, plan: Layout, width: int) -> GpusView:
    """All GPUs in their places; those that do not fit scroll with the focus."""
    if not state.gpus:
        return GpusView((), {})
    return _cards(state, plan, width) if plan.card else _lines(state, plan, width)


def _cards(state: MonitorState, plan: Layout, width: int) -> GpusView:
    cell = (width - _GUTTER * (plan.columns - 1)) // plan.columns
    rows: list[Row] = []
    places = {}
    for first in range(0, len(state.gpus), plan.columns):
        line = state.gpus[first : first + plan.columns]
        for column, gpu in enumerate(line):
            places[(len(rows), plan.card, column * (cell + _GUTTER), cell)] = device_key(gpu)
        rows += _side_by_side([_card(state, gpu, cell, plan.card) for gpu in line], cell)
    return GpusView(tuple(rows), places)


def _card(state: MonitorState, gpu: GpuReading, width: int, lines: int) -> list[Row]:
    """Facts, bar, legend: exactly `lines` rows."""
    stretches = shares(gpu, state.parts)
    rows = [_facts(state, gpu, width)]
    if stretches:
        rows += [bar(stretches, width), *legend(stretches, width, lines - 2)]
    else:
        rows += [[(fit(reason_of(gpu), width), MUTED)]]
    return [*rows, *([] for _ in range(lines - len(rows)))]


def _lines(state: MonitorState, plan: Layout, width: int) -> GpusView:
    cell = (width - _GUTTER * (plan.columns - 1)) // plan.columns
    rows_shown = plan.gpus - plan.detail - 1
    shown, first = _window(state, rows_shown * plan.columns)
    rows = [_list_heading(state, cell, shown, first)]
    places = {}
    tall = -(-len(shown) // plan.columns)
    columns = [shown[start : start + tall] for start in range(0, len(shown), tall)]  # read downwards, then right
    for index in range(tall):
        line = [column[index] for column in columns if index < len(column)]
        for number, gpu in enumerate(line):
            places[(len(rows), 1, number * (cell + _GUTTER), cell)] = device_key(gpu)
        rows += _side_by_side([[_line(state, gpu, cell)] for gpu in line], cell)
    focused = state.focused
    if plan.detail and focused is not None:
        rows += detail_rows(state, focused, width, plan.detail)
    return GpusView(tuple(rows), places)


def detail_rows(state: MonitorState, gpu: GpuReading, width: int, lines: int) -> list[Row]:
    """The GPU in focus, below the list: its legend, under its facts where there is room."""
    stretches = shares(gpu, state.parts)
    facts = [_facts(state, gpu, width)] if lines > 2 else []
    said = legend(stretches, width, lines - len(facts)) if stretches else [[(fit(reason_of(gpu), width), MUTED)]]
    return [*facts, *said, *([] for _ in range(lines - len(facts) - len(said)))]


def reason_of(gpu: GpuReading) -> str:
    """Why there is no bar."""
    if gpu.state is DeviceState.LOST:
        return f"lost: {gpu.state_reason}" if gpu.state_reason else "lost"
    return gpu.ledger.reason if isinstance(gpu.ledger, Unknown) else gpu.state_reason


def _window(state: MonitorState, most: int) -> tuple[Sequence[GpuReading], int]:
    """The GPUs that fit, the one in focus among them, and the index of the first."""
    gpus, focused = state.gpus, state.focused
    here = gpus.index(focused) if focused is not None else 0
    first = max(0, min(here - most // 2, len(gpus) - most))
    return gpus[first : first + most], first


def _list_heading(state: MonitorState, width: int, shown: Sequence[GpuReading], first: int) -> Row:
    """The headings above the columns; the rest of the line is a rule."""
    roomy = width >= _ROOMY
    name = _marker_width(state) + _name_width(width) + 1
    columns = f"{'used/total GiB':>15}{'util':>6}{'power':>6}{'temp':>6}" if roomy else f"{'GiB':>11}{'util':>5}"
    text = _how_many(state, shown, first)
    lead = max(name, len(text) + 1)
    covered = lead - name
    whole = covered if columns[:covered][-1:] in ("", " ") else columns.find(" ", covered)  # no half of a word
    left = f"{text:<{lead}}{columns[whole:]:>{len(columns) - covered}}" if whole >= 0 else text
    return ruled([(left, f"bold {MUTED}")], [], width)


def _how_many(state: MonitorState, shown: Sequence[GpuReading], first: int) -> str:
    count = len(state.gpus)
    if len(shown) == count:
        return f"{count} GPUs" if count > 1 else "GPU"
    return f"GPUs {first + 1}–{first + len(shown)} of {count}"


def _line(state: MonitorState, gpu: GpuReading, width: int) -> Row:
    """One GPU in one line. The bar is last: what stands left of a change is sent to the terminal again."""
    left = _marker(state, gpu)
    name_width = _name_width(width)
    if name_width:
        left.append((f"{fit(short_name(gpu.name), name_width)} ", ""))
    if gpu.state is DeviceState.LOST:
        return [*left, (fit(reason_of(gpu), width - span_width(left)), "$error")]
    left += [*_line_readings(state, gpu, roomy=width >= _ROOMY), ("  ", "")]
    room = width - span_width(left)
    stretches = shares(gpu, state.parts)
    return [*left, *(bar(stretches, room) if stretches else [(fit(reason_of(gpu), room), MUTED)])]


def _name_width(width: int) -> int:
    return next(cells for least, cells in _NAMES if width >= least)


def _line_readings(state: MonitorState, gpu: GpuReading, *, roomy: bool) -> Row:
    used = used_span(state, gpu, 14 if roomy else 10)
    stale = state_span(gpu)
    if stale is not None:
        return [used, (fit_right(stale[0], 18 if roomy else 6), stale[1])]
    if not roomy:
        return [used, utilization_span(gpu, 6)]
    return [used, utilization_span(gpu, 6), power_span(gpu, 6), temperature_span(state, gpu, 6)]


def _marker_width(state: MonitorState) -> int:
    return span_width(_marker(state, state.gpus[0]))


def _marker(state: MonitorState, gpu: GpuReading) -> Row:
    digits = len(str(max(other.index for other in state.gpus)))
    if len(state.gpus) == 1:
        return [(f"{gpu.index} ", "bold")]
    if gpu is state.focused:
        return [(f"▸{gpu.index:>{digits}} ", "bold $primary")]
    return [(f" {gpu.index:>{digits}} ", MUTED)]


def _facts(state: MonitorState, gpu: GpuReading, width: int) -> Row:
    """Name on the left; on the right as many readings as there is room for, the most telling first."""
    left: Row = _marker(state, gpu)
    stale = state_span(gpu)
    readings = [_used(state, gpu)] if gpu.state is not DeviceState.LOST else []
    if stale is not None:
        readings.insert(0, [stale])
    if gpu.state is not DeviceState.LOST:
        readings += _readings(state, gpu)
    room = width - span_width(left) - min(len(gpu.name), 12)
    right: Row = []
    for reading in readings:
        if span_width(right) + span_width(reading) + 2 > room:
            break
        right += [("  ", ""), *reading] if right else reading
    room = width - span_width(left) - span_width(right)
    return ruled([*left, (fit(gpu.name, min(cell_len(gpu.name), room)), "bold")], right, width)


def _used(state: MonitorState, gpu: GpuReading) -> Row:
    if isinstance(gpu.visible_memory, Unknown):
        return [(ABSENT, "bold")]
    share = used_share(gpu) or 0.0
    return [used_span(state, gpu, 12), (f" GiB {share:>4.0%}", "")]


def _readings(state: MonitorState, gpu: GpuReading) -> list[Row]:
    """Each of a fixed width."""
    limit = known(gpu.power_limit_w, lambda value: f"/{value:.0f}W")
    power = [(fit_right(known(gpu.power_w, lambda value: f"{value:.0f}"), 4), ""), (f"{limit:<5}", "")]
    found: list[Row] = [
        [("util ", MUTED), utilization_span(gpu)],
        power if not isinstance(gpu.power_limit_w, Unknown) else [power_span(gpu, 6)],
        [temperature_span(state, gpu)],
    ]
    throttle = gpu.throttle
    if isinstance(throttle, tuple) and throttle:
        found.append([(f"⚠ {', '.join(throttle)}", "bold $warning")])
    if gpu.mig:
        found.append([("MIG", "bold")])
    found.append([("SM ", MUTED), (fit_right(known(gpu.sm_clock_mhz, lambda mhz: f"{mhz}"), 4), ""), (" MHz", MUTED)])
    found.append([("mem ", MUTED), (fit_right(known(gpu.memory_clock_mhz, lambda m: f"{m}"), 5), ""), (" MHz", MUTED)])
    if isinstance(gpu.fan_percent, int):
        found.append([("fan ", MUTED), (f"{gpu.fan_percent:>3}%", "")])
    received, sent = gpu.pcie_rx_bytes_per_s, gpu.pcie_tx_bytes_per_s
    if isinstance(received, int) and isinstance(sent, int):
        rates = f"{'↓' + format_bytes(received):>11}{'↑' + format_bytes(sent):>11}/s"
        found.append([("PCIe", MUTED), (rates, "")])
    if isinstance(gpu.ecc_uncorrected, int) and gpu.ecc_uncorrected:
        found.append([(f"ECC {gpu.ecc_uncorrected} uncorrected", "bold $error")])
    return found


def _side_by_side(blocks: Sequence[list[Row]], cell: int) -> list[Row]:
    if len(blocks) == 1:
        return blocks[0]
    rows = []
    for parts in zip(*blocks, strict=True):
        row: Row = []
        for number, part in enumerate(parts):
            row += part
            if number < len(parts) - 1:
                row.append((" " * (cell + _GUTTER - span_width(part)), ""))
        rows.append(row)
    return rows


def probed_card(watched: WatchedProcess, width: int, lines: int) -> list[Row]:
    """Facts, bar and legend in `lines` rows. Of a process on several devices it is the first."""
    title = watched.process.title
    if not watched.own:
        return [ruled([(title, "bold")], [], width), [("no step has finished yet", MUTED)]]
    sample = watched.own[0].sample
    facts: Row = [
        ("step ", MUTED), (f"{sample.record.step:,}", "bold"), (f"  {seconds(sample.step_s)}", ""),
        (f"  {age_text(watched.process.age_s)}", MUTED),
    ]  # fmt: skip
    where = "host memory" if sample.device == "cpu" else sample.device
    room = width - sum(len(text) for text, _ in facts) - len(where) - 6
    left: Row = [(f"{where} ", "bold"), (fit(title, min(len(title), room)), "bold")]
    stretches = [
        Share(bucket.title, bucket.title, size_bytes, BUCKET_LOOKS[bucket])
        for bucket, size_bytes in sample.buckets.items()
        if isinstance(size_bytes, int)
    ]
    return [ruled(left, facts, width), bar(stretches, width), *legend(stretches, width, lines - 2)]


class GpuPanel(Lines):
    """A line or a card each; without any, a card of a process that is watched in host memory."""

    class Chosen(Message):
        """The user clicked on the GPU of this key."""

        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    _view = GpusView((), {})

    def show(self, state: MonitorState, plan: Layout, width: int) -> None:
        """Render a state."""
        self._view = gpus_view(state, plan, width)
        watched = charted(state) if not state.gpus else None
        self.show_rows(self._view.rows if watched is None else probed_card(watched, width, plan.gpus))

    def on_click(self, event: Click) -> None:
        """Put it in focus."""
        offset = event.get_content_offset(self)
        key = self._view.at(offset.x, offset.y) if offset is not None else None
        if key is not None:
            self.post_message(self.Chosen(key))
