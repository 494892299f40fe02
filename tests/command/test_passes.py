"""A command with ``{accumulation}``: the passes that reach a target differ by batch size, and one trace has all."""

from __future__ import annotations

from tests.command.running import Project

SCRIPT = """
    import sys
    import torch
    from torch import nn

    size, passes = map(int, sys.argv[1:3])
    net = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(4):
        held = [torch.zeros(size, 512, 1024, device="cuda") for _ in range(passes)]
        for one in held:
            net(one).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_step_that_holds_all_its_passes_has_a_largest_batch(project: Project) -> None:
    """The batch asked for is traced with its own passes, and all sizes together with two."""
    project.write("train.py", SCRIPT)
    options = ("--gpu", "sim:t4-16gb", "--json", "--batch-size", "4", "--target-batch", "20")
    words = (project.python, "train.py", "{batch}", "{accumulation}")
    done = project.run("predict", *options, "--", *words)
    found, alone = done.json, project.predict("python", "train.py", "4", "5", gpu="t4-16gb").json
    assert found["traced"]["peak_allocated_bytes"] == alone["traced"]["peak_allocated_bytes"]
    assert found["traced"]["max_batch_size"] > 100
    assert "the largest batch is traced with 2 passes, as those that reach 20 differ" in found["traced"]["notes"]
    two = project.predict("python", "train.py", str(found["traced"]["max_batch_size"]), "2", gpu="t4-16gb").json
    assert two["traced"]["fits"]
