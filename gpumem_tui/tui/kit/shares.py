"""Stretches of a bar of a device's memory, and the lines of their legend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from msgspec import Struct
from rich.cells import cell_len

from gpumem_tui.memory import Bucket, Unknown, Value
from gpumem_tui.tui.kit.figures import MUTED, Row, Span, compact_bytes, fit, proportions, span_width, wrapped
from gpumem_tui.tui.kit.glyphs import BAR_ORDER, BUCKET_LOOKS, Look

_LEGEND_LABEL_WIDTH = 18
_LEGEND_VALUE_WIDTH = 6
_LEGEND_GAP = 2


class Share(Struct, frozen=True):
    """A stretch of the bar.

    Attributes:
        label: what the legend calls it; `short` is written into the bar.
        note: why it is there, or why its size is unknown.
    """

    label: str
    short: str
    size_bytes: Value
    look: Look
    note: str = ""


def bar(stretches: Sequence[Share], width: int) -> Row:
    """Return the bar, each stretch in its pattern, with its name and GiB written in where there is room."""
    return list(_bar(tuple(stretches), width))


@lru_cache(64)  # as a job that trains holds what it held a second ago
def _bar(stretches: tuple[Share, ...], width: int) -> tuple[Span, ...]:
    drawn = [share for share in stretches if isinstance(share.size_bytes, int) and share.size_bytes > 0]
    sizes = [share.size_bytes for share in drawn if isinstance(share.size_bytes, int)]
    cells = proportions(sizes, width)
    return tuple(span for share, count in zip(drawn, cells, strict=True) for span in _stretch(share, count))


def _stretch(share: Share, cells: int) -> Iterator[Span]:
    pattern, colour = share.look
    size = compact_bytes(share.size_bytes)
    texts = (f"{share.label} {size}", f"{share.short} {size}", size)
    text = next((text for text in texts if len(text) + 4 <= cells and text.isascii()), "")
    if not text:
        yield pattern * cells, colour
        return
    is_ordinary = share.look == BUCKET_LOOKS[Bucket.FREE]
    yield pattern, colour
    yield f" {text} ", MUTED if is_ordinary else f"bold $background on {colour}"
    yield pattern * (cells - len(text) - 3), colour


def bucket_cells(sizes: Mapping[Bucket, int], width: int) -> list[Look]:
    """Return the cells of a bar of buckets, each in its pattern; `joined` makes a row of them."""
    shown = [bucket for bucket in BAR_ORDER if sizes.get(bucket)]
    cells = proportions([sizes[bucket] for bucket in shown], width)
    return [look for bucket, count in zip(shown, cells, strict=True) for look in [BUCKET_LOOKS[bucket]] * count]


def legend(stretches: Sequence[Share], width: int, lines: int) -> list[Row]:
    """Return the numbers of a bar in at most `lines` lines; what does not fit is summed up, reasons come last."""
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
    together = summed(share.size_bytes for share in rest)
    others = Share(label, label, together, BUCKET_LOOKS[Bucket.OTHER_PROCESSES])
    return [*head, *(share for share in inner if share in kept), others, free]


def summed(sizes: Iterable[Value]) -> Value:
    """Their sum; unknown if one of them is."""
    total = 0
    for size_bytes in sizes:
        if isinstance(size_bytes, Unknown):
            return size_bytes
        total += size_bytes
    return total


def _legend_item(share: Share, cell: int) -> Row:
    pattern, colour = share.look
    size = compact_bytes(share.size_bytes)
    return [
        (pattern, colour),
        (f" {fit(share.label, cell - 3 - _LEGEND_VALUE_WIDTH)} ", ""),
        (f"{size:>{_LEGEND_VALUE_WIDTH}}", "bold"),
    ]


def _note(share: Share, width: int) -> Row:
    line: Row = [(share.look[0], share.look[1]), (f" {share.label}: ", MUTED)]
    return [*line, (fit(share.note, max(0, width - span_width(line))), MUTED)]


def reason(size_bytes: Value, note: str) -> str:
    """Return the note of a figure, else why it is unknown."""
    return note or (size_bytes.reason if isinstance(size_bytes, Unknown) else "")
