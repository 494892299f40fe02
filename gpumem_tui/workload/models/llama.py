"""The Llama family (Touvron et al. 2023), Mistral and Qwen included: RMSNorm, rotary positions, SwiGLU or experts.

The code that decides memory (which tensors are cast, repeated and kept) follows Hugging Face transformers' Llama,
Qwen3, Mixtral, DeepseekV3 and GptOss.

In a mixture of experts (Shazeer et al. 2017) every token goes through a few of a block's feed-forward networks.
transformers 5 (integrations/moe.py) has one tensor for a block's experts, tokens sorted by expert, and grouped matrix
products (`torch.nn.functional.grouped_mm`, torch 2.10), which autocast leaves alone: experts run in the dtype of their
weights. No shape depends on the routing.

Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2) is as transformers' DeepseekV3Attention trains it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpumem_tui.catalog.shapes import Experts, LatentAttention, ModelShape
from gpumem_tui.formula.recipe import BaseQuantization, Recipe
from gpumem_tui.workload.models.layers import (
    STD,
    AttentionCore,
    RmsNorm,
    RotaryEmbedding,
    SinkAttention,
    apply_rotary,
    init_transformer,
    merge_heads,
    repeat_kv,
    run,
    split_heads,
)
from gpumem_tui.workload.quantized import QuantizedExperts

_GROUPS, _GROUPS_KEPT, _BEST_OF_GROUP = 8, 4, 2
"""DeepSeek-V3's: a token's experts are from the groups whose best two score highest (section 2.1.2)."""
_STEEPNESS, _LIMIT = 1.702, 7.0
"""Constants of gpt-oss's clamped SwiGLU."""


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
        """Run the module; its class names the inputs."""
        x = self.token_embedding(ids)
        cos, sin = self.rotary(x)
        for block in self.blocks:
            x = run(block, x, cos, sin, recompute=self.recompute)
        logits: Tensor = self.head(self.norm(x))
        return logits


class LlamaBlock(nn.Module):
    """A transformer block, in that place from 0; [batch, tokens, hidden] in and out."""

    def __init__(self, shape: ModelShape, recipe: Recipe, place: int) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(shape.hidden, scales_wide=shape.sinks)
        self.attention = _attention(shape, recipe)
        self.mlp_norm = RmsNorm(shape.hidden, scales_wide=shape.sinks)
        self.mlp = _feed_forward(shape, place)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Run the module; its class names the inputs."""
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
        """Run the module; its class names the inputs."""
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
        """Run the module; its class names the inputs."""
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
        """Return keys in a tensor of their own, values where the projection put them."""
        wide = split_heads(self.kv_b_proj(narrow), self.heads)
        plain, v = wide.split([self.plain, self.latent.value_width], dim=-1)
        k = wide.new_empty(*wide.shape[:-1], self.width)
        k[..., : self.plain].copy_(plain)
        k[..., self.plain :].copy_(rotated.expand(-1, self.heads, -1, -1))
        return k, v


class SwiGlu(nn.Module):
    """The gated feed-forward network of Shazeer 2020."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run the module; its class names the inputs."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class MixtureOfExperts(nn.Module):
    """Router, experts and shared experts; [batch, tokens, hidden] in and out."""

    def __init__(self, shape: ModelShape, experts: Experts) -> None:
        super().__init__()
        self.router = Router(shape.hidden, experts)
        self.experts = RoutedExperts(shape.hidden, shape.ffn, experts)
        self.shared = SwiGlu(shape.hidden, experts.shared * shape.ffn) if experts.shared else None

    def forward(self, x: Tensor) -> Tensor:
        """Run the module; its class names the inputs."""
        tokens = x.view(-1, x.size(-1))
        weights, chosen = self.router(tokens)
        output: Tensor = self.experts(tokens, weights, chosen).view(x.shape)
        return output if self.shared is None else output + self.shared(x)


class Router(nn.Module):
    """Tokens [tokens, hidden] to the weights and the numbers of their experts, each [tokens, active]."""

    def __init__(self, hidden: int, experts: Experts) -> None:
        super().__init__()
        self.active, self.scoring = experts.active, experts.scoring
        self.in_fp32 = experts.weighs_in_fp32
        self.weight = nn.Parameter(torch.empty(experts.count, hidden).normal_(std=STD))
        self.bias = nn.Parameter(torch.zeros(experts.count)) if experts.has_bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run the module; its class names the inputs."""
        if self.scoring == "sigmoid":
            return self._by_sigmoid(x)
        logits = F.linear(x, self.weight, self.bias)
        if self.scoring == "softmax-of-active":
            best, chosen = torch.topk(logits, self.active, dim=-1)
            return torch.softmax(best, dim=1), chosen
        weights, chosen = torch.topk(torch.softmax(logits.float(), dim=-1), self.active, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        return weights if self.in_fp32 else weights.to(logits.dtype), chosen

    def _by_sigmoid(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        count = scores.size(-1)
        groups = _GROUPS if count % _GROUPS == 0 and count // _GROUPS >= _BEST_OF_GROUP else 1
        by_group = scores.detach().view(-1, groups, count // groups)
        best_groups = by_group.topk(_BEST_OF_GROUP, dim=-1)[0].sum(dim=-1)
        kept = torch.topk(best_groups, min(_GROUPS_KEPT, groups), dim=-1, sorted=False)[1]
        mask = torch.zeros_like(best_groups).scatter_(1, kept, 1)
        allowed = mask.unsqueeze(-1).expand(by_group.shape).reshape(scores.shape)
        eligible = scores.detach().masked_fill(~allowed.bool(), float("-inf"))
        chosen = torch.topk(eligible, self.active, dim=-1, sorted=False)[1]
        weights = scores.gather(1, chosen)
        return weights / weights.sum(dim=-1, keepdim=True), chosen


class RoutedExperts(nn.Module):
    """Every expert of a block, in one tensor for each of its products."""

    def __init__(self, hidden: int, ffn: int, experts: Experts) -> None:
        super().__init__()
        self.count = experts.count
        self.gate_up_proj = _weight(experts.count, 2 * ffn, hidden)
        self.down_proj = _weight(experts.count, hidden, ffn)
        self.gate_up_bias = nn.Parameter(torch.zeros(experts.count, 2 * ffn)) if experts.has_bias else None
        self.down_bias = nn.Parameter(torch.zeros(experts.count, hidden)) if experts.has_bias else None

    def pack(self, quantization: BaseQuantization) -> None:
        """Keep the weights in `quantization`, frozen."""
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(self, name)
            delattr(self, name)
            setattr(self, name, QuantizedExperts(weight.shape, quantization, weight.device))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Run the experts; x [tokens, hidden], weights and chosen [tokens, active]."""
        tokens, active = chosen.shape
        experts, order = torch.sort(chosen.reshape(-1))
        weights = weights.reshape(-1)[order]
        numbers = experts.float() if x.is_cpu else experts.int()
        counts = torch.histc(numbers, bins=self.count, min=0, max=self.count - 1)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        inner = self._product(x[order // active], self.gate_up_proj, ends)
        if self.gate_up_bias is not None:
            inner.add_(self.gate_up_bias[experts])
        made = self._product(self._gated(inner), self.down_proj, ends)
        if self.down_bias is not None:
            made.add_(self.down_bias[experts])
        weighted = made * weights[:, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return weighted[back].view(tokens, active, -1).sum(dim=1).to(x.dtype)

    def _gated(self, inner: Tensor) -> Tensor:
        if self.gate_up_bias is None:
            gate, up = inner.chunk(2, dim=-1)
            return F.silu(gate) * up
        gate, up = inner[..., ::2].clamp(max=_LIMIT), inner[..., 1::2].clamp(-_LIMIT, _LIMIT)
        return (up + 1) * (gate * torch.sigmoid(gate * _STEEPNESS))

    @staticmethod
    def _product(x: Tensor, weight: Tensor | QuantizedExperts, ends: Tensor) -> Tensor:
        if isinstance(weight, QuantizedExperts):
            packed: Tensor = weight(x, ends)
            return packed
        return F.grouped_mm(x.to(weight.dtype), weight.transpose(-2, -1), offs=ends)


def _weight(*dims: int) -> nn.Parameter | QuantizedExperts:
    return nn.Parameter(torch.empty(dims).normal_(std=STD))
