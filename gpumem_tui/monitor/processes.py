"""The processes behind the pids that the driver reports: whose they are, what they cost the host, and how to end them.

A driver may report pids of another pid namespace than ours (a container's view, or a mix since version 535). Such a pid
may by chance name an unrelated process here, so within a namespace that is not the host's a process counts as the one
that the driver means only if it has a GPU's device file open.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil
from msgspec import Struct
from msgspec.structs import replace

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor import vendors
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.snapshot import HostProcess
from gpumem_tui.text import file_text, printable

_HOST_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of Linux's include/linux/proc_ns.h: the first pid namespace has the same inode everywhere."""
_FRESH_S = 0.2
"""A process on several GPUs is read once for all of them."""
_FORGET_S = 60.0
_TICKS_A_S, _PAGE_BYTES = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
_UNREAD = Unknown("needs a second look")
_START_TOLERANCE_S = 1.0
"""The boot time that start times count from is rounded to a second by the kernel."""

_SLURM = re.compile(r"/(?:[\w.-]+_)?slurm(?:stepd\.scope|_[^/]+)?/(?:.*/)?job_(\d+)")
"""As https://slurm.schedmd.com/cgroup_v2.html and the older plugin have it: with several daemons on a node, each scope
or folder has the node's name too."""
_POD = re.compile(r"/kubepods.*?pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})\b")
"""The uid of a pod, or of one that the kubelet has from a file; the driver "systemd" writes _ for -."""
_CONTAINER_ID = re.compile(r"[-/:_]([0-9a-f]{12})[0-9a-f]{52}(?![0-9a-f])")
_CONTAINERS = (
    (re.compile(r"/kubepods.*?pod([0-9a-f]{8})"), "pod"),
    (re.compile(r"/docker[-/]([0-9a-f]{6})[0-9a-f]{58}"), "docker"),
    (re.compile(r"/libpod(?:-payload)?[-_/]([0-9a-f]{6})[0-9a-f]{58}"), "podman"),
    (_SLURM, "slurm"),
    (re.compile(r"/lxc(?:\.payload)?[./]([^/\n]+)"), "lxc"),
    (re.compile(r"/(?:cri-containerd|crio|nerdctl|containerd)[-/:]([0-9a-f]{6})[0-9a-f]{58}"), "containerd"),
)
"""How the control group of a process names its container, by what manages it. A pod's containers are its own."""


class _Known(Struct):
    """A process that was seen before, as it was at the last look; before the first one, what never changes of it."""

    host: HostProcess
    start_ticks: int
    uses_gpu: bool = False
    cpu_s: float = 0.0
    looked_s: float = 0.0


_LONGEST_STAT = 4096
"""More bytes than a line of /proc/PID/stat has: 52 numbers of at most 20 digits, and a name."""


class _Stat(NamedTuple):
    """The line of /proc/PID/stat: all that changes of a process, and what tells it from another of the same pid."""

    parent_pid: int
    start_ticks: int
    cpu_s: float
    resident_bytes: int

    @classmethod
    def of(cls, pid: int) -> _Stat:
        """Read it (proc_pid_stat(5)). psutil reads it three times for this.

        Raises:
            OSError: there is no such process, or it may not be seen.
        """
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            after_name = os.read(descriptor, _LONGEST_STAT).rpartition(b")")[2].split()
        finally:
            os.close(descriptor)
        ticks = int(after_name[11]) + int(after_name[12])
        return cls(int(after_name[1]), int(after_name[19]), ticks / _TICKS_A_S, int(after_name[21]) * _PAGE_BYTES)


class HostProcesses:
    """Looks pids up; remembers what never changes of a process. For one thread at a time.

    Args:
        proc: where control groups, namespaces and open files are read.
        known_here: the pids are of our own namespace for sure, whether or not they use a GPU.
    """

    def __init__(self, proc: Path = Path("/proc"), *, known_here: bool = False) -> None:
        self._proc = proc
        self._known: dict[int, _Known] = {}
        self._is_contained = not known_here and _link(proc / "self/ns/pid") not in ("", _HOST_NAMESPACE)

    def look(self, pids: Iterable[int]) -> dict[int, Reading[HostProcess]]:
        """Return the process of each pid, or why it is not known."""
        now_s = time.monotonic()
        found = {pid: self._look(pid, now_s) for pid in dict.fromkeys(pids)}
        self._known = {pid: known for pid, known in self._known.items() if now_s - known.looked_s < _FORGET_S}
        return found

    def _look(self, pid: int, now_s: float) -> Reading[HostProcess]:
        try:
            stat = _Stat.of(pid)
            known = self._known.get(pid)
            if known is None or known.start_ticks != stat.start_ticks:
                known = self._look_up(pid, stat)
            self._known[pid] = known
            if not known.looked_s or now_s - known.looked_s >= _FRESH_S:
                _take_in(known, stat, now_s)
            if self._is_contained and not known.uses_gpu:
                known.uses_gpu = self._uses_gpu(pid)
                if not known.uses_gpu:
                    return self._foreign(pid)
            return known.host
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            self._known.pop(pid, None)
            if self._is_contained:
                return self._foreign(pid)
            try:
                os.kill(pid, 0)
            except PermissionError:
                return Unknown(f"pid {pid} is hidden from this user")
            except (OSError, OverflowError):
                pass
            return Unknown("no such process here")
        except (psutil.AccessDenied, PermissionError):
            return Unknown(f"no permission to see pid {pid}")

    def _look_up(self, pid: int, stat: _Stat) -> _Known:
        process, cgroup = psutil.Process(pid), file_text(self._proc / str(pid) / "cgroup")
        with process.oneshot():
            name = printable(process.name())
            try:
                command = " ".join(process.cmdline()) or f"[{name}]"
            except (psutil.AccessDenied, psutil.ZombieProcess):
                command = f"[{name}]"
            containers, pod, job = _CONTAINER_ID.findall(cgroup), _POD.search(cgroup), _SLURM.search(cgroup)
            host = HostProcess(
                pid=pid,
                parent_pid=stat.parent_pid,
                user=printable(process.username()),
                name=name,
                command=printable(command),
                start_time_s=process.create_time(),
                cpu_percent=_UNREAD,
                resident_bytes=_UNREAD,
                container=_container(cgroup),
                container_id=containers[-1] if containers else "",
                pod_uid=pod[1].replace("_", "-") if pod is not None else "",
                slurm_job=job[1] if job is not None else "",
            )
        return _Known(host, stat.start_ticks)

    def _uses_gpu(self, pid: int) -> bool:
        """Return False only if its open files can be read and none is a GPU's."""
        folder = self._proc / str(pid) / "fd"
        try:
            names = os.listdir(folder)
        except OSError as error:
            return isinstance(error, PermissionError)
        devices = tuple(path for vendor in vendors.known() for path in vendor.device_paths)
        for name in names:
            try:
                if os.readlink(folder / name).startswith(devices):
                    return True
            except PermissionError:  # without CAP_SYS_PTRACE, root in a container may list what it may not follow
                return True
            except OSError:
                continue  # it was closed meanwhile
        return False

    @staticmethod
    def _foreign(pid: int) -> Unknown:
        return Unknown(f"pid {pid} is of another namespace")


class CannotSignal(Exception):
    """The process could not be signalled; one line gives the reason."""


def terminate(process: HostProcess) -> None:
    """Ask a process to end (SIGTERM).

    Raises:
        CannotSignal: it has ended, its pid is another process now, or it is another user's.
    """
    _send(process, signal.SIGTERM)


def kill(process: HostProcess) -> None:
    """End a process (SIGKILL).

    Raises:
        CannotSignal: as `terminate`.
    """
    _send(process, signal.SIGKILL)


def _send(process: HostProcess, number: signal.Signals) -> None:
    pid = process.pid
    descriptor = None
    try:
        try:
            descriptor = os.pidfd_open(pid)  # from here on the pid cannot come to mean another process
        except OSError as error:
            if isinstance(error, ProcessLookupError):
                raise
        if abs(psutil.Process(pid).create_time() - process.start_time_s) > _START_TOLERANCE_S:
            raise CannotSignal(f"pid {pid} is another process now; {process.name} has ended: choose another")
        if descriptor is not None:
            signal.pidfd_send_signal(descriptor, number)
        else:  # a kernel before 5.3
            os.kill(pid, number)
    except (ProcessLookupError, psutil.NoSuchProcess) as error:
        raise CannotSignal(f"pid {pid} ({process.name}) has ended already; choose another") from error
    except PermissionError as error:
        raise CannotSignal(
            f"no permission to signal pid {pid} of user {process.user}; `sudo kill {pid}` can"
        ) from error
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _take_in(known: _Known, stat: _Stat, now_s: float) -> None:
    """Keep what has changed of a process. Linux counts CPU time in hundredths of a second."""
    cpu_percent: Reading[float] = _UNREAD
    if known.looked_s:
        cpu_percent = round(100 * max(0.0, stat.cpu_s - known.cpu_s) / (now_s - known.looked_s), 1)
    known.cpu_s, known.looked_s = stat.cpu_s, now_s
    host, newer = known.host, (stat.parent_pid, cpu_percent, stat.resident_bytes)
    if (host.parent_pid, host.cpu_percent, host.resident_bytes) != newer:
        known.host = replace(host, parent_pid=newer[0], cpu_percent=newer[1], resident_bytes=newer[2])


def _container(cgroup: str) -> str:
    """Return who manages the container of a control group, and which one it is; empty outside any."""
    hints = ((manager, pattern.search(cgroup)) for pattern, manager in _CONTAINERS)
    return next((f"{manager} {printable(found[1])}" for manager, found in hints if found is not None), "")


def _link(path: Path) -> str:
    """Return where a link leads; empty where that cannot be read."""
    try:
        return os.readlink(path)
    except OSError:
        return ""
