"""BERT (Devlin et al. 2018) with its pooler and a classifier over it, as for sequence classification."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.workload.models.attention import AttentionCore, merge_heads, split_heads
from gpumem_tui.workload.models.initialization import init_transformer
from gpumem_tui.workload.models.recompute import run

_TOKEN_TYPES = 2
_NORM_EPS = 1e-12


class Bert(nn.Module):
    """Token ids [batch, tokens], none of them padding, to logits [batch, classes]."""

    def __init__(self, shape: ModelShape, recipe: Recipe) -> None:
        super().__init__()
        self.recompute = recipe.recompute == "full"
        self.embeddings = BertEmbeddings(shape)
        self.blocks = nn.ModuleList(BertBlock(shape, recipe) for _ in range(shape.layers))
        self.pooler = nn.Sequential(nn.Linear(shape.hidden, shape.hidden), nn.Tanh())
        self.dropout = nn.Dropout(shape.dropout)
        self.classifier = nn.Linear(shape.hidden, shape.classes)
        init_transformer(self)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embeddings(ids)
        for block in self.blocks:
            x = run(block, x, recompute=self.recompute)
        logits: Tensor = self.classifier(self.dropout(self.pooler(x[:, 0])))
        return logits


class BertEmbeddings(nn.Module):
    """Word, position and token-type embeddings, normalized; every token is of the first type."""

    position_ids: Tensor
    token_type_ids: Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.word = nn.Embedding(shape.vocab, shape.hidden)
        self.position = nn.Embedding(shape.max_seq_len, shape.hidden)
        self.token_type = nn.Embedding(_TOKEN_TYPES, shape.hidden)
        self.norm = nn.LayerNorm(shape.hidden, eps=_NORM_EPS)
        self.dropout = nn.Dropout(shape.dropout)
        positions = torch.arange(shape.max_seq_len).unsqueeze(0)
        self.register_buffer("position_ids", positions, persistent=False)
        self.register_buffer("token_type_ids", torch.zeros_like(positions), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        tokens = ids.size(1)
        token_types = self.token_type(self.token_type_ids[:, :tokens].expand(ids.size(0), tokens))
        x = self.word(ids) + token_types
        x += self.position(self.position_ids[:, :tokens])
        embedded: Tensor = self.dropout(self.norm(x))
        return embedded


class BertBlock(nn.Module):
    """One transformer block, LayerNorm after each residual sum; [batch, tokens, hidden] in and out."""

    def __init__(self, shape: ModelShape, recipe: Recipe) -> None:
        super().__init__()
        self.attention = BertAttention(shape, recipe)
        self.attention_norm = nn.LayerNorm(shape.hidden, eps=_NORM_EPS)
        self.mlp = nn.Sequential(
            nn.Linear(shape.hidden, shape.ffn),
            nn.GELU(),
            nn.Linear(shape.ffn, shape.hidden),
            nn.Dropout(shape.dropout),
        )
        self.mlp_norm = nn.LayerNorm(shape.hidden, eps=_NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(self.attention(x) + x)
        output: Tensor = self.mlp_norm(self.mlp(x) + x)
        return output


class BertAttention(nn.Module):
    """Bidirectional self-attention with separate query, key and value projections."""

    def __init__(self, shape: ModelShape, recipe: Recipe) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query = nn.Linear(shape.hidden, shape.hidden)
        self.key = nn.Linear(shape.hidden, shape.hidden)
        self.value = nn.Linear(shape.hidden, shape.hidden)
        self.core = AttentionCore(recipe, causal=False, dropout=shape.dropout)
        self.proj = nn.Linear(shape.hidden, shape.hidden)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(project(x), self.heads) for project in (self.query, self.key, self.value))
        output: Tensor = self.dropout(self.proj(merge_heads(self.core(q, k, v))))
        return output
