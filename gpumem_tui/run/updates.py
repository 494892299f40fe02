"""Steps of a program that has no optimizer of torch's: when it has made one, and what its updates keep."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpumem_tui.step.walking import buffers_in, gradients_of, instances_of, parameters_in


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
    sets these to zero or None. (A write to a tensor's ``.data`` does not count up the tensor's own version.)

    Args:
        number_of: tells when a tensor was allocated, see `step.run.Recorder`.

    Attributes:
        is_certain: such a step has been made.
    """

    def __init__(self, number_of: Callable[[torch.Tensor], int | None]) -> None:
        self.is_certain = False
        self._number_of = number_of
        self._newest: int | None = None
        """Number of the last gradient that the first backward has made: what an update makes comes after."""

        self._before: list[_Trained] = []
        self._has_optimizer = False
        self._others: list[weakref.ref[torch.Tensor]] = []
        """Tensors besides weights and gradients that were there after the first step."""

        self._versions: list[int] = []
        """Their versions as the second backward left them; 0 for a tensor that is gone."""

    def after_backward(self, parameters: Iterable[torch.Tensor]) -> None:
        """Remember how backward, which has returned, left the parameters."""
        if self._has_optimizer:
            return
        found = [(parameter, parameter.grad) for parameter in parameters]
        self._before = [
            _Trained(weakref.ref(parameter), gradient._cdata, parameter._version, gradient._version)
            for parameter, gradient in found
            if gradient is not None
        ]
        if self._newest is None and found:
            dense = [one for _, one in found if one is not None and one.layout is torch.strided]
            self._newest = max((self._number_of(one) or 0 for one in dense), default=0)
        if self._others and not self._versions:
            alive = [other() for other in self._others]
            self._versions = [0 if tensor is None else tensor._version for tensor in alive]

    def has_stepped(self) -> bool:
        """Return whether a step was made since then: once a step, and never of a program that has an optimizer."""
        if not any(trained.is_changed() for trained in self._before):
            return False
        self._before = []
        if not self.is_certain:  # a walk of all objects, made once: an optimizer that comes later counts as it steps
            things = gc.get_objects()
            self._has_optimizer = bool(instances_of(torch.optim.Optimizer, things))
            self.is_certain = not self._has_optimizer
            if self.is_certain:
                self._others = [weakref.ref(tensor) for tensor in _others_than_of_models(things)]
        return self.is_certain

    def kept(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return what updates keep besides weights, once, after the second step.

        These are tensors that the first step left and the second has written, or that the first update made and are
        shaped as a weight, as the slow weights of Lookahead, which it writes every sixth step. Tensors that each
        step makes anew are not among them, nor is the program's data.
        """
        if not self._versions:
            return []
        shapes = {one.shape for one in parameters}
        alive = [(other(), version) for other, version in zip(self._others, self._versions, strict=True)]
        self._others, self._versions = [], []
        return [one for one, version in alive if one is not None and self._is_state(one, version, shapes)]

    def _is_state(self, tensor: torch.Tensor, version: int, shapes: set[torch.Size]) -> bool:
        number = self._number_of(tensor)
        if number == 0:
            return False
        is_of_update = number is None or number > (self._newest or 0)
        return tensor._version > version or (tensor.shape in shapes and is_of_update)


def _others_than_of_models(things: list[Any]) -> list[torch.Tensor]:
    """Return the tensors on the GPU that are no model's parameters, buffers or gradients, nor views of these."""
    of_models: list[torch.Tensor] = []
    for module in instances_of(nn.Module, things):
        parameters = list(parameters_in(module))
        of_models += [*parameters, *buffers_in(module), *gradients_of(parameters)]
    known = {one.untyped_storage()._cdata for one in of_models if _has_versions(one)}
    found = [one for one in instances_of(torch.Tensor, things) if _has_versions(one) and one.numel() > 1]
    return [one for one in found if one.untyped_storage()._cdata not in known]


def _has_versions(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.layout is torch.strided and not tensor.is_inference()
