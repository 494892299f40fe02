"""A run's whole allocator history: what was asked for, where it came to lie, and the segments it lay in."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from gpumem_tui.simulator.allocator.timeline import Mark, Timeline
from gpumem_tui.step import Phase, Site

_PACKED_LIMIT_BYTES = 300_000
_ON_DEMAND_ACTIONS = frozenset({"segment_map", "segment_unmap"})


class HistoryError(ValueError):
    """A history that cannot be kept or read; one line saying why."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment taken from the driver before event number `event`, or given back (`size_bytes` < 0)."""

    event: int
    size_bytes: int
    address: int
    stream: int


@dataclass(frozen=True)
class History:
    """Allocation i of the timeline was given `addresses[i - 1]` on `streams[i - 1]`."""

    timeline: Timeline
    addresses: tuple[int, ...]
    streams: tuple[int, ...]
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, entries: Iterable[Mapping[str, Any]], timeline: Timeline) -> History:
        """From one device's entries in `torch.cuda.memory._snapshot()["device_traces"]` and the run's timeline.

        Raises:
            HistoryError: expandable segments, whose mapping is not recorded, or entries that are of another run.
        """
        addresses: list[int] = []
        streams: list[int] = []
        segments: list[Segment] = []
        event = 0
        for entry in entries:
            action = entry["action"]
            if action in _ON_DEMAND_ACTIONS:
                raise HistoryError("expandable segments grow by pages, which this format does not hold")
            if action == "alloc":
                addresses.append(entry["addr"])
                streams.append(entry["stream"])
                event += 1
            elif action == "free_requested":
                event += 1
            elif action in ("segment_alloc", "segment_free"):
                size_bytes = entry["size"] if action == "segment_alloc" else -entry["size"]
                segments.append(Segment(event, size_bytes, entry["addr"], entry["stream"]))
        if len(addresses) != len(timeline.sizes) or event != len(timeline.events):
            raise HistoryError(f"{event} events in the history, {len(timeline.events)} in the timeline")
        return cls(timeline, tuple(addresses), tuple(streams), tuple(segments))


def pack(history: History) -> str:
    """The history in text: JSON of delta-coded columns, deflated, in base 64.

    Raises:
        HistoryError: it would take more than 300 kB.
    """
    columns = {
        "timeline": _timeline_columns(history.timeline),
        "addresses": _deltas(history.addresses),
        "streams": _deltas(history.streams),
        "segments": [[s.event, s.size_bytes, s.address, s.stream] for s in history.segments],
    }
    return _deflated(columns)


def unpack(text: str) -> History:
    """The inverse of `pack`.

    Raises:
        HistoryError: the text is damaged.
    """
    columns = _inflated(text)
    try:
        return History(
            _timeline(columns["timeline"]),
            tuple(accumulate(columns["addresses"])),
            tuple(accumulate(columns["streams"])),
            tuple(Segment(*row) for row in columns["segments"]),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise HistoryError(f"a damaged history: {error}") from error


def pack_timeline(timeline: Timeline) -> str:
    """A timeline alone, as the simulated GPU leaves it, in the same form.

    Raises:
        HistoryError: it would take more than 300 kB.
    """
    return _deflated(_timeline_columns(timeline))


def unpack_timeline(text: str) -> Timeline:
    """The inverse of `pack_timeline`.

    Raises:
        HistoryError: the text is damaged.
    """
    try:
        return _timeline(_inflated(text))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise HistoryError(f"a damaged timeline: {error}") from error


def _deflated(columns: Mapping[str, Any]) -> str:
    text = base64.b85encode(zlib.compress(json.dumps(columns, separators=(",", ":")).encode(), 9)).decode()
    if len(text) > _PACKED_LIMIT_BYTES:
        raise HistoryError(f"{len(text):,} bytes packed, more than {_PACKED_LIMIT_BYTES:,}")
    return text


def _inflated(text: str) -> dict[str, Any]:
    try:
        columns: dict[str, Any] = json.loads(zlib.decompress(base64.b85decode(text)))
    except (ValueError, zlib.error) as error:
        raise HistoryError(f"a damaged history: {error}") from error
    return columns


def _timeline_columns(timeline: Timeline) -> dict[str, Any]:
    """An event is 0 for an allocation, or how many allocations ago the released one was made, from 1."""
    made = 0
    events = []
    for number in timeline.events:
        made += number > 0
        events.append(0 if number > 0 else made + number + 1)
    return {
        "events": events,
        "sizes": list(timeline.sizes),
        "buckets": list(timeline.buckets),
        "marks": [[mark.event, mark.step, mark.phase.value] for mark in timeline.marks],
        "sites": list(timeline.sites),
        "site_table": [[site.operator, site.module, site.source] for site in timeline.site_table],
    }


def _timeline(columns: Mapping[str, Any]) -> Timeline:
    made = 0
    events = []
    for code in columns["events"]:
        made += code == 0
        events.append(made if code == 0 else code - made - 1)
    return Timeline(
        events=tuple(events),
        sizes=tuple(columns["sizes"]),
        buckets=tuple(columns["buckets"]),
        marks=tuple(Mark(event, step, Phase(phase)) for event, step, phase in columns["marks"]),
        sites=tuple(columns["sites"]),
        site_table=tuple(Site(*site) for site in columns["site_table"]),
    )


def _deltas(values: Iterable[int]) -> list[int]:
    previous = 0
    deltas = []
    for value in values:
        deltas.append(value - previous)
        previous = value
    return deltas
