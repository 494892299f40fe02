"""mamba-ssm's second layer: the scan by chunks (SSD), and the block in one function around it.

Follows mamba_ssm/ops/triton (ssd_combined.py, ssd_bmm.py, ssd_chunk_scan.py, ssd_chunk_state.py, ssd_state_passing.py,
layernorm_gated.py, layer_norm.py, k_activations.py) and mamba_ssm/modules/mamba2.py of its version 2.3.2, without
`state_dtype`. Its Triton kernels write into what is made before they are launched. Tensors are [batch, tokens, heads,
width of a head], B and C [batch, tokens, groups, states].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gpumem_tui.simulator.device.gpu import backend
from gpumem_tui.simulator.standins.causal_conv1d import (
    causal_conv1d_bwd_function,
    causal_conv1d_fn,
    causal_conv1d_fwd_function,
)
from gpumem_tui.simulator.standins.register import kernel, on_gpu

_PACKAGE = "mamba-ssm"
_ROWS = 32
"""The fewest rows of a block that sums by block are made for (`BLOCK_SIZE_min`, `BLOCK_SIZE_M_min`)."""
_STATES = 64
"""Values of a state that one block passes on, at the fewest (`_state_passing_bwd`)."""
_MOST_BYTES = 65536
"""Most bytes of a row that is normalized."""


@dataclass(frozen=True)
class _Scan:
    """The inputs and sizes of a scan's kernels."""

    x: torch.Tensor
    dt: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    chunk: int
    d: torch.Tensor | None
    z: torch.Tensor | None
    bias: torch.Tensor | None

    @property
    def chunks(self) -> int:
        return math.ceil(self.x.shape[1] / self.chunk)

    @property
    def by_chunk(self) -> tuple[int, ...]:
        """The shape of one figure for each head and token: [batch, heads, chunks, tokens of a chunk]."""
        batch, _, heads, _ = self.x.shape
        return batch, heads, self.chunks, self.chunk

    @property
    def states(self) -> tuple[int, ...]:
        batch, _, heads, width = self.x.shape
        return batch, self.chunks, heads, width, self.b.shape[-1]

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Make a tensor on the GPU."""
        return self.x.new_empty(shape, dtype=dtype)

    def splits(self) -> int:
        """Return in how many parts the heads of a group are summed, so that all multiprocessors have work."""
        batch, heads, chunks, _ = self.by_chunk
        of_group = heads // self.b.shape[2]
        processors: int = backend.get_device_properties().multi_processor_count
        return math.ceil(of_group / max(min(math.ceil(batch * chunks * heads / processors), of_group), 1))

    def products(self) -> torch.Tensor:
        """Make C · B of every two tokens of a chunk (`_bmm_chunk_fwd`)."""
        batch, _, groups, _ = self.b.shape
        return self.new(batch, self.chunks, groups, self.chunk, self.chunk)

    def passed(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the states before each chunk and the last (`_chunk_state_fwd`, `_state_passing_fwd`)."""
        of_chunks = self.new(*self.states)
        before, last = self.new(*self.states, dtype=dtype), self.new(*self.states[:1], *self.states[2:])
        del of_chunks
        return before, last


def _lies(tensor: Any) -> Any:
    return tensor if tensor is None or tensor.stride(-1) == 1 or tensor.stride(1) == 1 else tensor.contiguous()


@kernel(_PACKAGE)
def _forward(scan: _Scan) -> tuple[torch.Tensor, Any, torch.Tensor, torch.Tensor, Any]:
    """Return output, output before the gate if there is one, sums of steps, the last state, and what else is held."""
    on_gpu(_PACKAGE, scan.x, scan.dt, scan.a)
    steps, sums = scan.new(*scan.by_chunk), scan.new(*scan.by_chunk)
    before, last = scan.passed(scan.c.dtype)
    products = scan.products()
    out = scan.new(*scan.x.shape, dtype=scan.x.dtype)
    ungated = None if scan.z is None else torch.empty_like(out)
    del products
    return out, ungated, sums, last, (steps, before)


@kernel(_PACKAGE)
def _backward(scan: _Scan, gradient: torch.Tensor, out: torch.Tensor, given: dict[str, Any], recomputes: bool) -> Any:
    """Return gradients of x, dt, A, B, C, D, z and the steps' bias, and the output again if that is asked for.

    Args:
        given: gradients that are made already, by name: "x", "dt", "B", "C", "z".
    """
    x, batch, chunks = scan.x, scan.x.shape[0], scan.chunks
    heads, width = x.shape[2:]
    of_b, of_c = (given.get(name) for name in "BC")
    of_b = torch.empty_like(scan.b) if of_b is None else of_b
    of_c = torch.empty_like(scan.c) if of_c is None else of_c
    of_dt = given["dt"] if given.get("dt") is not None else torch.empty_like(scan.dt)
    steps_in = scan.dt.clone()
    sums, steps = scan.new(*scan.by_chunk), scan.new(*scan.by_chunk)
    products = scan.products()
    states, _last = scan.passed(torch.float32)
    of_z, again, of_d = None, None, None
    if scan.z is not None:
        of_z, again, of_d, gradient = _of_gate(scan, gradient, given.get("z"), recomputes=recomputes)
    of_states = scan.new(*scan.states)
    passed, of_sums_by_chunk, states = _of_passing(scan, states)
    of_states = passed
    of_x = torch.empty_like(x) if given.get("x") is None else given["x"]
    of_skip = None
    if scan.d is not None:
        each = width if scan.d.dim() == 2 else 1
        parts = x.new_zeros(math.ceil(scan.chunk / _ROWS), batch, chunks, heads, each, dtype=torch.float32)
    of_steps = scan.new(*scan.by_chunk)
    if scan.d is not None:
        of_skip = parts.sum((0, 1, 2))
        of_skip = (of_skip.sum(-1) if scan.d.dim() == 1 else of_skip).to(scan.d.dtype)
        del parts
    of_sums, tokens, groups = scan.new(*scan.by_chunk), x.shape[1], scan.b.shape[2]
    summed = [of_sums]
    parts_of = (batch, tokens, scan.splits(), groups, scan.b.shape[-1])
    total_b = scan.new(*parts_of).sum(2)
    torch.cumsum(of_sums, -1, out=of_sums)
    summed.append(scan.new(*scan.by_chunk))
    total_c = scan.new(*parts_of).sum(2)
    of_products = scan.new(batch, chunks, scan.splits(), groups, scan.chunk, scan.chunk).sum(2)
    summed[1][..., -1] += of_sums_by_chunk
    summed[1] = summed[1].flip([-1]).cumsum(-1).flip([-1])
    steady = scan.new(*scan.by_chunk[:3], math.ceil(scan.chunk / _ROWS), scan.chunk).sum(3)
    steady += summed[0] + summed[1]
    of_bias = None if scan.bias is None else torch.empty_like(scan.bias, dtype=torch.float32)
    of_a = torch.empty_like(scan.a, dtype=torch.float32)
    del sums, steps, steps_in, products, states, of_states, of_steps, of_products, total_b, total_c
    return of_x, of_dt, of_a, of_b, of_c, of_d if scan.z is not None else of_skip, of_z, of_bias, again


def _of_gate(scan: _Scan, gradient: torch.Tensor, of_z: Any, *, recomputes: bool) -> tuple[Any, ...]:
    """Make what `_chunk_scan_bwd_dz` does: gradients of gate, of D and of the output before the gate."""
    batch, _, heads, width = scan.x.shape
    parts = None
    if scan.d is not None:
        each = width if scan.d.dim() == 2 else 1
        parts = scan.new(math.ceil(scan.chunk / _ROWS), batch, scan.chunks, heads, each)
    of_z = torch.empty_like(scan.z) if of_z is None else of_z  # type: ignore[arg-type]
    again = torch.empty_like(scan.x) if recomputes else None
    ungated = torch.empty_like(gradient)
    of_d = None
    if parts is not None and scan.d is not None:
        of_d = parts.sum((0, 1, 2)).to(scan.d.dtype)
        of_d = of_d.squeeze(-1) if scan.d.dim() == 1 else of_d
    return of_z, again, of_d, ungated


def _of_passing(scan: _Scan, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Make what `_state_passing_bwd` does: gradients of states and of chunks' sums, and states in the input's type."""
    dtype = scan.x.dtype
    of_states = torch.empty_like(states, dtype=dtype)
    converted = states if states.dtype == dtype else torch.empty_like(states, dtype=dtype)
    blocks = math.ceil(math.prod(scan.states[3:]) / _STATES)
    by_block = scan.new(*scan.by_chunk[:3], blocks)
    return of_states, by_block.sum(-1), converted


class _ChunkScan(torch.autograd.Function):
    """Saves all that it is given, sums of steps, and the output, before its gate if it has one."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, chunk: int, d: Any, z: Any, bias: Any, returns: bool
    ) -> Any:
        b_laid, c_laid = (one if one.stride(-1) == 1 else one.contiguous() for one in (b, c))
        laid = _Scan(_lies(x), dt, a, b_laid, c_laid, chunk, d, _lies(z), bias)
        out, ungated, sums, last, _held = _forward(laid)
        ctx.save_for_backward(out if z is None else ungated, x, dt, sums, a, b, c, d, z, bias)
        ctx.chunk = chunk
        return (out, last) if returns else out

    @staticmethod
    def backward(ctx: Any, gradient: Any, *_: Any) -> Any:
        out, x, dt, _sums, a, b, c, d, z, bias = ctx.saved_tensors
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        found = _backward(_Scan(x, dt, a, b, c, ctx.chunk, d, z, bias), gradient, out, {}, False)
        return *found[:5], None, *found[5:8], None


def mamba_chunk_scan_combined(
    x: Any,
    dt: Any,
    A: Any,  # noqa: N803 - as the package's is called
    B: Any,  # noqa: N803
    C: Any,  # noqa: N803
    chunk_size: int,
    D: Any = None,  # noqa: N803
    z: Any = None,
    dt_bias: Any = None,
    initial_states: Any = None,
    seq_idx: Any = None,
    cu_seqlens: Any = None,
    dt_softplus: bool = False,
    dt_limit: Any = None,
    return_final_states: bool = False,
) -> Any:
    """Return the scan, and its last states if they are asked for; first states, and several samples in one row, too."""
    del initial_states, seq_idx
    apply: Any = _ChunkScan.apply
    return apply(x, dt, A, B, C, chunk_size, D, z, dt_bias, return_final_states)


# Gated norm


@kernel(_PACKAGE)
def _norm_gradients(
    x: torch.Tensor, weight: Any, bias: Any, z: Any, groups: int, of_z: Any, again: Any, recomputes: bool
) -> tuple[Any, ...]:
    """Return gradients of input, weight, bias and gate, and the output again if that is asked for."""
    of_x = torch.empty_like(x)
    if of_z is None and z is not None:
        of_z = torch.empty_like(z)
    if recomputes and again is None:
        again = torch.empty_like(x)
    block = min(_MOST_BYTES // x.element_size(), 1 << (x.shape[1] // groups - 1).bit_length())
    warps = min(max(block // 256, 1), 8)
    rows = math.ceil(backend.get_device_properties().multi_processor_count * math.ceil(4 / warps) / groups)
    parts = [None if one is None else x.new_empty(rows, x.shape[1], dtype=torch.float32) for one in (weight, bias)]
    of_weight, of_bias = (
        None if part is None else part.sum(0).to(one.dtype) for part, one in zip(parts, (weight, bias), strict=True)
    )
    return of_x, of_weight, of_bias, of_z, again


class _GatedNorm(torch.autograd.Function):
    """Saves its input, its gate and figures of each row and group."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, z: Any, group_size: int | None, is_rms: bool) -> Any:
        flat = x.reshape(-1, x.shape[-1])
        gate = None if z is None else z.reshape(-1, x.shape[-1])
        flat = flat if flat.stride(-1) == 1 else flat.contiguous()
        gate = gate if gate is None or gate.stride(-1) == 1 else gate.contiguous()
        groups = flat.shape[1] // (group_size or flat.shape[1])
        out, mean, deviation = _gated(flat, groups, is_rms)
        ctx.save_for_backward(flat, weight, bias, mean, deviation, gate)
        ctx.groups, ctx.shape = groups, x.shape
        return out.reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight, bias, _mean, _deviation, z = ctx.saved_tensors
        gradient = gradient.reshape(-1, gradient.shape[-1])
        of_x, of_weight, of_bias, of_z, _ = _norm_gradients(x, weight, bias, z, ctx.groups, None, None, False)
        return of_x.reshape(ctx.shape), of_weight, of_bias, None if z is None else of_z.reshape(ctx.shape), None, None


@kernel(_PACKAGE)
def _gated(x: torch.Tensor, groups: int, is_rms: bool, out: Any = None) -> tuple[Any, ...]:
    """Return the output, means and reciprocal deviations of each row and group."""
    out = torch.empty_like(x) if out is None else out
    mean, deviation = (x.new_empty(groups * x.shape[0], dtype=torch.float32) for _ in range(2)) if not is_rms else (
        None, x.new_empty(groups * x.shape[0], dtype=torch.float32))  # fmt: skip
    return out, mean, deviation


def rmsnorm_fn(
    x: Any, weight: Any, bias: Any, z: Any = None, eps: float = 1e-6, group_size: Any = None,
    norm_before_gate: bool = True,
) -> Any:  # fmt: skip
    """Normalize by the root mean square, with a gate."""
    apply: Any = _GatedNorm.apply
    return apply(x, weight, bias, z, group_size, True)


class GatedRMSNorm(nn.Module):
    """`RMSNorm` of layernorm_gated.py."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, group_size: int | None = None, norm_before_gate: bool = True,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor, z: Any = None) -> Any:
        """Normalize, with a gate."""
        return rmsnorm_fn(x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate)


# The block


class _Split(torch.autograd.Function):
    """The block from behind its first projection: saves that, the scan's output and what the norm needs; no more."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def forward(
        ctx: Any, zxbcdt: Any, conv_weight: Any, conv_bias: Any, bias: Any, a: Any, d: Any, chunk: int,
        norm_weight: Any, projection: Any, out_bias: Any, width: int, groups: int,
    ) -> Any:  # fmt: skip
        parts = _Parts(zxbcdt, conv_weight, d, width, groups)
        gate = None if norm_weight is not None else parts.by_head(parts.z)
        scan = parts.scan(parts.convolved(conv_weight, conv_bias), a, d, gate, bias, chunk)
        out, ungated, *_held = _forward(scan)
        deviation = None
        if norm_weight is None:
            saved, result = ungated, out.flatten(2)
        else:
            saved = out
            made, _, deviation = _gated(out.flatten(2).flatten(0, 1), groups, True)
            result = made.view(*zxbcdt.shape[:2], -1)
        if projection is not None:
            if torch.is_autocast_enabled("cuda"):
                cast = torch.get_autocast_dtype("cuda")
                result, projection = result.to(cast), projection.to(cast)
                out_bias = None if out_bias is None else out_bias.to(cast)
            result = F.linear(result, projection, out_bias)
        ctx.save_for_backward(
            zxbcdt, conv_weight, conv_bias, saved, a, d, bias, norm_weight, deviation, projection, out_bias
        )
        ctx.of = chunk, width, groups
        return result

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Any) -> Any:
        zxbcdt, conv_weight, conv_bias, out, a, d, bias, norm_weight, _, projection, out_bias = ctx.saved_tensors
        chunk, width, groups = ctx.of
        recomputes = projection is not None
        again = out.new_empty(*out.shape[:2], out.shape[2] * out.shape[3]) if recomputes else None
        parts = _Parts(zxbcdt, conv_weight, d, width, groups)
        convolved = parts.convolved(conv_weight, conv_bias)
        of_all = torch.empty_like(zxbcdt)
        of = _Parts(of_all, conv_weight, d, width, groups)
        of_convolved = torch.empty_like(parts.xbc)
        of_x, of_b, of_c = of.of_scan(of_convolved)
        of_out = gradient if projection is None else F.linear(gradient, projection.t())
        of_norm = None
        given = {"x": of_x, "B": of_b, "C": of_c, "dt": of.dt}
        if norm_weight is None:
            gate, given["z"] = parts.by_head(parts.z), of.by_head(of.z)
        else:
            gate = None
            rows = [one.flatten(2).flatten(0, 1) for one in (out, parts.by_head(parts.z))]
            remade = None if again is None else again.flatten(0, 1)
            _of_normed = of_out
            of_out, of_norm, *_ = _norm_gradients(
                rows[0], norm_weight, None, rows[1], groups, of.z.flatten(0, 1), remade, recomputes
            )
        scan = parts.scan(convolved, a, d, gate, bias, chunk)
        found = _backward(scan, of_out.view(scan.x.shape), out, given, recomputes and gate is not None)
        again = found[8].flatten(2) if recomputes and gate is not None else again
        of_projection = torch.einsum("bso,bsd->od", gradient, again) if recomputes else None
        of_out_bias = gradient.sum((0, 1)) if out_bias is not None else None
        xbc, of_convolved, of_xbc = map(_aligned, (parts.xbc, of_convolved, of.xbc))
        _, of_weight, of_conv_bias, _ = causal_conv1d_bwd_function(
            xbc, conv_weight, conv_bias, of_convolved, None, None, None, of_xbc, False, True
        )
        return (
            of_all, of_weight, of_conv_bias, found[7], found[2], found[5], None, of_norm, of_projection, of_out_bias,
            None, None,
        )  # fmt: skip


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return [batch, tokens, channels] as [batch, channels, tokens], copied where the kernel could not read it."""
    return (tensor.contiguous() if tensor.stride(1) % 8 else tensor).transpose(1, 2)


class _Parts:
    """The parts of the first projection, or of its gradient: gate, what is convolved, steps."""

    def __init__(self, zxbcdt: torch.Tensor, conv_weight: torch.Tensor, d: torch.Tensor, width: int, groups: int):
        self.heads, self.width, self.groups = d.shape[0], width, groups
        self.channels = self.heads * width
        self.states = (conv_weight.shape[0] - self.channels) // groups // 2
        convolved = self.channels + 2 * groups * self.states
        self.z, self.xbc, self.dt = zxbcdt.split([self.channels, convolved, self.heads], dim=-1)

    def by_head(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(*tensor.shape[:-1], self.heads, self.width)

    def convolved(self, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        made: torch.Tensor = causal_conv1d_fwd_function(_aligned(self.xbc), weight, bias, None, None, None, True)
        return made.transpose(1, 2)

    def of_scan(self, convolved: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, b, c = convolved.split([self.channels, *[self.groups * self.states] * 2], dim=-1)
        return self.by_head(x), *(one.unflatten(-1, (self.groups, self.states)) for one in (b, c))

    def scan(self, convolved: torch.Tensor, a: Any, d: Any, z: Any, bias: Any, chunk: int) -> _Scan:
        x, b, c = self.of_scan(convolved)
        return _Scan(x, self.dt, a, b, c, chunk, d, z, bias)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Any, conv1d_weight: Any, conv1d_bias: Any, dt_bias: Any, A: Any, D: Any, chunk_size: int,  # noqa: N803
    initial_states: Any = None, seq_idx: Any = None, dt_limit: Any = None, return_final_states: bool = False,
    activation: Any = "silu", rmsnorm_weight: Any = None, rmsnorm_eps: float = 1e-6, outproj_weight: Any = None,
    outproj_bias: Any = None, headdim: int | None = None, ngroups: int = 1, norm_before_gate: bool = True,
) -> Any:  # fmt: skip
    """Return the block's output of its first projection [batch, tokens, 2 × channels + 2 × groups × states + heads]."""
    if return_final_states:
        raise NotImplementedError("mamba-ssm is stood in for where it trains: leave return_final_states out")
    width = headdim if D.dim() == 1 else D.shape[1]
    apply: Any = _Split.apply
    return apply(
        zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, rmsnorm_weight, outproj_weight, outproj_bias,
        width, ngroups,
    )  # fmt: skip


class Mamba2(nn.Module):
    """The block of Mamba-2 (Dao & Gu 2024), on one GPU."""

    def __init__(
        self, d_model: int, d_state: int = 128, d_conv: int = 4, conv_init: Any = None, expand: int = 2,
        headdim: int = 64, d_ssm: int | None = None, ngroups: int = 1, A_init_range: Any = (1, 16),  # noqa: N803
        D_has_hdim: bool = False, rmsnorm: bool = True, norm_before_gate: bool = False, bias: bool = False,  # noqa: N803
        conv_bias: bool = True, chunk_size: int = 256, use_mem_eff_path: bool = True, layer_idx: int | None = None,
        process_group: Any = None, device: Any = None, dtype: Any = None, **_first_steps: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        if process_group is not None or d_ssm not in (None, expand * d_model):
            raise NotImplementedError("Mamba2 is stood in for on one GPU, with d_ssm as it is by default")
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.d_model, self.d_state, self.d_conv, self.expand = d_model, d_state, d_conv, expand
        self.d_inner = self.d_ssm = expand * d_model
        self.headdim, self.ngroups, self.nheads = headdim, ngroups, self.d_ssm // headdim
        self.D_has_hdim, self.rmsnorm, self.norm_before_gate = D_has_hdim, rmsnorm, norm_before_gate
        self.chunk_size, self.use_mem_eff_path, self.layer_idx = chunk_size, use_mem_eff_path, layer_idx
        self.activation, self.act = "silu", nn.SiLU()
        convolved = self.d_ssm + 2 * ngroups * d_state
        self.in_proj = nn.Linear(d_model, self.d_inner + convolved + self.nheads, bias=bias, **where)
        self.conv1d = nn.Conv1d(
            convolved, convolved, d_conv, bias=conv_bias, groups=convolved, padding=d_conv - 1, **where
        )
        if conv_init is not None:
            nn.init.uniform_(self.conv1d.weight, -conv_init, conv_init)
        self.dt_bias = nn.Parameter(torch.rand(self.nheads, **where))
        self.A_log = nn.Parameter(
            torch.empty(self.nheads, device=device).uniform_(*A_init_range).log().to(dtype or torch.float32)
        )
        self.D = nn.Parameter(torch.ones(self.d_ssm if D_has_hdim else self.nheads, device=device))
        if rmsnorm:
            self.norm = GatedRMSNorm(self.d_ssm, 1e-5, self.d_ssm // ngroups, norm_before_gate, **where)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **where)

    def forward(
        self, u: torch.Tensor, seqlen: int | None = None, seq_idx: Any = None, cu_seqlens: Any = None,
        inference_params: Any = None,
    ) -> Any:  # fmt: skip
        """Return what [batch, tokens, width], or [batch × tokens, width] of `seqlen` tokens each, becomes.

        Raises:
            NotImplementedError: with a state kept between calls.
        """
        if inference_params is not None or cu_seqlens is not None:
            raise NotImplementedError("mamba-ssm is stood in for where it trains: leave inference_params out")
        zxbcdt = self.in_proj(u)
        if seqlen is not None:
            zxbcdt = zxbcdt.unflatten(0, (-1, seqlen))
        a = -torch.exp(self.A_log.float())
        d = self.D.view(-1, self.headdim) if self.D_has_hdim else self.D
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        if self.use_mem_eff_path:
            out = mamba_split_conv1d_scan_combined(
                zxbcdt, weight, bias, self.dt_bias, a, d, self.chunk_size, seq_idx=seq_idx,
                rmsnorm_weight=self.norm.weight if self.rmsnorm else None, outproj_weight=self.out_proj.weight,
                outproj_bias=self.out_proj.bias, headdim=self.headdim, ngroups=self.ngroups,
            )  # fmt: skip
            return out if seqlen is None else out.flatten(0, 1)
        parts = _Parts(zxbcdt, weight, d, self.headdim, self.ngroups)
        xbc = causal_conv1d_fn(parts.xbc.transpose(1, 2), weight, bias=bias, activation=self.activation)
        x, b, c = parts.of_scan(xbc.transpose(1, 2))
        gate = None if self.rmsnorm else parts.by_head(parts.z)
        y = mamba_chunk_scan_combined(x, parts.dt, a, b, c, self.chunk_size, D=d, z=gate, dt_bias=self.dt_bias)
        y = y.flatten(2)
        y = self.norm(y, parts.z) if self.rmsnorm else y
        return self.out_proj(y if seqlen is None else y.flatten(0, 1))
