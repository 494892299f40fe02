"""A ledger as notebooks show it: as HTML for light and dark pages, without scripts; as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from html import escape

from gpumem_tui.memory import Bucket, format_bytes

_COLOURS = {
    "cache": "#8a8f98",
    "context": "#8a8f98",
    "process": "#3d8fd1",
    "other": "#b07aa1",
    "parameters": "#3d8fd1",
    "gradients": "#d9822b",
    "optimizer": "#2a9d7f",
    "activations": "#c94f4f",
    "batch-data": "#a58a00",
    "temporary": "#8c6bb1",
    "free": "transparent",
}
"""By a bucket's colour in the themes, one that is seen on white and on black."""
_SHOWN_LINES = 8
_LINE = "border-bottom:1px solid rgba(128,128,128,.35)"
_CELL = "text-align:left;padding:1px 12px 1px 0;background:transparent;color:inherit"
_NUMBER = "text-align:right;padding:1px 12px 1px 0;background:transparent;color:inherit;white-space:nowrap"


class LedgerRows(dict[str, int]):
    """The rows of a device's ledger: bytes by key of their bucket. `title`: what it is of, in a line."""

    def __init__(self, title: str, rows: Mapping[str, int]) -> None:
        super().__init__(rows)
        self.title = title

    def __str__(self) -> str:
        return ledger_text(self.title, self)

    def _repr_html_(self) -> str:
        return ledger_html(self.title, self)


def ledger_html(title: str, rows: Mapping[str, int], *, notes: Iterable[str] = ()) -> str:
    """Return a bar of a device's memory, and a table of its rows.

    Args:
        title: what it is of, in a line.
        rows: bytes by key of their bucket; what is 0 is left out.
        notes: further lines, after the table.
    """
    shown = {Bucket(key): size_bytes for key, size_bytes in rows.items() if size_bytes}
    total_bytes = sum(max(0, size_bytes) for size_bytes in shown.values())
    bar = "".join(_part(bucket, size_bytes / total_bytes) for bucket, size_bytes in shown.items() if size_bytes > 0)
    table = places_html((bucket.title, size_bytes) for bucket, size_bytes in shown.items())
    frame = "display:flex;height:14px;max-width:560px;margin:4px 0;border:1px solid rgba(128,128,128,.6)"
    said = "".join(f"<div>{escape(note)}</div>" for note in notes)
    return (
        f'<div style="color:inherit;font-size:13px"><div><b>{escape(title)}</b></div>'
        f'<div style="{frame}">{bar}</div>{table}{said}</div>'
    )


def ledger_text(title: str, rows: Mapping[str, int]) -> str:
    """Return the title, and a line a row."""
    shown = ((Bucket(key), size_bytes) for key, size_bytes in rows.items() if size_bytes)
    return "\n".join([title, *(f"{bucket.title:<20}{format_bytes(size_bytes):>12}" for bucket, size_bytes in shown)])


def lines_html(held: Iterable[tuple[str | None, int]]) -> str:
    """Return a table of the source lines that hold most of what is held at the peak; empty without any."""
    found: Counter[str] = Counter()
    for source, size_bytes in held:
        found[source or ""] += size_bytes
    del found[""]
    return places_html(found.most_common(_SHOWN_LINES), "lines that hold most at the peak") if found else ""


def places_html(places: Iterable[tuple[str, int]], heading: str = "") -> str:
    """Return a table of names and sizes."""
    head = f'<tr><th colspan="2" style="{_CELL}">{escape(heading)}</th></tr>' if heading else ""
    rows = "".join(
        f'<tr style="background:transparent;{_LINE}"><td style="{_CELL}">{escape(name)}</td>'
        f'<td style="{_NUMBER}">{format_bytes(size_bytes)}</td></tr>'
        for name, size_bytes in places
    )
    return f'<table style="border-collapse:collapse;color:inherit;margin:0">{head}{rows}</table>'


def _part(bucket: Bucket, share: float) -> str:
    label = escape(f"{bucket.title}: {100 * share:.1f} %")
    colour = _COLOURS.get(bucket.colour.removesuffix("-1"), _COLOURS["other"])
    return f'<div title="{label}" style="width:{100 * share:.3f}%;background:{colour}"></div>'
