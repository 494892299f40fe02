"""Opens a memory snapshot: a pickle as PyTorch writes it, or JSON, either of them gzipped."""

from __future__ import annotations

import gzip
import io
import mmap
import zlib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from gpumem_tui.snapshots import documents
from gpumem_tui.snapshots.model import EventHistory, MemorySnapshot, SnapshotError, Stacks
from gpumem_tui.snapshots.pickles import Data, Progress, SnapshotUnpickler
from gpumem_tui.text import shortened

_GZIP, _ZIP, _PICKLE = b"\x1f\x8b", b"PK\x03\x04", 0x80
_JSON_STARTS = b"{[ \t\r\n"
MOST_UNPACKED_BYTES = 1 << 30
"""A gzipped file may unpack to this much; a larger snapshot is read as it is."""
_CHUNK_BYTES = 1 << 20


def read_snapshot(path: Path, progress: Progress = lambda share: None) -> MemorySnapshot:
    """The snapshot in a file.

    Args:
        progress: told how much of it is read, from 0 to 1; what it raises ends the reading.

    Raises:
        SnapshotError: there is no such file, it cannot be read, or it is no snapshot; one line with its name.
    """
    try:
        with path.open("rb") as file:
            size_bytes = file.seek(0, io.SEEK_END)
            if not size_bytes:
                raise SnapshotError("is empty")
            with closing(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) as mapped:
                data: Data = _unpacked(file) if mapped[:2] == _GZIP else mapped
                return _read(data, path.name, size_bytes, progress)
    except SnapshotError as error:
        raise SnapshotError(f"{shortened(str(path), 200)} {error}") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "is no file that can be read"
        raise SnapshotError(f"{shortened(str(path), 200)}: {reason}") from error
    except MemoryError as error:
        raise SnapshotError(f"{shortened(str(path), 200)} takes more memory than there is") from error


def _unpacked(file: io.BufferedReader) -> bytes:
    file.seek(0)
    parts: list[bytes] = []
    unpacked = 0
    try:
        with gzip.open(file) as stream:
            while part := stream.read(_CHUNK_BYTES):
                parts.append(part)
                unpacked += len(part)
                if unpacked > MOST_UNPACKED_BYTES:
                    raise SnapshotError(f"unpacks to more than {MOST_UNPACKED_BYTES >> 30} GiB: unpack it first")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SnapshotError("is a broken gzip file") from error
    return b"".join(parts)


def _read(data: Data, name: str, size_bytes: int, progress: Progress) -> MemorySnapshot:
    stacks = Stacks()
    if data[0] == _PICKLE:
        return _read_pickle(data, name, size_bytes, stacks, progress)
    if data[0] in _JSON_STARTS:
        document, histories, kind = documents.read_json(data, stacks)
        settings = document.allocator_settings or document.settings or {}
        stack_of = documents.stack_of_values(stacks)
        parts = document.segments, document.external_annotations
        progress(1.0)
        return _snapshot(name, kind, size_bytes, stacks, histories, settings, *parts, stack_of)
    if data[: len(_ZIP)] == _ZIP:
        raise SnapshotError("is a zip file, as torch.save writes checkpoints: no memory snapshot")
    raise SnapshotError("is no memory snapshot: neither a pickle nor JSON")


def _read_pickle(data: Data, name: str, size_bytes: int, stacks: Stacks, progress: Progress) -> MemorySnapshot:
    unpickler = SnapshotUnpickler(data, stacks, progress)
    value = unpickler.load()
    if isinstance(value, list):  # of torch.cuda.memory_snapshot(): segments only
        value = {"segments": value}
    if not isinstance(value, dict) or "segments" not in value:
        raise SnapshotError("is no memory snapshot: a pickle of something else")
    traces = value.get("device_traces") or []
    histories = [_history(trace) for trace in traces] if isinstance(traces, list) else []
    settings = value.get("allocator_settings")
    return _snapshot(
        name, "pickle", size_bytes, stacks, histories, settings if isinstance(settings, dict) else {},
        documents.segments_of(value["segments"]), documents.annotations_of(value.get("external_annotations")),
        unpickler.gathered.stack_number,
    )  # fmt: skip


def _history(trace: Any) -> EventHistory:
    if isinstance(trace, EventHistory):
        return trace
    if trace != []:
        raise SnapshotError("is no memory snapshot: `device_traces` holds something else than events")
    return EventHistory()


def _snapshot(
    name: str,
    kind: str,
    size_bytes: int,
    stacks: Stacks,
    histories: Sequence[EventHistory],
    settings: dict[str, Any],
    segments: Sequence[documents.SegmentDocument],
    annotations: Sequence[documents.AnnotationDocument],
    stack_of: documents.StackOf,
) -> MemorySnapshot:
    return MemorySnapshot(
        name=shortened(name, 80),
        kind=kind,
        size_bytes=size_bytes,
        stacks=stacks,
        histories=tuple(histories),
        segments=tuple(documents.segment(segment, stack_of) for segment in segments),
        settings={key: value for key, value in settings.items() if isinstance(key, str)},
        annotations=tuple(map(documents.annotation, annotations)),
    )
