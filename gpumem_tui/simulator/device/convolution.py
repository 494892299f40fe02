"""cuDNN's workspaces of convolutions. Which algorithm it picks is not known without it, so a range is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpumem_tui.simulator.allocator.profile import Profile
from gpumem_tui.simulator.allocator.rules import Buffer, Computed

_COMPLEX_BYTES = 8
_FFT_LARGEST = 256
"""Padded pixels a side (cuDNN API reference, `CUDNN_CONVOLUTION_FWD_ALGO_FFT`: strides of 1, too)."""

_WINOGRAD_SIDES = (3, 5)
_WINOGRAD_OUTPUTS = 4
"""Filters that `CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD_NONFUSED` takes (the same reference, strides of 1), and the outputs
of a tile's side, as in F(4x4, 3x3): Lavin and Gray 2015, Fast Algorithms for Convolutional Neural Networks. VGG-16 with
128 images was measured to hold 7.0 to 7.3 GiB more than it reserves without workspaces (itu-rad/GPUMemNet, benchmark
mode); the tiles of its second convolution are 6.9 GiB so."""


def forward(args: Sequence[Any], profile: Profile) -> list[Buffer]:
    """Return the workspace: (input, weight, bias, stride, padding, dilation, transposed, output padding, groups)."""
    images, weight, _, stride, padding, dilation, transposed, output_padding, groups = args[:9]
    sides = []
    for axis, size in enumerate(images.shape[2:]):
        step, pad, spread, more = (
            values[axis] if len(values) > 1 else values[0] for values in (stride, padding, dilation, output_padding)
        )
        reach = spread * (weight.shape[2 + axis] - 1)
        sides.append(
            (size - 1) * step - 2 * pad + reach + more + 1 if transposed else (size + 2 * pad - reach - 1) // step + 1
        )
    result = [images.shape[0], weight.shape[1] * groups if transposed else weight.shape[0], *sides]
    return _Convolution(images, weight, result, stride, padding, groups, transposed).workspace(profile)


def backward(args: Sequence[Any], profile: Profile) -> list[Buffer]:
    """Return one workspace for the input's gradient and the weight's, as these come one after the other.

    Arguments are (gradient, input, weight, bias sizes, stride, padding, dilation, transposed, output padding, groups,
    …).
    """
    gradient, images, weight, _, stride, padding, _, transposed, _, groups = args[:10]
    return _Convolution(images, weight, list(gradient.shape), stride, padding, groups, transposed).workspace(profile)


@dataclass(frozen=True)
class _Convolution:
    """A convolution, by what its workspace follows from; `result` is the shape of its output."""

    images: torch.Tensor
    weight: torch.Tensor
    result: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    groups: int
    transposed: bool

    def workspace(self, profile: Profile) -> list[Buffer]:
        images, element_bytes = self.images, self.images.element_size()
        in_halves = images.dtype in (torch.float16, torch.bfloat16)
        is_plain = images.is_contiguous()
        # PyTorch's own kernel takes none: `is_depthwise` and `use_cudnn_depthwise` in aten/src/ATen/native/
        # Convolution.cpp.
        if images.shape[1] == self.groups > 1 and not self.transposed and not in_halves and is_plain:
            return []
        # Whether a tensor core kernel may be chosen for tensors that are not in its order.
        in_tf32 = images.dtype == torch.float32 and torch.backends.cudnn.allow_tf32
        needed = (7, 0) if in_halves else (8, 0)
        converts = is_plain and images.shape[1] > 1 and (in_halves or in_tf32) and profile.compute_capability >= needed
        is_tried = torch.backends.cudnn.benchmark
        arguments = (
            images.numel() * element_bytes,
            self.weight.numel() * element_bytes,
            math.prod(self.result) * element_bytes,
            int(converts),
            max(self._fourier_bytes(), self._winograd_bytes()) if is_tried else 0,
        )
        return [Computed("convolution", 0, arguments)]

    @property
    def _small_and_large(self) -> tuple[Sequence[int], Sequence[int]]:
        return (self.result, self.images.shape) if self.transposed else (self.images.shape, self.result)

    def _fourier_bytes(self) -> int:
        """Return transforms of input, filters and output, of whole images in a power of two of pixels.

        Half of each, by symmetry. Mathieu, Henaff and LeCun 2014, Fast Training of Convolutional Networks through FFTs.
        """
        images, result = self._small_and_large
        sides = [size + 2 * pad for size, pad in zip(images[2:], self.padding, strict=False)]
        if len(sides) != 2 or max(self.stride) > 1 or max(self.weight.shape[2:]) == 1 or max(sides) > _FFT_LARGEST:
            return 0
        high, wide = (1 << (side - 1).bit_length() for side in sides)
        return _COMPLEX_BYTES * high * (wide // 2 + 1) * self._planes(images[0], images[1], result[1])

    def _winograd_bytes(self) -> int:
        """Return transformed tiles of input and output, and filters, in fp32."""
        images, result = self._small_and_large
        side = self.weight.shape[-1]
        if len(result) != 4 or max(self.stride) > 1 or side not in _WINOGRAD_SIDES or self.weight.shape[-2] != side:
            return 0
        points = (side + _WINOGRAD_OUTPUTS - 1) ** 2
        tiles = result[0] * math.prod(-(-size // _WINOGRAD_OUTPUTS) for size in result[2:])
        return 4 * points * self._planes(tiles, images[1], result[1])

    def _planes(self, count: int, channels: int, results: int) -> int:
        """Return how many planes there are: `count` a channel of input and output, and one a filter."""
        return count * (channels + results) + channels * results // self.groups
