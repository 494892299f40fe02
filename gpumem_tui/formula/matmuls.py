"""The matrix products of one forward pass: nearly all of a training step's arithmetic.

Convolutions count as the products that they are (rows: output pixels). Normalization, activation functions and
embeddings are left out, as by Chowdhery et al. 2022 (PaLM, appendix B) and Narayanan et al. 2021 (appendix).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from gpumem_tui.catalog.shapes import Experts, LatentAttention, ModelShape
from gpumem_tui.formula import convnet
from gpumem_tui.formula.parameters import parameter_tensors
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.weights import frozen_blocks, only_head, tail, targets, trains_head
from gpumem_tui.memory import Unknown

_COLOURS = 3


@dataclass(frozen=True, slots=True)
class Matmul:
    """A product (rows × depth) · (depth × columns) for one sample.

    Attributes:
        times: how often one after the other, once a layer.
        heads: so many of them at once for each sample, as in attention; 0 for a product with a weight, whose rows are
            those of all samples.
        window: in how many rows each input value is: the kernel's area, for a convolution.
        matrices: over so many weights of that size the rows are spread, as over experts.
        backward: products that backward makes of it: the gradients of its input and of its weight; a frozen weight
            has none, and below all that is trained nothing has.
        in_block: full recompute makes it once more. A product of attention's core is `heads` > 0.
    """

    rows: int
    columns: int
    depth: int
    times: int = 1
    heads: int = 0
    window: int = 1
    matrices: int = 1
    backward: int = 2
    in_block: bool = True

    @property
    def flops(self) -> int:
        """Operations of a sample's forward pass: one multiplication and addition for each of rows · columns · depth."""
        return 2 * self.rows * self.columns * self.depth * self.times * max(1, self.heads)


@lru_cache(maxsize=256)
def matmuls(shape: ModelShape, recipe: Recipe) -> tuple[Matmul, ...] | Unknown:
    """Return the products of one forward pass, adapters' included, or why they are not known."""
    products = _of_network(shape)
    if isinstance(products, Unknown):
        return products
    if recipe.has_frozen_layers:
        return tuple(_partly_frozen(shape, recipe, products))
    if not recipe.has_adapters:
        return products
    frozen = (product if product.heads else replace(product, backward=1) for product in products)
    return (*frozen, *_adapters(shape, recipe))


def _partly_frozen(shape: ModelShape, recipe: Recipe, products: tuple[Matmul, ...]) -> Iterator[Matmul]:
    """Yield the products with backward for what comes after the frozen blocks only."""
    *_, head = products
    head = replace(head, backward=1 if only_head(recipe) or not trains_head(shape, recipe) else 2)
    if shape.record.has_batch_norm:
        network, frozen = convnet.resnet(shape), frozen_blocks(shape, recipe)
        trained = sum(len(block.convolutions) for block in network.blocks[frozen:])
        first = len(network.convolutions) - trained
        yield from (replace(product, backward=0) for product in products[:first])
        yield from products[first:-1]
    elif shape.record.has_attention:
        yield from (replace(product, backward=0) for product in products[:-1] if not product.in_block)
        for backward, part in ((0, _frozen_part(shape, recipe)), (2, tail(shape, recipe))):
            if part.layers:
                yield from (replace(one, backward=backward) for one in _transformer(part) if one.in_block)
    else:
        first = frozen_blocks(shape, recipe)
        yield from (replace(product, backward=0) for product in products[:first])
        yield from products[first:-1]
    yield head


def _frozen_part(shape: ModelShape, recipe: Recipe) -> ModelShape:
    """Return the frozen blocks as a network of their own."""
    frozen, experts = frozen_blocks(shape, recipe), shape.experts
    if experts is not None:
        experts = replace(experts, dense_layers=min(experts.dense_layers, frozen))
    return replace(shape, layers=frozen, experts=experts)


def _adapters(shape: ModelShape, recipe: Recipe) -> Iterator[Matmul]:
    """Yield each adapter's two products."""
    at = targets(shape, recipe)
    for tensor in parameter_tensors(shape):
        if tensor.linear in at:
            outputs, inputs = tensor.dims
            yield Matmul(shape.tokens, recipe.lora_rank, inputs, tensor.copies)
            yield Matmul(shape.tokens, outputs, recipe.lora_rank, tensor.copies)


def _of_network(shape: ModelShape) -> tuple[Matmul, ...] | Unknown:
    if shape.record.has_attention:
        return tuple(_transformer(shape))
    if shape.record.has_batch_norm:
        return tuple(_resnet(shape))
    if shape.record.inputs == "features":
        return tuple(_mlp(shape))
    return Unknown(f"the arithmetic of a {shape.family} model is not known")


def _attention(shape: ModelShape) -> Iterator[Matmul]:
    tokens, width, layers, value_width = shape.tokens, shape.attention_width, shape.layers, shape.attention_width
    if shape.latent is None:
        yield Matmul(tokens, (shape.heads + 2 * shape.kv_heads) * width, shape.hidden, layers)
    else:
        value_width = shape.latent.value_width
        yield from _latent_projections(shape, shape.latent)
    yield Matmul(tokens, tokens, width, layers, shape.heads)
    yield Matmul(tokens, value_width, tokens, layers, shape.heads)
    yield Matmul(tokens, shape.hidden, shape.heads * value_width, layers)


def _latent_projections(shape: ModelShape, latent: LatentAttention) -> Iterator[Matmul]:
    queries = shape.heads * shape.attention_width
    if latent.q_rank:
        yield Matmul(shape.tokens, latent.q_rank, shape.hidden, shape.layers)
    yield Matmul(shape.tokens, queries, latent.q_rank or shape.hidden, shape.layers)
    yield Matmul(shape.tokens, latent.kv_rank + latent.rope_width, shape.hidden, shape.layers)
    widened = shape.heads * (shape.attention_width - latent.rope_width + latent.value_width)
    yield Matmul(shape.tokens, widened, latent.kv_rank, shape.layers)


def _transformer(shape: ModelShape) -> Iterator[Matmul]:
    if shape.record.inputs == "images":
        depth = _COLOURS * shape.patch_size**2
        yield Matmul(shape.tokens - 1, shape.hidden, depth, in_block=False)
    yield from _attention(shape)
    if shape.experts is None:
        yield from _feed_forward(shape, shape.ffn, shape.layers)
    else:
        yield from _experts(shape, shape.experts)
    if shape.record.predicts_tokens:
        yield Matmul(shape.tokens, shape.vocab, shape.hidden, in_block=False)
    else:
        yield Matmul(1, shape.classes, shape.hidden, in_block=False)


def _feed_forward(shape: ModelShape, ffn: int, layers: int) -> Iterator[Matmul]:
    upward = 2 if shape.record.is_gated else 1
    yield Matmul(shape.tokens, ffn, shape.hidden, upward * layers)
    yield Matmul(shape.tokens, shape.hidden, ffn, layers)


def _experts(shape: ModelShape, experts: Experts) -> Iterator[Matmul]:
    """Yield each token's active experts.

    However many GPUs they are spread over, each computes as much as one with all.
    """
    layers, rows = shape.layers - shape.dense_layers, shape.tokens * experts.active
    if shape.dense_layers:
        yield from _feed_forward(shape, experts.dense_ffn, shape.dense_layers)
    yield Matmul(shape.tokens, experts.count, shape.hidden, layers)
    yield Matmul(rows, 2 * shape.ffn, shape.hidden, layers, matrices=experts.held)
    yield Matmul(rows, shape.hidden, shape.ffn, layers, matrices=experts.held)
    if experts.shared:
        yield from _feed_forward(shape, experts.shared * shape.ffn, layers)


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
