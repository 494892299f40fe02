"""The ring: one fixed-size file for each watched process, written round and round by its probe.

A header that says who writes, then slots of one record for each device and sample. The writer never waits for a
reader. What reads a ring must expect garbage: every decoder raises `WireError`. The files around it are in `files`,
the documents beside it in `documents`. Standard library only, Python 3.9.
"""

from __future__ import annotations

import json
import math
import struct
import uuid
from binascii import crc32
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from gpumem_tui.probe.documents import LARGEST, SCHEMA, flat_from_json, json_object
from gpumem_tui.probe.files import WireError
from gpumem_tui.step import CPU as CPU  # the number of host memory in records

MAGIC = b"GPUMEMRB"
HEADER_BYTES = 4096
SLOT_BYTES = 256
SLOT_COUNT = 2048
RING_BYTES = HEADER_BYTES + SLOT_COUNT * SLOT_BYTES

PHASES = ("", "build", "batch", "forward", "backward", "optimizer")
"""Where a training step can be; the empty one is unknown. A record holds the index."""

_PREFIX = struct.Struct("<8sIIIIQQII")
_WRITTEN_AT = 24
_ENDED_AT = 32
_SWITCHED_OFF_AT = HEADER_BYTES - 256
_LOOKING_AT = _SWITCHED_OFF_AT - 8
_COUNTER = struct.Struct("<Q")
_RECORD = struct.Struct("<QQQQdBBhI16s13qIIQ")
_CHECKSUM = struct.Struct("<I")
_HAS_ALLOCATOR = 1


@dataclass(frozen=True)
class Process:
    """The ring's header: who writes it. Written once.

    Attributes:
        pid, start_ticks: as the process itself sees them; in a container the pid is the container's.
        started_ns: wall time at which the ring was made.
        entry: how the probe got in: ``run``, ``attach``, ``call`` or ``callback``.
        rank, local_rank, world_size: as the launcher's environment says; None outside of a distributed job.
        python, torch: versions.
        visible_devices: ``CUDA_VISIBLE_DEVICES``; None if unset.
        command: the command line; cut short if it would not fit.
        job: what its launcher calls the job that it is a rank of: Slurm's number, or the id of torchrun's rendezvous.
            The same on all machines; None where the launcher says nothing, and from older probes.
    """

    pid: int
    start_ticks: int
    started_ns: int
    entry: str
    rank: int | None
    local_rank: int | None
    world_size: int | None
    python: str
    torch: str
    visible_devices: str | None
    command: tuple[str, ...]
    job: str | None = None


@dataclass(frozen=True)
class Record:
    """One sample of one device. Records of one sample share `monotonic_ns`. A byte or event count of -1 is unknown.

    Attributes:
        sequence: counts records from 1; also says which slot.
        step: optimizer steps since the probe came in.
        wall_ns: time of day. Can jump.
        monotonic_ns: the machine's monotonic clock (`time.monotonic_ns`), the same in every process: age is a
            difference of these.
        step_s: mean seconds of a step since the sample before; NaN if unknown.
        phase: one of `PHASES`.
        device: the process's number of the CUDA device, or `CPU`.
        device_uuid: the device's UUID as NVML writes it, ``GPU-…``; empty if unknown.
        has_allocator: whether the device has a caching allocator whose figures these are.
        parameters_bytes: buffers included.
        buffers_bytes: part of `parameters_bytes`.
        retries, ooms: how often the allocator emptied its cache to try again, and how often it gave up.
        inactive_split_bytes: free parts of segments that are in use elsewhere: fragmentation.
        requested_bytes: what was asked for, before rounding.
        dropped: samples that could not be written so far.
        errors: exceptions inside the probe that were swallowed so far.
        host_bytes: resident host memory of the process, without pages of files; the same in all records of a sample.
    """

    sequence: int
    step: int
    wall_ns: int
    monotonic_ns: int
    step_s: float
    phase: str
    device: int
    device_uuid: str
    has_allocator: bool
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    buffers_bytes: int
    batch_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    retries: int
    ooms: int
    inactive_split_bytes: int
    requested_bytes: int
    dropped: int
    errors: int
    host_bytes: int = -1

    def as_json(self) -> dict[str, Any]:
        """The record by field name; an unknown step time is None."""
        values = asdict(self)
        values["step_s"] = None if math.isnan(self.step_s) else self.step_s
        return values


_COUNTS = tuple(field.name for field in fields(Record))[9:22]


@dataclass(frozen=True)
class Header:
    """What the first bytes of a ring say.

    Attributes:
        written: records written since the ring was made; the newest has this sequence number.
        ended_ns: wall time at which the interpreter exited; 0 while it runs, and if it was killed.
        switched_off: why the probe switched itself off; empty if it did not.
        looking: the number of the request for a look that is being recorded; 0 for none. A request that is neither
            this nor answered waits for a step's end, at which the probe sees it.
    """

    process: Process
    written: int
    ended_ns: int
    switched_off: str
    looking: int = 0


def encode_header(process: Process) -> bytes:
    """`HEADER_BYTES` bytes, with no record written yet. Arguments that do not fit are cut from the command's end."""
    command = [argument[:512] for argument in process.command]
    while True:
        text = json.dumps(asdict(replace(process, command=tuple(command)))).encode()
        if _PREFIX.size + len(text) <= _LOOKING_AT:
            break
        if not command:
            raise WireError("the header's texts do not fit")
        command.pop()
    prefix = _PREFIX.pack(MAGIC, SCHEMA, HEADER_BYTES, SLOT_BYTES, SLOT_COUNT, 0, 0, len(text), crc32(text))
    return (prefix + text).ljust(HEADER_BYTES, b"\0")


def decode_header(data: bytes) -> Header:
    """The header at the start of `data`.

    Raises:
        WireError: it is no ring, of another schema, or damaged.
    """
    if len(data) < HEADER_BYTES:
        raise WireError(f"the ring has {len(data)} bytes, less than its header")
    magic, schema, header, slot, count, written, ended_ns, length, checksum = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise WireError("not a ring")
    if schema != SCHEMA:
        raise WireError(f"written by another version (schema {schema}, this one reads {SCHEMA})")
    text = data[_PREFIX.size : _PREFIX.size + length]
    if (header, slot, count) != (HEADER_BYTES, SLOT_BYTES, SLOT_COUNT) or length > HEADER_BYTES or written > LARGEST:
        raise WireError("the ring's header is damaged")
    if crc32(text) != checksum:
        raise WireError("the ring's header is damaged")
    switched_off = data[_SWITCHED_OFF_AT:HEADER_BYTES].rstrip(b"\0").decode(errors="ignore")
    looking = _COUNTER.unpack_from(data, _LOOKING_AT)[0] if _PREFIX.size + length <= _LOOKING_AT else 0
    return Header(flat_from_json(Process, json_object(text)), written, ended_ns, switched_off, looking)


def encode_record(record: Record) -> bytes:
    """`SLOT_BYTES` bytes, the checksum last: a slot that is half written, or no slot at all, cannot pass for one."""
    device_uuid = uuid.UUID(record.device_uuid[-36:]).bytes if record.device_uuid else bytes(16)
    body = _RECORD.pack(
        record.sequence,
        record.step,
        record.wall_ns,
        record.monotonic_ns,
        record.step_s,
        PHASES.index(record.phase),
        _HAS_ALLOCATOR if record.has_allocator else 0,
        record.device,
        0,
        device_uuid,
        *(getattr(record, name) for name in _COUNTS),
        record.dropped,
        record.errors,
        record.host_bytes + 1,  # a slot of a probe that does not know this field has 0 here
    )
    body = body.ljust(SLOT_BYTES - _CHECKSUM.size, b"\0")
    return body + _CHECKSUM.pack(crc32(body))


def decode_record(slot: bytes) -> Record:
    """The record in one slot.

    Raises:
        WireError: the slot is empty, being written, or damaged.
    """
    body = slot[: SLOT_BYTES - _CHECKSUM.size]
    if len(slot) != SLOT_BYTES or _CHECKSUM.unpack_from(slot, len(body))[0] != crc32(body):
        raise WireError("the slot holds no whole record")
    values = _RECORD.unpack_from(body)
    sequence, step, wall_ns, monotonic_ns, step_s, phase, flags, device, _, raw_uuid = values[:10]
    counts = values[10:23]
    host_bytes = values[25] - 1
    sane = sequence > 0 and phase < len(PHASES) and device >= CPU and min(counts) >= -1 and host_bytes <= LARGEST
    if not sane or math.isinf(step_s) or step_s < 0 or max(values[:4]) > LARGEST:
        raise WireError("the slot's record makes no sense")
    device_uuid = f"GPU-{uuid.UUID(bytes=raw_uuid)}" if any(raw_uuid) else ""
    told = (step, wall_ns, monotonic_ns, step_s, PHASES[phase], device, device_uuid, bool(flags & _HAS_ALLOCATOR))
    return Record(*(sequence, *told, *values[10:25], host_bytes))


def slot_offset(sequence: int) -> int:
    """The offset in the ring of the record with a sequence number (from 1)."""
    return HEADER_BYTES + (sequence - 1) % SLOT_COUNT * SLOT_BYTES


def written_patch(written: int) -> tuple[int, bytes]:
    """Offset and bytes that tell how many records there are."""
    return _WRITTEN_AT, _COUNTER.pack(written)


def ended_patch(wall_ns: int) -> tuple[int, bytes]:
    """Offset and bytes that tell that the interpreter exits."""
    return _ENDED_AT, _COUNTER.pack(wall_ns)


def looking_patch(request: int) -> tuple[int, bytes]:
    """Offset and bytes that tell which request for a look is being recorded; 0 for none."""
    return _LOOKING_AT, _COUNTER.pack(request)


def switched_off_patch(reason: str) -> tuple[int, bytes]:
    """Offset and bytes that tell why the probe switched itself off; what does not fit is cut."""
    return _SWITCHED_OFF_AT, reason.encode(errors="replace")[: HEADER_BYTES - _SWITCHED_OFF_AT]
