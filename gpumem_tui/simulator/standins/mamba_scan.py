"""mamba-ssm's first layer: the selective scan, and the block in one function around it.

Follows mamba_ssm/ops/selective_scan_interface.py, mamba_ssm/modules/mamba_simple.py and
csrc/selective_scan/selective_scan.cpp of its version 2.3.2. Tensors are [batch, channels, tokens].
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gpumem_tui.simulator.standins.causal_conv1d import (
    causal_conv1d_bwd_function,
    causal_conv1d_fn,
    causal_conv1d_fwd_function,
    causal_conv1d_step,
)
from gpumem_tui.simulator.standins.register import kernel, on_gpu

_PACKAGE = "mamba-ssm"
_CHUNK = 2048
"""Tokens between which the kernel keeps its state for backward."""
_MOST_STATES = 256


@kernel(_PACKAGE)
def fwd(
    u: torch.Tensor, delta: torch.Tensor, a: torch.Tensor, b: Any, c: Any, d: Any, z: Any, *_: Any
) -> list[torch.Tensor]:
    """Return the output, the states between chunks, and with a gate the output times it (`selective_scan_fwd`)."""
    on_gpu(_PACKAGE, u, delta, a, b, c, d, z)
    if a.shape[1] > _MOST_STATES:
        raise RuntimeError("selective_scan only supports state dimension <= 256")
    if delta.dtype != u.dtype:
        raise RuntimeError("selective_scan: delta must have the type of u")
    batch, channels, tokens = u.shape
    gated = [] if z is None else [torch.empty_like(z)]
    out = torch.empty_like(delta)
    return [out, a.new_empty(batch, channels, math.ceil(tokens / _CHUNK), 2 * a.shape[1]), *gated]


@kernel(_PACKAGE)
def bwd(
    u: torch.Tensor,
    delta: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: Any,
    z: Any,
    bias: Any,
    _gradient: torch.Tensor,
    _states: Any,
    out: Any,
    of_z: Any,
    _softplus: bool,
    recomputes: bool,
) -> list[Any]:
    """Return gradients of all that is given, in its order, and the gated output again (`selective_scan_bwd`)."""
    more = [] if z is None else [torch.empty_like(z) if of_z is None else of_z]
    if z is not None and recomputes:
        more.append(torch.empty_like(out))
    of_u, of_delta = torch.empty_like(u), torch.empty_like(delta)
    of_a = torch.zeros_like(a)
    of_b, of_c = (torch.zeros_like(one, dtype=torch.float32 if one.dim() >= 3 else one.dtype) for one in (b, c))
    of_d, of_bias = (None if one is None else torch.zeros_like(one) for one in (d, bias))
    cast = [of_b.to(b.dtype), of_c.to(c.dtype)]
    return [of_u, of_delta, of_a, *cast, of_d, of_bias, *more]


def _in_rows(tensor: Any) -> Any:
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


class _Scan(torch.autograd.Function):
    """Saves all that it is given, the states between chunks and, with a gate, the output before it."""

    @staticmethod
    def forward(
        ctx: Any, u: Any, delta: Any, a: Any, b: Any, c: Any, d: Any, z: Any, bias: Any, softplus: bool, returns: bool
    ) -> Any:
        u, delta, b, c, z = map(_in_rows, (u, delta, b, c, z))
        d = None if d is None else d.contiguous()
        ctx.grouped = b.dim() == 3, c.dim() == 3
        b, c = (one.unsqueeze(1) if one.dim() == 3 else one for one in (b, c))
        out, states, *gated = fwd(u, delta, a, b, c, d, z, bias, softplus)
        ctx.save_for_backward(u, delta, a, b, c, d, z, bias, states, out if gated else None)
        ctx.softplus = softplus
        result = gated[0] if gated else out
        return (result, states[:, :, -1, 1::2]) if returns else result

    @staticmethod
    def backward(ctx: Any, gradient: Any, *_: Any) -> Any:
        *given, states, out = ctx.saved_tensors
        of_u, of_delta, of_a, of_b, of_c, of_d, of_bias, *more = bwd(
            *given, _in_rows(gradient), states, out, None, ctx.softplus, False
        )
        of_b, of_c = (one.squeeze(1) if was else one for one, was in zip((of_b, of_c), ctx.grouped, strict=True))
        return of_u, of_delta, of_a, of_b, of_c, of_d, more[0] if more else None, of_bias, None, None


def selective_scan_fn(
    u: Any,
    delta: Any,
    A: Any,  # noqa: N803 - as the package's is called, and so below
    B: Any,  # noqa: N803
    C: Any,  # noqa: N803
    D: Any = None,  # noqa: N803
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """Return the scan of u, and its last state if that is asked for."""
    apply: Any = _Scan.apply
    return apply(u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state)


def _by_token(tensor: torch.Tensor) -> torch.Tensor:
    """Return [batch, channels, tokens] as [batch × tokens, channels]."""
    return tensor.transpose(1, 2).reshape(-1, tensor.shape[1])


def _by_channel(tensor: torch.Tensor) -> torch.Tensor:
    """Return [batch, channels, tokens] as [channels, batch × tokens]."""
    return tensor.transpose(0, 1).reshape(tensor.shape[1], -1)


def _of_channels(matrix: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return [channels, batch × tokens] as [batch, channels, tokens]."""
    return matrix.view(matrix.shape[0], -1, tokens).transpose(0, 1)


def _spread(columns: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return [batch × tokens, states] as [batch, 1, states, tokens], copied."""
    return columns.reshape(-1, tokens, columns.shape[1]).transpose(1, 2).unsqueeze(1).contiguous()


class _Inner(torch.autograd.Function):
    """The block from its first projection on; convolution and steps are computed again in backward."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def forward(
        ctx: Any, xz: Any, conv_weight: Any, conv_bias: Any, x_proj: Any, dt_proj: Any, out_proj: Any, out_bias: Any,
        a: Any, d: Any, dt_bias: Any, softplus: bool,
    ) -> Any:  # fmt: skip
        tokens, rank, states = xz.shape[-1], dt_proj.shape[1], a.shape[-1]
        if torch.is_autocast_enabled("cuda"):
            cast = torch.get_autocast_dtype("cuda")
            x_proj, dt_proj, out_proj = (one.to(cast) for one in (x_proj, dt_proj, out_proj))
            out_bias = None if out_bias is None else out_bias.to(cast)
        xz, conv_weight = _in_rows(xz), conv_weight.squeeze(1)
        x, z = xz.chunk(2, dim=1)
        conv_bias = None if conv_bias is None else conv_bias.contiguous()
        convolved = causal_conv1d_fwd_function(x, conv_weight, conv_bias, None, None, None, True)
        figures = F.linear(_by_token(convolved), x_proj)
        delta = _of_channels(dt_proj @ figures[:, :rank].t(), tokens)
        b = _spread(figures[:, rank : rank + states], tokens)
        c = _spread(figures[:, -states:], tokens)
        out, between, gated = fwd(convolved, delta, a, b, c, d, z, dt_bias, softplus)
        del convolved, delta
        ctx.save_for_backward(
            xz, conv_weight, conv_bias, figures, x_proj, dt_proj, out_proj, a, b, c, d, dt_bias, between, out
        )
        ctx.softplus, ctx.has_bias = softplus, out_bias is not None
        return F.linear(gated.transpose(1, 2), out_proj, out_bias)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Any) -> Any:
        (xz, conv_weight, conv_bias, figures, x_proj, dt_proj, out_proj, a, b, c, d, dt_bias, between, out) = (
            ctx.saved_tensors
        )
        tokens, rank, states = xz.shape[-1], dt_proj.shape[1], a.shape[-1]
        x, z = xz.chunk(2, dim=1)
        gradient = _in_rows(gradient)
        convolved = causal_conv1d_fwd_function(x, conv_weight, conv_bias, None, None, None, True)
        delta = _of_channels(dt_proj @ figures[:, :rank].t(), tokens)
        of_xz = torch.empty_like(xz)
        of_x, of_z = of_xz.chunk(2, dim=1)
        gradient = gradient.permute(2, 0, 1).reshape(gradient.shape[-1], -1)
        of_out = _of_channels(out_proj.t() @ gradient, tokens)
        of_conv, of_delta, of_a, of_b, of_c, of_d, of_bias, of_z, gated = bwd(
            convolved, delta, a, b, c, d, z, dt_bias, of_out, between, out, of_z, ctx.softplus, True
        )
        of_out_proj = torch.einsum("eB,dB->ed", gradient, _by_channel(gated))
        of_out_bias = gradient.sum(1) if ctx.has_bias else None
        of_figures = torch.empty_like(figures)
        of_b = _by_token(of_b.squeeze(1)).contiguous()
        of_figures[:, rank : rank + states] = of_b
        del of_b
        of_c = _by_token(of_c.squeeze(1)).contiguous()
        of_figures[:, -states:] = of_c
        del of_c
        of_delta = _by_channel(of_delta)
        of_dt_proj = torch.einsum("dB,Br->dr", of_delta, figures[:, :rank])
        of_figures[:, :rank] = torch.einsum("dB,dr->Br", of_delta, dt_proj)
        of_conv = _by_channel(of_conv)
        of_x_proj = torch.einsum("Br,Bd->rd", of_figures, _by_token(convolved))
        of_conv = torch.addmm(of_conv, x_proj.t(), of_figures.t(), out=of_conv)
        _, of_conv_weight, of_conv_bias, _ = causal_conv1d_bwd_function(
            x, conv_weight, conv_bias, _of_channels(of_conv, tokens), None, None, None, of_x, False, True
        )
        return (
            of_xz, of_conv_weight.unsqueeze(1), of_conv_bias, of_x_proj, of_dt_proj, of_out_proj, of_out_bias, of_a,
            of_d, of_bias, None,
        )  # fmt: skip


def mamba_inner_fn(
    xz: Any,
    conv1d_weight: Any,
    conv1d_bias: Any,
    x_proj_weight: Any,
    delta_proj_weight: Any,
    out_proj_weight: Any,
    out_proj_bias: Any,
    A: Any,  # noqa: N803 - as the package's is called
    B: Any = None,  # noqa: N803
    C: Any = None,  # noqa: N803
    D: Any = None,  # noqa: N803
    delta_bias: Any = None,
    delta_softplus: bool = True,
) -> Any:
    """Return the block's output [batch, tokens, width] of its first projection [batch, 2 × channels, tokens]."""
    if B is not None or C is not None:
        raise NotImplementedError("mamba_inner_fn is stood in for with B and C of the input alone: leave both out")
    apply: Any = _Inner.apply
    return apply(
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, D,
        delta_bias, delta_softplus,
    )  # fmt: skip


class Mamba(nn.Module):
    """The block of Mamba (Gu & Dao 2023)."""

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: Any = "auto",
        conv_bias: bool = True,
        bias: bool = False,
        use_fast_path: bool = True,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: Any = None,
        **_first_steps: Any,
    ) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.d_model, self.d_state, self.d_conv, self.expand = d_model, d_state, d_conv, expand
        self.d_inner = int(expand * d_model)
        self.dt_rank = math.ceil(d_model / 16) if dt_rank == "auto" else int(dt_rank)
        self.use_fast_path, self.layer_idx = use_fast_path, layer_idx
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=bias, **where)
        self.conv1d = nn.Conv1d(
            self.d_inner, self.d_inner, d_conv, bias=conv_bias, groups=self.d_inner, padding=d_conv - 1, **where
        )
        self.activation, self.act = "silu", nn.SiLU()
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + 2 * d_state, bias=False, **where)
        self.dt_proj = nn.Linear(self.dt_rank, self.d_inner, bias=True, **where)
        states = torch.arange(1, d_state + 1, dtype=torch.float32, device=device).expand(self.d_inner, -1)
        self.A_log = nn.Parameter(states.contiguous().log())
        self.D = nn.Parameter(torch.ones(self.d_inner, device=device))
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **where)

    def forward(self, hidden_states: torch.Tensor, inference_params: Any = None) -> Any:
        """Return what [batch, tokens, width] becomes.

        Raises:
            NotImplementedError: with a state kept between calls.
        """
        if inference_params is not None:
            raise NotImplementedError("mamba-ssm is stood in for where it trains: leave inference_params out")
        tokens = hidden_states.shape[1]
        xz = _of_channels(self.in_proj.weight @ hidden_states.permute(2, 0, 1).reshape(self.d_model, -1), tokens)
        if self.in_proj.bias is not None:
            xz = xz + self.in_proj.bias.to(xz.dtype).unsqueeze(-1)
        a = -torch.exp(self.A_log.float())
        if self.use_fast_path:
            return mamba_inner_fn(
                xz, self.conv1d.weight, self.conv1d.bias, self.x_proj.weight, self.dt_proj.weight,
                self.out_proj.weight, self.out_proj.bias, a, None, None, self.D.float(),
                delta_bias=self.dt_proj.bias.float(), delta_softplus=True,
            )  # fmt: skip
        x, z = xz.chunk(2, dim=1)
        x = causal_conv1d_fn(x, self.conv1d.weight.squeeze(1), self.conv1d.bias, activation=self.activation)
        steps, b, c = self.x_proj(_by_token(x)).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        delta = _of_channels(self.dt_proj.weight @ steps.t(), tokens)
        b, c = (_spread(one, tokens).squeeze(1) for one in (b, c))
        y = selective_scan_fn(x, delta, a, b, c, self.D.float(), z, self.dt_proj.bias.float(), delta_softplus=True)
        return self.out_proj(y.transpose(1, 2))

    def step(self, hidden_states: torch.Tensor, conv_state: torch.Tensor, ssm_state: torch.Tensor) -> Any:
        """Return what one token becomes, and the states that have changed."""
        x, z = self.in_proj(hidden_states.squeeze(1)).chunk(2, dim=-1)
        x = causal_conv1d_step(x, conv_state, self.conv1d.weight.squeeze(1), self.conv1d.bias, self.activation)
        steps, *_ = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        F.linear(steps, self.dt_proj.weight)
        torch.exp(self.A_log.float())
        return self.out_proj(torch.empty_like(z)).unsqueeze(1), conv_state, ssm_state

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: Any = None) -> Any:  # noqa: ARG002
        """Return the states that are kept between calls."""
        like = self.out_proj.weight
        return tuple(
            like.new_zeros(batch_size, self.d_inner, width, dtype=dtype or of.dtype)
            for width, of in ((self.d_conv, self.conv1d.weight), (self.d_state, self.dt_proj.weight))
        )
