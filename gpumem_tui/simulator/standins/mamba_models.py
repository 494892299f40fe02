"""mamba-ssm's networks: blocks of either kind with Triton's norms around them.

Follows mamba_ssm/models/mixer_seq_simple.py, mamba_ssm/modules/block.py, mamba_ssm/modules/mlp.py and
mamba_ssm/ops/triton/layer_norm.py of its version 2.3.2.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gpumem_tui.simulator.device.gpu import backend
from gpumem_tui.simulator.standins.mamba_scan import Mamba
from gpumem_tui.simulator.standins.mamba_ssd import Mamba2
from gpumem_tui.simulator.standins.register import kernel

_PACKAGE = "mamba-ssm"
_LAYERS = {"Mamba1": Mamba, "Mamba2": Mamba2}


@kernel(_PACKAGE)
def _normed(x: torch.Tensor, residual: Any, wanted: torch.dtype, is_rms: bool, dropout: float) -> tuple[Any, ...]:
    """Return the output, what was normed, means and reciprocal deviations (`_layer_norm_fwd`)."""
    out = torch.empty_like(x)
    total = x if residual is None and wanted == x.dtype and not dropout else torch.empty_like(x, dtype=wanted)
    mean = None if is_rms else x.new_empty(x.shape[0], dtype=torch.float32)
    deviation = x.new_empty(x.shape[0], dtype=torch.float32)
    seeds = torch.randint(2**32, (x.shape[0],), device=x.device, dtype=torch.int64) if dropout else None
    return out, total, mean, deviation, seeds


@kernel(_PACKAGE)
def _gradients(total: torch.Tensor, weight: Any, bias: Any, dtype: torch.dtype, has_residual: bool, drops: bool) -> Any:
    """Return gradients of input, weight, bias and residual (`_layer_norm_bwd`)."""
    of_x = torch.empty_like(total, dtype=dtype)
    of_residual = torch.empty_like(total) if has_residual and (dtype != total.dtype or drops) else of_x
    processors = backend.get_device_properties().multi_processor_count
    parts = [
        None if one is None else total.new_empty(processors, total.shape[1], dtype=torch.float32)
        for one in (weight, bias)
    ]
    sums = [
        None if part is None else part.sum(0).to(one.dtype) for part, one in zip(parts, (weight, bias), strict=True)
    ]
    return of_x, *sums, of_residual if has_residual else None


class _Norm(torch.autograd.Function):
    """Saves the sum of input and residual, and figures of each row."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, residual: Any, prenorm: bool, widens: bool, is_rms: bool, dropout: Any
    ) -> Any:
        flat = x.reshape(-1, x.shape[-1])
        added = None if residual is None else residual.reshape(-1, x.shape[-1])
        flat = flat if flat.stride(-1) == 1 else flat.contiguous()
        added = added if added is None or added.stride(-1) == 1 else added.contiguous()
        wanted = added.dtype if added is not None else torch.float32 if widens else flat.dtype
        out, total, mean, deviation, seeds = _normed(flat, added, wanted, is_rms, dropout)
        ctx.save_for_backward(total, weight, bias, seeds, mean, deviation)
        ctx.of = x.shape, x.dtype, residual is not None, dropout > 0
        return (out.reshape(x.shape), total.reshape(x.shape)) if prenorm else out.reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Any, *_: Any) -> Any:
        total, weight, bias, *_figures = ctx.saved_tensors
        shape, dtype, has_residual, drops = ctx.of
        gradient = gradient.reshape(-1, shape[-1])
        of_x, of_weight, of_bias, of_residual = _gradients(total, weight, bias, dtype, has_residual, drops)
        of_residual = None if of_residual is None else of_residual.reshape(shape)
        return of_x.reshape(shape), of_weight, of_bias, of_residual, None, None, None, None


def layer_norm_fn(
    x: Any, weight: Any, bias: Any, residual: Any = None, eps: float = 1e-6, dropout_p: float = 0.0,
    prenorm: bool = False, residual_in_fp32: bool = False, is_rms_norm: bool = False, **more: Any,
) -> Any:  # fmt: skip
    """Return the norm of the sum of input and residual, and before a block that sum too.

    Raises:
        NotImplementedError: of two norms at once, or with scales by row.
    """
    if any(value is not None for value in more.values()):
        raise NotImplementedError(f"layer_norm_fn is stood in for without {', '.join(sorted(more))}")
    apply: Any = _Norm.apply
    return apply(x, weight, bias, residual, prenorm, residual_in_fp32, is_rms_norm, dropout_p)


rms_norm_fn = partial(layer_norm_fn, is_rms_norm=True)


class RMSNorm(nn.Module):
    """Normalizes by the root mean square."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, dropout_p: float = 0.0, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.eps, self.drop = eps, nn.Dropout(dropout_p) if dropout_p else None
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(
        self, x: torch.Tensor, residual: Any = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Any:
        """Normalize."""
        return rms_norm_fn(
            x, self.weight, self.bias, residual=residual, eps=self.eps, prenorm=prenorm,
            residual_in_fp32=residual_in_fp32, dropout_p=self.drop.p if self.drop and self.training else 0.0,
        )  # fmt: skip


class GatedMLP(nn.Module):
    """Two projections in one, a gate, and one back."""

    def __init__(
        self, in_features: int, hidden_features: int | None = None, out_features: int | None = None,
        activation: Any = F.silu, bias: bool = False, multiple_of: int = 128, device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden = int(8 * in_features / 3) if hidden_features is None else hidden_features
        hidden = -(-hidden // multiple_of) * multiple_of
        self.fc1 = nn.Linear(in_features, 2 * hidden, bias=bias, device=device, dtype=dtype)
        self.activation = activation
        self.fc2 = nn.Linear(hidden, out_features or in_features, bias=bias, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> Any:
        """Run the module."""
        y, gate = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(y * self.activation(gate))


class MambaBlock(nn.Module):
    """A residual block: adds, normalizes, mixes; then, with an MLP, so once more."""

    def __init__(
        self, dim: int, mixer_cls: Any, mlp_cls: Any = nn.Identity, norm_cls: Any = nn.LayerNorm,
        fused_add_norm: bool = False, residual_in_fp32: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.residual_in_fp32, self.fused_add_norm = residual_in_fp32, fused_add_norm
        self.norm, self.mixer = norm_cls(dim), mixer_cls(dim)
        self.mlp = None
        if mlp_cls is not nn.Identity:
            self.norm2, self.mlp = norm_cls(dim), mlp_cls(dim)

    def forward(self, hidden_states: Any, residual: Any = None, inference_params: Any = None, **more: Any) -> Any:
        """Return what is to be added, and to what."""
        hidden_states, residual = self._normed(self.norm, hidden_states, residual)
        hidden_states = self.mixer(hidden_states, inference_params=inference_params, **more)
        if self.mlp is not None:
            hidden_states, residual = self._normed(self.norm2, hidden_states, residual)
            hidden_states = self.mlp(hidden_states)
        return hidden_states, residual

    def _normed(self, norm: Any, hidden_states: Any, residual: Any) -> Any:
        if self.fused_add_norm:
            return layer_norm_fn(
                hidden_states, norm.weight, norm.bias, residual=residual, prenorm=True, eps=norm.eps,
                residual_in_fp32=self.residual_in_fp32, is_rms_norm=isinstance(norm, RMSNorm),
            )  # fmt: skip
        residual = hidden_states if residual is None else hidden_states + residual
        hidden_states = norm(residual.to(norm.weight.dtype))
        return hidden_states, residual.float() if self.residual_in_fp32 else residual


@dataclass
class MambaConfig:
    """A network's configuration."""

    d_model: int = 2560
    d_intermediate: int = 0
    n_layer: int = 64
    vocab_size: int = 50277
    ssm_cfg: dict[str, Any] = field(default_factory=dict)
    attn_layer_idx: list[int] = field(default_factory=list)
    attn_cfg: dict[str, Any] = field(default_factory=dict)
    rms_norm: bool = True
    residual_in_fp32: bool = True
    fused_add_norm: bool = True
    pad_vocab_size_multiple: int = 8
    tie_embeddings: bool = True


def create_block(
    d_model: int, d_intermediate: int = 0, ssm_cfg: Any = None, attn_layer_idx: Any = None, attn_cfg: Any = None,
    norm_epsilon: float = 1e-5, rms_norm: bool = False, residual_in_fp32: bool = False, fused_add_norm: bool = False,
    layer_idx: int | None = None, device: Any = None, dtype: Any = None,
) -> MambaBlock:  # fmt: skip
    """Return a block of a network.

    Raises:
        NotImplementedError: it is of attention, or of a kind that is not stood in for.
    """
    options = dict(ssm_cfg or {})
    kind = _LAYERS.get(options.pop("layer", "Mamba1"))
    if kind is None or layer_idx in (attn_layer_idx or ()):
        raise NotImplementedError("mamba-ssm is stood in for with layers of Mamba1 and Mamba2 alone")
    where: dict[str, Any] = {"device": device, "dtype": dtype}
    norm = partial(RMSNorm if rms_norm else nn.LayerNorm, eps=norm_epsilon, **where)
    mlp: Any = nn.Identity
    if d_intermediate:
        mlp = partial(GatedMLP, hidden_features=d_intermediate, out_features=d_model, **where)
    mixer = partial(kind, layer_idx=layer_idx, **options, **where)
    return MambaBlock(d_model, mixer, mlp, norm, fused_add_norm=fused_add_norm, residual_in_fp32=residual_in_fp32)


class MixerModel(nn.Module):
    """Embedding, blocks and a last norm."""

    def __init__(
        self, d_model: int, n_layer: int, d_intermediate: int = 0, vocab_size: int = 50277,
        norm_epsilon: float = 1e-5, rms_norm: bool = False, initializer_cfg: Any = None,  # noqa: ARG002
        device: Any = None, dtype: Any = None, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.fused_add_norm = more.get("fused_add_norm", False)
        self.residual_in_fp32 = more.get("residual_in_fp32", False)
        self.embedding = nn.Embedding(vocab_size, d_model, **where)
        self.layers = nn.ModuleList(
            create_block(
                d_model, d_intermediate, norm_epsilon=norm_epsilon, rms_norm=rms_norm, layer_idx=place, **where, **more
            )
            for place in range(n_layer)
        )
        self.norm_f = (RMSNorm if rms_norm else nn.LayerNorm)(d_model, eps=norm_epsilon, **where)

    def forward(self, input_ids: torch.Tensor, inference_params: Any = None, **more: Any) -> Any:
        """Return the hidden states of tokens."""
        hidden_states, residual = self.embedding(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual, inference_params=inference_params, **more)
        if not self.fused_add_norm:
            residual = hidden_states if residual is None else hidden_states + residual
            return self.norm_f(residual.to(self.norm_f.weight.dtype))
        return layer_norm_fn(
            hidden_states, self.norm_f.weight, self.norm_f.bias, residual=residual, eps=self.norm_f.eps,
            residual_in_fp32=self.residual_in_fp32, is_rms_norm=isinstance(self.norm_f, RMSNorm),
        )  # fmt: skip


_Output = namedtuple("_Output", ["logits"])


class MambaLMHeadModel(nn.Module):
    """A language model; its embedding is its last projection, too, if the configuration ties them."""

    def __init__(
        self, config: MambaConfig, initializer_cfg: Any = None, device: Any = None, dtype: Any = None  # noqa: ARG002
    ) -> None:  # fmt: skip
        super().__init__()
        self.config = config
        multiple = config.pad_vocab_size_multiple
        words = -(-config.vocab_size // multiple) * multiple
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        names = ("d_intermediate", "ssm_cfg", "attn_layer_idx", "attn_cfg", "rms_norm", "residual_in_fp32",
                 "fused_add_norm")  # fmt: skip
        self.backbone = MixerModel(
            config.d_model, config.n_layer, vocab_size=words, **{name: getattr(config, name) for name in names}, **where
        )
        self.lm_head = nn.Linear(config.d_model, words, bias=False, **where)
        if config.tie_embeddings:
            self.tie_weights()

    def tie_weights(self) -> None:
        """Have the last projection be the embedding."""
        self.lm_head.weight = self.backbone.embedding.weight

    def forward(
        self, input_ids: torch.Tensor, position_ids: Any = None, inference_params: Any = None,  # noqa: ARG002
        num_last_tokens: int = 0, **more: Any,
    ) -> _Output:  # fmt: skip
        """Return the logits of tokens."""
        hidden_states = self.backbone(input_ids, inference_params=inference_params, **more)
        return _Output(self.lm_head(hidden_states[:, -num_last_tokens:] if num_last_tokens else hidden_states))
