"""All that probes publish at one moment, put where it belongs: on a GPU of this machine, or in host memory.

Imports little: the Monitor's first frame waits for this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from gpumem_tui.memory import Unknown, format_bytes
from gpumem_tui.monitor.probes import Growing, Probes, RanOutOfMemory
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.snapshot import NOT_LOOKED_UP_YET, GpuReading, HostProcess

if TYPE_CHECKING:
    from gpumem_tui.watch.expected import Expected
    from gpumem_tui.watch.growth import Growth
    from gpumem_tui.watch.postmortem import Case
    from gpumem_tui.watch.records import ProbedProcess, ProbeSample, RefusedFile

Key = tuple[int, int]
"""`ProbedProcess.key`."""

NOT_DERIVED_YET = Unknown("not derived yet")


@dataclass(frozen=True)
class Placed:
    """A sample and the device it is of. `gpu_uuid`: as NVML writes it, or why it is no GPU's."""

    sample: ProbeSample
    gpu_uuid: Reading[str]


@dataclass(frozen=True)
class WatchedProcess:
    """One process that publishes, or did, with what else is known of it.

    Attributes:
        placed: its newest sample of every device.
        host: the process as the operating system knows it.
        expected: what the formula expects of it, or why that cannot be told.
        case: its post-mortem; None unless memory ran out under it.
        history: every sample that is left of it; empty unless it was asked for.
        growth: of each device of which it takes more and more.
    """

    process: ProbedProcess
    placed: tuple[Placed, ...]
    host: Reading[HostProcess] = NOT_LOOKED_UP_YET
    expected: Reading[Expected] = NOT_DERIVED_YET
    case: Case | None = None
    history: tuple[ProbeSample, ...] = ()
    growth: tuple[Growth, ...] = ()

    @property
    def pid(self) -> int:
        """As we know it; of one that has ended, as it knew itself."""
        return self.process.known_pid

    @property
    def is_running(self) -> bool:
        """Whether it is alive."""
        return self.process.is_running

    @property
    def own(self) -> tuple[Placed, ...]:
        """Where it trains: on its GPUs, without the few bytes that optimizers keep in host memory, or there alone."""
        on_gpus = tuple(placed for placed in self.placed if placed.sample.is_on_gpu)
        return on_gpus or self.placed

    @property
    def ended_s(self) -> float | None:
        """When it ended, seconds since the epoch; None while it runs. Where memory ran out, when it did."""
        if self.case is not None:
            return self.case.post_mortem.wall_ns / 1e9
        return None if self.process.end is None else self.process.end.time_s


@dataclass(frozen=True)
class Published:
    """Every process that publishes on this machine, the running first.

    Attributes:
        figures: what their allocators say, for histories and alerts.
    """

    processes: tuple[WatchedProcess, ...] = ()
    refused: tuple[RefusedFile, ...] = ()
    figures: Probes = field(default_factory=dict)

    @cached_property
    def by_place(self) -> Mapping[tuple[str, int], tuple[WatchedProcess, ProbeSample]]:
        """The running ones by GPU uuid and pid."""
        return {
            (placed.gpu_uuid, watched.pid): (watched, placed.sample)
            for watched in self.processes
            if watched.is_running
            for placed in watched.placed
            if isinstance(placed.gpu_uuid, str)
        }

    @cached_property
    def by_key(self) -> Mapping[Key, WatchedProcess]:
        """All processes by a key that never changes."""
        return {watched.process.key: watched for watched in self.processes}

    @cached_property
    def out_of_memory(self) -> tuple[RanOutOfMemory, ...]:
        """Those that memory ran out under."""
        return tuple(_out_of_memory(watched) for watched in self.processes if watched.case is not None)

    @cached_property
    def growing(self) -> tuple[Growing, ...]:
        """Those whose memory rises."""
        return tuple(one for watched in self.processes for one in _growing(watched))


def _growing(watched: WatchedProcess) -> Iterator[Growing]:
    who, bracket, command = watched.process.title.partition(" (")
    uuids = {placed.sample.record.device: placed.gpu_uuid for placed in watched.placed}
    for growth in watched.growth:
        uuid = uuids.get(growth.device, "")
        left_s = math.inf if growth.left_s is None else growth.left_s
        yield Growing(uuid if isinstance(uuid, str) else "", f"{who}: {growth.phrase}{bracket}{command}", left_s)


class ProbeSource(Protocol):
    """Whatever tells what probes publish. Nothing in it waits."""

    @property
    def is_reading(self) -> bool:
        """Whether a reading that was asked for is still under way."""

    def ask(self, gpus: Sequence[GpuReading], followed: Key | None) -> None:
        """Read again. `followed`: the process whose history is wanted too."""

    def latest(self) -> Published:
        """What was read last; a new object only if something changed."""

    def subscribe(self, tell: Callable[[], None]) -> None:
        """Have this called after each reading, whether something changed or not, from another thread; it must not
        wait."""

    def stop(self) -> None:
        """End; returns at once."""


def _out_of_memory(watched: WatchedProcess) -> RanOutOfMemory:
    assert watched.case is not None
    from gpumem_tui.watch.postmortem import what_happened  # imported already, with what made the case

    found = watched.case.post_mortem
    asked = "" if found.requested_bytes is None else f" asking for {format_bytes(found.requested_bytes)}"
    where = f" at {found.source}" if found.source else ""
    who, bracket, command = watched.process.title.partition(" (")
    message = f"{who} {what_happened(watched.case)}{asked}{where}{bracket}{command}"
    return RanOutOfMemory(found.device_uuid, found.wall_ns / 1e9, message)
