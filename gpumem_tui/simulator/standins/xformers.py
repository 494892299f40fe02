"""xformers' memory-efficient attention, its biases, SwiGLU and the operators around DINOv2's blocks.

Follows xformers/ops of its version 0.0.32.post2 (fmha/dispatch.py, flash.py, flash3.py, cutlass.py, swiglu_op.py,
unbind.py, indexing.py) and csrc/swiglu. Which kernel attends is chosen as it chooses: FlashAttention-3 on Hopper,
FlashAttention-2 from Ampere on, else PyTorch's own memory-efficient one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gpumem_tui.simulator.device.gpu import backend
from gpumem_tui.simulator.standins import flash_attn, flash_attn_3
from gpumem_tui.simulator.standins.register import kernel, on_gpu

_PACKAGE = "xformers"
_HALF = (torch.float16, torch.bfloat16)
_MOST_WIDE = 256

# Biases


class AttentionBias:
    """A mask of the tokens that each token may see, without a tensor."""

    is_causal = False


class LowerTriangularMask(AttentionBias):
    """Each token sees those before it."""

    is_causal = True

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def add_bias(self, bias: torch.Tensor) -> LowerTriangularMaskWithTensorBias:
        """Return the mask with a tensor added."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularFromBottomRightMask(LowerTriangularMask):
    """A causal mask whose last query is next to the last key."""


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """The mask, and a tensor that is added to the scores."""

    def __init__(self, bias: torch.Tensor) -> None:
        self._subtensor = bias


class _Lengths:
    """Lengths of samples one after the other, and where each begins, on the GPU."""

    def __init__(self, lengths: Iterable[int], device: Any = None) -> None:
        counts = list(lengths)
        self.seqstart_py = [sum(counts[:number]) for number in range(len(counts) + 1)]
        self.max_seqlen, self.min_seqlen = max(counts), min(counts)
        self.seqstart = torch.tensor(self.seqstart_py, dtype=torch.int32).to(device or "cuda")

    def intervals(self) -> Iterable[tuple[int, int]]:
        """Return the first place of each sample, and that after its last."""
        return zip(self.seqstart_py, self.seqstart_py[1:], strict=False)


class BlockDiagonalMask(AttentionBias):
    """Each token sees those of its own sample; samples lie one after the other in a batch of one."""

    def __init__(self, q_seqinfo: _Lengths, k_seqinfo: _Lengths, batch_sizes: Sequence[int] | None = None) -> None:
        self.q_seqinfo, self.k_seqinfo = q_seqinfo, k_seqinfo
        self._batch_sizes = batch_sizes

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqlen: Any = None, *, device: Any = None) -> BlockDiagonalMask:
        """Return the mask of samples of such lengths."""
        queries = _Lengths(q_seqlen, device)
        return cls(queries, queries if kv_seqlen is None or q_seqlen == kv_seqlen else _Lengths(kv_seqlen, device))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[torch.Tensor]) -> tuple[BlockDiagonalMask, torch.Tensor]:
        """Return the mask of several batches, and all of them in one."""
        lengths = [one.shape[1] for one in tensors for _ in range(one.shape[0])]
        mask = cls.from_seqlens(lengths, device=tensors[0].device)
        mask._batch_sizes = [one.shape[0] for one in tensors]
        return mask, torch.cat([one.reshape([1, -1, *one.shape[2:]]) for one in tensors], dim=1)

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return each batch of one tensor again."""
        return self._split(tensor, self.q_seqinfo)

    split_queries = split

    def split_kv(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return each batch of keys or values again."""
        return self._split(tensor, self.k_seqinfo)

    def _split(self, tensor: torch.Tensor, lengths: _Lengths) -> list[torch.Tensor]:
        sizes = self._batch_sizes or [1] * (len(lengths.seqstart_py) - 1)
        found, first = [], 0
        for size in sizes:
            begin, end = lengths.seqstart_py[first], lengths.seqstart_py[first + size]
            found.append(tensor[:, begin:end].reshape([size, -1, *tensor.shape[2:]]))
            first += size
        return found

    def make_causal(self) -> BlockDiagonalCausalMask:
        """Return the mask in which tokens see those before them alone."""
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def to(self, _device: Any) -> BlockDiagonalMask:
        """Return the mask itself, which is on the GPU."""
        return self


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Each token sees those before it of its own sample."""

    is_causal = True


# Attention


class _FlashAttention(torch.autograd.Function):
    """Attention of [batch, tokens, heads, width] by flash kernels: saves its input, the output and its logsumexp."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, bias: Any, dropout: float, is_third: bool) -> Any:
        flat = [_flat(one, bias) for one in (query, key, value)]
        state = None
        if is_third:
            out, logsumexp = flash_attn_3._forward(*flat, _third(bias))
        elif isinstance(bias, BlockDiagonalMask):
            out, logsumexp, _, state = flash_attn.varlen_fwd(
                *flat, None, *_ends(bias), None, None, None, None, *_longest(bias), dropout, 1.0, False, bias.is_causal,
                -1, -1, 0.0, False,
            )  # fmt: skip
        else:
            causal = bias is not None
            out, logsumexp, _, state = flash_attn.fwd(*flat, None, None, dropout, 1.0, causal, -1, -1, 0.0, False)
        out = out.reshape(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.bias, ctx.is_third, ctx.state = bias, is_third, state if dropout else None
        ctx.share = (
            query.shape[0] == key.shape[0]
            and query.shape[-1] == value.shape[-1]
            and query.stride(-2) == query.shape[-1] + key.shape[-1] + value.shape[-1]
        )
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        query, key, value, out, logsumexp = ctx.saved_tensors
        flat = [_flat(one, ctx.bias) for one in (query, key, value)]
        given = gradient.reshape(_flat(out, ctx.bias).shape).contiguous()
        if ctx.share:
            whole = flat[0].new_empty((*flat[0].shape[:-2], 3, *flat[0].shape[-2:]))
            results = [whole.select(-3, number) for number in range(3)]
        else:
            results = [torch.empty_like(one) for one in flat]
        rest = (0.0, 1.0, False, False, -1, -1, 0.0, False)
        if ctx.is_third:
            flash_attn_3._backward(*flat, _third(ctx.bias))
        elif isinstance(ctx.bias, BlockDiagonalMask):
            ends, longest = _ends(ctx.bias), _longest(ctx.bias)
            flash_attn.varlen_bwd(given, *flat, _flat(out, ctx.bias), logsumexp, *results, *ends, None, *longest, *rest)
        else:
            flash_attn.bwd(given, *flat, out, logsumexp, *results, None, 0.0, 1.0, False, -1, -1, 0.0, False)
        shaped = (made.reshape(one.shape) for made, one in zip(results, (query, key, value), strict=True))
        return (*shaped, None, None, None)


def _flat(tensor: torch.Tensor, bias: Any) -> torch.Tensor:
    """Return samples one after the other where a bias tells them apart."""
    return tensor.reshape(-1, *tensor.shape[-2:]) if isinstance(bias, BlockDiagonalMask) else tensor


def _ends(bias: BlockDiagonalMask) -> tuple[torch.Tensor, torch.Tensor]:
    return bias.q_seqinfo.seqstart, bias.k_seqinfo.seqstart


def _longest(bias: BlockDiagonalMask) -> tuple[int, int]:
    return bias.q_seqinfo.max_seqlen, bias.k_seqinfo.max_seqlen


def _third(bias: Any) -> flash_attn_3._Options:
    causal = bias is not None and bias.is_causal
    if not isinstance(bias, BlockDiagonalMask):
        return flash_attn_3._Options(causal, (-1, -1), 0.0, False, None, (0, 0))
    return flash_attn_3._Options(causal, (-1, -1), 0.0, False, _ends(bias), _longest(bias))


@kernel(_PACKAGE)
def _check(*tensors: torch.Tensor) -> None:
    """Refuse tensors elsewhere, and note that xformers is stood in for."""
    on_gpu(_PACKAGE, *tensors)


def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the attention of queries, keys and values, [batch, tokens, heads, width] or without heads.

    Raises:
        NotImplementedError: there are groups of heads, as a fifth dimension.
    """
    _check(query, key, value)
    if query.dim() == 5:
        raise NotImplementedError("xformers' attention of five dimensions is not stood in for: expand the keys' heads")
    q, k, v = (one.unsqueeze(2) if one.dim() == 3 else one for one in (query, key, value))
    tensor = isinstance(attn_bias, (torch.Tensor, LowerTriangularMaskWithTensorBias))
    is_flash = not tensor and q.dtype in _HALF and backend.get_device_capability() >= (8, 0)
    if is_flash and q.shape[-1] == v.shape[-1] <= _MOST_WIDE and q.shape[-1] % 8 == 0:
        apply: Any = _FlashAttention.apply
        is_third = backend.get_device_capability() == (9, 0) and not p
        out = apply(q, k, v, attn_bias, p, is_third)
    else:
        out = _by_torch(q, k, v, attn_bias, p, scale)
    return out.reshape((*query.shape[:-1], value.shape[-1]))  # type: ignore[no-any-return]


def _by_torch(query: Any, key: Any, value: Any, bias: Any, dropout: float, scale: float | None) -> Any:
    """Attend by PyTorch's memory-efficient kernel, as xformers' cutlass operators do."""
    q, k, v = (one.transpose(1, 2) for one in (query, key, value))
    added = getattr(bias, "_subtensor", bias if isinstance(bias, torch.Tensor) else None)
    if added is not None:
        added = added.unsqueeze(1) if added.dim() == 3 else added
        added = added.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    causal = isinstance(bias, AttentionBias) and bias.is_causal
    trains = any(one.requires_grad for one in (query, key, value))
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, added, trains, dropout, causal, scale=scale
    )[0].transpose(1, 2)  # fmt: skip


def memory_efficient_attention_forward(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return it without a way back."""
    with torch.no_grad():
        return memory_efficient_attention(*args, **kwargs)


# unbind, indexing


class _Unbind(torch.autograd.Function):
    """Gives views; gradients that already are views of one tensor are not copied into another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> Any:
        ctx.dim = dim
        return x.unbind(dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        first = gradients[0]
        step = gradients[1].storage_offset() - first.storage_offset() if len(gradients) > 1 else 0
        lie = [
            one.untyped_storage()._cdata == first.untyped_storage()._cdata
            and one.stride() == first.stride()
            and one.storage_offset() == first.storage_offset() + number * step
            for number, one in enumerate(gradients)
        ]
        if len(gradients) > 1 and all(lie):
            dim = ctx.dim % (first.dim() + 1)
            shape, stride = list(first.shape), [int(one) for one in first.stride()]
            shape.insert(dim, len(gradients))
            stride.insert(dim, int(step))
            return first.as_strided(shape, stride), None
        return torch.stack(gradients, dim=ctx.dim), None


def unbind(x: torch.Tensor, dim: int) -> Any:
    """Return the parts of a tensor along a dimension."""
    apply: Any = _Unbind.apply
    return apply(x, dim)


class _IndexSelectCat(torch.autograd.Function):
    """Saves the indices."""

    @staticmethod
    def forward(ctx: Any, count: int, *given: torch.Tensor) -> torch.Tensor:
        sources, indices = given[:count], given[count:]
        ctx.save_for_backward(*indices)
        ctx.shapes = [one.shape for one in sources]
        rows = zip(sources, indices, strict=True)
        return sources[0].new_empty([sum(index.shape[0] * source.shape[1] for source, index in rows)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (None, *(gradient.new_zeros(shape) for shape in ctx.shapes), *(None for _ in ctx.shapes))


def index_select_cat(sources: Sequence[torch.Tensor], indices: Sequence[torch.Tensor]) -> Any:
    """Return rows of several matrices in one vector."""
    apply: Any = _IndexSelectCat.apply
    return apply(len(sources), *sources, *indices)


class _ScaledIndexAdd(torch.autograd.Function):
    """Adds in place; saves index, scaling and source."""

    @staticmethod
    def forward(ctx: Any, x: Any, index: Any, source: Any, scaling: Any, _alpha: float) -> Any:
        ctx.mark_dirty(x)
        ctx.save_for_backward(index, scaling, source)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        _index, scaling, source = ctx.saved_tensors
        of_source = torch.empty_like(source)
        of_scaling = None if scaling is None else source.new_empty(source.shape, dtype=scaling.dtype)
        of_scaling = None if of_scaling is None else of_scaling.sum_to_size(scaling.shape)
        return gradient, None, of_source, of_scaling, None


def scaled_index_add(
    input: torch.Tensor,  # noqa: A002  as xformers' is called
    index: torch.Tensor,
    source: torch.Tensor,
    scaling: torch.Tensor | None = None,
    alpha: float = 1.0,
) -> Any:
    """Add scaled rows to some of a tensor's, in place."""
    apply: Any = _ScaledIndexAdd.apply
    return apply(input, index, source, scaling, alpha)


# SwiGLU


class _PackedSwiGLU(torch.autograd.Function):
    """Saves its input, the weights and both halves; the product is made again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Any, pair: Any, pair_bias: Any, last: Any, last_bias: Any) -> Any:
        first, second, hidden = (x.new_empty((x.shape[0], pair.shape[1])) for _ in range(3))
        ctx.save_for_backward(x, pair, last, first, second)
        ctx.biases = pair_bias is not None, last_bias is not None
        return functional.linear(hidden, last, last_bias)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, pair, last, first, second = ctx.saved_tensors
        has_pair, has_last = ctx.biases
        of_hidden = gradient @ last
        of_both = first.new_empty((first.shape[0], 2 * first.shape[1]))
        hidden = torch.empty_like(second)
        del first, second, of_hidden
        of_last = gradient.t() @ hidden
        last_bias = last.new_empty(last.shape[0]) if has_last else None
        del hidden
        of_x = of_both @ pair.view(-1, pair.shape[-1])
        of_pair = (of_both.t() @ x).view(pair.shape)
        pair_bias = pair.new_empty(pair.shape[:2]) if has_pair else None
        return of_x, of_pair, pair_bias, of_last, last_bias


def _swiglu(x: torch.Tensor, pair: Any, pair_bias: Any, last: Any, last_bias: Any) -> torch.Tensor:
    """Return last · (silu(first · x) · (second · x)): in one kernel of 16 bits, else one by one."""
    _check(x)
    flat = x.reshape(-1, x.shape[-1])
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    if (autocast or flat.dtype) in _HALF and backend.get_device_capability() >= (8, 0):
        given = [flat, pair, pair_bias, last, last_bias]
        if autocast is not None:
            given = [None if one is None else one.to(autocast) for one in given]
        apply: Any = _PackedSwiGLU.apply
        with torch.autocast("cuda", enabled=False):
            made = apply(*given)
    else:
        biases = (None, None) if pair_bias is None else pair_bias.unbind(0)
        first, second = (functional.linear(flat, pair[number], biases[number]) for number in range(2))
        made = functional.linear(functional.silu(first) * second, last, last_bias)
    return made.reshape(*x.shape[:-1], -1)  # type: ignore[no-any-return]


def swiglu(x: Any, w1: Any, b1: Any, w2: Any, b2: Any, w3: Any, b3: Any, *, op: Any = None) -> torch.Tensor:
    """Return a SwiGLU block of three linear layers."""
    bias = None if b1 is None else torch.stack([b1, b2])
    return _swiglu(x, torch.stack([w1, w2]), bias, w3, b3)


class SwiGLU(nn.Module):
    """A SwiGLU block with its weights, of which the first two are packed."""

    def __init__(
        self, in_features: int, hidden_features: int, out_features: int | None = None, bias: bool = True, **_: Any
    ) -> None:
        super().__init__()
        out_features = out_features or in_features
        hidden_features = hidden_features or in_features
        self.w12 = nn.Linear(in_features, 2 * hidden_features, bias=bias)
        self.w3 = nn.Linear(hidden_features, out_features, bias=bias)
        self.hidden_features, self.in_features, self.out_features = hidden_features, in_features, out_features
        self.op: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block of a tensor."""
        bias = None if self.w12.bias is None else self.w12.bias.view(2, -1)
        return _swiglu(x, self.w12.weight.view(2, -1, self.in_features), bias, self.w3.weight, self.w3.bias)


AttentionOp = MemoryEfficientAttentionFlashAttentionOp = MemoryEfficientAttentionCutlassOp = None
"""Given as `op`; what is chosen without is taken."""
