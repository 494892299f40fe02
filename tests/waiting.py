"""Waiting for what other processes and threads do: for a condition, never for a time.

The deadline only ends a test that would wait for ever; it is for a machine on which everything takes very long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

DEADLINE_S = 120.0

_T = TypeVar("_T")


def wait_until(
    there: Callable[[], _T], what: str = "what is waited for", deadline_s: float = DEADLINE_S, every_s: float = 0.02
) -> _T:
    """Ask until the answer is true, and return it.

    Raises:
        AssertionError: it was not by the deadline.
    """
    end = time.monotonic() + deadline_s
    while not (answer := there()):
        assert time.monotonic() < end, f"{what} did not come about within {deadline_s:.0f} s"
        time.sleep(every_s)
    return answer


def wait_for_file(path: Path) -> None:
    """Until a file or folder is there, and a file has content."""
    wait_until(lambda: path.exists() and path.stat().st_size, str(path))


def wait_until_gone(pids: list[int]) -> None:
    """Until none of these processes runs any more; one that nobody has waited for runs no more."""
    wait_until(lambda: not any(map(runs, pids)), f"the end of {pids}")


def runs(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
