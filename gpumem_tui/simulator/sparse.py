"""Sparse tensors in coordinate format on the simulated device: made, copied there, and multiplied with dense ones.

Their bytes are those of their indices and values, two dense tensors that are allocated as any other. torch's shape
functions lose how many values there are in nearly every sparse result, so no more than this is followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_aten: Any = torch.ops.aten
_MAKES = _aten._sparse_coo_tensor_with_dims_and_tensors.default
_TO_COPY = _aten._to_copy.default
_TURNS = (_aten.t.default, _aten.transpose.int)
_LOOKS = (
    _aten._indices.default, _aten._values.default, _aten._nnz.default, _aten.is_coalesced.default,
    _aten._coalesced_.default, _aten.sparse_dim.default, _aten.dense_dim.default, _aten.detach.default,
)  # fmt: skip

SPARSE_PRODUCT = "sparse mm"
"""What products with a sparse matrix are counted as, together."""


def is_sparse(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator makes a sparse tensor, or is given one."""
    return func is _MAKES or any(isinstance(one, torch.Tensor) and one.layout is not torch.strided for one in args)


class SparseTensors:
    """Tells the operators on sparse tensors that can be followed."""

    PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten._sparse_addmm.default})
    _FOLLOWED = PRODUCTS.union((_MAKES, *_LOOKS))

    def __init__(self) -> None:
        self._are_there = self._is_making = False

    def concern(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether an operator on the device has to do with sparse tensors."""
        if not self._are_there and func is not _TO_COPY and func is not _MAKES:
            return False
        found = is_sparse(func, args)
        self._are_there |= found
        return found

    def is_followed(self, func: Any, in_backward: bool) -> bool:
        """Whether the shape function is right; a sparse gradient that backward makes is no tensor to multiply with."""
        return func in self._FOLLOWED and not (func is _MAKES and in_backward and not self._is_making)

    def product(self, args: tuple[Any, ...]) -> torch.Tensor:
        """What one of `PRODUCTS` gives: a dense matrix, in rows (`s_addmm_out_sparse_dense_cuda` of ATen)."""
        left, right = [one for one in args if isinstance(one, torch.Tensor)][-2:]
        return torch.empty(left.shape[0], right.shape[1], dtype=right.dtype, device="meta")

    def made_of_dense(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """The sparse result of an operator that copies indices and values; None of any other operator."""
        tensor = args[0]
        if func is _TO_COPY and type(tensor) is torch.Tensor and tensor.is_sparse:
            given = {"device": kwargs["device"]}
            indices = _TO_COPY(tensor._indices(), **given)
            values = _TO_COPY(tensor._values(), **given, dtype=kwargs.get("dtype"))
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
            made: torch.Tensor = _MAKES(
                tensor.sparse_dim(), tensor.dense_dim(), shape, indices, values,
                dtype=values.dtype, layout=torch.sparse_coo, device=kwargs.get("device", values.device),
                is_coalesced=is_coalesced,
            )  # fmt: skip
        finally:
            self._is_making = False
        return made
