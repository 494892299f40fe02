"""Follows for what a program keeps graphs and gradients: evaluations without a backward, parameters that get none."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from gpumem_tui.causes import Cause
from gpumem_tui.step import Phase
from gpumem_tui.step.sites import own_line
from gpumem_tui.step.walking import parameters_in

_FEW = 0.01
"""Share of a model's values that may go without a gradient, as poolers do that nobody uses."""


class Gradients:
    """A program's unused gradients, and parameters that get none.

    Attributes:
        has_evaluated: whether a call evaluated.
        evaluated_at: ``file:line`` of a call that evaluated with gradients, for no backward; empty if missing.
    """

    def __init__(self) -> None:
        self.has_evaluated, self.evaluated_at = False, ""
        self._are_for_backward = False
        self._optimized = 0
        self._missing: dict[int, weakref.ref[torch.Tensor]] = {}
        """By `id` the parameters of optimizers that stepped which no backward has come to."""

    def evaluates(self) -> None:
        """Note that a model is called which evaluates."""
        self.has_evaluated = True
        if torch.is_grad_enabled() and not self._are_for_backward:
            self.evaluated_at = self.evaluated_at or own_line()

    def enter_backward(self, before: Phase) -> None:
        """Note that backward begins after another phase: an attack asks for the gradient of an evaluation's input."""
        if before is Phase.EVALUATION:
            self._are_for_backward, self.evaluated_at = True, ""

    def step(self, parameters: Iterable[torch.Tensor], known: set[int]) -> None:
        """Note which parameters an optimizer updates. `known`: the `id` of those that one has updated before."""
        for one in parameters:
            if id(one) not in known:
                self._optimized += 1
                self._missing[id(one)] = weakref.ref(one)
            if one.is_leaf and one.grad is not None:
                self._missing.pop(id(one), None)

    def causes(self, roots: Iterable[nn.Module], reentrant: str) -> Iterator[Cause]:
        """Yield that it evaluates with gradients, and that more than a few parameters of optimizers never got one.

        Args:
            roots: the models that were called.
            reentrant: ``file:line`` of a checkpoint within which nothing gets one; empty if missing.
        """
        if self.evaluated_at:
            words = f"{self.evaluated_at} evaluates with gradients; put it under `with torch.no_grad():`"
            yield Cause("evaluation_with_gradients", words, line=self.evaluated_at)
        models = list(roots)
        missing = [one for one in (known() for known in self._missing.values()) if one is not None]
        least = _FEW * sum(one.numel() for one in parameters_in(*models))
        if len(missing) == self._optimized or sum(one.numel() for one in missing) <= least:
            return
        names = {id(one): name for root in models for name, one in nn.Module.named_parameters(root)}
        first = next((names[id(one)] for one in missing if id(one) in names), "")
        which = f"{len(missing):,} of {self._optimized:,}{f', as {first}' if first else ''}"
        why = "leave them out of the optimizer, or look for what detaches them"
        if reentrant:
            why = (
                f"the reentrant checkpoint at {reentrant} gets no input that needs one; "
                "`use_reentrant=False` there, or `model.enable_input_require_grads()`, trains them"
            )
        size_bytes = sum(one.numel() * one.element_size() for one in missing)
        yield Cause("no_gradient", f"{which}; {why}", size_bytes, reentrant)
