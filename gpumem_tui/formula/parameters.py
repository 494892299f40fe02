"""Exact parameter counts, from the weight tensors of each architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from types import MappingProxyType

from gpumem_tui.catalog.shapes import Experts, Family, LackingFamily, LatentAttention, ModelShape
from gpumem_tui.formula import convnet

_TOKEN_TYPES = 2
"""Segment embeddings of BERT: sentence A, sentence B."""
_COLOURS = 3


@dataclass(frozen=True, slots=True)
class ParameterTensor:
    """`copies` weight tensors of the same dimensions.

    Attributes:
        linear: of a weight matrix [outputs, inputs] of the blocks, what its layer is called; empty for all others.
        is_experts: those of a block's experts in one tensor [experts, outputs, inputs].
        has_bias: of a linear layer's weight, whether the layer has a bias, a tensor of its own.
    """

    dims: tuple[int, ...]
    copies: int = 1
    linear: str = ""
    is_experts: bool = False
    has_bias: bool = False

    @property
    def values(self) -> int:
        """Parameters in all copies together."""
        return prod(self.dims) * self.copies


@lru_cache(1024)
def count_parameters(shape: ModelShape) -> int:
    """Return the parameters of the network: trainable values, a tied head counted once, buffers left out."""
    return sum(tensor.values for tensor in parameter_tensors(shape))


@lru_cache(256)
def parameter_tensors(shape: ModelShape) -> tuple[ParameterTensor, ...]:
    """Return every weight tensor of the network, equal ones grouped.

    Raises:
        LackingFamily: nothing shows which weights its family has.
    """
    if shape.family not in TENSORS:
        raise LackingFamily(shape.family, "weights", "formula/parameters.py")
    return tuple(TENSORS[shape.family](shape))


def active_parameters(shape: ModelShape) -> int:
    """Return those that one token goes through: of a block's experts the active ones. All of them without experts."""
    experts = shape.experts
    if experts is None:
        return count_parameters(shape)
    return count_parameters(replace(shape, experts=replace(experts, count=experts.active, spread=1))) + (
        (experts.count - experts.active) * shape.hidden * (shape.layers - shape.dense_layers)
    )


def head_tensors(shape: ModelShape) -> tuple[ParameterTensor, ...]:
    """Return the last layer's: of a language model its vocabulary projection, tied or not, else the classifier."""
    if shape.record.predicts_tokens:
        return (ParameterTensor((shape.vocab, shape.hidden)),)
    width = convnet.resnet(shape).features if shape.record.has_batch_norm else shape.hidden
    return tuple(_linear(shape.classes, width))


def residual_tensors(shape: ModelShape, after: int) -> tuple[ParameterTensor, ...]:
    """Return those of a ResNet that come after the first so many blocks."""
    blocks = convnet.resnet(shape).blocks[after:]
    return (*_convolutions(conv for block in blocks for conv in block.convolutions), *head_tensors(shape))


def textbook_parameters(layers: int, hidden: int, vocab: int) -> int:
    """Return N = V·h + L·(12h² + 13h) + 2h: a GPT stack with ffn = 4h, without its learned positions.

    The terms are the embedding, the blocks and the final normalization; see Korthikanti et al. 2022 and the
    GPT-2 code for the same count.
    """
    return vocab * hidden + layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden


def _linear(
    outputs: int, inputs: int, copies: int = 1, name: str = "", *, bias: bool = True
) -> Iterator[ParameterTensor]:
    yield ParameterTensor((outputs, inputs), copies, name, has_bias=bias)
    if bias:
        yield ParameterTensor((outputs,), copies)


def _encoder_blocks(shape: ModelShape) -> Iterator[ParameterTensor]:
    """Yield the blocks that GPT-2, BERT and ViT share: 4h² + 4h of attention, the MLP, two LayerNorms."""
    queries = shape.heads * shape.attention_width
    yield from _linear(3 * queries, shape.hidden, shape.layers, "qkv")
    yield from _linear(shape.hidden, queries, shape.layers, "proj")
    yield from _linear(shape.ffn, shape.hidden, shape.layers, "fc1")
    yield from _linear(shape.hidden, shape.ffn, shape.layers, "fc2")
    yield from _layer_norm(shape, 2 * shape.layers)


def _layer_norm(shape: ModelShape, copies: int = 1) -> Iterator[ParameterTensor]:
    yield ParameterTensor((shape.hidden,), 2 * copies)


def _vocabulary(shape: ModelShape) -> Iterator[ParameterTensor]:
    """Yield the head's own weight. Tied, it is the embedding's, of which the last stage of a pipeline has a copy."""
    if not shape.tied_head or not shape.has_embedding:
        yield from _linear(shape.vocab, shape.hidden, bias=False)


def _gpt2(shape: ModelShape) -> Iterator[ParameterTensor]:
    if shape.has_embedding:
        yield ParameterTensor((shape.vocab, shape.hidden))
        yield ParameterTensor((shape.max_seq_len, shape.hidden))
    yield from _encoder_blocks(shape)
    if shape.has_head:
        yield from _layer_norm(shape)
        yield from _vocabulary(shape)


def _llama(shape: ModelShape) -> Iterator[ParameterTensor]:
    if shape.has_embedding:
        yield ParameterTensor((shape.vocab, shape.hidden))
    yield from _llama_attention(shape) if shape.latent is None else _latent_attention(shape, shape.latent)
    if shape.experts is None:
        yield from _swiglu(shape, shape.ffn, shape.layers)
    else:
        yield from _experts(shape, shape.experts)
    # RMSNorm: a weight and no bias
    yield ParameterTensor((shape.hidden,), 2 * shape.layers + shape.has_head)
    if shape.has_head:
        yield from _vocabulary(shape)


def _llama_attention(shape: ModelShape) -> Iterator[ParameterTensor]:
    queries = shape.heads * shape.attention_width
    keys = shape.kv_heads * shape.attention_width
    yield from _linear(queries, shape.hidden, shape.layers, "q_proj", bias=shape.qkv_bias)
    yield from _linear(keys, shape.hidden, shape.layers, "k_proj", bias=shape.qkv_bias)
    yield from _linear(keys, shape.hidden, shape.layers, "v_proj", bias=shape.qkv_bias)
    yield from _linear(shape.hidden, queries, shape.layers, "o_proj", bias=shape.out_bias)
    if shape.qk_norm:
        yield ParameterTensor((shape.attention_width,), 2 * shape.layers)
    if shape.sinks:
        yield ParameterTensor((shape.heads,), shape.layers)


def _latent_attention(shape: ModelShape, latent: LatentAttention) -> Iterator[ParameterTensor]:
    queries, layers = shape.heads * shape.attention_width, shape.layers
    if latent.q_rank:
        yield from _linear(latent.q_rank, shape.hidden, layers, "q_a_proj", bias=False)
        yield ParameterTensor((latent.q_rank,), layers)
        yield from _linear(queries, latent.q_rank, layers, "q_b_proj", bias=False)
    else:
        yield from _linear(queries, shape.hidden, layers, "q_proj", bias=False)
    yield from _linear(latent.kv_rank + latent.rope_width, shape.hidden, layers, "kv_a_proj_with_mqa", bias=False)
    yield ParameterTensor((latent.kv_rank,), layers)
    widened = shape.heads * (shape.attention_width - latent.rope_width + latent.value_width)
    yield from _linear(widened, latent.kv_rank, layers, "kv_b_proj", bias=False)
    yield from _linear(shape.hidden, shape.heads * latent.value_width, layers, "o_proj", bias=False)


def _swiglu(shape: ModelShape, ffn: int, layers: int) -> Iterator[ParameterTensor]:
    yield from _linear(ffn, shape.hidden, layers, "gate_proj", bias=False)
    yield from _linear(ffn, shape.hidden, layers, "up_proj", bias=False)
    yield from _linear(shape.hidden, ffn, layers, "down_proj", bias=False)


def _experts(shape: ModelShape, experts: Experts) -> Iterator[ParameterTensor]:
    """Yield router, experts and shared experts of every block that has some; of the others one feed-forward network."""
    layers, held = shape.layers - shape.dense_layers, experts.held
    if shape.dense_layers:
        yield from _swiglu(shape, experts.dense_ffn, shape.dense_layers)
    yield ParameterTensor((experts.count, shape.hidden), layers)
    yield ParameterTensor((held, 2 * shape.ffn, shape.hidden), layers, is_experts=True)
    yield ParameterTensor((held, shape.hidden, shape.ffn), layers, is_experts=True)
    if experts.has_bias:
        yield ParameterTensor((experts.count,), layers)
        yield ParameterTensor((held, 2 * shape.ffn), layers)
        yield ParameterTensor((held, shape.hidden), layers)
    if experts.shared:
        yield from _swiglu(shape, experts.shared * shape.ffn, layers)


def _bert(shape: ModelShape) -> Iterator[ParameterTensor]:
    if shape.has_embedding:
        yield ParameterTensor((shape.vocab, shape.hidden))
        yield ParameterTensor((shape.max_seq_len, shape.hidden))
        yield ParameterTensor((_TOKEN_TYPES, shape.hidden))
        yield from _layer_norm(shape)
    yield from _encoder_blocks(shape)
    if shape.has_head:
        yield from _linear(shape.hidden, shape.hidden)  # pooler
        yield from _linear(shape.classes, shape.hidden)


def _vit(shape: ModelShape) -> Iterator[ParameterTensor]:
    if shape.has_embedding:
        yield ParameterTensor((shape.hidden, _COLOURS, shape.patch_size, shape.patch_size))
        yield ParameterTensor((shape.hidden,))
        yield ParameterTensor((1, 1, shape.hidden))  # class token
        yield ParameterTensor((1, shape.tokens, shape.hidden))  # positions
    yield from _encoder_blocks(shape)
    if shape.has_head:
        yield from _layer_norm(shape)
        yield from _linear(shape.classes, shape.hidden)


def _resnet(shape: ModelShape) -> Iterator[ParameterTensor]:
    yield from _convolutions(convnet.resnet(shape).convolutions)
    yield from head_tensors(shape)


def _convolutions(convolutions: Iterable[convnet.Convolution]) -> Iterator[ParameterTensor]:
    for conv in convolutions:
        yield ParameterTensor((conv.outputs, conv.inputs, conv.kernel, conv.kernel))
        yield ParameterTensor((conv.outputs,), 2)  # BatchNorm weight and bias; the convolution has no bias


def _mlp(shape: ModelShape) -> Iterator[ParameterTensor]:
    widths = [shape.inputs, *[shape.hidden] * (shape.layers - 1), shape.classes]
    for layer, (inputs, outputs) in enumerate(pairwise(widths), 1):
        yield from _linear(outputs, inputs, name="linear" if layer < shape.layers else "")


TENSORS: Mapping[Family, Callable[[ModelShape], Iterator[ParameterTensor]]] = MappingProxyType(
    {"gpt2": _gpt2, "llama": _llama, "moe": _llama, "bert": _bert, "vit": _vit, "resnet": _resnet, "mlp": _mlp}
)
