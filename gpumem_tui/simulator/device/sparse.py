"""Sparse tensors in coordinate format: made, copied to the device, and multiplied with dense ones.

Their bytes are those of their indices and values, two dense tensors that are allocated as any other. torch's shape
functions lose how many values there are in nearly every sparse result, so no more than this is followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.utils._mode_utils import no_dispatch

from gpumem_tui.simulator.device.answers import TO_COPY
from gpumem_tui.simulator.device.base import Call
from gpumem_tui.simulator.device.kinds import MAKES_SPARSE, is_sparse
from gpumem_tui.simulator.device.memory import DeviceMemory
from gpumem_tui.simulator.device.results import Results
from gpumem_tui.step.phases import in_backward

_aten: Any = torch.ops.aten
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten._sparse_addmm.default})
_TURNS = (_aten.t.default, _aten.transpose.int)
_LOOKS = (
    _aten._indices.default, _aten._values.default, _aten._nnz.default, _aten.is_coalesced.default,
    _aten._coalesced_.default, _aten.sparse_dim.default, _aten.dense_dim.default, _aten.detach.default,
)  # fmt: skip
_FOLLOWED = _PRODUCTS.union((MAKES_SPARSE, *_LOOKS))

_COUNTED_AS = "sparse mm"
"""What products with a sparse matrix are counted as, together, among the operators whose scratch is not known."""


class SparseTensors:
    """Follows the operators on sparse tensors that can be followed.

    Attributes:
        are_there: whether the program has made one.
    """

    def __init__(self, mode: FakeTensorMode, memory: DeviceMemory, results: Results) -> None:
        self._mode, self._memory, self._results = mode, memory, results
        self._is_making = False
        self.are_there = False

    def concern(self, call: Call) -> bool:
        """Return whether an operator makes or takes sparse tensors; from the first one on they are there."""
        found = is_sparse(call.func, call.args)
        self.are_there |= found
        return found

    def follow(self, call: Call) -> Any:
        """Run an operator on sparse tensors, or one that makes one.

        Raises:
            Untraceable: it is none of those that can be followed.
        """
        self.are_there = True
        with self._mode:
            made = self._made_of_dense(call.func, call.args, call.kwargs)
        if made is not None:
            return made
        self._memory.operator = f"aten.{call.func._opname}"
        if not self._is_followed(call.func):
            raise self._results.failed(call, UnsupportedOperatorException(call.func))
        if call.func not in _PRODUCTS:
            return self._results.worked_out(call)
        with no_dispatch():
            result = self._results.shaped_as(_product(call.args))
        self._memory.record(result)
        self._memory.assumed[_COUNTED_AS] += 1
        return result

    def _is_followed(self, func: Any) -> bool:
        """Return whether the shape function is right; a sparse gradient of backward is nothing to multiply with."""
        return func in _FOLLOWED and not (func is MAKES_SPARSE and in_backward() and not self._is_making)

    def _made_of_dense(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the sparse result of an operator that copies indices and values; None of any other operator."""
        tensor = args[0]
        if func is TO_COPY and type(tensor) is torch.Tensor and tensor.is_sparse:
            given = {"device": kwargs["device"]}
            indices = TO_COPY(tensor._indices(), **given)
            values = TO_COPY(tensor._values(), **given, dtype=kwargs.get("dtype"))
            is_coalesced: bool | None = tensor.is_coalesced()
            shape = tensor.shape
        elif func in _TURNS and tensor.is_sparse and tensor.dim() == 2:
            # A copy, whose rows of indices change places (`transpose` in TensorShape.cpp of ATen).
            indices, values = _aten.clone(tensor._indices()), _aten.clone(tensor._values())
            is_coalesced, shape = None, tensor.shape[::-1]
        else:
            return None
        self._is_making = True
        try:
            made: torch.Tensor = MAKES_SPARSE(
                tensor.sparse_dim(), tensor.dense_dim(), shape, indices, values,
                dtype=values.dtype, layout=torch.sparse_coo, device=kwargs.get("device", values.device),
                is_coalesced=is_coalesced,
            )  # fmt: skip
        finally:
            self._is_making = False
        return made


def _product(args: tuple[Any, ...]) -> torch.Tensor:
    """Return what one of `_PRODUCTS` gives: a dense matrix, in rows (`s_addmm_out_sparse_dense_cuda` of ATen)."""
    left, right = [one for one in args if isinstance(one, torch.Tensor)][-2:]
    return torch.empty(left.shape[0], right.shape[1], dtype=right.dtype, device="meta")
