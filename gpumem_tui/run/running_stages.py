"""Tells the stage that a followed program's run is in, where the phase of its step does not show it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from gpumem_tui.importing import after_import
from gpumem_tui.step import Phase, RunStage
from gpumem_tui.step.sites import callers
from gpumem_tui.step.stages import FOLLOWED, StageHooks, stage_by_names
from gpumem_tui.step.walking import parameters_in

_ALIKE = 0.8
"""Share of a model's parameters that a copy of it has at least: adapters are little more."""


class RunningStages:
    """The stages that have begun and not ended.

    Args:
        counts: whether the program is followed at this moment.
        changed: called as another stage begins.
    """

    def __init__(self, counts: Callable[[], bool], changed: Callable[[], None]) -> None:
        self._counts, self._changed = counts, changed
        self._begun: list[RunStage] = []
        self._called: RunStage | None = None
        self._phase = Phase.BUILD
        self._trained: Iterable[int] = ()
        self._references: set[int] = set()

    @property
    def now(self) -> RunStage | None:
        """Return the stage; None where the phase of the step shows it."""
        return self._begun[-1] if self._begun else self._called

    def follow(self) -> Callable[[], None]:
        """Follow the functions of torch and of libraries, as they are imported; returns what undoes that."""
        hooks = StageHooks(self._begins, self._ended)
        for name in dict.fromkeys(name for name, *_ in FOLLOWED):
            after_import(name, lambda module: hooks.take([module.__name__]))
        return hooks.close

    def enter(self, phase: Phase, trained: Iterable[int]) -> None:
        """Note that a phase begins; `trained`: parameters that optimizers train, by `id`."""
        self._phase, self._trained = phase, trained
        if phase not in (Phase.FORWARD, Phase.EVALUATION):
            self._called = None

    def called(self, module: nn.Module, roots: Iterable[nn.Module], *, is_trained: bool) -> bool:
        """Note the call of a model, of all that were called so far; return whether that begins another stage."""
        before, self._called = self._called, None
        if not self._begun and not torch.is_grad_enabled():
            models = [root for root in roots if any(one.requires_grad for one in parameters_in(root))]
            is_reference = not is_trained and self._is_reference(module, models)
            named = stage_by_names(_functions())
            is_of_ours = is_reference or is_trained
            if (is_of_ours and named is RunStage.EVALUATE) or (
                (is_of_ours or not models) and named is RunStage.GENERATE
            ):
                self._called = named
            elif is_reference:
                self._called = RunStage.REFERENCE
        return self._called is not before

    def left(self) -> None:
        """Note that the call has ended."""
        if self._called is RunStage.REFERENCE:
            self._called = None
            if self._counts():
                self._changed()

    def _is_reference(self, module: nn.Module, models: Iterable[nn.Module]) -> bool:
        """Return whether a model is a copy of one that is trained."""
        if id(module) not in self._references:
            own = _values(module)
            kinds = {type(part) for model in models for part in _whole_parts(model, own)}
            if not own or type(module) not in kinds:
                return False
            self._references.add(id(module))
        return True

    def _begins(self, stage: RunStage, owner: Any) -> bool:
        if not self._counts():
            return False
        if stage is RunStage.WEIGHT_SYNC and isinstance(owner, nn.Module):
            trained = set(self._trained)
            if self._phase is Phase.BUILD or any(id(one) in trained for one in parameters_in(owner)):
                return False  # it loads weights to begin with
        self._begun.append(stage)
        self._changed()
        return True

    def _ended(self) -> None:
        self._begun.pop()
        if self._counts():
            self._changed()


def _functions() -> Iterator[str]:
    return (frame.f_code.co_name for frame in callers(sys._getframe(1)))


def _values(module: nn.Module) -> int:
    return sum(one.numel() for one in parameters_in(module))


def _whole_parts(root: nn.Module, wanted: int) -> Iterator[nn.Module]:
    """Yield the model and its parts that have about so many values: the model itself, or what wraps it."""
    for part in root.modules():
        if wanted * _ALIKE <= _values(part) <= wanted / _ALIKE:
            yield part
