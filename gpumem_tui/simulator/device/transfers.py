"""What passes between the host and the device: copies of tensors, and values that a program reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gpumem_tui.simulator.device import host
from gpumem_tui.simulator.device.answers import COPY, TO_COPY
from gpumem_tui.simulator.device.asking import decides, passes_on
from gpumem_tui.simulator.device.base import Call, DeviceParts, Handler
from gpumem_tui.simulator.device.kinds import plain
from gpumem_tui.simulator.device.memory import DeviceMemory
from gpumem_tui.simulator.device.results import Results
from gpumem_tui.simulator.device.sparse import SparseTensors
from gpumem_tui.simulator.device.values import Values

READ: Any = torch.ops.aten._local_scalar_dense.default


class Transfers:
    """Follows copies between the host and the device, and reads of a value.

    Attributes:
        handlers: by operator, how the program's own calls are run.
        within: the same for calls that are parts of another operator.
        arriving: called with a tensor of the host that is copied to the device; returns what to copy in its place.
    """

    def __init__(
        self, gpu: DeviceParts, memory: DeviceMemory, values: Values, results: Results, sparse: SparseTensors,
        follow: Handler,
    ) -> None:  # fmt: skip
        self._gpu, self._memory, self._values, self._results = gpu, memory, values, results
        self._sparse, self._follow = sparse, follow
        self.arriving: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.handlers: dict[Any, Handler] = {READ: self._read, COPY: self._copy, TO_COPY: self._to_copy}
        self.within: dict[Any, Handler] = {READ: self._read, COPY: self._copy_within, TO_COPY: self._copy_within}

    def read(self, tensor: torch.Tensor) -> Any:
        """Return the value of a tensor of one element, once the GPU is done (see `Values.read`).

        Where a truth value is unknown and one way on only raises, as that of an assertion, the program goes the other.
        """
        self._gpu.streams.synchronize()
        taken = self._values.taken_for(tensor)
        as_size = taken is not None and tensor.dtype is not torch.bool and taken.is_open and not decides()
        value = self._values.read(tensor, as_size=as_size)
        if taken is not None and as_size:
            self._results.assume("place" if taken.is_place else "count", taken.low, taken.high, value)
        if tensor.dtype is not torch.bool or self._values.of(tensor) is not None:
            return value
        passing = passes_on()
        if passing is None or passing == value:
            return value
        self._results.note_assumed("a check of values computed on the GPU is taken as passed")
        return passing

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
            return self._values.copied_to_host(call.args[0], call.kwargs.get("dtype"))
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
        if not isinstance(target, FakeTensor):
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
        if call.func is COPY and not isinstance(call.args[0], FakeTensor):
            return self._copy_to_host(call)
        return self._results.as_torch_does(call)

    def _copy_to_host(self, call: Call) -> torch.Tensor:
        self._wait_for_copy(call)
        return self._values.copy_to_host(call.args[0], call.args[1])

    def _arrived(self, call: Call, tensor: torch.Tensor) -> None:
        self._memory.note_copy_from_host(tensor)
        self._wait_for_copy(call)

    def _wait_for_copy(self, call: Call) -> None:
        """Wait for the end of a copy between host and device, unless asked not to (`copy_kernel_cuda` in Copy.cu)."""
        if not (call.kwargs.get("non_blocking") or (len(call.args) > 2 and call.args[2])):  # (target, source, …)
            self._gpu.streams.synchronize()
