"""A device's memory, divided into rows that sum to it. Only the viewer makes ledgers."""

from __future__ import annotations

from typing import Generic, TypeVar

from msgspec import Struct

from gpumem_tui.memory import ALLOCATED_BUCKETS, Breakdown, Bucket, Unknown, Value

OwnerT = TypeVar("OwnerT")


class LedgerRow(Struct, Generic[OwnerT], frozen=True):
    """A row of a ledger. `process`: whose memory it is, for a process row; `note`: what there is to say about it."""

    kind: Bucket
    size_bytes: Value
    process: OwnerT | None = None
    note: str = ""


class Ledger(Struct, Generic[OwnerT], frozen=True):
    """A device's memory, row by row. More than the device has is a negative free row.

    Raises:
        ValueError: the known rows exceed the device, or all rows have values and do not sum to it.
    """

    total_bytes: int
    rows: tuple[LedgerRow[OwnerT], ...]

    def __post_init__(self) -> None:
        known = [row.size_bytes for row in self.rows if isinstance(row.size_bytes, int)]
        complete = len(known) == len(self.rows)
        if sum(known) > self.total_bytes or (complete and sum(known) != self.total_bytes):
            raise ValueError(f"ledger rows sum to {sum(known)} bytes on a device of {self.total_bytes}")

    def size_bytes(self, kind: Bucket) -> Value:
        """Return the sum of the rows of a kind; unknown if all of them are.

        Memory of a process of unknown size is unaccounted, so the kinds still sum to the device.
        """
        sizes = [row.size_bytes for row in self.rows if row.kind is kind]
        known = [size for size in sizes if isinstance(size, int)]
        return sum(known) if known or not sizes else sizes[0]

    def known(self) -> dict[Bucket, int]:
        """Return the bytes by kind, of the kinds known."""
        sizes = {row.kind: self.size_bytes(row.kind) for row in self.rows}
        return {kind: size_bytes for kind, size_bytes in sizes.items() if isinstance(size_bytes, int)}

    @classmethod
    def of_step(
        cls,
        breakdown: Breakdown | Unknown,
        *,
        allocated_bytes: int,
        reserved_bytes: int,
        used_bytes: int,
        cuda_total_bytes: int,
        total_bytes: int,
    ) -> Ledger[OwnerT]:
        """Make the ledger of a device on which nothing but a training step runs.

        Args:
            breakdown: of the allocated bytes.
            reserved_bytes: by the caching allocator, what is allocated included.
            used_bytes: by the process, the CUDA context included.
            cuda_total_bytes: what CUDA can give of `total_bytes`; the rest the driver keeps.
        """
        sizes: dict[Bucket, Value] = {
            **{b: breakdown if isinstance(breakdown, Unknown) else breakdown[b] for b in ALLOCATED_BUCKETS},
            Bucket.CACHE: reserved_bytes - allocated_bytes,
            Bucket.CONTEXT: used_bytes - reserved_bytes,
            Bucket.DRIVER_RESERVED: total_bytes - cuda_total_bytes,
            Bucket.FREE: cuda_total_bytes - used_bytes,
        }
        return cls(total_bytes, tuple(LedgerRow(bucket, size_bytes) for bucket, size_bytes in sizes.items()))
