"""The vocabulary: buckets, breakdowns, bytes as text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpumem_tui
from gpumem_tui.memory import (
    ALLOCATED_BUCKETS,
    GIB,
    Breakdown,
    Bucket,
    Range,
    Unknown,
    format_bytes,
    format_count,
    format_range,
)

PACKAGE = Path(gpumem_tui.__file__).parent
sizes = st.dictionaries(st.sampled_from(ALLOCATED_BUCKETS), st.integers(0, 1 << 36))


@given(sizes)
def test_a_breakdown_survives_json(buckets: dict[Bucket, int]) -> None:
    breakdown = Breakdown(buckets)
    assert Breakdown.from_json(breakdown.as_json()).as_json() == breakdown.as_json()
    assert breakdown.total_bytes == sum(breakdown.as_json().values())


@pytest.mark.parametrize("bucket", [bucket for bucket in Bucket if not bucket.is_allocated])
def test_a_bucket_of_the_device_is_filled_by_a_ledger(bucket: Bucket) -> None:
    """Buckets of a step are held by `test_a_step_fills_every_bucket_of_allocated_memory`."""
    drawn = {PACKAGE / "memory.py", *(PACKAGE / "tui" / "kit").rglob("*.py")}
    producers = [file for file in PACKAGE.rglob("*.py") if file not in drawn]
    assert any(f"Bucket.{bucket.name}" in file.read_text() for file in producers)


def test_a_breakdown_holds_only_allocated_memory() -> None:
    with pytest.raises(ValueError, match="free"):
        Breakdown({Bucket.FREE: 1})
    with pytest.raises(ValueError, match="-1 bytes"):
        Breakdown({Bucket.OTHER: -1})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1 << 20, "1.0 MiB"),
        (32_000_000_000, "29.80 GiB"),
        (-(1 << 30), "-1.00 GiB"),
        (1023 << 30, "1023.00 GiB"),
        (-(1536 << 30), "-1.50 TiB"),
        (3 << 50, "3.00 PiB"),
        (1 << 60, "1.00 EiB"),
        (Unknown("not supported"), "not supported"),
        (None, "–"),
    ],
)
def test_bytes_as_a_person_reads_them(value: int | Unknown | None, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (1000, "1 k"), (124_439_808, "124 M"), (8_030_261_248, "8.03 B")]
)
def test_counts_as_a_person_reads_them(count: int, text: str) -> None:
    assert format_count(count) == text


class TestRange:
    def test_both_ends_belong_to_it(self) -> None:
        found = Range(2, 4)
        assert [size in found for size in (1, 2, 4, 5)] == [False, True, True, False]
        with pytest.raises(ValueError, match="between 4 and 2"):
            Range(4, 2)

    @given(st.lists(st.integers(0, 100), min_size=2, max_size=2), st.lists(st.integers(0, 100), min_size=2, max_size=2))
    def test_what_is_left_is_least_when_most_is_taken(self, whole: list[int], part: list[int]) -> None:
        left = Range.of(whole) - Range.of(part)
        assert all(one - other in left for one in whole for other in part)
        assert {left.low_bytes, left.high_bytes} <= {one - other for one in whole for other in part}
        total = Range.of(whole) + Range.of(part)
        assert all(one + other in total for one in whole for other in part)

    @pytest.mark.parametrize(
        ("low", "high", "text"),
        [
            (GIB, GIB + GIB // 2, "1.00–1.50 GiB"),
            (1 << 20, GIB, "1.0 MiB–1.00 GiB"),
            (GIB, GIB + 1, "1.00 GiB"),
            (0, GIB, "0–1.00 GiB"),
        ],
    )
    def test_as_a_person_reads_it(self, low: int, high: int, text: str) -> None:
        assert format_range(Range(low, high)) == text
