"""The vocabulary: buckets, breakdowns, bytes as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_tui.memory import ALLOCATED_BUCKETS, Breakdown, Bucket, Unknown, format_bytes, format_count

sizes = st.dictionaries(st.sampled_from(ALLOCATED_BUCKETS), st.integers(0, 1 << 36))


@given(sizes)
def test_a_breakdown_survives_json(buckets: dict[Bucket, int]) -> None:
    breakdown = Breakdown(buckets)
    assert Breakdown.from_json(breakdown.as_json()).as_json() == breakdown.as_json()
    assert breakdown.total_bytes == sum(breakdown.as_json().values())


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
