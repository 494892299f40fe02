"""cuDNN 9's workspaces of convolutions on Hopper, where they were measured.

Measured on an H200 with torch 2.11 and cuDNN 9.19, layer by layer (`tests/recordings/h200/convolutions.csv`: VGG-16,
ResNet-18 and -50, a Mask R-CNN, a 3-D U-Net; fp32 by TF32 and 16 bits, NCHW and channels-last, 2 to 128 images, with
`cudnn.benchmark` and without, which settle on equal ones). Its kernels for tensor cores work on tensors in NHWC order:

- Tensors in NCHW order are copied, each whose layout differs between the two: input, weight, result. So `forward`, the
  input's gradient and the weight's gradient take the sum of the three each, to 300 bytes.
- In a pointwise convolution without strides the channels are rows of a matrix already, if a row is of whole 16
  bytes, or of 8 in 16 bits and for the weight's gradient: nothing is copied, and the weight's gradient is worked out
  image by image, in fp32, and then added up.
- The weight's gradient is worked out in parts by as many thread blocks as there are multiprocessors, each on a tile of
  at most 128 x 128 values; its parts are kept in fp32.
- Forward in fp32 may write its result in NCHW order, so that this is not copied (64 to 128 channels and few images).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from gpumem_tui.memory import KIB
from gpumem_tui.simulator.allocator.profile import Profile
from gpumem_tui.simulator.allocator.rules import Workspace

Direction = Literal["result", "input", "weight"]
"""The output of a pass: the result, or the gradient of the input or of the weight."""

Knowledge = Literal["measured", "bounded", "unknown"]

_CAPABILITY, _MEASURED_CUDNN = (9, 0), 91900

_HALVES = (torch.float16, torch.bfloat16)
_ROW_BYTES = 16
_TILE = 128
_SMALL_TILE = 64
_TILE_BYTES = 64 * KIB
_TILES_BESIDE = 2
"""Tiles a multiprocessor that partial sums were measured to take at most: 16 MiB on 132 of them."""

_ROWS_A_PART = {torch.float32: 784}
_ROWS_A_PART_IN_HALVES = 3800
"""Result pixels of one part of a weight's gradient, at least (6,272 of 8 images in 7 to 9, 50,176 in 13)."""

_FEW_CHANNELS = 4
_WIDE = 256
_MANY_PIXELS = 8192
"""Pixels of an image from which a one-tile weight's gradient is not worked out image by image: 13,600 and more were
measured so, 3,400 and fewer not."""

_MANY_ROWS = 100_000
"""Result pixels of 64 channels from which on they are copied: 200,704 and more were measured to be, 50,176 were not."""

_FEW_VALUES = 576
"""Products that make a value of the result, see `Layer._in_fp32`."""

_MOST_DIRECT = 1.5
"""Up to how often as much as its copies a weight's gradient image by image may take and was taken: 1.05 always, 1.74
with 8 images and not with 64, 2.1 for 1024 to 256 channels and not for 256 to 1024."""


def is_measured(profile: Profile, images: torch.Tensor) -> bool:
    """Return whether such a convolution was measured on this architecture: on tensor cores, in fp32 by TF32.

    Wheels of the same torch for CUDA 12 bring an older cuDNN, which was not.

    Convolutions of one dimension were not: totals of an H100 (milabench's Whisper, torch 2.6) ask for 1.5 copies.
    """
    if profile.compute_capability != _CAPABILITY or profile.cudnn < _MEASURED_CUDNN:
        return False
    return images.dtype in _HALVES or (images.dtype == torch.float32 and torch.backends.cudnn.allow_tf32)


@dataclass(frozen=True)
class Layer:
    """A convolution of real direction: `inputs` are of the forward pass, also where torch calls it transposed.

    Attributes:
        inputs, results: shapes, images first, then channels.
        kernel: its sides.
        pads: pixels at each edge, by axis.
    """

    inputs: Sequence[int]
    results: Sequence[int]
    kernel: Sequence[int]
    stride: int
    pads: Sequence[int]
    groups: int
    dtype: torch.dtype
    is_plain: bool
    """Whether the tensors are in NCHW order."""

    def workspace(self, direction: Direction, profile: Profile) -> tuple[Knowledge, Workspace]:
        """Return what we know about a pass's workspace, and its sizes but for what a benchmark tries."""
        knowledge, sizes = (self._as_matrix if self._is_matrix(direction) else self._as_copies)(direction, profile)
        if self.groups > 1:
            return "unknown", replace(sizes, least=0)
        if len(self.kernel) == 1:
            return "bounded", replace(sizes, least=0, most=2 * sizes.most)  # see `is_measured`
        return knowledge, sizes

    @property
    def element_bytes(self) -> int:
        """Bytes of a value."""
        return self.dtype.itemsize

    @property
    def weight_values(self) -> int:
        """How many values the weight has."""
        return self.inputs[1] * self.results[1] // self.groups * math.prod(self.kernel)

    @property
    def _is_pointwise(self) -> bool:
        return math.prod(self.kernel) == 1 and self.stride == 1 and not any(self.pads)

    def _is_matrix(self, direction: Direction) -> bool:
        """Return whether channels are rows of a matrix that a kernel takes as they lie."""
        pixels = math.prod(self.inputs[2:])
        whole = _ROW_BYTES if self.dtype == torch.float32 and direction != "weight" else _ROW_BYTES // 2
        aligned = pixels == 1 or pixels * self.element_bytes % whole == 0
        return self._is_pointwise and self.is_plain and self.groups == 1 and aligned

    def copies(self, direction: Direction) -> int:
        """Return the bytes of those tensors that are copied into the kernels' order."""
        found = self._copied(self.inputs, is_input=True, direction=direction)
        found += self._copied(self.results, is_input=False, direction=direction)
        if self.is_plain and math.prod(self.kernel) > 1:
            found += self.weight_values * self.element_bytes
        return found

    def _copied(self, shape: Sequence[int], *, is_input: bool, direction: Direction) -> int:
        """Return the bytes of a tensor's copy; few channels are padded, in fp32 for the weight's gradient alone."""
        channels, pixels = shape[1], math.prod(shape[2:])
        step = {torch.float16: _FEW_CHANNELS, torch.bfloat16: 2 * _FEW_CHANNELS}.get(
            self.dtype, _FEW_CHANNELS if direction == "weight" else 1
        )
        if not is_input:
            step = (2 if self.dtype in _HALVES else 1) * _FEW_CHANNELS if direction == "weight" else 1
        padded = math.ceil(channels / step) * step if 1 < channels < 2 * _FEW_CHANNELS else channels
        differs = self.is_plain and channels > 1 and pixels > 1
        return shape[0] * pixels * padded * self.element_bytes if differs or padded != channels else 0

    def _as_matrix(self, direction: Direction, profile: Profile) -> tuple[Knowledge, Workspace]:
        beside = _most_beside(profile)
        if math.prod(self.inputs[2:]) == 1:
            return "measured", Workspace(expected=_WITHOUT_COPIES, most=beside)
        images, inputs, results = self.inputs[0], self.inputs[1], self.results[1]
        by_image, copies = images * inputs * results * 4, self.copies(direction) + _ALIGNMENT
        is_wide = by_image > _MOST_DIRECT * (copies - _ALIGNMENT)
        if direction != "weight":
            most = copies if is_wide else _WITHOUT_COPIES
            return "bounded" if is_wide else "measured", Workspace(expected=_WITHOUT_COPIES, most=most)
        tiles = (inputs // _SMALL_TILE) * (results // _SMALL_TILE)
        blocks = images * tiles
        if tiles <= 1 and math.prod(self.inputs[2:]) > _MANY_PIXELS:
            least, most = min(by_image, copies), max(by_image, copies) + beside
            return "bounded", replace(self._in_parts(copies, profile), least=least, most=most)
        if not is_wide:
            sizes = Workspace(by_image, by_image, most=by_image, most_of_few=copies + beside, blocks=blocks)
            return "measured", sizes
        most = max(by_image, copies) + beside
        return "bounded", replace(self._in_parts(copies, profile), least=min(by_image, copies), most=most)

    def _as_copies(self, direction: Direction, profile: Profile) -> tuple[Knowledge, Workspace]:
        copies = self.copies(direction) + _ALIGNMENT
        most = copies + _most_beside(profile)
        if self.inputs[1] < _FEW_CHANNELS and self.stride == 1 and self.dtype == torch.float32:
            return "measured", Workspace(most=most)  # VGG's first one took none
        sizes = Workspace(copies, copies)
        if direction == "weight":
            sizes = self._in_parts(copies, profile)
        elif self.dtype == torch.float32:
            sizes = self._in_fp32(direction, copies, profile)
        if math.prod(self.kernel) == 1:  # of few images as a product of what is left, or as it is
            return "bounded", replace(sizes, least=0, most=most)
        return "measured", replace(sizes, most=most)

    def _in_fp32(self, direction: Direction, copies: int, profile: Profile) -> Workspace:
        """Return what a result takes in fp32: not copied where it is of few values each; and its last tiles in parts.

        Measured not to be copied: of 576 and of 256 values each, 128 and 512 channels; always 1,152 and more. A
        gradient of the input was worked out in parts where it has 512 channels, not where it has 128 or 256.
        """
        values = (self.results if direction == "input" else self.inputs)[1] // self.groups * math.prod(self.kernel)
        made = self.inputs if direction == "input" else self.results
        tile_rows = 2 * _TILE if made[1] >= 2 * _WIDE else _TILE
        in_parts = direction == "result" or (made[1] >= 2 * _WIDE and self.stride == 1)
        sizes = Workspace(
            copies, copies, partial=tile_rows * _TILE * 4, rows=made[0] * math.prod(made[2:]),
            tile_rows=tile_rows if in_parts and made[1] >= _TILE else 0, tiles_beside=-(-made[1] // _TILE),
            processors=profile.multiprocessors,
        )  # fmt: skip
        if direction == "input":
            return sizes
        direct = copies - self._copied(self.results, is_input=False, direction=direction)
        if values > _FEW_VALUES or self.inputs[1] >= 2 * _WIDE:
            return sizes
        if made[1] >= _TILE:
            return replace(sizes, least=direct, expected=direct, tile_rows=0)
        return Workspace(direct, direct, partial=copies - direct, parts=1, rows=sizes.rows, rows_a_part=_MANY_ROWS)

    def _in_parts(self, copies: int, profile: Profile) -> Workspace:
        """Return what the weight's gradient takes: copies, and its parts."""
        values, results = self.inputs[1] // self.groups * math.prod(self.kernel), self.results[1]
        tile = _SMALL_TILE if results <= _SMALL_TILE else _TILE
        tiles, processors = -(-values // tile) * -(-results // tile), profile.multiprocessors
        partial, parts = self.weight_values * 4, processors // tiles
        if self.inputs[1] < _FEW_CHANNELS:
            partial, parts = partial // self.inputs[1] * _FEW_CHANNELS, processors
        elif parts < 2:  # tiles are cut, not the sum, so that each thread block has as much to do
            cut = math.prod(self.kernel) > 1
            partial, parts = processors * _TILE_BYTES // (1 if tiles > processors else 2), int(cut)
        a_part = _ROWS_A_PART.get(self.dtype, _ROWS_A_PART_IN_HALVES)
        rows = self.results[0] * math.prod(self.results[2:])
        return Workspace(copies, copies, partial=partial, parts=parts, rows=rows, rows_a_part=a_part)

    def tried_bytes(self, direction: Direction, profile: Profile) -> int:
        """Return the largest workspace that cuDNN's benchmark tries, measured for ResNet-50 (64 images, fp32).

        Copies of all tensors; of a strided convolution's four parts the weights of each. In fp32, in two dimensions,
        transforms of whole images, or of tiles for the gradient of the input; see Mathieu, Henaff and LeCun 2014, Fast
        Training of Convolutional Networks through FFTs: half of each by symmetry, real and imaginary.
        """
        result_bytes = math.prod(self.results) * self.element_bytes
        weight_bytes = self.weight_values * self.element_bytes
        copies = math.prod(self.inputs) * self.element_bytes + result_bytes + weight_bytes
        copies = max(copies, self.copies(direction))  # of few channels, which are padded
        most = copies + _most_beside(profile)
        strided = self.stride == 2 and direction == "input"
        if strided:
            most += 4 * weight_bytes
        if self.dtype in _HALVES and direction == "weight" and max(self.inputs[1], self.results[1]) <= _SMALL_TILE // 2:
            most += copies
        few = any(shape[1] % 8 for shape in (self.inputs, self.results))
        if self.dtype in _HALVES and direction == "result" and few and self.inputs[1] > 1:
            pixels = self.results[0] * math.prod(self.results[2:]) * math.ceil(self.results[1] / _SMALL_TILE)
            most += 4 * pixels * _SMALL_TILE  # in fp32, besides copies
        if self.dtype != torch.float32 or len(self.inputs) != 4 or self.groups > 1 or self.stride > 2:
            return most
        of_inputs, of_results = (shape[0] * shape[1] for shape in (self.inputs, self.results))
        of_weights = self.inputs[1] * self.results[1]
        sides = [side + 2 * pad for side, pad in zip(self.inputs[2:], self.pads, strict=True)]
        if self.stride == 1 and direction != "input" and max(sides) <= _FFT_LARGEST:
            plane = _transform_bytes(*sides)
            if direction == "result":
                return 2 * plane * (of_inputs + of_weights) + weight_bytes
            narrow = min(self.inputs[1], self.results[1]) <= _SMALL_TILE
            return 2 * plane * (of_weights + narrow * min(of_inputs, of_results)) + result_bytes
        tile = _transform_bytes(_FFT_TILE, _FFT_TILE)
        if direction == "input" and max(self.kernel) > 1:
            if self.stride == 1 and max(sides) <= _FFT_TILE:
                return tile * (of_weights + of_inputs + of_results)
            padded = [side + 1 for side in self.results[2:]]
            if strided and max(self.kernel) == 3 and max(padded) <= _FFT_TILE:
                copied = math.prod(self.inputs) + of_results * math.prod(padded) + 16 * of_weights
                return tile * (4 * of_weights + 4 * of_inputs + of_results) + copied * self.element_bytes
        return most


_FFT_TILE, _FFT_LEAST, _FFT_LARGEST = 32, 16, 256
"""Pixels a side of a tile, and of the smallest and the largest whole image (cuDNN's reference for the latter)."""


def _transform_bytes(high: int, wide: int) -> int:
    """Return the bytes of one transformed image, its sides the next powers of two."""
    sides = [max(_FFT_LEAST, 1 << (side - 1).bit_length()) for side in (high, wide)]
    return 8 * sides[0] * (sides[1] // 2 + 1)


def _most_beside(profile: Profile) -> int:
    """Return the most that partial sums take."""
    return profile.multiprocessors * _TILES_BESIDE * _TILE_BYTES


_ALIGNMENT, _WITHOUT_COPIES = 147, 400
"""Bytes besides copies, 16 or 147, and of what needs none, 0 to 400."""
