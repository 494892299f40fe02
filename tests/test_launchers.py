"""Every launcher has all parts: how its line shows how many processes, and what these read; ranks find their place."""

from __future__ import annotations

import pytest

from gpumem_tui.launchers import (
    HOROVOD,
    IN_ORDER,
    LAUNCHERS,
    NAMES,
    OPEN_MPI,
    PMI,
    SLURM,
    TORCHRUN,
    Launcher,
    RankPlace,
    RankVariables,
    processes,
    ranks_here,
)
from gpumem_tui.workload.command import Command

LINES = {
    "torchrun": "torchrun --nproc-per-node 4 train.py -n 9",
    "accelerate": "accelerate launch --num_processes 4 train.py",
    "deepspeed": "deepspeed --num_gpus 2 --num_nodes=2 train.py --deepspeed",
    "horovodrun": "horovodrun -np 4 -H localhost:4 python train.py",
    "mpirun": "mpirun -H a:2,b:2 -np 4 python train.py -n 2",
    "srun": "srun -N2 --ntasks-per-node=2 python train.py",
}
"""By a launcher's first name, a line that starts four processes."""


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.names[0])
def test_a_launcher_has_every_piece(launcher: Launcher) -> None:
    assert launcher.names[0] in LINES, "a line of it belongs into this test"
    assert processes(LINES[launcher.names[0]].split()) == 4
    assert set(launcher.names) <= NAMES
    assert launcher.variables, "what its processes read"
    for variables in launcher.variables:
        assert variables in IN_ORDER, "variables that no process looks for"
        assert ranks_here(_environment(variables, rank=3, of=4)).rank == 3


def test_no_name_is_two_launchers() -> None:
    assert len(NAMES) == sum(len(launcher.names) for launcher in LAUNCHERS)


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("torchrun --nproc_per_node=4 train.py", 4),
        ("torchrun --nnodes=2 --nproc-per-node 8 train.py", 16),
        ("torchrun --nnodes 1:4 --nproc-per-node 8 train.py", 8),
        ("torchrun --nproc-per-node gpu train.py", 1),
        ("torchrun --nproc-per-node 0 train.py", 1),
        ("deepspeed --num_gpus 0 --num_nodes 2 train.py", 2),
        ("python -m torch.distributed.run --nproc-per-node=2 train.py", 2),
        ("accelerate launch --num_machines 2 --num_processes 16 train.py", 16),
        ("accelerate launch train.py", 1),
        ("python train.py --num_processes 8", 1),
        ("python -m deepspeed.launcher.runner --num_gpus 8 train.py", 8),
        ("horovodrun --num-proc 2 python train.py", 2),
        ("mpiexec -n 2 python train.py", 2),
        ("/usr/bin/mpirun --np 2 --bind-to none python -u train.py --np 8", 2),
        ("mpirun python train.py -n 2", 1),
        ("srun -n4 python train.py", 4),
        ("srun --ntasks=16 --nodes 2 --ntasks-per-node 8 bash train.sh", 16),
        ("srun python train.py", 1),
        ("python train.py -n 4", 1),
    ],
)
def test_how_many_processes_a_line_starts(line: str, count: int) -> None:
    assert processes(line.split()) == count
    assert Command(tuple(line.split()), ".").processes == count


def _environment(names: RankVariables, rank: int, of: int) -> dict[str, str]:
    values = {names.rank: rank, names.local_rank: rank, names.world_size: of}
    return {name: str(value) for name, value in values.items()}


@pytest.mark.parametrize("names", IN_ORDER)
def test_a_process_finds_its_place(names: RankVariables) -> None:
    assert ranks_here(_environment(names, rank=1, of=2)) == RankPlace(1, 1, 2)


def test_the_innermost_launcher_counts() -> None:
    """Slurm starts mpirun, or one torchrun a node: what these set is the place among the ranks."""
    outer, inner = _environment(SLURM, rank=1, of=2), _environment(OPEN_MPI, rank=5, of=16)
    assert ranks_here({**outer, **inner}).world_size == 16
    assert ranks_here({**outer, **inner, **_environment(TORCHRUN, rank=7, of=32)}) == RankPlace(7, 7, 32)


def test_a_batch_script_is_one_process() -> None:
    """Slurm runs it with the variables of a task 0 of all that the job may have; only srun starts those."""
    script = _environment(SLURM, rank=0, of=8)
    assert ranks_here(script) == ranks_here({SLURM.world_size: "8"}) == RankPlace()
    assert ranks_here({**script, SLURM.started: "0"}) == RankPlace(0, 0, 8)


def test_without_a_launcher_there_is_no_place() -> None:
    assert ranks_here({"RANK": "first", "HOME": "/root"}) == RankPlace()
    assert ranks_here({"LOCAL_RANK": "1"}) == RankPlace(None, 1, None), "a program may set one alone"
    assert PMI.rank != HOROVOD.rank
