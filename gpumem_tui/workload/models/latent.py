"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2), as transformers' DeepseekV3Attention trains it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpumem_tui.catalog.shapes import LatentAttention, ModelShape
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.workload.models.attention import AttentionCore, merge_heads, split_heads
from gpumem_tui.workload.models.norms import RmsNorm
from gpumem_tui.workload.models.rotary import apply_rotary


class LatentSelfAttention(nn.Module):
    """Causal attention whose keys and values are made of one narrow projection, and queries of another."""

    def __init__(self, shape: ModelShape, latent: LatentAttention, recipe: Recipe) -> None:
        super().__init__()
        self.heads, self.latent = shape.heads, latent
        self.width, self.plain = shape.attention_width, shape.attention_width - latent.rope_width
        if latent.q_rank:
            self.q_a_proj = nn.Linear(shape.hidden, latent.q_rank, bias=False)
            self.q_norm = RmsNorm(latent.q_rank)
            self.q_b_proj = nn.Linear(latent.q_rank, self.heads * self.width, bias=False)
        else:
            self.q_proj = nn.Linear(shape.hidden, self.heads * self.width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(shape.hidden, latent.kv_rank + latent.rope_width, bias=False)
        self.kv_norm = RmsNorm(latent.kv_rank)
        self.kv_b_proj = nn.Linear(latent.kv_rank, self.heads * (self.plain + latent.value_width), bias=False)
        self.core = AttentionCore(recipe, causal=True, dropout=shape.dropout)
        self.out_proj = nn.Linear(self.heads * latent.value_width, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self._queries(x, cos, sin)
        narrow, rotated = self.kv_a_proj_with_mqa(x).split([self.latent.kv_rank, self.latent.rope_width], dim=-1)
        rotated = apply_rotary(rotated[:, None], cos, sin)
        k, v = self._keys_and_values(self.kv_norm(narrow), rotated)
        output: Tensor = self.out_proj(merge_heads(self.core(q, k, v)))
        return output

    def _queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        made = self.q_b_proj(self.q_norm(self.q_a_proj(x))) if self.latent.q_rank else self.q_proj(x)
        plain, rotated = split_heads(made, self.heads).split([self.plain, self.latent.rope_width], dim=-1)
        return torch.cat((plain, apply_rotary(rotated, cos, sin)), dim=-1)

    def _keys_and_values(self, narrow: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Keys in a tensor of their own, values where the projection put them."""
        wide = split_heads(self.kv_b_proj(narrow), self.heads)
        plain, v = wide.split([self.plain, self.latent.value_width], dim=-1)
        k = wide.new_empty(*wide.shape[:-1], self.width)
        k[..., : self.plain].copy_(plain)
        k[..., self.plain :].copy_(rotated.expand(-1, self.heads, -1, -1))
        return k, v
