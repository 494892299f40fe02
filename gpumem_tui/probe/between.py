"""What is known of a step that cannot be recorded: the tensors that were found as it ended."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gpumem_tui.memory import Bucket
from gpumem_tui.probe.documents import KeptPlace, LookedDevice
from gpumem_tui.probe.history import StepHistory
from gpumem_tui.probe.wire import CPU
from gpumem_tui.step import Phase
from gpumem_tui.step.walking import host_memory_of


class BetweenSteps:
    """Records nothing, and knows what is there between two steps, by bucket and module.

    Attributes:
        method, active, unavailable, events: as in `operators.OperatorRecorder`.
    """

    method = "tensors found after the step"
    events = 0

    def __init__(self, reason: str) -> None:
        self.unavailable = dict.fromkeys(("peak", "phases", "kept"), reason)
        self.active = False
        self._history = StepHistory(phases_known=False)
        self._numbers: dict[int, int] = {}

    def start(self) -> str:
        """Nothing is to be done, so nothing can get into the program's way."""
        return ""

    def stop(self) -> bool:
        """Nothing is left behind."""
        return True

    def enter(self, phase: Phase) -> None:
        """A phase begins: the next tensors are those of the step's end."""

    def tag(self, bucket: Bucket, tensors: Iterable[torch.Tensor]) -> None:
        """State what these tensors are."""
        for tensor in tensors:
            for storage in host_memory_of(tensor):
                if storage._cdata not in self._numbers:
                    self._numbers[storage._cdata] = self._history.existing(storage.nbytes(), bucket)

    def own(self, owned: Iterable[tuple[str, torch.Tensor]]) -> None:
        """State of which modules these tensors are."""
        for module, tensor in owned:
            for storage in host_memory_of(tensor):
                if storage._cdata in self._numbers:
                    self._history.own(self._numbers[storage._cdata], module)

    def end_step(self) -> None:
        """The step ends."""

    def result(self) -> list[LookedDevice]:
        """What is there."""
        return [self._history.result(CPU, "")]

    def kept(self) -> list[KeptPlace] | None:
        """Not known."""
        return None
