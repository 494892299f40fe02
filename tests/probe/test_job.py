"""What a probe says its process's job is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumem_tui.probe.ring import Ring
from gpumem_tui.probe.wire import decode_header


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "4711"}, "slurm 4711"),
        ({"TORCHELASTIC_RUN_ID": "night-run"}, "night-run"),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
        ({"SLURM_JOB_ID": "4711", "TORCHELASTIC_RUN_ID": "none"}, "slurm 4711"),
        ({"TORCHELASTIC_RUN_ID": "x" * 5000}, "x" * 100),
    ],
)
def test_a_job_is_called_as_slurm_or_torchrun_calls_it(
    environment: dict[str, str], job: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GPUMEM_TUI_DIR", str(tmp_path / "published"))
    import torch  # noqa: F401  the header names its version

    ring = Ring("run")
    assert decode_header(ring.files.ring.read_bytes()).process.job == job
