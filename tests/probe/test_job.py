"""A probe's report of its process's job: its name, and the process's place in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpumem_tui.launchers import IN_ORDER
from gpumem_tui.probe.ring import Ring
from gpumem_tui.probe.wire import Process
from gpumem_tui.watch.documents import decode_header

_RANKS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "4711"}, "slurm 4711"),
        ({"TORCHELASTIC_RUN_ID": "night-run"}, "night-run"),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
        ({"SLURM_JOB_ID": "4711", "TORCHELASTIC_RUN_ID": "none"}, "slurm 4711"),
        ({"TORCHELASTIC_RUN_ID": "x" * 5000}, "x" * 100),
        ({"TORCHELASTIC_RUN_ID": "none", **_RANKS, "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}, "node7:29500"),
        ({**_RANKS, "MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}, f"{os.uname().nodename}:1234"),
        ({"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}, None),
    ],
)
def test_a_job_is_called_as_slurm_or_torchrun_calls_it(
    environment: dict[str, str], job: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert written(tmp_path, monkeypatch).job == job


def written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Process:
    """The header of this very process's ring."""
    monkeypatch.setenv("GPUMEM_TUI_DIR", str(folder / "published"))
    import torch  # noqa: F401  the header names its version

    return decode_header(Ring("run").files.ring.read_bytes()).process


TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
SLURM = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, (None, None, None)),
        (TORCHRUN, (5, 1, 8)),
        (
            {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"},
            (2, 0, 4),
        ),
        ({"PMI_RANK": "1", "MPI_LOCALRANKID": "1", "PMI_SIZE": "2"}, (1, 1, 2)),
        (SLURM, (3, 1, 4)),
        ({**SLURM, **TORCHRUN}, (5, 1, 8)),
        ({"RANK": "one"}, (None, None, None)),
    ],
    ids=["none", "torchrun", "Open MPI", "PMI", "Slurm", "torchrun within Slurm", "no number"],
)
def test_a_process_has_the_place_that_its_launcher_gave_it(
    environment: dict[str, str],
    place: tuple[int | None, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for names in IN_ORDER:
        for name in (names.rank, names.local_rank, names.world_size, names.local_size):
            monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = written(tmp_path, monkeypatch)
    assert (found.rank, found.local_rank, found.world_size) == place
