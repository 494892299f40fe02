"""Old files of processes that have ended. They are kept for a while: after a crash they are the black box.

A probe does not remove its own: viewers show how its process ended. The next `run`, `watch` or Monitor does.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from gpumem_tui.probe.folder import Folder, WireError
from gpumem_tui.watch.records import ProbedProcess, State

KEEP_S = 7 * 24 * 3600.0
KEEP_ENDED_S = 3600.0
"""Of a process that ended as it should: nobody asks long after what its last sample was."""
KEEP_PROCESSES = 20


def clean(processes: tuple[ProbedProcess, ...], now_s: float | None = None) -> int:
    """Remove our own files of processes that ended: as they should, an hour later; otherwise, a week later.

    Of more than twenty that ended, the last twenty are kept at most.

    Args:
        processes: as a `Watcher` found them.
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
    return len(old)


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
