"""The reserved memory of PEFT's methods: `python -m tests.published adapters` prints all rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.published import adapters, diffusion
from tests.sharing import WarmPython

pytestmark = pytest.mark.scripts

_SCRIPT = Path(adapters.__file__)
_BY_ID = {row.id: row for row in adapters.load()}


@pytest.mark.parametrize("name", ["ia3-default", "ln_tuning-default", "miss-default"])
def test_reserves_what_was_published(name: str) -> None:
    row = _BY_ID[name]
    assert abs(100 * (adapters.reserved_bytes(row) / row.measured_bytes - 1)) <= row.tolerance_percent


def test_a_diffusion_transformer_reserves_what_was_published() -> None:
    row = next(row for row in diffusion.load() if row.id == "lora-rank64")
    assert abs(100 * (diffusion.reserved_bytes(row) / row.measured_bytes - 1)) <= row.tolerance_percent


def test_as_a_command_it_reserves_the_same() -> None:
    row = _BY_ID["lora-rank32"]
    predict = [sys.executable, "-m", "gpumem_tui", "predict", "--json", "--gpu", f"sim:{adapters.GPU}", "--steps", "2"]
    done = subprocess.run([*predict, "--", WarmPython.path(), str(_SCRIPT), row.id], capture_output=True, check=True)
    reserved_bytes = json.loads(done.stdout)["traced"]["peak_reserved_bytes"]
    assert abs(100 * (reserved_bytes / row.measured_bytes - 1)) <= row.tolerance_percent
