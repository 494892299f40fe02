"""An error of a program's own functions in backward is one line, with the line that raised."""

from __future__ import annotations

import pytest

from tests.command.running import Project

HEAD = """
import torch
from torch import nn

net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def check(*given):
    raise ValueError("a bad gradient")


def forward(values):
    if torch._C._current_graph_task_id() != -1:
        check()
    return net(values)


"""


@pytest.mark.parametrize(
    "step",
    [
        "net[0].weight.register_post_accumulate_grad_hook(check); out = net(torch.randn(4, 8).cuda())",
        "net[1].register_full_backward_hook(check); out = net(torch.randn(4, 8).cuda())",
        "out = torch.utils.checkpoint.checkpoint(forward, torch.randn(4, 8).cuda(), use_reentrant=False)",
    ],
    ids=["parameter", "module", "recomputed"],
)
def test_an_error_in_a_function_that_backward_calls(project: Project, step: str) -> None:
    project.write("train.py", f"{HEAD}\n{step}\nout.sum().backward()\noptimizer.step()\n")
    done = project.predict("python", "train.py")
    assert done.code == 2
    assert done.complaint == "gpumem-tui: train.py:10: ValueError: a bad gradient"
