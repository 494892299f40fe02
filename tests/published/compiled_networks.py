"""Compiled training of networks of the catalog, as the programs do that others have measured.

`python tests/published/compiled_networks.py vit-h-14` is torchao's benchmarks/benchmark_low_bit_adam.py, with
`--optimizer AdamW8bit` and others of torchao's, which compile their update, and with bitsandbytes' (`bnb`); `vit-g` is
that with DINOv2's largest network in bfloat16, each block a checkpoint;
`llama-2-1b` is torchao's benchmarks/quantized_training/pretrain_llama2.py, whose data set is on the GPU;
`llama-3.2-3b`, with and without `--chunked`, torchtune's full_finetune_single_device.py: each layer compiled. In a loss
over eight pieces of the sequence the pieces' is compiled, too; a whole one is not (`compile_loss` in
torchtune/training/_compile.py returns it compiled, and the recipe drops what it returns).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpumem_tui.catalog.loader import find_model
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.workload.models import build_model

CHUNKS = 8

TINY_STORIES = 585_815_000
"""Tokens of two bytes: TinyStoriesV2-GPT4-train.txt by Llama 2's tokenizer. Its 2.23 GB were not counted: this is what
torchao's README at 8c6b4f97c has more, not compiled, than the eager trace: 11.06847 GB for 9.89684."""


def built(name: str, recipe: Recipe, **changes: int) -> nn.Module:
    """Build a network on the GPU, without filling it."""
    with torch.device("meta"):
        model = build_model(replace(find_model(name), **changes), recipe)  # type: ignore[arg-type]
    return model.to_empty(device="cuda")


def vision() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Classify images, under autocast; the loss is not compiled."""
    model = built("vit-h-14", Recipe("amp-bf16"), classes=45)
    compiled: Any = torch.compile(model)

    def loss() -> torch.Tensor:
        images, labels = torch.randn(8, 3, 224, 224, device="cuda"), torch.zeros(8, dtype=torch.long, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(compiled(images), labels)

    return model, loss


class Block(nn.Module):
    """One of DINOv2's blocks: attention and a gated network, both scaled."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * inner), nn.Linear(inner, width)
        self.scale1, self.scale2 = (nn.Parameter(torch.ones(width)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run both."""
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, length, width)
        x = x + self.proj(mixed) * self.scale1
        gate, value = self.up(self.norm2(x)).chunk(2, -1)
        found: torch.Tensor = x + self.down(F.silu(gate) * value) * self.scale2
        return found


class Giant(nn.Module):
    """timm's vit_giant_patch14_dinov2 for images of 224 pixels and 45 classes."""

    def __init__(self, width: int = 1536, layers: int = 40) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 14, 14)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, 257, width))
        self.blocks = nn.ModuleList(Block(width, 24, 4096) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 45)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores of classes."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x)[:, 0])  # type: ignore[no-any-return]


def giant() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Classify images in bfloat16; the loss is not compiled."""
    with torch.device("meta"):
        model: nn.Module = Giant().bfloat16()
    assert sum(part.numel() for part in model.parameters()) == 1_134_838_829
    model = model.to_empty(device="cuda")
    model.compile(fullgraph=True)

    def loss() -> torch.Tensor:
        images = torch.randn(32, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
        return F.cross_entropy(model(images), torch.zeros(32, dtype=torch.long, device="cuda"))

    return model, loss


def pretrained() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Train on a piece of a data set that the GPU holds; each block is a checkpoint, network and loss one graph."""
    shape = {"layers": 24, "hidden": 1536, "heads": 24, "kv_heads": 24, "ffn": 6144}
    model = built("llama-2-7b", Recipe("bf16", recompute="full"), **shape).bfloat16()
    stories = torch.zeros(TINY_STORIES, dtype=torch.uint16, device="cuda")

    @torch.compile
    def loss_of(words: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(words)[:, :-1].float().flatten(0, 1), words[:, 1:].flatten())

    return model, lambda: loss_of(stories[: 4 * 2048].view(4, 2048).long())


def optimizer_of(name: str, weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW, torch's own without a name."""
    if not name:
        return torch.optim.AdamW(weights, fused=True)
    library: Any = import_module("bitsandbytes.optim" if name == "bnb" else "torchao.optim")
    made: torch.optim.Optimizer = getattr(library, "AdamW8bit" if name == "bnb" else name)(weights)
    return made


def updated_in_backward(weight: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    """Have a weight updated as its gradient is there, which goes then."""

    def update(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    weight.register_post_accumulate_grad_hook(update)


def language(*, chunked: bool, recompute: bool, offloads: bool) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Train on packed sequences in bfloat16."""
    model: Any = built("llama-3.2-3b", Recipe("bf16"), seq_len=4096).to(torch.bfloat16)
    for block in model.blocks:
        block.compile()

    @torch.compile
    def loss_of(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="sum")

    whole = nn.CrossEntropyLoss()

    def loss() -> torch.Tensor:
        words, wanted = torch.zeros(2, 2, 4096, dtype=torch.long, device="cuda")
        x = model.token_embedding(words)
        cos, sin = model.rotary(x)
        with torch.autograd.graph.save_on_cpu(pin_memory=True) if offloads else nullcontext():
            for block in model.blocks:
                x = checkpoint(block, x, cos, sin, use_reentrant=False) if recompute else block(x, cos, sin)
        x = model.norm(x)
        if not chunked:
            logits = model.head(x).float()
            return whole(logits.flatten(0, 1), wanted.flatten())  # type: ignore[no-any-return]
        pieces = [model.head(piece) for piece in x.chunk(CHUNKS, 1)]
        return sum(map(loss_of, pieces, wanted.chunk(CHUNKS, 1)), torch.zeros((), device="cuda"))

    return model, loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=("vit-h-14", "vit-g", "llama-2-1b", "llama-3.2-3b"))
    parser.add_argument("--chunked", action="store_true")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--in-backward", action="store_true")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--optimizer", default="")
    asked = parser.parse_args()
    llama = partial(language, chunked=asked.chunked, recompute=asked.recompute, offloads=asked.offload)
    makes: dict[str, Callable[[], Any]] = {
        "vit-h-14": vision, "vit-g": giant, "llama-2-1b": pretrained, "llama-3.2-3b": llama,
    }  # fmt: skip
    network, step = makes[asked.model]()
    if asked.in_backward:
        for weight in network.parameters():
            updated_in_backward(weight, optimizer_of(asked.optimizer, [weight]))
    else:
        optimizer = optimizer_of(asked.optimizer, network.parameters())
    for _ in range(10):
        step().backward()
        if not asked.in_backward:
            optimizer.step()
            optimizer.zero_grad()
