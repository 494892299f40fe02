"""Why a request found no room: how free memory is laid out between the blocks of segments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from gpumem_tui.memory import format_bytes
from gpumem_tui.report.objects import JsonObject
from gpumem_tui.simulator.allocator.caching import SMALL_REQUEST_BYTES
from gpumem_tui.snapshots.model import EventHistory
from gpumem_tui.snapshots.states import BlockState, Places, Rules

Reason = Literal["full", "fragmented", "limited"]
_REMEDY = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may help"
_MOST_PINS = 8
_MOST_LINES = 3


class Pin(JsonObject, frozen=True):
    """Blocks that keep a segment from being given back, as they are printed, too.

    Attributes:
        lines: where the largest of them were made.
    """

    address: int
    size_bytes: int = msgspec.field(name="bytes")
    free_bytes: int
    blocks: int
    lines: tuple[str, ...] = msgspec.field(name="by")


class FailedRequest(JsonObject, frozen=True):
    """A request that found no room, as it is printed, too.

    Attributes:
        wanted_bytes: the request, rounded as the allocator does; `segment_bytes`: what it asked of the driver for it.
        device_free_bytes: what the driver had left.
        cached_bytes: free in segments of this process; `usable_bytes`: of that, in the request's stream and pool.
        largest_free_bytes, pieces: the largest usable free block, and how many there are.
        line: where the program asked. `explanation`: why it did not fit, a sentence a line.
    """

    event: int
    wanted_bytes: int
    segment_bytes: int
    device_free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    cached_bytes: int
    usable_bytes: int
    largest_free_bytes: int
    pieces: int
    reason: Reason
    line: str = msgspec.field(name="source")
    explanation: tuple[str, ...]
    pins: tuple[Pin, ...] = msgspec.field(name="pinned")

    @property
    def free_bytes(self) -> int:
        """The sum of all bytes that were free."""
        return self.device_free_bytes + self.cached_bytes


def out_of_memory(state: BlockState, history: EventHistory, rules: Rules, places: Places) -> FailedRequest:
    """Explain the request that failed in the event that a state has just reached."""
    event = state.event
    wanted, stream = rules.rounded(history.sizes[event]), history.streams[event]
    device_free, is_small = history.addresses[event], wanted <= SMALL_REQUEST_BYTES
    free: defaultdict[int, list[int]] = defaultdict(list)
    for _, size_bytes, start in state.free_ranges():
        free[start].append(size_bytes)
    usable = [
        size_bytes
        for start, sizes in free.items()
        if state.memory[start].stream == stream
        and state.memory[start].is_small == is_small
        and state.memory[start].pool == (0, 0)
        for size_bytes in sizes
    ]
    cached = sum(map(sum, free.values()))
    expandable = rules.settings.expandable_segments
    segment_bytes = wanted if expandable else rules.segment_size(wanted)
    reason: Reason = "fragmented" if device_free + cached >= wanted else "full"
    if device_free >= segment_bytes:
        reason = "limited"
    found = FailedRequest(
        event=event,
        wanted_bytes=wanted,
        segment_bytes=segment_bytes,
        device_free_bytes=device_free,
        allocated_bytes=state.allocated_bytes,
        reserved_bytes=state.reserved_bytes,
        cached_bytes=cached,
        usable_bytes=sum(usable),
        largest_free_bytes=max(usable, default=0),
        pieces=len(usable),
        reason=reason,
        line=places.line(history.stacks[event]),
        explanation=(),
        pins=tuple(_pins(state, free, places)),
    )
    return replace(found, explanation=tuple(_explained(found, expandable=expandable)))


def _explained(request: FailedRequest, *, expandable: bool) -> list[str]:
    """Say why it did not fit, a sentence a line."""
    wanted = format_bytes(request.wanted_bytes)
    free = (
        f"{format_bytes(request.device_free_bytes)} with the driver, {format_bytes(request.cached_bytes)} in the cache"
    )
    if request.reason == "limited":
        return [
            f"{wanted} wanted, and the driver had {format_bytes(request.device_free_bytes)}: "
            "a limit of the process stopped it (set_per_process_memory_fraction), not the device"
        ]
    if request.reason == "full":
        return [
            f"{wanted} wanted, {format_bytes(request.free_bytes)} free in all ({free}): "
            f"{format_bytes(request.wanted_bytes - request.free_bytes)} too little, in one piece or not"
        ]
    lines = [f"{wanted} wanted, {format_bytes(request.free_bytes)} free in all ({free}): enough, but not in one piece"]
    if request.pieces:
        usable, largest = format_bytes(request.usable_bytes), format_bytes(request.largest_free_bytes)
        lines.append(f"of the cache {usable} could serve it: {request.pieces:,} pieces, the largest of {largest}")
    if elsewhere := request.cached_bytes - request.usable_bytes:
        lines.append(f"{format_bytes(elsewhere)} of it belong to other streams or sizes of request")
    driver = format_bytes(request.device_free_bytes)
    lines.append(f"a new segment for it takes {format_bytes(request.segment_bytes)}, and the driver had {driver}")
    if not expandable:
        lines.append(f"{_REMEDY}: whole free pages between blocks are given back and mapped in one piece")
    return lines


def _pins(state: BlockState, free: dict[int, list[int]], places: Places) -> list[Pin]:
    """Find the segments with most free memory between blocks, and what keeps them."""
    most = sorted(free, key=lambda start: -sum(free[start]))[:_MOST_PINS]
    return [
        Pin(start, state.memory[start].size_bytes, sum(free[start]), len(blocks), _lines(state, blocks, places))
        for start in most
        if (blocks := [at for at in state.held if start <= at < start + state.memory[start].size_bytes])
    ]


def _lines(state: BlockState, blocks: Sequence[int], places: Places) -> tuple[str, ...]:
    largest = sorted((state.held[address] for address in blocks), key=lambda held: -held.size_bytes)
    return tuple(dict.fromkeys(places.place(held) for held in largest[:_MOST_LINES]))
