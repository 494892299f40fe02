"""Normalization of Llama and its like."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_NORM_EPS = 1e-5


class RmsNorm(nn.Module):
    """Root-mean-square normalization, written out: its fp32 intermediates are part of what is measured.

    Args:
        scales_wide: the weight is applied in fp32, as gpt-oss does, instead of in the dtype of the input.
    """

    def __init__(self, width: int, *, scales_wide: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.scales_wide = scales_wide

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _NORM_EPS)
        if self.scales_wide:
            return (self.weight * wide).to(x.dtype)
        return self.weight * wide.to(x.dtype)
