"""Follows a program whose memory runs out: it dies of it, or frees what it tried and continues."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from gpumem_tui.importing import after_import
from gpumem_tui.run.events import RanOut
from gpumem_tui.run.parts import has_parameters
from gpumem_tui.step.sites import callers
from gpumem_tui.step.walking import tensors_in

_GROWS = 1.5
"""Times the last batch that a step's is at least where a program looks for the largest."""

_MOST_STEPS = 64


def leading(values: Any) -> int:
    """Return the samples in a call's arguments: the length of the first tensor that has rows; 0 where none has."""
    shapes = (tensor.shape for tensor in tensors_in(values) if tensor.dim() > 1)
    first = next((shape[0] for shape in shapes), 0)
    return first if type(first) is int else 0


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error is PyTorch's out-of-memory error, or was raised while one was handled."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # an error may be raised from itself
        if isinstance(error, torch.OutOfMemoryError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


class Tries:
    """Follows the batches of a program's steps, and those that there was no memory for.

    Attributes:
        times: how often memory ran out.
        is_looking: a library makes steps to find the largest batch.
    """

    def __init__(self) -> None:
        self.times = 0
        self._place = ""
        self._tried: list[int] = []
        self._steps_at: list[int] = []
        self._latest = 0
        self._steps: list[int] = []
        self._called: set[int] = set()
        self._is_called = False
        self._steps_before = 0
        self._grew = False
        self.is_looking = False
        self._looked = 0

    def calls(self) -> None:
        """Note that a model is called, be it answered from memory."""
        self._is_called = True

    def called(self, values: Any) -> None:
        """Note the arguments that a model was called with."""
        self._latest = leading(values)
        self._called.add(self._latest)

    def stepped(self) -> None:
        """Note that a step was made of what was called last."""
        self._steps.append(self._latest)

    def ran_out(self, size: int, place: str) -> None:
        """Note that memory ran out.

        Args:
            size: the samples that there was none for, 0 where that is not known. `place`: ``file:line``.
        """
        if not self.times:
            self._place = place
        self.times += 1
        self._grew = self._grew or self.is_growing
        self._steps_before = len(self._steps)
        self._called.clear()
        self._is_called = False
        self._tried.append(size)
        self._steps_at.append(self._steps_before)

    def size_now(self, rows: int) -> int:
        """Return the samples that the program works on where it is; 0 where that is not known.

        They are those of the model that is called, or was called last; before that those of a tensor that is made.

        Args:
            rows: of that tensor; 0 for none.
        """
        calls = [frame.f_locals for frame in callers(sys._getframe(1)) if frame.f_code is _CALL]
        called = [values for values in calls if has_parameters(values["self"])]
        if called:
            self._latest = leading((called[-1]["args"], called[-1]["kwargs"])) or self._latest
        elif not calls and rows:
            return rows
        return self._latest

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Have the steps within the context count for nothing: a library makes them to find the largest batch."""
        self.is_looking = True
        try:
            yield
        finally:
            self.is_looking, self._grew = False, True
            self._steps_before = self._looked = len(self._steps)

    @property
    def is_growing(self) -> bool:
        """Return whether each of the last steps was of a much larger batch: the program looks for the largest."""
        latest = self._steps[self._steps_before :][-3:]
        return len(latest) > 1 and all(0 < _GROWS * a <= b for a, b in pairwise(latest))

    def steps_wanted(self, wanted: int, made: int, asked_for: int) -> int:
        """Return how many steps are wanted now: as many as are asked for since memory ran out, and one that is alike.

        Args:
            wanted: before. `made`: so far.
        """
        if self.is_looking:
            return made + 1
        wanted = max(wanted, self._steps_before + asked_for)
        if made >= wanted and self.is_growing:
            wanted = made + 1
        return min(wanted, self._looked + max(_MOST_STEPS, asked_for))

    @property
    def is_settled(self) -> bool:
        """Return whether a model was called since memory ran out last, if it did."""
        return not self.times or self._is_called

    def whole(self) -> set[int]:
        """Return which tries the steps before are part of: of the same batch, which is smaller afterwards."""
        found = set()
        starts, following = [0, *self._steps_at], [*self._tried[1:], 0]
        for position, size in enumerate(self._tried):
            end = self._steps_at[position]
            made, after = self._steps[starts[position] : end], (*self._steps[end : end + 1], following[position])[0]
            if made and {*made} == {size} and after < size:
                found.add(position)
        return found

    def result(self) -> RanOut | None:
        """Return how often memory ran out, what was tried and what was settled at; None where it never did."""
        if not self.times:
            return None
        before, since = self._steps[: self._steps_before], set(self._steps[self._steps_before :] or self._called)
        settled = since.pop() if len(since) == 1 else 0
        is_told = 0 < settled < self._tried[0] and (self._grew or settled not in before)
        return RanOut(self.times, tuple(self._tried) if is_told else (), settled if is_told else None, self._place)


def follow_finders(tries: Tries) -> None:
    """Have libraries' own searches for a batch size be recognized: Lightning's, by `BatchSizeFinder` and `Tuner`."""

    def finder(module: Any) -> None:
        name = "_scale_batch_size" if hasattr(module, "_scale_batch_size") else "scale_batch_size"  # that before 2.0
        scale = getattr(module, name)

        @functools.wraps(scale)
        def looking(*args: Any, **kwargs: Any) -> Any:
            with tries.looking():
                return scale(*args, **kwargs)

        setattr(module, name, looking)

    for package in ("lightning.pytorch", "pytorch_lightning"):
        after_import(f"{package}.tuner.batch_size_scaling", finder)


_CALL: Any = vars(torch.nn.Module)["_call_impl"].__code__
