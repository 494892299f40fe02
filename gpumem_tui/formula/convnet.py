"""ResNet as torchvision lays it out (v1.5: the 3×3 of a bottleneck carries the stride), and what it saves.

A convolution saves its input, a BatchNorm its input, a ReLU its output. So the tensors alive when backward starts
are the output of every convolution (BatchNorm's input) and, in place over the normalized one, the output of every
ReLU (the next convolution's input). The projection of a shortcut is normalized and added, and nothing keeps that
sum's operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from gpumem_tui.catalog.shapes import ModelShape

_STEM_WIDTH = 64
_STAGE_WIDTHS = (64, 128, 256, 512)
_EXPANSION = 4


@dataclass(frozen=True, slots=True)
class Convolution:
    """A square convolution without bias, padded by half its kernel. `side`: pixels a side of its output."""

    inputs: int
    outputs: int
    kernel: int
    side: int

    @property
    def values(self) -> int:
        """Values of one image's output: C·H·W."""
        return self.outputs * self.side**2


@dataclass(frozen=True, slots=True)
class ConvBlock:
    """A residual block. `input_values`: values of one image at its entrance. `shortcut`: its projection."""

    input_values: int
    path: tuple[Convolution, ...]
    shortcut: Convolution | None

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """Every convolution of the block, the shortcut's last."""
        return self.path if self.shortcut is None else (*self.path, self.shortcut)

    @property
    def convolution_values(self) -> int:
        """Convolution outputs of one image, kept as the inputs of normalization."""
        return sum(conv.values for conv in self.convolutions)

    @property
    def activated_values(self) -> int:
        """ReLU outputs of one image, kept for ReLU itself and as the inputs of the next convolution."""
        return sum(conv.values for conv in self.path)

    @property
    def kept_values(self) -> int:
        """Values of one image that the block keeps next to its input."""
        return self.convolution_values + self.activated_values


@dataclass(frozen=True, slots=True)
class ResNetShape:
    """The layers of one ResNet at one image size. `features`: inputs of the classifier."""

    stem: Convolution
    pooled_side: int
    blocks: tuple[ConvBlock, ...]
    features: int

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """Every convolution of the network, in order."""
        return (self.stem, *(conv for block in self.blocks for conv in block.convolutions))

    @property
    def pooled_values(self) -> int:
        """Values of one image after the stem's max pooling."""
        return self.stem.outputs * self.pooled_side**2


@lru_cache(256)
def resnet(shape: ModelShape) -> ResNetShape:
    """Return the layers of a ResNet with real feature-map sizes at `shape.image_size`."""
    stem = Convolution(3, _STEM_WIDTH, 7, _halved(shape.image_size))
    pooled = side = _halved(stem.side)
    channels = stem.outputs
    blocks = []
    for stage, (depth, width) in enumerate(zip(shape.stages, _STAGE_WIDTHS, strict=True)):
        for index in range(depth):
            downsamples = stage > 0 and index == 0
            block = _block(channels, width, side, downsamples=downsamples, bottleneck=shape.bottleneck)
            blocks.append(block)
            channels, side = block.path[-1].outputs, block.path[-1].side
    return ResNetShape(stem, pooled, tuple(blocks), channels)


def _halved(side: int) -> int:
    """Return pixels a side after a stride of 2, padded so that an odd last pixel still counts."""
    return (side + 1) // 2


def _block(channels: int, width: int, side: int, *, downsamples: bool, bottleneck: bool) -> ConvBlock:
    after = _halved(side) if downsamples else side
    if bottleneck:
        outputs = width * _EXPANSION
        path: tuple[Convolution, ...] = (
            Convolution(channels, width, 1, side),
            Convolution(width, width, 3, after),
            Convolution(width, outputs, 1, after),
        )
    else:
        outputs = width
        path = (Convolution(channels, width, 3, after), Convolution(width, width, 3, after))
    projects = downsamples or channels != outputs
    shortcut = Convolution(channels, outputs, 1, after) if projects else None
    return ConvBlock(channels * side**2, path, shortcut)
