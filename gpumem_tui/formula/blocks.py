"""Bytes a token that one transformer block saves for backward: Korthikanti et al. 2022, PyTorch's autograd."""

from __future__ import annotations

from dataclasses import dataclass

from gpumem_tui.catalog.shapes import Experts, LatentAttention, ModelShape
from gpumem_tui.formula.records import FP32_BYTES, MASK_BYTES
from gpumem_tui.formula.resolved import Resolved
from gpumem_tui.formula.weights import copies_inputs, kept_by_adapters

_LOGSUMEXP_BYTES = 4
_INDEX_BYTES = 8


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """Bytes a token that one block keeps for backward, by what keeps them.

    Attributes:
        attention: the projections' inputs, queries, keys, values.
        feed_forward: the inputs of its matrix products and of its activation function; of a block with experts 0.
        normalization: the inputs of both normalizations.
        residual: what the residual stream takes beyond that where it is wider than what is computed in, and what an
            RMSNorm written out keeps in fp32 next to its input.
        casts: under autocast, further 16-bit copies of one input, a projection each.
        repeated: grouped keys and values, repeated for every query head.
        masks: the dropout masks after attention and feed-forward.
        scores: what unfused attention saves per head and per position attended to; fused kernels save none.
        logsumexp: what fused attention saves per head instead.
        adapters: what `adapters.kept_by_adapters` returns.
        narrow: what the normalizations of queries and keys, or of what they are made of, keep.
        experts: what router, active experts and shared ones keep; of a block with one feed-forward network 0.
    """

    attention: int
    feed_forward: int
    normalization: int
    residual: int
    casts: int
    repeated: int
    masks: int
    scores: int
    logsumexp: int
    adapters: int = 0
    narrow: int = 0
    experts: int = 0


def block_bytes(r: Resolved, *, is_dense: bool = True) -> BlockBytes:
    """Return what one block saves without recompute.

    Args:
        is_dense: it has one feed-forward network, which every token goes through; else experts.
    """
    shape, width = r.shape, r.width
    queries = shape.heads * shape.attention_width
    keys = shape.kv_heads * shape.attention_width
    dropout = shape.dropout > 0
    llama = shape.record.is_gated
    # RMSNorm squares in fp32: it keeps that and the normalized values, where LayerNorm keeps its input only. With
    # sinks the weight is applied in fp32 as well.
    normalized = FP32_BYTES if shape.sinks else r.residual
    norms = 2 * shape.hidden * (normalized + (FP32_BYTES if llama else 0))
    attention = shape.hidden + queries + 2 * keys + queries if shape.latent is None else _latent(shape, shape.latent)
    return BlockBytes(
        attention=(attention - _unkept_by_attention(r)) * width,
        feed_forward=_feed_forward(r) * width if is_dense else 0,
        normalization=2 * shape.hidden * width,
        residual=norms - 2 * shape.hidden * width,
        casts=_casts(shape, is_dense=is_dense) * shape.hidden * width if r.is_autocast else 0,
        repeated=0 if shape.latent is not None else 2 * (queries - keys) * width,
        masks=2 * shape.hidden * MASK_BYTES if dropout else 0,
        scores=0 if r.fused else _scores(r),
        logsumexp=_LOGSUMEXP_BYTES if r.fused else 0,
        adapters=kept_by_adapters(shape, r.recipe) if r.recipe.has_adapters else 0,
        narrow=_narrow(r),
        experts=0 if is_dense or shape.experts is None else _experts(r, shape.experts),
    )


def projection_inputs(r: Resolved) -> int:
    """Count the tensors as wide as the residual stream that a block's projections keep as their inputs.

    They are the inputs of two halves, and autocast's further copies.
    """
    return 2 + (_casts(r.shape, is_dense=r.shape.experts is None) if r.is_autocast else 0)


def _feed_forward(r: Resolved) -> int:
    """Count GELU's input and output, or SwiGLU's gate, SiLU of the gate, up and their product, each an operand.

    Without the inputs of linear layers that have nothing to train.
    """
    shape, at = r.shape, _adapted(r)
    ffn = shape.ffn if shape.experts is None else shape.experts.dense_ffn
    into = shape.hidden if at is None or at & {"fc1", "gate_proj", "up_proj"} else 0
    out_of = ffn if at is None or at & {"fc2", "down_proj"} else 0
    return into + out_of + (3 if shape.record.is_gated else 1) * ffn


def _casts(shape: ModelShape, *, is_dense: bool) -> int:
    """Return inputs that autocast copies for a second projection, and a third."""
    of_attention = 0 if not shape.record.projects_apart else 2 if shape.latent is None else 1
    return of_attention + (shape.record.is_gated and is_dense)


def _scores(r: Resolved) -> int:
    """Return the softmax; dropout turns it into three: softmax, mask and what attention multiplies.

    With sinks, which autocast leaves in fp32, it is in fp32 and copied for the product.
    """
    if r.shape.sinks:
        return FP32_BYTES + r.width if r.is_autocast else r.width
    return 2 * r.width + MASK_BYTES if r.shape.dropout > 0 else r.width


def _latent(shape: ModelShape, latent: LatentAttention) -> int:
    """Count the input, what the queries and what keys and values are made of, these, and attention's output.

    Values lie where the projection put them next to the first part of the keys, which are put together elsewhere.
    """
    projected = shape.attention_width - latent.rope_width + latent.value_width
    of_heads = 2 * shape.attention_width + projected + latent.value_width
    return shape.hidden + latent.q_rank + latent.kv_rank + shape.heads * of_heads


def _narrow(r: Resolved) -> int:
    """Return an RMSNorm of narrow values: these in fp32, and normalized."""
    shape, values = r.shape, 0
    if shape.qk_norm:
        values = (shape.heads + shape.kv_heads) * shape.attention_width
    elif shape.latent is not None:
        values = shape.latent.q_rank + shape.latent.kv_rank
    return values * (FP32_BYTES + r.width)


def _experts(r: Resolved, experts: Experts) -> int:
    """Count router, routed and shared experts. The routed ones run in the dtype of their weights, autocast or not.

    For a token and each of its experts: the input, gate, SiLU of the gate, up, their product, the output, and
    four numbers of rows. gpt-oss keeps the clamped gate and up and a sigmoid as well.
    """
    shape, recipe, width = r.shape, r.recipe, r.width
    wide = r.residual if recipe.base_quantization == "none" else width
    at = frozenset[str]() if copies_inputs(recipe) else r.targets
    trained = not recipe.has_adapters
    inner = (7 if experts.has_bias else 4) - (not trained)
    values = (2 if trained else 1) * shape.hidden + inner * shape.ffn
    routed = experts.active * (values * wide + 4 * _INDEX_BYTES)
    by_sigmoid = experts.scoring == "sigmoid"
    scores = 0 if experts.scoring == "softmax-of-active" else experts.count * FP32_BYTES
    scored = 0
    if trained:
        scored = shape.hidden * (FP32_BYTES if by_sigmoid and not r.is_autocast else width)
    if not experts.shared:
        return routed + scores + scored
    # The input once for the shared expert's two products, but as often as autocast copies it.
    read = (2 if r.is_autocast else by_sigmoid) if trained else bool(at & {"gate_proj", "up_proj"})
    inner = 4 if trained or "down_proj" in at else 3
    return routed + scores + scored + (read * shape.hidden + inner * experts.shared * shape.ffn) * width


def expert_gradients(r: Resolved, experts: Experts) -> int:
    """Return bytes a token next to what is kept, at most.

    Three tensors as large as what the experts made, as backward begins with them; or the gradients of gate and up and
    these together, when what they made is free.
    """
    wide = FP32_BYTES if experts.weighs_in_fp32 else r.residual
    of_gates = (2 * r.shape.ffn - r.shape.hidden) * r.residual
    return experts.active * max(3 * r.shape.hidden * wide, of_gates)


def _adapted(r: Resolved) -> frozenset[str] | None:
    """Return the linear layers that keep their input for what is trained of them; None for all of them.

    One keeps it for the gradient of its weight, or of its adapter, which may have a wider copy instead.
    """
    if not r.recipe.has_adapters:
        return None
    return frozenset() if copies_inputs(r.recipe) else r.targets


def _unkept_by_attention(r: Resolved) -> int:
    """Count the values per token that attention need not keep where weights are frozen.

    The input of its output projection stays anyway where fused attention keeps it as its output.
    """
    shape, at, narrow = r.shape, _adapted(r), 0
    if at is None:
        return 0
    into = at & {"qkv", "q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"}
    out_of = r.fused or at & {"proj", "o_proj"}
    attended = shape.heads * shape.attention_width
    if shape.latent is not None:
        attended = shape.heads * shape.latent.value_width
        narrow += 0 if "q_b_proj" in at else shape.latent.q_rank
        narrow += 0 if "kv_b_proj" in at else shape.latent.kv_rank
    return (0 if into else shape.hidden) + (0 if out_of else attended) + narrow
