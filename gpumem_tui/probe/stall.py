"""Where a program whose steps have stopped is: the training thread's stack, read by a thread that sleeps until then.

Standard library only, Python 3.9.
"""

from __future__ import annotations

import _thread
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

from gpumem_tui.probe.steps import StepCount
from gpumem_tui.probe.wire import Stall
from gpumem_tui.step.sites import is_installed, is_own

EVERY_S = 5.0
"""Between two looks at whether steps continue, which is all that the thread does while they do."""
STOPPED_S = 10.0
"""Without a step for so long, the stack is looked at."""
_TOLD_AGAIN_S = 30.0
_BUSY_SHARE = 0.1
"""Share of the time between two looks: a thread that computed for less is idle. A busy machine gives it no more."""
_MOST_FRAMES, _LONGEST = 40, 200

_COLLECTIVE = re.compile(r"torch[/\\]distributed[/\\]distributed_c10d\.py$")
_DISTRIBUTED = re.compile(r"torch[/\\]distributed[/\\]")
_PHASES = (
    ("backward", re.compile(r"torch[/\\]autograd[/\\](?:__init__|graph|function)\.py$"), ("__call__",)),
    ("optimizer", re.compile(r"torch[/\\]optim[/\\]"), ()),
    ("batch", re.compile(r"torch[/\\]utils[/\\]data[/\\]"), ()),
    ("forward", re.compile(r"torch[/\\]nn[/\\]modules[/\\]module\.py$"), ()),
)
"""By a file of torch's that is on the stack, but for functions that are passed through elsewhere too; of several phases
the first here, as what is recomputed in backward is of it."""


class Watchdog:
    """Publishes where the training thread is, once no step has ended for a while.

    Args:
        steps: those of the process. Nothing of it is changed here.
        publish: called in the thread, with what is new; raises nothing.
        waits: the thread sleeps in it, for so many seconds.
    """

    def __init__(
        self, steps: StepCount, publish: Callable[[Stall], None], waits: Callable[[float], None] = time.sleep
    ) -> None:
        self._steps, self._publish, self._sleep = steps, publish, waits
        self._trains = self._native = 0
        self._pid = 0
        self._is_over = False

    def follow(self) -> None:
        """Take this thread for the one that trains, and begin to watch it. Takes next to nothing.

        It is no `threading.Thread`: a program that lists or counts its threads need not see it.
        """
        self._trains, self._native = threading.get_ident(), threading.get_native_id()
        if self._pid != os.getpid() and not self._is_over:
            self._pid = os.getpid()
            _thread.start_new_thread(self._watch, (self._pid,))

    def end(self) -> None:
        """Publish nothing any more."""
        self._is_over = True

    def _watch(self, pid: int) -> None:
        seen, since, told, told_at = (0, 0, 0), time.monotonic(), None, 0.0
        computed_s, looked = 0.0, time.monotonic()
        while not self._is_over and os.getpid() == pid:
            self._sleep(EVERY_S)
            now, before_s = time.monotonic(), computed_s
            computed_s = _thread_time(self._native)
            is_busy = computed_s - before_s > _BUSY_SHARE * (now - looked)
            looked = now
            steps = self._steps.mark
            if steps != seen:
                seen, since, told = steps, now, None
            elif now - since >= STOPPED_S and not self._is_over:
                frame = sys._current_frames().get(self._trains)
                stands = None if frame is None else _stall(frame, is_busy)
                frame = None  # a frame holds its variables
                if stands is not None and (stands != told or now - told_at >= _TOLD_AGAIN_S):
                    told, told_at = stands, now
                    self._publish(
                        replace(stands, step=self._steps.seen, wall_ns=time.time_ns(), monotonic_ns=time.monotonic_ns())
                    )


def _thread_time(native: int) -> float:
    """Return the processor seconds of a thread, from /proc/PID/task/TID/schedstat; 0 where they cannot be told."""
    try:
        with open(f"/proc/self/task/{native}/schedstat", "rb") as file:
            return int(file.read().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):  # the thread has ended, or this kernel does not tell
        return 0.0


def _stall(innermost: FrameType, is_busy: bool) -> Stall:
    """Return where a thread is, without times."""
    stack: list[str] = []
    source = function = collective = ""
    library: tuple[str, str] | None = None
    phases, is_distributed = set(), False
    frame: FrameType | None = innermost
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if len(stack) < _MOST_FRAMES:
            stack.append(f"{path}:{frame.f_lineno} {name}"[-_LONGEST:])
        if not source and is_own(path):
            place = f"{os.path.basename(path)}:{frame.f_lineno}"[-_LONGEST:], name[:_LONGEST]
            source, function = ("", "") if is_installed(path) else place
            library = library or place
        if not source and _DISTRIBUTED.search(path):
            is_distributed = True
            if _COLLECTIVE.search(path) and not name.startswith("_"):
                collective = name  # the outermost of them: what the program called
        phases |= {phase for phase, found, passing in _PHASES if name not in passing and found.search(path)}
        frame = frame.f_back
    if not source and library is not None:
        source, function = library
    return Stall(
        step=0,
        wall_ns=0,
        monotonic_ns=0,
        phase=next((phase for phase, *_ in _PHASES if phase in phases), ""),
        collective=collective or ("torch.distributed" if is_distributed else ""),
        source=source,
        function=function,
        busy=is_busy,
        stack=tuple(stack),
    )
