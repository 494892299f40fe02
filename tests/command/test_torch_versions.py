"""Each version of torch that is promised traces a plain command, one that trains as Trainer does, and a search.

The interpreters are named by the environment, separated as those of PATH are::

    GPUMEM_TUI_PYTHONS=/venvs/torch-2.6/bin/python:/venvs/torch-2.15/bin/python pytest -m versions -n 0
"""

from __future__ import annotations

import os

import pytest

from tests.command.running import Project

PYTHONS = [path for path in os.environ.get("GPUMEM_TUI_PYTHONS", "").split(os.pathsep) if path]
pytestmark = [
    pytest.mark.versions,
    pytest.mark.skipif(not PYTHONS, reason="GPUMEM_TUI_PYTHONS names no interpreter"),
    pytest.mark.parametrize("python", PYTHONS),
]

PLAIN = """
    import torch

    model = torch.nn.LSTM(64, 128, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.zeros(8, 4, 64, device="cuda"))[0].sum().backward()
        optimizer.step()
"""

LIKE_TRAINER = """
    import sys
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    model = nn.Sequential(nn.Embedding(512, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, 512)).cuda()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
    rows = torch.utils.data.DataLoader(torch.randint(0, 512, (4096, 33)), int(sys.argv[1]), pin_memory=True)
    for step, batch in enumerate(rows):
        tokens = batch.to("cuda", non_blocking=True)
        with torch.autocast("cuda", torch.float16):
            scores = model(tokens[:, :-1]).flatten(0, 1)
            loss = nn.functional.cross_entropy(scores, tokens[:, 1:].flatten()) / 4
        scaler.scale(loss).backward()
        if step % 4 == 3:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            with torch.inference_mode():
                model(tokens[:1, :-1]).argmax(-1).tolist()
"""


def test_a_plain_command_is_traced(project: Project, python: str) -> None:
    project.write("train.py", PLAIN)
    traced = project.run("predict", "--json", "--gpu", "sim:a100-40gb", "--", python, "train.py").json["traced"]
    assert traced["parameters"] == 4 * 128 * (64 + 128 + 2) + 4 * 128 * (128 + 128 + 2)
    assert traced["buckets"]["gradients"] == traced["buckets"]["parameters"] >= 4 * traced["parameters"]


def test_one_that_trains_as_trainer_does_is_traced(project: Project, python: str) -> None:
    project.write("train.py", LIKE_TRAINER)
    done = project.run("predict", "--json", "--gpu", "sim:a100-40gb", "--", python, "train.py", "8")
    buckets = done.json["traced"]["buckets"]
    assert buckets["optimizer"] >= 2 * buckets["parameters"] > 0


COMPILED = """
    import torch
    from torch.nn import functional as F

    layer = torch.nn.Linear(256, 256).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    @torch.compile
    def loss(x):
        return F.dropout(F.gelu(layer(x)), 0.5).float().square().mean()

    for _ in range(3):
        loss(torch.ones(65536, 256, device="cuda")).backward()
        optimizer.step()
"""


def test_what_it_compiles_is_compiled(project: Project, python: str) -> None:
    """The gradient of a dropout's result is never there, nor what `square` keeps."""
    project.write("train.py", COMPILED)
    predict = ("predict", "--json", "--gpu", "sim:a100-40gb", "--")
    compiled = project.run(*predict, python, "train.py").json["traced"]
    project.write("train.py", COMPILED.replace("@torch.compile", ""))
    eager = project.run(*predict, python, "train.py").json["traced"]
    assert any("1 graph compiled" in note for note in compiled["notes"])
    assert compiled["peak_allocated_bytes"] < 0.75 * eager["peak_allocated_bytes"]


def test_a_search_of_a_model_ends_between_two_sizes(project: Project, python: str) -> None:
    done = project.run("search", "--json", "--gpu", "sim:rtx-4090-24gb", "--model", "gpt2", "--python", python)
    result = done.lines[-1]
    assert result["verified"]
    assert result["first_failing"] == result["max_batch_size"] + 1
