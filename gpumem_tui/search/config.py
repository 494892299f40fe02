"""What a search or a prediction is about: the device, and everything else there is to say before it begins."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.blocks import as_run_on
from gpumem_tui.formula.predict import DEFAULT_HEADROOM
from gpumem_tui.memory import format_bytes
from gpumem_tui.search import strategy
from gpumem_tui.search.headroom import Room
from gpumem_tui.search.prediction import Formula
from gpumem_tui.simulator.settings import AllocatorSettings
from gpumem_tui.workload.spec import WorkloadSpec


@dataclass(frozen=True)
class Device:
    """Where to search. `uuid` is the real GPU's; `reason` says why a simulated one was taken ("": it was asked for).

    `others_bytes` is what other processes hold on it: a search beside them stays within what they leave. `more_uuids`
    are the further GPUs of a command that starts several ranks. `host` is the machine that it is on; "": this one.
    """

    gpu: Gpu
    simulated: bool
    uuid: str | None = None
    reason: str = ""
    others_bytes: int = 0
    more_uuids: tuple[str, ...] = ()
    host: str = ""

    @property
    def measured_title(self) -> str:
        """The heading over what trials report: nothing simulated is ever called measured."""
        return "Simulated" if self.simulated else "Measured"


@dataclass(frozen=True)
class SearchConfig:
    """Everything a search needs to know.

    Attributes:
        python: the interpreter that trials run under; this one unless told otherwise.
        steps: full training steps a trial runs; three show lazily made state and steady reuse.
        limit_bytes: cap on what the allocator may reserve; None for the whole device.
        ramp_step: a ramp's step; None for one that suits the prediction.
        timeout_s: a trial silent for longer than this hangs.
        target_batch: samples wanted per optimizer step over all GPUs; None for none. No trial depends on it.
        change: to be made to a command while it is traced, as `TraceRequest` has it.
    """

    workload: WorkloadSpec
    device: Device
    strategy: strategy.Name = "guided"
    python: str = sys.executable
    steps: int = 3
    limit_bytes: int | None = None
    headroom: float = DEFAULT_HEADROOM
    ramp_step: int | None = None
    timeout_s: float = 300.0
    target_batch: int | None = None
    allocator: AllocatorSettings = field(default_factory=AllocatorSettings)
    change: str = ""

    @property
    def room(self) -> Room:
        """The memory there is to search in."""
        return Room(self.device.gpu, self.limit_bytes)

    @property
    def formula(self) -> Formula:
        """The closed form of what is searched."""
        workload = replace(self.workload, recipe=as_run_on(self.workload.recipe, self.device.gpu))
        return Formula(workload, self.room.total_bytes, self.headroom, beside_bytes=self.room.beside_bytes)

    @property
    def where(self) -> str:
        """The device and the cap on it, in words."""
        limit = f" limited to {format_bytes(self.limit_bytes)}" if self.limit_bytes is not None else ""
        return f"{'simulated ' if self.device.simulated else ''}{self.device.gpu.title}{limit}"
