"""Children that are forked and train publish for themselves."""

from __future__ import annotations

import pytest

from tests.probe.watched import SCRIPTS, Run, run
from tests.sharing import made_once

PROGRAM = """
import os, runpy, torch

torch.ones(1).requires_grad_().sum().backward()
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])  # which never steps
print("before", os.path.exists({directory!r}), flush=True)
runpy.run_path({script!r}, run_name="__main__")
"""
"""The parent, which has torch, computes gradients and has an optimizer, and does not train."""


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("forked") / "published"
    program = PROGRAM.format(directory=str(directory), script=str(SCRIPTS / "forked.py"))
    done = made_once(tmp_path_factory, "forked", lambda: run(["-c", program], directory))
    assert (done.code, done.errors) == (0, "")
    return done


@pytest.mark.parametrize("name", ["worker", "daemon"])
def test_a_forked_child_that_trains_publishes_its_own_bytes(name: str, forked: Run) -> None:
    """Parameters, gradients and momentum are as many bytes each as the script counts."""
    _, pid, counted = next(line.split() for line in forked.output.splitlines() if line.startswith(name))
    [found] = [found for found in forked.published if found.header.process.pid == int(pid)]
    trained = found.records[0]
    assert [trained.parameters_bytes, trained.gradients_bytes, trained.optimizer_bytes] == [int(counted)] * 3
    assert (found.last.step, found.last.phase) == (3, "")
    assert found.header.ended_ns > 0


def test_who_does_not_train_publishes_nothing(forked: Run) -> None:
    assert "before False" in forked.output.splitlines()
    assert len(forked.published) == 2
