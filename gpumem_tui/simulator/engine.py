"""What the autograd engine does in place on a GPU, but not on tensors with a Python mode about them.

Where a mode is active, torch's engine and some of its backward formulas leave their arguments alone
(`isTensorSubclassLike`). On a GPU they write into a tensor that nobody else holds, so less is allocated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward

Evaluation = tuple[int, int]
"""One backward formula at work: the backward pass and the sequence number of its node."""

_aten: Any = torch.ops.aten
_ADD: Any = _aten.add.Tensor
_INTO_ZEROS: Mapping[Any, Any] = {
    _aten.scatter.value: _aten.scatter_.value,
    _aten.scatter.src: _aten.scatter_.src,
    _aten.scatter_add.default: _aten.scatter_add_.default,
    _aten.index_put.default: _aten.index_put_.default,
}
"""Formulas that fill zeros of their own: `value_selecting_reduction_backward` (max, min, sort, topk, …) and
`index_backward` (torch/csrc/autograd/FunctionsManual.cpp), `gather_backward` (TensorAdvancedIndexing.cpp)."""

_INTO_OWN_RESULT: Mapping[str, Mapping[Any, Any]] = {
    "BinaryCrossEntropyWithLogitsBackward0": {
        _aten.sub.Tensor: _aten.sub_.Tensor,
        _aten.mul.Tensor: _aten.mul_.Tensor,
    }
}
"""Formulas that go on in their first result, by the name of their node: `binary_cross_entropy_with_logits_backward`
(FunctionsManual.cpp)."""

_IN_PLACE = frozenset((_ADD, *_INTO_ZEROS, *(func for table in _INTO_OWN_RESULT.values() for func in table)))


def evaluation() -> Evaluation | None:
    """The backward formula that is at work, None outside of backward."""
    backward = torch._C._current_graph_task_id()
    if backward == -1:
        return None
    node = torch._C._current_autograd_node()
    return backward, node._sequence_nr() if node is not None else -1


def in_place(
    func: Any, args: tuple[Any, ...], made_in: Callable[[torch.Tensor], Evaluation | None], caller: FrameType | None
) -> Any:
    """The operator that a GPU would run instead of `func`: its in-place form, or `func` itself.

    Args:
        made_in: the formula that made a tensor's storage.
        caller: the Python frame that called the operator; none or the engine's where C++ of backward did.
    """
    if func not in _IN_PLACE or torch.is_grad_enabled():
        return func
    if caller is not None and caller.f_code is not _engine_run_backward.__code__:
        return func
    now = evaluation()
    if now is None:
        return func
    is_own = made_in(args[0]) == now  # then nothing outside of the formula holds it
    if func is _ADD:
        # `InputBuffer::accumulate`: a gradient that waits in the engine was made by another formula than the one at
        # work, or by this one if it gives two to the same.
        if (is_own and not _gives_twice()) or not _is_accumulated(args):
            return func
        return _aten.add_.Tensor
    twin = _INTO_ZEROS.get(func) or _INTO_OWN_RESULT.get(torch._C._current_autograd_node().name(), {}).get(func)
    return twin if twin is not None and is_own else func


def _gives_twice() -> bool:
    """Whether the formula at work has two gradients for one argument, as that of ``x * x``."""
    node = torch._C._current_autograd_node()
    edges = [edge for edge in node.next_functions if edge[0] is not None] if node is not None else []
    return len(set(edges)) < len(edges)


def _is_accumulated(args: tuple[Any, ...]) -> bool:
    """`can_accumulate_inplace` (torch/csrc/autograd/input_buffer.cpp), of two gradients of one shape."""
    waiting, arrived = args
    return (
        isinstance(arrived, torch.Tensor)
        and waiting.shape == arrived.shape
        and waiting.dtype == arrived.dtype
        and _is_dense(waiting)
        and _is_held_once(args)
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side without gaps or overlaps, in whatever order of dimensions."""
    run = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != run:
                return False
            run *= size
    return True


def _references(args: tuple[Any, ...]) -> int:
    return sys.getrefcount(args[0])


_TENSOR_REFERENCES, _STORAGE_REFERENCES, _PYTHON_REFERENCES = 4, 2, _references((object(),)) + 2
"""What is seen here of a tensor that the engine alone holds: the others are its way to Python."""


def _is_held_once(args: tuple[Any, ...]) -> bool:
    storage = args[0].untyped_storage()
    return (
        args[0]._use_count() <= _TENSOR_REFERENCES
        and torch._C._storage_Use_Count(storage._cdata) <= _STORAGE_REFERENCES
        and _references(args) <= _PYTHON_REFERENCES
    )
