"""Sparse tensors in coordinate format: made, copied, multiplied with dense ones, and gradients of tables.

Their bytes are those of their indices and values, two dense tensors that are allocated as any other. torch's shape
functions lose how many values there are in nearly every sparse result, so that what is followed is here: each
operator makes the dense tensors that its kernel makes (aten/src/ATen/native/sparse/cuda of torch).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
    _aten._coalesced_.default, _aten.sparse_dim.default, _aten.dense_dim.default,
)  # fmt: skip
_FOLLOWED = _PRODUCTS.union((MAKES_SPARSE, *_LOOKS))
BAG_BACKWARD: Any = _aten._embedding_bag_backward.default
_FOREACH = (_aten._foreach_mul_.Scalar, _aten._foreach_add_.List)
"""Operators that SGD with momentum calls on lists with sparse tensors."""

_BAG_SPARSE, _MEAN = 9, 1
"""Its argument that asks for a sparse gradient, and the mode that divides by a bag's size (`EmbeddingBag.h`)."""

_COUNTED_AS = "sparse mm"
"""The common name of products with a sparse matrix among the operators whose scratch is not known."""


class SparseTensors:
    """Follows the operators on sparse tensors that can be followed.

    Attributes:
        are_there: whether the program has made one. `are_gradients`: whether backward has.
    """

    def __init__(self, mode: FakeTensorMode, memory: DeviceMemory, results: Results) -> None:
        self._mode, self._memory, self._results = mode, memory, results
        self.are_there = self.are_gradients = False
        self._by_parts: dict[Any, Callable[..., Any]] = {
            _aten._coalesce.default: self._coalesce,
            _aten.clone.default: self._clone,
            _aten.detach.default: lambda tensor: self._with(tensor, tensor._values()),
            _aten.zero_.default: self._clear,
            _aten.add.Tensor: self._add,
            _aten.add_.Tensor: self._add_in_place,
            _aten.sparse_mask.default: self._take_rows,
            _aten.mul.Tensor: lambda tensor, by: self._with(tensor, _aten.mul(tensor._values(), by)),
            _aten.div.Tensor: lambda tensor, by: self._with(tensor, _aten.div(tensor._values(), by)),
            _aten.neg.default: lambda tensor: self._with(tensor, _aten.neg(tensor._values())),
            _aten.mul_.Tensor: self._scale,
            _aten.div_.Tensor: self._scale,
            BAG_BACKWARD: self._bag_gradient,
            **dict.fromkeys(_FOREACH, self._each),
        }

    def concern(self, call: Call) -> bool:
        """Return whether an operator makes or takes sparse tensors; from the first one on they are there."""
        found = is_sparse(call.func, call.args) or (call.func in _FOREACH and any(map(_is_one, call.args[0])))
        self.are_there |= found
        return found

    def follow(self, call: Call) -> Any:
        """Run an operator on sparse tensors, or one that makes one.

        Raises:
            Untraceable: it is none of those that can be followed.
        """
        self.are_there = True
        self.are_gradients |= call.func in (MAKES_SPARSE, BAG_BACKWARD) and in_backward()
        by_parts = self._by_parts.get(call.func)
        with self._mode:
            made = self._made_of_dense(call.func, call.args, call.kwargs)
            if made is None and by_parts is not None:
                return by_parts(*call.args, **call.kwargs)
        if made is not None:
            return made
        self._memory.operator = f"aten.{call.func._opname}"
        if call.func not in _FOLLOWED:
            raise self._results.failed(call, UnsupportedOperatorException(call.func))
        if call.func not in _PRODUCTS:
            return self._results.worked_out(call)
        with no_dispatch():
            result = self._results.shaped_as(_product(call.args))
        self._memory.record(result)
        self._memory.assumed[_COUNTED_AS] += 1
        return result

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
        return self._make(indices, values, shape, kwargs.get("device"), is_coalesced=is_coalesced)

    def _make(
        self, indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int], device: Any = None,
        is_coalesced: bool | None = None,
    ) -> torch.Tensor:  # fmt: skip
        made: torch.Tensor = MAKES_SPARSE(
            indices.shape[0], values.dim() - 1, shape, indices, values,
            dtype=values.dtype, layout=torch.sparse_coo, device=device or values.device, is_coalesced=is_coalesced,
        )  # fmt: skip
        return made

    # Gradients of tables, and what optimizers do with them

    def _with(self, tensor: torch.Tensor, values: torch.Tensor, *, is_copy: bool = False) -> torch.Tensor:
        """Return a tensor with other values at the same places, which are copied too where that is what is asked."""
        indices = _aten.clone(tensor._indices()) if is_copy else tensor._indices()
        return self._make(indices, values, tensor.shape, is_coalesced=tensor.is_coalesced())

    def _clone(self, tensor: torch.Tensor, **_: Any) -> torch.Tensor:
        """Copy a tensor; backward takes over what is in rows (accumulate_grad.h of torch's autograd)."""
        indices, values = tensor._indices(), tensor._values()
        is_taken = in_backward() and not torch.is_grad_enabled() and indices.is_contiguous() and values.is_contiguous()
        if is_taken:
            return self._with(tensor, values)
        return self._with(tensor, _aten.clone(values, memory_format=torch.contiguous_format), is_copy=True)

    def _clear(self, tensor: torch.Tensor) -> torch.Tensor:
        indices, values = tensor._indices(), tensor._values()
        none = _aten.new_empty(values, [0, *values.shape[1:]])
        _become(tensor, self._make(_aten.new_empty(indices, [indices.shape[0], 0]), none, tensor.shape))
        return tensor

    def _coalesce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up what belongs to one row (`_coalesce_sparse_cuda` in SparseCUDATensor.cu).

        Indices are flattened into a copy, which becomes the new ones where they are of one dimension; sorted with
        their places, for which Thrust takes as much again, and those of a row found by a third list. For ids of
        the host the number of distinct rows can be counted; else it is assumed.
        """
        indices, values = tensor._indices(), tensor._values()
        count = values.shape[0]
        if count < 2:
            return self._with(tensor, _aten.clone(values), is_copy=True)
        rows = self._results.rows_of(indices, math.prod(tensor.shape[: indices.shape[0]]))
        flat, places, offsets = (_aten.new_empty(indices, [count]) for _ in range(3))
        _aten.new_empty(indices, [2 * count])
        del places, offsets
        made = _aten.new_empty(values, [rows, *values.shape[1:]])
        if indices.shape[0] == 1:
            kept = flat.narrow(0, 0, rows).unsqueeze(0)
        else:
            kept = _aten.new_empty(indices, [indices.shape[0], rows])
        return self._make(kept, made, tensor.shape, is_coalesced=True)

    def _take_rows(self, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Take the rows of a dense tensor that a sparse one has: gathered, and multiplied (`sparse_mask`)."""
        del tensor
        values = mask._values()
        gathered = _aten.new_empty(values, values.shape)
        return self._with(mask, _aten.mul(gathered, values))

    def _add(self, left: torch.Tensor, right: torch.Tensor, *, alpha: Any = 1) -> torch.Tensor:
        """Add a sparse tensor to a dense one, a copy of it; of two sparse ones the values stand behind each other."""
        del alpha
        if not left.is_sparse or not right.is_sparse:
            return _aten.clone(right if left.is_sparse else left)  # type: ignore[no-any-return]
        indices = _aten.cat([left._indices(), right._indices()], 1)
        return self._make(indices, _aten.cat([left._values(), right._values()]), left.shape)

    def _add_in_place(self, left: torch.Tensor, right: torch.Tensor, *, alpha: Any = 1) -> torch.Tensor:
        """Add to a dense tensor, which takes nothing (`add_out_dense_sparse_cuda`), or to a sparse one."""
        if left.is_sparse:
            _become(left, self._add(left, right, alpha=alpha))
        return left

    def _scale(self, tensor: torch.Tensor, by: Any) -> torch.Tensor:
        _aten.mul_(tensor._values(), by)
        return tensor

    def _each(self, tensors: Sequence[torch.Tensor], by: Any, **kwargs: Any) -> None:
        """Work on tensors one by one, as torch does where one of them is sparse."""
        others = by if isinstance(by, (list, tuple)) else [by] * len(tensors)
        for tensor, other in zip(tensors, others, strict=True):
            if kwargs or isinstance(other, torch.Tensor):
                _aten.add_(tensor, other, **kwargs)
            else:
                _aten.mul_(tensor, other)

    def _bag_gradient(self, *args: Any) -> torch.Tensor:
        """Return the gradient of a table of bags (`_embedding_bag_sparse_backward` in EmbeddingBag.cpp)."""
        gradient, indices, _, bags, sizes, _, rows, _, how, _, *more = args
        values = _aten.index_select(gradient, 0, bags)
        if how == _MEAN:
            shares = _aten.reciprocal(sizes.to(values.dtype))
            values = _aten.mul(values, _aten.index_select(shares, 0, bags).unsqueeze(1))
        if more and more[0] is not None:
            values = _aten.mul(values, more[0].unsqueeze(1))
        return self._make(_aten.view(indices, [1, -1]), values, (rows, values.shape[1]))


def _is_one(tensor: torch.Tensor) -> bool:
    return tensor.layout is not torch.strided


def is_sparse_bag(args: Sequence[Any]) -> bool:
    """Return whether the backward of an `EmbeddingBag` is asked for a sparse gradient."""
    return bool(args[_BAG_SPARSE])


def _become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Give a sparse tensor another one's indices and values."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        tensor.data = other


def _product(args: tuple[Any, ...]) -> torch.Tensor:
    """Return what one of `_PRODUCTS` gives: a dense matrix, in rows (`s_addmm_out_sparse_dense_cuda` of ATen)."""
    left, right = [one for one in args if isinstance(one, torch.Tensor)][-2:]
    return torch.empty(left.shape[0], right.shape[1], dtype=right.dtype, device="meta")
