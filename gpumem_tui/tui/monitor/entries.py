"""Which processes the Monitor lists, and in which order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Union

from msgspec import Struct, structs

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.snapshot import GpuProcess, GpuReading, HostProcess, ProcessKind, Snapshot
from gpumem_tui.monitor.users import is_of
from gpumem_tui.report.objects import known
from gpumem_tui.system import user_name
from gpumem_tui.tui.monitor.state import MonitorState, ProcessKey, SortBy, device_key
from gpumem_tui.watch.published import Placed, Published, WatchedProcess

if TYPE_CHECKING:
    from gpumem_tui.watch.records import ProbeSample

_INIT = 1
_KEPT_S = 1800.0
"""How long a process stays listed after its end."""
_FIRST_S = 120.0
"""How long one that ended otherwise than it should is before those that live; where memory ran out it is all along."""
_MOST_ENDED = 8
"""How many ended processes are listed at most, the last ones, so that they do not displace the living."""
_NOT_LISTED = Unknown("the driver does not list it")
_ENDED = "ended"


class Entry(Struct, frozen=True):
    """A process on a device.

    Attributes:
        gpu: None for host memory, or for a GPU that cannot be told.
        branch: what the tree draws before the command.
        watched: what its probe publishes, if it has one; with the newest `sample` of this device.
        place: the device in a word, where there is no GPU; `slot` tells several such of one process apart.
    """

    gpu: GpuReading | None
    process: GpuProcess
    branch: str = ""
    watched: WatchedProcess | None = None
    sample: ProbeSample | None = None
    place: str = ""
    slot: str = ""

    @property
    def key(self) -> ProcessKey:
        """The key that is constant from snapshot to snapshot, from before the process's first step on."""
        device = "" if self.gpu is None else device_key(self.gpu)
        return _ENDED if self.has_ended else device, self.process.pid, self.process.instance or self.slot

    @property
    def host(self) -> HostProcess | None:
        """The process as the operating system knows it, if known."""
        return None if isinstance(self.process.host, Unknown) else self.process.host

    @property
    def has_ended(self) -> bool:
        """It is listed with how it ended."""
        return self.watched is not None and not self.watched.is_running


def entries(state: MonitorState) -> list[Entry]:
    """Return the listed processes in their order."""
    listed = [entry for entry in _all(state) if _matches(entry, state.filter)]
    listed = _sorted(listed, state)
    return _as_tree(listed) if state.tree else listed


def count(state: MonitorState) -> int:
    """Return processes of all devices."""
    return len(_everywhere(state))


def entry_of(state: MonitorState, key: ProcessKey | None) -> Entry | None:
    """Return a process of the snapshot by its key."""
    return None if key is None else next((entry for entry in _everywhere(state) if entry.key == key), None)


def charted(state: MonitorState) -> WatchedProcess | None:
    """Return the process that the chart is of: the chosen one, if that is wanted; without any GPU, else the first."""
    chosen = entry_of(state, state.cursor)
    if chosen is not None and chosen.watched is not None and (state.charts_process or not state.gpus):
        return chosen.watched
    if state.gpus:
        return None
    watched = [entry for entry in entries(state) if entry.watched is not None]
    return min(watched, key=lambda entry: entry.has_ended).watched if watched else None


def moved(state: MonitorState, step: int) -> MonitorState:
    """Move the cursor up or down the list; from none, or a process that has ended, it comes in at an end."""
    order = [entry.key for entry in entries(state)]
    if not order:
        return structs.replace(state, cursor=None)
    if state.cursor in order:
        here = order.index(state.cursor)
    else:
        here = -1 if step > 0 else len(order)
    return structs.replace(state, cursor=order[max(0, min(here + step, len(order) - 1))])


def offering(state: MonitorState) -> tuple[object, ...]:
    """Return what decides which keys do something."""
    chosen = entry_of(state, state.cursor)
    watched = chosen.watched if chosen is not None else None
    derived = watched is not None and not isinstance(watched.expected, Unknown)
    return state.cursor, state.filter, len(state.gpus), bool(state.parts), chosen is None, watched is None, derived


# Which


_made: tuple[Snapshot | None, Published, Sequence[Entry]] = None, Published(), ()
"""The entries of the last snapshot with what was published next to it: each key and each panel asks for them."""


def _everywhere(state: MonitorState) -> Sequence[Entry]:
    """Return processes that ended lately, those that the driver lists, and those known by their probe alone."""
    global _made
    if _made[0] is not state.snapshot or _made[1] is not state.published:
        _made = state.snapshot, state.published, tuple(_of_each_kind(state))
    return _made[2]


def _of_each_kind(state: MonitorState) -> Iterator[Entry]:
    yield from _ended(state)
    listed: set[tuple[str, int]] = set()
    for gpu in state.gpus:
        for process in gpu.all_processes:
            place = (process.instance or device_key(gpu), process.pid)
            listed.add(place)
            watched, sample = state.published.by_place.get(place, (None, None))
            yield Entry(gpu, process, watched=watched, sample=sample)
    gpus: dict[object, GpuReading] = {
        uuid: gpu for gpu in state.gpus for uuid in (gpu.uuid, *(each.uuid for each in gpu.instances))
    }
    for watched in state.published.processes:
        if watched.is_running and not watched.placed:
            yield _unlisted(watched, None, None, "")
        for number, placed in enumerate(watched.own if watched.is_running else ()):
            if (placed.gpu_uuid, watched.pid) not in listed:
                yield _unlisted(watched, placed, gpus.get(placed.gpu_uuid), placed.sample.device if number else "")
    for each in () if state.snapshot is None else state.snapshot.unlisted:  # of another host, or as it was recorded
        gpu_of = gpus.get(each.gpu_uuid)
        yield Entry(gpu_of, each.process, place="" if gpu_of is not None else each.device, slot=each.device)


def _unlisted(watched: WatchedProcess, placed: Placed | None, gpu: GpuReading | None, slot: str) -> Entry:
    reason, place, sample = _NOT_LISTED, "–", None
    if placed is not None:
        sample, place = placed.sample, placed.sample.device
        reason = placed.gpu_uuid if isinstance(placed.gpu_uuid, Unknown) else _NOT_LISTED
    process = GpuProcess(watched.pid, ProcessKind.COMPUTE, reason, reason, watched.host)
    return Entry(gpu, process, watched=watched, sample=sample, place="" if gpu is not None else place, slot=slot)


def _ended(state: MonitorState) -> Iterator[Entry]:
    lately = [
        (watched.ended_s, watched)
        for watched in state.published.processes
        if watched.ended_s is not None and not watched.is_running and state.now_s - watched.ended_s < _KEPT_S
    ]
    if not lately:
        return
    from gpumem_tui.watch.records import last_first  # only here: most machines have no probe

    lately.sort(key=lambda pair: last_first(pair[0], state.now_s))
    for _, watched in lately[:_MOST_ENDED]:
        gone = Unknown("it has ended")
        placed = watched.own[0] if watched.own else None
        uuid = watched.case.post_mortem.device_uuid if watched.case is not None else ""
        uuid = uuid or (placed.gpu_uuid if placed is not None and isinstance(placed.gpu_uuid, str) else "")
        gpu = next((gpu for gpu in state.gpus if gpu.uuid == uuid), None)
        process = GpuProcess(watched.pid, ProcessKind.COMPUTE, gone, gone, gone)
        yield Entry(gpu, process, watched=watched, sample=placed.sample if placed is not None else None)


def _all(state: MonitorState) -> Iterator[Entry]:
    focused = state.focused
    for entry in _everywhere(state):
        if (not state.only_focus or entry.gpu is focused) and (not state.mine or _is_of(entry, state.user)):
            yield entry


def _is_of(entry: Entry, user: str) -> bool:
    """Return whether a process surely is a user's; of one that has ended, its probe's file notes this."""
    if entry.host is None and entry.watched is not None:
        return user_name(entry.watched.process.uid) == user
    return is_of(user, entry.process.host)


def _matches(entry: Entry, filter_text: str) -> bool:
    """Every word of the filter is somewhere in the process's line."""
    if not filter_text.strip():
        return True
    host = entry.host
    about = f"{entry.process.pid} {entry.place}"
    if entry.gpu is not None:
        about += f" gpu{entry.gpu.index}"
        inside = entry.process.instance
        about += "".join(f":{each.index}" for each in entry.gpu.instances if each.uuid == inside)
    if host is not None:
        about += f" {host.user} {host.name} {host.command} {host.container}"
    if entry.watched is not None:
        about += f" {entry.watched.process.title}"
    about = about.lower()
    return all(word in about for word in filter_text.lower().split())


# In which order


def _sorted(listed: list[Entry], state: MonitorState) -> list[Entry]:
    """Sort: first what ended as memory ran out, or just now otherwise than it should; last what else has ended.

    Unknown values come last; equal ones are by GPU and pid.
    """
    value_of = _VALUES[state.sort]
    listed = sorted(listed, key=lambda entry: (math.inf if entry.gpu is None else entry.gpu.index, entry.process.pid))
    first = [entry for entry in listed if entry.has_ended and _comes_first(entry, state.now_s)]
    last = [entry for entry in listed if entry.has_ended and not _comes_first(entry, state.now_s)]
    last.sort(key=has_ended_well)
    alive = [entry for entry in listed if not entry.has_ended]
    pairs = [(value_of(entry), entry) for entry in alive]
    known = [(value, entry) for value, entry in pairs if value is not None]
    known.sort(key=lambda pair: pair[0], reverse=state.sort.descends != state.reverse)
    return [*first, *(entry for _, entry in known), *(entry for value, entry in pairs if value is None), *last]


def has_ended_well(entry: Entry) -> bool:
    """Return whether a process ended normally or on request."""
    return entry.watched is not None and entry.watched.process.has_ended_well


def _comes_first(entry: Entry, now_s: float) -> bool:
    watched = entry.watched
    if watched is None or watched.ended_s is None or watched.process.has_ended_well:
        return False
    from gpumem_tui.watch.records import FOR_MEMORY

    return watched.process.state in FOR_MEMORY or now_s - watched.ended_s < _FIRST_S


_Sorted = Union[float, str, None]  # noqa: UP007  an alias cannot be written with | on Python 3.10
"""Sort key of an entry; None for an entry without it."""


def _of_host(read: Callable[[HostProcess], Reading[float | str]]) -> Callable[[Entry], _Sorted]:
    def value(entry: Entry) -> _Sorted:
        found = Unknown("") if entry.host is None else read(entry.host)
        return None if isinstance(found, Unknown) else found

    return value


_VALUES: dict[SortBy, Callable[[Entry], _Sorted]] = {
    SortBy.MEMORY: lambda entry: known(entry.process.used_bytes),
    SortBy.GPU: lambda entry: None if entry.gpu is None else entry.gpu.index,
    SortBy.SM: lambda entry: known(entry.process.sm_percent),
    SortBy.CPU: _of_host(lambda host: host.cpu_percent),
    SortBy.HOST_MEMORY: _of_host(lambda host: host.resident_bytes),
    SortBy.AGE: _of_host(lambda host: -host.start_time_s),
    SortBy.USER: _of_host(lambda host: host.user),
    SortBy.PID: lambda entry: entry.process.pid,
    SortBy.COMMAND: _of_host(lambda host: host.command),
}


def _as_tree(listed: Sequence[Entry]) -> list[Entry]:
    """Children below their parent; processes whose common parent uses no GPU (a launcher's ranks) stay together."""
    by_pid: dict[int, list[Entry]] = {}
    children: dict[int, list[int]] = {}
    for entry in listed:
        by_pid.setdefault(entry.process.pid, []).append(entry)
    for pid, same in by_pid.items():
        host = same[0].host
        children.setdefault(host.parent_pid if host is not None else 0, []).append(pid)
    placed: list[Entry] = []

    def place(pid: int, lead: str, branch: str) -> None:
        placed.extend(structs.replace(entry, branch=branch) for entry in by_pid.pop(pid))
        below = [child for child in children.get(pid, []) if child in by_pid]
        for number, child in enumerate(below):
            last = number == len(below) - 1
            place(child, f"{lead}{'  ' if last else '│ '}", f"{lead}{'└ ' if last else '├ '}")

    roots = [(parent, pids) for parent, pids in children.items() if parent not in by_pid]
    for parent, pids in roots:
        together = len(pids) > 1 and parent > _INIT
        for number, pid in enumerate(pids):
            last = number == len(pids) - 1
            mark = ("┌ " if number == 0 else "└ " if last else "├ ") if together else ""
            place(pid, ("  " if last else "│ ") if together else "", mark)
    while by_pid:  # each the other's parent: a pid was used again between two looks
        place(next(iter(by_pid)), "", "")
    return placed
