"""Other people's device totals are in the predicted range, or as far outside as totals.csv states."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest

from tests.published.totals import TRANSFORMERS, Total, load

_ALWAYS = ("gmn-timm-resnet-50-64", "gmn-timm-vit-b-16-32", "gmn-own-resnet-50-128", "gmn-own-vgg16-128")
"""The smallest and the largest batch of each other network are `slow`."""

_WIDEST_PERCENT = 33
_LOOSEST_PERCENT = 0.2


def _marked() -> Iterator[Any]:
    for _, of_one in groupby(load(), lambda row: (row.program, row.network)):
        rows = sorted(of_one, key=lambda row: row.batch_size)
        for row in rows:
            ends = pytest.mark.slow if row in (rows[0], rows[-1]) else pytest.mark.exhaustive
            yield pytest.param(row, id=row.id, marks=[] if row.id in _ALWAYS else ends)


@pytest.mark.parametrize("row", _marked())
def test_a_total_lies_where_the_table_says(row: Total) -> None:
    if row.network in TRANSFORMERS:
        pytest.importorskip("transformers")
    found = row.predicted()
    off = max(found.low_bytes - row.measured_bytes, row.measured_bytes - found.high_bytes, 0)
    off_percent = 100 * off / row.measured_bytes
    assert off_percent <= row.outside_percent, row.why
    assert off_percent >= row.outside_percent - _LOOSEST_PERCENT, "is nearer than the table states"
    assert found.high_bytes - found.low_bytes < row.measured_bytes * _WIDEST_PERCENT / 100, "a range too wide"
    assert bool(row.why) == bool(row.outside_percent)
