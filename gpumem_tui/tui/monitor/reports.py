"""Reports on a process over the Monitor: all facts about it, its end, its job's ranks, a look into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from gpumem_tui.memory import Bucket, Unknown, Value, format_bytes
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.snapshot import Memory, ProcessKind, Snapshot
from gpumem_tui.monitor.users import user_totals, users_lines
from gpumem_tui.probe.files import WireError
from gpumem_tui.probe.wire import LookAnswer
from gpumem_tui.tui.kit.dialogs import Report
from gpumem_tui.tui.kit.figures import ABSENT, MUTED, Row, age, compact_bytes, fit, seconds
from gpumem_tui.tui.monitor.entries import Entry
from gpumem_tui.tui.monitor.state import MonitorState, device_key
from gpumem_tui.tui.process.look import look_title, place_page, step_page
from gpumem_tui.tui.process.probed import DRIVER_ONLY, ended_rows, fact, post_mortem_rows, probed_rows
from gpumem_tui.watch.documents import read_document
from gpumem_tui.watch.published import Job, Placed, Rank, WatchedProcess, job_of, total_bytes
from gpumem_tui.watch.records import ProbedProcess

if TYPE_CHECKING:
    from gpumem_tui.watch.records import ProbeSample


T = TypeVar("T")

_KINDS = {ProcessKind.COMPUTE: "compute", ProcessKind.GRAPHICS: "graphics", ProcessKind.BOTH: "compute and graphics"}
_NO_GPU = {"cpu": "host memory: it trains on the CPU", "–": "not known before its first step"}


def details_rows(state: MonitorState, entry: Entry) -> list[Row]:
    """Return a line a fact; an unknown value is shown by its reason."""
    rows = [fact("pid", f"{entry.process.pid}, {_KINDS[entry.process.kind]}"), *_device_rows(state, entry), []]
    if entry.watched is not None:
        rows += [*probed_rows(entry.watched, entry.sample), []]
    else:
        rows += [fact("probe", DRIVER_ONLY), []]
    return [*rows, *_host_rows(entry, state.now_s)]


def _device_rows(state: MonitorState, entry: Entry) -> Iterator[Row]:
    """Yield where a process is and how much of that it holds; with a probe, as which parts."""
    process, gpu = entry.process, entry.gpu
    if gpu is None:
        yield fact("device", _NO_GPU.get(entry.place, f"{entry.place}, which GPU that is cannot be told"))
        return
    yield fact("GPU", f"{gpu.index}  {gpu.full_name}")
    yield fact("", gpu.uuid, MUTED)
    instance = next((each for each in gpu.instances if each.uuid == process.instance), None)
    if process.instance:
        yield fact("MIG instance", process.instance if instance is None else f"{instance.index}  {instance.name}")
    if instance is None:
        yield fact("GPU memory", _of_total(process.used_bytes, gpu.memory, "device"))
    else:
        yield fact("", instance.uuid, MUTED)
        yield fact("GPU memory", _of_total(process.used_bytes, instance.memory, "instance"))
    parts = state.parts.get((process.instance or device_key(gpu), process.pid))
    if parts is not None and isinstance(process.used_bytes, int) and parts.reserved_bytes <= process.used_bytes:
        context_bytes = process.used_bytes - parts.reserved_bytes
        reserved, context = format_bytes(parts.reserved_bytes), format_bytes(context_bytes)
        yield fact("", f"{reserved} reserved by the allocator, {context} CUDA context", MUTED)
    yield fact("SM share", _said(process.sm_percent, "%"))


def _host_rows(entry: Entry, now_s: float) -> Iterator[Row]:
    host = entry.host
    if host is None:
        yield fact("process", entry.process.host.reason if isinstance(entry.process.host, Unknown) else "")
        yield fact("", "It can be neither named nor ended from here.", MUTED)
        return
    yield fact("user", host.user)
    yield fact("parent", str(host.parent_pid))
    yield fact("running for", age(now_s - host.start_time_s))
    yield fact("CPU", _said(host.cpu_percent, "% of one core"))
    yield fact("host memory", format_bytes(host.resident_bytes))
    if host.container:
        yield fact("container", host.container)
    yield []
    yield [(host.command or host.name, "")]


def _said(reading: Reading[T], unit: str) -> str:
    if isinstance(reading, Unknown):
        return reading.reason
    return f"{reading:.0f}{unit}" if isinstance(reading, float) else f"{reading}{unit}"


def _of_total(used_bytes: Value, memory: Reading[Memory], whole: str) -> str:
    if isinstance(used_bytes, Unknown) or isinstance(memory, Unknown):
        return format_bytes(used_bytes)
    return f"{format_bytes(used_bytes)}, {used_bytes / memory.total_bytes:.1%} of the {whole}"


_WORST = "▲"


@dataclass(frozen=True)
class _Column:
    """A figure in bytes; left out first where `rank` is highest and there is no room."""

    title: str
    figure: Callable[[ProbeSample], Value]
    rank: int

    @property
    def width(self) -> int:
        return max(9, len(self.title) + 2)


def _bucket(bucket: Bucket) -> Callable[[ProbeSample], Value]:
    return lambda sample: sample.buckets[bucket]


_COLUMNS = (
    _Column("PARAMS", _bucket(Bucket.PARAMETERS), 1),
    _Column("GRADS", _bucket(Bucket.GRADIENTS), 2),
    _Column("OPTIM", _bucket(Bucket.OPTIMIZER), 3),
    _Column("ACTIV PEAK", lambda sample: sample.peak_buckets[Bucket.ACTIVATIONS], 4),
    _Column("OTHER", _bucket(Bucket.OTHER), 7),
    _Column("ALLOC", total_bytes, 5),
    _Column("RESERVED", lambda sample: sample.reserved_bytes, 6),
    _Column("PEAK", lambda sample: sample.peak_allocated_bytes, 0),
)
_ROOMY = 90
"""Cells from which pid and step time are shown."""
_RETRIES_WIDTH = 9


def ranks_rows(job: Job, gpu_name: Callable[[Placed], str], width: int) -> list[Row]:
    """Return a line a rank, then the spread of each figure.

    Args:
        gpu_name: the device as the Monitor numbers it.
    """
    roomy = width >= _ROOMY
    heading = _lead("RANK", "PID", "DEVICE", "STEP", "STEP TIME", roomy=roomy)
    columns = _fitting(width - len(heading) - _RETRIES_WIDTH)
    worst = job.worst
    titles = "".join(f"{column.title:>{column.width}}" for column in columns)
    rows: list[Row] = [[(f"{heading}{titles}{'RETRIES':>{_RETRIES_WIDTH}}", f"bold {MUTED}")]]
    rows += [_row(rank, gpu_name, columns, worst=rank is worst, roomy=roomy) for rank in job.ranks]
    rows.append([])
    for title, share in (("spread", False), ("", True)):
        rows.append([(f"{title:>6}".ljust(len(heading)) + _spread(columns, job, share=share), MUTED)])
    rows.append([])
    if worst is not None:
        rows.append([(_WORST, "bold $warning"), (f" rank {worst.number} holds the most: it runs out first", "")])
    if job.absent:
        rows.append(
            [(f"{job.absent} of {job.world_size} ranks do not publish here: on other machines, or not yet", MUTED)]
        )
    return rows


def _fitting(room: int) -> list[_Column]:
    """Return the columns that fit."""
    chosen: set[str] = set()
    for column in sorted(_COLUMNS, key=lambda column: column.rank):
        if column.width > room:
            break
        chosen.add(column.title)
        room -= column.width
    return [column for column in _COLUMNS if column.title in chosen]


def _lead(rank: str, pid: str, device: str, step: str, pace: str, *, roomy: bool) -> str:
    """Return the cells left of the figures."""
    if roomy:
        return f"{rank:>6}{pid:>9}  {fit(device, 7)}{step:>8}{pace:>10}"
    return f"{rank:>6}  {fit(device, 7)}{step:>8}"


def _row(rank: Rank, gpu_name: Callable[[Placed], str], columns: list[_Column], *, worst: bool, roomy: bool) -> Row:
    mark = (_WORST if worst else " ", "bold $warning")
    style = "bold" if worst else ""
    number, pid = str(rank.number), str(rank.watched.pid)
    if rank.placed is None:
        return [mark, (_lead(number, pid, "", "", "", roomy=roomy)[1:], ""), ("  no step has finished yet", MUTED)]
    sample = rank.placed.sample
    step, pace = f"{sample.record.step:,}", seconds(sample.step_s)
    lead = _lead(number, pid, gpu_name(rank.placed), step, pace, roomy=roomy)[1:]
    sizes = "".join(f"{compact_bytes(column.figure(sample)):>{column.width}}" for column in columns)
    retries = sample.retries
    many = ABSENT if isinstance(retries, Unknown) else f"{retries:,}"
    hot = isinstance(retries, int) and retries > 0
    return [mark, (f"{lead}{sizes}", style), (f"{many:>{_RETRIES_WIDTH}}", "bold $warning" if hot else style)]


def _spread(columns: list[_Column], job: Job, *, share: bool) -> str:
    """Most less least of each figure, in bytes or as a share of the most."""
    cells = []
    for column in columns:
        sizes = [size_bytes for size_bytes, _ in job.sizes(column.figure)]
        text = ABSENT
        if sizes:
            most_bytes, apart_bytes = max(sizes), max(sizes) - min(sizes)
            text = compact_bytes(apart_bytes)
            if share:
                text = f"{apart_bytes / most_bytes:.1%}" if most_bytes else ""
        cells.append(f"{text:>{column.width}}")
    return "".join(cells)


# Reports


def users_report(snapshots: Mapping[str, Snapshot]) -> Report | None:
    """Make the report of what each user holds; None before there is anything to see.

    Args:
        snapshots: by the host's name.
    """
    if not snapshots:
        return None
    heading, *lines = users_lines(user_totals(snapshots), several=len(snapshots) > 1)
    return Report("By user", {"": lambda width: [
        [(fit(heading, width), f"bold {MUTED}")], *([(fit(line, width), "")] for line in lines or ["no process at all"])
    ]})  # fmt: skip


def end_report(watched: WatchedProcess, state: MonitorState) -> Report | None:
    """Make the report of how a process ended: its post-mortem if it has one."""
    case = watched.case
    if state.snapshot is None:
        return None
    now_s = state.snapshot.time_s
    if case is None:
        return Report("Ended", {"": lambda width: ended_rows(watched, width, now_s)})
    return Report("Out of memory", {"": lambda width: post_mortem_rows(case, width, now_s)})


def ranks_report(state: MonitorState, key: tuple[int, int]) -> Report | None:
    """Make the report of the job that a process is a rank of; None where it publishes no more."""
    watched = state.published.by_key.get(key)
    job = job_of(state.published, watched) if watched is not None else None
    if job is None:
        return None
    indices: dict[object, str] = {gpu.uuid: f"GPU {gpu.index}" for gpu in state.gpus}

    def rows(width: int) -> list[Row]:
        return ranks_rows(job, lambda at: indices.get(at.gpu_uuid, at.sample.device), width)

    return Report(f"{len(job.ranks)} of {job.world_size} ranks", {"": rows})


def until_complete(process: ProbedProcess, look: LookAnswer) -> Callable[[], Report]:
    """Make a look's report, anew once the probe knows what the steps after it have released."""
    shown, report = look, look_report(process, look)

    def make() -> Report:
        nonlocal shown, report
        if shown.kept is None and "kept" not in shown.unavailable:
            newest: LookAnswer | None = None
            with suppress(WireError):
                newest = read_document(LookAnswer, process.files, process.uid)
            if newest is not None and newest.request == look.request and newest != shown:
                shown, report = newest, look_report(process, newest)
        return report

    return make


def look_report(process: ProbedProcess, look: LookAnswer) -> Report:
    """Make a look's pages; only one, with the reasons, if nothing was recorded."""
    pages: dict[str, Callable[[int], list[Row]]] = {"by bucket": lambda width: step_page(look, width)}
    if look.devices:
        pages["by module"] = lambda width: place_page(look, "module", width)
        pages["by source line"] = lambda width: place_page(look, "source", width)
    return Report(process.title, pages, look_title(look))
