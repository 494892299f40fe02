"""The documents beside a ring, validated: what is trained, a deep look, and what was there when memory ran out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from gpumem_tui.memory import Breakdown
from gpumem_tui.probe.documents import MAX_DOCUMENT_BYTES, SCHEMA
from gpumem_tui.probe.files import Files, WireError, read_private
from gpumem_tui.text import cleaned, printable

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class TrainedParameter:
    """One parameter; `shape` is the whole one where the tensor is sharded over ranks."""

    name: str
    shape: tuple[Count, ...]
    dtype: str
    trained: bool


@dataclass(frozen=True)
class TrainedModel:
    """A module tree of which something is trained. `name`: its class. `truncated`: some parameters were left out."""

    name: str
    parameters: tuple[TrainedParameter, ...]
    truncated: bool


@dataclass(frozen=True)
class TrainedOptimizer:
    """One optimizer, and the plain options of its first group of parameters."""

    name: str
    parameters: Count
    options: dict[str, Any]


@dataclass(frozen=True)
class Untrained:
    """What the module trees of one class that nothing trains hold of one device."""

    name: str
    device: Annotated[int, msgspec.Meta(ge=-1)]
    bytes: Count


@dataclass(frozen=True)
class Trained:
    """What a process trains, and what else is there; a probe of an earlier version does not tell of the latter.

    `complete` is False where the probe came in late and has not yet seen all of the process: modules may be missing.
    """

    models: tuple[TrainedModel, ...]
    optimizers: tuple[TrainedOptimizer, ...]
    untrained: tuple[Untrained, ...] = ()
    complete: bool = True


@dataclass(frozen=True)
class HeldPlace:
    """What one place in the program holds of one bucket at the peak. A text that is empty is unknown.

    What was there before the step has no line; a probe of an earlier version does not tell it apart.
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
        buckets: bytes at the peak; they sum to `peak_bytes`.
        held: the same by place, the largest first.
        timeline: (seconds since the step began, live bytes). phases: (seconds since it began, phase that begins).
        peak_s: when the peak was.
    """

    device: Annotated[int, msgspec.Meta(ge=-1)]
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
    """What each step makes at one place and nobody has released two steps later; bytes and allocations of one step."""

    device: Annotated[int, msgspec.Meta(ge=-1)]
    operator: str
    module: str
    source: str
    bytes: Count
    allocations: Count


@dataclass(frozen=True)
class LookAnswer:
    """The answer to a request for a deep look; see `gpumem_tui.probe.documents.LookDocument`.

    `kept` is None where that is not known, or not yet: `unavailable` says which.
    """

    request: Count
    step: Count
    step_s: Seconds
    method: str
    devices: tuple[LookedDevice, ...]
    unavailable: dict[str, str]
    kept: tuple[KeptPlace, ...] | None = None


@dataclass(frozen=True)
class PostMortem:
    """The last time memory ran out; see `gpumem_tui.probe.documents.OutOfMemoryDocument`.

    Attributes:
        message: the first line of the error's.
        buckets: parameters, gradients and optimizer state on that device at that moment.
        fatal: whether the error ended the process.
        device_name, compute_capability: what kind of GPU it was; empty and None where the probe did not say.
        resident_bytes, limit_bytes, limit_owner: of host memory, what the process held, how much it may hold, and
            whose limit that is; None and empty where that is not known.
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

    @property
    def breakdown(self) -> Breakdown:
        """The buckets, typed."""
        return Breakdown.from_json(self.buckets)


@dataclass(frozen=True)
class UncaughtError:
    """The exception that nobody caught; see `gpumem_tui.probe.documents.ErrorDocument`. `message`: its first line."""

    step: Count
    wall_ns: Count
    error: str
    message: str
    source: str


@dataclass(frozen=True)
class Exit:
    """How a process ended, seen from outside; see `gpumem_tui.probe.documents.ExitDocument`."""

    wall_ns: Count
    exit_code: int | None
    signal: int | None
    killed_for_memory: bool
    resident_bytes: Count | None
    limit_bytes: Count | None
    limit_owner: str


Document = TypeVar("Document", Trained, LookAnswer, PostMortem, UncaughtError, Exit)


def read_trained(files: Files, uid: int) -> Trained | None:
    """What the process trains; None as long as its probe has not said.

    Raises:
        WireError: not a document that may be trusted; one line.
    """
    return _read(Trained, files.model, uid)


def read_look(files: Files, uid: int) -> LookAnswer | None:
    """The last deep look; None if there was none.

    Raises:
        WireError: as `read_trained`.
    """
    look = _read(LookAnswer, files.look, uid)
    if look is not None:
        for device in look.devices:
            if _total(device.buckets, files.look) != device.peak_bytes:
                raise WireError(f"{files.look.name} is damaged: the buckets do not sum to the peak")
            for held in device.held:
                _total({held.bucket: held.bytes}, files.look)
    return look


def read_post_mortem(files: Files, uid: int) -> PostMortem | None:
    """What was there when memory ran out last; None if it never did.

    Raises:
        WireError: as `read_trained`.
    """
    found = _read(PostMortem, files.oom, uid)
    if found is not None:
        _total(found.buckets, files.oom)
    return found


def read_error(files: Files, uid: int) -> UncaughtError | None:
    """The exception that ended the process; None if its probe saw none.

    Raises:
        WireError: as `read_trained`.
    """
    return _read(UncaughtError, files.error, uid)


def read_exit(files: Files, uid: int) -> Exit | None:
    """How the process ended, where `gpumem-tui run` saw it.

    Raises:
        WireError: as `read_trained`.
    """
    return _read(Exit, files.exit, uid)


def _read(kind: type[Document], path: Path, uid: int) -> Document | None:
    try:
        data = read_private(path, MAX_DOCUMENT_BYTES, {uid})
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WireError(f"{path.name} cannot be read: {error.strerror}") from error
    try:
        content: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
        if content.get("schema") != SCHEMA:
            raise WireError(f"{path.name} was written by another version (schema {content.get('schema')!r:.40})")
        if isinstance(message := content.get("message"), str):  # PyTorch's goes on for many lines of advice
            content["message"] = next((line for line in message.splitlines() if line.strip()), "")
        return msgspec.convert(cleaned(content), kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"{path.name} is damaged: {printable(str(error))}") from error


def _total(buckets: Mapping[str, int], path: Path) -> int:
    try:
        return Breakdown.from_json(buckets).total_bytes
    except ValueError as error:
        raise WireError(f"{path.name} is damaged: {printable(str(error))}") from error
