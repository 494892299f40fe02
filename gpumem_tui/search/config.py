"""The configuration of a search or a prediction: the device, and everything else that is set before it begins."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields, replace

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.predict import DEFAULT_HEADROOM
from gpumem_tui.formula.records import as_run_on
from gpumem_tui.memory import format_bytes
from gpumem_tui.run.control import Terms
from gpumem_tui.run.events import Ready, TraceDone
from gpumem_tui.search import strategy
from gpumem_tui.search.prediction import Formula, Traced
from gpumem_tui.simulator.allocator.profile import beside_allocator_bytes
from gpumem_tui.simulator.allocator.settings import AllocatorSettings
from gpumem_tui.workload.spec import WorkloadSpec


@dataclass(frozen=True)
class Device:
    """The place of a search. `uuid` is the real GPU's; `reason`: why a simulated one was taken ("": asked for).

    `others_bytes` is what other processes hold on it: a search next to them stays within what they leave. `more_uuids`
    are the further GPUs of a command that starts several ranks.
    """

    gpu: Gpu
    simulated: bool
    uuid: str | None = None
    reason: str = ""
    others_bytes: int = 0
    more_uuids: tuple[str, ...] = ()

    @property
    def measured_title(self) -> str:
        """Return the heading over what trials report: nothing simulated is ever called measured."""
        return "Simulated" if self.simulated else "Measured"


@dataclass(frozen=True)
class Room:
    """The memory that a headroom is a share of.

    Attributes:
        limit_bytes: a user's cap on reserved bytes; None for the whole device.
    """

    gpu: Gpu
    limit_bytes: int | None

    @property
    def total_bytes(self) -> int:
        """Return the device's memory, or the cap."""
        return self.limit_bytes or self.gpu.total_bytes

    @property
    def beside_bytes(self) -> int:
        """Return what of it the allocator cannot have, at most; a cap counts what is reserved only."""
        beside_bytes = beside_allocator_bytes(self.gpu)
        return max(0, beside_bytes - (self.gpu.total_bytes - self.total_bytes))

    def free_bytes(self, reserved_bytes: int, device_used_bytes: int) -> int:
        """Return what a step leaves."""
        left = self.gpu.cuda_total_bytes - device_used_bytes
        return left if self.limit_bytes is None else min(left, self.limit_bytes - reserved_bytes)


@dataclass(frozen=True, kw_only=True)
class SearchTerms:
    """The terms of a search: strategy, steps, headroom and limits, independent of the subject and the place.

    Attributes:
        steps: full training steps a trial runs; three show lazily made state and steady reuse.
        limit_bytes: cap on what the allocator may reserve; None for the whole device.
        headroom: share of the GPU to leave free, which the formula does.
        ramp_step: a ramp's step; None for one that suits the prediction.
        batch_multiple: batch sizes that are multiples of it are tried only.
        timeout_s: a trial silent for longer than this hangs.
        target_batch: samples wanted per optimizer step over all GPUs; None for none. No trial depends on it.
    """

    strategy: strategy.Name = "guided"
    steps: int = 3
    limit_bytes: int | None = None
    headroom: float = DEFAULT_HEADROOM
    ramp_step: int | None = None
    batch_multiple: int = 1
    timeout_s: float = 300.0
    target_batch: int | None = None

    @property
    def search_terms(self) -> dict[str, object]:
        """These fields alone, by name."""
        return {field.name: getattr(self, field.name) for field in fields(SearchTerms)}


@dataclass(frozen=True)
class SearchConfig(SearchTerms):
    """Everything a search needs to know.

    Attributes:
        python: the interpreter that trials run under; this one unless told otherwise.
        change: to be made to a command while it is traced, as `TraceRequest` has it.
        passes: of an optimizer step, as a command's line states them; 0 for as many as reach `target_batch`.
        typed: the options that it was made of, as they are typed in any verb.
    """

    workload: WorkloadSpec
    device: Device
    python: str = sys.executable
    allocator: AllocatorSettings = field(default_factory=AllocatorSettings)
    change: str = ""
    passes: int = 0
    typed: tuple[str, ...] = field(default=(), compare=False)

    @property
    def room(self) -> Room:
        """Return the memory there is to search in."""
        return Room(self.device.gpu, self.limit_bytes)

    @property
    def formula(self) -> Formula:
        """Return the closed form of what is searched."""
        workload = replace(self.workload, recipe=as_run_on(self.workload.recipe, self.device.gpu))
        return Formula(workload, self.room.total_bytes, self.headroom, beside_bytes=self.room.beside_bytes)

    def traced(self, ready: Ready, done: TraceDone) -> Traced:
        """Return a finished trace as a prediction for this device."""
        settings = AllocatorSettings.parse(done.allocator) if done.allocator else self.allocator
        return Traced(ready, done, self.device.gpu, self.limit_bytes, settings)

    @property
    def terms(self) -> Terms:
        """Return what its children run under."""
        uuids = tuple(uuid for uuid in (self.device.uuid, *self.device.more_uuids) if uuid is not None)
        return Terms(self.python, uuids, self.timeout_s, self.target_batch, self.passes)

    @property
    def where(self) -> str:
        """Return the device and the cap on it, in words."""
        limit = f" limited to {format_bytes(self.limit_bytes)}" if self.limit_bytes is not None else ""
        return f"{'simulated ' if self.device.simulated else ''}{self.device.gpu.title}{limit}"

    def others_answer(self, kind: str) -> bool:
        """Return whether others answer where there is no trace: a model's formula, or trials on a real GPU.

        A torch too old to simulate a GPU trains on a real one anyway.

        Args:
            kind: of the failure.
        """
        if self.workload.command is not None:
            return False
        may_train, has_formula = not self.device.simulated, self.workload.shape is not None
        return {"trace": True, "torch": may_train, "workload": may_train or has_formula}.get(kind, False)
