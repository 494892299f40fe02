"""Reads the recordings of tests/recordings/data, and works out what the allocator held before the first event.

A recording that begins within a run tells its start by its end: every event undone, from the last to the first.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gpumem_tui.memory import MIB
from gpumem_tui.simulator.allocator.timeline import Timeline, rounded
from tests.gpu.history import History, Segment
from tests.gpu.placement import StartSegment

DATA = Path(__file__).with_name("data")
PATHS = tuple(sorted(DATA.glob("*.json.gz")))

_SMALL_SEGMENT_BYTES = 2 * MIB
_LARGEST_SLACK_BYTES = MIB
"""The rest of a block of the large pool that the allocator does not split off."""

_Entry = tuple[str, int, int, int]
"""Action, address, size in bytes, stream."""


@dataclass(frozen=True)
class Snapshot:
    """One recording.

    Attributes:
        history: the events; the allocations from before the first one come first, with the size of their blocks.
        start: the segments from before the first event.
        end_blocks: (address, size in bytes, whether it is in use) of every block at the end, by address.
        end_reserved_bytes: the sum of the segments at the end.
    """

    history: History
    start: tuple[StartSegment, ...]
    end_blocks: tuple[tuple[int, int, bool], ...]
    end_reserved_bytes: int


@cache
def load(path: Path) -> Snapshot:
    """Read one file of tests/recordings/data.

    Raises:
        ValueError: it holds what cannot be replayed from its end: expandable segments, or more than one device.
    """
    with gzip.open(path) as file:
        body = json.load(file)
    traces = [trace for trace in body["traces"] if trace]
    if len(traces) != 1:
        raise ValueError(f"{path.name}: {len(traces)} devices have events")
    entries: list[_Entry] = [(action, address, size, stream) for action, address, size, stream in traces[0]]
    unknown = {entry[0] for entry in entries} - _ACTIONS
    if unknown:
        raise ValueError(f"{path.name}: events of other kinds: {', '.join(sorted(unknown))}")
    end_blocks = tuple(sorted(_blocks(body["segments"])))
    segments, live = _undone(entries, body["segments"])
    sizes = _with_slack(segments, live, entries)
    numbers = {address: number for number, address in enumerate(sizes, start=1)}
    start = _start(segments, sorted(sizes), numbers)
    reserved_bytes = sum(segment["total_size"] for segment in body["segments"])
    return Snapshot(_history(entries, sizes, numbers), start, end_blocks, reserved_bytes)


_ACTIONS = frozenset({"alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "snapshot"})


def _blocks(segments: Iterable[dict[str, Any]]) -> Iterable[tuple[int, int, bool]]:
    for segment in segments:
        address = segment["address"]
        for size_bytes, _, state in segment["blocks"]:
            yield address, size_bytes, state != "inactive"
            address += size_bytes


def _undone(
    entries: list[_Entry], end: Iterable[dict[str, Any]]
) -> tuple[dict[int, tuple[int, int]], dict[int, tuple[int, bool]]]:
    """The start: (size, stream) of segments, and (size, whether that is the whole block) of live blocks, by address."""
    segments = {segment["address"]: (segment["total_size"], segment["stream"]) for segment in end}
    live = {address: (size_bytes, True) for address, size_bytes, in_use in _blocks(end) if in_use}
    for action, address, size_bytes, stream in reversed(entries):
        if action == "alloc":
            del live[address]
        elif action == "free_completed":
            live[address] = rounded(size_bytes), False
        elif action == "segment_alloc":
            del segments[address]
        elif action == "segment_free":
            segments[address] = size_bytes, stream
    return segments, live


def _with_slack(
    segments: dict[int, tuple[int, int]], live: dict[int, tuple[int, bool]], entries: list[_Entry]
) -> dict[int, int]:
    """The block sizes of what is live at the start, by address.

    A large block that is freed later may be larger than what was asked for: by all that follows it, if that is too
    little to have been split off, or by what is before the first block that is placed behind it.
    """
    addresses = sorted(live)
    bases = sorted(segments)
    sizes = {address: live[address][0] for address in addresses}
    gaps: dict[int, int] = {}
    for index, address in enumerate(addresses):
        base = bases[bisect_right(bases, address) - 1]
        end = base + segments[base][0]
        size_bytes, is_whole = live[address]
        following = addresses[index + 1] if index + 1 < len(addresses) else end
        gap = min(following, end) - address - size_bytes
        if is_whole or segments[base][0] == _SMALL_SEGMENT_BYTES:
            continue
        if gap <= _LARGEST_SLACK_BYTES:
            sizes[address] += gap
        else:
            gaps[address] = gap
    for address, slack in _first_behind(gaps, sizes, entries).items():
        sizes[address] += slack
    return sizes


def _first_behind(gaps: dict[int, int], sizes: dict[int, int], entries: list[_Entry]) -> dict[int, int]:
    """The bytes from a block to the first one placed in the gap behind it, while it is live, if they can be slack."""
    open_gaps = sorted(gaps)
    found: dict[int, int] = {}
    for action, address, _, _ in entries:
        if action == "free_completed" and address in gaps:
            index = bisect_left(open_gaps, address)
            if index < len(open_gaps) and open_gaps[index] == address:
                del open_gaps[index]
        elif action == "alloc":
            index = bisect_right(open_gaps, address) - 1
            if index >= 0:
                before = open_gaps[index]
                slack = address - before - sizes[before]
                if slack < gaps[before]:
                    found[before] = slack if slack <= _LARGEST_SLACK_BYTES else 0
                    del open_gaps[index]
    return found


def _start(
    segments: dict[int, tuple[int, int]], addresses: list[int], numbers: dict[int, int]
) -> tuple[StartSegment, ...]:
    found = []
    for base, (size_bytes, stream) in sorted(segments.items()):
        inside = addresses[bisect_left(addresses, base) : bisect_left(addresses, base + size_bytes)]
        found.append(StartSegment(base, size_bytes, stream, tuple(numbers[address] for address in inside)))
    return tuple(found)


def _history(entries: list[_Entry], start_sizes: dict[int, int], numbers: dict[int, int]) -> History:
    """The events behind the allocations that the recording begins with."""
    addresses, sizes = list(start_sizes), list(start_sizes.values())
    streams: defaultdict[int, int] = defaultdict(int)
    live = dict(numbers)
    events: list[int] = []
    segments: list[Segment] = []
    for action, address, size_bytes, stream in entries:
        if action == "alloc":
            addresses.append(address)
            sizes.append(size_bytes)
            streams[len(sizes)] = stream
            live[address] = len(sizes)
            events.append(len(sizes))
        elif action == "free_completed":
            events.append(-live.pop(address))
        elif action == "segment_alloc":
            segments.append(Segment(len(events), size_bytes, address, stream))
        elif action == "segment_free":
            segments.append(Segment(len(events), -size_bytes, address, stream))
    timeline = Timeline(tuple(events), tuple(sizes), (0,) * len(sizes), ())
    return History(timeline, tuple(addresses), tuple(streams[n] for n in range(1, len(sizes) + 1)), tuple(segments))
