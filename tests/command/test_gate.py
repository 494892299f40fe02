"""A memory budget on the command line: what it prints, what it exits with, what it writes and reads again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command.running import Finished, Project

pytestmark = pytest.mark.slow

SCRIPT = """
    import sys
    import torch
    from torch import nn

    width = int(sys.argv[1])
    model = nn.Sequential(nn.Linear(1024, width, bias=False), nn.Linear(width, 1024, bias=False)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        model(torch.randn(64, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
GREW = 2 * 4 * 1024 * 3072
"""By how many bytes the parameters are more at a width of 4,096 than at 1,024."""


@pytest.fixture
def gated(project: Project) -> Project:
    project.write("train.py", SCRIPT)
    return project


def predict(project: Project, width: int, *options: str) -> Finished:
    line = ("--gpu", "sim:a100-40gb", "--quiet", *options, "--", project.python, "train.py", str(width))
    return project.run("predict", *line)


def test_a_budget_is_kept_or_the_exit_code_says_so(gated: Project) -> None:
    within = predict(gated, 1024, "--json", "--budget", "22GiB")
    high = within.json["gate"]["high_bytes"]
    assert within.json["gate"]["is_open"]
    assert within.json["traced"]["parameters"] == 2 * 1024 * 1024
    over = predict(gated, 1024, "--budget", f"{high - 1}B")
    assert over.code == 3
    assert over.stdout.splitlines()[-1].startswith("gate: over the budget of ")


def test_a_baseline_is_written_then_held_against(gated: Project) -> None:
    baseline = ("--baseline", "memory.json")
    first = predict(gated, 1024, *baseline)
    assert first.code == 0
    assert "memory.json: written" in first.stderr
    written = (gated.folder / "memory.json").read_text()
    assert predict(gated, 1024, *baseline).code == 0
    grown = predict(gated, 4096, *baseline, "--markdown")
    assert grown.code == 3
    assert grown.stdout.startswith("### GPU memory: over\n")
    for place in ("parameters", "train.py:7 <module> (parameters)"):
        assert f"| `{place}` | 8.0 MiB | 32.0 MiB | +{GREW >> 20}.0 MiB |" in grown.stdout
    assert predict(gated, 4096, *baseline, "--tolerance", "500%").code == 0
    assert (gated.folder / "memory.json").read_text() == written, "only deleting it accepts new figures"


def test_a_baseline_that_cannot_be_read_is_one_line(gated: Project) -> None:
    Path(gated.folder, "memory.json").write_text(json.dumps({"version": 0}))
    done = predict(gated, 1024, "--baseline", "memory.json")
    assert done.code == 2
    assert "memory.json" in done.complaint
