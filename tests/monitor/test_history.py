"""History: nothing but the resolution is lost as time passes."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.monitor import history as history_module
from gpumem_tui.monitor.history import Column, History, Series
from gpumem_tui.monitor.probes import ProbeFigures
from gpumem_tui.monitor.snapshot import DeviceState, GpuReading
from tests.monitor.snapshots import START_S, gpu, machine

_UUID = gpu().uuid
_HOUR_S = 3600.0


def _fill(history: History, used_gib: list[int], *, interval_s: float = 1.0, start_s: float = 0.0) -> float:
    """Feeds a reading each interval; returns the time of the last one."""
    for n, gib in enumerate(used_gib):
        history.add(machine([gpu(used_bytes=gib * GIB)], after_s=start_s + n * interval_s))
    return START_S + start_s + (len(used_gib) - 1) * interval_s


def _gib(series: Series) -> list[float | None]:
    return [None if peak is None else peak / GIB for peak in series.peaks[Column.USED]]


def test_a_second_is_a_column_for_minutes() -> None:
    history = History()
    now_s = _fill(history, [10, 20, 30])
    series = history.series(_UUID, columns=5, span_s=5, now_s=now_s)
    assert (series.start_s, series.step_s) == (START_S - 2, 1.0)
    assert _gib(series) == [None, None, 10, 20, 30]


def test_every_column_of_a_gpu_is_kept() -> None:
    history = History()
    probes = {
        (_UUID, 1): ProbeFigures(GIB, 2 * GIB, 0, 0),
        (_UUID, 2): ProbeFigures(3 * GIB, 4 * GIB, 0, 0),
        ("other", 1): ProbeFigures(9 * GIB, 9 * GIB, 0, 0),
    }
    history.add(machine([gpu(used_bytes=10 * GIB, utilization_percent=50)]), probes)
    history.add(machine([gpu(used_bytes=30 * GIB, utilization_percent=100)], after_s=0.5), probes)
    series = history.series(_UUID, 1, 1, START_S + 0.7)
    assert series.peaks == {
        Column.USED: (30 * GIB,),
        Column.ALLOCATED: (4 * GIB,),
        Column.RESERVED: (6 * GIB,),
        Column.UTILIZATION: (100,),
    }
    assert series.means[Column.USED] == (20 * GIB,)
    assert series.means[Column.UTILIZATION] == (75,)


def test_without_a_probe_allocated_is_unknown_and_not_0() -> None:
    history = History()
    now_s = _fill(history, [10])
    assert history.series(_UUID, 1, 1, now_s).peaks[Column.ALLOCATED] == (None,)


@pytest.mark.parametrize(
    "reading", [gpu(memory=Unknown("x"), utilization_percent=Unknown("x")), gpu(state=DeviceState.STALE)]
)
def test_what_is_not_read_leaves_a_gap(reading: GpuReading) -> None:
    history = History()
    history.add(machine([reading]))
    assert _gib(history.series(_UUID, 3, 3, START_S)) == [None, None, None]


def test_jitter_leaves_no_gap_but_silence_does() -> None:
    history = History()
    for after_s in (0.0, 0.99, 2.01, 3.0, 9.0):
        history.add(machine([gpu(used_bytes=GIB)], after_s=after_s))
    assert _gib(history.series(_UUID, 10, 10, START_S + 9)) == [1, 1, 1, 1, None, None, None, None, None, 1]


def test_a_longer_interval_leaves_no_gaps() -> None:
    history = History(interval_s=5)
    now_s = _fill(history, [10, 20, 30], interval_s=5)
    assert _gib(history.series(_UUID, 11, 11, now_s)) == [10] * 5 + [20] * 5 + [30]


def test_a_column_covers_the_same_seconds_as_time_goes_on() -> None:
    history = History()
    seen: dict[float, list[float | None]] = {}
    for second in range(300):
        history.add(machine([gpu(used_bytes=(second * 37 % 70) * GIB)], after_s=second))
        series = history.series(_UUID, columns=20, span_s=100, now_s=START_S + second)
        assert series.start_s % series.step_s == 0
        for n, peak in enumerate(_gib(series)[:-1]):  # the last still grows
            seen.setdefault(series.start_s + n * series.step_s, []).append(peak)
    assert all(len({*peaks}) == 1 for start_s, peaks in seen.items() if start_s >= START_S)


@pytest.mark.parametrize(("span_s", "step_s"), [(600, 6), (2 * _HOUR_S, 80), (24 * _HOUR_S, 900)])
def test_the_finest_tier_that_reaches_is_used(span_s: float, step_s: float) -> None:
    history = History()
    _fill(history, [1])
    series = history.series(_UUID, 100, span_s, START_S)
    assert series.step_s == step_s
    assert len(series.peaks[Column.USED]) == 100


def test_a_peak_of_a_second_is_still_there_a_day_later() -> None:
    history = History()
    _fill(history, [5, 70, 5])
    history.add(machine([gpu(used_bytes=GIB)], after_s=23 * _HOUR_S))
    peaks = _gib(history.series(_UUID, 100, 24 * _HOUR_S, START_S + 23 * _HOUR_S))
    assert max(peak for peak in peaks if peak is not None) == 70


def test_memory_is_bounded() -> None:
    history = History()
    _fill(history, [1])
    one_gpu_bytes = history.size_bytes
    _fill(history, [n % 70 for n in range(4000)])
    assert history.size_bytes == one_gpu_bytes < 256 * 1024
    for n in range(200):
        history.add(machine([gpu(uuid=f"GPU-{n}")], after_s=5000 + n))
    assert history.size_bytes == 64 * one_gpu_bytes
    assert _gib(history.series("GPU-199", 1, 1, START_S + 5199)) != [None]
    assert _gib(history.series("GPU-0", 1, 1, START_S + 5000)) == [None]


def test_a_clock_that_is_set_back_takes_its_future_with_it() -> None:
    history = History()
    _fill(history, [70] * 100)
    now_s = _fill(history, [10] * 3, start_s=50)
    peaks = _gib(history.series(_UUID, 120, 120, now_s + 60))
    assert peaks.count(70) == 50
    assert peaks.count(10) == 3
    assert peaks[-60:] == [None] * 60
    whole_tier = _gib(history.series(_UUID, 900, 900, now_s))
    assert whole_tier.count(70) == 50, "nothing of the future is taken for what was one turn of the ring before it"


def test_a_clock_that_is_set_forward_leaves_a_gap() -> None:
    history = History()
    _fill(history, [70] * 100)
    now_s = _fill(history, [10], start_s=10 * 365 * 24 * _HOUR_S)
    assert _gib(history.series(_UUID, 900, 900, now_s)) == [None] * 899 + [10]


def test_an_unknown_gpu_has_no_past() -> None:
    assert _gib(History().series("GPU-x", 3, 3, START_S)) == [None] * 3


@given(
    steps=st.lists(st.tuples(st.floats(0.05, 400), st.integers(0, 79)), min_size=1, max_size=60),
    columns=st.integers(1, 50),
    span_s=st.floats(1, 20 * _HOUR_S),
)
def test_peaks_and_order_survive(steps: list[tuple[float, int]], columns: int, span_s: float) -> None:
    history = History(hours=24)
    fed: list[tuple[float, int]] = []
    time_s = 0.0
    for gap_s, gib in steps:
        time_s += gap_s
        fed.append((START_S + time_s, gib))
        history.add(machine([gpu(used_bytes=gib * GIB)], after_s=time_s))
    series = history.series(_UUID, columns, span_s, fed[-1][0])
    assert len(series.peaks[Column.USED]) == columns
    assert columns * series.step_s >= span_s or math.isclose(columns * series.step_s, span_s)
    for n, (peak, mean) in enumerate(zip(series.peaks[Column.USED], series.means[Column.USED], strict=True)):
        begin_s = series.start_s + n * series.step_s
        inside = [gib * GIB for when_s, gib in fed if begin_s <= when_s < begin_s + series.step_s]
        if inside:
            assert peak is not None
            assert mean is not None
            assert peak >= max(inside)
            assert mean <= peak
        before = [gib * GIB for (early_s, gib), (late_s, _) in pairwise(fed) if late_s - early_s <= 2.5]
        assert peak is None or peak in inside or peak in before


def test_a_chart_that_is_asked_for_each_second_is_that_of_a_history_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    merged = history_module._Ring.merged

    def counted(ring: Any, column: Column, first: int, last: int, width: int) -> Any:
        asked.append(last - first + 1)
        return merged(ring, column, first, last, width)

    monkeypatch.setattr(history_module._Ring, "merged", counted)
    watched = History()
    used = [n * 7 % 80 for n in range(400)]
    for n in range(len(used)):
        now_s = _fill(watched, [used[n]], start_s=n)
        seen = watched.series(_UUID, 50, 300, now_s)
    assert sum(asked[-len(Column) :]) <= 3 * len(Column), "only the newest buckets are merged"
    once = History()
    assert seen == once.series(_UUID, 50, 300, _fill(once, used))
    _fill(watched, [1], start_s=100)
    _fill(once, [1], start_s=100)
    assert watched.series(_UUID, 50, 300, START_S + 100) == once.series(_UUID, 50, 300, START_S + 100)
