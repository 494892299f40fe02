"""Rotary positions (Su et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_ROTARY_BASE = 10_000.0
"""Base of Llama 2's rotary frequencies. Later models raise it, which changes angles and no tensor's size."""


class RotaryEmbedding(nn.Module):
    """Cosines and sines, computed once a forward pass for all blocks."""

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
