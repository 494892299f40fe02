"""Device totals of networks that milabench trains: `python -m tests.published milabench` prints all rows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.published.milabench import Observed, load

_ALWAYS = ("milabench-h100-bert-fp16-64", "milabench-h100-reformer-64", "milabench-h100-resnet50-128")
_PERCENT = {"bert": 0.2, "reformer": 0.6, "resnet50": 0.8, "t5": 4.6, "whisper": 3.6, "diffusion": 2.0}
"""How far outside of its range a run is at the most."""


def _marked(row: Observed) -> Any:
    return pytest.param(row, id=row.id, marks=pytest.mark.scripts if row.id in _ALWAYS else pytest.mark.exhaustive)


@pytest.mark.parametrize("row", [_marked(row) for row in load()])
def test_a_device_held_what_is_predicted(row: Observed) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("diffusers")
    found, measured_bytes = row.predicted(), row.measured_mib << 20
    apart = 1 + _PERCENT[row.program.partition("-")[0]] / 100
    assert found.low_bytes / apart <= measured_bytes <= found.high_bytes * apart
