"""Transfers between the host and the device: copies of tensors, and values that a program reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from gpumem_tui.simulator.allocator.assumptions import Kind
from gpumem_tui.simulator.device import host
from gpumem_tui.simulator.device.answers import COPY, TO_COPY
from gpumem_tui.simulator.device.asking import decides, passes_on
from gpumem_tui.simulator.device.base import Call, DeviceParts, Handler
from gpumem_tui.simulator.device.kinds import is_without_data, plain
from gpumem_tui.simulator.device.loops import MOST_ROUNDS, Asked, asked
from gpumem_tui.simulator.device.memory import DeviceMemory
from gpumem_tui.simulator.device.results import Results
from gpumem_tui.simulator.device.shapes import part_of
from gpumem_tui.simulator.device.sparse import SparseTensors
from gpumem_tui.simulator.device.taken import Uniform
from gpumem_tui.simulator.device.uses import way_to_rows
from gpumem_tui.simulator.device.values import Values
from gpumem_tui.simulator.device.ways import Way, kind_of, way

_OTHERWISE = 64
"""The value of an unknown number in a trace that shows whether anything is sized by it. Fractions have a half more; of
several numbers every other one is less, as a program may keep those above, or below, some value or their mean."""
READ: Any = torch.ops.aten._local_scalar_dense.default


class Transfers:
    """Follows copies between the host and the device, and reads of a value.

    Attributes:
        handlers: by operator, how the program's own calls are run.
        within: the count for calls that are parts of another operator.
        arriving: called with a tensor of the host that is copied to the device; returns what to copy in its place.
    """

    def __init__(
        self, gpu: DeviceParts, memory: DeviceMemory, values: Values, results: Results, sparse: SparseTensors,
        follow: Handler,
    ) -> None:  # fmt: skip
        self._gpu, self._memory, self._values, self._results = gpu, memory, values, results
        self._sparse, self._follow = sparse, follow
        self._rounds: dict[tuple[int, int], int] = {}
        self.arriving: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.handlers: dict[Any, Handler] = {READ: self._read, COPY: self._copy, TO_COPY: self._to_copy}
        self.within: dict[Any, Handler] = {READ: self._read, COPY: self._copy_within, TO_COPY: self._copy_within}

    def read(self, tensor: torch.Tensor) -> Any:
        """Return the value of a tensor of one element, once the GPU is done (see `Values.read`).

        Where a truth value is unknown and one way on only raises, as that of an assertion, the program goes the other.
        """
        self._gpu.streams.synchronize()
        if tensor.dtype is not torch.bool:
            return self._number(tensor)
        value = self._values.read(tensor)
        if self._values.of(tensor) is not None:
            return value
        if (way := way_to_rows()) is not None:
            return way
        if (test := asked()) is not None:
            return self._truth_in_loop(test)
        passing = passes_on()
        if passing is None or passing == value:
            return value
        self._results.note_assumed("a check of values computed on the GPU is taken as passed")
        return passing

    def _number(self, tensor: torch.Tensor) -> Any:
        """Return a number that a program reads: where it takes a size from it, as is assumed of one not known."""
        if (known := self._values.worked(tensor)) is not None:
            return known.item()
        taken = self._values.taken_for(tensor)
        if (taken is None or taken.is_open) and decides():
            number = self._values.unknown(
                tensor, as_size=taken is None or (not taken.is_place and way_to_rows() is not None)
            )
            if (test := asked()) is None:
                return number
            low, high = (-math.inf, math.inf) if taken is None else (taken.low, taken.high)
            steered = test.number(number, low, high, self._truth_in_loop(test))
            return number if steered is None else steered if tensor.is_floating_point() else int(steered)
        found = self._unknown_to_host(tensor)
        return found.item() if isinstance(found, torch.Tensor) else found

    def _truth_in_loop(self, test: Asked) -> bool:
        """Return the truth value of a test by which a loop makes as many rounds as are traced, and note these."""
        ending = test.ending
        if ending.trains:
            return ending.going_on
        told = self._results.number("rounds are made")
        most = MOST_ROUNDS if ending.is_bounded else 1
        if told is not None:
            most = round(told)
        elif self._values.end == "fewest":
            most = 0
        else:
            self._results.assume("loop" if ending.is_bounded else "round", 0, 1, 1)
        made = self._rounds.pop(test.key, 0)
        if made >= most:
            return not ending.going_on
        self._rounds[test.key] = made + 1
        return ending.going_on

    def _to_host(self, tensor: torch.Tensor) -> Any:
        """Return what the host gets of numbers: their values, or what they are taken for where these are unknown."""
        known = self._values.worked(tensor)
        return self._unknown_to_host(tensor) if known is None else known

    def _unknown_to_host(self, tensor: torch.Tensor) -> Any:
        """Return what the host gets of unknown numbers: if they may size anything, those at the end that is traced."""
        taken = self._values.taken_for(tensor)
        if tensor.dtype is torch.bool or (taken is not None and not taken.is_open):
            return self._values.unknown(tensor)
        found = way(kind_of(tensor))
        self._results.note_read(found)
        if taken is None:
            return self._unbounded(tensor, found)
        share = self._results.told(READ)
        if share is not None:
            return part_of(share, taken.high, taken.low)
        if found.may_size or (found.divides and taken.is_place):
            return self._sizes(tensor, taken, found)
        if found.divides:  # by it, or by the rest of it
            return min(max(1, taken.low, (taken.low + taken.high) // 2), taken.high)
        return self._values.unknown(tensor, as_size=not taken.is_place)

    def _unbounded(self, tensor: torch.Tensor, found: Way) -> torch.Tensor | float:
        """Return what a number is taken for that nothing bounds, and note that something may be sized by it."""
        number = self._results.number("is read")
        if number is not None:
            return number if tensor.is_floating_point() else round(number)
        if found.may_size:
            self._results.note_unbounded()
            if self._results.reads_otherwise:
                other = _OTHERWISE + 0.5 if tensor.is_floating_point() else _OTHERWISE
                if tensor.numel() == 1:
                    return other
                numbers = torch.full((tensor.numel(),), other, dtype=tensor.dtype, device="cpu")
                numbers[1::2] = -other if tensor.is_floating_point() else 1
                return numbers.view(tensor.shape)
        value: float = self._values.unknown(tensor)
        return value or int(found.divides)

    def _sizes(self, tensor: torch.Tensor, taken: Uniform, found: Way) -> torch.Tensor:
        """Return bounded numbers from which a program takes sizes, at the end that is traced, and note them."""
        sizes = taken.sizes(tensor, self._values.end, least=found.divides)
        kind: Kind = "place" if taken.is_place else "count"
        self._results.assume(kind, taken.low, taken.high, int(sizes.max()))
        return sizes

    def _chosen(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the mask that the host gets of one that the GPU computes, if it chooses rows by it; else None."""
        if tensor.dtype is not torch.bool or self._values.of(tensor) is not None:
            return None
        taken = self._values.taken_for(tensor)
        if tensor.numel() < 2 or (taken is not None and not taken.is_open) or not way(kind_of(tensor)).may_size:
            return None
        if self._values.worked(tensor) is not None:
            return None
        kept = self._results.keep(tensor)
        mask = torch.zeros(tensor.numel(), dtype=torch.bool, device="cpu")
        mask[:kept] = True
        return mask.view(tensor.shape)

    def _read(self, call: Call) -> Any:
        return self.read(call.args[0])

    def _to_copy(self, call: Call) -> Any:
        """Copy a tensor to the device, from it, or on it."""
        call.args = tuple(map(plain, call.args))
        if self._sparse.concern(call):
            return self._sparse.follow(call)
        if host.is_to_host(call.args[0], call.kwargs):
            self._wait_for_copy(call)
            if host.is_copied_offloaded(call.args[0]):
                return self._results.worked_out(call)
            source = call.args[0]
            if (chosen := self._chosen(source)) is not None:
                return chosen.to(call.kwargs.get("dtype") or torch.bool)
            found = self._to_host(source)
            dtype = call.kwargs.get("dtype") or source.dtype
            if isinstance(found, torch.Tensor):
                return found.to(dtype, copy=True)
            return torch.full(source.shape, found, dtype=dtype, device="cpu")
        if self.arriving is not None and type(call.args[0]) is torch.Tensor:
            call.args = (self.arriving(call.args[0]), *call.args[1:])
        result = self._follow(call)
        if host.holds_values(call.args):
            self._arrived(call, result)
        return result

    def _copy(self, call: Call) -> Any:
        """Copy a tensor into another one."""
        call.args = tuple(map(plain, call.args))
        target = call.args[0]
        if not is_without_data(target):
            return self._copy_to_host(call)
        result = self._follow(call)
        if target.fake_device.type == "cpu":
            self._wait_for_copy(call)
        elif host.holds_values(call.args):
            self._arrived(call, target)
        return result

    def _copy_within(self, call: Call) -> Any:
        """Copy a tensor as a part of an operator."""
        call.args = tuple(map(plain, call.args))
        if call.func is COPY and not is_without_data(call.args[0]):
            return self._copy_to_host(call)
        return self._results.as_torch_does(call)

    def _copy_to_host(self, call: Call) -> torch.Tensor:
        self._wait_for_copy(call)
        target, source = call.args[:2]
        if (chosen := self._chosen(source)) is not None:
            return torch.Tensor.copy_(target, chosen)
        found = self._to_host(source)
        return torch.Tensor.copy_(target, found) if isinstance(found, torch.Tensor) else target.fill_(found)

    def _arrived(self, call: Call, tensor: torch.Tensor) -> None:
        self._memory.note_copy_from_host(tensor)
        self._wait_for_copy(call)

    def _wait_for_copy(self, call: Call) -> None:
        """Wait for the end of a copy between host and device, unless asked not to (`copy_kernel_cuda` in Copy.cu)."""
        if not (call.kwargs.get("non_blocking") or (len(call.args) > 2 and call.args[2])):  # (target, source, …)
            self._gpu.streams.synchronize()
