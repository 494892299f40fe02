"""Networks of images and videos that others measured: `python -m tests.published vision` prints all rows."""

from __future__ import annotations

from typing import Any

import pytest

from gpumem_tui.memory import GIB
from tests.published.compiled import Row, error_percent, traced
from tests.published.vision import ROWS, predicted
from tests.sharing import WarmPython

_ALWAYS = ("mmaction-slowonly-nl-4", "detectron2-rpn-c4")
"""One whose softmax keeps its input, as an older torch's did, and one with a workspace at its peak."""


def _marked(row: Row) -> Any:
    return pytest.param(row, id=row.id, marks=pytest.mark.scripts if row.id in _ALWAYS else pytest.mark.exhaustive)


@pytest.mark.parametrize("row", [_marked(row) for row in ROWS])
def test_a_network_takes_what_was_measured(row: Row) -> None:
    found = traced(row, WarmPython.path())
    assert abs(error_percent(row, found)) <= row.percent
    if row.program[1] != "video":
        range_ = predicted(row, found)
        assert range_.low_bytes < row.gib * GIB < range_.high_bytes
