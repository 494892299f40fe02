"""Facts about the processes that publish: immutable, validated values that panels and reports show."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from gpumem_tui.memory import Bucket, Unknown, Value
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.probe.files import Files
from gpumem_tui.probe.wire import CPU, KeptPlace, Process, Record, StagePeak, Stall
from gpumem_tui.system import user_name
from gpumem_tui.text import shortened

NO_ALLOCATOR = Unknown("host memory has no caching allocator")
NOT_REPORTED = Unknown("not reported by the probe")
NO_LIMIT = Unknown("the process has set itself no limit")
NOT_SEEN = Unknown("not seen from outside the step")
PEAK_CAME_EARLIER = Unknown("the peak came before all of this was there")

TRAINING_STAGES = ("warm-up", "train")
"""Stages that every run has that trains."""
_CLOCK_S = 60.0
"""Clocks of containers and machines differ by less."""
_HELD = (Bucket.PARAMETERS, Bucket.GRADIENTS, Bucket.OPTIMIZER, Bucket.BATCH_DATA)


def device_name(device: int) -> str:
    """Name a device as its process knows it: ``cpu``, ``cuda:0``."""
    return "cpu" if device == CPU else f"cuda:{device}"


def kept_place(kept: KeptPlace) -> str:
    """Return where in the program an allocation was made: line, module and operator, as far as known."""
    places = (kept.source or "(no line known)", kept.module and f"in {kept.module}", kept.operator)
    return ", ".join(place for place in places if place)


class ProcessState(Enum):
    """A process's state, or how it ended. The value is the key used in JSON."""

    RUNNING = "running"
    ENDED = "ended"
    """Ended well: with exit code 0, or by the interpreter's exit without an error where the code was not seen."""
    OUT_OF_MEMORY = "out of memory"
    KILLED_FOR_MEMORY = "killed for memory"
    """Killed by the kernel, because the memory of its control group or of the machine ran out."""
    FAILED = "failed"
    """Ended by an error, or with another exit code than 0."""
    INTERRUPTED = "interrupted"
    KILLED = "killed"
    """Ended by a signal that others send, such as SIGKILL."""
    CRASHED = "crashed"
    """Ended by a signal that a fault of its own brings, such as SIGSEGV."""
    VANISHED = "vanished"
    """Killed or crashed: nobody saw which."""


WELL_ENDED = frozenset({ProcessState.ENDED, ProcessState.INTERRUPTED})
"""Ends that somebody wanted."""
FOR_MEMORY = frozenset({ProcessState.OUT_OF_MEMORY, ProcessState.KILLED_FOR_MEMORY})
"""Ends because memory ran out."""
UNEXPLAINED = FOR_MEMORY | {ProcessState.CRASHED, ProcessState.KILLED, ProcessState.VANISHED}
"""Ends of which the program itself prints nothing, or nothing that shows what filled the memory."""


@dataclass(frozen=True)
class End:
    """The way in which a process ended.

    Attributes:
        phrase: in a few words, as a sentence continues: ``failed with exit code 1: ValueError: … at train.py:3``.
        time_s: when, in seconds since the epoch.
        exit_code: None if a signal ended it, or if it was not seen. signal: its name; empty likewise.
        resident_bytes, limit_bytes, limit_owner: what it held of host memory last, how much it may hold, and whose
            limit that is; None and empty where that is not known.
    """

    state: ProcessState
    phrase: str
    time_s: float
    exit_code: int | None = None
    signal: str = ""
    resident_bytes: int | None = None
    limit_bytes: int | None = None
    limit_owner: str = ""


def last_first(time_s: float, now_s: float) -> float:
    """Return what ends are sorted by: the last comes first, and after all others one that is still to come."""
    return -time_s if time_s <= now_s + _CLOCK_S else math.inf


class _Figure:
    """A figure of the allocator in a sample's record, by its name there, or why it is not known."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, sample: ProbeSample, kind: type | None = None) -> Value:
        if not sample.record.has_allocator:
            return NO_ALLOCATOR
        value: int = getattr(sample.record, self._name)
        return value if value >= 0 else NOT_REPORTED


@dataclass(frozen=True)
class ProbeSample:
    """The figures of a process for one device at the end of a step.

    Attributes:
        record: as the probe wrote it.
    """

    record: Record

    @property
    def device(self) -> str:
        """The device as the process knows it."""
        return device_name(self.record.device)

    @property
    def is_on_gpu(self) -> bool:
        """Return whether the device is a GPU; else it is host memory."""
        return self.record.device != CPU

    @property
    def step_s(self) -> Reading[float]:
        """Mean seconds of a step since the sample before."""
        return Unknown("no step timed yet") if math.isnan(self.record.step_s) else self.record.step_s

    @property
    def left_bytes(self) -> Value:
        """Bytes that the process may still reserve by the limit that it has set itself."""
        if self.record.limit_bytes < 0 or self.record.reserved_bytes < 0:
            return NO_LIMIT
        return max(0, self.record.limit_bytes - self.record.reserved_bytes)

    allocated_bytes = _Figure()
    """Bytes that the caching allocator has given out now."""
    reserved_bytes = _Figure()
    """Bytes of the device that the caching allocator holds now."""
    peak_allocated_bytes = _Figure()
    """The most that was ever allocated at once since the process began, or since it reset its own count."""
    peak_reserved_bytes = _Figure()
    """The most that was ever reserved at once."""
    inactive_split_bytes = _Figure()
    """Free parts of segments that are in use elsewhere: fragmentation."""
    retries = _Figure()
    """How often the allocator gave its whole cache back to satisfy a request."""
    ooms = _Figure()
    """How often a request failed."""

    @property
    def buckets(self) -> Mapping[Bucket, Value]:
        """The bytes now, between two steps. With an allocator the known ones sum to `allocated_bytes`.

        Other is what the tensors that were found do not explain: with the activations gone, mostly batch data, caches
        of the program and tensors that it keeps.
        """
        found = self._found()
        found[Bucket.OTHER] = _remainder(self.allocated_bytes, found, NOT_REPORTED)
        return MappingProxyType(found)

    @property
    def peak_buckets(self) -> Mapping[Bucket, Value]:
        """The bytes at the peak. With an allocator the known ones sum to `peak_allocated_bytes`.

        Activations are the remainder, so batch data and temporary tensors are among them; a deep look tells them apart.
        """
        found = self._found()
        found[Bucket.ACTIVATIONS] = _remainder(self.peak_allocated_bytes, found, PEAK_CAME_EARLIER)
        return MappingProxyType(found)

    def _found(self) -> dict[Bucket, Value]:
        record = self.record
        sizes = (record.parameters_bytes, record.gradients_bytes, record.optimizer_bytes, record.batch_bytes)
        unseen = (NOT_REPORTED, NOT_REPORTED, NOT_REPORTED, NOT_SEEN)
        return {
            bucket: size_bytes if size_bytes >= 0 else reason
            for bucket, size_bytes, reason in zip(_HELD, sizes, unseen, strict=True)
        }


def _remainder(total_bytes: Value, found: Mapping[Bucket, Value], if_negative: Unknown) -> Value:
    if isinstance(total_bytes, Unknown):
        return total_bytes
    left_bytes = total_bytes - sum(value for value in found.values() if isinstance(value, int))
    return left_bytes if left_bytes >= 0 else if_negative


@dataclass(frozen=True)
class ProbedProcess:
    """A process that publishes, or did.

    Attributes:
        files: the files of its probe; they name it for ever, also after its pid is used again.
        pid: as we know it; None once it has ended, or where it cannot be told which process it is.
        uid: whose it is.
        process: what its probe said of it when it began.
        samples: the newest sample of every device, in the order of devices; empty before the first step. For a
            process that has ended, the last ones with a model, as at exit there may be none.
        age_s: seconds since those were taken.
        problem: one line if something is wrong with what is shown; empty otherwise.
        end: how it ended; None while it runs.
        steps: optimizer steps by its last record or its step counter, which may be later than `samples`.
        is_counted: `steps` are all that it made, as its interpreter exited; else some may have followed.
        heard_s: seconds since the last step seen ended.
        is_silent: no step has finished for longer than steps take; `stall`: where it is then, if its probe reports.
        stages: the peak of each stage of its run on each device, in the order in which they came.
        rarer: why samples are further apart than usual; empty if they are not.
    """

    files: Files
    pid: int | None
    uid: int
    process: Process
    state: ProcessState
    samples: tuple[ProbeSample, ...]
    age_s: Reading[float]
    problem: str
    end: End | None = None
    steps: int = 0
    is_counted: bool = False
    heard_s: Reading[float] = NOT_REPORTED
    rarer: str = ""
    is_silent: bool = False
    stall: Stall | None = None
    stages: tuple[StagePeak, ...] = ()

    def stages_on(self, device: int) -> list[StagePeak]:
        """Return the stages of its run on a device."""
        return [one for one in self.stages if one.device == device]

    @property
    def key(self) -> tuple[int, int]:
        """Pid and start time: never used twice on a machine."""
        return self.files.pid, self.files.start_ticks

    @property
    def is_running(self) -> bool:
        """Return whether the process is alive."""
        return self.state is ProcessState.RUNNING

    @property
    def known_pid(self) -> int:
        """The pid as we know it; of a process that has ended, as it knew itself."""
        return self.files.pid if self.pid is None else self.pid

    @property
    def of_owner(self) -> str:
        """Whose it is, such as " of user ada"; empty if it is ours."""
        return "" if self.uid == os.geteuid() else f" of user {user_name(self.uid)}"

    @property
    def title(self) -> str:
        """The process in a few words, with whose it is if it is not ours."""
        rank = "" if self.process.rank is None else f", rank {self.process.rank}"
        return f"PID {self.known_pid}{self.of_owner}{rank} ({shortened(' '.join(self.process.command))})"

    @property
    def step(self) -> int:
        """Optimizer steps since the probe was loaded."""
        return max(self.steps, self.samples[0].record.step if self.samples else 0)

    @property
    def step_words(self) -> str:
        """The last step of a process that has ended, and whether there may have been others."""
        more = "" if self.is_counted else "; a few may have followed"
        return f"the last step{'' if self.is_counted else ' seen'} was {self.step:,}{more}"

    @property
    def has_ended_well(self) -> bool:
        """Return whether the process ended normally or on request."""
        return self.state in WELL_ENDED

    @property
    def state_words(self) -> str:
        """The state of the process, or how it ended, in a few words."""
        return self.state.value if self.end is None else self.end.phrase


SHOWING = "showing the newest"
"""Begins the reason of one that is left out as others are newer."""


@dataclass(frozen=True)
class RefusedFile:
    """Something in the probes' folder that is not read, and why."""

    path: str
    reason: str

    @property
    def words(self) -> str:
        """The omissions, in one line."""
        return self.reason if self.reason.startswith(SHOWING) else f"not read: {self.reason}"
