"""The rest of the flash-attn package: unpadding, rotary embeddings, its cross entropy and its norms.

Follows flash_attn/bert_padding.py, utils/distributed.py, layers/rotary.py, ops/activations.py and, of ops/triton,
rotary.py, cross_entropy.py and layer_norm.py, of its version 2.8.3. Its Triton kernels write into what is made before
they are launched, and take nothing themselves.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.functional import pad

from gpumem_tui.simulator.device.gpu import backend
from gpumem_tui.simulator.standins.register import kernel

_PACKAGE = "flash-attn"

# bert_padding


class _Gather(torch.autograd.Function):
    """Picks rows."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.rows = values.shape[0]
        flat = values.reshape(values.shape[0], -1)
        return torch.gather(flat, 0, indices[:, None].expand(-1, flat.shape[1])).reshape(-1, *values.shape[1:])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        flat = gradient.reshape(gradient.shape[0], -1)
        result = flat.new_zeros((ctx.rows, flat.shape[1]))
        result.scatter_(0, indices[:, None].expand(-1, flat.shape[1]), flat)
        return result.reshape(ctx.rows, *gradient.shape[1:]), None


class _Put(torch.autograd.Function):
    """Puts rows into zeros."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, indices: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.save_for_backward(indices)
        result = values.new_zeros((rows, *values.shape[1:]))
        result[indices] = values
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        return gradient[indices], None, None


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> Any:  # noqa: A002  as the package's is called
    """Return rows of a tensor."""
    apply: Any = _Gather.apply
    return apply(input, indices)


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> Any:
    """Return zeros with rows put into them."""
    apply: Any = _Put.apply
    return apply(values, indices, first_axis_dim)


def unpad_input(hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: Any = None) -> tuple[Any, ...]:
    """Return the tokens that a mask keeps of a batch, their places, ends of samples, the longest, and lengths."""
    every = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = every.sum(dim=-1, dtype=torch.int32)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(every.flatten(), as_tuple=False).flatten()
    longest = lengths.max().item()
    ends = pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, ends, longest, used


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> Any:
    """Return the padded batch of such tokens, with zeros between."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, -1))


def rearrange(*args: Any, **kwargs: Any) -> Any:
    """Call einops' function, which the package depends on and others import from it."""
    return import_module("einops").rearrange(*args, **kwargs)


def repeat(*args: Any, **kwargs: Any) -> Any:
    """Call einops' function, as `rearrange`."""
    return import_module("einops").repeat(*args, **kwargs)


# utils.distributed


def all_gather_raw(input_: torch.Tensor, process_group: Any, async_op: bool = False) -> tuple[torch.Tensor, Any]:
    """Return the first rows of all ranks, and the handle of the gathering."""
    rows, *others = input_.shape
    result = input_.new_empty((distributed.get_world_size(process_group) * rows, *others))
    return result, distributed.all_gather_into_tensor(result, input_.contiguous(), process_group, async_op)


class _AllGather(torch.autograd.Function):
    """Gathers rows of all ranks; backward sums them and keeps this rank's."""

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, process_group: Any) -> torch.Tensor:
        ctx.group = process_group
        return all_gather_raw(input_, process_group)[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        rows, *others = gradient.shape
        result = gradient.new_empty((rows // distributed.get_world_size(ctx.group), *others))
        distributed.reduce_scatter_tensor(result, gradient.contiguous(), group=ctx.group)
        return result, None


def all_gather(input_: torch.Tensor, process_group: Any) -> Any:
    """Return the first rows of all ranks, with gradients."""
    apply: Any = _AllGather.apply
    return apply(input_, process_group)


# Rotary embeddings


@kernel(_PACKAGE)
def apply_rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> torch.Tensor:
    """Return the rotated tensor, made anew or itself."""
    copies = cos.contiguous(), sin.contiguous()
    output = x if inplace else torch.empty_like(x)
    width = 2 * cos.shape[-1]
    if width < x.shape[-1] and not inplace:
        output[..., width:].copy_(x[..., width:])
    del copies
    return output


class _Rotary(torch.autograd.Function):
    """Saves the tables alone. Rotates the parts at `where` in the third dimension, if any, in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inplace: bool, where: Any) -> Any:
        ctx.save_for_backward(cos, sin)
        ctx.inplace, ctx.where = inplace, where
        if where is not None:
            apply_rotary(x[:, :, where], cos, sin, inplace=True)
            return x
        made = apply_rotary(x, cos, sin, inplace=inplace)
        return x if inplace else made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        if ctx.where is not None:
            apply_rotary(gradient[:, :, ctx.where], cos, sin, inplace=True)
            return gradient, None, None, None, None
        return apply_rotary(gradient, cos, sin, inplace=ctx.inplace), None, None, None, None


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> Any:
    """Return heads rotated by tables of cosines and sines."""
    apply: Any = _Rotary.apply
    return apply(x, cos, sin, inplace, None)


def apply_rotary_emb_qkv_(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any, num_heads_q: int | None = None, **__: Any
) -> Any:
    """Rotate queries and keys of one tensor in place."""
    where = slice(0, 2) if qkv.dim() == 5 else slice(0, (qkv.shape[2] + (num_heads_q or 0)) // 2)
    apply: Any = _Rotary.apply
    return apply(qkv, cos, sin, True, where)


def apply_rotary_emb_kv_(kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any, **__: Any) -> Any:
    """Rotate the keys of keys and values in place."""
    apply: Any = _Rotary.apply
    return apply(kv, cos, sin, True, slice(0, 1))


class FlashRotaryEmbedding(nn.Module):
    """Rotates queries and keys in place, by tables that it keeps for the longest samples so far."""

    inv_freq: torch.Tensor

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False, scale_base: Any = None, device: Any = None
    ) -> None:
        super().__init__()
        if scale_base is not None:
            raise NotImplementedError("flash-attn's RotaryEmbedding with scale_base is not stood in for")
        self.dim, self.base, self.interleaved = dim, float(base), interleaved
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Any = None
        self._sin_cached: Any = None

    def _compute_inv_freq(self, device: Any = None) -> torch.Tensor:
        """Return the frequencies, one a pair of values."""
        return 1.0 / (self.base ** (torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim))

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: Any = None) -> None:
        """Make the tables where they are too short or of another type."""
        if seqlen <= self._seq_len_cached and self._cos_cached is not None and self._cos_cached.dtype == dtype:
            return
        self._seq_len_cached = seqlen
        angles = torch.outer(torch.arange(seqlen, device=device, dtype=torch.float32), self.inv_freq)
        self._cos_cached = torch.cos(angles).to(dtype)
        self._sin_cached = torch.sin(angles).to(dtype)

    def forward(
        self, qkv: torch.Tensor, kv: Any = None, seqlen_offset: Any = 0, max_seqlen: Any = None, num_heads_q: Any = None
    ) -> Any:
        """Rotate them; of queries alone, with `kv`, both."""
        offset = seqlen_offset if isinstance(seqlen_offset, int) else 0
        self._update_cos_sin_cache(max_seqlen or qkv.shape[1] + offset, qkv.device, qkv.dtype)
        tables = self._cos_cached, self._sin_cached
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, *tables, num_heads_q=num_heads_q)
        return apply_rotary_emb(qkv, *tables, inplace=True), apply_rotary_emb_kv_(kv, *tables)


# Cross entropy


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits themselves, and a logsumexp a row."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, known: Any, inplace: bool) -> Any:
        losses, logsumexp, squares = _losses(logits, known)
        ctx.save_for_backward(logits, logsumexp, labels)
        ctx.inplace = inplace
        ctx.mark_non_differentiable(squares)
        return losses, squares

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        logits, *_rest = ctx.saved_tensors
        return logits if ctx.inplace else torch.empty_like(logits), None, None, None


@kernel(_PACKAGE)
def _losses(logits: torch.Tensor, known: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Make loss, logsumexp, if that is not known, and squared loss of each row."""
    return tuple(
        logits.new_empty(logits.shape[0], dtype=torch.float32) if made is None else made for made in (None, known, None)
    )


def cross_entropy_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    precomputed_lse: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: Any = None,
) -> Any:
    """Return loss and squared logsumexp of each row."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    known = precomputed_lse if logit_scale == 1.0 and label_smoothing == 0.0 else None
    apply: Any = _CrossEntropy.apply
    return apply(logits, labels, known, inplace_backward)


class CrossEntropyLoss(nn.Module):
    """The loss of logits and labels."""

    def __init__(
        self, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0, logit_scale: float = 1.0,
        lse_square_scale: float = 0.0, inplace_backward: bool = False, process_group: Any = None,
        return_z_loss: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_index, self.reduction, self.return_z_loss = ignore_index, reduction, return_z_loss
        self.options = {
            "label_smoothing": label_smoothing, "logit_scale": logit_scale, "lse_square_scale": lse_square_scale,
            "ignore_index": ignore_index, "inplace_backward": inplace_backward, "process_group": process_group,
        }  # fmt: skip

    def forward(self, input: torch.Tensor, target: torch.Tensor, precomputed_lse: Any = None) -> Any:  # noqa: A002
        """Return it, with the squared logsumexp's where that was asked for."""
        both = cross_entropy_loss(input, target, precomputed_lse, **self.options)
        if self.reduction == "mean":
            both = [one.sum() / (target != self.ignore_index).sum() for one in both[: 1 + self.return_z_loss]]
        elif self.reduction == "sum":
            both = [one.sum() for one in both[: 1 + self.return_z_loss]]
        return tuple(both) if self.return_z_loss else both[0]


# Norms


class _Norm(torch.autograd.Function):
    """Layer or RMS norm of Triton's: saves its input, with the residual added, and figures of each row."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, residual: Any, dropout: float, prenorm: bool, widens: bool, rms: bool,
        out_dtype: Any,
    ) -> Any:  # fmt: skip
        flat = x.reshape(-1, x.shape[-1])
        flat = flat if flat.stride(-1) == 1 else flat.contiguous()
        added = None if residual is None else residual.reshape(-1, x.shape[-1])
        wanted = added.dtype if added is not None else torch.float32 if widens else x.dtype
        out, total, seeds, mean, deviation = _normed(flat, added, wanted, dropout, rms, out_dtype)
        ctx.save_for_backward(total, weight, bias, seeds, mean, deviation)
        ctx.of = x.shape, x.dtype, residual is not None, dropout, prenorm
        return (out.reshape(x.shape), total.reshape(x.shape)) if prenorm else out.reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Any, *_more: Any) -> Any:
        total, weight, bias, *_ = ctx.saved_tensors
        shape, dtype, has_residual, dropout, _prenorm = ctx.of
        flat = gradient.reshape(-1, shape[-1])
        of_x, of_residual, of_weight, of_bias = _norm_gradients(flat, total, weight, bias, dtype, has_residual, dropout)
        residual = of_residual.reshape(shape) if has_residual else None
        return of_x.reshape(shape), of_weight, of_bias, residual, None, None, None, None, None


@kernel(_PACKAGE)
def _normed(x: Any, residual: Any, wanted: torch.dtype, dropout: float, rms: bool, out_dtype: Any) -> tuple[Any, ...]:
    """Return the output, what was normed, seeds of dropout, means, and reciprocal deviations."""
    out = torch.empty_like(x, dtype=out_dtype or x.dtype)
    total = torch.empty_like(x, dtype=wanted) if residual is not None or wanted != x.dtype or dropout > 0 else x
    rows = x.shape[0]
    mean = None if rms else x.new_empty(rows, dtype=torch.float32)
    deviation = x.new_empty(rows, dtype=torch.float32)
    seeds = torch.randint(2**32, (rows,), device=x.device, dtype=torch.int64) if dropout > 0 else None
    return out, total, seeds, mean, deviation


_PROGRAMS = 8
"""Triton programs for each multiprocessor, each with a partial gradient of weight and bias (`_layer_norm_bwd_impl`)."""


@kernel(_PACKAGE)
def _norm_gradients(
    gradient: Any, total: Any, weight: Any, bias: Any, dtype: torch.dtype, has_residual: bool, dropout: float
) -> tuple[Any, ...]:
    """Return gradients of input, residual, weight and bias; the first two are one where they are equal."""
    gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
    of_x = torch.empty_like(total, dtype=dtype)
    of_residual = torch.empty_like(total) if has_residual and (dtype != total.dtype or dropout > 0) else of_x
    rows = backend.get_device_properties().multi_processor_count * _PROGRAMS
    partial = [
        None if one is None else one.new_empty((rows, one.shape[0]), dtype=torch.float32) for one in (weight, bias)
    ]
    sums = [None if one is None else one.sum(0).to(weight.dtype) for one in partial]
    return of_x, of_residual, *sums


def layer_norm_fn(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, residual: Any = None, x1: Any = None, weight1: Any = None,
    bias1: Any = None, eps: float = 1e-6, dropout_p: float = 0.0, rowscale: Any = None, prenorm: bool = False,
    residual_in_fp32: bool = False, zero_centered_weight: bool = False, is_rms_norm: bool = False,
    return_dropout_mask: bool = False, out_dtype: Any = None, **_: Any,
) -> Any:  # fmt: skip
    """Return the norm of a tensor, or of its sum with a residual, which `prenorm` returns too.

    Raises:
        NotImplementedError: two norms at once, or a dropout's mask, is asked for.
    """
    if x1 is not None or weight1 is not None or return_dropout_mask:
        raise NotImplementedError("flash-attn's parallel layer norm and its dropout mask are not stood in for")
    apply: Any = _Norm.apply
    return apply(x, weight, bias, residual, dropout_p, prenorm, residual_in_fp32, is_rms_norm, out_dtype)


def rms_norm_fn(x: torch.Tensor, weight: torch.Tensor, bias: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Return the RMS norm, with the arguments of `layer_norm_fn`."""
    return layer_norm_fn(x, weight, bias, *args, **{**kwargs, "is_rms_norm": True})


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> Any:
    """Return the RMS norm: the compiled kernel's makes what Triton's makes, but for partial sums."""
    return rms_norm_fn(x, weight)


class FlashRMSNorm(nn.Module):
    """The RMS norm with its weight."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, device: Any = None, dtype: Any = None, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(
        self, x: torch.Tensor, residual: Any = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Any:
        """Return it, with what was normed where `prenorm` asks for that."""
        return rms_norm_fn(x, self.weight, None, residual, prenorm=prenorm, residual_in_fp32=residual_in_fp32)


# Activations


class _SwiGLU(torch.autograd.Function):
    """Saves both factors; one kernel each way (`torch.cuda.jiterator`)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> Any:
        return tuple(torch.empty_like(one) for one in ctx.saved_tensors)


def swiglu(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Return silu(x) · y."""
    apply: Any = _SwiGLU.apply
    return apply(x, y)
