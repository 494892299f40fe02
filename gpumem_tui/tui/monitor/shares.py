"""A device's ledger as stretches of a bar and lines of a legend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from gpumem_tui.memory import ALLOCATED_BUCKETS, Bucket, Unknown, Value, format_bytes
from gpumem_tui.monitor.snapshot import DeviceLedger, GpuProcess, GpuReading, Instance, Kind
from gpumem_tui.tui.kit.figures import MUTED, Span, compact_bytes, proportions, span_width, wrapped
from gpumem_tui.tui.kit.glyphs import BUCKET_LOOKS, PROCESS_LOOKS, UNACCOUNTED_LOOK, Look
from gpumem_tui.tui.monitor.readings import fit
from gpumem_tui.tui.monitor.state import Parts, ProcessParts, device_key

_LEGEND_LABEL_WIDTH = 18
_LEGEND_VALUE_WIDTH = 6
_SHORT_TITLES = {Bucket.CACHE: "cache", Bucket.OPTIMIZER: "optimizer", Bucket.OTHER: "other"}
"""Beside a pid there is less room."""
_LEGEND_GAP = 2


@dataclass(frozen=True)
class Share:
    """One stretch of the bar.

    Attributes:
        label: what the legend calls it; `short` is written into the bar.
        note: why it is there, or why its size is unknown.
    """

    label: str
    short: str
    size_bytes: Value
    look: Look
    note: str = ""


def shares(gpu: GpuReading, parts: Parts) -> tuple[Share, ...]:
    """The stretches from left to right, which sum to the device as its ledger does; none where that is unknown.

    A divided GPU has one for each MIG instance, as each fills up on its own; the whole of it few users may read.
    """
    if any(isinstance(each.ledger, DeviceLedger) for each in gpu.instances):
        return tuple(_instance_shares(gpu))
    return tuple(_shares(gpu.ledger, device_key(gpu), parts)) if isinstance(gpu.ledger, DeviceLedger) else ()


def _shares(ledger: DeviceLedger, device: str, parts: Parts) -> Iterator[Share]:
    turn = 0
    for row in ledger.rows:
        if row.kind is Kind.PROCESS and row.process is not None:
            divided = parts.get((device, row.process.pid))
            if divided is not None and isinstance(row.size_bytes, int) and divided.reserved_bytes <= row.size_bytes:
                yield from divided_share(row.process, row.size_bytes, divided)
            else:
                name = process_name(row.process)
                look = PROCESS_LOOKS[turn % len(PROCESS_LOOKS)]
                turn += 1
                yield Share(f"{row.process.pid} {name}", name, row.size_bytes, look, _why(row.size_bytes, row.note))
        elif row.kind is Kind.DRIVER_RESERVED:
            look = BUCKET_LOOKS[Bucket.DRIVER_RESERVED]
            yield Share("driver reserved", "driver", row.size_bytes, look, _why(row.size_bytes, row.note))
        elif row.kind is Kind.UNACCOUNTED:
            yield Share("unaccounted", "unaccounted", row.size_bytes, UNACCOUNTED_LOOK, _why(row.size_bytes, row.note))
        else:
            yield Share("free", "free", row.size_bytes, BUCKET_LOOKS[Bucket.FREE], _why(row.size_bytes, row.note))


def _instance_shares(gpu: GpuReading) -> Iterator[Share]:
    ledgers = [each.ledger for each in gpu.instances if isinstance(each.ledger, DeviceLedger)]
    reserved = _together(ledger.size_bytes(Kind.DRIVER_RESERVED) for ledger in ledgers)
    yield Share("driver reserved", "driver", reserved, BUCKET_LOOKS[Bucket.DRIVER_RESERVED], _why(reserved, ""))
    for turn, each in enumerate(gpu.instances):
        yield _instance_share(each, PROCESS_LOOKS[turn % len(PROCESS_LOOKS)])
    if not isinstance(gpu.memory, Unknown) and len(ledgers) == len(gpu.instances):
        outside_bytes = gpu.memory.total_bytes - sum(ledger.total_bytes for ledger in ledgers)
        if outside_bytes > 0:
            yield Share("in no instance", "in no instance", outside_bytes, BUCKET_LOOKS[Bucket.OTHER_PROCESSES])
    free = _together(ledger.size_bytes(Kind.FREE) for ledger in ledgers)
    yield Share("free", "free", free, BUCKET_LOOKS[Bucket.FREE])


def _instance_share(instance: Instance, look: Look) -> Share:
    """What is in use of an instance."""
    name, ledger = f"MIG {instance.index}", instance.ledger
    if isinstance(ledger, Unknown):
        return Share(name, name, ledger, look, ledger.reason)
    sizes = {kind: ledger.size_bytes(kind) for kind in (Kind.DRIVER_RESERVED, Kind.FREE)}
    used_bytes = ledger.total_bytes - sum(size for size in sizes.values() if isinstance(size, int))
    unlisted = [f"{format_bytes(row.size_bytes)} unaccounted: {row.note}" for row in ledger.rows
                if row.kind is Kind.UNACCOUNTED and row.size_bytes]  # fmt: skip
    return Share(f"{name} of {compact_bytes(ledger.total_bytes)}", name, used_bytes, look, "; ".join(unlisted))


def _together(sizes: Iterable[Value]) -> Value:
    """Their sum; unknown if one of them is."""
    total = 0
    for size_bytes in sizes:
        if isinstance(size_bytes, Unknown):
            return size_bytes
        total += size_bytes
    return total


def divided_share(process: GpuProcess, used_bytes: int, parts: ProcessParts) -> Iterator[Share]:
    """What a probe says of a process: its CUDA context, its allocator's cache and its buckets."""
    sizes = {Bucket.CONTEXT: used_bytes - parts.reserved_bytes, Bucket.CACHE: parts.cache_bytes}
    sizes.update({bucket: parts.breakdown[bucket] for bucket in ALLOCATED_BUCKETS})
    for bucket, size_bytes in sizes.items():
        if size_bytes:
            title = _SHORT_TITLES.get(bucket, bucket.title)
            yield Share(f"{process.pid} {title}", title, size_bytes, BUCKET_LOOKS[bucket])


def process_name(process: GpuProcess) -> str:
    """The program's name, or "?" for a pid that cannot be matched."""
    return process.host.name if not isinstance(process.host, Unknown) else "?"


def bar(stretches: Sequence[Share], width: int) -> list[Span]:
    """The bar, each stretch in its pattern, with its name and GiB written in where there is room."""
    drawn = [share for share in stretches if isinstance(share.size_bytes, int) and share.size_bytes > 0]
    sizes = [share.size_bytes for share in drawn if isinstance(share.size_bytes, int)]
    spans: list[Span] = []
    for share, cells in zip(drawn, proportions(sizes, width), strict=True):
        spans += _stretch(share, cells)
    return spans


def _stretch(share: Share, cells: int) -> Iterator[Span]:
    pattern, colour = share.look
    size = compact_bytes(share.size_bytes)
    texts = (f"{share.label} {size}", f"{share.short} {size}", size)
    text = next((text for text in texts if len(text) + 4 <= cells and text.isascii()), "")
    if not text:
        yield pattern * cells, colour
        return
    is_free = share.label == "free"
    yield pattern, colour
    yield f" {text} ", MUTED if is_free else f"bold $background on {colour}"
    yield pattern * (cells - len(text) - 3), colour


def legend(stretches: Sequence[Share], width: int, lines: int) -> list[list[Span]]:
    """The numbers of the bar in at most `lines` lines; what does not fit is summed up, the reasons come last."""
    gap = _LEGEND_GAP
    label_width = min(_LEGEND_LABEL_WIDTH, max((cell_len(share.label) for share in stretches), default=0))
    cell = min(label_width + _LEGEND_VALUE_WIDTH + 3, width)
    columns = max(1, (width + gap) // (cell + gap))
    shown = list(stretches)
    notes = [share for share in shown if share.note]
    needed = -(-len(shown) // columns)
    room_for_notes = max(0, min(len(notes), lines - needed))
    if needed > lines:
        shown = _summed(shown, columns * lines)
    items = [_legend_item(share, cell) for share in shown]
    return [*wrapped(items, width, gap), *(_note(share, width) for share in notes[:room_for_notes])][:lines]


def _summed(stretches: list[Share], most: int) -> list[Share]:
    """At most `most` of them: the driver's if there is room for four, the largest, the rest in one, and free."""
    if most < 2:
        return stretches[-1:]
    driver = 1 if most >= 4 else 0
    head, inner, free = stretches[:driver], stretches[driver:-1], stretches[-1]
    kept = sorted(inner, key=lambda share: share.size_bytes if isinstance(share.size_bytes, int) else -1, reverse=True)
    kept = kept[: most - 2 - driver]
    rest = [share for share in inner if share not in kept]
    label = f"+{len(rest)} more" if kept else "not free"
    together = _together(share.size_bytes for share in rest)
    others = Share(label, label, together, BUCKET_LOOKS[Bucket.OTHER_PROCESSES])
    return [*head, *(share for share in inner if share in kept), others, free]


def _legend_item(share: Share, cell: int) -> list[Span]:
    pattern, colour = share.look
    size = compact_bytes(share.size_bytes)
    return [
        (pattern, colour),
        (f" {fit(share.label, cell - 3 - _LEGEND_VALUE_WIDTH)} ", ""),
        (f"{size:>{_LEGEND_VALUE_WIDTH}}", "bold"),
    ]


def _note(share: Share, width: int) -> list[Span]:
    line: list[Span] = [(share.look[0], share.look[1]), (f" {share.label}: ", MUTED)]
    return [*line, (fit(share.note, max(0, width - span_width(line))), MUTED)]


def _why(size_bytes: Value, note: str) -> str:
    return note or (size_bytes.reason if isinstance(size_bytes, Unknown) else "")
