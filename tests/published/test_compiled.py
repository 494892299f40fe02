"""Compiled steps that others measured, beside their traces by torch's own compiler."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.sharing import WarmPython

pytestmark = [
    pytest.mark.scripts,
    pytest.mark.skipif(find_spec("triton") is None, reason="Inductor writes kernels for triton, which is not here"),
]

GIB = 1 << 30
SCRIPT = Path(__file__).with_name("compiled_gpt2.py")
RESERVED_GIB = {8: 5.8906, 32: 22.5078}
"""By batch size what README.md of rasbt/LLMs-from-scratch, ch05/10_llm-training-speed, gives for one A100 with the
vocabulary padded to 50,304."""


@pytest.mark.parametrize("batch_size", RESERVED_GIB)
def test_a_compiled_gpt2_reserves_what_was_measured(batch_size: int) -> None:
    command = [
        sys.executable,
        "-m",
        "gpumem_tui",
        "predict",
        "--json",
        "--gpu",
        "sim:a100-80gb",
        "--",
        WarmPython.path(),
    ]
    done = subprocess.run([*command, str(SCRIPT), "--batch-size", str(batch_size)], capture_output=True, check=True)
    traced = json.loads(done.stdout)["traced"]
    assert any("1 graph compiled" in note and "no frame ran eager" in note for note in traced["notes"])
    assert traced["peak_reserved_bytes"] / GIB == pytest.approx(RESERVED_GIB[batch_size], rel=0.002)
