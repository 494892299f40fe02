"""Counts training steps from what optimizers do."""

from __future__ import annotations

import sys
from types import FrameType

import torch

# Every class's `step` is wrapped in the same code, which calls the hooks.
_WRAPPER = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__


class StepCount:
    """Training steps, where several optimizers take part in one, or one fires its hook more than once.

    A step begins when an optimizer steps that has stepped already since the last one began: so the two of a GAN count
    once, the busier one decides, and of optimizers that are used one after another all steps count, but for the first
    of each turn, which might be of the step before. A second run in the same process goes on from the first.

    A class that overrides `step` and calls its parent's fires the hook in both: that is seen on the stack when it first
    steps, and at every `recheck`, as torch puts the hook around the parent's only when the first of that class is made.

    Attributes:
        steps: training steps so far.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._fired: dict[int, int] = {}
        self._fires_per_step: dict[int, int] = {}
        self._stepped: set[int] = set()

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it was met."""
        return id(optimizer) in self._fired

    def fire(self, key: int) -> bool:
        """The hook of the optimizer with this `id` fires; False, and nothing counted, if it was never met."""
        fires = self._fired.get(key)
        if fires is None:
            return False
        self._fired[key] = fires + 1
        if fires % self._fires_per_step[key] == 0:
            self._begin(key)
        return True

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer fires its hook for the first time."""
        key = id(optimizer)
        self._fires_per_step[key] = _nested_steps(optimizer)
        self._fired[key] = 1
        self._begin(key)

    def recheck(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer fires its hook: does it do so more often within a step by now? The count goes on from here.

        What fired since the last check stays counted as it was: which of it was twice cannot be told any more.
        """
        key = id(optimizer)
        nested = _nested_steps(optimizer)
        if nested > self._fires_per_step[key]:
            self._fires_per_step[key] = nested
            self._fired[key] = 1

    def forget(self, key: int) -> None:
        """An optimizer is gone; its `id` may come back as another's. The count stands."""
        self._stepped.discard(key)
        for table in (self._fired, self._fires_per_step):
            table.pop(key, None)

    def is_whole(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether no call of this optimizer's `step` is still to end."""
        key = id(optimizer)
        return self._fired[key] % self._fires_per_step[key] == 0

    def _begin(self, key: int) -> None:
        if key in self._stepped or not self._stepped:  # none of those that took part may be left
            self.steps += 1
            self._stepped.clear()
        self._stepped.add(key)


def _nested_steps(optimizer: torch.optim.Optimizer) -> int:
    """How many calls of this optimizer's `step` are on the stack."""
    found = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _WRAPPER and frame.f_locals.get("self") is optimizer:
            found += 1
        frame = frame.f_back
    return max(1, found)
