"""Messages between the search (parent) and a trial (child): one JSON object a line, typed and versioned.

Plain dataclasses rather than msgspec structs, because the child may run in a user's own interpreter that has torch and
nothing of ours; the parent validates every line with msgspec.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.catalog.speeds import GpuSpeed
from gpumem_tui.memory import Breakdown, Range
from gpumem_tui.simulator.profile import Profile
from gpumem_tui.simulator.replay import AffineTrace
from gpumem_tui.simulator.rules import Computed
from gpumem_tui.simulator.timeline import Mark
from gpumem_tui.step import Phase, Site
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
    """

    workload: WorkloadSpec
    gpu: Gpu
    simulated: bool
    batch_size: int
    steps: int
    limit_bytes: int | None = None
    others_bytes: int = 0


@dataclass(frozen=True)
class TraceRequest:
    """Trace the step on the simulated GPU at three batch sizes and find the affine form through them.

    Attributes:
        batch_size: where there is no such form, trace at this size alone; None: say that there is none.
        not_affine: why there is no such form, where that is known from an earlier trace: do not look for it again.
        change: of a command: the change to make to it, by name (see `command.changes`), or `PROPOSE`; empty for
            neither.
    """

    simulated: ClassVar[bool] = True

    workload: WorkloadSpec
    gpu: Gpu
    steps: int
    batch_size: int | None = None
    not_affine: str = ""
    change: str = ""


Request = TrialRequest | TraceRequest


@dataclass(frozen=True)
class Ready:
    """The child runs and has imported torch. `profile` and what follows are the simulator's (see `Profile`).

    Attributes:
        context_range: None where `context_bytes` is exact.
    """

    torch_version: str
    profile: str
    context_bytes: int
    context_source: str
    context_range: Range | None = None
    event: Literal["ready"] = "ready"

    @classmethod
    def of(cls, torch_version: str, profile: Profile) -> Ready:
        """The simulator's assumptions, as notes."""
        return cls(torch_version, profile.name, profile.context_bytes, profile.context_source, profile.context_range)


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
    """Memory as a phase begins (or the run ends): allocator figures and the live buckets known by then."""

    step: int
    phase: str
    allocated_bytes: int
    reserved_bytes: int
    buckets: dict[str, int]
    event: Literal["sample"] = "sample"


@dataclass(frozen=True)
class TrialDone:
    """The outcome of one trial.

    Attributes:
        buckets: the composition at the peak; they sum to `peak_allocated_bytes`. None where it could not be had, and
            `buckets_unknown` says why.
        detail: the out-of-memory message or the error, in one line; empty for a fit.
        notes: what else is to be known of the result, a line each.
        growing: that memory grows from step to step, and where; empty if it does not.
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
    notes: tuple[str, ...] = ()
    growing: str = ""
    event: Literal["trial"] = "trial"

    @property
    def breakdown(self) -> Breakdown | None:
        """`buckets`, typed."""
        return None if self.buckets is None else Breakdown.from_json(self.buckets)


@dataclass(frozen=True)
class TraceDone:
    """An affine trace (see `AffineTrace`), flattened for the wire.

    Marks are (event, step, phase), sites (operator, module, source, function).

    Attributes:
        notes: what else is to be known of the result, a line each.
        computed: allocations whose size a rule gives: (number, rule, position, arguments at no sample, what each
            grows by a sample).
        assumed: the operators whose kernels' scratch is not known and counted as none: (operator, times, why).
        only_at: the one batch size that was traced where there is no affine form, and `not_affine` says why; 0: there
            is one.
        changes: of a command, by change, why it cannot be made or was not; empty where it can be, or was.
        is_sharded: whether each rank of a command holds a part.
        emptied: before which events the step emptied its cache.
        parameters: of a command, the values in the parameters of its models, a shared one once; 0 where it is none.
        rows_asked_for: of a command, the largest part into which it cuts its batch (see `simulator.parts`); 0 for none.
        apart: the trace at one size for which this form does not hold, as `AffineTrace.apart`; None for none.
        streams, completions: as in `Timeline`.
        traced_layers: the depths of the networks that were traced instead of a deeper one (see `simulator.deep`); empty
            where it was traced itself.
    """

    events: tuple[int, ...]
    constants: tuple[int, ...]
    slopes: tuple[int, ...]
    buckets: tuple[int, ...]
    marks: tuple[tuple[int, int, str], ...]
    seconds: float
    sites: tuple[int, ...] = ()
    site_table: tuple[tuple[str, str, str, str], ...] = ()
    assumed: tuple[tuple[str, int, str], ...] = ()
    only_at: int = 0
    not_affine: str = ""
    computed: tuple[tuple[int, str, int, tuple[int, ...], tuple[int, ...]], ...] = ()
    notes: tuple[str, ...] = ()
    changes: tuple[tuple[str, str], ...] = ()
    is_sharded: bool = False
    emptied: tuple[int, ...] = ()
    parameters: int = 0
    rows_asked_for: int = 0
    apart: TraceDone | None = None
    streams: tuple[int, ...] = ()
    completions: tuple[tuple[int, int], ...] = ()
    traced_layers: tuple[int, ...] = ()
    event: Literal["trace"] = "trace"

    @property
    def trace(self) -> AffineTrace:
        """The trace, ready for replay."""
        marks = tuple(Mark(event, step, Phase(phase)) for event, step, phase in self.marks)
        table = tuple(Site(*site) for site in self.site_table)
        computed = tuple(
            (number, Computed(rule, position, start), steps) for number, rule, position, start, steps in self.computed
        )
        apart = () if self.apart is None else ((self.apart.only_at, self.apart.trace.at(self.apart.only_at)),)
        return AffineTrace(
            self.events, self.constants, self.slopes, self.buckets, marks, self.sites, table, computed, self.emptied,
            apart, self.streams, self.completions,
        )  # fmt: skip

    @classmethod
    def of(
        cls,
        trace: AffineTrace,
        seconds: float,
        assumed: tuple[tuple[str, int, str], ...],
        only_at: int = 0,
        not_affine: str = "",
        notes: tuple[str, ...] = (),
    ) -> TraceDone:
        """Flatten a trace."""
        marks = tuple((mark.event, mark.step, mark.phase.value) for mark in trace.marks)
        return cls(
            events=trace.events,
            constants=trace.constants,
            slopes=trace.slopes,
            buckets=trace.buckets,
            marks=marks,
            seconds=seconds,
            sites=trace.sites,
            site_table=tuple((site.operator, site.module, site.source, site.function) for site in trace.site_table),
            assumed=assumed,
            only_at=only_at,
            not_affine=not_affine,
            notes=notes,
            emptied=trace.emptied,
            streams=trace.streams,
            completions=trace.completions,
            apart=next((cls.of(AffineTrace.constant(run), seconds, (), size) for size, run in trace.apart), None),
            computed=tuple(
                (number, start.rule, start.position, start.arguments, steps) for number, start, steps in trace.computed
            ),
        )


@dataclass(frozen=True)
class Failed:
    """The child could not do what was asked.

    Attributes:
        kind: ``workload``: the user's file or options are wrong; ``python``: that interpreter is none;
            ``torch``: no usable torch in it; ``trace``: the step cannot be traced; ``device``: the GPU cannot be used.
        detail: one clear line.
        peaks: of a step whose memory is no straight line in the batch size, (batch size, highest allocated bytes) at
            two sizes; empty otherwise.
    """

    kind: Literal["workload", "python", "torch", "trace", "device"]
    detail: str
    peaks: tuple[tuple[int, int], ...] = ()
    event: Literal["failed"] = "failed"


ChildEvent = Ready | Joined | Ended | Output | Sample | TrialDone | TraceDone | Failed
_BY_NAME: dict[str, type[ChildEvent]] = {
    "ready": Ready,
    "joined": Joined,
    "ended": Ended,
    "output": Output,
    "sample": Sample,
    "trial": TrialDone,
    "trace": TraceDone,
    "failed": Failed,
}


class EventError(ValueError):
    """A line that is not an event of this schema's version."""


@dataclass(frozen=True)
class _Head:
    """The part of a line that says how to read the rest."""

    event: str
    schema: int | None = None


def encode(message: Request | ChildEvent) -> bytes:
    """One JSON line."""
    if isinstance(message, (TrialRequest, TraceRequest)):
        body = {**asdict(message), "action": "trial" if isinstance(message, TrialRequest) else "trace"}
    else:
        body = vars(message)  # of plain values only: a trace has hundreds of thousands
    return json.dumps({"schema": SCHEMA, **body}, separators=(",", ":"), default=vars).encode() + b"\n"


def decode_request(line: bytes) -> Request:
    """Read the parent's request in the child (standard library only; the parent is this same program)."""
    values: dict[str, Any] = json.loads(line)
    if values.pop("schema") != SCHEMA:
        raise EventError("the parent speaks another version")
    action = values.pop("action")
    gpu = values.pop("gpu")
    gpu["compute_capability"] = tuple(gpu["compute_capability"])
    gpu["speed"] = GpuSpeed(**gpu["speed"]) if gpu["speed"] is not None else None
    gpu["reserves"] = tuple((driver, size_bytes) for driver, size_bytes in gpu["reserves"])
    workload = WorkloadSpec.from_wire(values.pop("workload"))
    kind = TrialRequest if action == "trial" else TraceRequest
    return kind(workload=workload, gpu=Gpu(**gpu), **values)


@contextmanager
def uncollected() -> Iterator[None]:
    """Exclude what is made within from garbage collection: a trace is a million tuples without a cycle, and
    to go through them again and again takes longer than to replay them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def decode_event(line: bytes) -> ChildEvent:
    """Read and validate a child's line in the parent.

    Raises:
        WireError: not JSON, another schema version, an unknown event, or a field of the wrong type.
    """
    import msgspec

    try:
        if b"\\" in line:  # behind it JSON has what is not printable
            line = msgspec.json.encode(cleaned(msgspec.json.decode(line)))
        head = msgspec.json.decode(line, type=_Head)
        if head.schema != SCHEMA:
            raise EventError(f"event of schema {head.schema!r}, expected {SCHEMA}")
        kind = _BY_NAME[head.event]
        with uncollected() if kind is TraceDone else nullcontext():
            return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise EventError(f"not an event: {error}") from error
