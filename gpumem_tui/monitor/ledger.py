"""A device's memory as rows that sum to its total: the driver's reserve, each process, unaccounted, free.

Pure. Total, used and free stay as the driver counts them; what processes claim is fitted into used, with a note where
the two disagree, so that a row can be trusted and a disagreement is seen.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from gpumem_tui.ledger import Ledger, LedgerRow
from gpumem_tui.memory import Bucket, Unknown, Value, format_bytes
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.snapshot import HOLDERS, NO_LEDGER, GpuProcess, GpuReading, Instance, Memory, Snapshot
from gpumem_tui.monitor.vendors import known

DEVICE_BUCKETS = (Bucket.DRIVER_RESERVED, Bucket.PROCESS, Bucket.UNACCOUNTED, Bucket.FREE)
"""The kinds of rows of a device's ledger, which sum to it."""


def device_ledger(
    memory: Reading[Memory], processes: Reading[tuple[GpuProcess, ...]], *, holders: str = HOLDERS
) -> Reading[Ledger[GpuProcess]]:
    """Make the ledger of a device, or of a MIG instance.

    Args:
        memory: as the driver counts it. Where `reserved_bytes` is unknown, used includes it.
        processes: whose shares are its rows.
        holders: who may hold what no process accounts for.
    """
    memory = possible_memory(memory)
    if isinstance(memory, Unknown):
        return memory
    reserved_bytes = _reserved(memory)
    outside_bytes = _outside(memory)
    free_bytes = min(memory.free_bytes, outside_bytes)
    process_rows = _process_rows(processes, memory.used_bytes)
    claimed_bytes = sum(row.size_bytes for row in process_rows if isinstance(row.size_bytes, int))
    unaccounted_bytes = memory.total_bytes - reserved_bytes - claimed_bytes - free_bytes
    notes = _unaccounted_notes(memory, processes)
    if outside_bytes > free_bytes:
        notes.append(f"{format_bytes(outside_bytes - free_bytes)} that the driver calls neither used nor free")
    note = ", ".join([*notes, holders]) if unaccounted_bytes else ""
    rows: tuple[LedgerRow[GpuProcess], ...] = (
        LedgerRow(Bucket.DRIVER_RESERVED, memory.reserved_bytes),
        *process_rows,
        LedgerRow(Bucket.UNACCOUNTED, unaccounted_bytes, note=note),
        LedgerRow(Bucket.FREE, free_bytes),
    )
    return Ledger(memory.total_bytes, rows)


def possible_memory(memory: Reading[Memory]) -> Reading[Memory]:
    """Return a device's memory; unknown with what the driver shows where that does not add up."""
    if isinstance(memory, Unknown):
        return memory
    reserved_bytes, outside_bytes = _reserved(memory), _outside(memory)
    if min(memory.total_bytes, reserved_bytes, memory.used_bytes, memory.free_bytes, outside_bytes) >= 0:
        return memory
    return Unknown(
        f"the driver's figures do not add up: {format_bytes(memory.used_bytes)} used and "
        f"{format_bytes(reserved_bytes)} reserved of {format_bytes(memory.total_bytes)}"
    )


def _reserved(memory: Memory) -> int:
    return memory.reserved_bytes if isinstance(memory.reserved_bytes, int) else 0


def _outside(memory: Memory) -> int:
    """Return what is neither used nor the driver's own."""
    return memory.total_bytes - _reserved(memory) - memory.used_bytes


def with_ledgers(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot with the ledgers that are still to be made."""

    def made(part: Instance) -> Instance:
        return (
            structs.replace(part, ledger=device_ledger(part.memory, part.processes))
            if part.ledger == NO_LEDGER
            else part
        )

    def whole(gpu: GpuReading) -> GpuReading:
        if gpu.ledger != NO_LEDGER:
            return gpu
        ledger = device_ledger(gpu.memory, gpu.processes, holders=gpu.holders)
        return structs.replace(gpu, ledger=ledger, instances=tuple(map(made, gpu.instances)))

    return structs.replace(snapshot, gpus=tuple(map(whole, snapshot.gpus)))


def without_ledgers(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot whose ledgers are still to be made."""

    def bare(gpu: GpuReading) -> GpuReading:
        instances = tuple(structs.replace(each, ledger=NO_LEDGER) for each in gpu.instances)
        return structs.replace(gpu, ledger=NO_LEDGER, instances=instances)

    return structs.replace(snapshot, gpus=tuple(map(bare, snapshot.gpus)))


def _process_rows(processes: Reading[tuple[GpuProcess, ...]], used_bytes: int) -> list[LedgerRow[GpuProcess]]:
    """Return the rows of processes, largest first, unknown sizes last, together at most `used_bytes`."""
    if isinstance(processes, Unknown):
        return []
    known = [(p, p.used_bytes) for p in processes if isinstance(p.used_bytes, int)]
    known.sort(key=lambda pair: (-pair[1], pair[0].pid))
    claims = [size_bytes for _, size_bytes in known]
    rows = [
        LedgerRow(Bucket.PROCESS, size_bytes, process, _process_note(process, size_bytes))
        for (process, _), size_bytes in zip(known, _fit(claims, used_bytes), strict=True)
    ]
    unknown = [p for p in processes if isinstance(p.used_bytes, Unknown)]
    return rows + [LedgerRow(Bucket.PROCESS, p.used_bytes, p, _process_note(p, p.used_bytes)) for p in unknown]


def _fit(claims: Sequence[int], used_bytes: int) -> list[int]:
    """Scale the claims down where they exceed `used_bytes`.

    Memory that processes share counts for each of them, and the lists are read a moment after the device's figures.
    """
    claimed_bytes = sum(claims)
    if claimed_bytes <= used_bytes:
        return list(claims)
    fitted = [size_bytes * used_bytes // claimed_bytes for size_bytes in claims]
    fitted[0] += used_bytes - sum(fitted)  # what the rounding left, to the largest
    return fitted


def _process_note(process: GpuProcess, row_bytes: Value) -> str:
    name = "" if isinstance(process.host, Unknown) else process.host.name
    servers = (each.sharing_server for each in known())
    notes = [note for server, note in servers if server and name.startswith(server)]
    if row_bytes != process.used_bytes:
        notes.append(f"scaled down from {format_bytes(process.used_bytes)}: the processes' figures exceed what is used")
    return "; ".join(notes)


def _unaccounted_notes(memory: Memory, processes: Reading[tuple[GpuProcess, ...]]) -> list[str]:
    notes = []
    if isinstance(memory.reserved_bytes, Unknown):
        notes.append("the driver's reserve")
    if isinstance(processes, Unknown):
        return [*notes, f"all processes (their list: {processes.reason})"]
    unknown = [p.used_bytes.reason for p in processes if isinstance(p.used_bytes, Unknown)]
    if unknown:
        listed = "1 listed process" if len(unknown) == 1 else f"{len(unknown)} listed processes"
        notes.append(f"{listed} of unknown size ({unknown[0]})")
    return notes
