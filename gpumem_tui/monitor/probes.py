"""Probes inside training processes add detail to the driver's figures: per process and GPU, not per device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from msgspec import Struct, structs

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.snapshot import HostProcess, Snapshot, UnlistedProcess

_NOT_TOLD = Unknown("not told which process it is")


class ProbeFigures(Struct, frozen=True):
    """The caching allocator of one process on one GPU.

    Attributes:
        retries: times it gave its whole cache back to satisfy a request, since the process began.
        ooms: requests that failed, since the process began.
    """

    allocated_bytes: int
    reserved_bytes: int
    retries: int
    ooms: int


Probes = Mapping[tuple[str, int], ProbeFigures]
"""By GPU uuid and pid: a process may use several GPUs."""


class RanOutOfMemory(Struct, frozen=True):
    """A watched process that ended because memory ran out.

    Attributes:
        gpu_uuid: where; empty if that is not known.
        time_s: when, seconds since the epoch.
        message: one line that names the process and what it asked for.
    """

    gpu_uuid: str
    time_s: float
    message: str


class Growing(Struct, frozen=True):
    """A watched process whose memory after each step rises steadily.

    Attributes:
        gpu_uuid: where; empty for host memory.
        message: one line that names the process, how fast, and how long there is room.
        left_s: seconds until it is full; infinite where that is not known.
    """

    gpu_uuid: str
    message: str
    left_s: float


class Stopped(Struct, frozen=True):
    """A job in which ranks wait in a collective for one that has stopped.

    Attributes:
        gpu_uuid: of the rank that stopped first; empty for host memory.
        message: one line that names that rank and where it is.
        since_s: for how many seconds no rank has finished a step.
    """

    gpu_uuid: str
    message: str
    since_s: float


Said: TypeAlias = Mapping[tuple[str, int], Mapping[str, object]]
"""The probes' reports as JSON, by where a process trains and its pid."""


class ProbeReport(Struct, frozen=True):
    """The figures of all probes of the machine at one moment, to be printed.

    Attributes:
        figures: for histories and alerts.
        ended: processes that memory ran out under lately.
        growing: processes whose memory rises.
        stopped: jobs that wait for one of their ranks.
        said: a JSON object for each process and device: the UUID of a GPU or of a MIG instance; its own name of the
            device ("cpu") for host memory, or for a GPU that cannot be told.
        hosts: these processes as the operating system knows them, by pid.
    """

    figures: Probes = {}
    ended: tuple[RanOutOfMemory, ...] = ()
    growing: tuple[Growing, ...] = ()
    stopped: tuple[Stopped, ...] = ()
    said: Said = {}
    hosts: Mapping[int, Reading[HostProcess]] = {}


NOTHING_SAID = ProbeReport()
"""Nothing is watched from inside, as in a recording."""


def with_unlisted(snapshot: Snapshot, probes: ProbeReport) -> Snapshot:
    """Return a snapshot with what trains on the CPU, and what the driver does not show, as in a container."""
    if snapshot.unlisted:  # of a host or a recording, which knows
        return snapshot
    shown = {
        (process.instance or gpu.uuid, process.pid) for gpu in snapshot.gpus for process in gpu.all_processes
    }  # fmt: skip
    found = (
        UnlistedProcess(
            pid,
            device := str(said.get("device", where)),
            probes.hosts.get(pid, _NOT_TOLD),
            "" if where == device else where,
        )
        for (where, pid), said in probes.said.items()
        if (where, pid) not in shown
    )
    return structs.replace(snapshot, unlisted=tuple(found))


Ask = Callable[[Snapshot], ProbeReport]
"""The present reports of the probes on a snapshot's machine."""


def no_probes(_snapshot: Snapshot) -> ProbeReport:
    """Return `NOTHING_SAID`."""
    return NOTHING_SAID
