"""FlashAttention-2 of the flash-attn package: what its kernels and the functions around them allocate.

Follows csrc/flash_attn/flash_api.cpp and flash_attn/flash_attn_interface.py of its version 2.8.3.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import pad

from gpumem_tui.simulator.device.gpu import backend
from gpumem_tui.simulator.standins.register import kernel, on_gpu

_PACKAGE = "flash-attn"
_DTYPES = (torch.float16, torch.bfloat16)
_MOST_WIDE = 256
_FEWEST_ROWS = 128
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


def _rounded(count: int, of: int) -> int:
    return math.ceil(count / of) * of


def _columns(width: int) -> int:
    """Return how wide a head's fp32 accumulator is."""
    return _rounded(width, 32 if width <= 128 else 64)


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
    shape = (batch, heads, _rounded(tokens, _FEWEST_ROWS), _rounded(key.shape[1], _FEWEST_ROWS))
    probabilities = query.new_empty(shape if return_softmax else (0,))
    splits = 1 if dropout else _splits(batch * heads, tokens, key.shape[1], width)
    partial = [query.new_empty((splits, *part), dtype=torch.float32) for part in
               ((batch, heads, tokens), (batch, heads, tokens, _columns(width)))] if splits > 1 else []  # fmt: skip
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
    rows = _rounded(tokens, _FEWEST_ROWS)
    pairs = ((query, of_query), (key, of_key), (value, of_value))
    results = [torch.empty_like(one) if made is None else made for one, made in pairs]
    sums = query.new_empty((batch, heads, rows), dtype=torch.float32)
    parts: tuple[int, ...] = ()
    if deterministic:
        parts = (math.ceil(backend.get_device_properties().multi_processor_count / (batch * heads)),)
    accumulated = query.new_empty((*parts, batch, rows, heads, _columns(width)), dtype=torch.float32)
    if heads != key.shape[2]:
        _sum_groups([query.new_empty((batch, key.shape[1], heads, width)) for _ in range(2)], results[1:])
    del accumulated
    return (*results, sums)


def _sum_groups(expanded: list[torch.Tensor], results: list[torch.Tensor]) -> None:
    """Sum the gradients that every query head has made over the heads of a group."""
    for one, result in zip(expanded, results, strict=True):
        grouped = one.view(*one.shape[:-2], result.shape[-2], -1, one.shape[-1])
        torch.sum(grouped, dim=-2, out=result)


class _Attention(torch.autograd.Function):
    """Attention of three tensors: saves them, padded to a width of 8, the output, its logsumexp and random state."""

    @staticmethod
    def forward(
        ctx: Any, query: Any, key: Any, value: Any, options: tuple[Any, ...], returns_more: bool, is_trained: bool
    ) -> Any:
        width = query.shape[-1]
        padded = [_padded(one) for one in (query, key, value)]
        dropout, scale, causal, window, softcap, alibi, deterministic = options
        scale = width**-0.5 if scale is None else scale
        more = (alibi, dropout, scale, causal, *window, softcap)
        q, k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in padded)
        out, logsumexp, probabilities, state = fwd(q, k, v, None, *more, returns_more and dropout > 0, None)
        if is_trained and any(one.requires_grad for one in (query, key, value)):
            ctx.save_for_backward(*padded, out, logsumexp, state)
            ctx.more, ctx.deterministic = more, deterministic
        result = out[..., :width]
        return (result, logsumexp, probabilities) if returns_more else result

    @staticmethod
    def backward(ctx: Any, gradient: Any, *_: Any) -> Any:
        query, key, value, out, logsumexp, state = ctx.saved_tensors
        results = [torch.empty_like(one) for one in (query, key, value)]
        padded, *contiguous = (
            one if one.stride(-1) == 1 else one.contiguous() for one in (_padded(gradient), query, key, value, out)
        )
        bwd(padded, *contiguous, logsumexp, *results, *ctx.more, ctx.deterministic, None, state)
        return (*(one[..., : gradient.shape[-1]] for one in results), None, None, None)


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    over = tensor.shape[-1] % 8
    return pad(tensor, [0, 8 - over]) if over else tensor


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Return the attention of queries, keys and values, each [batch, tokens, heads, width]."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    apply: Any = _Attention.apply
    return apply(q, k, v, options, return_attn_probs, torch.is_grad_enabled())
