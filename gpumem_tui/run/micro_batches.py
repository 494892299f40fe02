"""How far a program's steps have come: which micro-batch of how many runs, and how long the rest takes. Stdlib only."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from types import FrameType
from typing import Any

_NAMES = (
    "gradient_accumulation_steps", "grad_accumulation_steps", "grad_accum_steps", "accumulation_steps",
    "accumulate_grad_batches",
)  # fmt: skip
"""Names of the micro-batches of a step in programs and trainers (transformers, accelerate, Lightning, DeepSpeed)."""

_LATEST = 3
"""Micro-batches whose mean tells how long the next ones take: what is answered from memory is faster than the first."""


@dataclass(frozen=True)
class HowFar:
    """The place of a run among its steps and micro-batches.

    Attributes:
        micro_batch: which of the step runs, from 1; 0 before the first.
        micro_batches: of a step; 0 while unknown.
        graph: which is being compiled by `torch.compile`, from 1; 0 for none.
        ooms: how often memory ran out, which the program caught.
        elapsed_s: since the run was begun. `left_s`: until all steps are made, about; None while unknown.
    """

    micro_batch: int = 0
    micro_batches: int = 0
    elapsed_s: float = 0.0
    left_s: float | None = None
    graph: int = 0
    ooms: int = 0


class MicroBatches:
    """Counts the micro-batches of each step as they begin, and times them.

    Args:
        steps: how many are wanted.
        clock: the clock, in seconds.
    """

    def __init__(self, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps = steps
        self._clock = clock
        self._began = clock()
        self._made = 0
        self._micro_batch = 0
        self._micro_batches = 0
        self._begun: deque[float] = deque(maxlen=_LATEST + 1)

    def begin_micro_batch(self) -> None:
        """Note that a forward with gradients begins."""
        self._micro_batch += 1
        self._begun.append(self._clock())
        if not self._micro_batches:
            self._micro_batches = _asked_for(sys._getframe(1))
        if self._micro_batches and self._micro_batch > self._micro_batches:
            self._micro_batches = 0 if not self._made else self._micro_batch

    def end_step(self) -> None:
        """Note that the optimizer has stepped."""
        self._made += 1
        self._micro_batches, self._micro_batch = self._micro_batch, 0

    def now(self) -> HowFar:
        """Return where the run is now."""
        now = self._clock()
        left: float | None = None
        if self._micro_batches and len(self._begun) > 1:
            steps_after = max(0, self._steps - self._made - 1)
            running = max(0, self._micro_batches - max(0, self._micro_batch - 1))
            of_one = (self._begun[-1] - self._begun[0]) / (len(self._begun) - 1)
            left = max(0.0, (running + steps_after * self._micro_batches) * of_one - (now - self._begun[-1]))
        return HowFar(self._micro_batch, self._micro_batches, now - self._began, left)


def _asked_for(frame: FrameType | None) -> int:
    """Return how many micro-batches the program that runs states a step has; 0 where nothing tells it."""
    while frame is not None:
        local = frame.f_locals
        found = _said_by(local)
        if frame.f_code.co_flags & CO_OPTIMIZED and type(local) is dict:
            local.clear()  # before Python 3.13 a copy, which the frame keeps, and with it a batch that is replaced
        if found:
            return found
        frame = frame.f_back
    return 0


def _said_by(local: Mapping[str, Any]) -> int:
    own = local.get("self")
    own_args = getattr(own, "__dict__", {}).get("args")
    for name in _NAMES:
        if type(found := local.get(name)) is int and found > 0:
            return found
        for owner in (own, own_args, local.get("args")):
            if type(found := getattr(owner, "__dict__", {}).get(name)) is int and found > 0:
                return found
    return 0
