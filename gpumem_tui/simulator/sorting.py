"""Device memory that CUDA's sorting, scanning and indexing kernels take (aten/src/ATen/native/cuda)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from gpumem_tui.simulator.profile import Profile
from gpumem_tui.simulator.rules import Buffer, Computed, GivenBack, Taken

_INDEX_BYTES = 8


def index_put(args: Sequence[Any], profile: Profile) -> list[Taken]:
    """(tensor, indices, values, accumulate, …): the elements are added up in the order of where they go.

    Indexing.cu, `index_put_with_sort_kernel` and `computeLinearIndex`; without `accumulate` nothing is sorted.
    """
    tensor, indices, values = args[:3]
    given = [index for index in indices if index is not None]
    if len(args) < 4 or not args[3] or not given or not is_without_mask(args):
        return []
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    count = math.prod(shape)
    taken: list[Taken] = []
    for position in range(len(given)):
        first = len(taken)
        size = count * _INDEX_BYTES
        taken += [size, size, GivenBack(first)]  # wrapped around, then times the stride
        if position:
            taken.append(GivenBack(first + 1))
    if not _is_whole(values, tensor, indices, shape):
        taken.append(_picked(tensor, indices, count) * values.element_size())
    rows = math.prod(
        size for size, index in zip(tensor.shape, _padded(indices, tensor), strict=True) if index is not None
    )
    taken += [count * _INDEX_BYTES] * 3  # sorted, and where each came from, before and after
    taken += [Computed("index_sort", 0, (count, rows)), GivenBack(len(taken))]
    return taken


def sort(args: Sequence[Any], profile: Profile) -> list[Taken]:
    """(tensor, dimension, …); where stability is asked for, the dimension comes by name and the last one is taken.

    Sort.cpp, `sort_cuda_kernel`: up to 4,096 values of a row are sorted where they lie in the result; for more see the
    rule.
    """
    tensor = args[0]
    dimension = args[1] if len(args) > 1 and type(args[1]) is int else -1
    if not tensor.numel() or not tensor.dim():
        return []
    length = tensor.shape[dimension]
    arguments = (tensor.numel() // length, length, tensor.element_size(), int(tensor.stride(dimension) != 1))
    buffers = [Computed("row_sort", position, arguments) for position in range(8)]
    return _sorted_rows(buffers, 0)


def topk(args: Sequence[Any], profile: Profile) -> list[Taken]:
    """(tensor, count, dimension, …); see the rule."""
    tensor, count = args[:2]
    if not tensor.numel() or not tensor.dim() or not count:
        return []
    dimension = args[2] if len(args) > 2 else -1
    length = tensor.shape[dimension]
    arguments = (
        tensor.numel() // length, length, count, tensor.element_size(), int(not tensor.is_contiguous()),
        profile.multiprocessors,
    )  # fmt: skip
    buffers = [Computed("row_topk", position, arguments) for position in range(29)]
    taken: list[Taken] = [*buffers[:8], *(GivenBack(position) for position in reversed(range(8)))]
    for first in (8, 18):  # whole rows, and what was found: two buffers, and what sorting them takes
        taken += buffers[first : first + 2]
        start = len(taken)
        taken += _sorted_rows(buffers[first + 2 : first + 10], start)
        taken += [GivenBack(start + offset) for offset in (9, 4, 3, 2, 1, 0)]
    return [*taken, buffers[28]]


def _sorted_rows(buffers: Sequence[Buffer], start: int) -> list[Taken]:
    """Those of the rule `row_sort`, from entry number `start` on: two of them are given back before the last."""
    return [*buffers[:7], GivenBack(start + 6), GivenBack(start + 5), buffers[7]]


def scan(args: Sequence[Any], profile: Profile) -> list[Taken]:
    """`cumsum` and `cumprod`: (tensor, dimension, …).

    ReduceOps.cpp, `impl_func_cum_ops`: whole numbers and masks are summed as int64, from a copy. ScanUtils.cuh,
    `scan_dim`: a single row goes to CUB.
    """
    tensor = args[0]
    is_whole = not tensor.is_floating_point() and not tensor.is_complex()
    taken: list[Taken] = []
    value_bytes = tensor.element_size()
    if is_whole and tensor.dtype is not torch.int64:
        value_bytes = _INDEX_BYTES
        taken.append(tensor.numel() * value_bytes)
    elif not tensor.is_contiguous():
        taken.append(tensor.nbytes)
    if tensor.dim() and tensor.numel():
        length = tensor.shape[args[1]]
        taken.append(Computed("row_scan", 0, (tensor.numel() // length, length, value_bytes)))
    return taken


def is_without_mask(args: Sequence[Any]) -> bool:
    """Whether adding up by index has nothing to count: how many elements a mask picks only its values tell."""
    masks = (torch.bool, torch.uint8)
    return len(args) < 4 or not args[3] or all(index is None or index.dtype not in masks for index in args[1])


INDEX_PUTS = ("index_put", "index_put_", "_index_put_impl_")

SETTLED = dict.fromkeys(INDEX_PUTS, is_without_mask)
"""Operators of which not all is known, and whether it is for some arguments."""


def _padded(indices: Sequence[torch.Tensor | None], tensor: torch.Tensor) -> list[torch.Tensor | None]:
    return [*indices, *[None] * (tensor.dim() - len(indices))]


def _picked(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], count: int) -> int:
    """How many elements of the tensor the indices reach, one reached twice counted twice."""
    kept = [size for size, index in zip(tensor.shape, _padded(indices, tensor), strict=True) if index is None]
    return count * math.prod(kept)


def _is_whole(
    values: torch.Tensor, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], shape: Sequence[int]
) -> bool:
    """Whether every value is there and in its place, so that none are copied."""
    return values.is_contiguous() and values.numel() == _picked(tensor, indices, math.prod(shape))
