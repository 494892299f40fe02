"""What others saw of a whole device lies in the predicted range, or as far outside as totals.csv says."""

from __future__ import annotations

import pytest

from tests.published.totals import TRANSFORMERS, Total, load

_ALWAYS = ("gmn-timm-resnet-50-64", "gmn-timm-vit-b-16-32", "gmn-own-resnet-50-128", "gmn-own-vgg16-128")
"""The others, of the same programs, take a minute together."""

_WIDEST_PERCENT = 33
_LOOSEST_PERCENT = 0.2


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.id, marks=[] if row.id in _ALWAYS else [pytest.mark.slow]) for row in load()]
)
def test_a_total_lies_where_the_table_says(row: Total) -> None:
    if row.network in TRANSFORMERS:
        pytest.importorskip("transformers")
    found = row.predicted()
    off = max(found.low_bytes - row.measured_bytes, row.measured_bytes - found.high_bytes, 0)
    off_percent = 100 * off / row.measured_bytes
    assert off_percent <= row.outside_percent, row.why
    assert off_percent >= row.outside_percent - _LOOSEST_PERCENT, "lies nearer than the table says"
    assert found.high_bytes - found.low_bytes < row.measured_bytes * _WIDEST_PERCENT / 100, "a range that says nothing"
    assert bool(row.why) == bool(row.outside_percent)
