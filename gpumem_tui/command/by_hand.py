"""Steps of a program that updates its parameters itself, or by an optimizer that is not one of torch's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from gpumem_tui.step.walking import instances_of


@dataclass(frozen=True)
class _Trained:
    """A parameter and its gradient as backward left them; in-place operators count a tensor's version up."""

    parameter: weakref.ref[torch.Tensor]
    gradient: int
    version: int
    gradient_version: int

    def is_changed(self) -> bool:
        parameter = self.parameter()
        if parameter is None:
            return False
        gradient: Any = parameter.grad
        return (
            gradient is None
            or gradient._cdata != self.gradient
            or gradient._version != self.gradient_version
            or parameter._version != self.version
        )


class UpdatesByHand:
    """Tells whether a program without an optimizer of torch's has made a step since the last backward.

    Between two backward passes nothing but a step changes parameters or gradients: it writes them, clips gradients, or
    sets these to zero or None. (What is written to a tensor's ``.data`` does not count up the tensor's own version.)

    Attributes:
        is_certain: such a step has been made.
    """

    def __init__(self) -> None:
        self.is_certain = False
        self._before: list[_Trained] = []
        self._has_optimizer = False

    def after_backward(self, parameters: Iterable[torch.Tensor]) -> None:
        """Backward has returned: remember how it left the parameters."""
        if self._has_optimizer:
            return
        found = [(parameter, parameter.grad) for parameter in parameters]
        self._before = [
            _Trained(weakref.ref(parameter), gradient._cdata, parameter._version, gradient._version)
            for parameter, gradient in found
            if gradient is not None
        ]

    def has_stepped(self) -> bool:
        """Whether a step was made since then; said once a step, and never of a program that has an optimizer."""
        if not any(trained.is_changed() for trained in self._before):
            return False
        self._before = []
        self._has_optimizer = bool(instances_of(torch.optim.Optimizer, gc.get_objects()))
        self.is_certain = not self._has_optimizer
        return self.is_certain
