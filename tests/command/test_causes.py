"""Causes that have a name: what takes the memory, where, and the sentence that says what to do about it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.command.running import Project

MIB = 1 << 20


def causes(project: Project, name: str, *words: str, options: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """The causes that are found in a script of the project, by name."""
    found = project.predict("python", name, *words, options=options).json["traced"]
    assert [cause["sentence"] for cause in found["causes"]] == [
        note for note in found["notes"] if note in {cause["sentence"] for cause in found["causes"]}
    ]
    return {cause["cause"]: cause for cause in found["causes"]}


# Memory that grows

LOOP = """\
    import torch
    from collections import deque
    from torch import nn
    {before}
    net = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 256)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(9):
        out = net(torch.randn(1024, 256, device="cuda"))
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward(retain_graph={retain})
        optimizer.step()
        {after}
"""

CLASS = """
    class Log:
        def __init__(self):
            self.by_name = {"loss": []}

        def put(self, value):
            self.by_name["loss"].append(value)

    log = Log()
"""


@pytest.mark.parametrize(
    ("before", "after", "name", "keeps"),
    [
        ("total = 0.0", "total += loss", "total", "total += loss"),
        ("total = 0.0", "total = total + loss", "total", "total = total + loss"),
        ("losses = []", "losses.append(loss)", "losses", "losses.append(loss)"),
        ("losses = deque(maxlen=100)", "losses.append({'a': loss})", "losses", "losses.append({'a': loss})"),
        ("losses = {}", "losses[step] = loss", "losses", "losses[step] = loss"),
        (CLASS, "log.put(loss)", "self.by_name", 'self.by_name["loss"].append(value)'),
    ],
    ids=["sum", "sum anew", "list", "deque of dicts", "dict", "attribute"],
)
def test_the_statement_that_keeps_graphs_is_named(
    project: Project, before: str, after: str, name: str, keeps: str
) -> None:
    path = project.write("train.py", LOOP.format(before=before, after=after, retain=True))
    leak = causes(project, "train.py")["leak"]
    lines = path.read_text().splitlines()
    assert lines[int(leak["kept_line"].removeprefix("train.py:")) - 1].strip() == keeps
    assert lines[int(leak["line"].removeprefix("train.py:")) - 1].strip().startswith("out = net(")
    assert leak["bytes"] == pytest.approx(1024 * (2048 + 2048 + 256 + 256) * 4, rel=0.5)
    assert f"`{name}` ({leak['kept_line']}) keeps what {leak['line']}" in leak["sentence"]
    assert leak["sentence"].endswith("by its graph; keep a number (`.item()`) or what has no graph (`.detach()`)")


def test_what_keeps_tensors_themselves_is_told_from_what_keeps_their_graph(project: Project) -> None:
    project.write("train.py", LOOP.format(before="outputs = []", after="outputs.append(out.detach())", retain=False))
    leak = causes(project, "train.py")["leak"]
    assert leak["bytes"] == MIB
    assert leak["sentence"].endswith("; keep a copy on the host (`.cpu()`), or drop it")


@pytest.mark.parametrize("after", ["pass", "losses.append(loss)", "losses.append(loss.item())"])
def test_no_leak_where_backward_releases_the_graph(project: Project, after: str) -> None:
    project.write("train.py", LOOP.format(before="losses = []", after=after, retain=False))
    assert "leak" not in causes(project, "train.py")


def test_the_first_line_says_for_how_many_steps_it_fits(project: Project) -> None:
    project.write("train.py", LOOP.format(before="total = 0.0", after="total += loss", retain=True))
    leak = causes(project, "train.py")["leak"]
    done = project.run("predict", "--gpu", "sim:a100-80gb", "--", project.python, "train.py")
    first, *_, last = done.stdout.splitlines()
    assert f" fits for about {leak['steps_left']:,} steps" in first
    assert last == leak["sentence"]
    assert leak["steps_left"] * leak["bytes"] == pytest.approx(79 << 30, rel=0.02)
