"""The vocabulary every producer and every panel shares: buckets, breakdowns, unknown values.

Imports nothing of ours and nothing beyond the standard library, so the viewer, the child processes and a user's
training process can all speak it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Union

KIB = 1024
MIB = 1024**2
GIB = 1024**3


class Bucket(Enum):
    """A kind of row of a ledger: of a device, of a process or of a step. Definition order is the order on the screen.

    Each is one entry: its key in JSON, which is the value; its title, and a shorter one where there is less room; the
    pattern and the colour of the theme that it is drawn with; what it is in a few words, empty where the title states
    it; what there is to explain about it next to the formula; whether it is part of what the caching allocator calls
    *allocated*.
    """

    DRIVER_RESERVED = (
        "driver_reserved", "driver reserved", "driver", "▪", "cache", "part of the device's total that CUDA never gets",
        "The part of the device's total that CUDA never gets.",
    )  # fmt: skip
    OTHER_PROCESSES = "other_processes", "other processes", "other processes", "◆", "cache"
    PROCESS = "process", "process", "process", "▞", "process-1", "memory of this process, from the driver"
    UNACCOUNTED = (
        "unaccounted", "unaccounted", "unaccounted", "?", "other", "in use, but by no process that the driver lists",
    )  # fmt: skip
    CONTEXT = (
        "context", "CUDA context", "CUDA context", "═", "cache", "what CUDA and its libraries take for themselves",
        "Memory that CUDA, its kernels and libraries take before the first tensor. Measured on one "
        "architecture and assumed for the others.",
    )  # fmt: skip
    CACHE = (
        "cache", "allocator cache", "cache", "░", "cache", "reserved from the device, not allocated now",
        "Reserved from the device, not allocated at the peak: the caching allocator keeps freed blocks and rounds "
        "segments up. The closed form leaves it to the headroom.",
    )  # fmt: skip
    PARAMETERS = "parameters", "parameters", "parameters", "█", "parameters", "", "", True
    GRADIENTS = "gradients", "gradients", "gradients", "▓", "gradients", "", "", True
    OPTIMIZER = "optimizer", "optimizer state", "optimizer", "▒", "optimizer", "", "", True
    ACTIVATIONS = (
        "activations", "activations", "activations", "▚", "activations", "kept by forward for backward", "", True,
    )  # fmt: skip
    BATCH_DATA = "batch_data", "batch data", "batch data", "┃", "batch-data", "", "", True
    TEMPORARY = (
        "temporary", "temporary", "temporary", "╱", "temporary", "workspaces, copies, what lives within one phase",
        "Memory that lives within one phase: workspaces, gradients on their way, communication buffers.", True,
    )  # fmt: skip
    OTHER = (
        "other", "other allocated", "other", "╳", "other", "allocated but not attributed, and slack of blocks",
        "Allocated but not attributed: slack of blocks that are not split.", True,
    )  # fmt: skip
    FREE = (
        "free", "free", "free", "·", "free", "what CUDA can still give",
        "The free rest of the device. By the closed form: within the usable share; by the trace: of all of it, with "
        "cached segments counted as used.",
    )  # fmt: skip

    _value_: str
    title: str
    short_title: str
    pattern: str
    colour: str
    meaning: str
    explanation: str
    is_allocated: bool

    def __new__(  # noqa: PLR0913 - the columns of the table above
        cls,
        key: str,
        title: str = "",
        short_title: str = "",
        pattern: str = "",
        colour: str = "",
        meaning: str = "",
        explanation: str = "",
        is_allocated: bool = False,
    ) -> Bucket:
        """Make a member of an entry. The defaults are for mypy, which takes a look-up for a call."""
        self = object.__new__(cls)
        self._value_ = key
        self.title, self.short_title = title, short_title
        self.pattern, self.colour = pattern, colour
        self.meaning, self.explanation = meaning, explanation
        self.is_allocated = is_allocated
        return self


ALLOCATED_BUCKETS = tuple(bucket for bucket in Bucket if bucket.is_allocated)
"""The buckets whose sum is what the caching allocator calls *allocated*."""


@dataclass(frozen=True)
class Unknown:
    """A value that could not be read or computed, and why ("not supported", "stale 4 s"). Never shown as 0."""

    reason: str


Value = Union[int, Unknown]  # noqa: UP007  evaluated at run time, also by the probe on Python 3.9
"""Bytes, or the reason for having none."""


@dataclass(frozen=True)
class Range:
    """Bytes between the least and the most that is possible, both included."""

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
        """Return the least and the most that is left when something of unknown size is taken from this."""
        return Range(self.low_bytes - other.high_bytes, self.high_bytes - other.low_bytes)

    def without(self, part: Range) -> Range:
        """Return the rest of this, without a part that is given separately."""
        return Range(self.low_bytes - part.low_bytes, self.high_bytes - part.high_bytes)

    @property
    def is_exact(self) -> bool:
        """Return whether nothing is unknown."""
        return self.low_bytes == self.high_bytes

    def as_json(self) -> dict[str, int]:
        """Return both ends, by JSON key."""
        return {"low_bytes": self.low_bytes, "high_bytes": self.high_bytes}

    @classmethod
    def of(cls, sizes_bytes: Iterable[int]) -> Range:
        """Make the range from the smallest to the largest of at least one size."""
        sizes = list(sizes_bytes)
        return cls(min(sizes), max(sizes))


@dataclass(frozen=True)
class Breakdown:
    """The allocated part of a ledger: how the bytes divide into buckets at one moment. One that is absent holds 0."""

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
        """Return the bytes by JSON key, for every bucket in `buckets`, zeros included."""
        return {bucket.value: self[bucket] for bucket in buckets}

    @classmethod
    def from_json(cls, values: Mapping[str, int]) -> Breakdown:
        """Make one of what `as_json` returned.

        Raises:
            ValueError: a key that is no bucket of allocated memory, or a negative size.
        """
        return cls({Bucket(key): size_bytes for key, size_bytes in values.items()})


def format_bytes(value: Value | None) -> str:
    """Return bytes as a person reads them: IEC units, two decimals at most; an unknown value as its reason.

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


def size_from(text: str) -> int:
    """Return a memory size: with its unit (20GiB, 512MiB; GB and G mean GiB), or in bytes, of a MiB at least.

    Raises:
        ValueError: it is none; one line names what to type.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(i?B)?", text, re.IGNORECASE)
    size_bytes = 0
    if match is not None:
        unit = {"": 1, "K": KIB, "M": MIB, "G": GIB}[match[2].upper()]
        size_bytes = int(float(match[1]) * unit)
        if not match[2] and not match[3] and 0 < size_bytes < MIB:
            raise ValueError(f"{text} would be bytes: write the unit, as in {text}GiB")
    if size_bytes <= 0:
        raise ValueError(f"{text!r} is not a size such as 20GiB or 512MiB")
    return size_bytes


def size_text(size_bytes: int) -> str:
    """Return a size as it is typed.

    >>> size_text(20 * GIB), size_text(512 * MIB)
    ('20GiB', '512MiB')
    """
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit}{name}"
    return str(size_bytes)


def format_range(found: Range) -> str:
    """Return both ends as a person reads them, the unit once where both share it; one figure where they read alike.

    >>> format_range(Range(10 * GIB, 10 * GIB + GIB // 4))
    '10.00–10.25 GiB'
    """
    low, high = format_bytes(found.low_bytes), format_bytes(found.high_bytes)
    if low == high:
        return low
    number, unit = low.rsplit(" ", 1)
    needs_unit = found.low_bytes != 0 and not high.endswith(f" {unit}")
    return f"{low}–{high}" if needs_unit else f"{number}–{high}"


def format_count(count: int) -> str:
    """Return a count in three digits.

    >>> format_count(2_097_152)
    '2.1 M'
    """
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
