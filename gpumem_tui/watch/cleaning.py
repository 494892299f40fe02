"""Old files of processes that have ended. They are kept for a while: after a crash they are the black box.

A probe does not remove its own: viewers show how its process ended. The next `run`, `watch` or Monitor does.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gpumem_tui.probe.files import start_ticks
from gpumem_tui.probe.folder import Folder, WireError
from gpumem_tui.watch import hosts
from gpumem_tui.watch.records import ProbedProcess, State

KEEP_S = 7 * 24 * 3600.0
KEEP_ENDED_S = 3600.0
"""Of a process that ended as it should: nobody asks long after what its last sample was."""
KEEP_PROCESSES = 20


_ATTACH_S = 600.0
"""An attach that takes longer has been given up; its answer may still come."""
_OF_PROCESS = re.compile(r"\.?(\d+)-(\d+)\.")
_OF_ATTACH = re.compile(r"\.(attach|probe)(-[0-9a-f]+)?\.(json|zip)$")
_OLDER_ARCHIVE = re.compile(r"probe-.*\.zip")
"""As earlier versions named it."""


def clean(processes: tuple[ProbedProcess, ...], now_s: float | None = None, directories: Iterable[Path] = ()) -> int:
    """Remove our own files of processes that ended: as they should, an hour later; otherwise, a week later.

    Of more than twenty that ended, the last twenty are kept at most. What attaching has left goes once its process has,
    and an answer that nobody waits for any more.

    Args:
        processes: as a `Watcher` found them.
        directories: where to look for what attaching has left; besides those of the processes.
        now_s: seconds since the epoch; now by default.

    Returns:
        How many processes were forgotten.
    """
    now_s = time.time() if now_s is None else now_s
    ended = [process for process in processes if not process.is_running and process.uid == os.geteuid()]
    last_first = sorted(ended, key=_last_sign_s, reverse=True)
    old = [
        process
        for place, process in enumerate(last_first)
        if place >= KEEP_PROCESSES or now_s - _last_sign_s(process) > _keep_s(process)
    ]
    for process in old:
        _remove(process)
    own = {process.files.directory for process in processes if process.uid == os.geteuid()}
    for directory in own | set(directories):
        _remove_left_by_attaching(directory, now_s)
    return len(old)


def _remove_left_by_attaching(directory: Path, now_s: float) -> None:
    with suppress(OSError, WireError), Folder(directory, (os.geteuid(),)) as folder:
        for name in folder.names():
            named = _OF_PROCESS.match(name)
            is_old = now_s - folder.status(name).st_mtime > _ATTACH_S
            is_archive = name.endswith(".zip")
            if is_archive and _OLDER_ARCHIVE.fullmatch(name):
                gone = is_old
            elif named is not None and _OF_ATTACH.search(name):
                gone = is_old and (not is_archive or not _lives(int(named[1]), int(named[2])))
            else:
                continue
            if gone:
                folder.remove(name)


def _lives(pid: int, ticks: int) -> bool:
    """Whether that process is there, in a container too: an archive is what it imports the probe from."""
    try:
        if start_ticks(pid) == ticks:
            return True
    except (OSError, WireError):
        pass
    return any((host.inner_pid, host.start_ticks) == (pid, ticks) for host in hosts.every())


def _keep_s(process: ProbedProcess) -> float:
    return KEEP_ENDED_S if process.state is State.ENDED else KEEP_S


def _last_sign_s(process: ProbedProcess) -> float:
    """When it was last heard of, in seconds since the epoch."""
    newest = max((sample.record.wall_ns for sample in process.samples), default=process.process.started_ns)
    return newest / 1e9


def _remove(process: ProbedProcess) -> None:
    """Every file of a process, leftovers of interrupted writes included; the ring last, as it names the others."""
    files = process.files
    begins = f"{files.pid}-{files.start_ticks}."
    with suppress(OSError, WireError), Folder(files.directory, (process.uid,)) as folder:
        beside = [name for name in folder.names() if name.lstrip(".").startswith(begins)]
        for name in sorted(beside, key=lambda name: name == files.ring.name):
            with suppress(OSError):
                folder.remove(name)
