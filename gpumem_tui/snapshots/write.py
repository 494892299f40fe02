"""A simulated run in the format of `torch.cuda.memory._dump_snapshot`, for pytorch.org/memory_viz and its like.

The keys are those of torch 2.13 (`THCPModule_memorySnapshot` in torch/csrc/cuda/Module.cpp). What a snapshot has no
place for stands where viewers look for more: ``category`` (as `_memory_viz._profile_to_snapshot` writes it) the row of
the ledger, ``user_metadata`` the module, and ``external_annotations`` the phases of each step. A simulated run has no
clock: ``time_us`` counts its events.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from gpumem_tui.memory import ALLOCATED_BUCKETS
from gpumem_tui.simulator.blocks import Block
from gpumem_tui.simulator.settings import AllocatorSettings
from gpumem_tui.snapshots.recording import Event, RecordedSegment, Recording
from gpumem_tui.step import Site

_DEVICE = 0
_NO_POOL = (0, 0)
_SMALLEST_INTERVAL_MB = 1
"""The first of the sizes that `roundup_power2_divisions` is kept for, in MiB; each next one is twice as large."""

Frames = list[dict[str, Any]]


def write_snapshot(recording: Recording, path: Path) -> None:
    """Write a run as a snapshot; a file that is there already is replaced once the new one is complete.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            pickle.dump(snapshot(recording), file, protocol=4)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def snapshot(recording: Recording) -> dict[str, Any]:
    """A run as `torch.cuda.memory._snapshot()` returns one."""
    places = _Places(recording)
    return {
        "segments": [_segment(segment, recording.settings, places) for segment in recording.segments],
        "device_traces": [[_entry(event, index, places) for index, event in enumerate(recording.events)]],
        "allocator_settings": _settings(recording.settings),
        "external_annotations": list(_annotations(recording)),
    }


class _Places:
    """Where each allocation comes from; one list of frames a place, so that the pickle names it once."""

    def __init__(self, recording: Recording) -> None:
        timeline = recording.timeline
        self._sites = timeline.sites
        self._buckets = timeline.buckets
        self._table = timeline.site_table or (Site(),)
        self._frames = [_frames(site) for site in self._table]

    def frames(self, allocation: int) -> Frames:
        """The innermost first, as PyTorch has them."""
        return self._frames[self._site(allocation)]

    def module(self, allocation: int) -> str:
        """The module that ran."""
        return self._table[self._site(allocation)].module

    def category(self, allocation: int) -> str:
        """The row of the ledger."""
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


def _entry(event: Event, index: int, places: _Places) -> dict[str, Any]:
    where = "device_free" if event.action == "oom" else "addr"
    entry = {
        "action": event.action,
        where: event.address,
        "size": event.size_bytes,
        "stream": event.stream,
        "time_us": index,
        "compile_context": "N/A",
        "user_metadata": places.module(event.allocation),
        "pool_id": _NO_POOL,
        "frames": places.frames(event.allocation),
    }
    if event.action == "alloc":
        entry["category"] = places.category(event.allocation)
    return entry


def _segment(segment: RecordedSegment, settings: AllocatorSettings, places: _Places) -> dict[str, Any]:
    in_use = sum(block.size_bytes for block, allocation in segment.blocks if allocation)
    pending = sum(block.size_bytes for block, allocation in segment.blocks if block.allocated and not allocation)
    return {
        "device": _DEVICE,
        "address": segment.address,
        "total_size": segment.size_bytes,
        "allocated_size": in_use,
        "active_size": in_use + pending,
        "requested_size": sum(block.requested_bytes for block, _ in segment.blocks if block.allocated),
        "stream": segment.stream,
        "segment_type": "small" if segment.is_small else "large",
        "segment_pool_id": _NO_POOL,
        "is_expandable": settings.expandable_segments,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size_bytes,
                "requested_size": block.requested_bytes if block.allocated else 0,
                "state": _state(block, allocation),
                "frames": places.frames(allocation) if allocation else [],
                **({"category": places.category(allocation)} if allocation else {}),
            }
            for block, allocation in segment.blocks
        ],
    }


def _state(block: Block, allocation: int) -> str:
    if allocation:
        return "active_allocated"
    return "active_pending_free" if block.allocated else "inactive"


def _settings(settings: AllocatorSettings) -> dict[str, Any]:
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


def _annotations(recording: Recording) -> Iterator[dict[str, Any]]:
    """Where each phase begins and ends."""
    starts = recording.starts
    for mark, (start, end) in zip(
        recording.timeline.marks, zip_longest(starts, starts[1:], fillvalue=len(recording.events)), strict=False
    ):
        for stage, time_us in (("START", start), ("END", end)):
            name = f"step {mark.step} {mark.phase.value}"
            yield {"name": name, "stage": stage, "device": _DEVICE, "time_us": time_us}
