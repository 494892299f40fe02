"""What kind of program a process runs, as far as that can be told from outside, and which of its children train."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path

from gpumem_tui.watch import hosts

_PYTHON = re.compile(r"(?:lib)?(?:python|pypy)[\d.]*t?(?:\.so[\d.]*)?")
_LAUNCHERS = frozenset(
    {
        "torchrun",
        "torch.distributed.run",
        "torch.distributed.launch",
        "accelerate",
        "accelerate-launch",
        "accelerate.commands.accelerate_cli",
        "accelerate.commands.launch",
        "deepspeed",
        "deepspeed.launcher.launch",
        "deepspeed.launcher.runner",
        "horovodrun",
    }
)
_NOTEBOOKS = frozenset({"ipykernel_launcher", "ipykernel", "colab_kernel_launcher"})
_TAKES_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})


def script(command: tuple[str, ...]) -> str:
    """What a Python of that command line runs: a module's full name, or a file's name without ``.py``.

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


def is_launcher(host: hosts.Host) -> bool:
    """Whether it starts the processes that train and trains nothing itself."""
    return script(host.command) in _LAUNCHERS


def is_notebook(host: hosts.Host) -> bool:
    """Whether it is the process behind a notebook, which computes while a cell runs."""
    return script(host.command) in _NOTEBOOKS


def loaded(host: hosts.Host) -> frozenset[str]:
    """The names of the files that it has mapped into its memory; empty where we may not look."""
    try:
        lines = (host.proc / "maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return frozenset()
    return frozenset(Path(line.split(maxsplit=5)[5]).name for line in lines if "/" in line)


def is_python(host: hosts.Host, files: frozenset[str]) -> bool:
    """Whether it is a Python process.

    Args:
        files: what `loaded` says of it.
    """
    try:
        names = [os.readlink(host.proc / "exe")]
    except OSError:  # not ours to look into: what it calls itself may be a thread's name, so its command line too
        names = [host.name, *host.command[:1]]
    return any(_PYTHON.fullmatch(os.path.basename(name)) for name in (*names, *files))


def has_torch(files: frozenset[str]) -> bool:
    """Whether a process that has loaded these files has imported torch."""
    return any(name.startswith("libtorch") for name in files)


def descendants(pid: int, proc: Path = hosts.PROC) -> list[hosts.Host]:
    """The children of a process, theirs and so on, as they are now; parents before their children."""
    children: dict[int, list[hosts.Host]] = defaultdict(list)
    for host in hosts.every(proc):
        children[host.parent_pid].append(host)
    found = list(children[pid])
    for host in found:
        found += children[host.pid]
    return found


def trainers(pid: int, proc: Path = hosts.PROC) -> tuple[hosts.Host, ...]:
    """The descendants of a process that may train: Python processes with torch. Not those that one of them forked to
    load its data, nor launchers."""
    found: dict[int, hosts.Host] = {}
    for host in descendants(pid, proc):
        forked = host.parent_pid in found and found[host.parent_pid].command == host.command
        if not forked and not is_launcher(host) and host.state != "Z" and has_torch(loaded(host)):
            found[host.pid] = host
    return tuple(found.values())
