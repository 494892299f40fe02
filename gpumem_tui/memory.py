"""The vocabulary every producer and every panel shares: buckets, breakdowns, the ledger, unknown values.

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


@dataclass(frozen=True)
class Ledger:
    """The whole device, row by row. When every row is known, the rows sum to `total_bytes`."""

    total_bytes: int
    rows: Mapping[Bucket, Value]

    def __post_init__(self) -> None:
        known = self.known_bytes
        complete = all(isinstance(value, int) for value in self.rows.values())
        if known > self.total_bytes or (complete and known != self.total_bytes):
            raise ValueError(f"ledger rows sum to {known} bytes on a device of {self.total_bytes}")
        object.__setattr__(self, "rows", MappingProxyType(dict(self.rows)))

    @property
    def known_bytes(self) -> int:
        """The sum of the rows that are known."""
        return sum(value for value in self.rows.values() if isinstance(value, int))

    @classmethod
    def of_device(
        cls,
        total_bytes: int,
        *,
        allocated: Breakdown,
        reserved_bytes: int,
        context_bytes: Value,
        driver_reserved_bytes: Value,
        other_processes_bytes: Value = 0,
    ) -> Ledger:
        """The ledger of a device on which one process trains. Free is what remains; unknown if any row is.

        Raises:
            ValueError: the rows exceed the device, or more is allocated than reserved.
        """
        if allocated.total_bytes > reserved_bytes:
            raise ValueError(f"{allocated.total_bytes} bytes allocated of {reserved_bytes} reserved")
        rows: dict[Bucket, Value] = {
            Bucket.DRIVER_RESERVED: driver_reserved_bytes,
            Bucket.OTHER_PROCESSES: other_processes_bytes,
            Bucket.CONTEXT: context_bytes,
            Bucket.CACHE: reserved_bytes - allocated.total_bytes,
            **{bucket: allocated[bucket] for bucket in ALLOCATED_BUCKETS},
        }
        unknown = [bucket.title for bucket, value in rows.items() if isinstance(value, Unknown)]
        if unknown:
            rows[Bucket.FREE] = Unknown(f"{', '.join(unknown)} unknown")
        else:
            rows[Bucket.FREE] = free_bytes = total_bytes - sum(v for v in rows.values() if isinstance(v, int))
            if free_bytes < 0:
                raise ValueError(f"ledger rows exceed the device's {total_bytes} bytes")
        return cls(total_bytes, rows)


def format_bytes(value: Value | None) -> str:
    """Bytes as a person reads them: IEC units, two decimals at most; an unknown value as its reason.

    >>> format_bytes(32_000_000_000)
    '29.80 GiB'
    >>> format_bytes(1536)
    '1.5 KiB'
    """
    if value is None:
        return "–"
    if isinstance(value, Unknown):
        return value.reason
    sign = "-" if value < 0 else ""
    size = abs(value)
    if size >= GIB // 10:
        return f"{sign}{size / GIB:.2f} GiB"
    if size >= MIB:
        return f"{sign}{size / MIB:.1f} MiB"
    if size >= KIB:
        return f"{sign}{size / KIB:.1f} KiB"
    return f"{sign}{size} B"
