"""The network of karpathy/autoresearch (228791f, train.py) and of karpathy/nanochat (83dccc2, base_train.py), compiled.

Flash attention 3 is a kernel from elsewhere there; here it is an operator that allocates what that one returns.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

LENGTH, HEAD = 2048, 128

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

    def __init__(self, width: int, *, mixes: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate = nn.Linear(32, width // HEAD, bias=False) if mixes else None
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor, embedded: torch.Tensor | None, cos: Any, sin: Any) -> torch.Tensor:
        """Run both."""
        x = x + self.attend(norm(x), embedded, cos, sin)
        return x + self.down(F.relu(self.up(norm(x))).square())  # type: ignore[no-any-return]

    def attend(self, x: torch.Tensor, embedded: torch.Tensor | None, cos: Any, sin: Any) -> torch.Tensor:
        """Attend causally."""
        rows, length, _ = x.shape
        q, k, v = (made(x).view(rows, length, -1, HEAD) for made in (self.q, self.k, self.v))
        if self.gate is not None and embedded is not None:
            share = 2 * torch.sigmoid(self.gate(x[..., :32]))
            v = v + share.unsqueeze(-1) * embedded.view(rows, length, -1, HEAD)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        found = Flash.apply(norm(q), norm(k), v)  # type: ignore[no-untyped-call]
        return self.proj(found.contiguous().view(rows, length, -1))  # type: ignore[no-any-return]


class Network(nn.Module):
    """Blocks whose inputs are mixed with the first one's, and logits with a soft cap."""

    def __init__(self, layers: int, vocabulary: int) -> None:
        super().__init__()
        width, mixes = 64 * layers, [layer % 2 == (layers - 1) % 2 for layer in range(layers)]
        self.tokens = nn.Embedding(vocabulary, width, dtype=torch.bfloat16)
        self.values = nn.ModuleList([nn.Embedding(vocabulary, width, dtype=torch.bfloat16) for _ in range(sum(mixes))])
        self.blocks = nn.ModuleList([Block(width, mixes=one) for one in mixes])
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.of_before, self.of_first = nn.Parameter(torch.ones(layers)), nn.Parameter(torch.full((layers,), 0.1))
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
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class Muon(torch.optim.Optimizer):
    """Keeps what the programs' optimizers keep: Adam's averages, or momentum and one more number for each row.

    Each of several ranks has a share of every gradient reduced, updates that part and gathers the others' parts, all at
    once, and waits for the collectives' futures.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        reduced = [
            (kind, params, whole, *reduced_to_share(whole, ranks))
            for group in self.param_groups
            for kind, params, whole in self._wholes(group["orthogonal"], group["params"], ranks)
        ]
        gathered = []
        for is_matrix, params, whole, share, arrived in reduced:
            arrived.wait()
            kept = self._updated(params[0], share, is_matrix=is_matrix)
            if ranks > 1 and share.numel() < whole.numel():
                work = dist.all_gather_into_tensor(whole if is_matrix else params[0], kept, async_op=True)
                gathered.append(work.get_future())
        for arrived in gathered:
            arrived.wait()

    def _wholes(self, is_matrix: bool, params: list[Any], ranks: int) -> Iterator[tuple[bool, list[Any], torch.Tensor]]:
        """Yield what is reduced at once: a gradient, or those of matrices of one shape, stacked."""
        if not is_matrix:
            yield from ((False, [p], p.grad) for p in params)
            return
        padded = math.ceil(len(params) / ranks) * ranks
        whole = params[0].new_empty(padded, *params[0].shape)
        whole[: len(params)].copy_(torch.stack([p.grad for p in params]))
        yield True, params, whole

    def _updated(self, p: torch.Tensor, share: torch.Tensor, *, is_matrix: bool) -> torch.Tensor:
        """Update the averages by this rank's share, and return what it gives to the others."""
        state = self.state[p]
        if not state:
            second = (1,)
            if is_matrix:
                count, rows, columns = share.shape
                second = (count, rows, 1) if rows >= columns else (count, 1, columns)  # type: ignore[assignment]
            state.update(m=torch.zeros_like(share), v=share.new_zeros(second) if is_matrix else torch.zeros_like(share))
        state["m"].lerp_(share, 0.1)
        return torch.empty_like(share) if is_matrix else p.view(-1)[: share.numel()].view_as(share)


def reduced_to_share(whole: torch.Tensor, ranks: int) -> tuple[torch.Tensor, torch.futures.Future[Any]]:
    """Return this rank's share of a gradient, and the future of its reduction; small ones are reduced as they are."""
    if ranks == 1:
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(None)
        return whole, done
    if whole.numel() < 1024:
        return whole, dist.all_reduce(whole, async_op=True).get_future()
    share = torch.empty_like(whole[: whole.shape[0] // ranks])
    return share, dist.reduce_scatter_tensor(share, whole, async_op=True).get_future()


def main() -> None:
    """Train some steps."""
    parser = argparse.ArgumentParser()
    for name, default in (("layers", 8), ("vocabulary", 8192), ("batch-size", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    chosen = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("nccl")
    torch.set_float32_matmul_precision("high")
    network = Network(chosen.layers, chosen.vocabulary).cuda()
    matrices = list(network.blocks.parameters())
    others = [p for p in network.parameters() if all(p is not one for one in matrices)]
    shapes = sorted({p.shape for p in matrices})
    groups = [{"params": others, "orthogonal": False}]
    groups += [{"params": [p for p in matrices if p.shape == shape], "orthogonal": True} for shape in shapes]
    optimizer = Muon(groups, {})
    compiled = torch.compile(network, dynamic=False)
    both = torch.empty(2 * chosen.batch_size * LENGTH, dtype=torch.long, device="cuda")
    tokens, targets = both.view(2, chosen.batch_size, LENGTH)
    for _ in range(3):
        for _ in range(2):
            both.random_(chosen.vocabulary)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = compiled(tokens, targets)
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()  # as they do, to time the step: gradients of the one before are let go in the next


if __name__ == "__main__":
    main()
