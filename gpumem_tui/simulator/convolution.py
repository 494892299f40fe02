"""cuDNN's workspaces of convolutions. Which algorithm it picks is not known without it, so a range is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from gpumem_tui.simulator.profile import Profile
from gpumem_tui.simulator.rules import Buffer, Computed

_COMPLEX_BYTES = 8
_FFT_LARGEST = 256
"""Padded pixels a side (cuDNN API reference, `CUDNN_CONVOLUTION_FWD_ALGO_FFT`: strides of 1, too)."""

_WINOGRAD_SIDES = (3, 5)
_WINOGRAD_OUTPUTS = 2
"""Filters that `CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD_NONFUSED` takes (the same reference, strides of 1), and the outputs
of a tile's side in F(2x2, 3x3), which needs most (Lavin and Gray 2015, Fast Algorithms for Convolutional Neural
Networks)."""


def forward(args: Sequence[Any], profile: Profile) -> list[Buffer]:
    """(input, weight, bias, stride, padding, dilation, transposed, output padding, groups)"""
    images, weight, _, stride, padding, dilation, transposed, output_padding, groups = args[:9]
    result = _result_shape(images, weight, stride, padding, dilation, transposed, output_padding, groups)
    return _workspace(images, weight, result, stride, padding, groups, transposed, profile)


def backward(args: Sequence[Any], profile: Profile) -> list[Buffer]:
    """One workspace for the input's gradient and one for the weight's, one after the other; counted as one.

    (gradient, input, weight, bias sizes, stride, padding, dilation, transposed, output padding, groups, …)
    """
    gradient, images, weight, _, stride, padding, _, transposed, _, groups = args[:10]
    return _workspace(images, weight, list(gradient.shape), stride, padding, groups, transposed, profile)


def _workspace(
    images: torch.Tensor,
    weight: torch.Tensor,
    result: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    groups: int,
    transposed: bool,
    profile: Profile,
) -> list[Buffer]:
    if _is_native_depthwise(images, groups, transposed):
        return []
    element_bytes = images.element_size()
    tried_bytes = 0
    if torch.backends.cudnn.benchmark:
        small, large = (result, images.shape) if transposed else (images.shape, result)
        tried_bytes = max(
            _fourier_bytes(small, large, weight, stride, padding, groups),
            _winograd_bytes(small, large, weight, stride, groups),
        )
    arguments = (
        images.numel() * element_bytes,
        weight.numel() * element_bytes,
        math.prod(result) * element_bytes,
        int(_converts(images, profile)),
        tried_bytes,
    )
    return [Computed("convolution", 0, arguments)]


def _converts(images: torch.Tensor, profile: Profile) -> bool:
    """Whether a tensor core kernel may be chosen for tensors that are not in its order."""
    if not images.is_contiguous() or images.shape[1] == 1:
        return False
    if images.dtype in (torch.float16, torch.bfloat16):
        return profile.compute_capability >= (7, 0)
    return images.dtype == torch.float32 and profile.compute_capability >= (8, 0) and torch.backends.cudnn.allow_tf32


def _is_native_depthwise(images: torch.Tensor, groups: int, transposed: bool) -> bool:
    """Whether PyTorch's own kernel runs, which takes none.

    aten/src/ATen/native/Convolution.cpp, `is_depthwise` and `use_cudnn_depthwise`.
    """
    in_halves = images.dtype in (torch.float16, torch.bfloat16)
    return images.shape[1] == groups > 1 and not transposed and not in_halves and images.is_contiguous()


def _fourier_bytes(
    images: Sequence[int],
    result: Sequence[int],
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    groups: int,
) -> int:
    """Transforms of input, filters and output, of whole images in a power of two of pixels; half of each by symmetry.

    Mathieu, Henaff and LeCun 2014, Fast Training of Convolutional Networks through FFTs.
    """
    sides = [size + 2 * pad for size, pad in zip(images[2:], padding, strict=False)]
    if len(sides) != 2 or max(stride) > 1 or max(weight.shape[2:]) == 1 or max(sides) > _FFT_LARGEST:
        return 0
    high, wide = (1 << (side - 1).bit_length() for side in sides)
    positions = high * (wide // 2 + 1)
    channels, results = images[1], result[1]
    return _COMPLEX_BYTES * positions * (images[0] * (channels + results) + channels * results // groups)


def _winograd_bytes(
    images: Sequence[int], result: Sequence[int], weight: torch.Tensor, stride: Sequence[int], groups: int
) -> int:
    """Transformed tiles of input and output, and filters, in fp32."""
    side = weight.shape[-1]
    if len(result) != 4 or max(stride) > 1 or side not in _WINOGRAD_SIDES or weight.shape[-2] != side:
        return 0
    points = (side + _WINOGRAD_OUTPUTS - 1) ** 2
    tiles = result[0] * math.prod(-(-size // _WINOGRAD_OUTPUTS) for size in result[2:])
    channels, results = images[1], result[1]
    return 4 * points * (tiles * (channels + results) + channels * results // groups)


def _result_shape(
    images: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> list[int]:
    sides = []
    for axis, size in enumerate(images.shape[2:]):
        step, pad, spread, more = (_at(values, axis) for values in (stride, padding, dilation, output_padding))
        reach = spread * (weight.shape[2 + axis] - 1)
        sides.append(
            (size - 1) * step - 2 * pad + reach + more + 1 if transposed else (size + 2 * pad - reach - 1) // step + 1
        )
    return [images.shape[0], weight.shape[1] * groups if transposed else weight.shape[0], *sides]


def _at(values: Sequence[int], axis: int) -> int:
    """Of a value for every axis, or one for all."""
    return values[axis] if len(values) > 1 else values[0]
