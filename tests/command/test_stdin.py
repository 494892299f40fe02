"""The standard input of scripts."""

from __future__ import annotations

import pytest

from tests.command.running import Project

pytestmark = pytest.mark.scripts

SCRIPT = """
import torch
model = torch.nn.Linear(1000, 1000).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    model(torch.randn(8, 1000).cuda()).sum().backward()
    optimizer.step()
"""


def test_a_progress_bar_that_asks_stty_for_the_width(project: Project) -> None:
    project.write("train.py", f"import os\nrows, columns = os.popen('stty size').read().split()\n{SCRIPT}")
    assert project.predict("python", "train.py").json["traced"]["buckets"]["parameters"] >= 4 * 1000 * 1001


def test_every_trial_gets_the_program_that_was_piped_in(project: Project) -> None:
    program = SCRIPT.replace("randn(8,", "randn(int(__import__('sys').argv[1]),")
    command = (project.python, "-", "{batch}")
    options = ("--json", "--gpu", "sim:a100-80gb", "--limit", "256MiB", "--")
    done = project.run("search", *options, *command, piped=program)
    assert done.code == 0, done.stderr
    assert done.lines[-1]["verified"]
    assert done.lines[-1]["max_batch_size"] > 1000


def test_a_question_finds_nobody(project: Project) -> None:
    project.write("train.py", "import torch\ninput('resume? ')\n")
    done = project.predict("python", "train.py")
    assert done.code == 2
    assert done.complaint.startswith("gpumem-tui: train.py:2: the command asks for input")
