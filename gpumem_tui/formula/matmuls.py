"""The matrix products of one forward pass: nearly all of a training step's arithmetic.

Convolutions count as the products that they are (rows: output pixels). Normalization, activation functions and
embeddings are left out, as by Chowdhery et al. 2022 (PaLM, appendix B) and Narayanan et al. 2021 (appendix).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula import convnet
from gpumem_tui.memory import Unknown

_COLOURS = 3


@dataclass(frozen=True, slots=True)
class Matmul:
    """A product (rows × depth) · (depth × columns) for one sample.

    Attributes:
        times: how often one after the other, once a layer.
        heads: so many of them at once for each sample, as in attention; 0 for a product with a weight, whose rows are
            those of all samples.
        window: in how many rows each input value stands: the kernel's area, for a convolution.
        in_block: full recompute makes it once more. A product of attention's core is `heads` > 0.
    """

    rows: int
    columns: int
    depth: int
    times: int = 1
    heads: int = 0
    window: int = 1
    in_block: bool = True

    @property
    def flops(self) -> int:
        """Of one sample's forward pass: a multiplication and an addition for each of rows · columns · depth."""
        return 2 * self.rows * self.columns * self.depth * self.times * max(1, self.heads)


@lru_cache(maxsize=256)
def matmuls(shape: ModelShape) -> tuple[Matmul, ...] | Unknown:
    """The products of one forward pass, or why they are not known."""
    if shape.record.has_attention:
        return tuple(_transformer(shape))
    if shape.record.has_batch_norm:
        return tuple(_resnet(shape))
    if shape.record.inputs == "features":
        return tuple(_mlp(shape))
    return Unknown(f"the arithmetic of a {shape.family} model is not known")


def _attention(shape: ModelShape) -> Iterator[Matmul]:
    tokens, width, layers = shape.tokens, shape.attention_width, shape.layers
    yield Matmul(tokens, (shape.heads + 2 * shape.kv_heads) * width, shape.hidden, layers)
    yield Matmul(tokens, tokens, width, layers, shape.heads)
    yield Matmul(tokens, width, tokens, layers, shape.heads)
    yield Matmul(tokens, shape.hidden, shape.heads * width, layers)


def _transformer(shape: ModelShape) -> Iterator[Matmul]:
    if shape.record.inputs == "images":
        depth = _COLOURS * shape.patch_size**2
        yield Matmul(shape.tokens - 1, shape.hidden, depth, in_block=False)
    yield from _attention(shape)
    upward = 2 if shape.record.is_gated else 1
    yield Matmul(shape.tokens, shape.ffn, shape.hidden, upward * shape.layers)
    yield Matmul(shape.tokens, shape.hidden, shape.ffn, shape.layers)
    if shape.record.predicts_tokens:
        yield Matmul(shape.tokens, shape.vocab, shape.hidden, in_block=False)
    else:
        yield Matmul(1, shape.classes, shape.hidden, in_block=False)


def _resnet(shape: ModelShape) -> Iterator[Matmul]:
    network = convnet.resnet(shape)
    for conv in network.convolutions:
        area = conv.kernel**2
        yield Matmul(conv.side**2, conv.outputs, conv.inputs * area, window=area, in_block=conv is not network.stem)
    yield Matmul(1, shape.classes, network.features, in_block=False)


def _mlp(shape: ModelShape) -> Iterator[Matmul]:
    widths = [shape.inputs, *[shape.hidden] * (shape.layers - 1), shape.classes]
    for inputs, outputs in pairwise(widths):
        yield Matmul(1, outputs, inputs, in_block=False)
