"""On a real GPU: what it records must hold, and the simulated GPU must come as near as the project states."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.history import unpack
from tests.gpu.placement import check
from tests.published.measurements import RecordedRun, load_recordings

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RecordedRun]:
    """A few small runs on this machine's GPU."""
    folder = tmp_path_factory.mktemp("recordings")
    command = [
        sys.executable,
        "-m",
        "tests.gpu.record",
        "--out",
        str(folder),
        "--only",
        "^(mlp-2048-b64|resnet-18-b8)-",
    ]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=300)
    return [found for found in load_recordings(folder) if isinstance(found, RecordedRun)]


def test_every_run_came_to_its_end(runs: list[RecordedRun]) -> None:
    assert runs
    assert not [run.id for run in runs if run.real.error or run.simulated.error]


def test_the_allocator_model_places_every_block_where_the_gpu_did(runs: list[RecordedRun]) -> None:
    kept = [run for run in runs if run.history]
    assert kept
    for run in kept:
        placed = check(unpack(run.history))
        assert placed.reserved_bytes == run.real.peak_bytes("reserved")
        assert placed.allocated_bytes == run.real.peak_bytes("allocated")


def test_linear_networks_are_exact_to_the_byte(runs: list[RecordedRun]) -> None:
    for run in runs:
        if run.id.startswith("mlp-"):
            assert run.simulated.peak_bytes("allocated") == run.real.peak_bytes("allocated"), run.id


def test_reserved_is_within_a_percent(runs: list[RecordedRun]) -> None:
    for run in runs:
        if run.id.startswith("mlp-"):
            assert run.simulated.peak_bytes("reserved") == pytest.approx(run.real.peak_bytes("reserved"), rel=0.01)
