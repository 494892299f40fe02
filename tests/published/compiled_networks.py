"""Compiled training of networks of the catalog, as the programs do that others have measured.

`python tests/published/compiled_networks.py vit-h-14` is torchao's benchmarks/benchmark_low_bit_adam.py, with
`--optimizer AdamW8bit` and others of torchao's, which compile their update, and with bitsandbytes' (`bnb`);
`llama-3.2-3b`, with and without `--chunked`, torchtune's full_finetune_single_device.py: each layer compiled. Of a loss
over eight pieces of the sequence the pieces' is compiled, too; a whole one is not (`compile_loss` in
torchtune/training/_compile.py returns it compiled, and the recipe drops what it returns).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gpumem_tui.catalog.loader import find_model
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.workload.models import build_model

CHUNKS = 8


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


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW, torch's own without a name."""
    if not name:
        return torch.optim.AdamW(model.parameters(), fused=True)
    library: Any = import_module("bitsandbytes.optim" if name == "bnb" else "torchao.optim")
    made: torch.optim.Optimizer = getattr(library, "AdamW8bit" if name == "bnb" else name)(model.parameters())
    return made


def language(*, chunked: bool) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
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
        for block in model.blocks:
            x = block(x, cos, sin)
        x = model.norm(x)
        if not chunked:
            logits = model.head(x).float()
            return whole(logits.flatten(0, 1), wanted.flatten())  # type: ignore[no-any-return]
        pieces = [model.head(piece) for piece in x.chunk(CHUNKS, 1)]
        return sum(map(loss_of, pieces, wanted.chunk(CHUNKS, 1)), torch.zeros((), device="cuda"))

    return model, loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=("vit-h-14", "llama-3.2-3b"))
    parser.add_argument("--chunked", action="store_true")
    parser.add_argument("--optimizer", default="")
    asked = parser.parse_args()
    network, step = vision() if asked.model == "vit-h-14" else language(chunked=asked.chunked)
    optimizer = optimizer_of(asked.optimizer, network)
    for _ in range(10):
        step().backward()
        optimizer.step()
        optimizer.zero_grad()
