"""Opens a memory snapshot: a pickle as PyTorch writes it, or JSON, either of them gzipped; validated by msgspec."""

from __future__ import annotations

import io
import mmap
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, cast

import msgspec
from msgspec.structs import replace as replaced

from gpumem_tui.decoding import decodable
from gpumem_tui.snapshots.kinds import BROKEN, FileKind, folder_words, head_of, kind_of, unpacker_of, what_to_type
from gpumem_tui.snapshots.model import (
    NO_STACK,
    Annotation,
    Count,
    Device,
    EventHistory,
    MemorySnapshot,
    Segment,
    Signed,
    SnapshotBlock,
    SnapshotError,
    Stacks,
)
from gpumem_tui.snapshots.pickles import Data, Progress, SnapshotUnpickler
from gpumem_tui.text import shortened

StackOf = Callable[[object], int]
_MOST_ANNOTATIONS = 100_000
_MOST_FRAMES = 10_000
_JSON_START = 64


class _PastDocument(msgspec.Struct):
    """The allocation of a block as torch 2.0 writes it."""

    real_size: Count = 0
    frames: object = None


class _BlockDocument(msgspec.Struct):
    size: Count
    state: str
    address: Count | None = None
    requested_size: Count | None = None
    frames: object = None
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


class SnapshotDocument(msgspec.Struct):
    """A snapshot but for the events of a pickle; or the recordings' reduced form of one (``traces``, ``settings``)."""

    segments: list[SegmentDocument]
    device_traces: list[list[EventDocument]] | None = None
    traces: list[list[tuple[str, int | None, int, int]]] | None = None
    allocator_settings: dict[str, object] | None = None
    settings: dict[str, object] | None = None
    external_annotations: list[Annotation] = []


def read_json(data: Data, stacks: Stacks) -> tuple[SnapshotDocument, list[EventHistory], str]:
    """Read a snapshot written as JSON, its events in columns, and which kind it is.

    Raises:
        SnapshotError: it is something else.
    """
    try:
        if data[:_JSON_START].lstrip().startswith(b"["):  # of torch.cuda.memory_snapshot(): segments only
            document = SnapshotDocument(segments=msgspec.json.decode(data, type=decodable(list[SegmentDocument])))
        else:
            document = msgspec.json.decode(data, type=decodable(SnapshotDocument))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SnapshotError(f"is no memory snapshot: {shortened(str(error), 200)}") from error
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
        return stack_of_values(stacks)(msgspec.json.decode(written))
    except msgspec.MsgspecError as error:
        raise SnapshotError(f"is no memory snapshot: {shortened(str(error), 200)}") from error


def stack_of_values(stacks: Stacks) -> StackOf:
    """Make what gives the number of a stack whose frames are plain dictionaries."""

    def number(frames: object) -> int:
        if not isinstance(frames, list):
            return NO_STACK
        found = [frame for frame in frames[:_MOST_FRAMES] if isinstance(frame, dict)]
        return stacks.add(
            tuple(stacks.frame(frame.get("filename"), frame.get("line"), frame.get("name")) for frame in found)
        )

    return number


def segments_of(values: object) -> list[SegmentDocument]:
    """Validate segments that were read from a pickle.

    Raises:
        SnapshotError: they are something else.
    """
    try:
        return msgspec.convert(values, decodable(list[SegmentDocument]))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SnapshotError(f"is no memory snapshot: its segments: {shortened(str(error), 200)}") from error


def annotations_of(values: object) -> list[Annotation]:
    """Validate annotations that were read from a pickle; none where they are not what PyTorch writes."""
    try:
        found = values[:_MOST_ANNOTATIONS] if isinstance(values, list | tuple) else []
        return msgspec.convert(found, decodable(list[Annotation]))
    except (msgspec.MsgspecError, RecursionError):
        return []


def segment(document: SegmentDocument, stack_of: StackOf) -> Segment:
    """Make a segment with its blocks.

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
    return SnapshotBlock(
        address=address,
        size_bytes=block.size,
        requested_bytes=requested_bytes,
        state=block.state,
        stack=stack_of(frames),
        category=shortened(block.category),
    )


# Files

_PICKLE = 0x80
_JSON_STARTS = b"{[ \t\r\n"
MOST_UNPACKED_BYTES = 8 << 30
"""A packed file may unpack to this much, in a temporary file; a larger snapshot is read as it is."""
_CHUNK_BYTES = 1 << 20
_WRITE = "write one with torch.cuda.memory._dump_snapshot('snapshot.pickle')"


def read_snapshot(path: Path, progress: Progress = lambda _: None) -> MemorySnapshot:
    """Read the snapshot in a file.

    Args:
        progress: told how much of it is read, from 0 to 1; what it raises ends the reading.

    Raises:
        SnapshotError: there is no such file, it cannot be read, or it is no snapshot; one line with its name.
    """
    try:
        if path.is_dir():
            raise SnapshotError(folder_words(path))
        if path.exists() and not path.is_file():
            raise SnapshotError("is a pipe or a device: write its content to a file first")
        with path.open("rb") as file:
            size_bytes = file.seek(0, io.SEEK_END)
            if not size_bytes:
                raise SnapshotError(f"is empty: {_WRITE}")
            kind = kind_of(head_of(file), path.name)
            if kind is not None and not kind.may_be_snapshot:
                raise SnapshotError(what_to_type(kind, path))
            with _unpacked(file) as plain, closing(mmap.mmap(plain.fileno(), 0, access=mmap.ACCESS_READ)) as data:
                found = _read_as(kind, data, path, progress)
            return replace(found, name=shortened(path.name, 80), size_bytes=size_bytes)
    except SnapshotError as error:
        raise SnapshotError(f"{shortened(str(path), 200)} {error}") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "is no file that can be read"
        raise SnapshotError(f"{shortened(str(path), 200)}: {reason}") from error
    except MemoryError as error:
        raise SnapshotError(f"{shortened(str(path), 200)} takes more memory than there is") from error


def _read_as(kind: FileKind | None, data: Data, path: Path, progress: Progress) -> MemorySnapshot:
    try:
        return _read(data, progress)
    except SnapshotError as error:
        if kind is None or kind.is_snapshot:
            raise
        raise SnapshotError(what_to_type(kind, path)) from error


@contextmanager
def _unpacked(file: BinaryIO) -> Iterator[BinaryIO]:
    """Return the file itself, or what it unpacks to in a temporary one: memory holds no more than a chunk of it."""
    file.seek(0)
    unpack = unpacker_of(file.read(8))
    file.seek(0)
    if unpack is None:
        yield file
        return
    with tempfile.TemporaryFile() as plain:
        try:
            with unpack(file) as stream:
                while part := stream.read(_CHUNK_BYTES):
                    if plain.tell() + len(part) > MOST_UNPACKED_BYTES:
                        raise SnapshotError(f"unpacks to more than {MOST_UNPACKED_BYTES >> 30} GiB: unpack it first")
                    plain.write(part)
        except BROKEN as error:
            raise SnapshotError("is a broken packed file: pack or copy it again") from error
        if not plain.tell():
            raise SnapshotError("unpacks to an empty file: write the snapshot again")
        plain.flush()
        yield cast("BinaryIO", plain)


def _read(data: Data, progress: Progress) -> MemorySnapshot:
    stacks = Stacks()
    if data[0] == _PICKLE:
        return _read_pickle(data, stacks, progress)
    if data[0] in _JSON_STARTS:
        document, histories, kind = read_json(data, stacks)
        progress(1.0)
        return _snapshot(kind, document, histories, stacks, stack_of_values(stacks))
    raise SnapshotError(f"is no memory snapshot, neither a pickle nor JSON: {_WRITE}")


def _read_pickle(data: Data, stacks: Stacks, progress: Progress) -> MemorySnapshot:
    unpickler = SnapshotUnpickler(data, stacks, progress)
    value = unpickler.load()
    if isinstance(value, list):  # of torch.cuda.memory_snapshot(): segments only
        value = {"segments": value}
    if not isinstance(value, dict) or "segments" not in value:
        raise SnapshotError(f"is no memory snapshot, but a pickle of something else: {_WRITE}")
    traces, settings = value.get("device_traces") or [], value.get("allocator_settings")
    histories = [_history_of(trace) for trace in traces] if isinstance(traces, list) else []
    document = SnapshotDocument(
        segments=segments_of(value["segments"]),
        allocator_settings=settings if isinstance(settings, dict) else None,
        external_annotations=annotations_of(value.get("external_annotations")),
    )
    return _snapshot("pickle", document, histories, stacks, unpickler.gathered.stack_number)


def _history_of(trace: object) -> EventHistory:
    if isinstance(trace, EventHistory):
        return trace
    if trace != []:
        raise SnapshotError("is no memory snapshot: `device_traces` holds something else than events")
    return EventHistory()


def _snapshot(
    kind: str, document: SnapshotDocument, histories: Iterable[EventHistory], stacks: Stacks, stack_of: StackOf
) -> MemorySnapshot:
    settings = document.allocator_settings or document.settings or {}
    return MemorySnapshot(
        name="",
        kind=kind,
        size_bytes=0,
        stacks=stacks,
        histories=tuple(histories),
        segments=tuple(segment(one, stack_of) for one in document.segments),
        settings={key: value for key, value in settings.items() if isinstance(key, str)},
        annotations=tuple(replaced(one, name=shortened(one.name)) for one in document.external_annotations),
    )
