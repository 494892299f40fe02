"""FlashAttention-2 of the flash-attn package: what its kernels and the functions around them allocate.

Follows csrc/flash_attn/flash_api.cpp and flash_attn/flash_attn_interface.py of its version 2.8.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Signature, signature
from typing import Any

import torch
from torch.nn.functional import pad

from gpumem_tui.simulator.device.attention_scratch import FLASH_ROWS, flash_columns, rounded
from gpumem_tui.simulator.device.gpu import backend
from gpumem_tui.simulator.standins.register import kernel, on_gpu

_PACKAGE = "flash-attn"
_DTYPES = (torch.float16, torch.bfloat16)
_MOST_WIDE = 256
_SPLIT_ROWS, _MOST_SPLITS = 64, 128


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: torch.Tensor | None) -> None:
    """Refuse what `mha_fwd` refuses."""
    on_gpu(_PACKAGE, query, key, value, *others)
    if backend.get_device_capability() < (8, 0):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    if query.dtype not in _DTYPES:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError("query, key and value must have the same dtype")
    if query.shape[-1] > _MOST_WIDE:
        raise RuntimeError(f"FlashAttention forward only supports head dimension at most {_MOST_WIDE}")
    if query.shape[-2] % key.shape[-2]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")


def _partial(query: torch.Tensor, splits: int, batch: int, heads: int, tokens: int) -> list[torch.Tensor]:
    """Make logsumexp and output of each part of the keys, in fp32; nothing of one part (`set_params_splitkv`)."""
    shapes = ((splits, batch, heads, tokens), (splits, batch, heads, tokens, flash_columns(query.shape[-1])))
    return [query.new_empty(shape, dtype=torch.float32) for shape in shapes] if splits > 1 else []


@kernel(_PACKAGE)
def fwd(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor | None,
    _alibi: torch.Tensor | None,
    dropout: float,
    _scale: float,
    _causal: bool,
    _left: int,
    _right: int,
    _softcap: float,
    return_softmax: bool,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    """Return output, logsumexp, probabilities and random state (`mha_fwd`): [batch, tokens, heads, width]."""
    _check(query, key, value, out)
    batch, tokens, heads, width = query.shape
    result = torch.empty_like(query) if out is None else out
    logsumexp = query.new_empty((batch, heads, tokens), dtype=torch.float32)
    shape = (batch, heads, rounded(tokens, FLASH_ROWS), rounded(key.shape[1], FLASH_ROWS))
    probabilities = query.new_empty(shape if return_softmax else (0,))
    splits = 1 if dropout else _splits(batch * heads, tokens, key.shape[1], width)
    partial = _partial(query, splits, batch, heads, tokens)
    state = query.new_empty((2,), dtype=torch.int64)
    del partial
    return result, logsumexp, probabilities, state


def _splits(heads: int, tokens: int, keys: int, width: int) -> int:
    """Return into how many parts the keys are split where few blocks would leave the GPU idle.

    `num_splits_heuristic` and `set_params_splitkv`: the fewest that are nearly as efficient as the best.
    """
    block = 256 if width <= 64 else 128 if width <= 128 else 64
    columns, rows = math.ceil(keys / block), heads * math.ceil(tokens / _SPLIT_ROWS)
    processors = 2 * backend.get_device_properties().multi_processor_count
    if rows >= 0.8 * processors:
        return 1
    found: dict[int, float] = {}
    for splits in range(1, min(_MOST_SPLITS, processors, columns) + 1):
        if splits == 1 or math.ceil(columns / splits) != math.ceil(columns / (splits - 1)):
            waves = rows * splits / processors
            found[splits] = waves / math.ceil(waves)
    best = max(found.values(), default=0.0)
    return next((splits for splits, efficiency in found.items() if efficiency >= 0.85 * best), 1)


@kernel(_PACKAGE)
def bwd(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    _logsumexp: torch.Tensor,
    of_query: torch.Tensor | None,
    of_key: torch.Tensor | None,
    of_value: torch.Tensor | None,
    _alibi: torch.Tensor | None,
    _dropout: float,
    _scale: float,
    _causal: bool,
    _left: int,
    _right: int,
    _softcap: float,
    deterministic: bool,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    """Return gradients of query, key and value, and the rows' sums of gradient · output (`mha_bwd`)."""
    _check(query, key, value, gradient, out)
    batch, tokens, heads, width = query.shape
    rows = rounded(tokens, FLASH_ROWS)
    results = _given_or_made((query, of_query), (key, of_key), (value, of_value))
    sums = query.new_empty((batch, heads, rows), dtype=torch.float32)
    parts = _splits_of_gradient(batch * heads, deterministic)
    accumulated = query.new_empty((*parts, batch, rows, heads, flash_columns(width)), dtype=torch.float32)
    if heads != key.shape[2]:
        _sum_groups([query.new_empty((batch, key.shape[1], heads, width)) for _ in range(2)], results[1:])
    del accumulated
    return (*results, sums)


def _given_or_made(*pairs: tuple[torch.Tensor, torch.Tensor | None]) -> list[torch.Tensor]:
    """Return the gradients that are given, and new ones like their tensors for the others."""
    return [torch.empty_like(one) if given is None else given for one, given in pairs]


def _sum_groups(expanded: list[torch.Tensor], results: list[torch.Tensor]) -> None:
    """Sum the gradients that every query head has made over the heads of a group."""
    for one, result in zip(expanded, results, strict=True):
        grouped = one.view(*one.shape[:-2], result.shape[-2], -1, one.shape[-1])
        torch.sum(grouped, dim=-2, out=result)


@kernel(_PACKAGE)
def varlen_fwd(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor | None,
    ends: torch.Tensor,
    ends_of_keys: torch.Tensor,
    _used: torch.Tensor | None,
    _padding: torch.Tensor | None,
    _blocks: torch.Tensor | None,
    _alibi: torch.Tensor | None,
    longest: int,
    longest_key: int,
    _dropout: float,
    _scale: float,
    zeros: bool,
    _causal: bool,
    _left: int,
    _right: int,
    _softcap: float,
    return_softmax: bool,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    """Return what `fwd` returns, of samples one after the other (`mha_varlen_fwd`): [tokens, heads, width]."""
    _check(query, key, value, out, ends, ends_of_keys)
    tokens, heads, _width = query.shape
    result = torch.empty_like(query) if out is None else out
    logsumexp = query.new_empty((heads, tokens), dtype=torch.float32)
    shape = (0,)
    if return_softmax:
        rows, columns = (rounded(int(longest), FLASH_ROWS), rounded(int(longest_key), FLASH_ROWS))
        shape = (ends.numel() - 1, heads, rows, columns)  # type: ignore[assignment]
    return result, logsumexp, query.new_empty(shape), query.new_empty((2,), dtype=torch.int64)


@kernel(_PACKAGE)
def varlen_bwd(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    _logsumexp: torch.Tensor,
    of_query: torch.Tensor | None,
    of_key: torch.Tensor | None,
    of_value: torch.Tensor | None,
    ends: torch.Tensor,
    ends_of_keys: torch.Tensor,
    _alibi: torch.Tensor | None,
    _longest: int,
    _longest_key: int,
    _dropout: float,
    _scale: float,
    _zeros: bool,
    _causal: bool,
    _left: int,
    _right: int,
    _softcap: float,
    deterministic: bool,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    """Return what `bwd` returns (`mha_varlen_bwd`), whose scratch has 128 rows more of each sample."""
    _check(query, key, value, gradient, out, ends, ends_of_keys)
    tokens, heads, width = query.shape
    samples = ends.numel() - 1
    rows = tokens + FLASH_ROWS * samples
    results = _given_or_made((query, of_query), (key, of_key), (value, of_value))
    sums = query.new_empty((heads, rows), dtype=torch.float32)
    parts = _splits_of_gradient(samples * heads, deterministic)
    accumulated = query.new_empty((*parts, rows, heads, flash_columns(width)), dtype=torch.float32)
    if heads != key.shape[1]:
        _sum_groups([query.new_empty((key.shape[0], heads, width)) for _ in range(2)], results[1:])
    del accumulated
    return (*results, sums)


def _splits_of_gradient(heads: int, deterministic: bool) -> tuple[int, ...]:
    """Return how many accumulators of the query's gradient there are where its sum has an order."""
    return (math.ceil(backend.get_device_properties().multi_processor_count / heads),) if deterministic else ()


@kernel(_PACKAGE)
def fwd_kvcache(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any) -> tuple[torch.Tensor, ...]:
    """Return output and logsumexp of new tokens against a cache, which is changed in place (`mha_fwd_kvcache`).

    `more` are key and value of the new tokens, ten more, of which the last is the output, and, last of all, splits.
    """
    _check(query, key, value)
    batch, tokens, heads, width = query.shape
    out, splits = more[9], int(more[-1])
    result = torch.empty_like(query) if out is None else out
    logsumexp = query.new_empty((batch, heads, tokens), dtype=torch.float32)
    partial = _partial(query, splits or _splits(batch * heads, tokens, key.shape[1], width), batch, heads, tokens)
    del partial
    return result, logsumexp


# The Python part, where it is not installed


class _Attention(torch.autograd.Function):
    """Attention of queries, keys and values, of which the first three or the last two may be packed into one tensor.

    Saves them, padded to a width of 8, the output, its logsumexp and the random state. `lengths` are the samples' ends
    among the queries' and the keys' tokens, and the longest of each; none of samples of one length.
    """

    @staticmethod
    def forward(ctx: Any, options: _Options, lengths: tuple[Any, ...], *tensors: torch.Tensor) -> Any:
        parts = _unpacked(tensors)
        width = parts[0].shape[-1]
        padded = [_padded(one) for one in parts]
        scale = width**-0.5 if options.scale is None else options.scale
        more = (options.dropout, scale)
        window = (options.causal, *options.window, options.softcap)
        returns = options.returns_more and options.dropout > 0
        q, k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in padded)
        if lengths:
            out, logsumexp, probabilities, state = varlen_fwd(
                q, k, v, None, *lengths[:2], None, None, options.blocks, options.alibi, *lengths[2:], *more, False,
                *window, returns, None,
            )  # fmt: skip
        else:
            out, logsumexp, probabilities, state = fwd(q, k, v, None, options.alibi, *more, *window, returns, None)
        if options.is_trained and any(one.requires_grad for one in tensors):
            ctx.save_for_backward(*padded, out, logsumexp, state, *lengths[:2])
            ctx.options, ctx.longest, ctx.more, ctx.window, ctx.tensors = (
                options, lengths[2:], more, window, len(tensors)
            )  # fmt: skip
        result = out[..., :width]
        return (result, logsumexp, probabilities) if options.returns_more else result

    @staticmethod
    def backward(ctx: Any, gradient: Any, *_: Any) -> Any:
        query, key, value, out, logsumexp, state, *ends = ctx.saved_tensors
        results = _gradients(ctx.tensors, query, key, value)
        padded, *contiguous = (
            one if one.stride(-1) == 1 else one.contiguous() for one in (_padded(gradient), query, key, value, out)
        )
        last = (*ctx.window, ctx.options.deterministic, None, state)
        given = (padded, *contiguous, logsumexp, *_unpacked(results))
        if ends:
            varlen_bwd(*given, *ends, ctx.options.alibi, *ctx.longest, *ctx.more, False, *last)
        else:
            bwd(*given, ctx.options.alibi, *ctx.more, *last)
        return (None, None, *(one[..., : gradient.shape[-1]] for one in results))


@dataclass(frozen=True)
class _Options:
    """Named as the functions' arguments are, but for `is_trained`: whether gradients are on."""

    dropout: float
    scale: float | None
    causal: bool
    window: tuple[int, int]
    softcap: float
    alibi: torch.Tensor | None
    deterministic: bool
    returns_more: bool
    blocks: torch.Tensor | None
    is_trained: bool


def _unpacked(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return queries, keys and values, views of what holds several of them one after the other."""
    *first, last = tensors
    count = 3 - len(first)
    return [*first, *([last] if count == 1 else [last.select(-3, number) for number in range(count)])]


def _gradients(count: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """Make gradients for so many tensors that hold all three."""
    if count == 3:
        return [torch.empty_like(one) for one in (query, key, value)]
    first = [torch.empty_like(query)] if count == 2 else []
    return [*first, key.new_empty((*key.shape[:-2], 4 - count, *key.shape[-2:]))]


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    over = tensor.shape[-1] % 8
    return pad(tensor, [0, 8 - over]) if over else tensor


def _attend(tensors: tuple[torch.Tensor, ...], lengths: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
    """Take the arguments that all of the package's functions share."""
    options = _options(*args, **kwargs)
    apply: Any = _Attention.apply
    return apply(options, lengths, *tensors)


def _options(
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> _Options:
    return _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        block_table, torch.is_grad_enabled(),
    )  # fmt: skip


def _named_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function say the names of the options that it takes: libraries look for these before they give them."""
    own = [one for one in signature(function).parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    vars(function)["__signature__"] = Signature([*own, *signature(_options).parameters.values()])
    return function


@_named_arguments
def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return the attention of queries, keys and values, each [batch, tokens, heads, width]."""
    return _attend((q, k, v), (), *args, **kwargs)


@_named_arguments
def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return it of one tensor [batch, tokens, 3, heads, width]."""
    return _attend((qkv,), (), *args, **kwargs)


@_named_arguments
def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return it of queries, and of keys and values [batch, tokens, 2, heads, width]."""
    return _attend((q, kv), (), *args, **kwargs)


@_named_arguments
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return it of samples one after the other, [tokens, heads, width]."""
    return _attend((q, k, v), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), *args, **kwargs)


@_named_arguments
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *args: Any, **kwargs: Any
) -> Any:
    """Return it of such samples in one tensor [tokens, 3, heads, width]."""
    return _attend((qkv,), (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen), *args, **kwargs)


@_named_arguments
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return it of such samples, keys and values [tokens, 2, heads, width]."""
    return _attend((q, kv), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), *args, **kwargs)


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *_: Any, num_splits: int = 0,
    return_softmax_lse: bool = False, **__: Any,
) -> Any:  # fmt: skip
    """Return the attention of new tokens to those of a cache."""
    out, logsumexp = fwd_kvcache(q, k_cache, v_cache, *(None,) * 10, num_splits)
    return (out, logsumexp) if return_softmax_lse else out


# Its halves, which libraries for long contexts call


def _flash_attn_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Any, return_softmax: bool,
) -> Any:  # fmt: skip
    return fwd(
        q, k, v, None, alibi_slopes, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
        return_softmax, None,
    )  # fmt: skip


def _flash_attn_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, softmax_lse: torch.Tensor,
    dq: Any, dk: Any, dv: Any, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Any, deterministic: bool, rng_state: Any = None,
) -> torch.Tensor:  # fmt: skip
    sums: torch.Tensor = bwd(
        dout.contiguous(), q, k, v, out, softmax_lse, dq, dk, dv, alibi_slopes, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap, deterministic, None, rng_state,
    )[3]  # fmt: skip
    return sums


def _flash_attn_varlen_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Any = None, return_softmax: bool = False,
    block_table: Any = None, leftpad_k: Any = None, seqused_k: Any = None, zero_tensors: bool = False,
) -> Any:  # fmt: skip
    return varlen_fwd(
        q, k, v, None, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, zero_tensors, causal, window_size_left, window_size_right, softcap,
        return_softmax, None,
    )  # fmt: skip


def _flash_attn_varlen_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, softmax_lse: torch.Tensor,
    dq: Any, dk: Any, dv: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: Any, deterministic: bool, rng_state: Any = None, zero_tensors: bool = False,
) -> torch.Tensor:  # fmt: skip
    sums: torch.Tensor = varlen_bwd(
        dout.contiguous(), q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes,
        max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, zero_tensors, causal, window_size_left, window_size_right,
        softcap, deterministic, None, rng_state,
    )[3]  # fmt: skip
    return sums
