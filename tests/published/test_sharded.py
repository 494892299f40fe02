"""The reserved memory of FSDP2, with streams of its own: `tests.published.sharded` prints all rows."""

from __future__ import annotations

import pytest

from tests.published.sharded import ROWS, errors_percent, on_one_stream, traced

pytestmark = pytest.mark.scripts


def test_reserves_what_was_published_with_its_streams_and_too_little_on_one() -> None:
    row = next(row for row in ROWS if row.id == "ao-nocompile-1")
    timeline = traced(row)
    errors = errors_percent(row, timeline)
    assert abs(errors[row.settings]) <= row.tolerance_percent
    assert errors["default"] > 0.5
    assert all(error < -9 for error in errors_percent(row, on_one_stream(timeline)).values())
