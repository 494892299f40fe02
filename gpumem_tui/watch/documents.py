"""Reads what a probe published: ring and documents, every value checked, as the file may be anybody's.

The types are the probe's own (`gpumem_tui.probe.wire`): msgspec converts by their annotations, and texts are made
printable, since root reads the files of other users too.
"""

from __future__ import annotations

import math
import uuid
from binascii import crc32
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Annotated, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from gpumem_tui.decoding import decodable
from gpumem_tui.memory import Breakdown
from gpumem_tui.probe.files import Files, WireError, read_private
from gpumem_tui.probe.wire import (
    CHECKSUM,
    COUNTER,
    CPU,
    HAS_ALLOCATOR,
    HEADER_BYTES,
    HEARTBEAT,
    HEARTBEAT_AT,
    LARGEST,
    LOOKING_AT,
    MAGIC,
    MAX_DOCUMENT_BYTES,
    PHASES,
    PREFIX,
    RECORD,
    SCHEMA,
    SLOT_BYTES,
    SLOT_COUNT,
    SWITCHED_OFF_AT,
    AtLeast,
    Exit,
    Heartbeat,
    LookAnswer,
    PostMortem,
    Process,
    Record,
    Stages,
    Stall,
    Trained,
    UncaughtError,
)
from gpumem_tui.text import cleaned, printable

_T = TypeVar("_T")


# Documents


_NAMES: Mapping[type, str] = {
    Trained: "model",
    LookAnswer: "look",
    PostMortem: "oom",
    UncaughtError: "error",
    Exit: "exit",
    Stall: "stall",
    Stages: "stages",
}
"""The attribute of `Files` that is the path of each kind."""


def read_document(kind: type[_T], files: Files, uid: int) -> _T | None:
    """Read one of the documents of a process of a user; None if missing (yet).

    Args:
        kind: `Trained`, `LookAnswer`, `PostMortem`, `UncaughtError`, `Exit`, `Stall` or `Stages`.

    Raises:
        WireError: not a document that may be trusted; one line.
    """
    path: Path = getattr(files, _NAMES[kind])
    try:
        data = read_private(path, MAX_DOCUMENT_BYTES, {uid})
        content = _object(data)
        if content.get("schema") != SCHEMA:
            raise WireError(f"{path.name} was written by another version (schema {content.get('schema')!r:.40})")
        if isinstance(message := content.get("message"), str):  # PyTorch's continues for many lines of advice
            content["message"] = next((line for line in message.splitlines() if line.strip()), "")
        document = _checked(kind, content)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WireError(f"{path.name} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"{path.name} is damaged: {printable(str(error))}") from error
    if isinstance(document, PostMortem):
        _total(document.buckets, path)
    for stage in document.peaks if isinstance(document, Stages) else ():
        _total(stage.buckets, path)
    for device in document.devices if isinstance(document, LookAnswer) else ():
        if _total(device.buckets, path) != device.peak_bytes:
            raise WireError(f"{path.name} is damaged: the buckets do not sum to the peak")
        _total(device.highest, path)
        for held in device.held:
            _total({held.bucket: held.bytes}, path)
    return document


def _total(buckets: Mapping[str, int], path: Path) -> int:
    try:
        return Breakdown.from_json(buckets).total_bytes
    except ValueError as error:
        raise WireError(f"{path.name} is damaged: {printable(str(error))}") from error


def _object(data: bytes) -> dict[str, object]:
    return msgspec.json.decode(data, type=dict[str, object])


def _checked(kind: type[_T], content: dict[str, object]) -> _T:
    """Return the content as a value of that type, every text printable and every number within its bounds.

    Raises:
        msgspec.MsgspecError, RecursionError: the content is something else.
    """
    value = msgspec.convert(cleaned(content), decodable(kind))
    _check(kind, value)
    return value


def _check(hint: object, value: object) -> None:
    """Raise if a number in a value is out of the bounds in its annotation (`AtLeast`), which msgspec does not know."""
    origin, parts = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        for name, bounded in _bounded_fields(hint):
            _check(bounded, getattr(value, name))
    elif origin is Annotated and isinstance(value, (int, float)):
        for one in parts[1:]:
            least = one.value if isinstance(one, AtLeast) else value
            if not least <= value <= (math.inf if isinstance(value, float) else LARGEST):
                raise msgspec.ValidationError(f"{value} is not a number from {least} to {LARGEST}")
    elif origin is dict and isinstance(value, dict):
        for one in value.values():
            _check(parts[1], one)
    elif origin is tuple and isinstance(value, tuple):
        for part, one in zip(repeat(parts[0]) if parts[-1] is Ellipsis else parts, value, strict=False):
            _check(part, one)
    elif value is not None:  # of what may be None
        for part in parts:
            _check(part, value)


@cache
def _bounded_fields(kind: type) -> tuple[tuple[str, object], ...]:
    """Return the fields of a dataclass in which a number may have bounds, each with its annotation."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple((name, hint) for name, hint in hints.items() if _has_bounds(hint))


def _has_bounds(hint: object) -> bool:
    if isinstance(hint, type) and is_dataclass(hint):
        return bool(_bounded_fields(hint))
    return get_origin(hint) is Annotated or any(map(_has_bounds, get_args(hint)))


# The ring


@dataclass(frozen=True)
class Header:
    """The first bytes of a ring, read.

    Attributes:
        written: records written since the ring was made; the newest has this sequence number.
        ended_ns: wall time at which the interpreter exited; 0 while it runs, and if it was killed.
        switched_off: why the probe switched itself off; empty if it did not.
        looking: the number of the request for a look that is being recorded; 0 for none. A request that is neither
            this nor answered waits for a step's end, at which the probe sees it.
        heartbeat: the step counter; None of older probes, before the first sample, and where it is half written.
    """

    process: Process
    written: int
    ended_ns: int
    switched_off: str
    looking: int = 0
    heartbeat: Heartbeat | None = None


def decode_header(data: bytes) -> Header:
    """Read the header at the start of `data`.

    Raises:
        WireError: it is no ring, of another schema, or damaged.
    """
    if len(data) < HEADER_BYTES:
        raise WireError(f"the ring has {len(data)} bytes, less than its header")
    magic, schema, header, slot, count, written, ended_ns, length, checksum = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise WireError("not a ring")
    if schema != SCHEMA:
        raise WireError(f"written by another version (schema {schema}, this one reads {SCHEMA})")
    text = data[PREFIX.size : PREFIX.size + length]
    sizes = (header, slot, count) == (HEADER_BYTES, SLOT_BYTES, SLOT_COUNT)
    if not sizes or length > HEADER_BYTES or written > LARGEST or crc32(text) != checksum:
        raise WireError("the ring's header is damaged")
    try:
        process = _checked(Process, _object(text))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"the ring's header is damaged: {printable(str(error))}") from error
    switched_off = data[SWITCHED_OFF_AT:HEADER_BYTES].rstrip(b"\0").decode(errors="ignore")
    looking = COUNTER.unpack_from(data, LOOKING_AT)[0] if PREFIX.size + length <= LOOKING_AT else 0
    heartbeat = _heartbeat(data) if PREFIX.size + length <= HEARTBEAT_AT else None
    return Header(
        process=process,
        written=written,
        ended_ns=ended_ns,
        switched_off=printable(switched_off),
        looking=looking,
        heartbeat=heartbeat,
    )


def _heartbeat(data: bytes) -> Heartbeat | None:
    step, monotonic_ns, due_ns, is_busy, checksum = HEARTBEAT.unpack_from(data, HEARTBEAT_AT)
    is_whole = crc32(data[HEARTBEAT_AT : HEARTBEAT_AT + HEARTBEAT.size - CHECKSUM.size]) == checksum
    if not is_whole or not monotonic_ns or max(step, monotonic_ns, due_ns) > LARGEST:
        return None
    return Heartbeat(step, monotonic_ns, due_ns, bool(is_busy))


def decode_record(slot: bytes) -> Record:
    """Read the record in one slot.

    Raises:
        WireError: the slot is empty, being written, or damaged.
    """
    body = slot[: SLOT_BYTES - CHECKSUM.size]
    if len(slot) != SLOT_BYTES or CHECKSUM.unpack_from(slot, len(body))[0] != crc32(body):
        raise WireError("the slot holds no whole record")
    values = RECORD.unpack_from(body)
    sequence, step, wall_ns, monotonic_ns, step_s, phase, flags, device, _, raw_uuid = values[:10]
    counts = values[10:23]
    host_bytes, limit_bytes = values[25] - 1, values[26] - 1
    sane = sequence > 0 and phase < len(PHASES) and device >= CPU and min(counts) >= -1
    sane = sane and max(host_bytes, limit_bytes) <= LARGEST
    if not sane or math.isinf(step_s) or step_s < 0 or max(values[:4]) > LARGEST:
        raise WireError("the slot's record makes no sense")
    device_uuid = f"GPU-{uuid.UUID(bytes=raw_uuid)}" if any(raw_uuid) else ""
    where = (PHASES[phase], device, device_uuid, bool(flags & HAS_ALLOCATOR))
    return Record(*(sequence, step, wall_ns, monotonic_ns, step_s, *where, *values[10:25], host_bytes, limit_bytes))
