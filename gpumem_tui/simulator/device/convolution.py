"""cuDNN's passes of a convolution: the workspace of each, and what `cudnn.benchmark` tries for it once.

Which algorithm cuDNN picks was measured on Hopper (see `hopper`); elsewhere there is a range.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpumem_tui.simulator.allocator.profile import Profile
from gpumem_tui.simulator.allocator.rules import TRIED, Computed, Workspace
from gpumem_tui.simulator.device import hopper
from gpumem_tui.simulator.device.hopper import Direction, Layer

_COMPLEX_BYTES = 8
_FFT_LARGEST = 256
"""Padded pixels a side (cuDNN API reference, `CUDNN_CONVOLUTION_FWD_ALGO_FFT`: strides of 1, too)."""

_WINOGRAD_SIDES = (3, 5)
_WINOGRAD_OUTPUTS = 4
"""Filters that `CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD_NONFUSED` takes (the same reference, strides of 1), and the outputs
of a tile's side, as in F(4x4, 3x3): Lavin and Gray 2015, Fast Algorithms for Convolutional Neural Networks. VGG-16 with
128 images was measured to hold 7.0 to 7.3 GiB more than it reserves without workspaces (itu-rad/GPUMemNet, with
benchmark mode and without); the tiles of its second convolution are 6.9 GiB so. Where they do not apply, as to the
first convolution of a ResNet (7 x 7, strides of 2), its totals ask for what an explicit product takes of every patch,
besides copies. On V100s, in fp32, detectors were measured to take 0.3 to 0.6 GB more than without workspaces, and the
tiles of their convolution of proposals are 0.3 to 0.6 GB (detectron2's MODEL_ZOO.md, torch 1.3, no benchmark). Half
precision was measured to take copies alone (see `_Convolution._unmeasured`)."""

_TENSOR_CORE_CHANNELS = 4
"""Channels of TF32 convolutions are padded to a multiple of it (NVIDIA, Convolutional Layers User's Guide, "Channels In
And Out")."""


_FORWARD = ("convolution", "convolution_overrideable")
_BACKWARD = ("convolution_backward", "convolution_backward_overrideable")
NAMES = frozenset((*_FORWARD, *_BACKWARD))
"""The operators that are convolutions."""

_TRANSPOSED: Mapping[Direction, Direction] = {"result": "input", "input": "result", "weight": "weight"}
"""Forward of a transposed one is the gradient of the input of a convolution from its results."""


@dataclass(frozen=True)
class Pass:
    """The pass of cuDNN: a result, or the gradient of the input or of the weight.

    Attributes:
        position: which of the operator's results it is.
        workspace: what it takes while it runs; None for a kernel of PyTorch's own.
        tried: what the benchmark takes at most for all that it tries, as far as there is room.
        columns_bytes: what im2col and copies of groups take in the place of cuDNN's workspace, where cuDNN is off.
        key: what the benchmark remembers it by.
    """

    position: int
    workspace: Computed | None = None
    tried: Computed | None = None
    key: Hashable = None
    columns_bytes: int = 0


def is_by_cudnn() -> bool:
    """Return whether convolutions go to cuDNN: a program may switch it off."""
    return bool(torch.backends.cudnn.enabled)


def passes(name: str, args: Sequence[Any], result: Any, profile: Profile) -> Iterator[Pass]:
    """Yield the passes of a convolution in order, but for the gradient of a bias.

    Args:
        args: of forward (input, weight, bias, stride, padding, dilation, transposed, output padding, groups), of
            backward (gradient, input, weight, bias sizes, stride, …, groups, which gradients).
        result: the tensor, or the gradients of input, weight and bias.
    """
    is_backward = name in _BACKWARD
    images, weight, settings = (args[1], args[2], args[4:10]) if is_backward else (args[0], args[1], args[3:9])
    stride, padding, _, transposed, _, groups = settings
    output = args[0] if is_backward else result
    found = _Convolution(images, weight, list(output.shape), stride, padding, groups, transposed)
    looks = [(tuple(one.shape), one.stride(), one.dtype) for one in (images, weight)]
    key = *looks, tuple(value if isinstance(value, (bool, int)) else tuple(value) for value in settings)
    wanted = [is_backward and one for one in args[10][:2]] if is_backward else [True]
    directions: tuple[Direction, ...] = ("input", "weight") if is_backward else ("result",)
    for position, (direction, is_wanted) in enumerate(zip(directions, wanted, strict=True)):
        if not is_wanted:
            continue
        if _is_own(images, groups, transposed=transposed):
            yield Pass(position)
        elif not is_by_cudnn():
            yield Pass(position, columns_bytes=found.columns_bytes(direction))
        else:
            yield Pass(position, *found.sizes(direction, profile), (direction, *key))


def _is_own(images: torch.Tensor, groups: int, *, transposed: bool) -> bool:
    """Return whether it is PyTorch's own kernel's, which takes nothing.

    `is_depthwise` and `use_cudnn_depthwise` in aten/src/ATen/native/Convolution.cpp.
    """
    is_depthwise = images.shape[1] == groups > 1 and not transposed
    in_halves = images.dtype in (torch.float16, torch.bfloat16)
    return is_depthwise and (not is_by_cudnn() or (not in_halves and images.is_contiguous()))


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

    def sizes(self, direction: Direction, profile: Profile) -> tuple[Computed, Computed]:
        """Return the workspace of a pass, and what a benchmark tries for it."""
        if self.transposed:
            direction = _TRANSPOSED[direction]
        layer = self._layer()
        if hopper.is_measured(profile, self.images):
            known, workspace = layer.workspace(direction, profile)
        else:
            known, workspace = "unknown", self._unmeasured(profile)
        return workspace.computed(known), Computed(TRIED, 0, (layer.tried_bytes(direction, profile),))

    def columns_bytes(self, direction: Direction) -> int:
        """Return what a pass takes without cuDNN: the patches of one sample, and where it has groups copies of each.

        `columns` in aten/src/ATen/native/cuda/ConvolutionMM2d.cu, NaiveDilatedConvolution.cu (the 3D ones, too) and
        NaiveConvolutionTranspose2d.cu: channels by kernel by output, a sample after the other; none for a kernel of 1
        with strides of 1 and no padding, but for the gradient of the input. Groups are run one by one on copies, and
        their results joined (`_convolution` in Convolution.cpp).
        """
        inputs, results = self._ends()
        kernel, element_bytes = math.prod(self.weight.shape[2:]), self.images.element_size()
        is_plain = kernel == 1 and max(self.stride) == 1 and max(self.padding) == 0
        columns = inputs[1] // self.groups * kernel * math.prod(results[2:])
        if is_plain and (direction != "input" or self.transposed):
            columns = 0
        if self.groups == 1:
            return columns * element_bytes
        joined = {"result": self.result, "input": self.images.shape, "weight": self.weight.shape}[direction]
        copies = sum(math.prod(shape) // self.groups for shape in (self.images.shape, self.result))
        return (columns + copies + math.prod(joined)) * element_bytes

    def _layer(self) -> Layer:
        inputs, results = self._ends()
        kernel = self.weight.shape[2:]
        pads = [self.padding[axis if len(self.padding) > 1 else 0] for axis in range(len(kernel))]
        is_plain = self.images.is_contiguous() and self.weight.is_contiguous()
        return Layer(inputs, results, kernel, max(self.stride), pads, self.groups, self.images.dtype, is_plain)

    def _unmeasured(self, profile: Profile) -> Workspace:
        """Return the range elsewhere: no workspace at least, copies or what was recorded at most.

        A tensor core kernel on tensors in NCHW order works on copies of them in NHWC order: a half precision
        convolution of 256 to 256 channels was measured to reserve its input and output a second time
        (pytorch/pytorch#123533).
        """
        images, element_bytes = self.images, self.images.element_size()
        in_halves = images.dtype in (torch.float16, torch.bfloat16)
        # Whether a tensor core kernel may be chosen for tensors that are not in its order.
        in_tf32 = images.dtype == torch.float32 and torch.backends.cudnn.allow_tf32
        needed = (7, 0) if in_halves else (8, 0)
        is_plain = images.is_contiguous() and images.shape[1] > 1
        converts = is_plain and (in_halves or in_tf32) and profile.compute_capability >= needed
        copies = sum(count * element_bytes for count in (images.numel(), self.weight.numel(), math.prod(self.result)))
        chosen_bytes = 0
        if torch.backends.cudnn.benchmark or (converts and in_tf32):
            chosen_bytes = self._chosen_bytes(copies)
        elif images.dtype == torch.float32:
            chosen_bytes = self._tiles_bytes()
        return Workspace(most=copies if converts else 0, copied=copies, chosen=chosen_bytes)

    def _chosen_bytes(self, copies_bytes: int) -> int:
        """Return the workspace of an algorithm that trades memory for speed, in fp32; 0 if missing.

        Winograd's tiles of input, output and filters. Else the transforms of whole images in a power of two of pixels,
        half of each by symmetry: Mathieu, Henaff and LeCun 2014, Fast Training of Convolutional Networks through FFTs.
        Else every patch of the input that a filter meets, its channels padded, besides copies of all tensors.
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
        channels = math.ceil(images[1] / _TENSOR_CORE_CHANNELS) * _TENSOR_CORE_CHANNELS
        patches = result[0] * math.prod(result[2:]) * channels * math.prod(self.weight.shape[2:])
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
