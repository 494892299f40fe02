"""How a process ended: what its probe, `run` and the kernel's log say of it, and that in a few words."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import select
import signal
import struct
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gpumem_tui import host_memory
from gpumem_tui.memory import format_bytes
from gpumem_tui.probe.wire import Exit, PostMortem, UncaughtError
from gpumem_tui.watch.records import End, ProcessState

_CRASHES = {
    signal.SIGSEGV: "segmentation fault",
    signal.SIGBUS: "bus error",
    signal.SIGILL: "illegal instruction",
    signal.SIGFPE: "arithmetic error",
    signal.SIGABRT: "aborted",
    signal.SIGTRAP: "trace trap",
    signal.SIGSYS: "bad system call",
}
_INTERRUPT, _LEFT = "KeyboardInterrupt", "SystemExit"


@dataclass(frozen=True)
class Evidence:
    """The evidence about a process that has ended.

    Attributes:
        left_ns: wall time at which its probe said that the interpreter exits; 0 if it did not.
        last_ns: wall time of its last sign of life.
        step: its last optimizer step.
    """

    exit: Exit | None
    error: UncaughtError | None
    post_mortem: PostMortem | None
    left_ns: int
    last_ns: int
    step: int


def end_of(seen: Evidence) -> End:
    """Say how a process ended, by the first evidence that tells."""
    state, phrase = _state(seen)
    exit_ = seen.exit
    when_ns = (exit_.wall_ns if exit_ is not None else 0) or seen.left_ns or seen.last_ns
    return End(
        state=state,
        phrase=phrase,
        time_s=when_ns / 1e9,
        exit_code=None if exit_ is None else exit_.exit_code,
        signal="" if exit_ is None or exit_.signal is None else signal_name(exit_.signal),
        resident_bytes=None if exit_ is None else exit_.resident_bytes,
        limit_bytes=None if exit_ is None else exit_.limit_bytes,
        limit_owner="" if exit_ is None else exit_.limit_owner,
    )


def memory_phrase(resident_bytes: int | None, limit_bytes: int | None, limit_owner: str) -> str:
    """Say what a process held of host memory, of which limit; empty if both are unknown.

    >>> memory_phrase(15 << 30, 16 << 30, "its control group")
    '15.00 GiB resident, limit 16.00 GiB (its control group)'
    """
    held = "" if resident_bytes is None else f"{format_bytes(resident_bytes)} resident"
    bound = "" if limit_bytes is None else f"limit {format_bytes(limit_bytes)} ({limit_owner})"
    return ", ".join(part for part in (held, bound) if part)


def signal_name(number: int) -> str:
    """Return a signal's name as `kill -l` has it.

    >>> signal_name(9)
    'SIGKILL'
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _state(seen: Evidence) -> tuple[ProcessState, str]:
    exit_ = seen.exit
    error = seen.error if seen.error is not None and seen.error.step >= seen.step else None  # else a hook outlived it
    if exit_ is not None and exit_.killed_for_memory:
        held = memory_phrase(exit_.resident_bytes, exit_.limit_bytes, exit_.limit_owner)
        return (
            ProcessState.KILLED_FOR_MEMORY,
            f"killed by the kernel as host memory ran out{f': {held}' if held else ''}",
        )
    if _ran_out(seen, error):
        return ProcessState.OUT_OF_MEMORY, ProcessState.OUT_OF_MEMORY.value
    if exit_ is not None and exit_.signal is not None:
        state, phrase = _by_signal(exit_.signal)
        at_exit = bool(seen.left_ns) and state is not ProcessState.INTERRUPTED
        return state, f"{phrase} at the interpreter's exit" if at_exit else phrase
    code = None if exit_ is None else exit_.exit_code
    if code == 0:
        return ProcessState.ENDED, "finished (exit code 0)"
    if error is not None and error.error == _INTERRUPT:
        return ProcessState.INTERRUPTED, "interrupted by Ctrl-C"
    if error is not None and error.error == _LEFT and code is None:  # the program may have caught that
        return ProcessState.ENDED, f"ended: {error.message}{f' at {error.source}' if error.source else ''}"
    if code is not None or error is not None:
        return ProcessState.FAILED, _failure(code, error)
    if seen.left_ns:
        return ProcessState.ENDED, ProcessState.ENDED.value
    return ProcessState.VANISHED, "killed or crashed (not observed)"


def _ran_out(seen: Evidence, error: UncaughtError | None) -> bool:
    """Return whether it ended as memory ran out: it was seen to, or no step came after and nothing else explains it."""
    found = seen.post_mortem
    if found is None:
        return False
    if found.fatal:
        return found.step >= seen.step
    code = None if seen.exit is None else seen.exit.exit_code
    explained = error is not None or code == 0 or (seen.exit is not None and seen.exit.signal is not None)
    return found.step >= seen.step and not explained and (bool(seen.left_ns) or code is not None)


def _by_signal(number: int) -> tuple[ProcessState, str]:
    name = signal_name(number)
    if number == signal.SIGINT:
        return ProcessState.INTERRUPTED, "interrupted by Ctrl-C (SIGINT)"
    what = _CRASHES.get(signal.Signals(number)) if number in set(signal.Signals) else None
    if what is not None:
        return ProcessState.CRASHED, f"crashed: {what} ({name})"
    return ProcessState.KILLED, f"killed ({name})"


def _failure(code: int | None, error: UncaughtError | None) -> str:
    phrase = "failed" if code is None else f"failed with exit code {code}"
    if code is not None and error is None and code > 128 and code - 128 in set(signal.Signals):
        return f"{phrase}, as after {signal_name(code - 128)}"
    if error is None:
        return phrase
    kind = "" if error.error == _LEFT else error.error
    text = ": ".join(part for part in (kind, error.message) if part)
    return f"{phrase}: {text}{f' at {error.source}' if error.source else ''}"


# The kernel's log of processes that it killed because memory ran out

KERNEL_LOG = Path("/dev/kmsg")

_KILLED = re.compile(
    r"(?P<group>Memory cgroup out of memory|Out of memory(?: \(oom_kill_allocating_task\))?): Killed process "
    r"(?P<pid>\d+) \(.*?\).*?anon-rss:(?P<anon>\d+)kB, file-rss:(?P<file>\d+)kB, shmem-rss:(?P<shmem>\d+)kB"
)
"""As `__oom_kill_process` writes it (Linux, mm/oom_kill.c), in the words of Linux 4.19 and later."""
_LIMIT = re.compile(r"memory: usage \d+kB, limit (\d+)kB")
"""The limit of the group, a few entries before (`mem_cgroup_print_oom_meminfo`, mm/memcontrol.c)."""
_LARGEST_ENTRY = 8192


@dataclass(frozen=True)
class MemoryKill:
    """A process that the kernel killed because memory ran out.

    Attributes:
        pid: in the machine's own numbering, not a container's.
        boot_s: when, in seconds since boot, without the time that the machine slept.
        resident_bytes: what it held then.
        by_group: the limit of its control group was reached; else the machine's memory.
        limit_bytes: of the group, where the log states it.
    """

    pid: int
    boot_s: float
    resident_bytes: int
    by_group: bool
    limit_bytes: int | None = None


def memory_kills(log: Path = KERNEL_LOG) -> tuple[MemoryKill, ...]:
    """Read all that the log still holds, oldest first; empty where it may not be read."""
    kills = []
    limit_bytes: int | None = None
    for entry in _entries(log):
        if (limit := _LIMIT.search(entry)) is not None:
            limit_bytes = int(limit[1]) * 1024
        elif (kill := _kill(entry)) is not None:
            kills.append(replace(kill, limit_bytes=limit_bytes if kill.by_group else None))
            limit_bytes = None
    return tuple(kills)


def kill_of(pid: int, started_s: float, log: Path = KERNEL_LOG) -> MemoryKill | None:
    """Find how the kernel killed a process for want of memory; None if the log does not say that it did.

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
    """Yield the log's entries: ``priority,number,microseconds since boot,flags;text`` (Documentation/ABI, dev-kmsg)."""
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


# Seeing the end of a process that is no child of ours

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
        hold: whether a descriptor of it may be taken; without one its end is seen in /proc.
    """

    def __init__(self, pid: int, start_ticks: int, log: Path = KERNEL_LOG, *, hold: bool = True) -> None:
        self._pid = pid
        self._start_ticks = start_ticks
        self._log = log
        self._descriptor: int | None = None
        with suppress(OSError):  # a kernel before 5.3, or the process is gone
            self._descriptor = os.pidfd_open(pid) if hold else None
        self._group: host_memory.MemoryGroup | None = None
        self._limit: host_memory.MemoryLimit | None = None
        self._resident_bytes: int | None = None
        self._looks = 0
        self._counters: deque[int | None] = deque(maxlen=2)
        self.look()

    @property
    def is_held(self) -> bool:
        """Return whether a descriptor of the process is held."""
        return self._descriptor is not None

    def look(self) -> None:
        """Note what it holds now. A count read now is from before its end only if it lives at the next look too."""
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
        """Return whether the process has ended, as far as that is visible from here."""
        if self._descriptor is None:
            return not Path(f"/proc/{self._pid}").exists()
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def ended(self, status: int | None = None, most_resident_bytes: int | None = None) -> Exit:
        """Work out how it ended.

        Args:
            status: as its parent got it (`os.waitpid`); by default what can be learned without that.
            most_resident_bytes: the most that it ever held, where the parent knows.
        """
        status = self._status() if status is None else status
        number = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None
        code = os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None
        killed = None
        if code is None and number in (None, signal.SIGKILL):
            killed = kill_of(self._pid, _started_s(self._start_ticks), self._log)
        if killed is not None:
            return _killed(killed, time.time_ns(), number, self._limit)
        return Exit(
            wall_ns=time.time_ns(),
            exit_code=code,
            signal=number,
            killed_for_memory=number == signal.SIGKILL and self._has_been_short(),
            resident_bytes=most_resident_bytes or self._resident_bytes,
            limit_bytes=None if self._limit is None else self._limit.bytes,
            limit_owner="" if self._limit is None else self._limit.owner,
        )

    def close(self) -> None:
        """Follow it no longer."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _count(self) -> int | None:
        """Count the processes of its control group that the kernel killed; of the machine if the group does not say."""
        found = None if self._group is None else self._group.oom_kills()
        return host_memory.machine_oom_kills() if found is None else found

    def _has_been_short(self) -> bool:
        """Return whether the kernel has killed for want of memory since shortly before the end."""
        before, now = self._counters[0], self._count()
        return before is not None and now is not None and now > before

    def _status(self) -> int | None:
        if self._descriptor is not None:
            info = bytearray(64)
            struct.pack_into("<Q", info, 0, _WANTS_EXIT)
            with suppress(OSError):  # a kernel before 6.13
                fcntl.ioctl(self._descriptor, _GET_INFO, info)
                if struct.unpack_from("<Q", info)[0] & _WANTS_EXIT:
                    return int(struct.unpack_from("<i", info, _EXIT_CODE_AT)[0])
        try:
            fields = Path(f"/proc/{self._pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return None
        return int(fields[_STATUS_FIELD]) if fields[0] == b"Z" else None


def unseen(pid: int, start_ticks: int, log: Path = KERNEL_LOG) -> Exit | None:
    """Find how a process ended that was not followed, if it is still in the kernel's log."""
    killed = kill_of(pid, _started_s(start_ticks), log)
    booted_s = time.time() - time.monotonic()
    return None if killed is None else _killed(killed, round((booted_s + killed.boot_s) * 1e9), signal.SIGKILL)


def _killed(killed: MemoryKill, wall_ns: int, number: int | None, limit: host_memory.MemoryLimit | None = None) -> Exit:
    """Return the end of a process that the kernel killed because memory ran out, if its log has it."""
    if killed.limit_bytes is not None:
        limit = host_memory.MemoryLimit(killed.limit_bytes, host_memory.GROUP)
    return Exit(
        wall_ns=wall_ns,
        exit_code=None,
        signal=number,
        killed_for_memory=True,
        resident_bytes=killed.resident_bytes,
        limit_bytes=None if limit is None else limit.bytes,
        limit_owner="" if limit is None else limit.owner,
    )


def _started_s(start_ticks: int) -> float:
    """Convert a start time to the clock of the kernel's log, which leaves out how long the machine has slept."""
    slept_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return start_ticks / os.sysconf("SC_CLK_TCK") - slept_s
