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
from gpumem_tui.formula.precision import PRECISION_RECORDS
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.rows import FORWARD_ENDS, IN_A_BLOCK, FormulaRow, Moment, batch_row, there
from gpumem_tui.memory import Bucket

_STEM_WIDTH = 64
_STAGE_WIDTHS = (64, 128, 256, 512)
_EXPANSION = 4
_INDEX_BYTES = 8
_GRADIENTS = 2
_SOURCE = "He et al. 2015; torchvision"


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
    """The layers of a ResNet with real feature-map sizes at `shape.image_size`."""
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


def activation_rows(shape: ModelShape, recipe: Recipe, batch_size: int, frozen: int = 0) -> list[FormulaRow]:
    """What a ResNet keeps for backward. Selective recompute has no attention to drop and changes nothing.

    Args:
        frozen: so many blocks, the first ones, and the stem are frozen.
    """
    network = resnet(shape)
    blocks, width = network.blocks[frozen:], PRECISION_RECORDS[recipe.precision].compute_bytes
    if not blocks:
        return []
    convolved = 0 if frozen else network.stem.values
    activated = blocks[0].input_values + convolved
    if recipe.recompute == "full":
        activated += sum(block.input_values for block in blocks[1:])  # the first one's is the pooled map
        note = "the input of every block" if frozen else "the stem's, and of the maps the input of every block"
        again = [
            *_again_rows(blocks[-1], Moment.LAST_BLOCK, batch_size, width),
            *_again_rows(blocks[0], Moment.FIRST_BLOCK, batch_size, width),
        ]
    else:
        convolved += sum(block.convolution_values for block in blocks)
        activated += sum(block.activated_values for block in blocks)
        count = sum(len(block.convolutions) for block in blocks) + (not frozen)
        note = f"C·H·W summed over {count} convolutions at their real sizes"
        again = []
    kept = Bucket.ACTIVATIONS
    rows = [
        batch_row(kept, "convolution outputs", (batch_size, convolved, width), _SOURCE, note),
        batch_row(
            kept,
            "normalized and activated maps",
            (batch_size, activated, width),
            _SOURCE,
            "ReLU works in place, so the map after it is also the next convolution's input",
        ),
    ]
    return [
        *there(FORWARD_ENDS, rows),
        *(
            _first_block_rows(blocks[0], recipe, batch_size, width)
            if frozen
            else _stem_rows(network, batch_size, width)
        ),
        *again,
        _gradients_row(blocks[-1], Moment.LAST_BLOCK, batch_size, width),
        _gradients_row(blocks[0], Moment.FIRST_BLOCK, batch_size, width),
    ]


def _stem_rows(network: ResNetShape, batch_size: int, width: int) -> list[FormulaRow]:
    """What the stem keeps beside its maps, and what is left of it as backward ends."""
    indices = batch_row(
        Bucket.ACTIVATIONS,
        "pooling indices",
        (batch_size, network.pooled_values, _INDEX_BYTES),
        "PyTorch max_pool2d",
        "where each maximum came from, as int64",
    )
    stem = batch_row(
        Bucket.ACTIVATIONS,
        "the stem's maps",
        (batch_size, 2 * network.stem.values + network.pooled_values, width),
        _SOURCE,
        "its convolution's output, the map after ReLU and the pooled one, which backward reads last",
    )
    return [*there(FORWARD_ENDS | IN_A_BLOCK, [indices]), *there({Moment.FIRST_BLOCK}, [stem])]


def _first_block_rows(block: ConvBlock, recipe: Recipe, batch_size: int, width: int) -> list[FormulaRow]:
    """What is left as backward runs through the first block that is trained; with full recompute `_again_rows`."""
    if recipe.recompute == "full":
        return []
    values = block.input_values + block.convolution_values + block.activated_values
    row = batch_row(
        Bucket.ACTIVATIONS,
        "the first trained block's maps",
        (batch_size, values, width),
        _SOURCE,
        "its input, convolution outputs and activated maps, which backward reads last",
    )
    return there({Moment.FIRST_BLOCK}, [row])


def _again_rows(block: ConvBlock, moment: Moment, batch_size: int, width: int) -> list[FormulaRow]:
    """A block that is computed again, in backward."""
    values = block.convolution_values + block.activated_values
    row = batch_row(
        Bucket.ACTIVATIONS,
        "maps of one block while recomputed",
        (batch_size, values, width),
        _SOURCE,
        "convolution outputs and activated maps of the block that backward is in",
    )
    return there({moment}, [row])


def _gradients_row(block: ConvBlock, moment: Moment, batch_size: int, width: int) -> FormulaRow:
    """The gradients that backward holds inside a block: of its output, and through the last normalization."""
    row = batch_row(
        Bucket.TEMPORARY,
        "gradients inside a block",
        (batch_size, _GRADIENTS, block.path[-1].values, width),
        "PyTorch autograd",
        "of the block's output and of what its last normalization was given",
    )
    return there({moment}, [row])[0]


def _halved(side: int) -> int:
    """Pixels a side after a stride of 2, padded so that an odd last pixel still counts."""
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
