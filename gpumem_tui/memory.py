"""The vocabulary every producer and every panel shares: the ledger's rows, breakdowns, unknown values.

Imports nothing of ours and nothing beyond the standard library, so the viewer, the child processes and a user's
training process can all speak it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Union

KIB = 1024
MIB = 1024**2
GIB = 1024**3


class Bucket(Enum):
    """One row of the ledger. The value is the key used in JSON; definition order is the order on the screen."""

    DRIVER_RESERVED = "driver_reserved"
    OTHER_PROCESSES = "other_processes"
    CONTEXT = "context"
    CACHE = "cache"
    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    BATCH_DATA = "batch_data"
    TEMPORARY = "temporary"
    OTHER = "other"
    FREE = "free"

    @property
    def title(self) -> str:
        """The bucket's name as a person reads it."""
        return _TITLES[self]


_TITLES = {
    Bucket.DRIVER_RESERVED: "driver reserved",
    Bucket.OTHER_PROCESSES: "other processes",
    Bucket.CONTEXT: "CUDA context",
    Bucket.CACHE: "allocator cache",
    Bucket.PARAMETERS: "parameters",
    Bucket.GRADIENTS: "gradients",
    Bucket.OPTIMIZER: "optimizer state",
    Bucket.ACTIVATIONS: "activations",
    Bucket.BATCH_DATA: "batch data",
    Bucket.TEMPORARY: "temporary",
    Bucket.OTHER: "other allocated",
    Bucket.FREE: "free",
}

ALLOCATED_BUCKETS = (
    Bucket.PARAMETERS,
    Bucket.GRADIENTS,
    Bucket.OPTIMIZER,
    Bucket.ACTIVATIONS,
    Bucket.BATCH_DATA,
    Bucket.TEMPORARY,
    Bucket.OTHER,
)
"""The buckets whose sum is what the caching allocator calls *allocated*."""


@dataclass(frozen=True)
class Unknown:
    """A value that could not be had, and why ("not supported", "no permission", "stale 4 s"). Never a 0."""

    reason: str


Value = Union[int, Unknown]  # noqa: UP007  evaluated at run time, also by the probe on Python 3.9
"""Bytes, or the reason there are none to show."""


@dataclass(frozen=True)
class Range:
    """Bytes between the least and the most that is known to be possible, both included."""

    low_bytes: int
    high_bytes: int

    def __post_init__(self) -> None:
        if self.low_bytes > self.high_bytes:
            raise ValueError(f"no bytes lie between {self.low_bytes} and {self.high_bytes}")

    def __contains__(self, size_bytes: int) -> bool:
        return self.low_bytes <= size_bytes <= self.high_bytes

    def __add__(self, other: Range) -> Range:
        return Range(self.low_bytes + other.low_bytes, self.high_bytes + other.high_bytes)

    def __sub__(self, other: Range) -> Range:
        """The least and the most that is left when something of unknown size is taken from it."""
        return Range(self.low_bytes - other.high_bytes, self.high_bytes - other.low_bytes)

    @property
    def is_exact(self) -> bool:
        """Whether nothing is unknown."""
        return self.low_bytes == self.high_bytes

    def as_json(self) -> dict[str, int]:
        """Both ends, by JSON key."""
        return {"low_bytes": self.low_bytes, "high_bytes": self.high_bytes}

    @classmethod
    def of(cls, sizes_bytes: Iterable[int]) -> Range:
        """From the smallest to the largest of at least one size."""
        sizes = list(sizes_bytes)
        return cls(min(sizes), max(sizes))


@dataclass(frozen=True)
class Breakdown:
    """How the allocated bytes divide into buckets at one moment. A bucket that is absent holds 0 bytes."""

    buckets: Mapping[Bucket, int]

    def __post_init__(self) -> None:
        for bucket, size_bytes in self.buckets.items():
            if bucket not in ALLOCATED_BUCKETS:
                raise ValueError(f"{bucket.value} is not a bucket of allocated memory")
            if size_bytes < 0:
                raise ValueError(f"{bucket.value} is {size_bytes} bytes")
        object.__setattr__(self, "buckets", MappingProxyType(dict(self.buckets)))

    def __getitem__(self, bucket: Bucket) -> int:
        return self.buckets.get(bucket, 0)

    @property
    def total_bytes(self) -> int:
        """The sum of all buckets: allocated bytes."""
        return sum(self.buckets.values())

    def as_json(self, buckets: Iterable[Bucket] = ALLOCATED_BUCKETS) -> dict[str, int]:
        """The bytes by JSON key, for every bucket in `buckets`, zeros included."""
        return {bucket.value: self[bucket] for bucket in buckets}

    @classmethod
    def from_json(cls, values: Mapping[str, int]) -> Breakdown:
        """The inverse of `as_json`.

        Raises:
            ValueError: a key that is no bucket of allocated memory, or a negative size.
        """
        return cls({Bucket(key): size_bytes for key, size_bytes in values.items()})


def format_bytes(value: Value | None) -> str:
    """Bytes as a person reads them: IEC units, two decimals at most; an unknown value as its reason.

    >>> format_bytes(32_000_000_000)
    '29.80 GiB'
    >>> format_bytes(1536)
    '1.5 KiB'
    >>> format_bytes(1536 * GIB)
    '1.50 TiB'
    """
    if value is None:
        return "–"
    if isinstance(value, Unknown):
        return value.reason
    sign = "-" if value < 0 else ""
    size = abs(value)
    for unit, unit_bytes in (("EiB", GIB << 30), ("PiB", GIB << 20), ("TiB", GIB << 10)):
        if size >= unit_bytes:
            return f"{sign}{size / unit_bytes:.2f} {unit}"
    if size >= GIB // 10:
        return f"{sign}{size / GIB:.2f} GiB"
    if size >= MIB:
        return f"{sign}{size / MIB:.1f} MiB"
    if size >= KIB:
        return f"{sign}{size / KIB:.1f} KiB"
    return f"{sign}{size} B"


def format_range(found: Range) -> str:
    """Both ends as a person reads them, the unit once where it is the same; one figure where they read alike.

    >>> format_range(Range(10 * GIB, 10 * GIB + GIB // 4))
    '10.00–10.25 GiB'
    """
    low, high = format_bytes(found.low_bytes), format_bytes(found.high_bytes)
    if low == high:
        return low
    number, unit = low.rsplit(" ", 1)
    return f"{number}–{high}" if high.endswith(f" {unit}") else f"{low}–{high}"


def format_count(count: int) -> str:
    """A count in three digits.

    >>> format_count(2_097_152)
    '2.1 M'
    """
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
