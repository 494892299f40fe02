"""Host memory of a process: what it holds, by which limit it is bound, and how often the kernel killed for want of it.

Standard library only, and Python 3.9: a user's training process speaks it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gpumem_tui.text import file_text

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
GROUP = "its control group"
"""`MemoryLimit.owner`."""
_NO_LIMIT_BYTES = 1 << 60
"""The limit of a version 1 group that has none: 2⁶³ less a page."""


@dataclass(frozen=True)
class MemoryLimit:
    """The most host memory that a process may hold.

    Attributes:
        owner: whose limit it is: ``its control group``, ``ulimit -v`` or ``this machine``.
    """

    bytes: int
    owner: str


@dataclass(frozen=True)
class MemoryGroup:
    """The control group that a process's memory is charged to.

    Attributes:
        folder: of its files.
        top: the mount point: the limits of all groups from there down bind.
        is_unified: version 2 of control groups.
    """

    folder: Path
    top: Path
    is_unified: bool

    def oom_kills(self) -> int | None:
        """Return how many processes of the group the kernel has killed because memory ran out; None if it does not say.

        Source: Linux, Documentation/admin-guide/cgroup-v2.rst (``memory.events``) and, for version 1, the ``oom_kill``
        line of ``memory.oom_control``.
        """
        return _counter(self.folder / ("memory.events" if self.is_unified else "memory.oom_control"), "oom_kill")

    def limit_bytes(self) -> int | None:
        """Return the smallest limit of the group and of those that it is in; None without any."""
        name = "memory.max" if self.is_unified else "memory.limit_in_bytes"
        found = []
        folder = self.folder
        while True:
            text = file_text(folder / name).strip()
            if text.isdecimal() and int(text) < _NO_LIMIT_BYTES:
                found.append(int(text))
            if folder in (self.top, folder.parent):
                return min(found, default=None)
            folder = folder.parent


def memory_group(pid: int | str = "self", proc: Path = _PROC, cgroups: Path = _CGROUPS) -> MemoryGroup | None:
    """Return the memory group of a process; None if it cannot be read."""
    for line in file_text(proc / str(pid) / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            return _group(cgroups / "memory", path, is_unified=False)
        if number == "0" and not controllers and _has_memory(cgroups, path):
            return _group(cgroups, path, is_unified=True)
    return None


def limit(pid: int | str = "self", group: MemoryGroup | None = None) -> MemoryLimit | None:
    """Return what binds a process first: its control group, ``ulimit -v`` or the machine's memory.

    Args:
        group: its memory group, if known already.
    """
    group = group or memory_group(pid)
    limits = []
    group_bytes = group.limit_bytes() if group is not None else None
    if group_bytes is not None:
        limits.append(MemoryLimit(group_bytes, GROUP))
    for line in file_text(_PROC / str(pid) / "limits").splitlines():
        if line.startswith("Max address space"):
            soft = line.split()[3]
            limits += [MemoryLimit(int(soft), "ulimit -v")] if soft.isdecimal() else []
    total = _counter(_PROC / "meminfo", "MemTotal:")
    if total is not None:
        limits.append(MemoryLimit(total * 1024, "this machine"))
    return min(limits, key=lambda one: one.bytes, default=None)


def left_bytes(pid: int | str = "self") -> int | None:
    """Return the bytes it can still take: the smaller of (limit − held) and the machine's available memory."""
    bound, held = limit(pid), resident_bytes(pid)
    available = _counter(_PROC / "meminfo", "MemAvailable:")
    found = [] if available is None else [available * 1024]
    if bound is not None and held is not None:
        found.append(max(0, bound.bytes - held))
    return min(found, default=None)


def resident_bytes(pid: int | str = "self") -> int | None:
    """Return the host memory that a process holds now (``VmRSS``); None if it is gone or may not be looked at."""
    pages = file_text(_PROC / str(pid) / "statm").split()[1:2]  # sooner read than all of its status
    return int(pages[0]) * os.sysconf("SC_PAGE_SIZE") if pages else None


def machine_oom_kills() -> int | None:
    """Return how many processes the kernel has killed because memory ran out, of any group; None before Linux 4.13."""
    return _counter(_PROC / "vmstat", "oom_kill")


def _group(top: Path, path: str, *, is_unified: bool) -> MemoryGroup:
    folder = top / path.lstrip("/")
    if not folder.is_dir():  # in a container, where only its own group is mounted, under the name of the whole
        folder = top
    return MemoryGroup(folder, top, is_unified)


def _has_memory(cgroups: Path, path: str) -> bool:
    folder = cgroups / path.lstrip("/")
    return any((one / "memory.events").exists() for one in (folder, cgroups)) or (cgroups / "memory.stat").exists()


def _counter(path: Path, name: str) -> int | None:
    for words in map(str.split, file_text(path).splitlines()):
        if words and words[0] == name and len(words) > 1 and words[1].isdecimal():
            return int(words[1])
    return None
