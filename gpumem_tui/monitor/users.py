"""Who holds how much: the processes of snapshots by user, over the GPUs of one machine or of several."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpumem_tui.memory import Unknown, format_bytes
from gpumem_tui.monitor.probes import ProbeReport, with_unlisted
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.snapshot import GpuProcess, HostProcess, Snapshot
from gpumem_tui.report.tables import TextColumn, TextTable
from gpumem_tui.system import user_name


class UserTotal(Struct, frozen=True):
    """The sum of what the processes of one user hold.

    Attributes:
        user: None for those of which it is not known whose they are.
        used_bytes: of GPUs, as far as known; `unread`: of so many processes it is not.
        gpus: by the host's name and the GPU's index.
        processes: how many, those that train on the CPU under a probe included; one on two GPUs is one.
        cpu_percent: of one core, together; None if known of none.
        resident_bytes: host memory, shared pages counted for each.
    """

    user: str | None
    used_bytes: int
    unread: int
    gpus: tuple[tuple[str, int], ...]
    processes: int
    cpu_percent: float | None
    resident_bytes: int


def viewer() -> str:
    """Return the name of the user who watches; where that is root by sudo, of the one who called it."""
    uid = os.geteuid()
    called = os.environ.get("SUDO_UID", "") if uid == 0 else ""
    return user_name(int(called) if called.isdecimal() else uid)


def only_of(user: str, snapshot: Snapshot, probes: ProbeReport) -> tuple[Snapshot, ProbeReport]:
    """Return a snapshot with one user's processes alone, and what probes say of these. Memory stays the device's."""

    def kept(listed: Reading[tuple[GpuProcess, ...]]) -> Reading[tuple[GpuProcess, ...]]:
        return listed if isinstance(listed, Unknown) else tuple(each for each in listed if is_of(user, each.host))

    snapshot = with_unlisted(snapshot, probes)
    gpus = (
        replace(
            gpu,
            processes=kept(gpu.processes),
            instances=tuple(replace(each, processes=kept(each.processes)) for each in gpu.instances),
        )
        for gpu in snapshot.gpus
    )
    unlisted = tuple(each for each in snapshot.unlisted if is_of(user, each.host))
    snapshot = replace(snapshot, gpus=tuple(gpus), unlisted=unlisted)
    pids = {each.process.pid for each in _held("", snapshot)}
    said = {(where, pid): said for (where, pid), said in probes.said.items() if pid in pids}
    return snapshot, replace(probes, said=said)


def is_of(user: str, host: Reading[HostProcess]) -> bool:
    """Return whether a process surely is a user's."""
    return not isinstance(host, Unknown) and host.user == user


def user_totals(snapshots: Mapping[str, Snapshot]) -> tuple[UserTotal, ...]:
    """Return each user's totals, who holds most first, and last what is not known whose it is.

    Args:
        snapshots: by the host's name.
    """
    held: dict[str | None, list[_Held]] = {}
    for name, snapshot in snapshots.items():
        for each in _held(name, snapshot):
            host = each.process.host
            held.setdefault(None if isinstance(host, Unknown) else host.user, []).append(each)
    totals = (_total(user, processes) for user, processes in held.items())
    return tuple(sorted(totals, key=lambda each: (each.user is None, -each.used_bytes, each.user or "")))


class _Held(Struct, frozen=True):
    """A process on a GPU of a host; `index` is None where it trains on the CPU."""

    host_name: str
    index: int | None
    process: GpuProcess


def _held(name: str, snapshot: Snapshot) -> Iterator[_Held]:
    yield from (_Held(name, gpu.index, process) for gpu in snapshot.gpus for process in gpu.all_processes)
    indices = {uuid: gpu.index for gpu in snapshot.gpus for uuid in (gpu.uuid, *(each.uuid for each in gpu.instances))}
    yield from (_Held(name, indices.get(each.gpu_uuid), each.process) for each in snapshot.unlisted)


def _total(user: str | None, held: list[_Held]) -> UserTotal:
    sizes = [each.process.used_bytes for each in held if each.index is not None]
    known = [size for size in sizes if isinstance(size, int)]
    hosts: dict[tuple[str, int], HostProcess | None] = {}
    for each in held:
        host = each.process.host
        hosts[each.host_name, each.process.pid] = None if isinstance(host, Unknown) else host
    found = [host for host in hosts.values() if host is not None]
    percents = [each.cpu_percent for each in found if not isinstance(each.cpu_percent, Unknown)]
    return UserTotal(
        user=user,
        used_bytes=sum(known),
        unread=len(sizes) - len(known),
        gpus=tuple(sorted({(each.host_name, each.index) for each in held if each.index is not None})),
        processes=len(hosts),
        cpu_percent=round(sum(percents), 1) if percents else None,
        resident_bytes=sum(each.resident_bytes for each in found if isinstance(each.resident_bytes, int)),
    )


_USERS = TextTable(
    TextColumn("USER", 14, cut=True),
    TextColumn("GPU MEM", 12, ">"),
    TextColumn("GPUS", 5, ">"),
    TextColumn("PROCESSES", 10, ">"),
    TextColumn("CPU%", 7, ">"),
    TextColumn("HOST MEM", 12, ">"),
    TextColumn("ON"),
)


def users_lines(totals: Iterable[UserTotal], *, several: bool) -> Iterator[str]:
    """Return a table: a line a user under its heading.

    Args:
        several: the GPUs are of several hosts.
    """
    return _USERS.lines(
        (
            "not known" if each.user is None else each.user,
            f"{'≥ ' if each.unread else ''}{format_bytes(each.used_bytes)}",
            str(len(each.gpus)),
            str(each.processes),
            "–" if each.cpu_percent is None else f"{each.cpu_percent:.0f}",
            format_bytes(each.resident_bytes),
            _places(each, several=several),
        )
        for each in totals
    )


def _places(total: UserTotal, *, several: bool) -> str:
    """Return GPUs such as "0–3, 6", of several hosts such as "a 0–3 · b 0"."""
    by_host: dict[str, list[int]] = {}
    for host, index in total.gpus:
        by_host.setdefault(host, []).append(index)
    if several:
        return " · ".join(f"{host} {_ranges(indices)}" for host, indices in by_host.items())
    return ", ".join(_ranges(indices) for indices in by_host.values())


def _ranges(indices: Sequence[int]) -> str:
    """Return numbers in order with a dash for those between.

    >>> _ranges([0, 1, 2, 5])
    '0–2, 5'
    """
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
