"""What a snapshot contains besides its events, validated; and snapshots as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

import msgspec

from gpumem_tui.snapshots.model import (
    NO_STACK,
    Annotation,
    EventHistory,
    Segment,
    SnapshotBlock,
    SnapshotError,
    Stacks,
)
from gpumem_tui.text import shortened

StackOf = Callable[[Any], int]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Signed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Device = Annotated[int, msgspec.Meta(ge=-1, le=1 << 16)]
_MOST_ANNOTATIONS = 100_000
_MOST_FRAMES = 10_000


class _FrameDocument(msgspec.Struct):
    filename: str = ""
    line: int = 0
    name: str = ""


class _PastDocument(msgspec.Struct):
    """What a block of torch 2.0 says of its allocation."""

    real_size: Count = 0
    frames: Any = None


class _BlockDocument(msgspec.Struct):
    size: Count
    state: str
    address: Count | None = None
    requested_size: Count | None = None
    frames: Any = None
    category: str = ""
    history: list[_PastDocument] = []


_ReducedBlock = tuple[Count, Count, str]
"""Size, requested size, state."""


class SegmentDocument(msgspec.Struct):
    """A segment as PyTorch writes it; keys that came with later versions have defaults."""

    address: Count
    total_size: Count
    blocks: list[_BlockDocument | _ReducedBlock]
    stream: Signed = 0
    device: Device = 0
    segment_type: str = "large"
    segment_pool_id: tuple[Signed, Signed] = (0, 0)
    is_expandable: bool = False


class AnnotationDocument(msgspec.Struct):
    """An entry of ``external_annotations``."""

    name: str = ""
    stage: str = ""
    device: Device = 0
    time_us: Signed = 0


class EventDocument(msgspec.Struct):
    """An entry of ``device_traces`` in JSON; the frames stay as they are written until they are looked at."""

    action: str
    addr: Count = 0
    size: Count = 0
    stream: Signed = 0
    time_us: Signed = 0
    device_free: Count = 0
    category: str = ""
    frames: msgspec.Raw = msgspec.Raw(b"[]")


class JsonDocument(msgspec.Struct):
    """A snapshot as JSON, or the recordings' reduced form of one (``traces`` and ``settings``)."""

    segments: list[SegmentDocument]
    device_traces: list[list[EventDocument]] | None = None
    traces: list[list[tuple[str, int | None, int, int]]] | None = None
    allocator_settings: dict[str, Any] | None = None
    settings: dict[str, Any] | None = None
    external_annotations: list[AnnotationDocument] = []


def read_json(data: Any, stacks: Stacks) -> tuple[JsonDocument, list[EventHistory], str]:
    """A snapshot written as JSON, its events in columns, and which kind it is.

    Raises:
        SnapshotError: it is something else.
    """
    try:
        document = msgspec.json.decode(data, type=JsonDocument)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SnapshotError(f"is no memory snapshot: {shortened(str(error), 200)}") from error
    if document.device_traces is None and document.traces is None:
        raise SnapshotError("is no memory snapshot: it has no events (`device_traces`)")
    if document.traces is not None:
        return document, [_reduced_history(trace) for trace in document.traces], "reduced JSON"
    known: dict[bytes, int] = {}
    return document, [_history(trace, stacks, known) for trace in document.device_traces or ()], "JSON"


def _reduced_history(trace: Iterable[tuple[str, int | None, int, int]]) -> EventHistory:
    history = EventHistory()
    try:
        for action, address, size_bytes, stream in trace:
            history.append(action, address or 0, size_bytes, stream)
    except OverflowError as error:
        raise SnapshotError(f"is broken: {error}") from error
    return history


def _history(trace: Iterable[EventDocument], stacks: Stacks, known: dict[bytes, int]) -> EventHistory:
    history = EventHistory()
    for event in trace:
        written = bytes(event.frames)
        if written not in known:
            known[written] = _json_stack(written, stacks)
        address = event.device_free if event.action == "oom" else event.addr
        try:
            history.append(
                event.action, address, event.size, event.stream, event.time_us, known[written], event.category
            )
        except OverflowError as error:
            raise SnapshotError(f"is broken: {error}") from error
    return history


def _json_stack(written: bytes, stacks: Stacks) -> int:
    try:
        frames = msgspec.json.decode(written, type=list[_FrameDocument] | None)
    except msgspec.MsgspecError as error:
        raise SnapshotError(f"is no memory snapshot: {shortened(str(error), 200)}") from error
    return stacks.add(tuple(stacks.frame(frame.filename, frame.line, frame.name) for frame in frames or ()))


def stack_of_values(stacks: Stacks) -> StackOf:
    """The number of a stack whose frames are plain dictionaries."""

    def number(frames: Any) -> int:
        if not isinstance(frames, list):
            return NO_STACK
        found = [frame for frame in frames[:_MOST_FRAMES] if isinstance(frame, dict)]
        return stacks.add(
            tuple(stacks.frame(frame.get("filename"), frame.get("line"), frame.get("name")) for frame in found)
        )

    return number


def segments_of(values: Any) -> list[SegmentDocument]:
    """Segments that were read from a pickle, validated.

    Raises:
        SnapshotError: they are something else.
    """
    try:
        return msgspec.convert(values, list[SegmentDocument])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SnapshotError(f"is no memory snapshot: its segments: {shortened(str(error), 200)}") from error


def annotations_of(values: Any) -> list[AnnotationDocument]:
    """Annotations that were read from a pickle; none where they are not what PyTorch writes."""
    try:
        return msgspec.convert((values or [])[:_MOST_ANNOTATIONS], list[AnnotationDocument])
    except (msgspec.MsgspecError, TypeError, RecursionError):
        return []


def segment(document: SegmentDocument, stack_of: StackOf) -> Segment:
    """A segment with its blocks.

    Raises:
        SnapshotError: its blocks do not fill it.
    """
    blocks = tuple(_blocks(document, stack_of))
    if sum(block.size_bytes for block in blocks) != document.total_size:
        raise SnapshotError(f"is broken: the blocks of the segment at {document.address:#x} do not fill it")
    return Segment(
        device=document.device,
        address=document.address,
        size_bytes=document.total_size,
        stream=document.stream,
        is_small=document.segment_type == "small",
        pool=document.segment_pool_id,
        is_expandable=document.is_expandable,
        blocks=blocks,
    )


def _blocks(document: SegmentDocument, stack_of: StackOf) -> Iterator[SnapshotBlock]:
    address = document.address
    for block in document.blocks:
        if isinstance(block, tuple):
            size_bytes, requested_bytes, state = block
            yield SnapshotBlock(address, size_bytes, requested_bytes if state != "inactive" else 0, state)
        else:
            size_bytes = block.size
            yield _block(block, address, stack_of)
        if size_bytes <= 0:
            raise SnapshotError(f"is broken: a block of {size_bytes} bytes")
        address += size_bytes


def _block(block: _BlockDocument, address: int, stack_of: StackOf) -> SnapshotBlock:
    requested_bytes, frames = block.requested_size, block.frames
    if block.history:
        requested_bytes, frames = block.history[0].real_size, block.history[0].frames
    if block.state == "inactive":
        requested_bytes = 0
    elif requested_bytes is None:
        requested_bytes = block.size
    return SnapshotBlock(address, block.size, requested_bytes, block.state, stack_of(frames), shortened(block.category))


def annotation(document: AnnotationDocument) -> Annotation:
    """An annotation, fit to be shown."""
    return Annotation(document.device, shortened(document.name), document.stage == "START", document.time_us)
