"""Whether the probe can be put into a running process, and if not, why and what would help."""

from __future__ import annotations

import os
import platform
import pwd
import re
import time
from dataclasses import dataclass
from pathlib import Path

from gpumem_tui.attach import elf
from gpumem_tui.attach.ptrace import SIGNAL_RETURN
from gpumem_tui.watch import hosts, programs

OLDEST_PYTHON = (3, 9)
_FUNCTIONS = ("Py_IsInitialized", "Py_AddPendingCall", "PyRun_SimpleString")
_VERSION_IN_PATH = re.compile(r"(?:python|cpython-)([23])\.?(\d{1,2})")
_HELPER = os.path.join("attach", "ptrace.py")
_OTHER_ATTACH_S, _POLL_S = 10.0, 0.01
_C_LIBRARY = re.compile(r"(libc|ld-musl)[-.]")  # libc.so.6, libc-2.31.so, ld-musl-x86_64.so.1
_INSTEAD = "start it with `gpumem-tui run -- COMMAND`, or add `import gpumem_tui; gpumem_tui.attach()` to its code"


class Refused(Exception):
    """The probe cannot be put into this process; one line says why, and what would help.

    Attributes:
        instead: the processes to attach to instead: its children that train.
    """

    def __init__(self, reason: str, remedy: str = "", instead: tuple[hosts.Host, ...] = ()) -> None:
        super().__init__(f"{reason}; {remedy}" if remedy else reason)
        self.reason = reason
        self.remedy = remedy
        self.instead = instead


@dataclass(frozen=True)
class Target:
    """A process that the probe can be put into.

    Attributes:
        python: version of its interpreter, (major, minor); None where its files do not say.
        map_memory: address of `mmap` of its C library.
        signal_return: where its C library ends a signal handler.
        is_ready, add_pending, run_string: addresses of Py_IsInitialized, Py_AddPendingCall, PyRun_SimpleString.
    """

    host: hosts.Host
    python: tuple[int, int] | None
    map_memory: int
    signal_return: int
    is_ready: int
    add_pending: int
    run_string: int


def inspect(pid: int, proc: Path = hosts.PROC) -> Target:
    """Look at a process without touching it.

    Raises:
        Refused: the probe cannot be put into it.
    """
    host = hosts.find(pid, proc)
    if host is None:
        raise Refused(f"there is no process {pid}")
    _check_state(host)
    _check_kind(host)
    try:
        mapped = elf.mappings(host.proc)
        python = _python_version(mapped)
        if python is not None and python < OLDEST_PYTHON:
            raise Refused(f"{host.title} runs Python {python[0]}.{python[1]}; the probe needs 3.9 or later")
        functions = _python_functions(host, mapped)
        _check_memory(host, functions)
        map_memory, signal_return = _of_c_library(host, mapped)
    except PermissionError:
        raise refusal(host) from None
    except (FileNotFoundError, ProcessLookupError):
        raise Refused(f"{host.title} has ended") from None
    except OSError as error:  # EIO: it unmaps that memory just now, or ends
        raise Refused(f"the memory of {host.title} cannot be read: {error.strerror}", _INSTEAD) from None
    if platform.machine() != "x86_64":
        raise Refused(f"attaching works on x86-64 only, and this machine is {platform.machine()}", _INSTEAD)
    ready, add, run = (functions[name].address for name in _FUNCTIONS)
    return Target(host, python, map_memory, signal_return, ready, add, run)


def why_not_allowed(host: hosts.Host, our_uid: int, ptrace_scope: int, protected: bool) -> Refused:
    """Why the kernel does not let us attach.

    Args:
        ptrace_scope: Yama's setting; 0 where there is no Yama.
        protected: the process is not dumpable (set-uid, or by its own wish).
    """
    sudo = f"run `sudo gpumem-tui attach {host.pid}`"
    if our_uid not in (0, host.uid):
        return Refused(f"{host.title} belongs to {_user(host.uid)}, and only that user or root may attach", sudo)
    if ptrace_scope >= 3:
        return Refused("the kernel forbids attaching until the next boot (kernel.yama.ptrace_scope = 3)", _INSTEAD)
    if ptrace_scope == 2 and our_uid != 0:
        return Refused("only root may attach here (kernel.yama.ptrace_scope = 2)", f"{sudo}, or {_INSTEAD}")
    if protected:
        return Refused(f"{host.title} is protected against debuggers (not dumpable)", f"{sudo}, or {_INSTEAD}")
    if ptrace_scope == 1 and our_uid != 0:
        return Refused(
            "only a parent may attach to a process here (kernel.yama.ptrace_scope = 1)",
            f"{sudo}, or `sudo sysctl kernel.yama.ptrace_scope=0`, or {_INSTEAD}",
        )
    if not programs.is_python(host, programs.loaded(host)):
        return Refused(f"{host.title} is no Python process by its name, and the kernel does not let us look into it")
    return Refused(
        f"the kernel does not let us attach to {host.title}",
        f"in a container, give it `--cap-add SYS_PTRACE`; or {_INSTEAD}",
    )


def refusal(host: hosts.Host) -> Refused:
    """Why the kernel did not let us attach to that process, from what /proc says."""
    try:
        scope = int((host.proc.parent / "sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0
    protected = (host.proc / "maps").stat().st_uid != host.uid  # root's, once the process may not be dumped
    return why_not_allowed(host, os.geteuid(), scope, protected)


def is_being_attached_to(host: hosts.Host) -> bool:
    """Whether another attach is stopping this process just now, which takes milliseconds."""
    tracer = hosts.find(host.tracer_pid, host.proc.parent) if host.tracer_pid else None
    return tracer is not None and any(word.endswith(_HELPER) for word in tracer.command)


def named(found: tuple[hosts.Host, ...]) -> str:
    """Processes in a few words, at most four of them."""
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return ", ".join(host.title for host in found[:4]) + more


def _check_kind(host: hosts.Host) -> None:
    """Refuse what never trains, before its files are looked at."""
    if host.is_kernel_thread:
        raise Refused(f"{host.title} is a thread of the kernel, no Python process")
    if programs.is_launcher(host):
        found = programs.trainers(host.pid, host.proc.parent)
        remedy = f"attach to {named(found)}" if found else "attach to the processes that it starts, once they train"
        raise Refused(f"{host.title} starts the processes that train and trains nothing itself", remedy, found)


def _check_state(host: hosts.Host) -> None:
    if host.state == "Z":
        raise Refused(f"{host.title} has ended")
    deadline = time.monotonic() + _OTHER_ATTACH_S
    while is_being_attached_to(host) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        host = hosts.find(host.pid, host.proc.parent) or host
    if host.tracer_pid:
        tracer = hosts.find(host.tracer_pid, host.proc.parent)
        by = tracer.title if tracer is not None else f"PID {host.tracer_pid}"
        raise Refused(f"{host.title} is being debugged by {by}", "end the debugger first")
    if host.state == "T":
        raise Refused(f"{host.title} is stopped", f"let it go on first: `kill -CONT {host.pid}`")


def _python_functions(host: hosts.Host, mapped: tuple[elf.Mapping, ...]) -> dict[str, elf.Symbol]:
    """The interpreter's functions, from whichever file exports them all: the executable or a libpython."""
    executable = os.readlink(host.proc / "exe")
    first = {mapping.path: mapping for mapping in reversed(mapped)}
    candidates = [path for path in first if path == executable or "python" in Path(path).name.lower()]
    for path in candidates:
        if path.endswith(" (deleted)"):
            raise Refused(f"the Python of {host.title} was replaced since it started", _INSTEAD)
        found = elf.symbols(host.proc, first[path], _FUNCTIONS)
        if len(found) == len(_FUNCTIONS):
            return found
    if any("python" in Path(path).name.lower() for path in candidates):
        raise Refused(f"the Python of {host.title} exports no functions (a static build)", _INSTEAD)
    below = programs.trainers(host.pid, host.proc.parent)
    raise Refused(f"{host.title} is no Python process", f"attach to {named(below)}" if below else "", below)


def _check_memory(host: hosts.Host, functions: dict[str, elf.Symbol]) -> None:
    """The file must still be what was loaded; reading memory also shows whether the kernel lets us attach."""
    with (host.proc / "mem").open("rb", buffering=0) as memory:
        for symbol in functions.values():
            memory.seek(symbol.address)
            if memory.read(len(symbol.code)) != symbol.code:
                raise Refused(f"the Python of {host.title} was replaced since it started", _INSTEAD)


def _of_c_library(host: hosts.Host, mapped: tuple[elf.Mapping, ...]) -> tuple[int, int]:
    """Where its C library has `mmap`, and where it ends a signal handler."""
    first = {mapping.path: mapping for mapping in reversed(mapped)}
    libraries = [path for path in first if _C_LIBRARY.match(Path(path).name)]
    with (host.proc / "mem").open("rb", buffering=0) as memory:
        for path in libraries:
            found = elf.symbols(host.proc, first[path], ("mmap",))
            for code in mapped if found else ():
                if code.path == path and code.is_code:
                    at = os.pread(memory.fileno(), code.end - code.start, code.start).find(SIGNAL_RETURN)
                    if at >= 0:
                        return found["mmap"].address, code.start + at
    raise Refused(f"the C library of {host.title} is none that is known here", _INSTEAD)


def _python_version(mapped: tuple[elf.Mapping, ...]) -> tuple[int, int] | None:
    """From the names of its files, which carry it: libpython3.11.so, python2.7, lib/python3.11/…, ….cpython-311-….so"""
    for mapping in mapped:
        match = _VERSION_IN_PATH.search(Path(mapping.path).name) or _VERSION_IN_PATH.search(mapping.path)
        if match is not None:
            return int(match[1]), int(match[2])
    return None


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
