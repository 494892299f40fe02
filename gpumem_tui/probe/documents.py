"""The documents beside a ring, JSON with a schema's number, and the requests a viewer makes.

Standard library only, Python 3.9: the probe writes these classes, and `gpumem_tui.watch.documents` reads them, checked
by their annotations. A field with a default is one that probes of an earlier version do not write.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Literal, TypeVar

from gpumem_tui.memory import Breakdown
from gpumem_tui.probe.files import WireError

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
"""As in `wire.Record`: of a CUDA device, or `wire.CPU`."""


# What is trained


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
    """What all module trees of one class of which nothing is trained hold of one device: a frozen teacher, a moving
    average. `bytes` are of parameters and buffers that no trained tree holds too."""

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
    """What one place in the program holds of one bucket at the peak. A text that is empty is unknown.

    `bucket` is a key of `gpumem_tui.memory.Bucket`, `module` a qualified name, `source` ``file.py:line``. What was
    there before the step (`before_step`) has no line; its module is the one whose parameter or buffer it is, or whose
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
        """Its module or source line, for a person; in brackets why there is none."""
        if by == "module":
            return self.module or "(no module known)"
        return self.source or ("(allocated before this step)" if self.before_step else "(no line known)")


@dataclass(frozen=True)
class LookedDevice:
    """One device during the looked step.

    Attributes:
        device, device_uuid: as in `wire.Record`.
        peak_bytes: the highest sum of live bytes during the step; on CUDA what the allocator calls allocated.
        buckets: the bytes at that moment by bucket; their sum is `peak_bytes`.
        held: the same, by place, the largest first. What is too small to list is one row a bucket and
            age with no place, last.
        timeline: (seconds since the step began, live bytes), thinned out, the peak kept.
        phases: (seconds since the step began, phase that begins).
        peak_s: when the peak was, in seconds since the step began.
    """

    device: DeviceNumber
    device_uuid: str
    peak_bytes: Count
    buckets: dict[str, Count]
    held: tuple[HeldPlace, ...]
    timeline: tuple[tuple[Seconds, Count], ...]
    phases: tuple[tuple[Seconds, str], ...]
    peak_s: Seconds

    @property
    def breakdown(self) -> Breakdown:
        """The buckets, typed."""
        return Breakdown.from_json(self.buckets)


@dataclass(frozen=True)
class KeptPlace:
    """What each step allocates at one place and has not released two steps later: a leak, if memory grows by it.

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
        step: the step that was looked at, counted as in `wire.Record`.
        step_s: how long it took, the recording included.
        method: ``allocator history`` (CUDA), ``operators`` (CPU), ``tensors found after the step`` (compiled, CPU), or
            empty if nothing was recorded.
        devices: empty if nothing was recorded.
        kept: what every step leaves behind, the largest first. None as long as the two steps that follow the looked one
            have not ended, when the document is written again; or for ever, with a reason in `unavailable`.
        unavailable: reasons by what they concern: ``look`` if there is none at all; ``module``, ``phases``,
            ``peak``, ``kept``; ``allocator`` where there is none; ``events`` if there were too many; ``sum`` if the
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
        device, device_uuid: as in `wire.Record`; device is None if the error did not say.
        requested_bytes: of the allocation that failed; None if unknown. `requested_is_rounded`: read from a message.
        device_total_bytes, device_free_bytes: as CUDA said then; None if unknown.
        source: ``file.py:line`` of the program, empty if unknown.
        message: the error's text, at most 2,000 characters; empty if only the allocator spoke. Viewers keep its first
            line.
        buckets: parameters, gradients, optimizer on that device, at that moment.
        allocated_bytes, reserved_bytes, ...: the allocator's figures at that moment; None without an allocator. What
            `allocated_bytes` exceeds the buckets by is activations, batch data, temporary and other.
        fatal: whether the error ended the process (True), or was seen when it was raised and may have been caught.
        device_name: as CUDA calls it; empty if unknown. compute_capability: (major, minor); None if unknown.
        resident_bytes, limit_bytes, limit_owner: of an error of host memory: what the process held of it (``VmRSS``),
            by how much it is bound, and whose limit that is, as `gpumem_tui.host_memory.Limit`; None and empty where
            that is not known.
        samples: the last records, oldest first, as `wire.Record.as_json`.
    """

    step: Count
    wall_ns: Count
    device: int | None
    device_uuid: str
    requested_bytes: Count | None
    requested_is_rounded: bool
    device_total_bytes: Count | None
    device_free_bytes: Count | None
    source: str
    message: str
    buckets: dict[str, Count]
    allocated_bytes: Count | None
    reserved_bytes: Count | None
    peak_allocated_bytes: Count | None
    peak_reserved_bytes: Count | None
    retries: Count | None
    ooms: Count | None
    inactive_split_bytes: Count | None
    fatal: bool
    device_name: str = ""
    compute_capability: tuple[Count, Count] | None = None
    resident_bytes: Count | None = None
    limit_bytes: Count | None = None
    limit_owner: str = ""
    requested_live_bytes: Count | None = None
    samples: tuple[dict[str, Any], ...] = ()

    @property
    def breakdown(self) -> Breakdown:
        """The buckets, typed."""
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


# How it is written and read


@dataclass(frozen=True)
class ViewerRequest:
    """What a viewer asks of the probe; it answers at a step's end, in the document of the same name.

    Attributes:
        number: repeated in the answer. Larger than that of every request before.
        kind: ``look``.
    """

    number: int
    kind: str


def encode_request(request: ViewerRequest) -> bytes:
    """The content of the control file."""
    return json.dumps({"schema": SCHEMA, **asdict(request)}).encode()


def decode_request(data: bytes) -> ViewerRequest:
    """The request in a control file.

    Raises:
        WireError: it is none.
    """
    return flat_from_json(ViewerRequest, decode_document(data))


def decode_document(data: bytes) -> dict[str, Any]:
    """A document's content.

    Raises:
        WireError: no JSON object, or of another schema.
    """
    content = json_object(data)
    if content.get("schema") != SCHEMA:
        raise WireError(f"written by another version (schema {content.get('schema')!r}, this one reads {SCHEMA})")
    return content


def encode_document(document: object) -> bytes:
    """A document's bytes, with the schema's number."""
    content = document if isinstance(document, dict) else vars(document)
    return json.dumps({"schema": SCHEMA, **content}, allow_nan=False, default=vars).encode()


def json_object(data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise WireError("not a JSON object")
    return content


def flat_from_json(kind: type[_Flat], content: dict[str, Any]) -> _Flat:
    """A flat dataclass from JSON, every field present and of its type."""
    values: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        value = content.get(field.name)
        if not _ACCEPTS[str(field.type)](value):
            raise WireError(f"{field.name} is {value!r:.80}")
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


_Flat = TypeVar("_Flat")
_ACCEPTS: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: type(value) is int and 0 <= value <= LARGEST,  # to Python True is an int
    "int | None": lambda value: value is None or (type(value) is int and 0 <= value <= LARGEST),
    "str": lambda value: isinstance(value, str),
    "str | None": lambda value: value is None or isinstance(value, str),
    "tuple[str, ...]": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
}
