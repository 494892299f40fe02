"""Mixture of experts (Shazeer et al. 2017): every token goes through a few of a block's feed-forward networks.

What decides memory follows transformers 5 (integrations/moe.py): one tensor for a block's experts, tokens sorted by
expert, grouped matrix products (`torch.nn.functional.grouped_mm`, torch 2.10), which autocast leaves alone: experts run
in the dtype of their weights. No shape depends on the routing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpumem_tui.catalog.shapes import Experts, ModelShape
from gpumem_tui.formula.recipe import BaseQuantization
from gpumem_tui.workload.quantized import QuantizedExperts

_GROUPS, _GROUPS_KEPT, _BEST_OF_GROUP = 8, 4, 2
"""DeepSeek-V3's: a token's experts are from the groups whose best two score highest (section 2.1.2)."""
_STEEPNESS, _LIMIT = 1.702, 7.0
"""Of gpt-oss's clamped SwiGLU."""
_STD = 0.02
"""Standard deviation of initial weights, as of the layers around them."""


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


class MixtureOfExperts(nn.Module):
    """Router, experts and shared experts; [batch, tokens, hidden] in and out."""

    def __init__(self, shape: ModelShape, experts: Experts) -> None:
        super().__init__()
        self.router = Router(shape.hidden, experts)
        self.experts = RoutedExperts(shape.hidden, shape.ffn, experts)
        self.shared = SwiGlu(shape.hidden, experts.shared * shape.ffn) if experts.shared else None

    def forward(self, x: Tensor) -> Tensor:
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
        self.weight = nn.Parameter(torch.empty(experts.count, hidden).normal_(std=_STD))
        self.bias = nn.Parameter(torch.zeros(experts.count)) if experts.has_bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
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
        """x [tokens, hidden], weights and chosen [tokens, active]."""
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
    return nn.Parameter(torch.empty(dims).normal_(std=_STD))
