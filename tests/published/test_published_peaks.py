"""Whole training runs that others measured: the simulated GPU must come as near as peaks.toml says."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumem_tui.simulator.accuracy import traced_published
from gpumem_tui.simulator.measurements import PublishedPeak, load_published
from tests.published import measured

_PUBLISHED = load_published(Path(__file__).with_name("peaks.toml"))


@pytest.mark.parametrize("peak", _PUBLISHED.modelled, ids=lambda peak: peak.id)
def test_within_its_tolerance(peak: PublishedPeak) -> None:
    error_percent = 100 * (traced_published(peak) / peak.measured_bytes - 1)
    assert abs(error_percent) <= peak.tolerance_percent, peak.why


@pytest.mark.parametrize("row", measured.load(), ids=lambda row: row.id)
def test_a_step_or_a_layer_is_within_its_tolerance(row: measured.Measured) -> None:
    assert abs(row.error_percent(row.traced_bytes())) <= row.tolerance_percent, row.why


def test_no_figure_is_both_modelled_and_not() -> None:
    ids = [peak.id for peak in _PUBLISHED.modelled]
    ids += [left_out for entry in _PUBLISHED.not_modelled for left_out in entry.ids]
    assert len(set(ids)) == len(ids)
