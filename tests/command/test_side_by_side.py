"""Runs of one command that continue at the same time, and those that cannot."""

from __future__ import annotations

import os
import re
from contextlib import closing

import psutil
import pytest

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.run.control import Control, SideBySide, Terms, has_room_for_two
from gpumem_tui.run.events import Ready, TraceDone, TraceRequest
from gpumem_tui.workload.command import Command
from gpumem_tui.workload.spec import WorkloadSpec
from tests.command.running import Finished, Project
from tests.waiting import wait_until_gone

pytestmark = pytest.mark.skipif(not has_room_for_two(), reason="one processor, or too little memory for two processes")

_TRAINING = """
import atexit, os, sys
import torch
batch_size = int(sys.argv[1])
model = torch.nn.Linear(1024, 4096).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    model(torch.randn(batch_size, 4096, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_LARGEST = 103

_MEETING = """
with open("pipe", "r" if batch_size % 2 else "w"):
    pass
"""
"""Opening one end of a pipe waits for another process that opens the other end (fifo(7))."""

_EXCLUSIVE = """
import time
try:
    os.mkdir("taken")
except FileExistsError:
    open("refused", "w").close()
    raise RuntimeError("another run trains here")
atexit.register(os.rmdir, "taken")
while not os.path.exists("refused"):
    time.sleep(0.01)
"""
"""Whichever run is first waits until another one has found the folder taken, for which that one ends."""


def _searched(project: Project, *parts: str) -> Finished:
    lines = _TRAINING.splitlines(keepends=True)
    project.write("train.py", "".join([*lines[:4], *parts, *lines[4:]]))
    return project.search("python", "train.py", "{batch}", gpu="t4-16gb", options=("--timeout", "60"))


def test_traces_and_trials_of_a_command_go_on_two_at_a_time(project: Project) -> None:
    """Each run waits for the next one to be there: both traces do, and so do the trials of what fits and what not."""
    os.mkfifo(project.folder / "pipe")
    found = _searched(project, _MEETING).lines
    assert found[-1]["max_batch_size"] == _LARGEST
    assert [(one["batch_size"], one["outcome"]) for one in found if one["event"] == "trial"] == [
        (_LARGEST, "fit"), (_LARGEST + 1, "oom"),
    ]  # fmt: skip


def test_what_fails_beside_another_run_is_run_alone(project: Project) -> None:
    found = _searched(project, _EXCLUSIVE)
    assert (project.folder / "refused").exists()
    assert found.lines[-1]["max_batch_size"] == _LARGEST
    assert all(one["outcome"] != "error" for one in found.lines if one["event"] == "trial")


def test_a_run_that_began_ahead_ends_with_who_listens_to_it(project: Project) -> None:
    project.write("train.py", _TRAINING + "if batch_size > 1:\n    open('pipe').close()\n")
    os.mkfifo(project.folder / "pipe")
    command = Command((project.python, "train.py", "{batch}"), str(project.folder))
    workload = WorkloadSpec(Recipe(), command=command)
    one, two = (TraceRequest(workload, find_gpu("t4-16gb"), 30, size) for size in (1, 2))
    others = psutil.Process().children()  # of the tests that this process has run before
    with closing(SideBySide(Terms(project.python), Control())) as runner:
        assert any(isinstance(event, TraceDone) for event in runner.converse(one, two))
        began = [process for process in psutil.Process().children() if process not in others]
        listening = runner.converse(two)
        assert isinstance(next(listening), Ready)
        assert began
        listening.close()  # type: ignore[attr-defined]
        wait_until_gone([process.pid for process in began])


_MENTIONED = "# torch.compile would add rows up by eights\n" + _TRAINING.replace(
    "for _ in", "sums = torch.empty(batch_size * HALVES // 2, dtype=torch.uint8, device='cuda')\nfor _ in"
)


@pytest.mark.parametrize(("halves", "most"), [(1, 1000), (257, 1000), (1, 10)])
def test_a_script_that_compiles_is_traced_at_sizes_that_are_alike(project: Project, halves: int, most: int) -> None:
    """Their line leads to the largest batch though some grow by half bytes; a program may have fewer samples.

    Within one of the allocator's blocks that is no growth, and the line predicts.
    """
    limit = f"assert batch_size <= {most}\n"
    project.write("train.py", _MENTIONED.replace("HALVES", str(halves)).replace("model =", f"{limit}model =", 1))
    found = project.search("python", "train.py", "{batch}", gpu="t4-16gb", options=("--timeout", "60"))
    traced = re.findall(r"^tracing batch (\d+)$", found.stderr, re.M)
    if most < 24:
        assert traced[:2] == ["16", "2"]
        return
    assert found.lines[-1]["max_batch_size"] == _LARGEST
    assert ("unavailable" in found.lines[-1]["traced"]) == (halves > 1)
    trials = [one["batch_size"] for one in found.lines if one["event"] == "trial"]
    assert (traced, trials) == (["16", "24"], [_LARGEST, _LARGEST + 1])
