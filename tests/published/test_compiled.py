"""Compiled steps that others measured, next to their traces: `tests.published.compiled` prints all rows."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from tests.published.compiled import ROWS, Row, error_percent, traced
from tests.sharing import WarmPython

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="Inductor writes kernels for triton, which is not here"
)

_LONG = ("ao-vith", "ao-llama", "tt-3b-4", "tt-3b-5", "tt-3b-6", "tt-3b-7", "titan", "ao-titan", "nanochat")
"""How rows of networks of many layers begin, which take a minute and more: `exhaustive`."""


def _marked(row: Row) -> Any:
    mark = pytest.mark.exhaustive if row.id.startswith(_LONG) else pytest.mark.scripts
    return pytest.param(row, id=row.id, marks=mark)


@pytest.mark.parametrize("row", map(_marked, ROWS))
def test_a_compiled_program_takes_what_was_measured(row: Row) -> None:
    found = traced(row, WarmPython.path())
    assert any("compiled, traced by" in note and "no frame ran eager" in note for note in found["notes"])
    assert abs(error_percent(row, found)) <= row.percent
