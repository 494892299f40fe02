"""Shared by the networks: attention, normalization, rotary positions, initial weights, recomputation.

Attention runs through `torch.nn.functional.scaled_dot_product_attention`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import Attention, Recipe
from gpumem_tui.step.workload import WorkloadError

STD = 0.02
"""Standard deviation of initial weights (Radford et al. 2019, Devlin et al. 2018)."""

_NORM_EPS = 1e-5
_ROTARY_BASE = 10_000.0
"""Base of Llama 2's rotary frequencies. Later models raise it, which changes angles and no tensor's size."""

KERNELS: dict[Attention, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""The kernel of `--attention`, as PyTorch names it."""

_NO_KERNEL = ("No available kernel", "No viable backend")
"""How scaled_dot_product_attention states that none of the allowed kernels can run."""


def split_heads(x: Tensor, heads: int) -> Tensor:
    """View [batch, tokens, heads × width] as [batch, heads, tokens, width], without a copy."""
    return x.view(x.size(0), x.size(1), heads, -1).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Return [batch, heads, tokens, width] as [batch, tokens, heads × width]; a copy only if the layout needs one."""
    return x.transpose(1, 2).reshape(x.size(0), x.size(2), -1)


class AttentionCore(nn.Module):
    """softmax(q kᵀ / √width) v with the recipe's kernel: the part that selective recompute runs again.

    Raises (when run):
        WorkloadError: the kernel that the recipe insists on cannot take these tensors.
    """

    def __init__(self, recipe: Recipe, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.attention = recipe.attention
        self.recompute = recipe.recompute == "selective"
        self.causal = causal
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend; q, k, v and the result are [batch, heads, tokens, width]."""
        return run(self._attend, q, k, v, recompute=self.recompute)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        if self.attention == "auto":
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        try:
            with sdpa_kernel(KERNELS[self.attention]):
                return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        except RuntimeError as error:
            if not any(complaint in str(error) for complaint in _NO_KERNEL):
                raise
            dtype = str(v.dtype).removeprefix("torch.")
            raise WorkloadError(
                f"--attention {self.attention}: PyTorch has no such kernel for {dtype} heads of width "
                f"{v.size(-1)} on {v.device.type}; use --attention auto"
            ) from error


class SinkAttention(nn.Module):
    """Causal attention in which every head has a learned score besides those of the keys (gpt-oss).

    No kernel of PyTorch's has that, so the scores are written, as transformers' eager attention writes them.

    Raises:
        WorkloadError: the recipe insists on a fused kernel.
    """

    def __init__(self, shape: ModelShape, recipe: Recipe) -> None:
        super().__init__()
        if recipe.attention in ("flash", "efficient"):
            raise WorkloadError(
                f"--attention {recipe.attention}: {shape.name} has attention sinks, which PyTorch's fused kernels do "
                "not have; use --attention auto"
            )
        self.recompute = recipe.recompute == "selective"
        self.scale = shape.attention_width**-0.5
        self.sinks = nn.Parameter(torch.zeros(shape.heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend; q, k, v and the result are [batch, heads, tokens, width]."""
        return run(self._attend, q, k, v, recompute=self.recompute)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(2, 3)) * self.scale
        allowed = torch.ones(q.size(2), q.size(2), dtype=torch.bool, device=q.device).tril()
        scores = scores + torch.where(allowed, 0.0, torch.finfo(scores.dtype).min).to(scores.dtype)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.size(0), -1, q.size(2), -1)
        scores = torch.cat((scores, sinks), dim=-1)
        scores = scores - scores.max(dim=-1, keepdim=True).values
        shares = torch.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1].to(v.dtype)
        return torch.matmul(shares, v).transpose(1, 2).contiguous().transpose(1, 2)


class RmsNorm(nn.Module):
    """Root-mean-square normalization, written out: its fp32 intermediates are part of what is measured.

    Args:
        scales_wide: the weight is applied in fp32, as gpt-oss does, instead of in the dtype of the input.
    """

    def __init__(self, width: int, *, scales_wide: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.scales_wide = scales_wide

    def forward(self, x: Tensor) -> Tensor:
        """Run the module; its class names the inputs."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _NORM_EPS)
        if self.scales_wide:
            return (self.weight * wide).to(x.dtype)
        return self.weight * wide.to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Cosines and sines, computed once a forward pass for all blocks."""

    inverse_frequencies: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        self.register_buffer("inverse_frequencies", _ROTARY_BASE**-exponents, persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [tokens, width], in the dtype of `x` [batch, tokens, hidden]."""
        with torch.autocast(x.device.type, enabled=False):  # 16-bit angles are wrong after a few hundred tokens
            positions = torch.arange(x.size(1), device=x.device, dtype=torch.float32)
            angles = torch.outer(positions, self.inverse_frequencies)
            angles = torch.cat((angles, angles), dim=-1)
            return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + width/2) of `x` [batch, heads, tokens, width] by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def repeat_kv(x: Tensor, group: int) -> Tensor:
    """Copy key or value heads [batch, kv_heads, tokens, width] for all `group` query heads that each serves."""
    if group == 1:
        return x
    batch, kv_heads, tokens, width = x.shape
    return x[:, :, None].expand(-1, -1, group, -1, -1).reshape(batch, kv_heads * group, tokens, width)


def init_transformer(module: nn.Module) -> None:
    """Give the linear layers and embeddings under `module` small weights.

    torch's default for embeddings, a standard deviation of 1, would make a tied head's logits overflow fp16.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            nn.init.normal_(layer.weight, std=STD)
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)


def check_recompute(shape: ModelShape, recipe: Recipe) -> None:
    """Raise WorkloadError if the recipe's recompute does not exist for this family."""
    if recipe.recompute == "selective" and not shape.record.has_attention:
        raise WorkloadError(
            f"--recompute selective: {shape.name} has no attention to recompute; use --recompute full or none"
        )


def run(function: Callable[..., Tensor], *inputs: Tensor, recompute: bool) -> Tensor:
    """Run `function(*inputs)`; with `recompute` only the inputs are kept, and backward runs it again."""
    output: Tensor = checkpoint(function, *inputs, use_reentrant=False) if recompute else function(*inputs)
    return output
