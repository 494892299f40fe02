"""What the kernel's log says of processes that it killed because memory ran out, where it may be read."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

KERNEL_LOG = Path("/dev/kmsg")

_KILLED = re.compile(
    r"(?P<group>Memory cgroup out of memory|Out of memory(?: \(oom_kill_allocating_task\))?): Killed process "
    r"(?P<pid>\d+) \(.*?\).*?anon-rss:(?P<anon>\d+)kB, file-rss:(?P<file>\d+)kB, shmem-rss:(?P<shmem>\d+)kB"
)
"""As `__oom_kill_process` writes it (Linux, mm/oom_kill.c), in the words of Linux 4.19 and later."""
_LIMIT = re.compile(r"memory: usage \d+kB, limit (\d+)kB")
"""Of the group, a few entries before (`mem_cgroup_print_oom_meminfo`, mm/memcontrol.c)."""
_LARGEST_ENTRY = 8192


@dataclass(frozen=True)
class MemoryKill:
    """A process that the kernel killed because memory ran out.

    Attributes:
        pid: in the machine's own numbering, not a container's.
        boot_s: when, in seconds since boot, without the time that the machine slept.
        resident_bytes: what it held then.
        by_group: the limit of its control group was reached; else the machine's memory.
        limit_bytes: of the group, where the log says it.
    """

    pid: int
    boot_s: float
    resident_bytes: int
    by_group: bool
    limit_bytes: int | None = None


def memory_kills(log: Path = KERNEL_LOG) -> tuple[MemoryKill, ...]:
    """All that the log still holds, oldest first; empty where it may not be read."""
    kills = []
    limit_bytes: int | None = None
    for entry in _entries(log):
        if (said := _LIMIT.search(entry)) is not None:
            limit_bytes = int(said[1]) * 1024
        elif (kill := _kill(entry)) is not None:
            kills.append(replace(kill, limit_bytes=limit_bytes if kill.by_group else None))
            limit_bytes = None
    return tuple(kills)


def kill_of(pid: int, started_s: float, log: Path = KERNEL_LOG) -> MemoryKill | None:
    """How the kernel killed a process for want of memory; None if the log does not say that it did.

    Args:
        started_s: when the process began, by the same clock: an earlier one may have had its pid.
    """
    found = [kill for kill in memory_kills(log) if kill.pid == pid and kill.boot_s >= started_s]
    return found[0] if found else None


def _kill(entry: str) -> MemoryKill | None:
    head, _, text = entry.partition(";")
    found = _KILLED.match(text)
    words = head.split(",")
    if found is None or len(words) < 3 or not words[2].isdecimal():
        return None
    resident_kib = int(found["anon"]) + int(found["file"]) + int(found["shmem"])
    return MemoryKill(int(found["pid"]), int(words[2]) / 1e6, resident_kib * 1024, found["group"].startswith("Memory"))


def _entries(log: Path) -> Iterator[str]:
    """Each entry of the log: ``priority,number,microseconds since boot,flags;text`` (Documentation/ABI, dev-kmsg)."""
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        while True:
            try:
                entry = os.read(descriptor, _LARGEST_ENTRY)
            except OSError as error:
                if error.errno == errno.EPIPE:  # the oldest entry was overwritten while we read: the next one is there
                    continue
                return
            if not entry:
                return
            yield from entry.decode(errors="replace").splitlines()
    finally:
        os.close(descriptor)
