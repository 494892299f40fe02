"""Messages between whoever wants a step run and the process that runs it: one JSON object a line, typed and versioned.

Plain dataclasses rather than msgspec structs, because the child may run in a user's own interpreter that has torch and
nothing of ours; the viewer's side decodes every line into them with msgspec, which validates it.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args

from gpumem_tui.catalog.shapes import Context, Gpu, GpuSpeed, InferenceEngine
from gpumem_tui.causes import Note
from gpumem_tui.importing import Uncollected
from gpumem_tui.memory import Breakdown, Range
from gpumem_tui.run.later import NotReached
from gpumem_tui.run.micro_batches import HowFar
from gpumem_tui.simulator.allocator.assumptions import Assumption, End
from gpumem_tui.simulator.allocator.profile import Profile
from gpumem_tui.simulator.allocator.replay import AffineTrace
from gpumem_tui.text import cleaned
from gpumem_tui.workload.spec import WorkloadSpec

SCHEMA = 1
Outcome = Literal["fit", "oom", "error"]

PROPOSE = "propose"
"""As a `TraceRequest`'s change: make none, and say which could be made."""


@dataclass(frozen=True)
class TrialRequest:
    """Run the step at one batch size and say whether it fits.

    Attributes:
        gpu: the device, as catalogued or as the driver describes it. `simulated`: be it, rather than use it.
        limit_bytes: cap on reserved bytes; None for the whole device. `steps`: full training steps to run.
        others_bytes: what other processes held on the device when it was chosen.
        gpu_uuids: of a real one, the only GPUs that may be used, in the order in which CUDA lists them.
    """

    workload: WorkloadSpec
    gpu: Gpu
    simulated: bool
    batch_size: int
    steps: int
    limit_bytes: int | None = None
    others_bytes: int = 0
    gpu_uuids: tuple[str, ...] = ()
    action: Literal["trial"] = "trial"


@dataclass(frozen=True)
class TraceRequest:
    """Trace the step on the simulated GPU at one batch size.

    Attributes:
        limit_bytes: cap on reserved bytes; None for the whole device.
        ooms: how often memory runs out where the device ends, before it has no end; None: each time.
        change: of a command: the change to make to it, by name (see `changes`), or `PROPOSE`; empty for
            neither.
        end: which end is taken of rows that only a GPU's values tell.
    """

    simulated: ClassVar[bool] = True

    workload: WorkloadSpec
    gpu: Gpu
    steps: int
    batch_size: int
    change: str = ""
    end: End = "most"
    limit_bytes: int | None = None
    ooms: int | None = 0
    action: Literal["trace"] = "trace"


Request = TrialRequest | TraceRequest


@dataclass(frozen=True)
class Ready:
    """The child runs and has imported torch. `profile` and what follows are the simulator's (see `Profile`).

    Attributes:
        context_range: None where `context_bytes` is exact.
        nccl: what both have of NCCL's buffers, for `groups` of so many ranks; None for none.
        libraries: of CUDA, which the program used; None where that is not known.
    """

    torch_version: str
    profile: str
    context_bytes: int
    context_source: str
    context_range: Range | None = None
    nccl: Context | None = None
    groups: tuple[int, ...] = ()
    libraries: tuple[str, ...] | None = None
    event: Literal["ready"] = "ready"

    @classmethod
    def of(cls, torch_version: str, profile: Profile) -> Ready:
        """Return the event of a torch of this version, with what the simulator assumes of it."""
        context = profile.context_bytes, profile.context_source, profile.context_range
        return cls(torch_version, profile.name, *context, profile.nccl, profile.groups, profile.libraries)


@dataclass(frozen=True)
class Joined:
    """A process of a command has imported torch: its place among the ranks, and the script it runs."""

    pid: int
    rank: int
    ranks: int
    script: str
    event: Literal["joined"] = "joined"


@dataclass(frozen=True)
class Ended:
    """A command's process ended by itself, after so many optimizer steps, with nothing to report."""

    steps: int
    event: Literal["ended"] = "ended"


@dataclass(frozen=True)
class Output:
    """A line that a command printed."""

    text: str
    event: Literal["output"] = "output"


@dataclass(frozen=True)
class Sample:
    """Memory as a phase begins (or the run ends): allocator figures and the live buckets known by then.

    Attributes:
        progress: of a command, where its run is.
    """

    step: int
    phase: str
    allocated_bytes: int
    reserved_bytes: int
    buckets: dict[str, int]
    progress: HowFar = field(default_factory=HowFar)
    event: Literal["sample"] = "sample"


@dataclass(frozen=True)
class RanOut:
    """A program ran out of memory, caught the error and went on.

    Attributes:
        times: how often.
        tried: the batch sizes that there was no memory for, in order; empty where they cannot be told.
        settled: the batch size of all steps since; None where it cannot be told.
        place: ``file:line`` of the first time.
        reserved_bytes: what the allocator holds at the end, cached blocks of what was tried among it.
        survived: the program went on until its steps were made; else it died of the last time, and memory had no end.
    """

    times: int
    tried: tuple[int, ...]
    settled: int | None
    place: str
    reserved_bytes: int = 0
    survived: bool = True


@dataclass(frozen=True)
class TrialDone:
    """The outcome of one trial.

    Attributes:
        buckets: the composition at the peak; they sum to `peak_allocated_bytes`. None where it could not be had, and
            `buckets_unknown` gives the reason.
        detail: the out-of-memory message or the error, in one line; empty for a fit.
        notes: what else is to be known of the result, a line each.
        is_estimate: something of it runs otherwise on a GPU, as a note states; never of a real one.
        device_used_bytes: what the whole device held at the peak for this process: context and reserved.
        step_seconds: wall time of each full step; empty on the simulated GPU, whose steps take no device time.
    """

    batch_size: int
    outcome: Outcome
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_used_bytes: int
    buckets: dict[str, int] | None
    buckets_unknown: str
    seconds: float
    steps: int
    step_seconds: tuple[float, ...] = ()
    alloc_retries: int = 0
    detail: str = ""
    notes: tuple[Note, ...] = ()
    is_estimate: bool = False
    event: Literal["trial"] = "trial"

    @property
    def breakdown(self) -> Breakdown | None:
        """Return `buckets` as a `Breakdown`; None where they are not known."""
        return None if self.buckets is None else Breakdown.from_json(self.buckets)


@dataclass(frozen=True)
class TraceDone:
    """A trace at every batch size, or at one.

    Attributes:
        assumed: the operators whose kernels' scratch is not known and counted as none: (operator, times, why).
        only_at: the one batch size that was traced where memory is no straight line in the batch size, and `not_affine`
            gives the reason it is none; 0: the trace answers for every size.
        notes: what else is to be known of the result, a line each.
        changes: of a command, by change, why it cannot be made or was not; empty where it can be, or was.
        written: of a change to a command, the lines of its program that make it, in its own names.
        is_sharded: whether each rank of a command holds a part.
        parameters: of a command, the values in the parameters of its models, a shared one once; 0 where it is none.
        rows_asked_for: of a command, the largest part into which it cuts its batch (see `DeviceMode`); 0
            for none.
        traced_layers: the depths of the networks that were traced instead of a deeper one (see `layers`);
            empty where it was traced itself.
        batch_multiple: it answers for the multiples of it, as the program takes no others.
        is_estimate: something of it runs otherwise on a GPU, as a note states, so that no verdict of it is certain.
        is_compiled: some of it runs as `torch.compile` made it.
        unsure_bytes: what of it a GPU may do without, as a note states.
        steps: the optimizer steps that were made; 0 where the program ended by itself without one.
        allocator: of a command, what `PYTORCH_CUDA_ALLOC_CONF` said as it took memory: programs set it themselves.
        not_reached: of a user's command, what else it does or may do, and is not in the trace; None where it is none.
        assumptions: how many rows it is taken to keep where only a GPU's values tell, as far as sizes depend on it.
        ran_out: that it ran out of memory and went on; the trace is of what it went on with. None where it did not.
        fed_by: samples and batch size of each DataLoader that fed its steps; none of them where that is not known.
        without: extensions compiled for CUDA that it wanted to build, and went on without.
        samples: the largest batch that its data has; 0 where that is not known, and of what was traced at one size.
    """

    trace: AffineTrace
    seconds: float
    assumed: tuple[tuple[str, int, str], ...] = ()
    only_at: int = 0
    not_affine: str = ""
    notes: tuple[Note, ...] = ()
    changes: tuple[tuple[str, str], ...] = ()
    written: tuple[str, ...] = ()
    is_sharded: bool = False
    parameters: int = 0
    rows_asked_for: int = 0
    traced_layers: tuple[int, ...] = ()
    batch_multiple: int = 1
    is_estimate: bool = False
    is_compiled: bool = False
    unsure_bytes: int = 0
    steps: int = 0
    allocator: str = ""
    not_reached: tuple[NotReached, ...] | None = None
    assumptions: tuple[Assumption, ...] = ()
    ran_out: RanOut | None = None
    fed_by: tuple[tuple[int, int], ...] = ()
    without: tuple[str, ...] = ()
    samples: int = 0
    event: Literal["trace"] = "trace"


@dataclass(frozen=True)
class Failed:
    """The child could not do what was asked.

    Attributes:
        kind: ``workload``: the user's file is wrong; ``options``: what was typed; ``python``: that interpreter is none;
            ``torch``: no usable torch in it; ``trace``: the step cannot be traced; ``device``: the GPU cannot be used;
            ``memory``: it ended by the last of the `ooms` times that a simulated GPU was out of memory.
        detail: one clear line.
    """

    kind: Literal["workload", "options", "python", "torch", "trace", "device", "memory"]
    detail: str
    ooms: int = 0
    event: Literal["failed"] = "failed"


ChildEvent = Ready | Joined | Ended | Output | Sample | TrialDone | TraceDone | Failed
_BY_NAME: dict[str, type[ChildEvent]] = {kind.event: kind for kind in get_args(ChildEvent)}


class EventError(ValueError):
    """A line that is not an event of this schema's version."""


@dataclass(frozen=True)
class _Head:
    """The part of a line that shows how to read the rest."""

    event: str
    schema: int | None = None


def encode(message: Request | ChildEvent) -> bytes:
    """Return a message as one JSON line."""
    body = {"schema": SCHEMA, **_fields(message)}
    return json.dumps(body, separators=(",", ":"), default=_fields).encode() + b"\n"


def _fields(record: Any) -> dict[str, Any]:
    return {one.name: getattr(record, one.name) for one in fields(record)}


def decode_request(line: bytes) -> Request:
    """Read the viewer's request in the child (standard library only; both are this same program).

    Raises:
        EventError: the two are of different versions.
    """
    values: dict[str, Any] = json.loads(line)
    if values.pop("schema") != SCHEMA:
        raise EventError("the parent speaks another version")
    kind = TrialRequest if values["action"] == "trial" else TraceRequest
    gpu = values.pop("gpu")
    gpu["compute_capability"], gpu["also"] = tuple(gpu["compute_capability"]), tuple(gpu["also"])
    gpu["context"] = Context(**gpu["context"]) if gpu["context"] is not None else None
    gpu["engine"] = InferenceEngine(**gpu["engine"]) if gpu["engine"] is not None else None
    gpu["speed"] = GpuSpeed(**gpu["speed"]) if gpu["speed"] is not None else None
    gpu["reserves"] = tuple((driver, size_bytes) for driver, size_bytes in gpu["reserves"])
    if "gpu_uuids" in values:
        values["gpu_uuids"] = tuple(values["gpu_uuids"])
    return kind(workload=WorkloadSpec.from_wire(values.pop("workload")), gpu=Gpu(**gpu), **values)


def printable(line: bytes) -> bytes:
    """Return a line of JSON in which no text has what is not printable.

    Raises:
        msgspec.MsgspecError: it is no JSON.
    """
    if b"\\" not in line:  # behind it JSON has what is not printable
        return line
    import msgspec

    return msgspec.json.encode(cleaned(msgspec.json.decode(line)))


@contextmanager
def uncollected() -> Iterator[None]:
    """Exclude what is made within from garbage collection, for good.

    A trace is a million tuples without a cycle, and going through them again and again takes longer than replaying
    them.
    """
    with Uncollected():
        yield
        gc.freeze()


def decode_event(line: bytes) -> ChildEvent:
    """Read and validate a child's line on the viewer's side.

    Raises:
        EventError: not JSON, another schema version, an unknown event, or a field of the wrong type.
    """
    import msgspec

    from gpumem_tui.decoding import decodable

    try:
        line = printable(line)
        head = msgspec.json.decode(line, type=decodable(_Head))
        if head.schema != SCHEMA:
            raise EventError(f"event of schema {head.schema!r}, expected {SCHEMA}")
        kind = _BY_NAME[head.event]
        with uncollected() if kind is TraceDone else nullcontext():
            return msgspec.json.decode(line, type=decodable(kind))
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise EventError(f"not an event: {error}") from error
