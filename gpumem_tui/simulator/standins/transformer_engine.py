"""Transformer Engine's layers in 16 and 32 bits, on one GPU: what they save for backward, and their workspaces.

Follows transformer_engine/pytorch of its version 2.20: module/linear.py, module/layernorm_linear.py,
module/layernorm_mlp.py, cpp_extensions/gemm.py, csrc/extensions/normalization.cpp, attention/multi_head_attention.py
and transformer.py. Attention is cuDNN's, whose backward takes the workspace of `simulator.device.attention_scratch`; in
32 bits it is composed of torch's operators.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn

from gpumem_tui.simulator.device.gpu import backend
from gpumem_tui.simulator.standins.register import kernel, on_gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PACKAGE = "transformer-engine"
_HALF = (torch.float16, torch.bfloat16)
_GATED = frozenset(("geglu", "swiglu", "reglu", "qgeglu", "sreglu", "clamped_swiglu", "glu"))
"""Activations that multiply one half of the first projection by the other."""
_PLAN_BYTES = 256
_WITHOUT_FP8 = (
    "Transformer Engine is stood in for in 16 and 32 bits alone: trace with enabled=False, which keeps activations in "
    "the layers' type and no copies of weights in 8 bits"
)

_workspaces: WeakKeyDictionary[Any, torch.Tensor] = WeakKeyDictionary()


def _take_workspace() -> None:
    """Make cuBLAS's workspace with the first product, and keep it (`get_cublas_workspace`)."""
    if backend._gpu not in _workspaces:
        size_bytes = (32 << 20) + 1024 if backend.get_device_capability() >= (9, 0) else 4 << 20
        _workspaces[backend._gpu] = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")


@kernel(_PACKAGE)
def _product(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Make what a product of matrices gives."""
    on_gpu(_PACKAGE, like)
    _take_workspace()
    return like.new_empty(shape)


@kernel(_PACKAGE)
def _weight_gradients(gradient: torch.Tensor, weight: torch.Tensor, bias: Any) -> tuple[torch.Tensor, Any]:
    """Make the gradients of weight and bias, which one product gives."""
    made = gradient.new_empty(weight.shape)
    return made, None if bias is None else gradient.new_empty(bias.shape)


@kernel(_PACKAGE)
def _norm(x: torch.Tensor, is_rms: bool) -> tuple[Any, ...]:
    """Make the output of a norm, means and reciprocal deviations."""
    on_gpu(_PACKAGE, x)
    means = None if is_rms else x.new_empty(x.shape[0], dtype=torch.float32)
    return torch.empty_like(x), means, x.new_empty(x.shape[0], dtype=torch.float32)


@kernel(_PACKAGE)
def _norm_gradients(x: torch.Tensor, *parameters: Any) -> tuple[Any, ...]:
    """Make the gradients of a norm; its kernel sums those of weight and bias by multiprocessor."""
    made = torch.empty_like(x), *(None if one is None else torch.empty_like(one) for one in parameters)
    rows = backend.get_device_properties().multi_processor_count
    sums = [x.new_empty(rows, x.shape[1], dtype=torch.float32) for one in parameters if one is not None]
    del sums
    return made


def _computed_in(x: torch.Tensor) -> torch.dtype:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype


def _cast(dtype: torch.dtype, *tensors: Any) -> Any:
    return [one if one is None or one.dtype == dtype else one.to(dtype) for one in tensors]


class _Linear(torch.autograd.Function):
    """Saves its input and its weight, as they are multiplied."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any) -> Any:
        given, used, added = _cast(_computed_in(x), x, weight, bias)
        out = _product(given, *x.shape[:-1], weight.shape[0])
        ctx.save_for_backward(given if weight.requires_grad else None, used, weight, added)
        ctx.of_x = x.requires_grad
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _given, used, weight, bias = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_x = _product(gradient, *gradient.shape[:-1], used.shape[1]) if ctx.of_x else None
        if not weight.requires_grad:
            return of_x, None, None
        return of_x, *_weight_gradients(gradient, weight, bias)


class _NormLinear(torch.autograd.Function):
    """Saves its input, the normed one, figures of each row, and its weight."""

    @staticmethod
    def forward(ctx: Any, x: Any, scale: Any, shift: Any, weight: Any, bias: Any, is_rms: bool) -> Any:
        given, scale, shift, used, added = _cast(
            _computed_in(x), x.reshape(-1, x.shape[-1]), scale, shift, weight, bias
        )
        ctx.set_materialize_grads(False)  # of the normed one, which few ask for
        normed, means, deviations = _norm(given, is_rms)
        out = _product(normed, *x.shape[:-1], weight.shape[0])
        kept = normed if weight.requires_grad else None
        ctx.save_for_backward(given, used, weight, added, scale, shift, kept, means, deviations)
        return out, normed.view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _of_normed: Any) -> Any:
        given, used, weight, bias, scale, shift, *_figures = ctx.saved_tensors
        shape = (*gradient.shape[:-1], used.shape[1])
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_x = _product(flat, flat.shape[0], used.shape[1])
        of_weight = of_bias = None
        if weight.requires_grad:
            of_weight, of_bias = _weight_gradients(flat, weight, bias)
        of_given, of_scale, of_shift = _norm_gradients(given, scale, shift)
        del of_x
        return of_given.view(shape), of_scale, of_shift, of_weight, of_bias, None


class _NormMlp(torch.autograd.Function):
    """Saves its input, the normed one, both sides of the activation, and both weights."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, scale: Any, shift: Any, first: Any, first_bias: Any, second: Any, second_bias: Any,
        is_gated: bool, is_rms: bool,
    ) -> Any:  # fmt: skip
        dtype = _computed_in(x)
        given, scale, shift = _cast(dtype, x.reshape(-1, x.shape[-1]), scale, shift)
        normed, means, deviations = _norm(given, is_rms)
        weights = _cast(dtype, first, first_bias, second, second_bias)
        wide = _product(normed, normed.shape[0], first.shape[0])
        active = wide.new_empty(wide.shape[0], wide.shape[1] // (2 if is_gated else 1))
        out = _product(active, *x.shape[:-1], second.shape[0])
        ctx.save_for_backward(given, scale, shift, normed, *weights, wide, active, means, deviations)
        ctx.biases = first_bias is not None, second_bias is not None
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        given, scale, shift, normed, first, first_bias, second, second_bias, wide, active, *_ = ctx.saved_tensors
        shape = (*gradient.shape[:-1], first.shape[1])
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_active = _product(flat, *active.shape)
        of_second = _weight_gradients(flat, second, second_bias)
        active.untyped_storage().resize_(0)  # `clear_tensor_data`
        of_wide = torch.empty_like(wide)
        wide.untyped_storage().resize_(0)
        of_normed = _product(of_wide, *normed.shape)
        of_first = _weight_gradients(of_wide, first, first_bias)
        of_given, of_scale, of_shift = _norm_gradients(given, scale, shift)
        del of_active, of_normed
        return of_given.view(shape), of_scale, of_shift, *of_first, *of_second, None, None


class _Attention(torch.autograd.Function):
    """cuDNN's: saves queries, keys, values, the output, and a figure and the random state of each row."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, tokens: int) -> Any:
        out, figures, state = _attended(query, tokens)
        ctx.save_for_backward(query, key, value, out, figures, state)
        ctx.tokens = tokens
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        return *_attention_gradients(gradient, query, key, value, ctx.tokens), None


@kernel(_PACKAGE)
def _attended(query: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
    """Make output, sums of rows and random state."""
    samples = math.prod(query.shape[:2]) // tokens
    figures = query.new_empty(samples, query.shape[2], tokens, 1, dtype=torch.float32)
    out = query.new_empty(query.shape)
    return out, figures, query.new_empty(2, dtype=torch.int64)


@kernel(_PACKAGE)
def _attention_gradients(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tokens: int
) -> Any:
    """Make gradients of queries, keys and values; those of queries are summed in fp32."""
    on_gpu(_PACKAGE, gradient)
    made = tuple(one.new_empty(one.shape) for one in (query, key, value))
    samples = math.prod(query.shape[:2]) // tokens
    rows = samples * query.shape[2] * tokens
    workspace = query.new_empty(rows * (query.shape[3] + 1) * 4 + _PLAN_BYTES, dtype=torch.uint8)
    del workspace
    return made


def _parameter(*shape: int, where: dict[str, Any]) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, **where).normal_(std=0.023))


def _where(params_dtype: Any, device: Any) -> dict[str, Any]:
    return {"dtype": params_dtype or torch.get_default_dtype(), "device": device}


class _Normed(nn.Module):
    """A module with a norm of its own before."""

    def __init__(self, size: int, eps: float, normalization: str, where: dict[str, Any]) -> None:
        super().__init__()
        self.eps, self.normalization = eps, normalization
        self.layer_norm_weight = nn.Parameter(torch.ones(size, **where))
        self.layer_norm_bias = nn.Parameter(torch.zeros(size, **where)) if normalization == "LayerNorm" else None

    @property
    def is_rms(self) -> bool:
        """Whether it norms by the root mean square."""
        return self.normalization == "RMSNorm"


class TELinear(nn.Module):
    """`Linear`."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = True, return_bias: bool = False,
        params_dtype: Any = None, device: Any = "cuda", **_more: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        where = _where(params_dtype, device)
        self.in_features, self.out_features, self.return_bias = in_features, out_features, return_bias
        self.weight = _parameter(out_features, in_features, where=where)
        self.bias = nn.Parameter(torch.zeros(out_features, **where)) if bias else None

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:  # noqa: ARG002
        """Return the product, or that and the bias which is still to be added."""
        apply: Any = _Linear.apply
        out = apply(inp, self.weight, None if self.return_bias else self.bias)
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(_Normed):
    """A norm and a product."""

    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, *, bias: bool = True,
        normalization: str = "LayerNorm", return_bias: bool = False, return_layernorm_output: bool = False,
        params_dtype: Any = None, device: Any = "cuda", **_more: Any,
    ) -> None:  # fmt: skip
        where = _where(params_dtype, device)
        super().__init__(in_features, eps, normalization, where)
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        self.weight = _parameter(out_features, in_features, where=where)
        self.bias = nn.Parameter(torch.zeros(out_features, **where)) if bias else None

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:  # noqa: ARG002
        """Return the product; the bias, which is still to be added, and the norm's output where they are asked for."""
        apply: Any = _NormLinear.apply
        bias = None if self.return_bias else self.bias
        out, normed = apply(inp, self.layer_norm_weight, self.layer_norm_bias, self.weight, bias, self.is_rms)
        more = [self.bias] * self.return_bias + [normed] * self.return_layernorm_output
        return (out, *more) if more else out


class LayerNormMLP(_Normed):
    """A norm and two products with an activation between them."""

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, eps: float = 1e-5, *, bias: bool = True,
        normalization: str = "LayerNorm", activation: str = "gelu", return_bias: bool = False,
        params_dtype: Any = None, device: Any = "cuda", **_more: Any,
    ) -> None:  # fmt: skip
        where = _where(params_dtype, device)
        super().__init__(hidden_size, eps, normalization, where)
        self.activation, self.return_bias = activation, return_bias
        wide = ffn_hidden_size * (2 if activation in _GATED else 1)
        self.fc1_weight = _parameter(wide, hidden_size, where=where)
        self.fc1_bias = nn.Parameter(torch.zeros(wide, **where)) if bias else None
        self.fc2_weight = _parameter(hidden_size, ffn_hidden_size, where=where)
        self.fc2_bias = nn.Parameter(torch.zeros(hidden_size, **where)) if bias else None

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:  # noqa: ARG002
        """Return the second product, or that and the bias which is still to be added."""
        apply: Any = _NormMlp.apply
        bias = None if self.return_bias else self.fc2_bias
        out = apply(
            inp, self.layer_norm_weight, self.layer_norm_bias, self.fc1_weight, self.fc1_bias, self.fc2_weight, bias,
            self.activation in _GATED, self.is_rms,
        )  # fmt: skip
        return (out, self.fc2_bias) if self.return_bias else out


class DotProductAttention(nn.Module):
    """Attention of [tokens, batch, heads, width], or [batch, tokens, …]; returns heads side by side."""

    def __init__(
        self, num_attention_heads: int, kv_channels: Any, attention_dropout: float = 0.0, qkv_format: str = "sbhd",
        **_more: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.width, self.dropout, self.qkv_format = (
            num_attention_heads, kv_channels, attention_dropout, qkv_format,
        )  # fmt: skip

    def forward(self, query_layer: Any, key_layer: Any, value_layer: Any, *_: Any, **more: Any) -> Any:
        """Return the attention.

        Raises:
            NotImplementedError: of samples that are packed.
        """
        qkv_format = more.get("qkv_format") or self.qkv_format
        if qkv_format not in ("sbhd", "bshd"):
            raise NotImplementedError("Transformer Engine's attention is stood in for in the formats sbhd and bshd")
        if query_layer.dtype in _HALF:
            apply: Any = _Attention.apply
            tokens = query_layer.shape[0 if qkv_format == "sbhd" else 1]
            return apply(query_layer, key_layer, value_layer, tokens).flatten(2)
        first = (1, 2, 0, 3) if qkv_format == "sbhd" else (0, 2, 1, 3)
        query, key, value = (one.permute(first) for one in (query_layer, key_layer, value_layer))
        probabilities = F.dropout((query @ key.transpose(-2, -1)).softmax(-1), self.dropout, self.training)
        back = (2, 0, 1, 3) if qkv_format == "sbhd" else (0, 2, 1, 3)
        return (probabilities @ value).permute(back).flatten(2)


class TEMultiheadAttention(nn.Module):
    """`MultiheadAttention`: projections in one, attention, a projection back."""

    def __init__(
        self, hidden_size: int, num_attention_heads: int, kv_channels: int | None = None,
        attention_dropout: float = 0.1, layernorm_epsilon: float = 1e-5, *, num_gqa_groups: int | None = None,
        input_layernorm: bool = False, normalization: str = "LayerNorm", bias: bool = True, return_bias: bool = False,
        qkv_format: str = "sbhd", params_dtype: Any = None, device: Any = "cuda", **_more: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        width = kv_channels or hidden_size // num_attention_heads
        self.heads, self.groups, self.width = num_attention_heads, num_gqa_groups or num_attention_heads, width
        options: dict[str, Any] = {"bias": bias, "params_dtype": params_dtype, "device": device}
        mixed = width * (self.heads + 2 * self.groups)
        if input_layernorm:
            norm: dict[str, Any] = {"eps": layernorm_epsilon, "normalization": normalization}
            self.layernorm_qkv: nn.Module = LayerNormLinear(hidden_size, mixed, **norm, **options)
        else:
            self.layernorm_qkv = TELinear(hidden_size, mixed, **options)
        self.core_attention = DotProductAttention(self.heads, width, attention_dropout, qkv_format)
        self.proj = TELinear(self.heads * width, hidden_size, return_bias=return_bias, **options)

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Return what tokens become, or that and the bias which is still to be added."""
        mixed = self.layernorm_qkv(hidden_states)
        mixed = mixed.view(*mixed.shape[:2], self.groups, self.heads // self.groups + 2, self.width)
        query, key, value = mixed.split([self.heads // self.groups, 1, 1], dim=3)
        query, key, value = query.flatten(2, 3), key.squeeze(3), value.squeeze(3)
        return self.proj(self.core_attention(query, key, value))


class TransformerLayer(nn.Module):
    """Attention and an MLP, each with its norm before, and dropout and the residual behind."""

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5, hidden_dropout: float = 0.1, attention_dropout: float = 0.1,
        kv_channels: int | None = None, activation: str = "gelu", normalization: str = "LayerNorm", bias: bool = True,
        attn_input_format: str = "sbhd", params_dtype: Any = None, device: Any = "cuda", **more: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        if more.get("layer_type", "encoder") != "encoder" or more.get("parallel_attention_mlp"):
            raise NotImplementedError("TransformerLayer is stood in for as an encoder's or a decoder-only network's")
        options: dict[str, Any] = {
            "bias": bias, "normalization": normalization, "params_dtype": params_dtype, "device": device,
            "return_bias": True,
        }  # fmt: skip
        self.hidden_dropout = hidden_dropout
        self.self_attention = TEMultiheadAttention(
            hidden_size, num_attention_heads, kv_channels, attention_dropout, layernorm_epsilon,
            num_gqa_groups=num_gqa_groups, input_layernorm=True, qkv_format=attn_input_format, **options,
        )  # fmt: skip
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, layernorm_epsilon, activation=activation, **options
        )

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Return what tokens become."""
        hidden_states = self._added(self.self_attention(hidden_states), hidden_states)
        return self._added(self.layernorm_mlp(hidden_states), hidden_states)

    def _added(self, made: Any, residual: torch.Tensor) -> torch.Tensor:
        out, bias = made
        out = out if bias is None else out + bias.to(out.dtype)
        return residual + F.dropout(out, self.hidden_dropout, self.training)


class TELayerNorm(_Normed):
    """`LayerNorm`."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, dtype: Any = None, device: Any = "cuda", **_: Any) -> None:
        super().__init__(hidden_size, eps, "LayerNorm", _where(dtype, device))

    def forward(self, inp: torch.Tensor) -> Any:
        """Normalize, as torch does: input, means and reciprocal deviations are saved."""
        return F.layer_norm(inp, inp.shape[-1:], self.layer_norm_weight, self.layer_norm_bias, self.eps)


# Formats of 8 bits


class Recipe8Bit:
    """A recipe of 8 bits: named, and not followed."""

    def __init__(self, **options: Any) -> None:
        vars(self).update(options)


class Format8Bit:
    """The names of formats of 8 bits."""

    E4M3, E5M2, HYBRID = "E4M3", "E5M2", "HYBRID"


@contextmanager
def autocast(enabled: bool = True, **_: Any) -> Iterator[None]:
    """Compute in 8 bits, or keep weights so, which is not followed.

    Raises:
        NotImplementedError: it is enabled.
    """
    if enabled:
        raise NotImplementedError(_WITHOUT_FP8)
    yield


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute a layer again in backward."""
    kept = {name: value for name, value in kwargs.items() if name not in ("distribute_saved_activations", "tp_group",
                                                                           "get_rng_state_tracker")}  # fmt: skip
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=kept.pop("use_reentrant", True), **kept)
