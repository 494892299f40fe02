"""Tuning by lit-gpt that others measured, next to its traces: `tests.published litgpt` prints all rows."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.published.compiled import error_percent, traced
from tests.published.litgpt import ROWS
from tests.sharing import WarmPython

pytestmark = [
    pytest.mark.scripts,
    pytest.mark.skipif(not (find_spec("bitsandbytes") and find_spec("lightning")), reason="needs both libraries"),
]


@pytest.mark.parametrize("name", ["lit-phi-1.5-lora-none-2", "lit-phi-1.5-lora-nf4-1"])
def test_low_ranks_take_what_was_measured(name: str) -> None:
    row = next(row for row in ROWS if row.id == name)
    assert abs(error_percent(row, traced(row, WarmPython.path()))) < 0.1
