"""Advice is a complete line: it is typed as it is, in the folder that it was given in, and answers."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.command.running import Project

SCRIPT = """
import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--name", default="")
parser.add_argument("--bs", type=int, default=4)
options = parser.parse_args()
model = torch.nn.Linear(4096, 4096).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(options.bs, 4096, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("given", [("--bs", "8", "--name", "a run"), ("--name", "a run")])
def test_the_line_that_predict_offers_finds_the_largest_batch(project: Project, given: tuple[str, ...]) -> None:
    project.write("train.py", SCRIPT)
    options = ("--quiet", "--gpu", "sim:t4-16gb", "--limit", "1GiB")
    done = project.run("predict", *options, "--", project.python, "train.py", *given)
    first = done.stdout.partition("\n")[0]
    assert re.match(r"(Batch 8|Its own batch) fits on NVIDIA T4 limited to 1\.00 GiB: ", first)
    offered = re.search(r"Largest batch: `(.*)`$", first)
    assert offered is not None, first
    program, *typed = shlex.split(offered[1])
    assert program == "gpumem-tui"
    assert typed[0] == "search"
    found = project.run(typed[0], "--plain", *typed[1:])
    assert found.code == 0, found.stderr
    answer, to_run = found.stdout.splitlines()[:2]
    said = re.match(r"Safe batch ([\d,]+) on simulated NVIDIA T4 limited to 1\.00 GiB", answer)
    assert said is not None, answer
    safe = said[1].replace(",", "")
    again = re.match(r"To run: (.*)$", to_run)
    assert again is not None
    assert f"--bs {safe}" in again[1]
    ran = project.run("predict", *options, "--", *shlex.split(again[1]))
    assert ran.stdout.startswith(f"Batch {safe} fits on NVIDIA T4 ")


def test_the_line_that_a_refused_search_offers_is_taken(project: Project) -> None:
    project.write("train.py", SCRIPT)
    arguments = ("--plain", "--quiet", "--gpu", "sim:t4-16gb", "--limit", "1GiB", "--", project.python, "train.py")
    refused = project.run("search", *arguments)
    assert refused.code == 2
    offered = re.search(r"`gpumem-tui (search .*)`$", refused.complaint)
    assert offered is not None, refused.complaint
    verb, *typed = shlex.split(offered[1])
    assert project.run(verb, "--plain", *typed).stdout.startswith("Safe batch ")


def test_the_line_that_predict_offers_where_a_batch_is_too_large_plans_it(project: Project) -> None:
    project.write("train.py", SCRIPT)
    options = ("--quiet", "--gpu", "sim:t4-16gb")
    done = project.run("predict", *options, "--", project.python, "train.py", "--bs", "900000")
    first = done.stdout.partition("\n")[0]
    assert first.startswith("Batch 900000 does not fit on NVIDIA T4: needs ")
    offered = re.search(r"To make it fit: `gpumem-tui (plan .*)`$", first)
    assert offered is not None, first
    verb, *typed = shlex.split(offered[1])
    planned = project.run(verb, "--plain", "--no-what-if", *typed)
    assert planned.stdout.startswith("Batch 900,000 does not fit on NVIDIA T4: needs "), planned.stderr
