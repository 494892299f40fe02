"""How long the inputs are that a program trains on: those of a few steps, and the longest that it may come to."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from itertools import compress
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from gpumem_tui.causes import INPUTS_ALIKE, TRIES_LONGER
from gpumem_tui.step.walking import instances_of, tensors_in

_LIMITS = (
    "max_length", "max_seq_length", "max_seq_len", "max_source_length", "seq_length", "seq_len", "block_size",
    "model_max_length",
)  # fmt: skip
"""Names by which programs call the longest sequence that they train on."""

_SAMPLES = ("input_ids", "input_values", "tokens")
"""Columns of a data set whose values are sequences."""

_NO_LIMIT = 1 << 24
"""From here on a limit is none: transformers' tokenizers say 10^30 where they know none."""

_CHANNELS = 4
"""The most numbers that a pixel has."""

_OF_IMAGES = 4
"""Dimensions of a batch of images."""

_TOKENS, _SEQUENCE, _IMAGE = "sequence length", "length", "image size"


@dataclass(frozen=True)
class _Input:
    """The input that a model was called with: the first that has a length."""

    shape: tuple[int, ...]
    kind: str

    @classmethod
    def among(cls, values: Any) -> _Input | None:
        """Return the input among a call's arguments that tells its length: tokens, else images or sequences.

        Images may be held by an object, as those of DETR by a `NestedTensor`, next to their mask.
        Jagged tensors do not: a length of theirs is a symbol, which has no order.
        """
        tensors = [tensor for tensor in tensors_in(values) if all(type(length) is int for length in tensor.shape)]
        for tensor in tensors:
            if tensor.dim() == 2 and tensor.shape[1] > 1 and tensor.dtype in (torch.int64, torch.int32):
                return cls(tuple(tensor.shape), _TOKENS)
        found = [tensor for tensor in tensors if tensor.dim() > 2 and tensor.is_floating_point()]
        found = found or [tensor for tensor in _held_by_objects(values) if tensor.dim() == _OF_IMAGES]
        if not found:
            return None
        in_list = found[0].dim() == 3 and sum(tensor.dim() == 3 for tensor in found) > 1
        largest = max(found, key=lambda tensor: tensor.numel()) if in_list else found[0]
        return cls(tuple(largest.shape), _IMAGE if in_list or largest.dim() > 3 else _SEQUENCE)

    @property
    def places(self) -> tuple[int, ...]:
        """Return which of its dimensions are lengths: of an image those before its channels where these come last."""
        if self.kind is not _IMAGE:
            return (1,)
        return (-3, -2) if self.shape[-1] <= _CHANNELS < self.shape[1] else (-2, -1)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the sizes of the dimensions that count as lengths."""
        return tuple(self.shape[place] for place in self.places)

    @property
    def words(self) -> str:
        """Return its lengths in words."""
        return " × ".join(f"{length:,}" for length in self.lengths)


def _held_by_objects(values: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the tensors of numbers that arguments of a class of the program's own have as attributes."""
    positional, *named = values
    given = (*positional, *(one for keywords in named for one in keywords.values()))
    known = (torch.Tensor, nn.Module)
    held = [list(vars(one).values()) for one in given if hasattr(one, "__dict__") and not isinstance(one, known)]
    return [tensor for tensor in tensors_in(held) if tensor.is_floating_point()]


class InputLengths:
    """The lengths of what models are trained on, and inputs of a greater length in their place.

    From the second step on (`begin`), what the program copies to the GPU has the length `longest`: the dimensions that
    were lengths in the first step are filled up with their last values.

    Args:
        longest: tokens of a sequence, or pixels of an image's longer side; None: as the program has them.
        can_lengthen: whether what is copied to the GPU comes by `arriving`.
        are_noted: whether inputs are looked at; those of one known length need not be.
    """

    def __init__(self, longest: int | None = None, *, can_lengthen: bool = False, are_noted: bool = True) -> None:
        self.longest = longest
        self._are_noted = are_noted
        self._can_lengthen = can_lengthen
        self._source = "--longest" if longest else ""
        self._begins_after = 1
        self._seen: dict[int, dict[int, _Input]] = {}
        """By model and step, the longest input."""

        self._copied: set[int] = set()
        self._others: frozenset[int] | None = None
        """Sizes of what is copied that were no lengths in the first step; None before the first call."""

        self._main: _Input | None = None
        self._is_on_gpu = False
        """Whether a model was called with what is on the GPU: what others are tried out with on the host counts not."""

        self._now: dict[int, int] = {}
        self._is_on = False

    def trained_on(self, module: nn.Module, values: Any, step: int) -> None:
        """Note what a model was called with, to be trained in this step."""
        if not self._are_noted:
            return
        found = _Input.among(values)
        is_on_gpu = any(tensor.is_cuda for tensor in (*tensors_in(values), *_held_by_objects(values)))
        if found is None or (self._is_on_gpu and not is_on_gpu):
            return
        if is_on_gpu and not self._is_on_gpu:
            self._is_on_gpu, self._main = True, None
            self._seen.clear()
        if self._main is None:
            self._main = found
            self._others = frozenset(self._copied - set(found.lengths))
        steps = self._seen.setdefault(id(module), {})
        before = steps.get(step)
        if before is None or found.lengths > before.lengths:
            steps[step] = found

    # Longer ones

    def begin(self, steps: int) -> None:
        """Lengthen what arrives from now on, if that is asked for and so many steps were made."""
        self._is_on = self.longest is not None and self._can_lengthen and steps >= self._begins_after

    def arriving(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what is to be copied to the GPU in a tensor's place: itself, or one of the length wanted."""
        if self._others is None:
            self._copied.update(tensor.shape[1:])
        if not self._is_on or self._main is None or tensor.dim() < 2 or self.longest is None:
            return tensor
        main, shape = self._main, tuple(tensor.shape)
        lengths: list[int] = []
        if len(shape) == len(main.shape) and tensor.is_floating_point() == (main.kind is not _TOKENS):
            lengths = [shape[place] for place in main.places]
        if lengths and max(lengths) < self.longest and not (self._others or frozenset()).intersection(lengths):
            self._now = {length: round(length * self.longest / max(lengths)) for length in lengths}
        longer = tensor
        for dim in range(1, len(shape)):
            wanted = self._now.get(shape[dim], 0)
            if wanted > shape[dim]:
                places = torch.arange(wanted, device=tensor.device).clamp_(max=shape[dim] - 1)
                longer = longer.index_select(dim, places)
        return longer

    def wants_another_step(self, steps: int) -> bool:
        """Return whether a step on longer inputs is to follow, as those seen differ and the program names a limit."""
        if self.longest is not None or not self._can_lengthen or self._main is None or self._main.kind is not _TOKENS:
            return False
        seen = self._differing
        known = None if seen is None else _longest_known(seen[-1].lengths[0])
        if known is None:
            return False
        self.longest, self._source = known
        self._begins_after = steps
        return True

    def tries_longer(self, steps: int) -> bool:
        """Return whether the step after so many is one on inputs of a length that nobody asked for."""
        return self._source not in ("", "--longest") and steps >= self._begins_after

    # In words

    @property
    def _differing(self) -> list[_Input] | None:
        """Return the shortest and the longest input of the program's own steps, where their lengths differ."""
        for steps in self._seen.values():
            own = [one for step, one in steps.items() if not self._source or step <= self._begins_after]
            ordered = sorted(own, key=lambda one: one.lengths)
            if ordered and ordered[0].lengths != ordered[-1].lengths:
                return [ordered[0], ordered[-1]]
        return None

    def line(self, steps: int) -> str:
        """Say which lengths were seen in so many steps; empty where nothing has a length."""
        main = self._main
        if main is None:
            return ""
        own_steps = min(steps, self._begins_after) if self._source else steps
        within = f"in {own_steps} steps" if own_steps > 1 else "in 1 step"
        seen = self._differing
        if seen:
            said = f"inputs differ: {main.kind} {seen[0].words} to {seen[1].words} {within}"
        else:
            said = f"{INPUTS_ALIKE}{main.kind} {main.words} {within}"
        if self.longest is not None and self._can_lengthen:
            return f"{said}; {self._lengthened()}"
        if not self._can_lengthen:
            return f"{said}; longer ones take more" if seen else said
        reached = max(seen[-1].lengths if seen else main.lengths)
        known = _longest_known(reached, at_most=True) if main.kind is _TOKENS else None
        if known is not None:
            return f"{said}; {known[1]} is {known[0]:,}: --longest {known[0]} tries it"
        more = "longer ones take more, and the program names no limit: " if seen else ""
        return f"{said}; {more}{TRIES_LONGER}"

    def _lengthened(self) -> str:
        at = [(step, one) for steps in self._seen.values() for step, one in steps.items() if step > self._begins_after]
        if not any(max(one.lengths) >= (self.longest or 0) for _, one in at):
            return f"{self._source} of {self.longest:,} was not reached: no input is copied to the GPU at its length"
        longest = max((one for _, one in at), key=lambda one: one.lengths)
        why = "--longest" if self._source == "--longest" else f"the longest by {self._source}"
        return f"then {self._main.kind if self._main else ''} {longest.words} ({why})"


# Lengths that the program itself names


def _longest_known(seen: int, *, at_most: bool = False) -> tuple[int, str] | None:
    """Return a sequence length above what was seen that the program itself names, and where; None if it names none.

    The longest sample of its data counts, no more than a limit; without data to look at, the lowest limit. With
    `at_most` also what a tokenizer could take, had the program asked it to cut what is longer.
    """
    things = gc.get_objects()  # a list made around it would be among them, and keep the step's gradients with itself
    things += vars(sys.modules["__main__"]).values()  # perhaps older than torch
    limits = sorted({(length, name) for name, length in _limits(things, at_most) if seen < length < _NO_LIMIT})
    samples = max((longest_sample(loader.dataset) for loader in instances_of(DataLoader, things)), default=0)
    if samples:
        found = (samples, "the data set's longest sample")
        known = min([found, *limits]) if limits else found
    elif limits:
        known = limits[0]
    else:
        return None
    return known if known[0] > seen else None


def _limits(things: list[Any], at_most: bool) -> Iterator[tuple[str, int]]:
    """Yield limits by name: of the script's variables, of its options, of tokenizers and of what collates batches.

    A fast tokenizer's limit is the length to which it was last asked to cut.
    """
    yield from _named(vars(sys.modules["__main__"]), "")
    kinds = {
        kind for kind in set(map(type, things))
        if issubclass(kind, argparse.Namespace)
        or (str(kind.__module__).partition(".")[0] not in ("builtins", "sympy", "torch")  # the compiler's: thousands
            and (is_dataclass(kind) or hasattr(kind, "from_pretrained")))
    }  # fmt: skip
    for thing in compress(things, map(kinds.__contains__, map(type, things))):
        kind = type(thing)
        values = getattr(thing, "__dict__", None)
        if isinstance(values, dict) and "_tokenizer" in values and not at_most:
            cut = getattr(values["_tokenizer"], "truncation", None) or {}
            if "max_length" in cut:
                yield f"what {kind.__name__} cuts to", cut["max_length"]
        elif isinstance(values, dict):
            yield from _named(values, " of its options" if kind is argparse.Namespace else f" of {kind.__name__}")


def _named(values: dict[str, Any], of: str) -> Iterator[tuple[str, int]]:
    for name in _LIMITS:
        value = values.get(name)
        if type(value) is int and value > 0:
            yield f"{name}{of}", value


def longest_sample(dataset: Any) -> int:
    """Return the longest sequence of a data set that can be told without reading samples; 0 where it cannot.

    In Hugging Face's data sets that is a column of Arrow lists, which store their lengths next to their values. No
    property of the data set is read: PyTorch Geometric's `data` warns.
    """
    own = getattr(dataset, "__dict__", {})
    table, chosen = own.get("_data"), own.get("_indices")
    names = getattr(table, "column_names", ())
    column = next((name for name in _SAMPLES if name in names), None)
    if column is None or table is None:
        return 0
    lists = table.column(column).combine_chunks()
    if not hasattr(lists, "value_lengths"):
        return 0
    lengths = lists.value_lengths()
    if chosen is not None:
        lengths = lengths.take(chosen.column(0).combine_chunks())
    return max((length or 0 for length in lengths.to_pylist()), default=0)
