"""The compiled GPT-2 of rasbt/LLMs-from-scratch, ch05/10_llm-training-speed, as its 01_opt_single_gpu.py trains it."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

LENGTH, WIDTH, HEADS, LAYERS, DROPOUT = 1024, 768, 12, 12, 0.1


class Attention(nn.Module):
    """Attention of one projection for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend causally."""
        rows, length, _ = x.shape
        qkv = self.qkv(x).view(rows, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        queries, keys, values = qkv
        dropout = DROPOUT if self.training else 0.0
        found = F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        return self.proj(found.transpose(1, 2).contiguous().view(rows, length, WIDTH))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a feed-forward network, each with a shortcut around it."""

    def __init__(self) -> None:
        super().__init__()
        self.att = Attention()
        self.ff = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH))
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run both."""
        x = x + self.drop(self.att(self.norm1(x)))
        found: torch.Tensor = x + self.drop(self.ff(self.norm2(x)))
        return found


class Gpt(nn.Module):
    """GPT-2 small without tied embeddings."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        positions = self.pos_emb(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(self.drop(self.tok_emb(tokens) + positions))))  # type: ignore[no-any-return]


def loss_of(model: nn.Module, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the loss, and let go of the logits."""
    logits = model(tokens.to("cuda"))
    return F.cross_entropy(logits.flatten(0, 1), wanted.to("cuda").flatten())


def benchmark(rows: int, inner: int, columns: int) -> None:
    """Take what torch 2.6's `_should_pad_bench` and triton's `do_bench` do, and give it back.

    The product of random operands and that of padded ones are run, next to a buffer of 256 MiB by which the cache is
    emptied.
    """
    left = torch.randn(rows, inner, dtype=torch.bfloat16, device="cuda")
    right = torch.randn(inner, columns, dtype=torch.bfloat16, device="cuda")

    def padded() -> torch.Tensor:
        more = [-size % 8 for size in (rows, inner, columns)]
        wide = F.pad(left, (0, more[1], 0, more[0])) if more[0] or more[1] else left
        high = F.pad(right, (0, more[2], 0, more[1])) if more[1] or more[2] else right
        return (wide @ high)[:rows, :columns]

    for product in (partial(torch.matmul, left, right), padded):
        product()
        cache = torch.empty(256 * 1024 * 1024 // 4, dtype=torch.int, device="cuda")
        product()
        del cache


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--benchmarked", action="store_true")
    arguments = parser.parse_args()
    compiled: Any = torch.compile(Gpt(arguments.vocabulary))
    trained: nn.Module = compiled.to("cuda").to(torch.bfloat16)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=5e-4, weight_decay=0.1, fused=True)
    if arguments.benchmarked:
        sizes = (arguments.batch_size * LENGTH, WIDTH, arguments.vocabulary)
        for turn in range(3):  # the product of forward and the two of backward
            benchmark(*sizes[turn:], *sizes[:turn])
    for _ in range(10):
        optimizer.zero_grad()
        batch = torch.zeros(2, arguments.batch_size, LENGTH, dtype=torch.long)
        loss_of(trained, *batch).backward()
        optimizer.step()
