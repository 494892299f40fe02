"""Finds what a process trains, and which of its memory is parameters, gradients and optimizer state.

Optimizers make themselves known as they step, modules as they are made (`modules`). Everything is held weakly: what the
program drops is gone.
"""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpumem_tui.probe.modules import Modules, modules_and_optimizers_in, search_running
from gpumem_tui.step.walking import gradients_of, memory_of, outermost, parameters_of, state_of

_FEW_BLOCKS = 1_000_000
"""Memory blocks of Python's (`sys.getallocatedblocks`) up to which all objects can be gone through in about 30 ms."""
_FIRST_BUDGET_S, _LAST_BUDGET_S = 0.02, 0.08


@dataclass(frozen=True)
class Holdings:
    """Bytes on one device, by storage. `buffers_bytes` is part of `parameters_bytes`."""

    parameters_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    buffers_bytes: int = 0


@dataclass(frozen=True)
class FoundTraining:
    """Every tensor of what is trained, at one moment. Holds them alive: drop it soon.

    Attributes:
        parameters: of the optimizers. `more_parameters`: of the modules around and beside them, frozen ones included.
        state: what optimizers keep, by the `id` of its parameter.
    """

    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    state: dict[int, list[torch.Tensor]]
    more_parameters: list[torch.Tensor]
    buffers: list[torch.Tensor]

    @property
    def optimizer(self) -> list[torch.Tensor]:
        """All that optimizers keep."""
        return [tensor for tensors in self.state.values() for tensor in tensors]

    def holdings(self) -> dict[int, Holdings]:
        """Bytes by device. A storage counts once, where it is met first.

        What an optimizer knows comes before what modules do: torch.compile makes modules that hold everything.
        """
        counted: set[int] = set()

        def count(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
            sizes: dict[int, int] = {}
            for tensor in tensors:
                for device, storage in memory_of(tensor):
                    key = storage._cdata
                    if key not in counted:
                        counted.add(key)
                        sizes[device] = sizes.get(device, 0) + storage.nbytes()
            return sizes

        parameters, gradients, optimizer = count(self.parameters), count(self.gradients), count(self.optimizer)
        more, buffers = count(self.more_parameters), count(self.buffers)
        return {
            device: Holdings(
                parameters_bytes=parameters.get(device, 0) + more.get(device, 0) + buffers.get(device, 0),
                gradients_bytes=gradients.get(device, 0),
                optimizer_bytes=optimizer.get(device, 0),
                buffers_bytes=buffers.get(device, 0),
            )
            for device in {*parameters, *gradients, *optimizer, *more, *buffers}
        }


class Finder:
    """Knows the optimizers that stepped, and all modules.

    A module tree is trained when any of its parameters is in an optimizer or has a gradient. What other trees hold (a
    frozen teacher, a reference model, a moving average of the weights) are parameters too: else the remainder at the
    peak, which is called activations, would have them.

    Attributes:
        complete: whether no module can be missing, but for one that is made in ways of its own: the program was
            followed from its beginning, or all of its objects were gone through since.
    """

    def __init__(self) -> None:
        self.complete = True
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._known = Modules()
        self._modules: list[weakref.ref[nn.Module]] = []
        self._roots: list[weakref.ref[nn.Module]] = []
        self._untrained: list[weakref.ref[nn.Module]] = []
        self._stale = True
        self._budget_s = _FIRST_BUDGET_S

    def follow(self, late: bool) -> None:
        """Learn of every module that is made from now on. `late`: some may have been made before."""
        self.complete = self._known.follow() and not late

    def leave(self) -> None:
        """Learn of nothing more."""
        self._known.leave()

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped for the first time."""
        self._optimizers.add(optimizer)
        self._stale = True

    @property
    def stale(self) -> bool:
        """Whether an `update` would find something, or may."""
        return self._stale or self._known.changed or (not self.complete and self._budget_s <= _LAST_BUDGET_S)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return list(self._optimizers)

    @property
    def roots(self) -> list[nn.Module]:
        """The modules at the top of the trees that are trained, as of the last `update` or `scan`."""
        return _alive(self._roots)

    @property
    def untrained(self) -> list[nn.Module]:
        """The same of the trees of which nothing is trained."""
        return _alive(self._untrained)

    def update(self) -> None:
        """Put in order what is known by now.

        Where the probe came late, a program of few objects is gone through once, in about 30 ms. Of one with millions
        only what its running functions reach is searched, for at most 20 ms, then for 40 and for 80.
        """
        if not self.complete and sys.getallocatedblocks() <= _FEW_BLOCKS:
            self._add(*modules_and_optimizers_in(gc.get_objects()))
            self.complete = True
        elif not self.complete and self._budget_s <= _LAST_BUDGET_S:
            modules, optimizers, through = search_running(self._budget_s)
            self._add(modules, optimizers)
            self._budget_s = math.inf if through else 2 * self._budget_s
        self._arrange()

    def scan(self, objects: Iterable[Any] | None = None) -> None:
        """Find modules and optimizers, by default among all that the garbage collector tracks.

        A tenth of a second where they are two million.
        """
        self._add(*modules_and_optimizers_in(gc.get_objects() if objects is None else list(objects)))
        self.complete = True
        self._arrange()

    def _add(self, modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._known.add(modules)
        for optimizer in optimizers:
            self._optimizers.add(optimizer)

    def _arrange(self) -> None:
        """Tell which of the known modules are roots, and which of these are trained."""
        self._stale = self._known.changed = False
        optimized = {id(parameter) for parameter in self._parameters()}
        roots = _without_copies(outermost(self._known.alive()))
        trained = {id(root): _is_trained(root, optimized) for root in roots}
        self._roots = [weakref.ref(root) for root in roots if trained[id(root)]]
        self._untrained = [weakref.ref(root) for root in roots if not trained[id(root)]]
        self._modules = [
            weakref.ref(module) for root in roots for module in root.modules() if module._parameters or module._buffers
        ]

    def trained(self) -> FoundTraining:
        """What is trained, as it is now."""
        parameters = {id(parameter): parameter for parameter in self._parameters()}
        more: dict[int, torch.Tensor] = {}
        buffers: list[torch.Tensor] = []
        for ref in self._modules:
            module = ref()
            if module is None:
                self._stale = True
                continue
            more.update((id(p), p) for p in module._parameters.values() if p is not None and id(p) not in parameters)
            buffers.extend(b for b in module._buffers.values() if b is not None)
        gradients = gradients_of((*parameters.values(), *more.values()))
        state = state_of(self._optimizers)
        return FoundTraining(list(parameters.values()), gradients, state, list(more.values()), buffers)

    def _parameters(self) -> Iterator[torch.Tensor]:
        for optimizer in self._optimizers:
            yield from parameters_of(optimizer)


def _alive(refs: list[weakref.ref[nn.Module]]) -> list[nn.Module]:
    return [module for module in (ref() for ref in refs) if module is not None]


def _is_trained(root: nn.Module, optimized: set[int]) -> bool:
    return any(id(p) in optimized or (p.is_leaf and p.grad is not None) for p in parameters_in(root))


def parameters_in(root: nn.Module) -> Iterator[torch.Tensor]:
    """The parameters of a whole tree, also where its class answers `parameters()` in a way of its own."""
    return nn.Module.parameters(root)


def _without_copies(roots: list[nn.Module]) -> list[nn.Module]:
    """Leave out trees that hold nothing but what others hold, such as graphs that torch.compile made of them."""
    known: set[int] = set()
    kept = []
    for root in sorted(roots, key=lambda root: isinstance(root, torch.fx.GraphModule)):
        held = {id(tensor) for tensor in parameters_in(root)}
        if not held <= known:
            known |= held
            kept.append(root)
    return kept
