"""A simulated run as the CUDA allocator's own history, and as a file for pytorch.org/memory_viz and its like.

The keys of the file are those of torch 2.13 (`THCPModule_memorySnapshot` in torch/csrc/cuda/Module.cpp). Facts
for which a snapshot has no place are where viewers look for more: ``category`` (as `_memory_viz._profile_to_snapshot`
    writes
it) the row of the ledger, ``user_metadata`` the module, and ``external_annotations`` the phases of each step. A
simulated run has no clock: ``time_us`` counts its events.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from gpumem_tui.memory import ALLOCATED_BUCKETS
from gpumem_tui.simulator.allocator.blocks import Block, Pool
from gpumem_tui.simulator.allocator.caching import CachingAllocator, OutOfMemory
from gpumem_tui.simulator.allocator.replay import interrupt, interruptions_of
from gpumem_tui.simulator.allocator.settings import AllocatorSettings
from gpumem_tui.simulator.allocator.timeline import Timeline
from gpumem_tui.snapshots.model import (
    ACTIONS,
    ALLOC,
    ALLOCATED,
    INACTIVE,
    NO_STACK,
    OOM,
    PENDING,
    EventHistory,
    Segment,
    SnapshotBlock,
)
from gpumem_tui.step import Site
from gpumem_tui.system import replacing

_UNLIMITED = 1 << 60
_DEVICE = 0
_NO_POOL = (0, 0)
_FIRST_ADDRESS = 0x7F00_0000_0000
"""About where drivers begin (the recordings): viewers in a browser count exactly up to 2**53 only."""


@dataclass(frozen=True)
class RecordedRun:
    """The allocator's history of a timeline.

    Attributes:
        events: an event's stack is the number of the allocation that it is about, or that it was made for.
        segments: at the end. The number of a block's stack is that of the allocation that is in it; `NO_STACK` of a
            free one, and of one that was freed while other streams use it.
        starts: by mark of the timeline, the number of the first event of its phase; as many as were reached.
        fits: False if memory ran out: the last event is then that failed request.
    """

    timeline: Timeline
    settings: AllocatorSettings
    events: EventHistory
    segments: tuple[Segment, ...]
    starts: tuple[int, ...]
    fits: bool


def record(
    timeline: Timeline,
    capacity_bytes: int | None = None,
    settings: AllocatorSettings | None = None,
    allowed_bytes: int | None = None,
) -> RecordedRun:
    """Run a timeline through the caching allocator, as `replay` does, and keep what the allocator writes down.

    Ends with the last step: what the program releases as it ends is left out, so that the segments at the end are those
    of training.

    Args:
        capacity_bytes: what the device can give; None for no limit.
        allowed_bytes: a memory fraction's limit on reserved bytes; None for none.
    """
    settings = settings or AllocatorSettings()
    allocator = _RecordingAllocator(_UNLIMITED if capacity_bytes is None else capacity_bytes, settings, allowed_bytes)
    live: dict[int, Block] = {}
    starts: list[int] = []
    marks = [mark.event for mark in timeline.marks]
    fits = True
    interruptions = interruptions_of(timeline)
    in_use = {number for _, number in timeline.completions}
    for event, number in enumerate(timeline.events[: _end_of_last_step(timeline)]):
        while interruptions and interruptions[-1][0] <= event:
            interrupt(allocator, interruptions.pop()[1])
        while len(starts) < len(marks) and marks[len(starts)] <= event:
            starts.append(len(allocator.events))
        allocator.allocation = abs(number)
        if number < 0:
            if (block := live.pop(-number, None)) is not None:
                if -number in in_use:
                    allocator.request_free(block, -number)
                else:
                    allocator.free(block)
        elif size_bytes := timeline.sizes[number - 1]:
            try:
                live[number] = allocator.malloc(size_bytes, timeline.stream_of(number))
            except OutOfMemory:
                fits = False
                break
    blocks = [*live.values(), *allocator.pending.values(), *allocator.cached_blocks()]
    segments = tuple(_segments(blocks, live, is_expandable=settings.expandable_segments))
    return RecordedRun(
        timeline=timeline,
        settings=settings,
        events=allocator.events,
        segments=segments,
        starts=tuple(starts),
        fits=fits,
    )


def _end_of_last_step(timeline: Timeline) -> int:
    """Find where, after the last allocation, the first that was there before the last step is released."""
    start = next((mark.event for mark in timeline.marks if mark.step == timeline.marks[-1].step), 0)
    made_before = sum(number > 0 for number in timeline.events[:start])
    end = len(timeline.events)
    for event in range(len(timeline.events) - 1, start - 1, -1):
        number = timeline.events[event]
        if number > 0:
            break
        if -number <= made_before:
            end = event
    return end


class _RecordingAllocator(CachingAllocator):
    """Writes down what `CUDACachingAllocator.cpp` does (`record_trace`), in the same order.

    Attributes:
        allocation: the number of the allocation at hand.
    """

    def __init__(self, capacity_bytes: int, settings: AllocatorSettings, allowed_bytes: int | None) -> None:
        super().__init__(capacity_bytes, settings, allowed_bytes)
        self._lowest_address = self._next_virtual_address = _FIRST_ADDRESS
        self.events = EventHistory()
        self.allocation = 0

    def malloc(self, size_bytes: int, stream: int = 0) -> Block:
        try:
            block = super().malloc(size_bytes, stream)
        except OutOfMemory:
            device_free = max(0, self.capacity_bytes - self.stats.reserved_bytes)
            self._note("oom", device_free, self.round_size(size_bytes), stream)
            raise
        self._note("alloc", block.address, size_bytes, stream)
        return block

    def free(self, block: Block) -> None:
        address, stream = block.address, block.pool.stream
        self._note("free_requested", address, block.requested_bytes, stream)
        self._note("free_completed", address, block.requested_bytes, stream)
        super().free(block)

    def request_free(self, block: Block, number: int) -> None:
        self._note("free_requested", block.address, block.requested_bytes, block.pool.stream)
        super().request_free(block, number)

    def complete_free(self, number: int) -> None:
        block = self.pending.get(number)
        if block is not None:
            self._note("free_completed", block.address, block.requested_bytes, block.pool.stream, number)
        super().complete_free(number)

    def _take_from_driver(self, pool: Pool, size: int) -> Block | None:
        block = super()._take_from_driver(pool, size)
        if block is not None and not self._expandable:
            self._note("segment_alloc", block.address, block.size_bytes, pool.stream)
        return block

    def _release(self, block: Block) -> None:
        self._note("segment_free", block.address, block.size_bytes, block.pool.stream)
        super()._release(block)

    def _map(self, block: Block, size: int) -> bool:
        address, reserved = block.address, self.stats.reserved_bytes
        is_mapped = super()._map(block, size)
        if is_mapped:
            self._note("segment_map", address, self.stats.reserved_bytes - reserved, block.pool.stream)
        return is_mapped

    def _unmap(self, block: Block) -> None:
        first, last = self._whole_chunks(block)
        if last > first:
            self._note("segment_unmap", first, last - first, block.pool.stream)
        super()._unmap(block)

    def _note(self, action: str, address: int, size_bytes: int, stream: int, allocation: int = 0) -> None:
        self.events.append(action, address, size_bytes, stream, len(self.events), allocation or self.allocation)


def _segments(blocks: list[Block], live: dict[int, Block], *, is_expandable: bool) -> Iterator[Segment]:
    """Yield runs of blocks with memory behind them, by address (`snapshot` in CUDACachingAllocator.cpp)."""
    numbers = {block.address: number for number, block in live.items()}
    for head in sorted(blocks, key=lambda block: block.address):
        if head.prev is not None and head.prev.mapped:
            continue
        found: list[SnapshotBlock] = []
        block: Block | None = head
        while block is not None and block.mapped:
            number = numbers.get(block.address, NO_STACK)
            state = ALLOCATED if number else PENDING if block.allocated else INACTIVE
            requested_bytes = block.requested_bytes if block.allocated else 0
            found.append(SnapshotBlock(block.address, block.size_bytes, requested_bytes, state, number))
            block = block.next
        size_bytes, pool = sum(block.size_bytes for block in found), head.pool
        yield Segment(
            device=_DEVICE,
            address=head.address,
            size_bytes=size_bytes,
            stream=pool.stream,
            is_small=pool.is_small,
            pool=_NO_POOL,
            is_expandable=is_expandable,
            blocks=tuple(found),
        )


# As a file

_SMALLEST_INTERVAL_MB = 1
"""The first of the sizes that `roundup_power2_divisions` is kept for, in MiB; each next one is twice as large."""

Frames = list[dict[str, object]]


def write_snapshot(recording: RecordedRun, path: Path) -> None:
    """Write a run as a snapshot; a file that is there already is replaced once the new one is complete.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path) as file:
        pickle.dump(snapshot(recording), file, protocol=4)


def snapshot(recording: RecordedRun) -> dict[str, object]:
    """Return a run as `torch.cuda.memory._snapshot()` returns one."""
    places = _Places(recording)
    return {
        "segments": [_segment(segment, places) for segment in recording.segments],
        "device_traces": [[_entry(recording.events, event, places) for event in range(len(recording.events))]],
        "allocator_settings": _settings(recording.settings),
        "external_annotations": list(_annotations(recording)),
    }


class _Places:
    """The source of each allocation; one list of frames a place, so that the pickle names it once."""

    def __init__(self, recording: RecordedRun) -> None:
        timeline = recording.timeline
        self._sites = timeline.sites
        self._buckets = timeline.buckets
        self._table = timeline.site_table or (Site(),)
        self._frames = [_frames(site) for site in self._table]

    def frames(self, allocation: int) -> Frames:
        """Return the frames, the innermost first, as PyTorch has them."""
        return self._frames[self._site(allocation)]

    def module(self, allocation: int) -> str:
        """Return the module that ran."""
        return self._table[self._site(allocation)].module

    def category(self, allocation: int) -> str:
        """Return the row of the ledger."""
        key: str = ALLOCATED_BUCKETS[self._buckets[allocation - 1]].value
        return key

    def _site(self, allocation: int) -> int:
        return self._sites[allocation - 1] if self._sites else 0


def _frames(site: Site) -> Frames:
    frames: Frames = []
    if site.operator:
        frames.append({"filename": "", "line": 0, "name": site.operator})
    if site.source:
        file, _, line = site.source.rpartition(":")
        frames.append({"filename": file, "line": int(line), "name": site.function})
    return frames


def _entry(history: EventHistory, event: int, places: _Places) -> dict[str, object]:
    action, allocation = history.actions[event], history.stacks[event]
    entry = {
        "action": ACTIONS[action],
        "device_free" if action == OOM else "addr": history.addresses[event],
        "size": history.sizes[event],
        "stream": history.streams[event],
        "time_us": history.times_us[event],
        "compile_context": "N/A",
        "user_metadata": places.module(allocation),
        "pool_id": _NO_POOL,
        "frames": places.frames(allocation),
    }
    if action == ALLOC:
        entry["category"] = places.category(allocation)
    return entry


def _segment(segment: Segment, places: _Places) -> dict[str, object]:
    sizes = dict.fromkeys((ALLOCATED, PENDING, INACTIVE), 0)
    for block in segment.blocks:
        sizes[block.state] += block.size_bytes
    return {
        "device": segment.device,
        "address": segment.address,
        "total_size": segment.size_bytes,
        "allocated_size": sizes[ALLOCATED],
        "active_size": sizes[ALLOCATED] + sizes[PENDING],
        "requested_size": sum(block.requested_bytes for block in segment.blocks),
        "stream": segment.stream,
        "segment_type": "small" if segment.is_small else "large",
        "segment_pool_id": segment.pool,
        "is_expandable": segment.is_expandable,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size_bytes,
                "requested_size": block.requested_bytes,
                "state": block.state,
                "frames": places.frames(block.stack) if block.stack else [],
                **({"category": places.category(block.stack)} if block.stack else {}),
            }
            for block in segment.blocks
        ],
    }


def _settings(settings: AllocatorSettings) -> dict[str, object]:
    return {
        "PYTORCH_CUDA_ALLOC_CONF": settings.text,
        "max_split_size": settings.max_split_size_bytes or -1,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "roundup_power2_divisions": {
            str(_SMALLEST_INTERVAL_MB << index): divisions
            for index, divisions in enumerate(settings.roundup_power2_divisions)
        },
    }


def _annotations(recording: RecordedRun) -> Iterator[dict[str, object]]:
    """Yield where each phase begins and ends."""
    starts = recording.starts
    for mark, (start, end) in zip(
        recording.timeline.marks, zip_longest(starts, starts[1:], fillvalue=len(recording.events)), strict=False
    ):
        for stage, time_us in (("START", start), ("END", end)):
            name = f"step {mark.step} {mark.phase.value}"
            yield {"name": name, "stage": stage, "device": _DEVICE, "time_us": time_us}
