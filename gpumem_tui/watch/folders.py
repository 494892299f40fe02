"""The folder that probes publish in: whether it can be used, and which of its files go.

Files of processes that ended are kept for a while, as after a crash they say what there was. A probe does not remove
its own: viewers show how its process ended. The next `run` or `watch` removes them, and the Monitor where any ring is.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from gpumem_tui.memory import format_bytes
from gpumem_tui.probe.files import Folder, WireError, check_directory, default_directory
from gpumem_tui.probe.wire import RING_BYTES
from gpumem_tui.watch import hosts
from gpumem_tui.watch.records import ProbedProcess, ProcessState


def why_unusable(directory: Path) -> str:
    """Say why no process of this user can publish in a folder; empty if one can. A missing folder is not made."""
    try:
        check_directory(directory, (os.getuid(),))
        return full_reason(directory, os.statvfs(directory))
    except FileNotFoundError:
        try:  # to make another folder there: permissions alone do not say, as nobody makes a folder in /proc
            above = directory.parent
            while not above.exists():
                above = above.parent
            os.rmdir(tempfile.mkdtemp(prefix=".gpumem-tui-", dir=above))
            return full_reason(above, os.statvfs(above))
        except OSError as error:
            return f"{directory} cannot be made: {error.strerror}"
    except WireError as error:
        return str(error)
    except OSError as error:
        return f"{directory}: {error.strerror}"


def full_reason(directory: Path, found: os.statvfs_result) -> str:
    """Say why no other process can publish in a folder, if its file system is full; empty if it is not."""
    free_bytes = found.f_bavail * found.f_frsize
    if free_bytes >= RING_BYTES:
        return ""
    needed = format_bytes(RING_BYTES)
    return f"{directory} is full ({format_bytes(free_bytes)} free, {needed} needed): no other process can publish there"


# Removing what processes left that have ended

KEEP_S = 7 * 24 * 3600.0
KEEP_ENDED_S = 3600.0
"""Seconds to keep a process that ended as it should: nobody asks for its last sample later."""
KEEP_PROCESSES = 20
_OF_A_PROCESS = re.compile(r"\.?(\d{1,10})-(\d{1,19})\.")


def clean(processes: tuple[ProbedProcess, ...], now_s: float | None = None, directory: Path | None = None) -> int:
    """Remove this user's files of processes that ended: an hour after a normal end, a week after any other.

    At most the last twenty that ended are kept. Files of processes that were attached to and never
    published (the probe that was sent, an answer that came too late) go an hour after those ended.

    Args:
        processes: as a `Watcher` found them.
        now_s: seconds since the epoch; now by default.
        directory: where such files may be; by default where our probes publish.

    Returns:
        How many processes were forgotten.
    """
    now_s = time.time() if now_s is None else now_s
    ended = [process for process in processes if not process.is_running and process.uid == os.geteuid()]
    last_first = sorted(ended, key=_last_heard_s, reverse=True)
    old = [
        process
        for place, process in enumerate(last_first)
        if place >= KEEP_PROCESSES
        or now_s - _last_heard_s(process) > (KEEP_ENDED_S if process.state is ProcessState.ENDED else KEEP_S)
    ]
    for process in old:
        _remove(process)
    publish = {process.key for process in processes}
    with suppress(OSError, WireError), Folder(directory or default_directory(), (os.geteuid(),)) as folder:
        _remove_strays(folder, publish, now_s)
    return len(old)


def _remove_strays(folder: Folder, publish: Collection[tuple[int, int]], now_s: float) -> None:
    """Remove files of processes that have ended and never published."""
    strays: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name in folder.names():
        named = _OF_A_PROCESS.match(name)
        key = (int(named[1]), int(named[2])) if named else (0, 0)
        if named is None or key in publish:
            continue
        with suppress(FileNotFoundError):
            if now_s - folder.status(name).st_mtime > KEEP_ENDED_S:
                strays[key].append(name)
    living = {(host.inner_pid, host.start_ticks) for host in hosts.every()} if strays else set()
    for name in (name for key, names in strays.items() if key not in living for name in names):
        with suppress(OSError):
            folder.remove(name)


def _last_heard_s(process: ProbedProcess) -> float:
    """Return when its probe last wrote, in seconds since the epoch."""
    newest = max((sample.record.wall_ns for sample in process.samples), default=process.process.started_ns)
    return newest / 1e9


def _remove(process: ProbedProcess) -> None:
    """Remove every file of a process, leftovers of interrupted writes too; the ring last, as it names the others."""
    files = process.files
    begins = f"{files.pid}-{files.start_ticks}."
    with suppress(OSError, WireError), Folder(files.directory, (process.uid,)) as folder:
        beside = [name for name in folder.names() if name.lstrip(".").startswith(begins)]
        for name in sorted(beside, key=lambda name: name == files.ring.name):
            with suppress(OSError):
                folder.remove(name)
