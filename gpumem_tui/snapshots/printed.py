"""The JSON of `look FILE --json`: a snapshot's analysis, or how two differ, as types."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Literal

from msgspec import UNSET, UnsetType

from gpumem_tui.report.objects import SCHEMA, JsonObject
from gpumem_tui.snapshots.analysis import Analysis, Part
from gpumem_tui.snapshots.comparison import Comparison, MemoryChange, answer_words
from gpumem_tui.snapshots.fragmentation import FailedRequest
from gpumem_tui.snapshots.model import MemorySnapshot, Segment

_MOST_PARTS = 200


class _Part(JsonObject, frozen=True):
    name: str
    bytes: int
    blocks: int
    by_category: dict[str, int] | UnsetType = UNSET
    frames: tuple[str, ...] | UnsetType = UNSET

    @classmethod
    def of(cls, part: Part) -> _Part:
        """Return what a place, a category or a stack holds; its categories where they say more than its name."""
        is_category = len(part.categories) == 1 and part.categories[0][0] == part.name
        return cls(
            name=part.name,
            bytes=part.size_bytes,
            blocks=part.blocks,
            by_category=UNSET if is_category else dict(part.categories),
            frames=part.frames or UNSET,
        )


class _Peak(JsonObject, frozen=True):
    event: int
    allocated_bytes: int
    reserved_bytes: int
    by_category: tuple[_Part, ...]
    by_source: tuple[_Part, ...]
    by_stack: tuple[_Part, ...]


class _End(JsonObject, frozen=True):
    allocated_bytes: int
    reserved_bytes: int


class _Mark(JsonObject, frozen=True):
    event: int
    name: str


class _Stage(JsonObject, frozen=True):
    stage: str
    peak_allocated_bytes: int
    event: int


class _Segment(JsonObject, frozen=True):
    address: int
    bytes: int
    used_bytes: int
    largest_free_bytes: int
    free_pieces: int
    stream: int
    pool: Literal["small", "large"]
    expandable: bool
    used: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, segment: Segment) -> _Segment:
        """Return a segment as the snapshot was taken; `used` has the offset and the bytes of what is taken."""
        return cls(
            address=segment.address,
            bytes=segment.size_bytes,
            used_bytes=segment.size_bytes - segment.free_bytes,
            largest_free_bytes=segment.largest_free_bytes,
            free_pieces=len(segment.free_sizes),
            stream=segment.stream,
            pool="small" if segment.is_small else "large",
            expandable=segment.is_expandable,
            used=segment.taken,
        )


class _Segments(JsonObject, frozen=True):
    stranded_bytes: int
    returnable_bytes: int
    largest_free_bytes: int
    list: tuple[_Segment, ...]


class _Device(JsonObject, frozen=True):
    """One device of a snapshot. `timeline`: event, allocated and reserved bytes, and these by `categories`."""

    device: int
    events: int
    allocations: int
    duration_s: float | None
    peak: _Peak
    end: _End
    difference_bytes: int
    categories: tuple[str, ...]
    categories_from: str
    timeline: tuple[tuple[int, int, int, tuple[int, ...]], ...]
    marks: tuple[_Mark, ...]
    stages: tuple[_Stage, ...]
    missing: tuple[str, ...]
    segments: _Segments
    out_of_memory: tuple[FailedRequest, ...]

    @classmethod
    def of(cls, found: Analysis) -> _Device:
        """Return the analysis of a device."""
        return cls(
            device=found.device,
            events=found.events,
            allocations=found.allocations,
            duration_s=found.duration_s,
            peak=_Peak(
                event=found.peak_event,
                allocated_bytes=found.peak_allocated_bytes,
                reserved_bytes=found.peak_reserved_bytes,
                by_category=tuple(map(_Part.of, found.by_category)),
                by_source=tuple(map(_Part.of, found.by_line[:_MOST_PARTS])),
                by_stack=tuple(map(_Part.of, found.by_stack[:_MOST_PARTS])),
            ),
            end=_End(allocated_bytes=found.end_allocated_bytes, reserved_bytes=found.end_reserved_bytes),
            difference_bytes=found.difference_bytes,
            categories=found.categories,
            categories_from=found.categories_from,
            timeline=tuple(
                (point.event, point.allocated_bytes, point.reserved_bytes, point.by_category)
                for point in found.timeline
            ),
            marks=tuple(_Mark(event=event, name=name) for event, name in found.marks),
            stages=tuple(_Stage(stage=name, peak_allocated_bytes=size, event=at) for name, size, at in found.stages),
            missing=found.missing,
            segments=_Segments(
                stranded_bytes=found.stranded_bytes,
                returnable_bytes=found.returnable_bytes,
                largest_free_bytes=found.largest_free_bytes,
                list=tuple(map(_Segment.of, found.segments)),
            ),
            out_of_memory=found.ooms,
        )


class SnapshotObject(JsonObject, frozen=True):
    """The object that `look FILE --json` prints."""

    schema: Literal[1]
    event: Literal["snapshot"]
    file: str
    kind: str
    file_bytes: int
    allocator_settings: dict[str, str | bool | int | float]
    devices: tuple[_Device, ...]

    @classmethod
    def of(cls, snapshot: MemorySnapshot, analyses: Sequence[Analysis]) -> SnapshotObject:
        """Return everything about a file."""
        return cls(
            schema=SCHEMA,
            event="snapshot",
            file=snapshot.name,
            kind=snapshot.kind,
            file_bytes=snapshot.size_bytes,
            allocator_settings={
                key: value
                for key, value in snapshot.settings.items()
                if isinstance(value, str | int) or (isinstance(value, float) and isfinite(value))
            },
            devices=tuple(map(_Device.of, analyses)),
        )


class _SnapshotFile(JsonObject, frozen=True):
    file: str
    kind: str
    file_bytes: int


class _Change(JsonObject, frozen=True):
    name: str
    before_bytes: int
    after_bytes: int
    category: str | UnsetType = UNSET
    before_blocks: int | UnsetType = UNSET
    after_blocks: int | UnsetType = UNSET

    @classmethod
    def of_line(cls, row: MemoryChange) -> _Change:
        """Return a source line's bytes and blocks in both."""
        return cls(row.name, row.before_bytes, row.after_bytes, row.category, row.before_blocks, row.after_blocks)


class _DeviceChange(JsonObject, frozen=True):
    """One device of two snapshots. `compared`: whether at the peaks, or what was held when each file was written."""

    before_device: int
    after_device: int
    answer: str
    compared: Literal["at the peak", "when written"]
    one_run: bool
    figures: tuple[_Change, ...]
    before_segments: int
    after_segments: int
    by_category: tuple[_Change, ...]
    by_source: tuple[_Change, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, found: Comparison) -> _DeviceChange:
        """Return how a device differs."""
        return cls(
            before_device=found.before.device,
            after_device=found.after.device,
            answer=answer_words(found),
            compared="at the peak" if found.at_peak else "when written",
            one_run=found.is_one_run,
            figures=tuple(_Change(*figure) for figure in found.figures),
            before_segments=found.segments[0],
            after_segments=found.segments[1],
            by_category=tuple(_Change(row.name, row.before_bytes, row.after_bytes) for row in found.by_category),
            by_source=tuple(map(_Change.of_line, found.by_line[:_MOST_PARTS])),
            notes=found.notes,
        )


class ComparisonObject(JsonObject, frozen=True):
    """The object that `look BEFORE AFTER --json` prints."""

    schema: Literal[1]
    event: Literal["comparison"]
    before: _SnapshotFile
    after: _SnapshotFile
    devices: tuple[_DeviceChange, ...]

    @classmethod
    def of(cls, before: MemorySnapshot, after: MemorySnapshot, found: Sequence[Comparison]) -> ComparisonObject:
        """Return how two files differ."""
        one, other = (_SnapshotFile(file=it.name, kind=it.kind, file_bytes=it.size_bytes) for it in (before, after))
        return cls(SCHEMA, "comparison", one, other, tuple(map(_DeviceChange.of, found)))
