"""Device memory that CUDA's indexing kernels take for sorting (aten/src/ATen/native/cuda)."""

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
    if len(args) < 4 or not args[3]:
        return []
    given = [index for index in indices if index is not None]
    if not given or any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return []  # how many elements a mask picks is known to the values alone
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
    taken += [_sort(count, rows), GivenBack(len(taken))]
    return taken


def _sort(count: int, largest: int) -> Buffer:
    return Computed("radix_sort", 0, (count, _INDEX_BYTES, _INDEX_BYTES, max(1, (largest - 1).bit_length())))


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
