"""An MPI's launcher: the command is answered for as rank 0 of however many it starts, and notes this."""

from __future__ import annotations

from tests.command.running import Project
from tests.command.test_launchers import RANKS, STARTER

TRAIN = """
    import torch

    model = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    print("training", flush=True)
    for _ in range(3):
        model(torch.randn(8, 1024, device="cuda")).sum().backward()
        optimizer.step()
"""


def test_the_ranks_of_mpirun_are_told(project: Project) -> None:
    project.write("mpirun", "#!/bin/sh" + STARTER.replace("{variables}", RANKS["mpirun"])).chmod(0o755)
    project.write("train.py", TRAIN)
    words = ("predict", "--gpu", "sim:a100-80gb", "--steps", "2", "--")
    direct = project.run(*words, "./mpirun", "-np", "2", project.python, "train.py")
    assert direct.code == 0, direct.stderr
    assert any(line.endswith(" · rank 0 of 2") for line in direct.stdout.splitlines())
    assert direct.stderr.count("  | training") == 1, "rank 1 is not run"


def test_a_launcher_within_a_script_is_noted(project: Project) -> None:
    project.write("mpirun", "#!/bin/sh" + STARTER.replace("{variables}", RANKS["mpirun"])).chmod(0o755)
    project.write("train.py", TRAIN)
    project.write("train.sh", f"exec ./mpirun -np 2 {project.python} train.py")
    done = project.predict("sh", "train.sh", options=("--steps", "2"))
    assert "rank 0 of 2: a launcher within the command starts the others" in done.json["traced"]["notes"]
