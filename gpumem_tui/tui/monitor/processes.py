"""The process table: in which columns the processes are drawn; a click chooses or sorts, the wheel moves the cursor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace
from textual.events import Click, MouseScrollDown, MouseScrollUp
from textual.message import Message

from gpumem_tui.memory import Unknown, Value, format_bytes
from gpumem_tui.monitor.snapshot import HostProcess
from gpumem_tui.tui.kit.figures import ABSENT, MUTED, Row, Span, age, compact_bytes, fit, fit_right, joined, seconds
from gpumem_tui.tui.kit.lines import Lines
from gpumem_tui.tui.monitor.entries import Entry, count, entries, has_ended_well
from gpumem_tui.tui.monitor.gpus import gib, known
from gpumem_tui.tui.monitor.state import MonitorState, ProcessKey, SortBy

if TYPE_CHECKING:
    from gpumem_tui.watch.records import ProbeSample


CURSOR = "$block-cursor-foreground on $block-cursor-background"


class TableView(Struct, frozen=True):
    """The rows of the table of processes, and what is on each.

    Attributes:
        keys: the process on each row, None for a row that is none.
        headings: columns [from, to) of the heading by what a click on it sorts by.
        order: all listed processes, for the cursor to walk along.
    """

    rows: tuple[Row, ...]
    keys: tuple[ProcessKey | None, ...]
    headings: tuple[tuple[int, int, SortBy], ...]
    order: tuple[ProcessKey, ...]


def table_view(state: MonitorState, width: int, height: int) -> TableView:
    """Return the table in `width` × `height` cells; it scrolls with the cursor."""
    listed = entries(state)
    order = tuple(entry.key for entry in listed)
    columns = _columns(
        width,
        containers=any(entry.host is not None and entry.host.container for entry in listed),
        probed=any(entry.watched is not None for entry in listed),
        longest_place=max((len(_gpu_cell(entry, 0.0)) for entry in listed), default=0),
    )
    heading, places = _heading(columns, state)
    tail = list(_tail(state, len(listed)))
    room = max(0, height - 1)
    crowded = len(listed) + len(tail) > room
    tail = tail[: max(0, room - 1)] if crowded else tail
    body = max(0, room - len(tail) - (1 if crowded else 0))
    first = _first(order, state.cursor, body)
    shown = listed[first : first + body]
    rows: list[Row] = [heading]
    for entry in shown:
        rows.append(_row(entry, columns, state.now_s, chosen=entry.key == state.cursor))
    rows += [[(fit(text, width), style)] for text, style in tail]
    if crowded:
        rows.append([(fit(_position(first, len(shown), len(listed)), width), MUTED)])
    keys = (None, *(entry.key for entry in shown), *(None for _ in range(len(rows) - 1 - len(shown))))
    return TableView(tuple(rows[:height]), keys[:height], places, order)


# How it is drawn


Item = TypeVar("Item")


class TableColumn(Struct, Generic[Item], frozen=True):
    """A column `width` cells wide, there from `needs` cells of table upward. `lead`: space before what is left.

    `beside_probes`: the cells it needs where any process has a probe; None for as many as always.
    """

    title: str
    width: int
    write: Callable[[Item, float], str]
    sort: SortBy | None = None
    needs: int = 0
    right: bool = True
    lead: int = 1
    beside_probes: int | None = None
    of_probes: bool = False

    def is_shown(self, width: int, *, probed: bool) -> bool:
        """Return whether a table of that width has it."""
        if not probed:
            return not self.of_probes and self.needs <= width
        return (self.needs if self.beside_probes is None else self.beside_probes) <= width

    def cell(self, text: str) -> str:
        """Return a text as it is in this column."""
        return fit_right(text, self.width) if self.right else fit(" " * self.lead + text, self.width)


_Column = TableColumn[Entry]


def _host_cell(write: Callable[[HostProcess, float], str]) -> Callable[[Entry, float], str]:
    def cell(entry: Entry, now_s: float) -> str:
        return ABSENT if entry.host is None else write(entry.host, now_s)

    return cell


def _probe_cell(write: Callable[[ProbeSample], str]) -> Callable[[Entry, float], str]:
    """Blank where we know nothing from inside: that is no reading that failed."""

    def cell(entry: Entry, _now_s: float) -> str:
        return "" if entry.sample is None else write(entry.sample)

    return cell


def _count_text(value: Value) -> str:
    return ABSENT if isinstance(value, Unknown) else f"{value:,}"


def _gpu_cell(entry: Entry, _now_s: float) -> str:
    if entry.gpu is None:
        return ABSENT if entry.has_ended else entry.place
    for instance in entry.gpu.instances:
        if instance.uuid == entry.process.instance:
            return f"{entry.gpu.index}:{instance.index}"
    return str(entry.gpu.index)


def _command_cell(entry: Entry, _now_s: float) -> str:
    host, watched = entry.process.host, entry.watched
    rank = None if watched is None else watched.process.process.rank
    lead = entry.branch if rank is None else f"{entry.branch}rank {rank}: "
    return f"{lead}{host.reason if isinstance(host, Unknown) else host.command or host.name}"


_COLUMNS = (
    _Column("GPU", 4, _gpu_cell, SortBy.GPU),
    _Column("PID", 8, lambda entry, _: str(entry.process.pid), SortBy.PID),
    _Column("USER", 10, _host_cell(lambda host, _: host.user), SortBy.USER, needs=60, right=False),
    _Column(
        "TYPE", 5, lambda entry, _: entry.process.kind.value, None, needs=92, right=False, beside_probes=140
    ),
    _Column("GPU MEM", 10, lambda entry, _: gib(entry.process.used_bytes), SortBy.MEMORY),
    _Column(
        "PEAK", 8, _probe_cell(lambda sample: compact_bytes(sample.peak_allocated_bytes)), needs=48, of_probes=True
    ),
    _Column("STEP", 9, _probe_cell(lambda sample: f"{sample.record.step:,}"), needs=58, of_probes=True),
    _Column(
        "STEP TIME", 10, _probe_cell(lambda sample: seconds(sample.step_s)), needs=68, of_probes=True
    ),
    _Column(
        "RETRIES", 9, _probe_cell(lambda sample: _count_text(sample.retries)), needs=100, of_probes=True
    ),
    _Column(
        "SM%", 6, lambda entry, _: known(entry.process.sm_percent, str), SortBy.SM, needs=60, beside_probes=90
    ),
    _Column(
        "CPU%", 7, _host_cell(lambda host, _: known(host.cpu_percent, lambda v: f"{v:.0f}")), SortBy.CPU,
        needs=60, beside_probes=110,
    ),
    _Column(
        "HOST MEM", 10, _host_cell(lambda host, _: gib(host.resident_bytes)), SortBy.HOST_MEMORY,
        needs=70, beside_probes=115,
    ),
    _Column(
        "AGE", 8, _host_cell(lambda host, now_s: age(now_s - host.start_time_s)), SortBy.AGE, needs=60,
        beside_probes=125,
    ),
)  # fmt: skip
_NAMING = 2
"""The first columns say which process it is."""
_CONTAINER = _Column("CONTAINER", 18, _host_cell(lambda host, _: host.container), needs=140, right=False, lead=2)


def _columns(width: int, *, containers: bool, probed: bool, longest_place: int) -> tuple[_Column, ...]:
    gpu, *others = (column for column in _COLUMNS if column.is_shown(width, probed=probed))
    columns = (replace(gpu, width=max(gpu.width, longest_place + 1)), *others)  # one cell is the cursor's
    if containers and width >= _CONTAINER.needs:
        columns += (_CONTAINER,)
    left = max(8, width - sum(column.width for column in columns))
    return (*columns, _Column("COMMAND", left, _command_cell, SortBy.COMMAND, right=False, lead=2))


def _heading(columns: Iterable[_Column], state: MonitorState) -> tuple[Row, tuple[tuple[int, int, SortBy], ...]]:
    row: Row = []
    places, x = [], 0
    for column in columns:
        title, chosen = column.title, column.sort is state.sort
        if chosen:
            mark = "▾" if state.sort.descends != state.reverse else "▴"
            title = f"{mark}{title}" if column.right else f"{title}{mark}"
        row.append((column.cell(title), "bold $primary" if chosen else f"bold {MUTED}"))
        if column.sort is not None:
            places.append((x, x + column.width, column.sort))
        x += column.width
    return row, tuple(places)


def _row(entry: Entry, columns: Iterable[_Column], now_s: float, *, chosen: bool) -> Row:
    """Return the line of a process; neighbours of one style are one span: what is written to the terminal is short."""
    columns = tuple(columns)
    if entry.has_ended:
        columns = (*columns[:_NAMING], _Column("", sum(c.width for c in columns[_NAMING:]), _ended_cell, right=False))
    row = joined(
        [(column.cell(column.write(entry, now_s)), CURSOR if chosen else _style(column, entry)) for column in columns]
    )
    if chosen and row:
        row[0] = (f"▸{row[0][0][1:]}", row[0][1])
    return row


def _ended_cell(entry: Entry, now_s: float) -> str:
    """Return how a process ended, in the place of all its readings."""
    watched = entry.watched
    if watched is None or watched.ended_s is None:
        return ""
    asked_bytes = None if watched.case is None else watched.case.post_mortem.requested_bytes
    asked = "" if asked_bytes is None else f", {format_bytes(asked_bytes)} asked for"
    mark = "✓" if has_ended_well(entry) else "✗"
    step = f", step {watched.process.step:,}" if watched.process.step else ""
    process, ago = watched.process, age(now_s - watched.ended_s)
    told = f"{process.state_words}{process.of_owner} · {ago} ago{asked}{step}"
    return f" {mark} {told}: {' '.join(process.process.command)}"


def _style(column: _Column, entry: Entry) -> str:
    if entry.has_ended:
        return MUTED if has_ended_well(entry) else "$error"
    if column.title == "STEP" and entry.watched is not None and entry.watched.process.problem:
        return "bold $warning"
    if column.title == "RETRIES" and entry.sample is not None and entry.sample.record.retries > 0:
        return "bold $warning"
    if column.sort is SortBy.MEMORY:
        return "bold"
    if column.title == "COMMAND" and entry.host is None:
        return MUTED
    return ""


def _tail(state: MonitorState, listed: int) -> Iterator[Span]:
    """Yield the line below the processes."""
    unknown = [gpu for gpu in state.gpus if isinstance(gpu.processes, Unknown) and not gpu.instances]
    for gpu in unknown:
        if isinstance(gpu.processes, Unknown):
            yield f"   GPU {gpu.index}: processes unknown: {gpu.processes.reason}", "$warning"
    refused = state.published.refused
    if refused:
        more = f" (+{len(refused) - 1} more)" if len(refused) > 1 else ""
        yield f"   {refused[0].words}{more}", "$warning"
    if state.filter or state.only_focus or state.mine:
        which = [f"matching “{state.filter}”"] if state.filter else []
        which += [f"on GPU {state.focused.index}"] if state.only_focus and state.focused is not None else []
        which += ["of yours"] if state.mine else []
        said = {"esc": bool(state.filter), "f": state.only_focus, "m": state.mine}
        keys = [key for key, is_on in said.items() if is_on]
        yield f"   {listed} of {count(state)} processes: {' '.join(which)} · {' and '.join(keys)} for all", "$primary"
    elif not listed and not unknown and state.gpus:
        yield "   no process on any GPU · 2 searches for a batch · `gpumem-tui run -- CMD` trains", MUTED


def _first(order: Sequence[ProcessKey], cursor: ProcessKey | None, body: int) -> int:
    """Return the first process shown, so that the cursor is in the middle where it can."""
    if cursor not in order or body <= 0:
        return 0
    return max(0, min(order.index(cursor) - body // 2, len(order) - body))


def _position(first: int, shown: int, count: int) -> str:
    return f"   {first + 1}–{first + shown} of {count} processes" if shown else f"   {count} processes"


def describe(entry: Entry) -> str:
    """Return the process in one line, for a question about it."""
    host = entry.host
    if host is None:
        return f"pid {entry.process.pid}"
    where = ""
    if entry.gpu is not None:
        where = f", {format_bytes(entry.process.used_bytes)} on GPU {entry.gpu.index}"
    return f"pid {host.pid} of {host.user}{where}: {host.command or host.name}"


_WHEEL_STEP = 3


class ProcessTable(Lines, can_focus=True):
    """The table of processes, one line for each process and device."""

    class Chosen(Message):
        """The user clicked on a process; `opened`: twice."""

        def __init__(self, key: ProcessKey, *, opened: bool) -> None:
            super().__init__()
            self.key, self.opened = key, opened

    class SortWanted(Message):
        """The user clicked on a heading."""

        def __init__(self, order: SortBy) -> None:
            super().__init__()
            self.order = order

    class Moved(Message):
        """The mouse wheel was turned by `step` rows."""

        def __init__(self, step: int) -> None:
            super().__init__()
            self.step = step

    view = TableView((), (), (), ())

    def show(self, state: MonitorState, width: int, height: int) -> None:
        """Render a state."""
        self.view = table_view(state, width, height)
        self.show_rows(self.view.rows)

    def on_click(self, event: Click) -> None:
        """Choose or sort."""
        offset = event.get_content_offset(self)
        if offset is None:
            return
        if offset.y == 0:
            for first, last, order in self.view.headings:
                if first <= offset.x < last:
                    self.post_message(self.SortWanted(order))
        elif offset.y < len(self.view.keys):
            key = self.view.keys[offset.y]
            if key is not None:
                self.post_message(self.Chosen(key, opened=event.chain > 1))

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        """Move the cursor down the list."""
        event.stop()
        self.post_message(self.Moved(_WHEEL_STEP))

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        """Move the cursor up the list."""
        event.stop()
        self.post_message(self.Moved(-_WHEEL_STEP))
