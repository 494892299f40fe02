"""causal-conv1d: a convolution of each channel, [batch, channels, tokens], over the tokens up to each.

Follows causal_conv1d/causal_conv1d_interface.py, causal_conv1d/cpp_functions.py and csrc/causal_conv1d.cpp of its
version 1.6.1. Its kernels write into what they are given.
"""

from __future__ import annotations

from typing import Any

import torch

from gpumem_tui.simulator.standins.register import kernel, on_gpu

_PACKAGE = "causal-conv1d"
_WIDTHS = range(2, 5)
_ACTIVATIONS = (None, "silu", "swish")
_CHUNK, _SHORT = 128, 64
"""Tokens of a part in which sums are kept where they must be the same each time; fewer of short samples."""


def _check(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Refuse what `causal_conv1d_fwd` does; return whether the channels of a token lie side by side."""
    on_gpu(_PACKAGE, x, weight)
    last = x.stride(1) == 1 and x.stride(2) > 1
    if last and x.shape[1] % 8:
        raise RuntimeError("causal_conv1d only supports channel dimension divisible by 8 for now")
    if last and (x.stride(2) % 8 or x.stride(0) % 8):
        raise RuntimeError("causal_conv1d with channel last layout requires strides to be multiples of 8")
    if weight.shape[-1] not in _WIDTHS:
        raise RuntimeError("causal_conv1d only supports width between 2 and 4")
    return last


@kernel(_PACKAGE)
def causal_conv1d_fwd(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> None:
    """Write the output: (input, weight, bias, places of samples, first states, output, last states, whether SiLU)."""
    _check(x, weight)


@kernel(_PACKAGE)
def causal_conv1d_bwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gradient: torch.Tensor,
    _places: Any,
    _first: Any,
    _of_last: Any,
    _of_x: torch.Tensor,
    of_weight: torch.Tensor,
    of_bias: torch.Tensor | None,
    *_: Any,
) -> None:
    """Write the gradients; sums of parts are kept where results must be the same each time."""
    last = _check(x, weight)
    if gradient.stride(1 if last else 2) != 1:
        gradient = gradient.transpose(1, 2).contiguous().transpose(1, 2) if last else gradient.contiguous()
    if not torch.are_deterministic_algorithms_enabled():
        return
    batch, channels, tokens = x.shape
    chunk = _SHORT if tokens <= _CHUNK else _CHUNK
    parts = (batch, -(-tokens // chunk)) if last else (batch,)
    sums = [x.new_zeros(*parts, channels, weight.shape[-1], dtype=torch.float32)]
    if bias is not None:
        sums.append(x.new_zeros(*parts, channels, dtype=torch.float32))
    for total, of in zip(sums, (of_weight, of_bias), strict=False):
        if of is not None:
            of.add_(total.sum(tuple(range(len(parts)))))


@kernel(_PACKAGE)
def causal_conv1d_update(x: torch.Tensor, _state: torch.Tensor, weight: torch.Tensor, *_: Any) -> None:
    """Write the output of one token, or a few, and the state."""
    on_gpu(_PACKAGE, x, weight)


# cpp_functions


def causal_conv1d_fwd_function(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Any,
    seq_idx: Any,
    initial_states: Any,
    final_states_out: Any,
    silu_activation: bool,
) -> torch.Tensor:
    """Return the output."""
    out = torch.empty_like(x)
    causal_conv1d_fwd(x, weight, bias, seq_idx, initial_states, out, final_states_out, silu_activation)
    return out


def causal_conv1d_bwd_function(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Any,
    dout: torch.Tensor,
    seq_idx: Any,
    initial_states: Any,
    dfinal_states: Any,
    dx: torch.Tensor | None,
    return_dinitial_states: bool,
    silu_activation: bool,
) -> tuple[Any, ...]:
    """Return gradients of input, weight, bias and first states; those of weight and bias are summed in fp32."""
    of_x = torch.empty_like(x) if dx is None else dx
    of_weight = torch.zeros_like(weight, dtype=torch.float32)
    of_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    of_first = _states(x, weight) if return_dinitial_states else None
    causal_conv1d_bwd(
        x, weight, bias, dout, seq_idx, initial_states, dfinal_states, of_x, of_weight, of_bias, of_first,
        silu_activation,
    )  # fmt: skip
    of_weight = of_weight.type_as(weight)
    return of_x, of_weight, of_bias if of_bias is None else of_bias.type_as(bias), of_first


def causal_conv1d_update_function(x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, *more: Any) -> Any:
    """Return the output of one token, or a few."""
    out = torch.empty_like(x)
    causal_conv1d_update(x, conv_state, weight, *more)
    return out


def _states(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    batch, channels, _ = x.shape
    return x.new_empty(batch, weight.shape[-1] - 1, channels).transpose(1, 2)


# The interface


class _Convolution(torch.autograd.Function):
    """Saves its input, weight and bias; the activation is computed again."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, seq_idx: Any, first: Any, returns: bool, last: Any, silu: bool
    ) -> Any:
        if x.stride(2) != 1 and x.stride(1) != 1:
            x = x.contiguous()
        bias = None if bias is None else bias.contiguous()
        seq_idx = None if seq_idx is None else seq_idx.contiguous()
        if returns and last is None:
            last = _states(x, weight)
        out = causal_conv1d_fwd_function(x, weight, bias, seq_idx, first, last if returns else None, silu)
        ctx.save_for_backward(x, weight, bias, seq_idx, first)
        ctx.returns, ctx.silu = returns, silu
        return (out, last) if returns else out

    @staticmethod
    def backward(ctx: Any, gradient: Any, *more: Any) -> Any:
        x, weight, bias, seq_idx, first = ctx.saved_tensors
        if gradient.stride(2) != 1 and gradient.stride(1) != 1:
            gradient = gradient.contiguous()
        of_last = more[0] if ctx.returns else None
        wants_first = first is not None and first.requires_grad
        found = causal_conv1d_bwd_function(
            x, weight, bias, gradient, seq_idx, first, of_last, None, wants_first, ctx.silu
        )
        return *found[:3], None, found[3], None, None, None


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Any = None,
    seq_idx: Any = None,
    initial_states: Any = None,
    return_final_states: bool = False,
    final_states_out: Any = None,
    activation: str | None = None,
) -> Any:
    """Return the convolution of [batch, channels, tokens] by [channels, width], and its last states if asked for."""
    if activation not in _ACTIVATIONS:
        raise NotImplementedError("activation must be None, silu, or swish")
    apply: Any = _Convolution.apply
    silu = activation is not None
    return apply(x, weight, bias, seq_idx, initial_states, return_final_states, final_states_out, silu)


def causal_conv1d_step(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: Any = None,
    activation: str | None = None,
    cache_seqlens: Any = None,
    conv_state_indices: Any = None,
) -> Any:
    """Return the output of one token [batch, channels], or of a few, and change the state: `causal_conv1d_update`."""
    if activation not in _ACTIVATIONS:
        raise NotImplementedError("activation must be None, silu, or swish")
    given = x.unsqueeze(-1) if x.dim() == 2 else x
    out = causal_conv1d_update_function(
        given, conv_state, weight, bias, activation is not None, cache_seqlens, conv_state_indices
    )
    return out.squeeze(-1) if x.dim() == 2 else out


def causal_conv1d_varlen_states(x: torch.Tensor, cu_seqlens: torch.Tensor, state_len: int) -> torch.Tensor:
    """Return the last tokens of each sample of [tokens, channels], by a kernel of Triton's."""
    return x.new_empty(cu_seqlens.shape[0] - 1, state_len, x.shape[1]).transpose(1, 2)
