"""Whole training runs that others measured: the simulated GPU must come as near as peaks.toml states."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from tests.published import measured
from tests.published.accuracy import published_range, traced_published
from tests.published.measurements import PublishedPeak, load_published

_WIDEST_PERCENT = 30
_LOOSEST_PERCENT = 0.2
"""So much more than what is left unexplained a tolerance may be."""

_PUBLISHED = load_published(Path(__file__).with_name("peaks.toml"))


_LONG = {
    *("duoan-medium-512", "duoan-large-512", "duoan-xl-512", "mingpt-xl-old", "mingpt-xl-new"),
    *("hf-bertL-1", "hf-bertL-3", "hf-bertL-7", "tt-3b-1"),
}
"""Rows with others of the same program, smaller or of another version."""


def _with_marks(found: Iterable[PublishedPeak | measured.Measured]) -> list[ParameterSet]:
    return [pytest.param(one, id=one.id, marks=[pytest.mark.slow] if one.id in _LONG else []) for one in found]


_WITH_TOLERANCE = [peak for peak in _PUBLISHED.modelled if peak.tolerance_percent is not None]
_IN_RANGE = [peak for peak in _PUBLISHED.modelled if peak.tolerance_percent is None]


@pytest.mark.parametrize("peak", _with_marks(_WITH_TOLERANCE))
def test_within_its_tolerance(peak: PublishedPeak) -> None:
    assert peak.tolerance_percent is not None
    error_percent = 100 * (traced_published(peak) / peak.measured_bytes - 1)
    assert abs(error_percent) <= peak.tolerance_percent, peak.why
    assert abs(error_percent) > peak.tolerance_percent - _LOOSEST_PERCENT, "its tolerance is too wide"
    if peak.kind == "device_used":
        assert peak.measured_bytes not in published_range(peak), "needs no tolerance"


@pytest.mark.parametrize("peak", _with_marks(_IN_RANGE))
def test_a_device_total_lies_within_the_predicted_range(peak: PublishedPeak) -> None:
    assert peak.kind == "device_used"
    found = published_range(peak)
    assert peak.measured_bytes in found, peak.why
    assert found.high_bytes - found.low_bytes < peak.measured_bytes * _WIDEST_PERCENT / 100, "a range too wide"


@pytest.mark.parametrize("row", _with_marks(measured.load()))
def test_a_step_or_a_layer_is_within_its_tolerance(row: measured.Measured) -> None:
    assert abs(row.error_percent(row.traced_bytes())) <= row.tolerance_percent, row.why


def test_no_figure_is_both_modelled_and_not() -> None:
    ids = [peak.id for peak in _PUBLISHED.modelled]
    ids += [left_out for entry in _PUBLISHED.not_modelled for left_out in entry.ids]
    assert len(set(ids)) == len(ids)
