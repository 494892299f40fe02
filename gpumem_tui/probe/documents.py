"""The documents beside a ring, JSON with a schema's number, and the requests a viewer makes.

Standard library only, Python 3.9. The `TypedDict` classes say what the probe writes; a reader validates.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, TypedDict, TypeVar

from gpumem_tui.probe.files import WireError

SCHEMA = 1
MAX_DOCUMENT_BYTES = 16 << 20
MAX_REQUEST_BYTES = 4096
LARGEST = (1 << 63) - 1


# What the probe writes


class ParameterJson(TypedDict):
    """One parameter of a model. `shape` is the global one where a tensor is sharded."""

    name: str
    shape: list[int]
    dtype: str
    trained: bool


class ModelJson(TypedDict):
    """A module tree of which something is trained. `name` is its class; `truncated`: more than fit are left out."""

    name: str
    parameters: list[ParameterJson]
    truncated: bool


class OptimizerJson(TypedDict):
    """One optimizer. `options` are the plain values of its first parameter group: ``lr``, ``fused``, ..."""

    name: str
    parameters: int
    options: dict[str, Any]


class UntrainedJson(TypedDict):
    """What all module trees of one class of which nothing is trained hold of one device: a frozen teacher, a moving
    average. `bytes` are of parameters and buffers that no trained tree holds too."""

    name: str
    device: int
    bytes: int


class ModelDocument(TypedDict):
    """``.model.json``: what is trained; replaced when that changes. `models` is empty if no module was found.

    `complete` is False where the probe came in late and has not yet seen all of the process: modules may be missing.
    """

    step: int
    wall_ns: int
    models: list[ModelJson]
    optimizers: list[OptimizerJson]
    untrained: list[UntrainedJson]
    complete: bool


class HeldJson(TypedDict):
    """What one place in the program holds of one bucket at the peak. A text that is empty is unknown.

    `bucket` is a key of `gpumem_tui.memory.Bucket`, `module` a qualified name, `source` ``file.py:line``. What was
    there before the step (`before_step`) has no line; its module is the one whose parameter or buffer it is, or whose
    parameter's gradient or optimizer state.
    """

    bucket: str
    operator: str
    module: str
    source: str
    bytes: int
    allocations: int
    before_step: bool


class LookedDeviceJson(TypedDict):
    """One device during the looked step.

    Attributes:
        device, device_uuid: as in `wire.Record`.
        peak_bytes: the highest sum of live bytes during the step; on CUDA what the allocator calls allocated.
        buckets: the bytes at that moment by bucket; their sum is `peak_bytes`.
        held: the same, by place, the largest first. What is too small to list is one row a bucket and
            age with no place, last.
        timeline: [seconds since the step began, live bytes], thinned out, the peak kept.
        phases: [seconds since the step began, phase that begins].
        peak_s: when the peak was, in seconds since the step began.
    """

    device: int
    device_uuid: str
    peak_bytes: int
    buckets: dict[str, int]
    held: list[HeldJson]
    timeline: list[tuple[float, int]]
    phases: list[tuple[float, str]]
    peak_s: float


class KeptJson(TypedDict):
    """What each step makes at one place and nobody has released two steps later: a leak, if memory grows by it.

    `bytes` and `allocations` are of one step: the least that any of the followed steps kept there. Parameters,
    gradients and optimizer state are left out. Texts as in `Held`.
    """

    device: int
    operator: str
    module: str
    source: str
    bytes: int
    allocations: int


class LookDocument(TypedDict):
    """``.look.json``: the answer to a `Request` of kind ``look``. Written twice: see `kept`.

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

    request: int
    step: int
    wall_ns: int
    step_s: float
    method: str
    devices: list[LookedDeviceJson]
    kept: list[KeptJson] | None
    unavailable: dict[str, str]


class OutOfMemoryDocument(TypedDict):
    """``.oom.json``: the last time memory ran out.

    Attributes:
        device, device_uuid: as in `wire.Record`; device is None if the error did not say.
        device_name: as CUDA calls it; empty if unknown. compute_capability: (major, minor); None if unknown.
        requested_bytes: of the allocation that failed; None if unknown. `requested_is_rounded`: read from a message.
        device_total_bytes, device_free_bytes: as CUDA said then; None if unknown.
        source: ``file.py:line`` of the program, empty if unknown.
        message: the error's text, at most 2,000 characters; empty if only the allocator spoke.
        buckets: parameters, gradients, optimizer on that device, at that moment.
        allocated_bytes, reserved_bytes, ...: the allocator's figures at that moment; None without an allocator. What
            `allocated_bytes` exceeds the buckets by is activations, batch data, temporary and other.
        resident_bytes, limit_bytes, limit_owner: of an error of host memory: what the process held of it (``VmRSS``),
            by how much it is bound, and whose limit that is, as `gpumem_tui.host_memory.Limit`.
        fatal: whether the error ended the process (True), or was seen when it was raised and may have been caught.
        samples: the last records, oldest first, as `wire.Record.as_json`.
    """

    step: int
    wall_ns: int
    device: int | None
    device_uuid: str
    device_name: str
    compute_capability: tuple[int, int] | None
    requested_bytes: int | None
    requested_is_rounded: bool
    device_total_bytes: int | None
    device_free_bytes: int | None
    source: str
    message: str
    buckets: dict[str, int]
    allocated_bytes: int | None
    reserved_bytes: int | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    retries: int | None
    ooms: int | None
    inactive_split_bytes: int | None
    requested_live_bytes: int | None
    resident_bytes: int | None
    limit_bytes: int | None
    limit_owner: str
    fatal: bool
    samples: list[dict[str, Any]]


class ErrorDocument(TypedDict):
    """``.error.json``: the exception that nobody caught. `error` is its class, `source` the line as above."""

    step: int
    wall_ns: int
    error: str
    message: str
    source: str


class ExitDocument(TypedDict):
    """``.exit.json``: how the process ended, written by `gpumem-tui run`, not by the probe.

    Attributes:
        exit_code, signal: the one that is not None tells; both are None where that could not be learned.
        killed_for_memory: the kernel killed it because memory ran out.
        resident_bytes, limit_bytes, limit_owner: as in `OutOfMemoryDocument`, at the end or shortly before.
    """

    wall_ns: int
    exit_code: int | None
    signal: int | None
    killed_for_memory: bool
    resident_bytes: int | None
    limit_bytes: int | None
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


def encode_document(content: dict[str, Any]) -> bytes:
    """A document's bytes, with the schema's number."""
    return json.dumps({"schema": SCHEMA, **content}, allow_nan=False).encode()


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
