"""Follows a program's own checkpoints (`torch.utils.checkpoint`): which repeated blocks each is around."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import CellType
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gpumem_tui.causes import Cause
from gpumem_tui.run.parts import repeated_blocks
from gpumem_tui.simulator.torch_internals import Replacements
from gpumem_tui.step.phases import in_backward
from gpumem_tui.step.walking import modules_in, tensors_in

_NEARLY_ALL = 0.9
"""Share of the repeated blocks from which a program counts as one that checkpoints them."""


@dataclass(frozen=True)
class _Around:
    """The modules, by `id`, that ran within a checkpoint, and its ``file:line``."""

    modules: frozenset[int]
    line: str


class Checkpoints:
    """Follows the checkpoints of a program.

    Args:
        line: gives ``file:line`` of the program's statement that runs.

    Attributes:
        without_gradient: ``file:line`` of a reentrant checkpoint whose inputs need no gradient, so that nothing within
            it gets one (`check_backward_validity` in torch/utils/checkpoint.py warns of it); empty if missing.
        are_by_block: a checkpoint around several repeated blocks is left out, as the blocks are checkpointed instead.
    """

    def __init__(self, line: Callable[[], str]) -> None:
        self.without_gradient = ""
        self.are_by_block = False
        self._line = line
        self._seen: dict[_Around, None] = {}
        self._running: list[set[int]] = []

    def follow(self) -> None:
        """Follow the program's checkpoints from now on."""
        Replacements().wrap(checkpointing, "checkpoint", self._checkpoint)  # until the end of the process
        register_module_forward_pre_hook(self._enter_module)

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        for running in self._running:
            running.add(id(module))

    def _checkpoint(self, checkpoint: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        if in_backward() or not torch.is_grad_enabled():
            return checkpoint(function, *args, **kwargs)
        if self.are_by_block and _has_several_blocks(function):
            options = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
            return function(*args, **{name: value for name, value in kwargs.items() if name not in options})
        line, running = self._line(), set[int]()
        if kwargs.get("use_reentrant") is not False and not any(one.requires_grad for one in tensors_in(args)):
            self.without_gradient = line
        self._running.append(running)
        try:
            return checkpoint(function, *args, **kwargs)
        finally:
            self._running.pop()
            self._seen[_Around(frozenset(running), line)] = None

    def cover(self, roots: Iterable[nn.Module]) -> bool:
        """Return whether nearly all repeated blocks of models are checkpointed one by one, or none is repeated."""
        blocks = [block for root in roots for block in repeated_blocks(root)]
        if not blocks:
            return bool(self._seen)
        around = [(ids, one.modules) for one in self._seen for ids in [_blocks_in(one, blocks)]]
        alone = {next(iter(ids)) for ids, _ in around if len(ids) == 1}
        within = set().union(*(modules for ids, modules in around if not ids))
        covered = [one for one in blocks if id(one) in alone or not within.isdisjoint(map(id, modules_in(one)))]
        return len(covered) >= _NEARLY_ALL * len(blocks)

    def causes(self, roots: Iterable[nn.Module]) -> Iterator[Cause]:
        """Yield the checkpoints that are around more than half of a model's repeated blocks at once."""
        for root in roots:
            blocks = list(repeated_blocks(root))
            for one in self._seen:
                together = len(_blocks_in(one, blocks))
                if together > 1 and 2 * together > len(blocks):
                    yield Cause(
                        "whole_checkpoint",
                        f"the checkpoint at {one.line} is around {together} of {len(blocks)} blocks at once; "
                        "checkpoint each block: `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)`",
                        line=one.line,
                    )
                    break


def _blocks_in(one: _Around, blocks: Iterable[nn.Module]) -> frozenset[int]:
    return one.modules & frozenset(map(id, blocks))


def _has_several_blocks(function: Any) -> bool:
    """Return whether a function that is to be checkpointed runs two repeated blocks, as far as it shows its modules."""
    modules = chain.from_iterable(map(modules_in, _modules_of(function, 0)))
    return len({id(block) for module in modules for block in repeated_blocks(module)}) > 1


def _modules_of(value: Any, depth: int) -> Iterator[nn.Module]:
    """Yield the modules that a function calls: it is one, is bound to one, or has it among what it closes over."""
    if isinstance(value, nn.Module):
        yield value
    elif depth < 4:  # a list of modules in a closure of a function that is given partly
        parts: Iterable[Any] = ()
        if isinstance(value, functools.partial):
            parts = (value.func, *value.args)
        elif isinstance(value, (list, tuple, nn.ModuleList)):
            parts = value
        elif isinstance(value, Mapping):
            parts = value.values()
        elif callable(value):
            owner = getattr(value, "__self__", None)
            cells = getattr(value, "__closure__", None) or ()
            parts = [owner, *(cell.cell_contents for cell in cells if cell != CellType())]  # one may be empty
        for part in parts:
            yield from _modules_of(part, depth + 1)
