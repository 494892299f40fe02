"""Launchers of a script over several GPUs: it runs as rank 0 of them all, once."""

from __future__ import annotations

import pytest

from tests.command.running import Project

pytestmark = pytest.mark.scripts

TRAIN = """
    import os
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    model = torch.nn.Linear(1024, 1024, bias=False).to(int(os.environ["LOCAL_RANK"]))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    print("rank", dist.get_rank(), "of", dist.get_world_size(), "on", torch.cuda.device_count(), "GPUs")
    for _ in range(3):
        model(torch.randn(8, 1024, device="cuda")).sum().backward()
        optimizer.step()
"""
SPAWN = """
    import os
    import torch
    import torch.distributed as dist
    import torch.multiprocessing

    def train(rank, ranks):
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
        dist.init_process_group("nccl", rank=rank, world_size=ranks)
        model = torch.nn.Linear(1024, 1024, bias=False).to(rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        print("rank", dist.get_rank(), "of", dist.get_world_size(), "on", torch.cuda.device_count(), "GPUs")
        for _ in range(3):
            model(torch.randn(8, 1024, device=rank)).sum().backward()
            optimizer.step()

    if __name__ == "__main__":
        torch.multiprocessing.spawn(train, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count())
"""
TORCHRUN = ("python", "-m", "torch.distributed.run")
STARTER = """
    ranks=$2
    shift 2
    for rank in $(seq 0 $((ranks - 1))); do
        {variables} "$@" &
    done
    wait
"""
"""Stand-in for an MPI's or Slurm's launcher: ``-n 2 python train.py``."""

RANKS = {
    "mpirun": "OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_RANK=$rank OMPI_COMM_WORLD_SIZE=$ranks",
    "mpiexec": "PMI_RANK=$rank MPI_LOCALRANKID=$rank PMI_SIZE=$ranks",
    "srun": "SLURM_STEP_ID=0 SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NTASKS=$ranks",
}
"""The variables that each of them sets."""


def started(project: Project, *words: str, options: tuple[str, ...] = ()) -> list[str]:
    """The output of a command's ranks."""
    done = project.predict(*words, options=options)
    assert done.json["traced"]["buckets"]["parameters"] == 4 << 20
    return [line.removeprefix("  | ") for line in done.stderr.splitlines() if line.startswith("  | rank ")]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--nproc-per-node", "4"), "rank 0 of 4 on 4 GPUs"),
        (("--nnodes", "2", "--nproc-per-node=8", "--node-rank=0"), "rank 0 of 16 on 8 GPUs"),
    ],
)
def test_torchrun(project: Project, options: tuple[str, ...], said: str) -> None:
    project.write("train.py", TRAIN)
    assert started(project, *TORCHRUN, *options, "train.py") == [said]


def test_a_shell_script_that_calls_torchrun(project: Project) -> None:
    project.write("run.sh", 'exec "$1" -m torch.distributed.run --nproc-per-node 2 train.py')
    project.write("train.py", TRAIN)
    assert started(project, "bash", "run.sh", "python") == ["rank 0 of 2 on 2 GPUs"]


@pytest.mark.parametrize("launcher", RANKS)
def test_a_launcher_that_speaks_otherwise(project: Project, launcher: str) -> None:
    project.write(launcher, "#!/bin/sh" + STARTER.replace("{variables}", RANKS[launcher])).chmod(0o755)
    project.write("train.py", TRAIN)
    assert started(project, f"./{launcher}", "-n", "2", "python", "train.py") == ["rank 0 of 2 on 2 GPUs"]


def test_a_plain_script_that_reads_its_rank(project: Project) -> None:
    project.write("train.py", TRAIN)
    assert started(project, "python", "train.py", options=("--gpus", "16")) == ["rank 0 of 16 on 8 GPUs"]


def test_spawned_processes(project: Project) -> None:
    project.write("train.py", SPAWN)
    assert started(project, "python", "train.py", options=("--gpus", "4")) == ["rank 0 of 4 on 4 GPUs"]


def test_accelerate(project: Project) -> None:
    pytest.importorskip("accelerate")
    project.write("train.py", TRAIN)
    words = ("python", "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "4", "train.py")
    assert started(project, *words) == ["rank 0 of 4 on 4 GPUs"]


def test_processes_that_no_launcher_is_known_of_are_counted(project: Project) -> None:
    project.write(
        "train.py",
        """
        import torch

        model = torch.nn.Linear(1024, 1024, bias=False).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            model(torch.randn(8, 1024, device="cuda")).sum().backward()
            optimizer.step()
        """,
    )
    project.write("both.sh", f"{project.python} train.py & {project.python} train.py & wait")
    notes = project.predict("sh", "both.sh").json["traced"]["notes"]
    assert any(note.startswith("2 processes of the command train, and this is the fullest") for note in notes)
