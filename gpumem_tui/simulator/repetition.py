"""A call of a model that is not run: what an equal one did to memory is done again, in forward and in backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from gpumem_tui.simulator.blocks import Block

if TYPE_CHECKING:
    from gpumem_tui.simulator.device import SimulatedGpu

Allocation = tuple[int, Block | None]
ARGUMENT = 1 << 40
"""Added to the position of an argument, where it stands among the numbers of allocations."""


@dataclass(frozen=True)
class CallOutput:
    """A tensor that a call gives back: a view of the storage that the call's allocation `number` holds."""

    number: int
    storage_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    has_gradient: bool


@dataclass(frozen=True)
class CallPattern:
    """What a call does to memory.

    Allocations are numbered from 1 in the order of forward and backward.

    Attributes:
        forward, backward: the events: ``k`` when allocation k is made, ``-k`` when it is released; `ARGUMENT` and k
            stand for the call's k-th tensor argument, which its graph may be the last to hold.
        sources: the recorder's number of each allocation when it was observed.
        sizes: requested bytes by allocation.
        cached: allocations of forward that live until autocast forgets its copies of weights, in the order in which
            they are released then.
        gradients: by output: after how many events of backward its gradient is released; -1 if not within it.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    sources: tuple[int, ...] = field(compare=False)
    sizes: tuple[int, ...]
    cached: tuple[int, ...]
    gradients: tuple[tuple[int, int], ...]
    outputs: tuple[CallOutput | Any, ...]
    structure: Any


class Repetition:
    """One call that is not run: its allocations and its results."""

    def __init__(
        self, gpu: SimulatedGpu, pattern: CallPattern, arguments: Sequence[torch.Tensor], cached: list[Allocation]
    ) -> None:
        self._mode = gpu.mode
        self.pattern = pattern
        self._cached = cached
        self._live: dict[int, Allocation] = {}
        self._released_in_backward = {-event for event in pattern.backward if event < 0}
        self._held: dict[int, object] = {
            number: arguments[number - ARGUMENT] for number in self._released_in_backward if number >= ARGUMENT
        }

    def forward(self) -> list[torch.Tensor]:
        """Forward's events; the results in the order of the outputs."""
        outputs = [leaf for leaf in self.pattern.outputs if isinstance(leaf, CallOutput)]
        storages: dict[int, torch.UntypedStorage] = {}
        self._replay(self.pattern.forward, {output.number: output for output in outputs}, storages)
        self._cached += [self._live.pop(number) for number in self.pattern.cached if number in self._live]
        self._held.update((number, storages[number]) for number in self._released_in_backward & storages.keys())
        return [self._mode.view_of(storages[o.number], o.dtype, o.shape, o.stride, o.offset) for o in outputs]

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Backward's events, among them the release of the gradients that came in."""
        position = 0
        for output, after in self.pattern.gradients:
            self._replay(self.pattern.backward[position:after], {}, {})
            position = after
            gradient = gradients[output]
            if gradient is not None:
                self._mode.release(gradient)
        self._replay(self.pattern.backward[position:], {}, {})
        self._held.clear()

    def _replay(
        self, events: Sequence[int], outputs: dict[int, CallOutput], storages: dict[int, torch.UntypedStorage]
    ) -> None:
        allocate, free = self._mode.allocate_again, self._mode.free
        live, sources = self._live, self.pattern.sources
        for event in events:
            if event > 0:
                if event in outputs:
                    storages[event] = self._mode.new_storage(outputs[event].storage_bytes, sources[event - 1])
                else:
                    live[event] = allocate(sources[event - 1])
            elif -event in live:
                free(*live.pop(-event))
            else:
                self._held.pop(-event, None)

    def __del__(self) -> None:
        """A graph that is dropped without a backward gives back what it held."""
        for allocation in self._live.values():
            self._mode.free(*allocation)


class RepeatedCall(torch.autograd.Function):
    """The place of a repeated call in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, repetition: Repetition) -> Any:
        ctx.repetition = repetition
        ctx.set_materialize_grads(False)
        made = repetition.forward()
        outputs = [leaf for leaf in repetition.pattern.outputs if isinstance(leaf, CallOutput)]
        ctx.mark_non_differentiable(
            *(tensor for tensor, output in zip(made, outputs, strict=True) if not output.has_gradient)
        )
        positions = [p for p, leaf in enumerate(repetition.pattern.outputs) if isinstance(leaf, CallOutput)]
        ctx.positions = positions
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        by_leaf: list[torch.Tensor | None] = [None] * (max(ctx.positions) + 1)
        for position, gradient in zip(ctx.positions, gradients, strict=True):
            by_leaf[position] = gradient
        ctx.repetition.backward(by_leaf)
        return None, None
