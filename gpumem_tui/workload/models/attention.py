"""Attention through `torch.nn.functional.scaled_dot_product_attention`, shared by the transformers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import Attention, Recipe
from gpumem_tui.step.workload import WorkloadError
from gpumem_tui.workload.models.recompute import run

KERNELS: dict[Attention, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""What `--attention` insists on, as PyTorch names it."""

_NO_KERNEL = ("No available kernel", "No viable backend")
"""How scaled_dot_product_attention says that none of the allowed kernels can run."""


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, tokens, heads × width] seen as [batch, heads, tokens, width], without a copy."""
    return x.view(x.size(0), x.size(1), heads, -1).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[batch, heads, tokens, width] as [batch, tokens, heads × width]; a copy only if the layout needs one."""
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
        """q, k, v and the result are [batch, heads, tokens, width]."""
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
    """Causal attention in which every head has a learned score beside those of the keys (gpt-oss).

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
        """q, k, v and the result are [batch, heads, tokens, width]."""
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


class FusedSelfAttention(nn.Module):
    """Self-attention whose queries, keys and values come from one projection, as in GPT-2."""

    def __init__(self, shape: ModelShape, recipe: Recipe, *, causal: bool) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.core = AttentionCore(recipe, causal=causal, dropout=shape.dropout)
        self.proj = nn.Linear(shape.hidden, shape.hidden)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        attended = self.core(split_heads(q, self.heads), split_heads(k, self.heads), split_heads(v, self.heads))
        output: Tensor = self.dropout(self.proj(merge_heads(attended)))
        return output
