"""A change that a plan makes to a command gives, to the byte, what the same change written into the script gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.command.running import BLOCK, Project

pytestmark = pytest.mark.scripts

SCRIPT = (
    """
    import sys
    from contextlib import nullcontext

    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint

    changed = sys.argv[1] if len(sys.argv) > 1 else ""
    WIDTH, CLASSES = 256, 8192


"""
    + BLOCK
    + """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(CLASSES, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            x = self.embed(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if changed == "checkpointing" else block(x)
            return self.head(x)


    class InPieces(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, target):
            ctx.save_for_backward(logits, target)
            losses = [F.cross_entropy(a, b, reduction="sum") for a, b in zip(logits.chunk(8), target.chunk(8))]
            return torch.stack(losses).sum()

        @staticmethod
        def backward(ctx, gradient):
            logits, target = ctx.saved_tensors
            found = torch.empty_like(logits)
            for part, wanted, place in zip(logits.chunk(8), target.chunk(8), found.chunk(8)):
                with torch.enable_grad():
                    part = part.detach().requires_grad_()
                    loss = F.cross_entropy(part, wanted, reduction="sum")
                    place.copy_(torch.autograd.grad(loss, part, gradient)[0])
            return found, None


    def loss_of(logits, target):
        if changed == "chunked-loss":
            return InPieces.apply(logits, target) / (target != -100).sum()
        return F.cross_entropy(logits, target)


    model = Model().to("cuda")
    if changed == "compile":
        model.compile()
    options = {"fused": {"fused": True}, "no-foreach": {"foreach": False}}.get(changed, {})
    if changed == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    elif changed == "sgd-momentum":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    elif changed == "adafactor":
        optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    while True:
        x = torch.randint(0, CLASSES, (512,), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16) if changed == "autocast" else nullcontext():
            loss = loss_of(model(x), x)
        optimizer.zero_grad(set_to_none=changed == "set-to-none")
        loss.backward()
        optimizer.step()
"""
)
BY_HAND = (
    "checkpointing", "autocast", "adafactor", "sgd-momentum", "sgd", "chunked-loss", "set-to-none", "fused",
    "no-foreach", "compile",
)  # fmt: skip


TOGETHER = (
    ("checkpointing", "autocast", "chunked-loss"),
    ("adamw-8bit", "adafactor", "sgd-momentum", "sgd"),
    ("set-to-none", "fused", "no-foreach"),
    ("compile",),
)
"""Changes tried in one plan each."""

Rows = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Every change to the script as it is, by key."""
    project = Project(tmp_path_factory.mktemp("planned"))
    project.write("train.py", SCRIPT)
    rows: Rows = {}
    for changes in TOGETHER:
        options = tuple(word for change in changes for word in ("--what-if", change))
        body = project.plan("python", "train.py", options=("--quiet", *options)).json
        peak = body["traced"]["peak_allocated_bytes"]
        rows |= {row["key"]: {**row, "peak_before": peak} for row in body["techniques"]}
    return rows


@pytest.mark.parametrize("change", BY_HAND)
def test_it_is_what_the_same_change_by_hand_gives(tried: Rows, change: str, tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.write("train.py", SCRIPT)
    by_hand = project.predict("python", "train.py", change).json["traced"]
    row = tried[change]
    assert row["source"] == "traced"
    assert row["peak_bytes"] == by_hand["peak_allocated_bytes"]
    if change != "chunked-loss":  # what is reserved depends on the order of frees too, and two loops are not one
        assert row["peak_reserved_bytes"] == by_hand["peak_reserved_bytes"]
    assert row["peak_bytes"] + row["saved_bytes"] == row["peak_before"]


def test_what_is_compiled_is_tried_eager_and_not_compiled_again(tmp_path: Path) -> None:
    project = Project(tmp_path)
    long = SCRIPT.replace("F.gelu(self.up(x))", "F.gelu(self.up(x)).sin().exp().tanh()").replace("(512,)", "(8192,)")
    project.write("train.py", long)
    options = ("--quiet", "--what-if", "eager", "--what-if", "compile")
    peaks, changed = [], []
    for words in ((), ("compile",)):
        body = project.plan("python", "train.py", *words, options=options).json
        peaks.append(body["traced"]["peak_allocated_bytes"])
        rows = [row for row in body["techniques"] if row["key"] in ("compile", "eager")]
        changed.append([(row["key"], row["peak_bytes"]) for row in rows])
    eager, compiled = peaks
    assert compiled < eager
    assert changed == [[("compile", compiled)], [("eager", eager)]]


def test_8_bit_adamw_keeps_two_bytes_a_value_and_two_scales_a_block(tried: Rows) -> None:
    quantized = [8192 * 256] * 2 + [1024 * 256] * 8 + [8192]
    small = [1024] * 4 + [256] * 4
    scales = sum(2 * _rounded(4 * values // 256) for values in quantized)
    maps = 2 * 4 * 256
    expected = sum(2 * values for values in quantized) + scales + sum(2 * 4 * values for values in small) + maps
    row = tried["adamw-8bit"]
    assert row["source"] == "traced"
    assert row["buckets"]["optimizer"] == expected


def _rounded(size_bytes: int) -> int:
    """As the caching allocator does."""
    return -(-size_bytes // 512) * 512


def test_the_progress_of_the_runs_is_told(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.write("train.py", SCRIPT)
    done = project.plan("python", "train.py", options=("--what-if", "set-to-none"))
    assert "what-if 1 of 1: gradients set to None (about " in done.stderr
    assert [row["key"] for row in done.json["techniques"] if row["source"] == "traced"] == ["set-to-none"]
