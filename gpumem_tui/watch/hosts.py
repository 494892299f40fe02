"""A process as /proc shows it: whose it is, what it runs, and where its probe publishes, seen from here.

A process may live in a container: it then has another pid, another user number and another file system than the ones we
know it by. Names with `inner` are as the process itself sees them.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from msgspec import Struct

from gpumem_tui.probe.files import Files
from gpumem_tui.text import shortened

PROC = Path("/proc")
_KERNEL_THREAD = 0x00200000
"""PF_KTHREAD (include/linux/sched.h), in the flags of /proc/PID/stat."""


class Host(Struct, frozen=True):
    """A running process, as the kernel of its machine describes it.

    Attributes:
        proc: its folder in /proc.
        start_ticks: with the pid, a name that is never used twice.
        state: a letter: R runs, S sleeps, D waits in the kernel, T is stopped, t is traced, Z has ended.
        tracer_pid: who debugs it; 0 for nobody.
        is_kernel_thread: it has no program and no memory of its own.
        command: its command line; empty for a kernel thread.
    """

    proc: Path
    pid: int
    start_ticks: int
    uid: int
    state: str
    tracer_pid: int
    parent_pid: int
    is_kernel_thread: bool
    inner_pid: int
    name: str
    command: tuple[str, ...]

    @property
    def title(self) -> str:
        """The process in a few words: ``PID 123 (python train.py)``."""
        return f"PID {self.pid} ({shortened(' '.join(self.command) or self.name)})"

    @property
    def shares_files(self) -> bool:
        """Return whether it sees the same files as we do, under the same names."""
        return shares_files(self.proc)

    @property
    def inner_uid(self) -> int:
        """The number of its user as the process knows it."""
        try:
            lines = (self.proc / "uid_map").read_text().splitlines()
        except OSError:
            return self.uid
        for inner, outer, count in (map(int, line.split()) for line in lines):
            if outer <= self.uid < outer + count:
                return inner + self.uid - outer
        return self.uid

    @property
    def inner_directory(self) -> Path:
        """The folder where the probe publishes, as the process names it."""
        chosen = self.environ().get("GPUMEM_TUI_DIR")
        if not chosen:
            return Path(f"/tmp/gpumem-tui-{self.inner_uid}")  # noqa: S108 - checked by `Folder`
        try:
            return Path(os.readlink(self.proc / "cwd"), chosen)  # of two absolute paths, the second one
        except OSError:
            return Path(chosen)

    @property
    def files(self) -> Files:
        """The files of its probe, by names that we can open."""
        directory = self.inner_directory
        if not self.shares_files:
            directory = self.proc / "root" / str(directory).lstrip("/")
        return Files(directory, self.inner_pid, self.start_ticks)

    def environ(self) -> dict[str, str]:
        """Return the environment that it was started with; empty where we may not read it."""
        return environ(self.proc)


def environ(folder: Path) -> dict[str, str]:
    """Return the environment that the process of a folder in /proc was started with; empty where we may not read it."""
    try:
        data = (folder / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in os.fsdecode(data).split("\0") if "=" in entry)
    return {name: value for name, _, value in pairs}


def shares_files(folder: Path | str) -> bool:
    """Return whether the process of a folder in /proc sees the same files as we do, under the same names."""
    try:
        return all(os.readlink(f"{folder}/{link}") == seen for link, seen in _own_files().items())
    except OSError:
        return True  # not ours to look into: its files are neither


@cache
def _own_files() -> dict[str, str]:
    """Return which files we see, by the links that say so of every process."""
    return {link: os.readlink(f"{PROC}/self/{link}") for link in ("ns/mnt", "root")}


def every(proc: Path = PROC) -> Iterator[Host]:
    """Yield all processes, as far as they can be seen."""
    for name in os.listdir(proc):
        host = find(int(name), proc) if name.isdecimal() else None
        if host is not None:
            yield host


def find(pid: int, proc: Path = PROC) -> Host | None:
    """Look up the process of that pid; None if it is gone."""
    folder = proc / str(pid)
    try:
        status = dict(line.partition(":")[::2] for line in _text(folder / "status").split("\n"))
        stat = _text(folder / "stat")
        command = _text(folder / "cmdline")
    except OSError:
        return None
    after_name = stat[stat.rindex(")") + 2 :].split()
    return Host(
        proc=folder,
        pid=pid,
        start_ticks=int(after_name[19]),
        uid=int(status["Uid"].split()[1]),
        state=status["State"].split()[0],
        tracer_pid=int(status.get("TracerPid", "0")),
        parent_pid=int(after_name[1]),
        is_kernel_thread=bool(int(after_name[6]) & _KERNEL_THREAD),
        inner_pid=int(status.get("NSpid", str(pid)).split()[-1]),
        name=status["Name"].strip(),
        command=tuple(command.rstrip("\0").split("\0")) if command else (),
    )


def _text(path: Path) -> str:
    """Read what the kernel reports there; names in it are the processes' own, and cut to 15 bytes wherever that is."""
    return os.fsdecode(path.read_bytes())


# Its program

_PYTHON = re.compile(r"(?:lib)?(?:python|pypy)[\d.]*t?(?:\.so[\d.]*)?")
_NOTEBOOKS = frozenset({"ipykernel_launcher", "ipykernel", "colab_kernel_launcher"})
_TAKES_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})


def script(command: tuple[str, ...]) -> str:
    """Tell what a Python of that command line runs: a module's full name, or a file's name without ``.py``.

    ``torchrun`` of ``/usr/bin/python3 -u /usr/bin/torchrun train.py``; empty for `python -c`.
    """
    words = iter(command)
    if not _PYTHON.fullmatch(os.path.basename(next(words, ""))):
        return os.path.basename(command[0]) if command else ""
    for word in words:
        if word in _TAKES_VALUE:
            next(words, None)
        elif word == "-m":
            return next(words, "")
        elif not word.startswith("-"):
            return os.path.basename(word).removesuffix(".py")
        elif word.endswith("c"):
            return ""
    return ""


def is_launcher(host: Host) -> bool:
    """Return whether the process starts those that train and trains nothing itself."""
    from gpumem_tui import launchers

    return script(host.command) in launchers.NAMES


def is_notebook(host: Host) -> bool:
    """Return whether the process is behind a notebook, and computes while a cell runs."""
    return script(host.command) in _NOTEBOOKS


def loaded(host: Host) -> frozenset[str]:
    """Return the names of the files that it has mapped into its memory; empty where we may not look."""
    try:
        lines = (host.proc / "maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return frozenset()
    return frozenset(Path(line.split(maxsplit=5)[5]).name for line in lines if "/" in line)


def is_python(host: Host, files: frozenset[str]) -> bool:
    """Return whether the process is a Python interpreter.

    Args:
        files: what `loaded` states of it.
    """
    try:
        names = [os.readlink(host.proc / "exe")]
    except OSError:  # not ours to look into: what it calls itself may be a thread's name, so its command line too
        names = [host.name, *host.command[:1]]
    return any(_PYTHON.fullmatch(os.path.basename(name)) for name in (*names, *files))


def has_torch(files: frozenset[str]) -> bool:
    """Return whether a process that has loaded these files has imported torch."""
    return any(name.startswith("libtorch") for name in files)


def descendants(pid: int, proc: Path = PROC) -> list[Host]:
    """List the children of a process, theirs and so on, as they are now; parents before their children."""
    children: dict[int, list[Host]] = defaultdict(list)
    for host in every(proc):
        children[host.parent_pid].append(host)
    found = list(children[pid])
    for host in found:
        found += children[host.pid]
    return found


def trainers(pid: int, proc: Path = PROC) -> tuple[Host, ...]:
    """List the descendants of a process that may train: Python processes with torch.

    Processes forked to load data are left out, and so are launchers.
    """
    found: dict[int, Host] = {}
    for host in descendants(pid, proc):
        forked = host.parent_pid in found and found[host.parent_pid].command == host.command
        if not forked and not is_launcher(host) and host.state != "Z" and has_torch(loaded(host)):
            found[host.pid] = host
    return tuple(found.values())
