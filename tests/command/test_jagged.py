"""Batches of sequences of different lengths in one jagged tensor (`torch.nested`), with attention in them."""

from __future__ import annotations

import pytest

from tests.command.running import Project

pytestmark = pytest.mark.scripts

WEIGHTS_BYTES = 4 * (64 * 3 * 64 + 3 * 64 + 64 * 64 + 64)
TOKENS = 100 + 50 + 200 + 30

TRAINING = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(64, 3 * 64), nn.Linear(64, 64)

        def forward(self, x):
            heads = [one.unflatten(-1, [4, 16]).transpose(1, 2) for one in self.qkv(x).chunk(3, -1)]
            return x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2))

    net = Attention().cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    for step in range(3):
        rows = [torch.randn(length, 64) for length in (100, 50, 200, 30)]
        x = torch.nested.nested_tensor(rows, layout=torch.jagged, device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=%s):
            found = net(x)
        found.values().float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("is_mixed", [False, True], ids=["efficient", "flash"])
def test_attention_of_jagged_tensors(project: Project, is_mixed: bool) -> None:
    project.write("train.py", TRAINING % is_mixed)
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr
    highest = {name: one["bytes"] for name, one in done.json["traced"]["highest"].items()}
    for bucket, times in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
        assert highest[bucket] == pytest.approx(times * WEIGHTS_BYTES, rel=0.02)
    scores_bytes = 4 * 4 * 4 * 200 * 200
    assert TOKENS * 64 * 4 < highest["activations"] < scores_bytes


def test_a_strided_nested_tensor_is_one_line(project: Project) -> None:
    project.write(
        "train.py",
        """
        import torch

        torch.nested.nested_tensor([torch.randn(rows, 8) for rows in (3, 5)], device="cuda")
    """,
    )
    done = project.predict("python", "train.py")
    assert done.code == 2
    assert "write layout=torch.jagged" in done.complaint
    assert "train.py:4" in done.complaint
