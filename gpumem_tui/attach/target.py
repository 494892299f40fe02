"""Whether the probe can be put into a running process, where that has the functions to call, and if not, why."""

from __future__ import annotations

import os
import platform
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.hash import ELFHashSection, GNUHashSection

from gpumem_tui.attach.ptrace import SIGNAL_RETURN
from gpumem_tui.system import user_name
from gpumem_tui.watch import hosts

_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) ([0-9a-f]+) \S+ \d+ +(\S.*)")
_PAGE = 4096
_CODE_BYTES = 16


@dataclass(frozen=True)
class Mapping:
    """A part of a process's address space; `path` is a file as the process names it, or ``[vdso]`` and the like."""

    start: int
    end: int
    offset: int
    path: str
    is_code: bool = False


@dataclass(frozen=True)
class Symbol:
    """A function of the running process, or a variable of it.

    Attributes:
        address: in the process.
        code: its first bytes in the file; the process must have the same ones there, or the file is another by now.
    """

    address: int
    code: bytes


def mappings(proc: Path) -> tuple[Mapping, ...]:
    """List the named parts of the address space of the process at `proc` (``/proc/PID``), lowest first.

    Raises:
        OSError: it is gone, or is not ours to read.
    """
    found = (_LINE.match(line) for line in (proc / "maps").read_text(errors="surrogateescape").splitlines())
    return tuple(
        Mapping(int(match[1], 16), int(match[2], 16), int(match[4], 16), match[5], "x" in match[3])
        for match in found
        if match
    )


def symbols(proc: Path, first: Mapping, names: tuple[str, ...]) -> dict[str, Symbol]:
    """Find those of `names` that the file behind `first`, its lowest mapping, exports; none in a file that is no ELF.

    Raises:
        OSError: the file cannot be read.
    """
    path = proc / "root" / first.path.lstrip("/")
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)  # opens no device: something else may have that name by now
    try:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            return {}
        descriptor = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(place)
    with os.fdopen(descriptor, "rb") as file:
        try:
            elf = ELFFile(file)
            bias = _bias(elf, first)
            return {name: symbol for name in names for symbol in _lookup(elf, name, bias)}
        except ELFError:
            return {}


def _bias(elf: ELFFile, first: Mapping) -> int:
    """Work out what the loader added to every address of the file."""
    for segment in elf.iter_segments("PT_LOAD"):
        if segment["p_offset"] // _PAGE * _PAGE == first.offset:
            return first.start - int(segment["p_vaddr"]) // _PAGE * _PAGE
    raise ELFError("no segment begins where the mapping does")


def _lookup(elf: ELFFile, name: str, bias: int) -> Iterator[Symbol]:
    """Yield the symbol, if the file defines it; by the hash table, as the loader does: a Python exports thousands."""
    for table in (".gnu.hash", ".hash"):
        section = elf.get_section_by_name(table)
        found = section.get_symbol(name) if isinstance(section, (GNUHashSection, ELFHashSection)) else None
        if found is not None and found["st_shndx"] != "SHN_UNDEF":
            value = found["st_value"]
            offset = next(elf.address_offsets(value), None)
            if offset is not None:
                elf.stream.seek(offset)
                yield Symbol(bias + value, elf.stream.read(_CODE_BYTES))
            return


# Whether it can be attached to

OLDEST_PYTHON = (3, 9)
_FUNCTIONS = ("Py_IsInitialized", "Py_AddPendingCall", "PyRun_SimpleString")
_VERSION_IN_PATH = re.compile(r"(?:python|cpython-)([23])\.?(\d{1,2})")
_HELPER = os.path.join("attach", "ptrace.py")
_OTHER_ATTACH_S, _POLL_S = 10.0, 0.01
_C_LIBRARY = re.compile(r"(libc|ld-musl)[-.]")  # libc.so.6, libc-2.31.so, ld-musl-x86_64.so.1
LIST_LIVING = "`gpumem-tui monitor --once` lists the processes that train"
"""The remedy for a process that nothing can be put into."""
INSTEAD = "start it with `gpumem-tui run -- COMMAND`, or add `import gpumem_tui; gpumem_tui.attach()` to its code"


class NotAttached(Exception):
    """The probe is not in this process; one line gives the reason, and what would help.

    Attributes:
        instead: the processes to attach to instead: its children that train.
    """

    def __init__(self, reason: str, remedy: str, instead: tuple[hosts.Host, ...] = ()) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason
        self.remedy = remedy
        self.instead = instead


class AttachRefused(NotAttached):
    """It cannot be put in, and nothing was tried."""


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
        AttachRefused: the probe cannot be put into it.
    """
    host = hosts.find(pid, proc)
    if host is None:
        raise AttachRefused(f"there is no process {pid}", LIST_LIVING)
    _check_state(host)
    if host.is_kernel_thread:
        raise AttachRefused(f"{host.title} is a thread of the kernel, no Python process", LIST_LIVING)
    if hosts.is_launcher(host):
        found = hosts.trainers(host.pid, host.proc.parent)
        remedy = f"attach to {named(found)}" if found else "attach to the processes that it starts, once they train"
        raise AttachRefused(f"{host.title} starts the processes that train and trains nothing itself", remedy, found)
    try:
        mapped = mappings(host.proc)
        python = _python_version(mapped)
        if python is not None and python < OLDEST_PYTHON:
            raise AttachRefused(
                f"{host.title} runs Python {python[0]}.{python[1]}; the probe needs 3.9 or later",
                "train with a newer Python",
            )
        functions = _python_functions(host, mapped)
        with (host.proc / "mem").open("rb", buffering=0) as memory:
            for symbol in functions.values():
                memory.seek(symbol.address)
                if memory.read(len(symbol.code)) != symbol.code:
                    raise AttachRefused(f"the Python of {host.title} was replaced since it started", INSTEAD)
        map_memory, signal_return = _of_c_library(host, mapped)
    except PermissionError:
        raise refusal(host) from None
    except (FileNotFoundError, ProcessLookupError):
        raise AttachRefused(f"{host.title} has ended", LIST_LIVING) from None
    except OSError as error:  # EIO: it unmaps that memory just now, or ends
        raise AttachRefused(f"the memory of {host.title} cannot be read: {error.strerror}", INSTEAD) from None
    if platform.machine() != "x86_64":
        raise AttachRefused(f"attaching works on x86-64 only, and this machine is {platform.machine()}", INSTEAD)
    ready, add, run = (functions[name].address for name in _FUNCTIONS)
    return Target(
        host=host,
        python=python,
        map_memory=map_memory,
        signal_return=signal_return,
        is_ready=ready,
        add_pending=add,
        run_string=run,
    )


def why_not_allowed(host: hosts.Host, our_uid: int, ptrace_scope: int, protected: bool) -> AttachRefused:
    """Why the kernel does not let us attach.

    Args:
        ptrace_scope: Yama's setting; 0 where there is no Yama.
        protected: the process is not dumpable (set-uid, or by its own wish).
    """
    sudo = f"run `sudo gpumem-tui attach {host.pid}`"
    if our_uid not in (0, host.uid):
        owner = user_name(host.uid)
        return AttachRefused(f"{host.title} belongs to user {owner}, and only that user or root may attach", sudo)
    if ptrace_scope >= 3:
        return AttachRefused("the kernel forbids attaching until the next boot (kernel.yama.ptrace_scope = 3)", INSTEAD)
    if ptrace_scope == 2 and our_uid != 0:
        return AttachRefused("only root may attach here (kernel.yama.ptrace_scope = 2)", f"{sudo}, or {INSTEAD}")
    if protected:
        return AttachRefused(f"{host.title} is protected against debuggers (not dumpable)", f"{sudo}, or {INSTEAD}")
    if ptrace_scope == 1 and our_uid != 0:
        return AttachRefused(
            "only a parent may attach to a process here (kernel.yama.ptrace_scope = 1)",
            f"{sudo}, or `sudo sysctl kernel.yama.ptrace_scope=0`, or {INSTEAD}",
        )
    if not hosts.is_python(host, hosts.loaded(host)):
        return AttachRefused(
            f"{host.title} is no Python process by its name, and the kernel does not let us look into it", sudo
        )
    return AttachRefused(
        f"the kernel does not let us attach to {host.title}",
        f"in a container, give it `--cap-add SYS_PTRACE`; or {INSTEAD}",
    )


def refusal(host: hosts.Host) -> AttachRefused:
    """Why the kernel did not let us attach to that process, from /proc."""
    try:
        scope = int((host.proc.parent / "sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0
    protected = (host.proc / "maps").stat().st_uid != host.uid  # root's, once the process may not be dumped
    return why_not_allowed(host, os.geteuid(), scope, protected)


def is_being_attached_to(host: hosts.Host) -> bool:
    """Return whether another attach is stopping this process just now, which takes milliseconds."""
    tracer = hosts.find(host.tracer_pid, host.proc.parent) if host.tracer_pid else None
    return tracer is not None and any(word.endswith(_HELPER) for word in tracer.command)


def named(found: tuple[hosts.Host, ...]) -> str:
    """Name processes in a few words, at most four of them."""
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return ", ".join(host.title for host in found[:4]) + more


def _check_state(host: hosts.Host) -> None:
    if host.state == "Z":
        raise AttachRefused(f"{host.title} has ended", LIST_LIVING)
    deadline = time.monotonic() + _OTHER_ATTACH_S
    while is_being_attached_to(host) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        host = hosts.find(host.pid, host.proc.parent) or host
    if host.tracer_pid:
        tracer = hosts.find(host.tracer_pid, host.proc.parent)
        by = tracer.title if tracer is not None else f"PID {host.tracer_pid}"
        raise AttachRefused(f"{host.title} is being debugged by {by}", f"end that first: `kill {host.tracer_pid}`")
    if host.state == "T":
        raise AttachRefused(f"{host.title} is stopped", f"let it continue first: `kill -CONT {host.pid}`")


def _python_functions(host: hosts.Host, mapped: tuple[Mapping, ...]) -> dict[str, Symbol]:
    """Find the interpreter's functions in whichever file exports them all: the executable or a libpython."""
    executable = os.readlink(host.proc / "exe")
    first = {mapping.path: mapping for mapping in reversed(mapped)}
    candidates = [path for path in first if path == executable or "python" in Path(path).name.lower()]
    for path in candidates:
        if path.endswith(" (deleted)"):
            raise AttachRefused(f"the Python of {host.title} was replaced since it started", INSTEAD)
        found = symbols(host.proc, first[path], _FUNCTIONS)
        if len(found) == len(_FUNCTIONS):
            return found
    if any("python" in Path(path).name.lower() for path in candidates):
        raise AttachRefused(f"the Python of {host.title} exports no functions (a static build)", INSTEAD)
    below = hosts.trainers(host.pid, host.proc.parent)
    raise AttachRefused(
        f"{host.title} is no Python process", f"attach to {named(below)}" if below else LIST_LIVING, below
    )


def _of_c_library(host: hosts.Host, mapped: tuple[Mapping, ...]) -> tuple[int, int]:
    """Return where its C library has `mmap`, and where it ends a signal handler."""
    first = {mapping.path: mapping for mapping in reversed(mapped)}
    libraries = [path for path in first if _C_LIBRARY.match(Path(path).name)]
    with (host.proc / "mem").open("rb", buffering=0) as memory:
        for path in libraries:
            found = symbols(host.proc, first[path], ("mmap",))
            for code in mapped if found else ():
                if code.path == path and code.is_code:
                    at = os.pread(memory.fileno(), code.end - code.start, code.start).find(SIGNAL_RETURN)
                    if at >= 0:
                        return found["mmap"].address, code.start + at
    raise AttachRefused(f"the C library of {host.title} is not one that the probe can be put into", INSTEAD)


def _python_version(mapped: tuple[Mapping, ...]) -> tuple[int, int] | None:
    """Read the version in the names of its files: libpython3.11.so, python2.7, lib/python3.11/…, ….cpython-311-….so."""
    for mapping in mapped:
        match = _VERSION_IN_PATH.search(Path(mapping.path).name) or _VERSION_IN_PATH.search(mapping.path)
        if match is not None:
            return int(match[1]), int(match[2])
    return None
