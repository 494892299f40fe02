"""Readings as the Monitor writes them: short, and of a known width. A reading that is unknown is a dash."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from msgspec import Struct
from rich.cells import cell_len
from textual.events import Click
from textual.message import Message

from gpumem_tui.ledger import Ledger
from gpumem_tui.memory import ALLOCATED_BUCKETS, GIB, Bucket, Unknown, Value, format_bytes
from gpumem_tui.monitor.alerts import AlertKind
from gpumem_tui.monitor.devices import is_free
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.snapshot import DeviceState, GpuProcess, GpuReading, Instance
from gpumem_tui.monitor.vendors import known as known_vendors
from gpumem_tui.tui.kit.figures import (
    ABSENT,
    MUTED,
    Row,
    Span,
    age_text,
    compact_bytes,
    fit,
    fit_right,
    ruled,
    seconds,
    span_width,
)
from gpumem_tui.tui.kit.glyphs import BUCKET_LOOKS, PROCESS_LOOKS, Look
from gpumem_tui.tui.kit.lines import Lines
from gpumem_tui.tui.kit.shares import Share, bar, legend, reason, summed
from gpumem_tui.tui.monitor.entries import charted
from gpumem_tui.tui.monitor.load import busy_colour, load_colour, memory_colour
from gpumem_tui.tui.monitor.state import MonitorState, Parts, ProcessParts, device_key
from gpumem_tui.watch.published import WatchedProcess

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
"""Lines of the watched process, which takes the GPUs' place where there are no GPUs."""


class Layout(Struct, frozen=True):
    """Rows and columns of each part.

    Attributes:
        columns: GPUs side by side.
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
    return Layout(columns=columns, card=card, detail=detail, gpus=rows + detail, history=history, table=left - history)


def _gpu_rows(width: int, height: int, gpus: int) -> tuple[int, int, int]:
    """Columns, lines of a card and rows: cards where all of them fit in their part of the height, else lines."""
    if not gpus:
        return 1, 0, 0
    for columns in (1, 2):
        if width // columns < CARD_WIDTH or columns > gpus:
            continue
        for lines in _CARD_LEGENDS:
            card = _CARD_HEAD + lines
            rows = -(-gpus // columns) * card
            if rows <= height * (0.3 if gpus == 1 else 0.48):
                return columns, card, rows
    most = max(1, min(height - _TABLE_LEAST - _HEADING, height * 6 // 10))
    columns = 1
    while -(-gpus // columns) > most and width // (columns + 1) >= _LINE_WIDTH:
        columns += 1
    return columns, 0, min(most, -(-gpus // columns)) + _HEADING


T = TypeVar("T")


def known(reading: Reading[T], write: Callable[[T], str]) -> str:
    """Return a reading as text, or a dash."""
    return ABSENT if isinstance(reading, Unknown) else write(reading)


def gib(value: Value) -> str:
    """Return GiB without the unit, for columns that say it; two decimals at most."""
    return ABSENT if isinstance(value, Unknown) else f"{value / GIB:.{2 if value < 1000 * GIB else 0}f}"


def short_name(name: str) -> str:
    """Return a GPU's name without what every name has.

    >>> short_name("NVIDIA GeForce RTX 4090")
    'RTX 4090'
    """
    for words in (words for vendor in known_vendors() for words in vendor.product_words):
        name = name.replace(words, "")
    return name


def utilization_span(gpu: GpuReading, width: int = 4) -> Span:
    """Return the utilization, such as "87%", in the colour of its load; what a MIG device states is never 0."""
    return fit_right(known(gpu.telemetry.utilization_percent, lambda value: f"{value}%"), width), busy_colour(gpu)


def power_span(gpu: GpuReading, width: int = 5) -> Span:
    """Return the power that the GPU draws now, in watts."""
    return fit_right(known(gpu.telemetry.power_w, lambda value: f"{value:.0f}W"), width), ""


def temperature_span(state: MonitorState, gpu: GpuReading, width: int = 5) -> Span:
    """Return the temperature in °C, in warning colours while there is an alert about it."""
    hot = state.warns(gpu, AlertKind.HOT)
    return fit_right(
        known(gpu.telemetry.temperature_c, lambda value: f"{value}°C"), width
    ), "bold $warning" if hot else ""


def used_span(state: MonitorState, gpu: GpuReading, width: int) -> Span:
    """Return used of total in GiB, such as "61.20/79.25", in the colour of its load, reversed in an alert about it."""
    memory = gpu.visible_memory
    if isinstance(memory, Unknown):
        return fit_right(ABSENT, width), ""
    decimals = 2 if width >= 11 else 1
    text = f"{memory.used_bytes / GIB:.{decimals}f}/{memory.total_bytes / GIB:.{decimals}f}"
    if state.warns(gpu, AlertKind.NEAR_FULL):
        return fit_right(text, width), "bold reverse $error"
    return fit_right(text, width), f"bold {memory_colour(gpu)}"


def state_span(gpu: GpuReading) -> Span | None:
    """Return the state of a device if it does not answer: "stale 4 s", "lost"."""
    if gpu.state is DeviceState.STALE:
        return f"stale {gpu.age_s:.0f} s", "bold $warning"
    if gpu.state is DeviceState.LOST:
        return "lost", "bold $error"
    return None


def shares(gpu: GpuReading, parts: Parts) -> tuple[Share, ...]:
    """Return the stretches from left to right, which sum to the device as its ledger does; none where that is unknown.

    A divided GPU has one for each MIG instance, as each fills up on its own; the whole of it few users may read.
    """
    if any(isinstance(each.ledger, Ledger) for each in gpu.instances):
        return tuple(_instance_shares(gpu))
    return tuple(_shares(gpu, gpu.ledger, parts)) if isinstance(gpu.ledger, Ledger) else ()


def _shares(gpu: GpuReading, ledger: Ledger[GpuProcess], parts: Parts) -> Iterator[Share]:
    """Yield them; processes that no probe divides differ by pattern, and have the colour of the GPU's load."""
    turn, device, load = 0, device_key(gpu), load_colour(gpu)
    for row in ledger.rows:
        if row.kind is Bucket.PROCESS and row.process is not None:
            divided = parts.get((device, row.process.pid))
            if divided is not None and isinstance(row.size_bytes, int) and divided.reserved_bytes <= row.size_bytes:
                yield from divided_share(row.process, row.size_bytes, divided)
            else:
                name = row.process.host.name if not isinstance(row.process.host, Unknown) else "?"
                pattern, colour = PROCESS_LOOKS[turn % len(PROCESS_LOOKS)]
                turn += 1
                look = pattern, load or colour
                yield Share(f"{row.process.pid} {name}", name, row.size_bytes, look, reason(row.size_bytes, row.note))
        else:
            bucket, said = row.kind, reason(row.size_bytes, row.note)
            yield Share(bucket.title, bucket.short_title, row.size_bytes, _bucket_look(gpu, bucket), said)


def _bucket_look(gpu: GpuReading, bucket: Bucket) -> Look:
    """Return what a stretch is drawn with; a free GPU has a mark of its own."""
    pattern, colour = BUCKET_LOOKS[bucket]
    return pattern, load_colour(gpu) or colour if bucket is Bucket.FREE and is_free(gpu) else colour


def _instance_shares(gpu: GpuReading) -> Iterator[Share]:
    ledgers = [each.ledger for each in gpu.instances if isinstance(each.ledger, Ledger)]
    reserved = summed(ledger.size_bytes(Bucket.DRIVER_RESERVED) for ledger in ledgers)
    yield Share("driver reserved", "driver", reserved, BUCKET_LOOKS[Bucket.DRIVER_RESERVED], reason(reserved, ""))
    for turn, each in enumerate(gpu.instances):
        yield _instance_share(each, PROCESS_LOOKS[turn % len(PROCESS_LOOKS)])
    if not isinstance(gpu.memory, Unknown) and len(ledgers) == len(gpu.instances):
        outside_bytes = gpu.memory.total_bytes - sum(ledger.total_bytes for ledger in ledgers)
        if outside_bytes > 0:
            yield Share("in no instance", "in no instance", outside_bytes, BUCKET_LOOKS[Bucket.OTHER_PROCESSES])
    free = summed(ledger.size_bytes(Bucket.FREE) for ledger in ledgers)
    yield Share("free", "free", free, BUCKET_LOOKS[Bucket.FREE])


def _instance_share(instance: Instance, look: Look) -> Share:
    """Return what is in use of an instance."""
    name, ledger = f"MIG {instance.index}", instance.ledger
    if isinstance(ledger, Unknown):
        return Share(name, name, ledger, look, ledger.reason)
    sizes = {kind: ledger.size_bytes(kind) for kind in (Bucket.DRIVER_RESERVED, Bucket.FREE)}
    used_bytes = ledger.total_bytes - sum(size for size in sizes.values() if isinstance(size, int))
    unlisted = [f"{format_bytes(row.size_bytes)} unaccounted: {row.note}" for row in ledger.rows
                if row.kind is Bucket.UNACCOUNTED and row.size_bytes]  # fmt: skip
    return Share(f"{name} of {compact_bytes(ledger.total_bytes)}", name, used_bytes, look, "; ".join(unlisted))


def divided_share(process: GpuProcess, used_bytes: int, parts: ProcessParts) -> Iterator[Share]:
    """Yield what a probe reports of a process: its CUDA context, its allocator's cache and its buckets."""
    sizes = {Bucket.CONTEXT: used_bytes - parts.reserved_bytes, Bucket.CACHE: parts.cache_bytes}
    sizes.update({bucket: parts.breakdown[bucket] for bucket in ALLOCATED_BUCKETS})
    for bucket, size_bytes in sizes.items():
        if size_bytes:
            title = bucket.short_title
            yield Share(f"{process.pid} {title}", title, size_bytes, BUCKET_LOOKS[bucket])


_GUTTER = 2
"""Cells between GPUs that stand side by side."""

_ROOMY = 60
"""Cells from which a line has power and temperature."""

_NAMES = ((150, 30), (110, 18), (70, 14), (0, 0))
"""From this many cells upward, a line's GPU name has so many."""


class GpusView(Struct, frozen=True):
    """The panel's rows, and where each GPU is.

    Attributes:
        places: device key by (first row, rows, first column, columns).
    """

    rows: tuple[Row, ...]
    places: dict[tuple[int, int, int, int], str]

    def at(self, x: int, y: int) -> str | None:
        """Return the GPU drawn at a cell."""
        for (top, rows, left, columns), key in self.places.items():
            if top <= y < top + rows and left <= x < left + columns:
                return key
        return None


def gpus_view(state: MonitorState, plan: Layout, width: int) -> GpusView:
    """Return all GPUs in their places; those that do not fit scroll with the focus."""
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
    """Return the GPU in focus, below the list: its legend, under its facts where there is room."""
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
    """Return the GPUs that fit, the one in focus among them, and the index of the first."""
    gpus, focused = state.gpus, state.focused
    here = gpus.index(focused) if focused is not None else 0
    first = max(0, min(here - most // 2, len(gpus) - most))
    return gpus[first : first + most], first


def _list_heading(state: MonitorState, width: int, shown: Sequence[GpuReading], first: int) -> Row:
    """Return the headings above the columns; the rest of the line is a rule."""
    roomy = width >= _ROOMY
    name = span_width(_marker(state, state.gpus[0])) + _name_width(width) + 1
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
    """Return one GPU in one line. The bar is last: what is left of a change is sent to the terminal again."""
    left = _marker(state, gpu)
    name_width = _name_width(width)
    if name_width:
        left.append((f"{fit(short_name(gpu.full_name), name_width)} ", ""))
    if gpu.state is DeviceState.LOST:
        return [*left, (fit(reason_of(gpu), width - span_width(left)), "$error")]
    left += [*_line_readings(state, gpu, roomy=width >= _ROOMY), ("  ", "")]
    room = width - span_width(left)
    stretches = shares(gpu, state.parts)
    return [*left, *(bar(stretches, room) if stretches else [(fit(reason_of(gpu), room), MUTED)])]


def _name_width(width: int) -> int:
    return next((cells for least, cells in _NAMES if width >= least), 0)


def _line_readings(state: MonitorState, gpu: GpuReading, *, roomy: bool) -> Row:
    used = used_span(state, gpu, 14 if roomy else 10)
    stale = state_span(gpu)
    if stale is not None:
        return [used, (fit_right(stale[0], 18 if roomy else 6), stale[1])]
    if not roomy:
        return [used, utilization_span(gpu, 6)]
    return [used, utilization_span(gpu, 6), power_span(gpu, 6), temperature_span(state, gpu, 6)]


def _marker(state: MonitorState, gpu: GpuReading) -> Row:
    digits = len(str(max(other.index for other in state.gpus)))
    if len(state.gpus) == 1:
        return [(f"{gpu.index} ", "bold")]
    if gpu is state.focused:
        return [(f"▸{gpu.index:>{digits}} ", "bold $primary")]
    return [(f" {gpu.index:>{digits}} ", f"bold {load_colour(gpu)}" if is_free(gpu) else load_colour(gpu) or MUTED)]


def _facts(state: MonitorState, gpu: GpuReading, width: int) -> Row:
    """Name on the left; on the right as many readings as there is room for, the most telling first."""
    left: Row = _marker(state, gpu)
    stale = state_span(gpu)
    readings = [_used(state, gpu)] if gpu.state is not DeviceState.LOST else []
    if stale is not None:
        readings.insert(0, [stale])
    if gpu.state is not DeviceState.LOST:
        readings += _readings(state, gpu)
    room = width - span_width(left) - min(len(gpu.full_name), 12)
    right: Row = []
    for reading in readings:
        if span_width(right) + span_width(reading) + 2 > room:
            break
        right += [("  ", ""), *reading] if right else reading
    room = width - span_width(left) - span_width(right)
    return ruled([*left, (fit(gpu.full_name, min(cell_len(gpu.full_name), room)), "bold")], right, width)


def _used(state: MonitorState, gpu: GpuReading) -> Row:
    memory = gpu.visible_memory
    if isinstance(memory, Unknown):
        return [(ABSENT, "bold")]
    return [used_span(state, gpu, 12), (f" GiB {memory.shown_percent:>3}%", "")]


def _readings(state: MonitorState, gpu: GpuReading) -> list[Row]:
    """Each of a fixed width."""
    now = gpu.telemetry
    limit = known(now.power_limit_w, lambda value: f"/{value:.0f}W")
    power = [(fit_right(known(now.power_w, lambda value: f"{value:.0f}"), 4), ""), (f"{limit:<5}", "")]
    found: list[Row] = [
        [("util ", MUTED), utilization_span(gpu)],
        power if not isinstance(now.power_limit_w, Unknown) else [power_span(gpu, 6)],
        [temperature_span(state, gpu)],
    ]
    if isinstance(now.throttle, tuple) and now.throttle:
        found.append([(f"⚠ {', '.join(now.throttle)}", "bold $warning")])
    if gpu.mig:
        found.append([("MIG", "bold")])
    found.append([("SM ", MUTED), (fit_right(known(now.sm_clock_mhz, lambda mhz: f"{mhz}"), 4), ""), (" MHz", MUTED)])
    found.append([("mem ", MUTED), (fit_right(known(now.memory_clock_mhz, lambda m: f"{m}"), 5), ""), (" MHz", MUTED)])
    if isinstance(now.fan_percent, int):
        found.append([("fan ", MUTED), (f"{now.fan_percent:>3}%", "")])
    for link, received, sent in (
        ("PCIe", now.pcie_rx_bytes_per_s, now.pcie_tx_bytes_per_s),
        ("NVLink", now.nvlink_rx_bytes_per_s, now.nvlink_tx_bytes_per_s),
    ):
        if isinstance(received, int) and isinstance(sent, int):
            rates = f"{'↓' + format_bytes(received):>11}{'↑' + format_bytes(sent):>11}/s"
            found.append([(link, MUTED), (rates, "")])
    if isinstance(now.ecc_uncorrected, int) and now.ecc_uncorrected:
        found.append([(f"ECC {now.ecc_uncorrected} uncorrected", "bold $error")])
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
    """Facts, bar and legend in `lines` rows. For a process on several devices the first is shown."""
    title = watched.process.title
    if not watched.own:
        return [ruled([(title, "bold")], [], width), [("no step has finished yet", MUTED)]]
    sample = watched.own[0].sample
    facts: Row = [
        ("step ", MUTED), (f"{sample.record.step:,}", "bold"), (f"  {seconds(sample.step_s)}", ""),
        (f"  {age_text(watched.process.age_s, watched.process.rarer)}", MUTED),
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
