"""The steps of a program, and steps in parts."""

from __future__ import annotations

import pytest

from tests.command.running import Project

pytestmark = pytest.mark.scripts


def test_updates_by_hand_are_steps(project: Project) -> None:
    """As word_language_model of pytorch/examples: no optimizer, each parameter less its gradient."""
    project.write(
        "train.py",
        """
        import torch

        model = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.ReLU(), torch.nn.Linear(1000, 10)).cuda()
        for step in range(100):
            for part in range(2):
                model(torch.randn(8, 1000, device="cuda")).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-0.1)
            model.zero_grad()
            print("made", step)
        """,
    )
    done = project.predict("python", "train.py")
    buckets = done.json["traced"]["buckets"]
    parameters = 4 * (1000 * 1000 + 1000 + 1000 * 10 + 10)
    assert parameters <= buckets["parameters"] < parameters + 4 * 512
    assert parameters <= buckets["gradients"] < parameters + 4 * 512
    assert "made 2" in done.stderr
    assert "made 3" not in done.stderr
    assert any("no optimizer" in note for note in done.json["traced"]["notes"])


@pytest.mark.parametrize("update", ["torch._foreach_mul_(moments, 0.9)", "moments[0].mul_(0.9)"])
def test_what_updates_by_hand_keep_is_optimizer_state(project: Project, update: str) -> None:
    """As the optimizers of Keras on torch and fastai, some of whose state is written in some steps only.

    Weights' averages are the model's copies; what only has a weight's shape is none of it, be it copied anew each step.
    """
    project.write(
        "train.py",
        f"""
        import copy, torch

        model = torch.nn.Linear(1000, 1000, bias=False).cuda()
        averaged, moments = copy.deepcopy(model), []
        wanted, noise = torch.zeros(1000, 1000).cuda(), torch.randn(1000, 1000, device="cuda")
        for step in range(100):
            wanted.copy_(torch.ones(1000, 1000))
            made = model(torch.randn(8, 1000, device="cuda"))
            ((made - wanted[:8]).square() * noise[:8]).mean().backward()
            with torch.no_grad():
                moments = moments or [torch.zeros_like(model.weight) for _ in range(2)]
                {update}
                model.weight -= moments[0] * model.weight.grad
                averaged.weight.lerp_(model.weight, 0.01)
            model.zero_grad()
        """,
    )
    buckets = project.predict("python", "train.py").json["traced"]["buckets"]
    weights = -(-4 * 1000 * 1000 // 512) * 512
    assert {name: buckets[name] for name in ("parameters", "gradients", "optimizer")} == {
        "parameters": 2 * weights, "gradients": weights, "optimizer": 2 * weights,
    }  # fmt: skip


def test_a_step_in_parts_is_traced_beyond_them(project: Project) -> None:
    project.write(
        "train.py",
        """
        import sys, torch
        from torch import nn

        net = nn.Linear(512, 512).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(10):
            for part in torch.randn(int(sys.argv[1]), 512).cuda().split(16):
                net(part).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    done = project.run(
        "predict", "--gpu", "sim:a100-80gb", "--batch-size", "40", "--", project.python, "train.py", "{batch}"
    )
    assert done.code == 0, done.stderr
    assert "tracing batch 40" in done.stderr
    assert "the largest batch is not known: the step works on 16 samples at a time" in done.stdout


def test_a_program_that_samples_between_steps_is_told_by_those_it_made(project: Project) -> None:
    project.write(
        "train.py",
        """
        import time, torch

        net = torch.nn.Linear(1000, 1000, bias=False).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(10):
            net(torch.randn(8, 1000).cuda()).sum().backward()
            optimizer.step()
            while True:
                time.sleep(0.1)
        """,
    )
    traced = project.predict("python", "train.py", options=("--timeout", "15")).json["traced"]
    assert traced["buckets"]["parameters"] == 4_000_256
    assert any(
        note.startswith("this is of 1 step, not 3: no other came in time; it is at train.py:")
        for note in traced["notes"]
    )


def test_what_grows_with_the_batchs_square_is_searched_by_trials(project: Project) -> None:
    """As the scores of all pairs in open_clip's loss."""
    project.write(
        "train.py",
        """
        import sys, torch

        net = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            images = torch.randn(int(sys.argv[1]), 1 << 26, device="cuda")
            found = net(images[:, :8])
            (found @ found.T).logsumexp(0).sum().backward()
            optimizer.step()
        """,
    )
    done = project.search(
        "python", "train.py", "{batch}", gpu="t4-16gb", options=("--limit", "1GiB", "--strategy", "double")
    )
    assert done.code == 0, done.stderr[-1000:]
    assert done.lines[-1]["verified"]
    assert done.lines[-1]["max_batch_size"] == 1
