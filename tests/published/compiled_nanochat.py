"""The network that karpathy/autoresearch trains (228791f, train.py), nanochat's of March 2026, compiled.

Flash attention 3 is a kernel from elsewhere there; here it is an operator that allocates what that one returns.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

LENGTH, WIDTH, HEAD, LAYERS, VOCABULARY, BATCH = 2048, 512, 128, 8, 8192, 128
HEADS = WIDTH // HEAD

library = torch.library.Library("attention3", "DEF")
library.define("fwd(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)")
library.define("bwd(Tensor of_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse) -> (Tensor, Tensor, Tensor)")


@torch.library.register_fake("attention3::fwd")  # type: ignore[untyped-decorator]
def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, length, heads, _ = q.shape
    return torch.empty_like(q), q.new_empty((rows, heads, length), dtype=torch.float32)


@torch.library.register_fake("attention3::bwd")  # type: ignore[untyped-decorator]
def _backward(of_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class Flash(torch.autograd.Function):
    """Flash attention 3 of queries, keys and values, each of shape (rows, length, heads, head's width)."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend, and keep what backward needs."""
        out, lse = torch.ops.attention3.fwd(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, of_out: torch.Tensor) -> Any:
        """Return the three gradients."""
        return torch.ops.attention3.bwd(of_out, *ctx.saved_tensors)


def norm(x: torch.Tensor) -> torch.Tensor:
    """Normalize without weights."""
    return F.rms_norm(x, (x.size(-1),))


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the halves of each head by the position."""
    first, second = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    return torch.cat([first * cos + second * sin, first * (-sin) + second * cos], 3)


class Block(nn.Module):
    """Attention, whose values every second layer mixes with embeddings of the tokens, and a feed-forward network."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate = nn.Linear(32, HEADS, bias=False) if mixes else None
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, embedded: torch.Tensor | None, cos: Any, sin: Any) -> torch.Tensor:
        """Run both."""
        x = x + self.attend(norm(x), embedded, cos, sin)
        return x + self.down(F.relu(self.up(norm(x))).square())  # type: ignore[no-any-return]

    def attend(self, x: torch.Tensor, embedded: torch.Tensor | None, cos: Any, sin: Any) -> torch.Tensor:
        """Attend causally."""
        rows, length, _ = x.shape
        q, k, v = (made(x).view(rows, length, HEADS, HEAD) for made in (self.q, self.k, self.v))
        if self.gate is not None and embedded is not None:
            share = 2 * torch.sigmoid(self.gate(x[..., :32]))
            v = v + share.unsqueeze(-1) * embedded.view(rows, length, HEADS, HEAD)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        found = Flash.apply(norm(q), norm(k), v)  # type: ignore[no-untyped-call]
        return self.proj(found.contiguous().view(rows, length, -1))  # type: ignore[no-any-return]


class Network(nn.Module):
    """Blocks whose inputs are mixed with the first one's, and logits with a soft cap."""

    def __init__(self) -> None:
        super().__init__()
        mixes = [layer % 2 == (LAYERS - 1) % 2 for layer in range(LAYERS)]
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.bfloat16)
        self.values = nn.ModuleList([nn.Embedding(VOCABULARY, WIDTH, dtype=torch.bfloat16) for _ in range(sum(mixes))])
        self.blocks = nn.ModuleList([Block(mixes=one) for one in mixes])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.of_before, self.of_first = nn.Parameter(torch.ones(LAYERS)), nn.Parameter(torch.full((LAYERS,), 0.1))
        angles = torch.outer(torch.arange(10 * LENGTH), 10_000 ** (-torch.arange(0, HEAD, 2) / HEAD))
        for name, made in (("cos", angles.cos()), ("sin", angles.sin())):
            self.register_buffer(name, made.bfloat16()[None, :, None, :], persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        cos, sin = self.cos[:, :LENGTH], self.sin[:, :LENGTH]  # type: ignore[index]
        x = first = norm(self.tokens(tokens))
        values = iter(self.values)
        for layer, block in enumerate(self.blocks):
            x = self.of_before[layer] * x + self.of_first[layer] * first
            x = block(x, next(values)(tokens) if block.gate is not None else None, cos, sin)
        logits = 15 * torch.tanh(self.head(norm(x)).float() / 15)
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1), ignore_index=-1)


class Muon(torch.optim.Optimizer):
    """Keeps what the program's optimizer keeps: Adam's averages, or momentum and one more number for each row."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all."""
        for group in self.param_groups:
            if group["orthogonal"]:
                self._orthogonalized(group["params"])
                continue
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p].update(m=torch.zeros_like(p), v=torch.zeros_like(p))
                for average in self.state[p].values():
                    average.lerp_(p.grad, 0.1)

    def _orthogonalized(self, params: list[torch.Tensor]) -> None:
        stacked, state = torch.stack([p.grad for p in params]), self.state[params[0]]  # type: ignore[misc]
        if not state:
            rows, columns = params[0].shape
            kept = (len(params), rows, 1) if rows >= columns else (len(params), 1, columns)
            state.update(m=torch.zeros_like(stacked), v=stacked.new_zeros(kept))
        state["m"].lerp_(stacked, 0.1)


def main() -> None:
    """Train some steps of two micro-batches."""
    torch.set_float32_matmul_precision("high")
    network = Network().cuda()
    matrices = list(network.blocks.parameters())
    others = [p for p in network.parameters() if all(p is not one for one in matrices)]
    shapes = sorted({p.shape for p in matrices})
    groups = [{"params": others, "orthogonal": False}]
    groups += [{"params": [p for p in matrices if p.shape == shape], "orthogonal": True} for shape in shapes]
    optimizer = Muon(groups, {})
    compiled = torch.compile(network, dynamic=False)
    tokens, targets = torch.empty(2 * BATCH * LENGTH, dtype=torch.long, device="cuda").view(2, BATCH, LENGTH)
    for _ in range(3):
        for _ in range(2):
            tokens.random_(VOCABULARY)
            targets.random_(VOCABULARY)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = compiled(tokens, targets)
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert math.isfinite(float(loss))


if __name__ == "__main__":
    main()
