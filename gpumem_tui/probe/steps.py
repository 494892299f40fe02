"""Counts training steps from what optimizers do."""

from __future__ import annotations

import sys

import torch

from gpumem_tui.step.sites import callers

# Every class's `step` is wrapped in the same code, which calls the hooks.
_WRAPPER = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__


class StepCount:
    """Training steps, where several optimizers take part in one, or one fires its hook more than once.

    A step begins when an optimizer steps that has stepped already since the last one began: so the two of a GAN count
    once, the busier one decides, and of optimizers that are used one after another all steps count, but for the first
    of each turn, which might be of the step before. A second run in the same process continues from the first.

    A class that overrides `step` and calls its parent's fires the hook in both: that is seen on the stack when it first
    steps, and at every `recheck`, as torch puts the hook around the parent's only when the first of that class is made.

    Attributes:
        current: the `id` of the optimizer whose hook fired last.
        run: how often that has fired since it was last asked for anything. The hook itself counts here: it is called in
            each step, and most programs have one optimizer.
    """

    def __init__(self) -> None:
        self.current = self.run = 0
        self._steps = 0
        self._fired: dict[int, int] = {}
        self._fires_per_step: dict[int, int] = {}
        self._stepped: set[int] = set()

    @property
    def steps(self) -> int:
        """Training steps so far."""
        self._settle()
        return self._steps

    @property
    def seen(self) -> int:
        """Training steps so far, for another thread: nothing is settled by it."""
        return self._steps + self._begun(self.run)[0]

    @property
    def mark(self) -> tuple[int, int, int]:
        """Something else after each step; to be asked for by another thread, as it settles nothing."""
        return self.current, self.run, self._steps

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the optimizer was met before."""
        return id(optimizer) in self._fired

    def fire(self, key: int) -> bool:
        """Count a call of the hook of the optimizer with this `id`; return False if it was never met."""
        self._settle()
        if key not in self._fired:
            return False
        self.current, self.run = key, 1
        return True

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of an optimizer that fires its hook for the first time."""
        self._settle()
        key = id(optimizer)
        self._fires_per_step[key] = _nested_steps(optimizer)
        self._fired[key] = 0
        self.current, self.run = key, 1

    def recheck(self, optimizer: torch.optim.Optimizer) -> None:
        """Look whether the optimizer fires its hook more often within a step by now; the count continues from here.

        Hooks fired since the last check stay counted: which of them fired twice is no longer known.
        """
        self._settle()
        key = id(optimizer)
        nested = _nested_steps(optimizer)
        if nested > self._fires_per_step[key]:
            self._fires_per_step[key] = nested
            self._fired[key] = 1

    def forget(self, key: int) -> None:
        """Forget an optimizer that is gone, as its `id` may come back as another's. The count stays."""
        self._settle()
        if self.current == key:
            self.current = 0
        self._stepped.discard(key)
        for table in (self._fired, self._fires_per_step):
            table.pop(key, None)

    def is_whole(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether no call of this optimizer's `step` is still to end."""
        self._settle()
        key = id(optimizer)
        return self._fired[key] % self._fires_per_step[key] == 0

    def _settle(self) -> None:
        """Count what the current optimizer has fired: the first call of `step` may be of the step that continues."""
        run, self.run = self.run, 0
        if not run:
            return
        key = self.current
        steps, begun = self._begun(run)
        self._fired[key] += run
        self._steps += steps
        if steps:
            self._stepped.clear()
        if begun:
            self._stepped.add(key)

    def _begun(self, run: int) -> tuple[int, int]:
        """Return how many steps and how many calls of `step` the current optimizer has begun by firing so often."""
        key = self.current
        if not run or key not in self._fired:
            return 0, 0
        fired, per_step = self._fired[key], self._fires_per_step[key]
        begun = -(-(fired + run) // per_step) + (-fired // per_step)  # calls that began: every so many fires, from 0
        goes_on = begun > 0 and key not in self._stepped and bool(self._stepped)  # those that took part may be gone
        return begun - goes_on, begun


def _nested_steps(optimizer: torch.optim.Optimizer) -> int:
    """Count the calls of this optimizer's `step` on the stack."""
    wrappers = (frame for frame in callers(sys._getframe(1)) if frame.f_code is _WRAPPER)
    return max(1, sum(frame.f_locals.get("self") is optimizer for frame in wrappers))
