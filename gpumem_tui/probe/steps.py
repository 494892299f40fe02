"""Counts training steps from what optimizers do."""

from __future__ import annotations

import sys
from types import FrameType

import torch

# Every class's `step` is wrapped in the same code, which calls the hooks.
_WRAPPER = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__


class StepCount:
    """Training steps, where several optimizers take part in one, or one fires its hook more than once.

    A class that overrides `step` and calls its parent's fires the hook in both: that is seen on the stack when it first
    steps, and at every `recheck`, as torch puts the hook around the parent's only when the first of that class is made.
    Among several optimizers the one with most steps counts, and one that comes later starts where the others are: so
    the two of a GAN count once, and a second run in the same process goes on from the first.

    Attributes:
        fired: by the optimizer's `id`, how often its hook has fired. The hook itself counts here.
    """

    def __init__(self) -> None:
        self.fired: dict[int, int] = {}
        self._fires_per_step: dict[int, int] = {}
        self._first: dict[int, int] = {}
        self._past = 0

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer fires its hook for the first time."""
        key = id(optimizer)
        self._first[key] = max(0, self.steps - 1)
        self._fires_per_step[key] = _nested_steps(optimizer)
        self.fired[key] = 1

    def recheck(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer fires its hook: does it do so more often within a step by now? The count goes on from here.

        What fired since the last check stays counted as it was: which of it was twice cannot be told any more.
        """
        key = id(optimizer)
        nested = _nested_steps(optimizer)
        if nested > self._fires_per_step[key]:
            self._first[key] = self._of(key) - 1
            self._fires_per_step[key] = nested
            self.fired[key] = 1

    def forget(self, key: int) -> None:
        """An optimizer is gone; its `id` may come back as another's. The count stands."""
        self._past = self.steps
        for table in (self.fired, self._fires_per_step, self._first):
            table.pop(key, None)

    def is_whole(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether no call of this optimizer's `step` is still to end."""
        key = id(optimizer)
        return self.fired[key] % self._fires_per_step[key] == 0

    @property
    def steps(self) -> int:
        """Training steps so far."""
        return max([self._past, *(self._of(key) for key in list(self.fired))])

    def _of(self, key: int) -> int:
        whole, begun = divmod(self.fired[key], self._fires_per_step[key])
        return self._first[key] + whole + (begun > 0)


def _nested_steps(optimizer: torch.optim.Optimizer) -> int:
    """How many calls of this optimizer's `step` are on the stack."""
    found = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _WRAPPER and frame.f_locals.get("self") is optimizer:
            found += 1
        frame = frame.f_back
    return max(1, found)
