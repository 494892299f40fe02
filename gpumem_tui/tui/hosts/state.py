"""What the screen of hosts shows: one immutable state, and the processes that it lists, in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.plan.watched import planned_gpu
from gpumem_tui.remote.processes import RemoteProcess, job_of
from gpumem_tui.remote.status import HostStatus


class HostsSort(Enum):
    """What the processes are sorted by, in the order that the key goes through. The value is the column's heading."""

    MEMORY = "GPU MEM"
    HOST = "HOST"
    RANK = "RANK"
    SM = "SM%"
    USER = "USER"


@dataclass(frozen=True)
class HostsState:
    """Everything the screen shows.

    Attributes:
        now_s: `time.monotonic`, for ages.
        opened: the hosts whose GPUs are listed below them.
        only: list only this host's processes; empty for all.
    """

    statuses: tuple[HostStatus, ...] = ()
    now_s: float = 0.0
    opened: frozenset[str] = frozenset()
    sort: HostsSort = HostsSort.MEMORY
    reverse: bool = False
    filter: str = ""
    only: str = ""


def gpu_to_plan_for(state: HostsState, host: str, process: RemoteProcess | None) -> Reading[Gpu]:
    """The GPU of the process, or for None the one of the host that has most free; or why there is none."""
    if process is not None:
        found = process.gpu
    else:
        gpus = next((status.gpus for status in state.statuses if status.host.name == host), ())
        if not gpus:
            return Unknown("no GPU of it is known")
        found = max(gpus, key=lambda gpu: -1 if isinstance(gpu.memory, Unknown) else gpu.memory.free_bytes)
    gpu = planned_gpu(found)
    return gpu if isinstance(gpu, Unknown) else replace(gpu, name=f"{host}: GPU {gpu.name}")


def listed_processes(state: HostsState) -> list[RemoteProcess]:
    """Those that match, in their order; what is unknown comes after what is known."""
    words = state.filter.lower().split()
    shown = (status for status in state.statuses if not state.only or status.host.name == state.only)
    listed = [each for status in shown for each in status.processes]
    listed = [each for each in listed if all(word in each.about for word in words)] if words else listed
    value = _VALUES[state.sort]
    pairs = [(value(each), each) for each in listed]
    if state.sort is HostsSort.HOST:
        places = {status.host.name: place for place, status in enumerate(state.statuses)}
        pairs = [(places[name], each) for name, each in pairs]
    known = [pair for pair in pairs if pair[0] is not None]
    descends = state.sort in (HostsSort.MEMORY, HostsSort.SM)
    known.sort(key=lambda pair: pair[0], reverse=descends != state.reverse)
    unknown = [each for value, each in pairs if value is None] if len(known) < len(pairs) else []
    return [each for _, each in known] + unknown


def _read(reading: Reading[int]) -> int | None:
    return None if isinstance(reading, Unknown) else reading


def _user(each: RemoteProcess) -> str | None:
    return None if each.known is None else each.known.user


def _rank(each: RemoteProcess) -> tuple[tuple[str, str, int], int] | None:
    rank = each.count("rank")
    return None if rank is None else (job_of(each), rank)


_VALUES: Mapping[HostsSort, Callable[[RemoteProcess], Any]] = {
    HostsSort.MEMORY: lambda each: _read(each.process.used_bytes),
    HostsSort.SM: lambda each: _read(each.process.sm_percent),
    HostsSort.HOST: lambda each: each.host_name,
    HostsSort.USER: _user,
    HostsSort.RANK: _rank,
}
"""What each is sorted by; None where it is unknown."""
