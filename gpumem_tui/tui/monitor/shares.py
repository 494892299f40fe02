"""A device's ledger as stretches of a bar and lines of a legend."""

from __future__ import annotations

from collections.abc import Iterator

from gpumem_tui.memory import ALLOCATED_BUCKETS, Bucket, Ledger, Unknown, format_bytes
from gpumem_tui.monitor.snapshot import GpuProcess, GpuReading, Instance
from gpumem_tui.tui.kit.figures import compact_bytes
from gpumem_tui.tui.kit.glyphs import BUCKET_LOOKS, PROCESS_LOOKS, Look
from gpumem_tui.tui.kit.shares import Share, reason, summed
from gpumem_tui.tui.monitor.state import Parts, ProcessParts, device_key


def shares(gpu: GpuReading, parts: Parts) -> tuple[Share, ...]:
    """The stretches from left to right, which sum to the device as its ledger does; none where that is unknown.

    A divided GPU has one for each MIG instance, as each fills up on its own; the whole of it few users may read.
    """
    if any(isinstance(each.ledger, Ledger) for each in gpu.instances):
        return tuple(_instance_shares(gpu))
    return tuple(_shares(gpu.ledger, device_key(gpu), parts)) if isinstance(gpu.ledger, Ledger) else ()


def _shares(ledger: Ledger[GpuProcess], device: str, parts: Parts) -> Iterator[Share]:
    turn = 0
    for row in ledger.rows:
        if row.kind is Bucket.PROCESS and row.process is not None:
            divided = parts.get((device, row.process.pid))
            if divided is not None and isinstance(row.size_bytes, int) and divided.reserved_bytes <= row.size_bytes:
                yield from divided_share(row.process, row.size_bytes, divided)
            else:
                name = process_name(row.process)
                look = PROCESS_LOOKS[turn % len(PROCESS_LOOKS)]
                turn += 1
                yield Share(f"{row.process.pid} {name}", name, row.size_bytes, look, reason(row.size_bytes, row.note))
        else:
            bucket, said = row.kind, reason(row.size_bytes, row.note)
            yield Share(bucket.title, bucket.short_title, row.size_bytes, BUCKET_LOOKS[bucket], said)


def _instance_shares(gpu: GpuReading) -> Iterator[Share]:
    ledgers = [each.ledger for each in gpu.instances if isinstance(each.ledger, Ledger)]
    reserved = summed(ledger.size_bytes(Bucket.DRIVER_RESERVED) for ledger in ledgers)
    yield Share("driver reserved", "driver", reserved, BUCKET_LOOKS[Bucket.DRIVER_RESERVED], reason(reserved, ""))
    for turn, each in enumerate(gpu.instances):
        yield _instance_share(each, PROCESS_LOOKS[turn % len(PROCESS_LOOKS)])
    if not isinstance(gpu.memory, Unknown) and len(ledgers) == len(gpu.instances):
        outside_bytes = gpu.memory.total_bytes - sum(ledger.total_bytes for ledger in ledgers)
        if outside_bytes > 0:
            yield Share("in no instance", "in no instance", outside_bytes, BUCKET_LOOKS[Bucket.OTHER_PROCESSES])
    free = summed(ledger.size_bytes(Bucket.FREE) for ledger in ledgers)
    yield Share("free", "free", free, BUCKET_LOOKS[Bucket.FREE])


def _instance_share(instance: Instance, look: Look) -> Share:
    """What is in use of an instance."""
    name, ledger = f"MIG {instance.index}", instance.ledger
    if isinstance(ledger, Unknown):
        return Share(name, name, ledger, look, ledger.reason)
    sizes = {kind: ledger.size_bytes(kind) for kind in (Bucket.DRIVER_RESERVED, Bucket.FREE)}
    used_bytes = ledger.total_bytes - sum(size for size in sizes.values() if isinstance(size, int))
    unlisted = [f"{format_bytes(row.size_bytes)} unaccounted: {row.note}" for row in ledger.rows
                if row.kind is Bucket.UNACCOUNTED and row.size_bytes]  # fmt: skip
    return Share(f"{name} of {compact_bytes(ledger.total_bytes)}", name, used_bytes, look, "; ".join(unlisted))


def divided_share(process: GpuProcess, used_bytes: int, parts: ProcessParts) -> Iterator[Share]:
    """What a probe says of a process: its CUDA context, its allocator's cache and its buckets."""
    sizes = {Bucket.CONTEXT: used_bytes - parts.reserved_bytes, Bucket.CACHE: parts.cache_bytes}
    sizes.update({bucket: parts.breakdown[bucket] for bucket in ALLOCATED_BUCKETS})
    for bucket, size_bytes in sizes.items():
        if size_bytes:
            title = bucket.short_title
            yield Share(f"{process.pid} {title}", title, size_bytes, BUCKET_LOOKS[bucket])


def process_name(process: GpuProcess) -> str:
    """The program's name, or "?" for a pid that cannot be matched."""
    return process.host.name if not isinstance(process.host, Unknown) else "?"
