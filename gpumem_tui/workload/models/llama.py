"""The Llama family (Touvron et al. 2023), Mistral and Qwen included: RMSNorm, rotary positions, SwiGLU or experts.

What decides memory (which tensors are cast, repeated and kept) follows Hugging Face transformers' Llama, Qwen3,
Mixtral, DeepseekV3 and GptOss.
"""

from __future__ import annotations

from torch import Tensor, nn

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.workload.models.attention import AttentionCore, SinkAttention, merge_heads, split_heads
from gpumem_tui.workload.models.experts import MixtureOfExperts, SwiGlu
from gpumem_tui.workload.models.initialization import init_transformer
from gpumem_tui.workload.models.latent import LatentSelfAttention
from gpumem_tui.workload.models.norms import RmsNorm
from gpumem_tui.workload.models.recompute import run
from gpumem_tui.workload.models.rotary import RotaryEmbedding, apply_rotary, repeat_kv


class Llama(nn.Module):
    """Token ids [batch, tokens] to logits [batch, tokens, vocab]."""

    def __init__(self, shape: ModelShape, recipe: Recipe) -> None:
        super().__init__()
        self.recompute = recipe.recompute == "full"
        self.token_embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.rotary = RotaryEmbedding(shape.attention_width if shape.latent is None else shape.latent.rope_width)
        self.blocks = nn.ModuleList(LlamaBlock(shape, recipe, place) for place in range(shape.layers))
        self.norm = RmsNorm(shape.hidden, scales_wide=shape.sinks)
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
    """One transformer block, in that place from 0; [batch, tokens, hidden] in and out."""

    def __init__(self, shape: ModelShape, recipe: Recipe, place: int) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(shape.hidden, scales_wide=shape.sinks)
        self.attention = _attention(shape, recipe)
        self.mlp_norm = RmsNorm(shape.hidden, scales_wide=shape.sinks)
        self.mlp = _feed_forward(shape, place)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        output: Tensor = x + self.mlp(self.mlp_norm(x))
        return output


def _attention(shape: ModelShape, recipe: Recipe) -> nn.Module:
    if shape.latent is not None:
        return LatentSelfAttention(shape, shape.latent, recipe)
    return LlamaAttention(shape, recipe)


def _feed_forward(shape: ModelShape, place: int) -> nn.Module:
    experts = shape.experts
    if experts is None:
        return SwiGlu(shape.hidden, shape.ffn)
    return SwiGlu(shape.hidden, experts.dense_ffn) if place < experts.dense_layers else MixtureOfExperts(shape, experts)


class LlamaAttention(nn.Module):
    """Causal attention in which each key/value head serves a group of query heads."""

    def __init__(self, shape: ModelShape, recipe: Recipe) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        width = shape.attention_width
        self.q_proj = nn.Linear(shape.hidden, self.heads * width, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.hidden, self.kv_heads * width, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.hidden, self.kv_heads * width, bias=shape.qkv_bias)
        self.q_norm = RmsNorm(width) if shape.qk_norm else nn.Identity()
        self.k_norm = RmsNorm(width) if shape.qk_norm else nn.Identity()
        self.core: nn.Module
        if shape.sinks:
            self.core = SinkAttention(shape, recipe)
        else:
            self.core = AttentionCore(recipe, causal=True, dropout=shape.dropout)
        self.out_proj = nn.Linear(self.heads * width, shape.hidden, bias=shape.out_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.q_norm(_by_head(self.q_proj(x), self.heads)).transpose(1, 2)
        k = self.k_norm(_by_head(self.k_proj(x), self.kv_heads)).transpose(1, 2)
        v = split_heads(self.v_proj(x), self.kv_heads)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        group = self.heads // self.kv_heads
        k, v = repeat_kv(k, group), repeat_kv(v, group)
        output: Tensor = self.out_proj(merge_heads(self.core(q, k, v)))
        return output


def _by_head(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:-1], heads, -1)
