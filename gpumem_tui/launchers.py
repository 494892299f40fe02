"""Launchers of one process per rank: their names, the number of ranks in their line, and the variables that ranks read.

One table for whoever asks: a command's ranks before it runs (`processes`), a process its own place (`ranks_here`), the
monitor which processes only start others (`NAMES`). Standard library only, and Python 3.9: a user's process imports it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankVariables:
    """Environment variables by which a launcher tells a process its place.

    Attributes:
        local_size: empty where it has none.
        started: what each process that it starts has; empty where the others tell as much. A script that is only to
            start them may have the others.
    """

    rank: str
    local_rank: str
    world_size: str
    local_size: str
    started: str = ""


TORCHRUN = RankVariables("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""torch.distributed.elastic, "Environment Variables"; accelerate and DeepSpeed set these too."""

OPEN_MPI = RankVariables(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
"""Open MPI's documentation, "Environment variables defined by Open MPI"."""

PMI = RankVariables("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS")
"""MPICH's and Intel MPI's process manager Hydra (src/pm/hydra/proxy/pmip_cb.c)."""

HOROVOD = RankVariables("HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE")
"""horovod/runner/gloo_run.py."""

SLURM = RankVariables("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "", "SLURM_STEP_ID")
"""srun(1), "OUTPUT ENVIRONMENT VARIABLES". A batch script, which is one process, has SLURM_PROCID=0 and SLURM_NTASKS
too (sbatch(1)), but no step."""

IN_ORDER = (TORCHRUN, OPEN_MPI, PMI, HOROVOD, SLURM)
"""Whose variables count where several are set: one launcher starts another, the innermost is the first of these."""


@dataclass(frozen=True)
class Launcher:
    """A program that starts the processes of a training command, such as torchrun.

    Attributes:
        names: how it is called on a command line: programs' and modules' names.
        counts: ways of saying how many processes it starts, the first that a line uses counts; each the options whose
            product that is, and of each option its spellings without dashes, ``-`` for ``_``.
        variables: what its processes read, the likeliest first.
        module: what ``python -m`` runs for its first name; empty if unknown.
    """

    names: tuple[str, ...]
    counts: tuple[tuple[tuple[str, ...], ...], ...]
    variables: tuple[RankVariables, ...]
    module: str = ""


LAUNCHERS = (
    Launcher(
        ("torchrun", "torch.distributed.run", "torch.distributed.launch"),
        ((("nproc-per-node",), ("nnodes",)),),
        (TORCHRUN,),
        "torch.distributed.run",
    ),
    Launcher(
        ("accelerate", "accelerate-launch", "accelerate.commands.accelerate_cli", "accelerate.commands.launch"),
        ((("num-processes",),),),
        (TORCHRUN,),
        "accelerate.commands.launch",
    ),
    Launcher(
        ("deepspeed", "deepspeed.launcher.launch", "deepspeed.launcher.runner"),
        ((("num-gpus",), ("num-nodes",)),),
        (TORCHRUN,),
    ),
    Launcher(("horovodrun",), ((("np", "num-proc"),),), (HOROVOD, OPEN_MPI)),
    Launcher(
        ("mpirun", "mpiexec", "orterun", "prterun", "mpirun.openmpi", "mpirun.mpich", "mpiexec.hydra"),
        ((("n", "np", "c"),),),
        (OPEN_MPI, PMI),
    ),
    Launcher(("srun",), ((("n", "ntasks"),), (("N", "nodes"), ("ntasks-per-node",))), (SLURM,)),
)
_ITS_OWN = ((("trainer.devices",), ("trainer.num-nodes",)),)
"""How the line of a program that starts its ranks itself shows how many: LightningCLI."""
NAMES = frozenset(name for launcher in LAUNCHERS for name in launcher.names)
"""By these names a command line starts a launcher."""
MODULES = {launcher.names[0]: launcher.module for launcher in LAUNCHERS if launcher.module}
"""By a launcher's first name, what ``python -m`` runs for it."""

_BY_NAME = {name: launcher for launcher in LAUNCHERS for name in launcher.names}
_PROGRAM = re.compile(r"(?:lib)?(?:python|pypy)[\d.]*t?|.*\.(?:py|sh)")
"""The program that a launcher starts: the launcher's own options end there."""


def processes(words: Sequence[str]) -> int:
    """Return how many training processes a command line's launcher starts in all, as far as the line states; else 1."""
    for index, word in enumerate(words):
        launcher = _BY_NAME.get(os.path.basename(word))
        if launcher is not None:
            return _started(launcher.counts, _own_options(words[index + 1 :]))
    return _started(_ITS_OWN, words)


def _own_options(words: Sequence[str]) -> Sequence[str]:
    end = next((index for index, word in enumerate(words) if _PROGRAM.fullmatch(os.path.basename(word))), len(words))
    return words[:end]


def _started(ways: tuple[tuple[tuple[str, ...], ...], ...], words: Sequence[str]) -> int:
    for options in ways:
        counts = [_count(words, spellings) for spellings in options]
        if any(count is not None for count in counts):
            return math.prod(count or 1 for count in counts)
    return 1


def _count(words: Sequence[str], spellings: Sequence[str]) -> int | None:
    """Return the number that an option is given; 1 for a word, as ``gpu`` and ``auto``; None without the option.

    A range of nodes counts as its fewest.
    """
    for index, word in enumerate(words):
        if not word.startswith("-"):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        attached = re.fullmatch(r"([A-Za-z])(\d+)", name)  # as in -n4
        if attached is not None and not word.startswith("--"):
            name, equals, value = attached[1], "=", attached[2]
        if name.replace("_", "-") in spellings:
            given = value if equals else words[index + 1] if index + 1 < len(words) else ""
            least = re.split(r"[:-]", given)[0]
            return int(least) if least.isdecimal() else 1
    return None


@dataclass(frozen=True)
class RankPlace:
    """The place of a process among the ranks of its job; None for what no variable states."""

    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    local_size: int | None = None


def ranks_here(environment: Mapping[str, str]) -> RankPlace:
    """Return the place that a launcher's variables give this process."""

    def number(name: str) -> int | None:
        text = environment.get(name, "")
        return int(text) if text.isdecimal() else None

    for names in IN_ORDER:
        place = RankPlace(
            number(names.rank), number(names.local_rank), number(names.world_size), number(names.local_size)
        )
        if place != RankPlace() and (place.rank or not names.started or names.started in environment):
            return place
    return RankPlace()


def alone(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what launchers tell a process of its place: of one that no launcher starts."""
    told = {name for one in IN_ORDER for name in (one.rank, one.local_rank, one.world_size, one.local_size)}
    return {name: value for name, value in environment.items() if name not in told}


# A Python in a command line

PYTHON = re.compile(r"python(\d+(\.\d+)?t?)?|pypy\d*")
_TAKES_VALUE = "WX"
_IGNORES_SITE = {"I": "isolated mode", "E": "PYTHONPATH is ignored", "S": "no site module"}


def bypass(command: Sequence[str]) -> str:
    """Return the option of a Python in the command by which it ignores PYTHONPATH or sitecustomize, with the reason.

    Empty if missing.
    """
    words = iter(command)
    if not any(PYTHON.fullmatch(os.path.basename(word)) for word in words):
        return ""
    for word in words:  # what follows the interpreter's name
        if not word.startswith("-") or word.startswith("--") or word == "-":
            return ""
        for letter in word[1:]:
            if letter in _IGNORES_SITE:
                return f"`python -{letter}` ({_IGNORES_SITE[letter]})"
            if letter in "cm":
                return ""
            if letter in _TAKES_VALUE:
                if word.endswith(letter):
                    next(words, None)
                break
    return ""
