"""GPT-2, BERT and ViT: transformers with LayerNorm, GELU and biases everywhere.

GPT-2 (Radford et al. 2019) and ViT (Dosovitskiy et al. 2020, in torchvision's layout) normalize before each sublayer,
BERT (Devlin et al. 2018, with its pooler and a classifier over it, as for sequence classification) after each sum.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.workload.models.layers import AttentionCore, init_transformer, merge_heads, run, split_heads

_TOKEN_TYPES = 2
_BERT_NORM_EPS, _VIT_NORM_EPS = 1e-12, 1e-6


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
        """Run the module; its class names the inputs."""
        positions = torch.arange(ids.size(1), device=ids.device)
        x = self.dropout(self.token_embedding(ids) + self.position_embedding(positions))
        for block in self.blocks:
            x = run(block, x, recompute=self.recompute)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Vit(nn.Module):
    """Images [batch, 3, pixels, pixels] to logits [batch, classes]."""

    def __init__(self, shape: ModelShape, recipe: Recipe) -> None:
        super().__init__()
        self.recompute = recipe.recompute == "full"
        self.patch_embedding = nn.Conv2d(3, shape.hidden, shape.patch_size, stride=shape.patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, shape.hidden))
        self.position_embedding = nn.Parameter(torch.empty(1, shape.tokens, shape.hidden).normal_(std=0.02))
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(VitBlock(shape, recipe) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden, eps=_VIT_NORM_EPS)
        self.head = nn.Linear(shape.hidden, shape.classes)
        init_transformer(self)

    def forward(self, images: Tensor) -> Tensor:
        """Run the module; its class names the inputs."""
        patches = self.patch_embedding(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(images.size(0), -1, -1), patches), dim=1)
        x = self.dropout(x + self.position_embedding)
        for block in self.blocks:
            x = run(block, x, recompute=self.recompute)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits


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
        """Run the module; its class names the inputs."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        attended = self.core(split_heads(q, self.heads), split_heads(k, self.heads), split_heads(v, self.heads))
        output: Tensor = self.dropout(self.proj(merge_heads(attended)))
        return output


class PreNormBlock(nn.Module):
    """A transformer block, LayerNorm before each sublayer; [batch, tokens, hidden] in and out."""

    mlp: nn.Module

    def __init__(self, shape: ModelShape, recipe: Recipe, *, causal: bool, eps: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.hidden, eps=eps)
        self.attention = FusedSelfAttention(shape, recipe, causal=causal)
        self.mlp_norm = nn.LayerNorm(shape.hidden, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """Run the module; its class names the inputs."""
        x = x + self.attention(self.attention_norm(x))
        output: Tensor = x + self.mlp(self.mlp_norm(x))
        return output


class Gpt2Block(PreNormBlock):
    """A block of GPT-2."""

    def __init__(self, shape: ModelShape, recipe: Recipe) -> None:
        super().__init__(shape, recipe, causal=True, eps=1e-5)
        self.mlp = nn.Sequential(
            nn.Linear(shape.hidden, shape.ffn),
            nn.GELU(approximate="tanh"),
            nn.Linear(shape.ffn, shape.hidden),
            nn.Dropout(shape.dropout),
        )


class VitBlock(PreNormBlock):
    """A block of ViT."""

    def __init__(self, shape: ModelShape, recipe: Recipe) -> None:
        super().__init__(shape, recipe, causal=False, eps=_VIT_NORM_EPS)
        self.mlp = nn.Sequential(
            nn.Linear(shape.hidden, shape.ffn),
            nn.GELU(),
            nn.Dropout(shape.dropout),
            nn.Linear(shape.ffn, shape.hidden),
            nn.Dropout(shape.dropout),
        )


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
        """Run the module; its class names the inputs."""
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
        self.norm = nn.LayerNorm(shape.hidden, eps=_BERT_NORM_EPS)
        self.dropout = nn.Dropout(shape.dropout)
        positions = torch.arange(shape.max_seq_len).unsqueeze(0)
        self.register_buffer("position_ids", positions, persistent=False)
        self.register_buffer("token_type_ids", torch.zeros_like(positions), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Run the module; its class names the inputs."""
        tokens = ids.size(1)
        token_types = self.token_type(self.token_type_ids[:, :tokens].expand(ids.size(0), tokens))
        x = self.word(ids) + token_types
        x += self.position(self.position_ids[:, :tokens])
        embedded: Tensor = self.dropout(self.norm(x))
        return embedded


class BertBlock(nn.Module):
    """A transformer block, LayerNorm after each residual sum; [batch, tokens, hidden] in and out."""

    def __init__(self, shape: ModelShape, recipe: Recipe) -> None:
        super().__init__()
        self.attention = BertAttention(shape, recipe)
        self.attention_norm = nn.LayerNorm(shape.hidden, eps=_BERT_NORM_EPS)
        self.mlp = nn.Sequential(
            nn.Linear(shape.hidden, shape.ffn),
            nn.GELU(),
            nn.Linear(shape.ffn, shape.hidden),
            nn.Dropout(shape.dropout),
        )
        self.mlp_norm = nn.LayerNorm(shape.hidden, eps=_BERT_NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Run the module; its class names the inputs."""
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
        """Run the module; its class names the inputs."""
        q, k, v = (split_heads(project(x), self.heads) for project in (self.query, self.key, self.value))
        output: Tensor = self.dropout(self.proj(merge_heads(self.core(q, k, v))))
        return output
