"""The vocabulary: buckets, breakdowns, the ledger that always sums, bytes as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_tui.memory import ALLOCATED_BUCKETS, GIB, Breakdown, Bucket, Ledger, Unknown, format_bytes

sizes = st.dictionaries(st.sampled_from(ALLOCATED_BUCKETS), st.integers(0, 1 << 36))


@given(sizes)
def test_a_breakdown_survives_json(buckets: dict[Bucket, int]) -> None:
    breakdown = Breakdown(buckets)
    assert Breakdown.from_json(breakdown.as_json()).as_json() == breakdown.as_json()
    assert breakdown.total_bytes == sum(breakdown.as_json().values())


@given(sizes, st.integers(0, GIB), st.integers(0, GIB), st.integers(0, GIB), st.integers(0, 1 << 40))
def test_a_ledgers_rows_sum_to_the_device(
    buckets: dict[Bucket, int], cache: int, context: int, driver: int, free: int
) -> None:
    allocated = Breakdown(buckets)
    reserved = allocated.total_bytes + cache
    total = reserved + context + driver + free
    ledger = Ledger.of_device(
        total, allocated=allocated, reserved_bytes=reserved, context_bytes=context, driver_reserved_bytes=driver
    )
    assert ledger.known_bytes == total
    assert ledger.rows[Bucket.FREE] == free
    assert ledger.rows[Bucket.CACHE] == cache


def test_one_unknown_row_makes_free_unknown_and_says_why() -> None:
    ledger = Ledger.of_device(
        GIB, allocated=Breakdown({}), reserved_bytes=0, context_bytes=Unknown("no permission"), driver_reserved_bytes=0
    )
    assert ledger.rows[Bucket.FREE] == Unknown("CUDA context unknown")


def test_a_ledger_cannot_hold_more_than_its_device() -> None:
    with pytest.raises(ValueError, match="exceed"):
        Ledger.of_device(
            10, allocated=Breakdown({Bucket.OTHER: 8}), reserved_bytes=8, context_bytes=3, driver_reserved_bytes=0
        )
    with pytest.raises(ValueError, match="sum to 3"):
        Ledger(4, {Bucket.FREE: 3})


def test_more_allocated_than_reserved_is_refused() -> None:
    with pytest.raises(ValueError, match="8 bytes allocated of 4 reserved"):
        Ledger.of_device(
            10, allocated=Breakdown({Bucket.OTHER: 8}), reserved_bytes=4, context_bytes=0, driver_reserved_bytes=0
        )


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
        (Unknown("not supported"), "not supported"),
        (None, "–"),
    ],
)
def test_bytes_as_a_person_reads_them(value: int | Unknown | None, text: str) -> None:
    assert format_bytes(value) == text
