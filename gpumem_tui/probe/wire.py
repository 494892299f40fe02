"""A probe's files: the ring of samples, the documents next to it, and the requests that a viewer makes.

The ring is one fixed-size file for each watched process, written round and round by its probe: a header that states who
writes, then slots of one record for each device and sample. The writer never waits for a reader. Documents are JSON
with a schema's number; a field with a default is one that probes of an earlier version do not write. Viewers read both
by these classes (`gpumem_tui.watch.documents`), checked by their annotations. Standard library only, Python 3.9.
"""

from __future__ import annotations

import json
import math
import struct
import uuid
from binascii import crc32
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from gpumem_tui.memory import Breakdown
from gpumem_tui.probe.files import WireError
from gpumem_tui.step import CPU as CPU  # the number of host memory in records

SCHEMA = 1
MAX_DOCUMENT_BYTES = 16 << 20
MAX_REQUEST_BYTES = 4096
LARGEST = (1 << 63) - 1


@dataclass(frozen=True)
class AtLeast:
    """In an annotation: the least that a number may be. An integer may be `LARGEST` at most."""

    value: int


Count = Annotated[int, AtLeast(0)]
Seconds = Annotated[float, AtLeast(0)]
DeviceNumber = Annotated[int, AtLeast(-1)]
"""Number of a CUDA device as its process has it, or `CPU`."""


# The trained model


@dataclass(frozen=True)
class TrainedParameter:
    """One parameter of a model. `shape` is the whole one where the tensor is sharded over ranks."""

    name: str
    shape: tuple[Count, ...]
    dtype: str
    trained: bool


@dataclass(frozen=True)
class TrainedModel:
    """A module tree of which something is trained. `name` is its class; `truncated`: more than fit are left out."""

    name: str
    parameters: tuple[TrainedParameter, ...]
    truncated: bool


@dataclass(frozen=True)
class TrainedOptimizer:
    """One optimizer. `options` are the plain values of its first parameter group: ``lr``, ``fused``, ..."""

    name: str
    parameters: Count
    options: dict[str, Any]


@dataclass(frozen=True)
class Untrained:
    """The bytes that untrained module trees of one class hold of a device: a frozen teacher, a moving average.

    `bytes` are of parameters and buffers that no trained tree holds too.
    """

    name: str
    device: DeviceNumber
    bytes: Count


@dataclass(frozen=True)
class Trained:
    """``.model.json``: what is trained; replaced when that changes. `models` is empty if no module was found.

    `complete` is False where the probe came in late and has not yet seen all of the process: modules may be missing.
    """

    models: tuple[TrainedModel, ...]
    optimizers: tuple[TrainedOptimizer, ...]
    untrained: tuple[Untrained, ...] = ()
    complete: bool = True
    step: Count = 0
    wall_ns: Count = 0


# A deep look


@dataclass(frozen=True)
class HeldPlace:
    """The bytes that one place in the program holds of one bucket at the peak. A text that is empty is unknown.

    `bucket` is a key of `gpumem_tui.memory.Bucket`, `module` a qualified name, `source` ``file.py:line``. A block
    from before the step (`before_step`) has no line; its module is the one whose parameter or buffer it is, or whose
    parameter's gradient or optimizer state.
    """

    bucket: str
    operator: str
    module: str
    source: str
    bytes: Count
    allocations: Count
    before_step: bool = False

    def place(self, by: Literal["module", "source"]) -> str:
        """Return its module or source line, for a person; in brackets why it is missing."""
        if by == "module":
            return self.module or "(no module known)"
        return self.source or ("(allocated before this step)" if self.before_step else "(no line known)")


@dataclass(frozen=True)
class LookedDevice:
    """The figures of one device during the looked step.

    Attributes:
        device, device_uuid: as in `Record`.
        peak_bytes: the highest sum of live bytes during the step; on CUDA what the allocator calls allocated.
        buckets: the bytes at that moment by bucket; their sum is `peak_bytes`.
        held: the bytes by place, the largest first. Blocks too small to list are one row a bucket
            and age with no place, last.
        timeline: (seconds since the step began, live bytes), thinned out, the peak kept.
        phases: (seconds since the step began, phase that begins).
        peak_s: when the peak was, in seconds since the step began.
        highest: the most bytes of each bucket at any moment of the step; empty from older probes.
    """

    device: DeviceNumber
    device_uuid: str
    peak_bytes: Count
    buckets: dict[str, Count]
    held: tuple[HeldPlace, ...]
    timeline: tuple[tuple[Seconds, Count], ...]
    phases: tuple[tuple[Seconds, str], ...]
    peak_s: Seconds
    highest: dict[str, Count] = field(default_factory=dict)

    @property
    def breakdown(self) -> Breakdown:
        """Return `buckets` as a `Breakdown`."""
        return Breakdown.from_json(self.buckets)


@dataclass(frozen=True)
class KeptPlace:
    """The bytes that each step allocates at one place and still holds two steps later: a leak, if memory grows by it.

    `bytes` and `allocations` are of one step: the least that any of the followed steps kept there. Parameters,
    gradients and optimizer state are left out. Texts as in `HeldPlace`.
    """

    device: DeviceNumber
    operator: str
    module: str
    source: str
    bytes: Count
    allocations: Count


@dataclass(frozen=True)
class LookAnswer:
    """``.look.json``: the answer to a `ViewerRequest` of kind ``look``. Written twice: see `kept`.

    Attributes:
        request: the request's number.
        step: the step that was looked at, counted as in `Record`.
        step_s: how long it took, the recording included.
        method: ``allocator history`` (CUDA), ``operators`` (CPU), ``tensors found after the step`` (compiled, CPU), or
            empty if nothing was recorded.
        devices: empty if nothing was recorded.
        kept: what every step leaves behind, the largest first. None as long as the two steps that follow the looked one
            have not ended, when the document is written again; or for ever, with a reason in `unavailable`.
        unavailable: reasons by what they concern: ``look`` if there is no look; ``module``, ``phases``,
            ``peak``, ``kept``; ``allocator`` if missing; ``events`` if there were too many; ``sum`` if the
            allocator counts more.
    """

    request: Count
    step: Count
    step_s: Seconds
    method: str
    devices: tuple[LookedDevice, ...]
    unavailable: dict[str, str]
    kept: tuple[KeptPlace, ...] | None = None
    wall_ns: Count = 0


# How it ended


@dataclass(frozen=True)
class PostMortem:
    """``.oom.json``: the last time memory ran out.

    Attributes:
        device, device_uuid: as in `Record`; device is None if the error did not say.
        requested_bytes: of the allocation that failed; None if unknown. `requested_is_rounded`: read from a message.
        device_total_bytes, device_free_bytes: as CUDA said then; None if unknown. device_limit_bytes: what the process
            may reserve of it, where it has set itself a limit (`torch.cuda.set_per_process_memory_fraction`).
        source: ``file.py:line`` of the program, empty if unknown.
        message: the error's text, at most 2,000 characters; empty if only the allocator spoke. Viewers keep its first
            line.
        buckets: parameters, gradients, optimizer on that device, at that moment.
        allocated_bytes, reserved_bytes, ...: the allocator's figures at that moment; None without an allocator. The
            excess of `allocated_bytes` over the buckets is activations, batch data, temporary and other.
        fatal: whether the error ended the process (True), or was seen when it was raised and may have been caught.
        device_name: as CUDA calls it; empty if unknown. compute_capability: (major, minor); None if unknown.
        resident_bytes, limit_bytes, limit_owner: of an error of host memory: what the process held of it (``VmRSS``),
            by how much it is bound, and whose limit that is, as `host_memory.MemoryLimit`; None and empty where that
            is not known.
        samples: the last records, oldest first, as `Record.as_json`.
        kept: what each step left behind on that device, the largest first, where steps were recorded: for a look, or
            because memory rose.
    """

    step: Count
    wall_ns: Count
    device: int | None
    buckets: dict[str, Count]
    fatal: bool = False
    device_uuid: str = ""
    device_name: str = ""
    compute_capability: tuple[Count, Count] | None = None
    device_total_bytes: Count | None = None
    device_free_bytes: Count | None = None
    device_limit_bytes: Count | None = None
    requested_bytes: Count | None = None
    requested_is_rounded: bool = False
    source: str = ""
    message: str = ""
    allocated_bytes: Count | None = None
    reserved_bytes: Count | None = None
    peak_allocated_bytes: Count | None = None
    peak_reserved_bytes: Count | None = None
    retries: Count | None = None
    ooms: Count | None = None
    inactive_split_bytes: Count | None = None
    requested_live_bytes: Count | None = None
    resident_bytes: Count | None = None
    limit_bytes: Count | None = None
    limit_owner: str = ""
    samples: tuple[dict[str, Any], ...] = ()
    kept: tuple[KeptPlace, ...] = ()

    @property
    def breakdown(self) -> Breakdown:
        """Return `buckets` as a `Breakdown`."""
        return Breakdown.from_json(self.buckets)


@dataclass(frozen=True)
class UncaughtError:
    """``.error.json``: the uncaught exception. `error` is its class, `source` the line as in `PostMortem`."""

    step: Count
    wall_ns: Count
    error: str
    message: str
    source: str


@dataclass(frozen=True)
class Exit:
    """``.exit.json``: how the process ended, written by `gpumem-tui run`, not by the probe.

    Attributes:
        exit_code, signal: the one that is not None tells; both are None where that could not be learned.
        killed_for_memory: the kernel killed it because memory ran out.
        resident_bytes, limit_bytes, limit_owner: as in `PostMortem`, at the end or shortly before.
    """

    wall_ns: Count
    exit_code: int | None
    signal: int | None
    killed_for_memory: bool
    resident_bytes: Count | None
    limit_bytes: Count | None
    limit_owner: str


# Where it is


@dataclass(frozen=True)
class Stall:
    """``.stall.json``: where the training thread is when no step has ended for a while; written again as it moves.

    It counts as long as no step has ended since `monotonic_ns`.

    Attributes:
        step: the last that ended, counted as in `Record`.
        monotonic_ns: when it was looked at, by the clock of `Record.monotonic_ns`.
        phase: one of `PHASES`, by what is on the stack.
        collective: the function of ``torch.distributed`` that it is in; empty for none.
        source, function: the program's own innermost line as ``file.py:line``, and what it is in; empty if unknown.
        busy: whether the thread computes: one that sleeps, or waits for a lock or for others does not.
        stack: ``path:line function``, the innermost first.
    """

    step: Count
    wall_ns: Count
    monotonic_ns: Count
    phase: str
    collective: str
    source: str
    function: str
    busy: bool
    stack: tuple[str, ...]


@dataclass(frozen=True)
class StagePeak:
    """The most that was allocated on a device in a stage of the run; `step`: optimizer steps until then.

    Attributes:
        least_bytes, most_bytes: equal if the stage raised the allocator's peak; else its own is in between.
        buckets: parameters, gradients and optimizer state then; the stage itself made the rest.
    """

    device: DeviceNumber
    stage: str
    step: Count
    least_bytes: Count
    most_bytes: Count
    buckets: dict[str, Count]


@dataclass(frozen=True)
class Stages:
    """``.stages.json``: the peak of each stage so far, written again as one rises."""

    peaks: tuple[StagePeak, ...]


# How it is written and read


@dataclass(frozen=True)
class ViewerRequest:
    """A request of a viewer to the probe, which answers at a step's end in the document of the same name.

    Attributes:
        number: repeated in the answer. Larger than that of every request before.
        kind: ``look``.
    """

    number: int
    kind: str


UNASKED = 0
"""The number of no request: of what the probe looks at by itself, which it does not publish as an answer."""


def decode_request(data: bytes) -> ViewerRequest:
    """Read the request in a control file.

    Raises:
        WireError: the file holds no request.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise WireError(f"written by another version, this one reads {SCHEMA}")
    number, kind = content.get("number"), content.get("kind")
    if type(number) is not int or not 0 <= number <= LARGEST or not isinstance(kind, str):
        raise WireError(f"request {number!r:.80} of kind {kind!r:.80}")  # to Python True is an int
    return ViewerRequest(number, kind)


def encode_document(document: object) -> bytes:
    """Return the bytes of a document or a request, with the schema's number."""
    content = document if isinstance(document, dict) else vars(document)
    return json.dumps({"schema": SCHEMA, **content}, allow_nan=False, default=vars).encode()


# The ring


MAGIC = b"GPUMEMRB"
HEADER_BYTES = 4096
SLOT_BYTES = 256
SLOT_COUNT = 2048
RING_BYTES = HEADER_BYTES + SLOT_COUNT * SLOT_BYTES

PHASES = ("", "build", "batch", "forward", "backward", "optimizer")
"""Where a training step can be; the empty one is unknown. A record holds the index."""

PREFIX = struct.Struct("<8sIIIIQQII")
WRITTEN_AT = 24
ENDED_AT = 32
SWITCHED_OFF_AT = HEADER_BYTES - 256
LOOKING_AT = SWITCHED_OFF_AT - 8
COUNTER = struct.Struct("<Q")
HEARTBEAT = struct.Struct("<QQQII")
HEARTBEAT_AT = LOOKING_AT - HEARTBEAT.size
RECORD = struct.Struct("<QQQQdBBhI16s13qIIQQ")
CHECKSUM = struct.Struct("<I")
HAS_ALLOCATOR = 1


@dataclass(frozen=True)
class Process:
    """The ring's header: who writes it. Written once.

    Attributes:
        pid, start_ticks: as the process itself sees them; in a container the pid is the container's.
        started_ns: wall time at which the ring was made.
        entry: how the probe got in: ``run``, ``attach``, ``call`` or ``callback``.
        rank, local_rank, world_size: as the launcher's environment states; None outside of a distributed job.
        python, torch: versions.
        visible_devices: ``CUDA_VISIBLE_DEVICES``; None if unset.
        command: the command line; cut short if it would not fit.
        job: what its launcher calls the job that it is a rank of: Slurm's number, the id of torchrun's rendezvous, or
            where the ranks meet. Equal on all machines; None where the launcher gives nothing, and from older
            probes.
    """

    pid: Count
    start_ticks: Count
    started_ns: Count
    entry: str
    rank: Count | None
    local_rank: Count | None
    world_size: Count | None
    python: str
    torch: str
    visible_devices: str | None
    command: tuple[str, ...]
    job: str | None = None


@dataclass(frozen=True)
class Record:
    """A sample of one device. Records of one sample share `monotonic_ns`. A byte or event count of -1 is unknown.

    Attributes:
        sequence: counts records from 1; also shows which slot.
        step: optimizer steps since the probe came in.
        wall_ns: time of day. Can jump.
        monotonic_ns: the machine's monotonic clock (`time.monotonic_ns`), shared by every process: age is a
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
        host_bytes: resident host memory of the process, without pages of files; equal in all records of a sample.
        limit_bytes: what the process may reserve of the device, where it has set itself a limit.
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
    limit_bytes: int = -1

    def as_json(self) -> dict[str, Any]:
        """Return the record by field name; an unknown step time is None."""
        values = asdict(self)
        values["step_s"] = None if math.isnan(self.step_s) else self.step_s
        return values


@dataclass(frozen=True)
class Heartbeat:
    """The ring's step counter, written far more often than samples are.

    Attributes:
        step: optimizer steps since the probe came in.
        monotonic_ns: when the last of them ended, at the latest, by the clock of `Record.monotonic_ns`.
        due_ns: when the next sample is due, by that clock.
        is_busy: samples are rarer as the probe had to wait: the machine is busy, or its files are slow.
    """

    step: int
    monotonic_ns: int
    due_ns: int
    is_busy: bool


COUNTS = tuple(field.name for field in fields(Record))[9:22]


def encode_header(process: Process) -> bytes:
    """Return `HEADER_BYTES` bytes, with no record written yet. Arguments that do not fit are cut from the end."""
    others = json.dumps(asdict(replace(process, command=())))
    left_bytes = HEARTBEAT_AT - PREFIX.size - len(others)
    if left_bytes < 0:
        raise WireError("the header's texts do not fit")
    command = []
    for argument in process.command:
        left_bytes -= len(json.dumps(argument[:512])) + len(", ")
        if left_bytes < 0:
            break
        command.append(argument[:512])
    text = json.dumps(asdict(replace(process, command=tuple(command)))).encode()
    prefix = PREFIX.pack(MAGIC, SCHEMA, HEADER_BYTES, SLOT_BYTES, SLOT_COUNT, 0, 0, len(text), crc32(text))
    return (prefix + text).ljust(HEADER_BYTES, b"\0")


def encode_record(record: Record) -> bytes:
    """Return `SLOT_BYTES` bytes, the checksum last: what is half written, or no slot at all, cannot pass for one."""
    device_uuid = uuid.UUID(record.device_uuid[-36:]).bytes if record.device_uuid else bytes(16)
    body = RECORD.pack(
        record.sequence,
        record.step,
        record.wall_ns,
        record.monotonic_ns,
        record.step_s,
        PHASES.index(record.phase),
        HAS_ALLOCATOR if record.has_allocator else 0,
        record.device,
        0,
        device_uuid,
        *(getattr(record, name) for name in COUNTS),
        record.dropped,
        record.errors,
        record.host_bytes + 1,  # a slot of a probe that does not know this field has 0 here
        record.limit_bytes + 1,
    )
    body = body.ljust(SLOT_BYTES - CHECKSUM.size, b"\0")
    return body + CHECKSUM.pack(crc32(body))


def slot_offset(sequence: int) -> int:
    """Return the offset in the ring of the record with a sequence number (from 1)."""
    return HEADER_BYTES + (sequence - 1) % SLOT_COUNT * SLOT_BYTES


def written_patch(written: int) -> tuple[int, bytes]:
    """Return offset and bytes that tell how many records there are."""
    return WRITTEN_AT, COUNTER.pack(written)


def ended_patch(wall_ns: int) -> tuple[int, bytes]:
    """Return offset and bytes that tell that the interpreter exits."""
    return ENDED_AT, COUNTER.pack(wall_ns)


def looking_patch(request: int) -> tuple[int, bytes]:
    """Return offset and bytes that tell which request for a look is being recorded; 0 for none."""
    return LOOKING_AT, COUNTER.pack(request)


def heartbeat_patch(heartbeat: Heartbeat) -> tuple[int, bytes]:
    """Return offset and bytes of the step counter, with a checksum: one that is half written counts as none."""
    body = HEARTBEAT.pack(*astuple(heartbeat), 0)[: -CHECKSUM.size]
    return HEARTBEAT_AT, body + CHECKSUM.pack(crc32(body))


def switched_off_patch(reason: str) -> tuple[int, bytes]:
    """Return offset and bytes that tell why the probe switched itself off, empty: it did not; the rest is cut."""
    room = HEADER_BYTES - SWITCHED_OFF_AT
    return SWITCHED_OFF_AT, reason.encode(errors="replace")[:room].ljust(room, b"\0")
