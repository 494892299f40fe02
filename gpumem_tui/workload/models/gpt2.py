"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm before each sublayer, GELU, biases everywhere."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.workload.models.attention import FusedSelfAttention
from gpumem_tui.workload.models.initialization import init_transformer
from gpumem_tui.workload.models.recompute import run


class Gpt2(nn.Module):
    """Token ids [batch, tokens] to logits [batch, tokens, vocab]."""

    def __init__(self, shape: ModelShape, recipe: Recipe) -> None:
        super().__init__()
        self.recompute = recipe.recompute == "full"
        self.token_embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.position_embedding = nn.Embedding(shape.max_seq_len, shape.hidden)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Gpt2Block(shape, recipe) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied_head:
            self.head.weight = self.token_embedding.weight
        init_transformer(self)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.size(1), device=ids.device)
        x = self.dropout(self.token_embedding(ids) + self.position_embedding(positions))
        for block in self.blocks:
            x = run(block, x, recompute=self.recompute)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Gpt2Block(nn.Module):
    """One transformer block; [batch, tokens, hidden] in and out."""

    def __init__(self, shape: ModelShape, recipe: Recipe) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.hidden)
        self.attention = FusedSelfAttention(shape, recipe, causal=True)
        self.mlp_norm = nn.LayerNorm(shape.hidden)
        self.mlp = nn.Sequential(
            nn.Linear(shape.hidden, shape.ffn),
            nn.GELU(approximate="tanh"),
            nn.Linear(shape.ffn, shape.hidden),
            nn.Dropout(shape.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        output: Tensor = x + self.mlp(self.mlp_norm(x))
        return output
