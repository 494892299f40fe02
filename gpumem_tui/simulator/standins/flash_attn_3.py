"""FlashAttention-3 (flash_attn_interface): what its kernels and the functions around them allocate.

Follows hopper/flash_api.cpp and hopper/flash_attn_interface.py of its version 3.0.0. It has no dropout, so no random
state, and sums the gradients of grouped keys and values in fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from gpumem_tui.simulator.device.attention_scratch import rounded
from gpumem_tui.simulator.device.gpu import backend
from gpumem_tui.simulator.standins.register import kernel, on_gpu

_PACKAGE = "flash-attn-3"
_WIDTHS = (64, 96, 128, 192, 256)


def _check(*tensors: torch.Tensor | None) -> None:
    """Refuse what `mha_fwd` refuses."""
    on_gpu(_PACKAGE, *tensors)
    if backend.get_device_capability() < (8, 0):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    query, key = tensors[0], tensors[1]
    assert query is not None
    assert key is not None
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        raise RuntimeError("FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
    if query.shape[-2] % key.shape[-2]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")


@dataclass(frozen=True)
class _Options:
    """How it attends, and the samples' ends and longest ones where they lie one after the other."""

    causal: bool
    window: tuple[int, int]
    softcap: float
    deterministic: bool
    ends: tuple[torch.Tensor, torch.Tensor] | None
    longest: tuple[int, int]

    @property
    def is_local(self) -> bool:
        """Return whether tokens see a window of others."""
        return not self.causal and max(self.window) >= 0


@kernel(_PACKAGE)
def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: _Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and logsumexp (`mha_fwd`, of one split); the scheduler takes a few numbers a sample."""
    _check(query, key, value, *(options.ends or ()))
    *rows, heads, _ = query.shape
    dtype = torch.bfloat16 if query.dtype.itemsize == 1 else query.dtype
    out = query.new_empty((*rows, heads, value.shape[-1]), dtype=dtype)
    shape = (heads, *rows) if options.ends is not None else (rows[0], heads, rows[1])
    logsumexp = query.new_empty(shape, dtype=torch.float32)
    bends = options.causal or options.is_local
    if options.ends is not None:
        vectors = 2 + (not options.is_local) + bends
        numbers = 1 + vectors * rounded(options.ends[0].numel() - 1, 4)
    else:
        numbers = int(bends)
    scheduler = query.new_empty((numbers,), dtype=torch.int32)
    del scheduler
    return out, logsumexp


@kernel(_PACKAGE)
def _backward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: _Options) -> None:
    """Take row sums, logsumexps, accumulators in fp32, and a semaphore a block of rows (`mha_bwd`)."""
    heads, groups = query.shape[-2], key.shape[-2]
    width = next(width for width in _WIDTHS if max(query.shape[-1], value.shape[-1]) <= width)
    block, columns = _blocks(width, options)
    if options.ends is None:
        samples, tokens, keys = query.shape[0], query.shape[1], key.shape[1]
        rows, of_keys = samples * rounded(tokens, block), samples * rounded(keys, columns)
    else:
        samples, tokens = options.ends[0].numel() - 1, int(options.longest[0])
        rows = rounded(query.shape[0] + samples * block, block)
        of_keys = rounded(key.shape[0] + samples * columns, columns)
        keys = int(options.longest[1])
    taken = [query.new_empty((heads, rows), dtype=torch.float32) for _ in range(2)]
    taken.append(query.new_empty((heads, rows * width), dtype=torch.float32))
    if groups != heads:
        taken += [query.new_empty((groups, of_keys, width), dtype=torch.float32) for _ in range(2)]
    taken.append(query.new_empty((math.ceil(tokens / block), samples, heads), dtype=torch.int32))
    if groups != heads and options.deterministic:
        blocks = math.ceil(keys / columns)
        taken += [query.new_empty((blocks, samples, groups), dtype=torch.int32) for _ in range(2)]
    del taken


def _blocks(width: int, options: _Options) -> tuple[int, int]:
    """Return how many rows and columns a block of backward has (`kBlockM`, `kBlockN`)."""
    capability = backend.get_device_capability()
    columns = 128 if width <= 128 else 96 if width <= 192 else 80
    if capability >= (9, 0):
        capped = options.softcap > 0
        if width <= 64:
            return (96 if options.causal and capped else 128), columns
        bends = options.causal or options.is_local or capped
        return (80 if 96 < width <= 128 and not bends else 64), columns
    if capability in ((8, 6), (8, 9)):
        return (64 if width <= 192 else 32), (128 if width <= 96 else 96 if width <= 128 else 64)
    return (128 if width <= 64 else 64), (128 if width <= 128 else 80 if width <= 192 else 64)


class _Attention(torch.autograd.Function):
    """Saves queries, keys and values, or what holds them all, the output and its logsumexp."""

    @staticmethod
    def forward(ctx: Any, options: _Options, returns_more: bool, *tensors: torch.Tensor) -> Any:
        query, key, value = _unpacked(tensors)
        q, k = (one if one.stride(-1) == 1 else one.contiguous() for one in (query, key))
        out, logsumexp = _forward(q, k, value, options)
        ctx.save_for_backward(query, key, value, out, logsumexp, *(options.ends or ()))
        ctx.options, ctx.is_packed = options, len(tensors) == 1
        return (out, logsumexp) if returns_more else out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        query, key, value, *_rest = ctx.saved_tensors
        results: list[torch.Tensor]
        if ctx.is_packed:
            results = [query.new_empty((*query.shape[:-2], 3, *query.shape[-2:]))]
        else:
            results = [torch.empty_like(one) for one in (query, key, value)]
        given = [one if one.stride(-1) == 1 else one.contiguous() for one in (gradient, query, key, value)]
        _backward(*given[1:], ctx.options)
        return (None, None, *results)


def _unpacked(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tensors if len(tensors) == 3 else tuple(tensors[0].unbind(-3))


def _attend(
    tensors: tuple[torch.Tensor, ...], causal: bool, window: tuple[int, int], softcap: float, deterministic: bool,
    returns_more: bool, ends: Any = None, longest: tuple[int, int] = (0, 0),
) -> Any:  # fmt: skip
    apply: Any = _Attention.apply
    return apply(_Options(causal, window, softcap, deterministic, ends, longest), returns_more, *tensors)


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None, causal: bool = False,
    qv: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Return the attention of queries, keys and values, each [batch, tokens, heads, width]."""
    return _attend((q, k, v), causal, window_size, softcap, deterministic, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, softmax_scale: float | None = None, causal: bool = False, q_descale: Any = None,
    k_descale: Any = None, v_descale: Any = None, window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0,
    softcap: float = 0.0, deterministic: bool = False, num_heads_q: int | None = None, sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Return it of one tensor [batch, tokens, 3, heads, width]."""
    return _attend((qkv,), causal, window_size, softcap, deterministic, return_attn_probs)


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, seqused_q: Any = None, seqused_k: Any = None,
    softmax_scale: float | None = None, causal: bool = False, qv: Any = None, q_descale: Any = None,
    k_descale: Any = None, v_descale: Any = None, window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Return it of samples one after the other, [tokens, heads, width]."""
    ends, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    return _attend((q, k, v), causal, window_size, softcap, deterministic, return_attn_probs, ends, longest)


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *_: Any, causal: bool = False,
    return_softmax_lse: bool = False, **__: Any,
) -> Any:  # fmt: skip
    """Return the attention of new tokens to those of a cache, in one split."""
    out, logsumexp = _forward(q, k_cache, v_cache, _Options(causal, (-1, -1), 0.0, False, None, (0, 0)))
    return (out, logsumexp) if return_softmax_lse else out
