"""Watches for the end of a process that is not a child of ours.

Notes its exit status, what it held last, and whether the kernel killed it because memory ran out.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from gpumem_tui import host_memory
from gpumem_tui.probe.documents import Exit
from gpumem_tui.watch import kernel_log

_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11
"""``PIDFD_GET_INFO`` (Linux, include/uapi/linux/pidfd.h), with the first 64 bytes of ``struct pidfd_info``."""
_WANTS_EXIT = 1 << 3
_EXIT_CODE_AT = 60
_STATUS_FIELD = 49
"""``exit_code`` in /proc/PID/stat, counted from the one after the process's name (man 5 proc_pid_stat)."""

_GROUP_EVERY = 10
"""Looks between two at which control group it is in: that seldom changes."""


class Witness:
    """Follows one living process, from `look` to `look`.

    Its exit status can be known where Linux keeps it for who holds a descriptor of the process (6.15 and later), or
    where its parent has not asked for it yet.

    Args:
        pid: as we know it.
        start_ticks: when it began, in clock ticks since boot.
    """

    def __init__(self, pid: int, start_ticks: int, log: Path = kernel_log.KERNEL_LOG) -> None:
        self._pid = pid
        self._start_ticks = start_ticks
        self._log = log
        self._descriptor: int | None = None
        with suppress(OSError):  # a kernel before 5.3, or the process is gone
            self._descriptor = os.pidfd_open(pid)
        self._group: host_memory.MemoryGroup | None = None
        self._limit: host_memory.Limit | None = None
        self._resident_bytes: int | None = None
        self._looks = 0
        self._counters: deque[int | None] = deque(maxlen=2)
        self.look()

    def look(self) -> None:
        """Note what it holds now. What is counted now was before its end only if it lives at the next look too."""
        group = host_memory.memory_group(self._pid) if self._looks % _GROUP_EVERY == 0 else None
        self._looks += 1
        if group is not None and group != self._group:
            self._group = group
            self._counters.clear()
            self._limit = None
        self._limit = self._limit or host_memory.limit(self._pid, self._group)
        self._counters.append(self._count())
        self._resident_bytes = host_memory.resident_bytes(self._pid) or self._resident_bytes

    def has_ended(self) -> bool:
        """Whether it has ended, as far as that is visible from here."""
        if self._descriptor is None:
            return not Path(f"/proc/{self._pid}").exists()
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def ended(self, status: int | None = None, most_resident_bytes: int | None = None) -> Exit:
        """How it ended.

        Args:
            status: as its parent was told (`os.waitpid`); by default what can be learned without that.
            most_resident_bytes: the most that it ever held, where the parent knows.
        """
        status = self._status() if status is None else status
        number = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None
        code = os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None
        killed = None
        if code is None and number in (None, signal.SIGKILL):
            killed = kernel_log.kill_of(self._pid, _started_s(self._start_ticks), self._log)
        limit = _limit_of(killed) or self._limit
        return Exit(
            wall_ns=time.time_ns(),
            exit_code=code,
            signal=number,
            killed_for_memory=killed is not None or (number == signal.SIGKILL and self._has_been_short()),
            resident_bytes=killed.resident_bytes if killed is not None else most_resident_bytes or self._resident_bytes,
            limit_bytes=None if limit is None else limit.bytes,
            limit_owner="" if limit is None else limit.owner,
        )

    def close(self) -> None:
        """Follow it no longer."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _count(self) -> int | None:
        """Processes of its control group that the kernel killed; of the whole machine where the group does not say."""
        found = None if self._group is None else self._group.oom_kills()
        return host_memory.machine_oom_kills() if found is None else found

    def _has_been_short(self) -> bool:
        """Whether the kernel has killed for want of memory since shortly before the end."""
        before, now = self._counters[0], self._count()
        return before is not None and now is not None and now > before

    def _status(self) -> int | None:
        if self._descriptor is not None:
            told = bytearray(64)
            struct.pack_into("<Q", told, 0, _WANTS_EXIT)
            with suppress(OSError):  # a kernel before 6.13
                fcntl.ioctl(self._descriptor, _GET_INFO, told)
                if struct.unpack_from("<Q", told)[0] & _WANTS_EXIT:
                    return int(struct.unpack_from("<i", told, _EXIT_CODE_AT)[0])
        try:
            fields = Path(f"/proc/{self._pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return None
        return int(fields[_STATUS_FIELD]) if fields[0] == b"Z" else None


def unseen(pid: int, start_ticks: int, log: Path = kernel_log.KERNEL_LOG) -> Exit | None:
    """How a process ended that was not followed, if the kernel's log still says so."""
    killed = kernel_log.kill_of(pid, _started_s(start_ticks), log)
    if killed is None:
        return None
    begun_s = time.time() - time.monotonic()
    limit = _limit_of(killed)
    return Exit(
        wall_ns=round((begun_s + killed.boot_s) * 1e9),
        exit_code=None,
        signal=signal.SIGKILL,
        killed_for_memory=True,
        resident_bytes=killed.resident_bytes,
        limit_bytes=None if limit is None else limit.bytes,
        limit_owner="" if limit is None else limit.owner,
    )


def _limit_of(killed: kernel_log.MemoryKill | None) -> host_memory.Limit | None:
    if killed is None or killed.limit_bytes is None:
        return None
    return host_memory.Limit(killed.limit_bytes, host_memory.GROUP)


def _started_s(start_ticks: int) -> float:
    """A start time by the kernel's log's clock, which does not count how long the machine has slept since boot."""
    slept_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return start_ticks / os.sysconf("SC_CLK_TCK") - slept_s
