"""The contents of the screen of hosts: one immutable state, and the processes that it lists, in their order."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import overload

from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.monitor.alerts import Severity
from gpumem_tui.monitor.devices import is_free
from gpumem_tui.monitor.snapshot import DeviceState, GpuReading
from gpumem_tui.monitor.vendors import vendor
from gpumem_tui.remote.status import (
    HostPhase,
    HostStatus,
    JobRanks,
    MemorySum,
    RemoteProcess,
    job_of,
    jobs,
    mean_utilization,
    user_on,
)
from gpumem_tui.tui.hosts.order import Filter, HostOrder, HostsSort, ordered
from gpumem_tui.tui.kit.figures import ABSENT, MUTED, LazyRows, ListRow, Row, Span, age, fit, header_line
from gpumem_tui.tui.monitor.gpus import known
from gpumem_tui.tui.monitor.load import busy_load, heavier, memory_load
from gpumem_tui.tui.monitor.processes import TableColumn
from gpumem_tui.tui.monitor.state import TableState


class HostsState(TableState, frozen=True, dict=True):
    """Everything the screen shows.

    Attributes:
        now_s: `time.monotonic`, for ages.
        opened: the hosts whose GPUs are listed below them.
        order, order_reverse: how the hosts are sorted; `sort` and `reverse` are of the processes.
        only: list only this host's processes; empty for all.
    """

    statuses: tuple[HostStatus, ...] = ()
    now_s: float = 0.0
    opened: frozenset[str] = frozenset()
    sort: HostsSort = HostsSort.MEMORY
    order: HostOrder = HostOrder.NAMED
    order_reverse: bool = False
    only: str = ""

    @cached_property
    def wanted(self) -> Filter:
        """Return the filter, taken apart."""
        return Filter.of(self.filter)

    @cached_property
    def listed(self) -> tuple[HostStatus, ...]:
        """Return the hosts that match the filter, in their order."""
        found = [each for each in self.statuses if self.wanted.has_host(each)] if self.filter else self.statuses
        return ordered(found, self.order, reverse=self.order_reverse)

    @cached_property
    def longest_name(self) -> int:
        """Return how long the longest name of a host is."""
        return max((len(status.host.name) for status in self.statuses), default=4)


def listed_processes(state: HostsState) -> list[RemoteProcess]:
    """Return the processes that match the filter, in their order; unknown values come after known ones."""
    listed_hosts = state.listed if state.filter else state.statuses
    shown = (status for status in listed_hosts if not state.only or status.host.name == state.only)
    listed = (
        [each for status in shown for each in status.processes if each.user == user_on(status.host)]
        if state.mine
        else [each for status in shown for each in status.processes]
    )
    listed = [each for each in listed if state.wanted.has_process(each)] if state.filter else listed
    places = {status.host.name: place for place, status in enumerate(state.statuses)}

    def place(each: RemoteProcess) -> int:
        return places[each.host_name]

    value = _VALUES.get(state.sort, place)
    pairs = [(value(each), each) for each in listed]
    known = [(value, each) for value, each in pairs if value is not None]
    known.sort(key=lambda pair: pair[0], reverse=state.sort.descends != state.reverse)
    unknown = [each for value, each in pairs if value is None] if len(known) < len(pairs) else []
    return [each for _, each in known] + unknown


def _job_and_rank(each: RemoteProcess) -> tuple[tuple[str, str, int], int] | None:
    rank = each.count("rank")
    return None if rank is None else (job_of(each), rank)


_VALUES: Mapping[HostsSort, Callable[[RemoteProcess], float | str | tuple[object, ...] | None]] = {
    HostsSort.MEMORY: lambda each: each.used_bytes,
    HostsSort.SM: lambda each: each.sm_percent,
    HostsSort.USER: lambda each: each.user,
    HostsSort.RANK: _job_and_rank,
}
"""Sort key of each column, but for the host's place; None where it is unknown."""


_FREE = "bold $load-light"
"""The colour of free GPUs, and of hosts that have any."""
_STALE_S = 5.0
"""A live host whose last reading is older than this shows its age."""
_BAR = 16
_BAR_FROM = 110
"""Cells of width from which a host's memory is drawn too."""
_LONGEST_NAME = 28
_CHOSEN_LINES = 2
_FIGURES = 52
"""Cells of the columns that are there, without the host's name."""
_COUNTED_FROM = 76
"""Cells of width from which a host's free GPUs are listed next to their number."""
_MORE, _MORE_FROM = 20, 80
"""Cells of each further column, and how many have to be left for them and the state."""


def _held(memory: MemorySum) -> str:
    """Return used of total, in GiB."""
    known = memory.known
    if not known.total_bytes:
        return ABSENT
    return f"{'' if memory.is_whole else '≥'}{known.used_bytes / GIB:.1f}/{known.total_bytes / GIB:.1f}"


def _free(memory: MemorySum) -> str:
    if not memory.known.total_bytes:
        return ABSENT
    return f"{'' if memory.is_whole else '≥'}{memory.known.free_bytes / GIB:.1f}"


def hosts_header(state: HostsState, width: int, right: Row) -> Row:
    """Return how many hosts there are, how many answer, and the sum of what they hold as far as known."""
    live = [status for status in state.statuses if status.phase is HostPhase.LIVE]
    gpus = sum(len(status.gpus) for status in live)
    memory = MemorySum.together(status.memory for status in live)
    subject = (_count(len(state.statuses), "host"), "bold")
    away = sum(status.phase is HostPhase.AWAY for status in state.statuses)
    facts: list[Span] = [(f"{len(state.listed)} shown", "bold")] if state.filter else []
    facts += [("mine only", "bold")] if state.mine else []
    late = sum(bool(status.late(state.now_s)) for status in live)
    facts += [(f"{len(live) - late} live", MUTED)]
    facts += [(f"{late} not answering", "bold $warning")] if late else []
    facts += [(f"{away} away", "bold $warning")] if away else []
    facts += [(_count(gpus, "GPU"), MUTED)] if gpus else []
    facts += [(f"{_held(memory)} GiB used, {_free(memory)} free", MUTED)] if gpus else []
    return header_line(subject, facts, right, width)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _name_width(state: HostsState, width: int) -> int:
    return max(6, min(state.longest_name, _LONGEST_NAME if width >= _BAR_FROM else 18))


def _more_columns(state: HostsState, width: int) -> list[tuple[HostOrder, int]]:
    """Return the columns before the state and their widths: those for which there is room, and what is sorted by."""
    room = width - _name_width(state, width) - _FIGURES - (_BAR + 1 if width >= _BAR_FROM else 0)
    wanted = [HostOrder.MODEL, HostOrder.USER] if room >= _MORE_FROM else [state.order]
    return [(each, max(5, min(_MORE, room // 2))) for each in wanted if each in (HostOrder.MODEL, HostOrder.USER)]


def hosts_heading(state: HostsState, width: int) -> Row:
    """Return the column headings of the hosts."""
    name = _name_width(state, width)
    bar = f" {'':<{_BAR}}" if width >= _BAR_FROM else ""
    mark = "▾" if state.order.descends != state.order_reverse else "▴"
    titles = {each: f"{mark}{each.value}" if each is state.order else each.value for each in HostOrder}
    titles[HostOrder.NAMED] = "HOST" if state.order is not HostOrder.NAMED else f"{'▾' * state.order_reverse}HOST"
    free, use = titles[HostOrder.FREE], titles[HostOrder.USE]
    gpus, free = (f"{f'{free} GPUS':>10}", "FREE GiB") if width >= _COUNTED_FROM else ("GPUS", free)
    more = "".join(f"{fit(titles[each], cells)} " for each, cells in _more_columns(state, width))
    text = f"  {fit(titles[HostOrder.NAMED], name)} {gpus}{bar} {'USED/TOTAL GiB':>15} {free:>8} {use:>5}"
    return [(fit(f"{text} {'AGE':>5}  {more}{titles[HostOrder.ALERT]}", width), f"bold {MUTED}")]


def hosts_rows(state: HostsState) -> Callable[[int, str], Sequence[ListRow]]:
    """Return a line a host, and below those that are opened a line a GPU. The key is the host's name."""
    listed: list[tuple[HostStatus, GpuReading | None]] = []
    for status in state.listed:
        listed.append((status, None))
        listed += [(status, gpu) for gpu in status.gpus] if status.host.name in state.opened else []
    keys = [status.host.name if gpu is None else "" for status, gpu in listed]

    def rows(width: int, _selected: str) -> Sequence[ListRow]:
        if not listed and state.filter:
            said = state.wanted.problem or f"no host matches “{state.filter}” · esc for all"
            return [ListRow(((fit(f"  {said}", width), MUTED),))]

        def make(place: int) -> ListRow:
            status, gpu = listed[place]
            if gpu is None:
                return _host_row(state, status, width, is_open=status.host.name in state.opened)
            return _gpu_row(state, gpu, width, is_live=status.phase is HostPhase.LIVE)

        return LazyRows(keys, make)

    return rows


def _host_row(state: HostsState, status: HostStatus, width: int, *, is_open: bool) -> ListRow:
    is_live = status.phase is HostPhase.LIVE
    style = "" if is_live else MUTED
    name = fit(status.host.name, _name_width(state, width))
    mark = "▾" if is_open else "▸" if status.gpus else " "
    if status.report is None:  # no figures: their place is for why
        text, said = host_state(state, status)
        room = max(0, width - len(name) - 3)
        return ListRow(((f"{mark} ", MUTED), (name, MUTED), (f" {fit(text, room)}", said)), status.host.name)
    numbers = _numbers(status.memory, status.busy_percent, width, is_live=is_live)
    seen_s = status.age_s(state.now_s)
    seen = ABSENT if seen_s is None else age(seen_s) if not is_live or seen_s >= _STALE_S else ""
    spans: list[Span] = [(f"{mark} ", MUTED), (name, "bold" if is_live else MUTED)]
    count = len(status.gpus)
    if width < _COUNTED_FROM:
        spans += [(f" {count:>4}", style)]
    else:
        counted = f"{status.free_gpus} of {count}" if count else ABSENT
        spans += [(f" {counted:>10}", _FREE if is_live and status.free_gpus else style)]
    spans += numbers
    spans += [(f" {seen:>5}  ", "bold $warning" if seen and seen_s is not None else MUTED)]
    told = {HostOrder.MODEL: status.models, HostOrder.USER: " ".join(status.users)} if status.gpus else {}
    spans += [(f"{fit(told.get(each, ''), cells)} ", style) for each, cells in _more_columns(state, width)]
    room = width - sum(len(text) for text, _ in spans)
    text, said = host_state(state, status)
    return ListRow((*spans, (fit(text, max(0, room)), said)), status.host.name)


def _numbers(memory: MemorySum, busy_percent: float | None, width: int, *, is_live: bool) -> list[Span]:
    """Memory as a bar and as figures, and how busy the GPUs are on average, each in the colour of its load."""
    of_memory = memory_load(memory.known) if is_live and memory.known.total_bytes else ""
    of_work = busy_load(busy_percent) if is_live and busy_percent is not None else ""
    spans: list[Span] = []
    if width >= _BAR_FROM:
        filled = min(_BAR, max(0, round(_BAR * memory.known.used_percent / 100)))
        spans += [(" ", ""), ("█" * filled, heavier(of_memory, of_work) or MUTED), ("░" * (_BAR - filled), MUTED)]
    util = ABSENT if busy_percent is None else f"{busy_percent:.0f}%"
    spans += [(f" {_held(memory):>15}", f"bold {of_memory}" if of_memory else MUTED)]
    return [*spans, (f" {_free(memory):>8}", "" if is_live else MUTED), (f" {util:>5}", of_work or MUTED)]


def host_state(state: HostsState, status: HostStatus) -> Span:
    """Return what is the matter with a host, in one line and its style."""
    if status.phase is HostPhase.AWAY:
        left_s = 0.0 if status.retry_s is None else max(0.0, status.retry_s - state.now_s)
        return f"{status.problem} · again in {age(left_s)}", "$error"
    if status.phase is HostPhase.CONNECTING:
        before = f", after: {status.problem}" if status.problem else ""
        waited_s = 0.0 if status.began_s is None else state.now_s - status.began_s
        return f"connecting{f' for {age(waited_s)}' if waited_s >= _STALE_S else ''}{before}", MUTED
    if late := status.late(state.now_s):
        return late, "bold $warning"
    alert = status.worst_alert
    if alert is not None:
        more = 0 if status.report is None else len(status.report.alerts) - 1
        mark, style = ("▲", "bold $error") if alert.severity is Severity.CRITICAL else ("△", "bold $warning")
        return f"{mark} {alert.message}{f' (+{more})' if more else ''}", style
    return status.note or "ok", MUTED


def _gpu_row(state: HostsState, gpu: GpuReading, width: int, *, is_live: bool) -> ListRow:
    name = fit(f"GPU {gpu.index}", _name_width(state, width) + 3)
    memory, busy = MemorySum.of((gpu,)), mean_utilization((gpu,))
    spans: list[Span] = [("  ", ""), (f"  {name}", MUTED)]
    if width >= _COUNTED_FROM:
        spans += [(f"{'free' if is_live and is_free(gpu) else '':>6}", _FREE)]
    spans += _numbers(memory, busy, width, is_live=is_live)
    heat = "" if isinstance(gpu.telemetry.temperature_c, Unknown) else f"{gpu.telemetry.temperature_c} °C"
    power = "" if isinstance(gpu.telemetry.power_w, Unknown) else f"{gpu.telemetry.power_w:.0f} W"
    name_of = gpu.name.removeprefix(f"{gpu.vendor or vendor().brand} ")
    facts = [heat, power, name_of] if gpu.state is DeviceState.OK else [f"{gpu.state.value}: {gpu.state_reason}"]
    room = max(0, width - sum(len(text) for text, _ in spans))
    said = fit("        " + "  ".join(fact for fact in facts if fact), room)
    return ListRow((*spans, (said, MUTED if gpu.state is DeviceState.OK else "$warning")))


# Processes


_Column = TableColumn[RemoteProcess]


def _rank(each: RemoteProcess, _now_s: float) -> str:
    rank, size = each.count("rank"), each.count("world_size")
    return "" if rank is None else f"{rank}/{size}" if size is not None else str(rank)


def _bytes(size_bytes: object) -> str:
    return f"{size_bytes / GIB:.2f}" if isinstance(size_bytes, int) else ABSENT


def _of_probe(each: RemoteProcess, key: str, write: Callable[[int], str]) -> str:
    value = each.count(key)
    return write(value) if value is not None else "" if not each.probe else ABSENT


def _columns(state: HostsState, width: int, *, probed: bool) -> list[_Column]:
    name = _name_width(state, width) + 1
    columns = [
        _Column("HOST", name, lambda each, _: each.host_name, right=False),
        _Column("GPU", 5, lambda each, _: each.place),
        _Column("PID", 8, lambda each, _: str(each.process.pid)),
        _Column("USER", 10, lambda each, _: ABSENT if each.known is None else each.known.user, right=False, needs=72),
        _Column("GPU MEM", 9, lambda each, _: _bytes(each.process.used_bytes)),
        _Column("RANK", 8, _rank, of_probes=True),
        _Column("STEP", 9, lambda each, _: _of_probe(each, "step", lambda n: f"{n:,}"), of_probes=True, needs=76),
        _Column("PEAK", 8, lambda each, _: _of_probe(each, "peak_allocated_bytes", _bytes), of_probes=True, needs=76),
        _Column("SM%", 6, lambda each, _: known(each.process.sm_percent, str), needs=60, beside_probes=96),
    ]
    columns = [column for column in columns if column.is_shown(width, probed=probed)]
    left = max(8, width - 1 - sum(column.width for column in columns))
    return [*columns, _Column("COMMAND", left, _command, right=False)]


def _command(each: RemoteProcess, _now_s: float) -> str:
    host = each.process.host
    return host.reason if isinstance(host, Unknown) else host.command or host.name


def _job_text(job: JobRanks) -> str:
    """Return a job in one line: how many of its ranks are seen, the slowest, the fullest, the spread between them."""
    hosts = len({each.host_name for each in job.ranks})
    facts = [f"{len(job.ranks)} of {job.world_size} ranks on {_count(hosts, 'host')}"]
    fullest, behind = job.fullest, job.behind
    if job.silence:
        facts.append(job.silence)
    elif behind is not None:
        facts.append(f"rank {behind[0].count('rank')} lags {_count(behind[1], 'step')}")
    if fullest is not None:
        peak = _bytes(fullest.count("peak_allocated_bytes"))
        facts.append(f"fullest rank {fullest.count('rank')}: {peak} GiB, spread {_bytes(job.spread_bytes)}")
    return " · ".join([*facts, *([job.name] if job.name else []), job.command])


def _is_probed(listed: list[RemoteProcess]) -> bool:
    return next(filter(attrgetter("probe"), listed), None) is not None


def processes_heading(state: HostsState, listed: list[RemoteProcess], width: int) -> Row:
    """Return the column headings of the processes; the one that they are sorted by has a mark."""
    mark = "▾" if (state.sort in (HostsSort.MEMORY, HostsSort.SM)) != state.reverse else "▴"
    columns = _columns(state, width, probed=_is_probed(listed))
    marked = state.sort.value
    text = "".join(column.cell(f"{mark if column.title == marked else ''}{column.title}") for column in columns)
    return [(text, f"bold {MUTED}")]


class _Keys(Sequence[str]):
    """The keys of lines, each made when it is asked for; of a job's line none."""

    def __init__(self, lines: Sequence[RemoteProcess | JobRanks]) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return list(map(self._of, self._lines[index]))
        return self._of(self._lines[index])

    def __iter__(self) -> Iterator[str]:
        return map(self._of, self._lines)

    def __contains__(self, key: object) -> bool:
        return self._place(key) is not None

    def index(self, key: str, *_: int) -> int:
        place = self._place(key)
        if place is None:
            raise ValueError(key)
        return place

    def _place(self, key: object) -> int | None:
        pid = str(key).rpartition("\t")[2]
        number = int(pid) if pid else None
        found = (
            place
            for place, each in enumerate(self._lines)
            if isinstance(each, RemoteProcess) and each.process.pid == number and each.key == key
        )
        return next(found, None)

    @staticmethod
    def _of(line: RemoteProcess | JobRanks) -> str:
        return line.key if isinstance(line, RemoteProcess) else ""


def processes_rows(state: HostsState, listed: list[RemoteProcess]) -> Callable[[int, str], Sequence[ListRow]]:
    """Return a line a process, and one over the ranks of each job where they stand together."""
    away = {status.host.name for status in state.statuses if status.phase is not HostPhase.LIVE}
    lines = _with_jobs(listed) if state.sort is HostsSort.RANK else listed
    keys = _Keys(lines)

    def rows(width: int, _selected: str) -> Sequence[ListRow]:
        if not listed:
            return [ListRow(((f"  {_why_none(state)}", MUTED),))]
        columns = _columns(state, width, probed=_is_probed(listed))

        def make(place: int) -> ListRow:
            each = lines[place]
            if isinstance(each, JobRanks):
                return ListRow(((fit(f" {_job_text(each)}", width - 1), "bold $primary"),))
            text = "".join(column.cell(column.write(each, state.now_s)) for column in columns)
            return ListRow(((text, MUTED if each.host_name in away else ""),), each.key)

        return LazyRows(keys, make)

    return rows


def _with_jobs(listed: list[RemoteProcess]) -> list[RemoteProcess | JobRanks]:
    """Each job before the first of its ranks."""
    together = jobs(listed)
    lines: list[RemoteProcess | JobRanks] = []
    for each in listed:
        job = together.pop(job_of(each), None) if each.count("rank") is not None else None
        lines += [each] if job is None else [job, each]
    return lines


def _why_none(state: HostsState) -> str:
    if state.filter:
        if state.wanted.problem:
            return state.wanted.problem
        return f"no process matches “{state.filter}” · esc for all"
    if not any(status.report is not None for status in state.statuses):
        return "no host has answered yet · c connects now"
    yours = "yours, m for everybody's," if state.mine else ""
    where = f"{state.only} · f for all hosts" if state.only else "any host that answers · enter opens its Monitor"
    return f"no process {yours + ' ' if yours else ''}on a GPU of {where}"


def processes_title(state: HostsState, listed: list[RemoteProcess]) -> str:
    """Return what the list of processes is of."""
    which = ["of yours"] if state.mine else []
    which += [f"on {state.only}"] if state.only else []
    which += [f"matching “{state.filter}”"] if state.filter else []
    count = "1 process" if len(listed) == 1 else f"{len(listed)} processes"
    return " ".join([count, *which])


def chosen_rows(state: HostsState, name: str, width: int) -> list[Row]:
    """Return the host under the cursor in full: its state, in as many lines as that takes."""
    status = next((each for each in state.statuses if each.host.name == name), None)
    if status is None:
        return [[]]
    text, style = host_state(state, status)
    lines = textwrap.wrap(text, max(8, width - len(name) - 2))[:_CHOSEN_LINES] or [""]
    blank = " " * len(name)
    return [[(f"{blank if number else name}  ", "bold"), (line, style)] for number, line in enumerate(lines)]
