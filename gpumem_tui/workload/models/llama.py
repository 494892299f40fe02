"""The Llama family (Touvron et al. 2023), Mistral and Qwen2.5 included: RMSNorm, rotary positions, SwiGLU.

What decides memory (which tensors are cast, repeated and kept) follows Hugging Face transformers' Llama.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.workload.models.attention import AttentionCore, merge_heads, split_heads
from gpumem_tui.workload.models.initialization import init_transformer
from gpumem_tui.workload.models.recompute import run

_ROTARY_BASE = 10_000.0
"""Base of Llama 2's rotary frequencies. Later models raise it, which changes angles and no tensor's size."""

_NORM_EPS = 1e-5


class Llama(nn.Module):
    """Token ids [batch, tokens] to logits [batch, tokens, vocab]."""

    def __init__(self, shape: ModelShape, recipe: Recipe) -> None:
        super().__init__()
        self.recompute = recipe.recompute == "full"
        self.token_embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.rotary = RotaryEmbedding(shape.attention_width)
        self.blocks = nn.ModuleList(LlamaBlock(shape, recipe) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied_head:
            self.head.weight = self.token_embedding.weight
        init_transformer(self)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token_embedding(ids)
        cos, sin = self.rotary(x)
        for block in self.blocks:
            x = run(block, x, cos, sin, recompute=self.recompute)
        logits: Tensor = self.head(self.norm(x))
        return logits


class LlamaBlock(nn.Module):
    """One transformer block; [batch, tokens, hidden] in and out."""

    def __init__(self, shape: ModelShape, recipe: Recipe) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(shape.hidden)
        self.attention = LlamaAttention(shape, recipe)
        self.mlp_norm = RmsNorm(shape.hidden)
        self.mlp = SwiGlu(shape.hidden, shape.ffn)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        output: Tensor = x + self.mlp(self.mlp_norm(x))
        return output


class LlamaAttention(nn.Module):
    """Causal attention in which each key/value head serves a group of query heads."""

    def __init__(self, shape: ModelShape, recipe: Recipe) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        width = shape.attention_width
        self.q_proj = nn.Linear(shape.hidden, self.heads * width, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.hidden, self.kv_heads * width, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.hidden, self.kv_heads * width, bias=shape.qkv_bias)
        self.core = AttentionCore(recipe, causal=True, dropout=shape.dropout)
        self.out_proj = nn.Linear(self.heads * width, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = split_heads(self.q_proj(x), self.heads)
        k = split_heads(self.k_proj(x), self.kv_heads)
        v = split_heads(self.v_proj(x), self.kv_heads)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        group = self.heads // self.kv_heads
        k, v = repeat_kv(k, group), repeat_kv(v, group)
        output: Tensor = self.out_proj(merge_heads(self.core(q, k, v)))
        return output


class SwiGlu(nn.Module):
    """The gated feed-forward network of Shazeer 2020."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class RmsNorm(nn.Module):
    """Root-mean-square normalization, written out: its fp32 intermediates are part of what is measured."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _NORM_EPS)
        return self.weight * wide.to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of rotary positions (Su et al. 2021), computed once a forward pass for all blocks."""

    inverse_frequencies: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        self.register_buffer("inverse_frequencies", _ROTARY_BASE**-exponents, persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each [tokens, width], in the dtype of `x` [batch, tokens, hidden]."""
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
    """Key or value heads [batch, kv_heads, tokens, width], each copied for all `group` query heads it serves."""
    if group == 1:
        return x
    batch, kv_heads, tokens, width = x.shape
    return x[:, :, None].expand(-1, -1, group, -1, -1).reshape(batch, kv_heads * group, tokens, width)
