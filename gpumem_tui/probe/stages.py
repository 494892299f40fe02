"""The peak of each stage of a run, by the allocator's own counter of its peak, which nothing here resets.

A stage that raises the counter has that peak. Any other has at least the bytes allocated when it began and ended, and
at most the counter. Figures are read as a stage begins and ends, and at each sample.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from gpumem_tui.probe import allocator
from gpumem_tui.probe.compiler import invisible, uncompiled
from gpumem_tui.probe.wire import StagePeak
from gpumem_tui.step import RunStage
from gpumem_tui.step.stages import StageHooks

READ_SHARE = 1 / 1000
READ_ALLOWANCE_S = 0.25
"""Readings between samples take at most this share of the time since the first, and this much beyond it."""
_ROLLOUT_EVERY = 32
"""Steps of the optimizer that a program makes for a rollout at most, as they share it out over small batches."""


@dataclass
class _Highest:
    step: int
    least_bytes: int
    most_bytes: int
    buckets: dict[str, int]


class RunStages:
    """Follows the stages of the program's run.

    Args:
        steps: returns the optimizer's steps so far. `holdings`: bytes by device and bucket, as found last.
        trains: whether an optimizer trains something of a module.
        guarded: runs a function, of which no failure reaches the program.
    """

    def __init__(
        self,
        steps: Callable[[], int],
        holdings: Callable[[], Mapping[int, dict[str, int]]],
        trains: Callable[[nn.Module], bool],
        guarded: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self._steps, self._holdings, self._trains, self._guarded = steps, holdings, trains, guarded
        self._hooks: StageHooks | None = None
        self._thread = 0
        self._restore: Callable[[], None] = lambda: None
        self.forget()

    def forget(self) -> None:
        """Begin anew, as in a forked child."""
        self._begun: list[RunStage] = []
        self._counters: dict[int, int] = {}
        self._highest: dict[tuple[int, RunStage], _Highest] = {}
        self._rollouts, self._generated_at = 0, -1
        self._has_stepped = False
        self._since, self._read_s = time.monotonic(), 0.0
        self.is_news = False

    @property
    def now(self) -> RunStage:
        """Return the current stage."""
        return self._begun[-1] if self._begun else RunStage.TRAIN if self._has_stepped else RunStage.WARM_UP

    def at_boundary(self) -> None:
        """Read the figures at a step's end, for the stage until then; follow modules imported since."""
        if not allocator.is_running():
            return
        self._read()
        self._begun.clear()  # a step has ended, so that the program trains
        self._restore()
        self._has_stepped = True
        self._thread = threading.get_ident()
        if self._hooks is None:
            self._hooks = StageHooks(self._begins, self._ended)
            self._follow_evaluations()
        self._hooks.take()

    def peaks(self) -> tuple[StagePeak, ...]:
        """Return the peak of each stage on each device so far."""
        self.is_news = False
        often = self._rollouts > 1 and self._rollouts * _ROLLOUT_EVERY >= self._steps()
        found = []
        for (device, stage), one in self._highest.items():
            name = RunStage.ROLLOUT if stage is RunStage.GENERATE and often else stage
            found.append(
                StagePeak(
                    device, name.value, one.step, one.least_bytes, max(one.least_bytes, one.most_bytes), one.buckets
                )
            )
        return tuple(found)

    def _begins(self, stage: RunStage, owner: Any) -> bool:
        if threading.get_ident() != self._thread or RunStage.EVALUATE in self._begun:
            return False
        if stage is RunStage.WEIGHT_SYNC and isinstance(owner, nn.Module) and self._trains(owner):
            return False
        if self._read_s > READ_ALLOWANCE_S + READ_SHARE * (time.monotonic() - self._since):
            return False
        return bool(self._guarded(lambda: self._enter(stage)))

    def _enter(self, stage: RunStage) -> bool:
        self._read()
        self._begun.append(stage)
        if stage is RunStage.GENERATE and self._generated_at != self._steps():
            self._generated_at = self._steps()
            self._rollouts += 1
        return True

    def _ended(self) -> None:
        def leave() -> None:
            self._read()
            if self._begun:
                self._begun.pop()

        self._guarded(leave)

    def _read(self) -> None:
        """Put what the allocator counted since the last reading down to the stage that went on."""
        started = time.monotonic()
        holdings, stage, step = self._holdings(), self.now, self._steps()
        for device in allocator.devices_in_use(holdings):
            figures = allocator.figures(device)
            allocated, counter = figures["allocated_bytes"], figures["peak_allocated_bytes"]
            if allocated < 0:
                continue
            rose = counter > self._counters.get(device, 0)
            self._counters[device] = counter
            least = counter if rose else allocated
            known = self._highest.get((device, stage))
            if known is None:
                self._highest[device, stage] = _Highest(step, least, counter, holdings.get(device, {}))
                self.is_news = True
            else:
                self.is_news |= least > known.least_bytes or counter > known.most_bytes
                if least > known.least_bytes:
                    known.step, known.least_bytes, known.buckets = step, least, holdings.get(device, {})
                known.most_bytes = max(known.most_bytes, counter)
        self._read_s += time.monotonic() - started

    def _follow_evaluations(self) -> None:
        """Take the time from a model's `eval` to its `train` for an evaluation; only then `train` is followed."""
        kind: Any = nn.Module
        evaluate = kind.eval

        def begins(module: nn.Module) -> None:
            if not self._begun and self._trains(module) and self._begins(RunStage.EVALUATE, module):
                follow_train(module)

        def follow_train(root: nn.Module) -> None:
            train = kind.train

            @functools.wraps(train)
            def followed(module: nn.Module, mode: bool = True) -> Any:
                if mode and module is root:
                    undo()
                    if self._begun:
                        self._ended()
                return train(module, mode)

            def undo() -> None:
                if kind.train is followed:
                    kind.train = train
                self._restore = lambda: None

            kind.train, self._restore = invisible(followed), undo

        told = uncompiled(begins)

        @functools.wraps(evaluate)
        def followed_eval(module: nn.Module) -> Any:
            result = evaluate(module)
            told(module)
            return result

        kind.eval = invisible(followed_eval)
