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
mode and not, the same); the tiles of its second convolution are 6.9 GiB so. Where they do not apply, as to the first
convolution of a ResNet (7 x 7, strides of 2), its totals ask for what an explicit product takes of every patch, beside
copies. On V100s, in fp32, detectors were measured to take 0.3 to 0.6 GB more than without workspaces, and the tiles of
their convolution of proposals are 0.3 to 0.6 GB (detectron2's MODEL_ZOO.md, torch 1.3, no benchmark). Half precision
was measured to take copies alone (see `rules.convolution_at_most`)."""


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
        copies = [numel * element_bytes for numel in (images.numel(), self.weight.numel(), math.prod(self.result))]
        chosen_bytes = 0
        if torch.backends.cudnn.benchmark or (converts and in_tf32):
            chosen_bytes = self._chosen_bytes(sum(copies))
        elif images.dtype == torch.float32:
            chosen_bytes = self._tiles_bytes()
        return [Computed("convolution", 0, (*copies, int(converts), chosen_bytes))]

    def _chosen_bytes(self, copies_bytes: int) -> int:
        """Return the workspace of an algorithm that trades memory for speed, in fp32; 0 where there is none.

        Winograd's tiles of input, output and filters. Else the transforms of whole images in a power of two of pixels,
        half of each by symmetry: Mathieu, Henaff and LeCun 2014, Fast Training of Convolutional Networks through FFTs.
        Else every patch of the input that a filter meets, beside copies of all tensors.
        """
        images, result = self._ends()
        if max(self.weight.shape[2:]) == 1 or len(result) > 4:
            return 0
        if tiles_bytes := self._tiles_bytes():
            return tiles_bytes
        if max(self.stride) == 1 and len(result) == 4:
            sides = [size + 2 * pad for size, pad in zip(images[2:], self.padding, strict=False)]
            if max(sides) <= _FFT_LARGEST:
                high, wide = (1 << (side - 1).bit_length() for side in sides)
                return _COMPLEX_BYTES * high * (wide // 2 + 1) * self._planes(images[0], images[1], result[1])
        patches = result[0] * math.prod(result[2:]) * images[1] * math.prod(self.weight.shape[2:])
        return copies_bytes + 4 * patches if self.groups == 1 else 0

    def _tiles_bytes(self) -> int:
        """Return what Winograd's tiles take in fp32; 0 of convolutions that it does not do."""
        images, result = self._ends()
        high, *others = self.weight.shape[2:]
        if high not in _WINOGRAD_SIDES or others != [high] or max(self.stride) > 1:
            return 0
        tiles = result[0] * math.prod(-(-size // _WINOGRAD_OUTPUTS) for size in result[2:])
        return 4 * (high + _WINOGRAD_OUTPUTS - 1) ** 2 * self._planes(tiles, images[1], result[1])

    def _ends(self) -> tuple[Sequence[int], Sequence[int]]:
        return (self.result, self.images.shape) if self.transposed else (self.images.shape, self.result)

    def _planes(self, count: int, channels: int, results: int) -> int:
        """Return how many planes there are: `count` a channel of input and output, and one a filter."""
        return count * (channels + results) + channels * results // self.groups
