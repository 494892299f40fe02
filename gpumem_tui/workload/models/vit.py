"""The Vision Transformer (Dosovitskiy et al. 2020) in torchvision's layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.workload.models.attention import FusedSelfAttention
from gpumem_tui.workload.models.initialization import init_transformer
from gpumem_tui.workload.models.recompute import run

_NORM_EPS = 1e-6


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
        self.norm = nn.LayerNorm(shape.hidden, eps=_NORM_EPS)
        self.head = nn.Linear(shape.hidden, shape.classes)
        init_transformer(self)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch_embedding(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(images.size(0), -1, -1), patches), dim=1)
        x = self.dropout(x + self.position_embedding)
        for block in self.blocks:
            x = run(block, x, recompute=self.recompute)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits


class VitBlock(nn.Module):
    """One transformer block; [batch, tokens, hidden] in and out."""

    def __init__(self, shape: ModelShape, recipe: Recipe) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.hidden, eps=_NORM_EPS)
        self.attention = FusedSelfAttention(shape, recipe, causal=False)
        self.mlp_norm = nn.LayerNorm(shape.hidden, eps=_NORM_EPS)
        self.mlp = nn.Sequential(
            nn.Linear(shape.hidden, shape.ffn),
            nn.GELU(),
            nn.Dropout(shape.dropout),
            nn.Linear(shape.ffn, shape.hidden),
            nn.Dropout(shape.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        output: Tensor = x + self.mlp(self.mlp_norm(x))
        return output
