"""All that probes publish at one moment, put where it belongs: on a GPU of this machine, in host memory, in a job.

Imports little: the Monitor's first frame waits for this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from gpumem_tui.memory import Unknown, Value, format_bytes
from gpumem_tui.monitor.probes import Growing, Probes, RanOutOfMemory, Stopped
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


class Placed(Struct, frozen=True):
    """A sample and the device it is of. `gpu_uuid`: as NVML writes it, or why it is no GPU's."""

    sample: ProbeSample
    gpu_uuid: Reading[str]


class WatchedProcess(Struct, frozen=True):
    """A process that publishes, or did, with further facts about it.

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
        """The pid as we know it; of a process that has ended, as it knew itself."""
        return self.process.known_pid

    @property
    def is_running(self) -> bool:
        """Return whether the process is alive."""
        return self.process.is_running

    @property
    def own(self) -> tuple[Placed, ...]:
        """The devices that it trains on: its GPUs without what optimizers keep in host memory, or the host."""
        on_gpus = tuple(placed for placed in self.placed if placed.sample.is_on_gpu)
        return on_gpus or self.placed

    @property
    def ended_s(self) -> float | None:
        """When it ended, seconds since the epoch; None while it runs. Where memory ran out, when it did."""
        if self.case is not None:
            return self.case.post_mortem.wall_ns / 1e9
        return None if self.process.end is None else self.process.end.time_s


class Published(Struct, frozen=True, dict=True):
    """Every process that publishes on this machine, the running first.

    Attributes:
        figures: what their allocators say, for histories and alerts.
        problem: one line on why the last reading failed; empty if it did not.
    """

    processes: tuple[WatchedProcess, ...] = ()
    refused: tuple[RefusedFile, ...] = ()
    figures: Probes = {}
    problem: str = ""

    @cached_property
    def by_place(self) -> Mapping[tuple[str, int], tuple[WatchedProcess, ProbeSample]]:
        """The running processes by GPU uuid and pid."""
        return {
            (placed.gpu_uuid, watched.pid): (watched, placed.sample)
            for watched in self.processes
            if watched.is_running
            for placed in watched.placed
            if isinstance(placed.gpu_uuid, str)
        }

    @cached_property
    def by_key(self) -> Mapping[Key, WatchedProcess]:
        """The processes by their key, which is never used twice."""
        return {watched.process.key: watched for watched in self.processes}

    @cached_property
    def out_of_memory(self) -> tuple[RanOutOfMemory, ...]:
        """The processes that ran out of memory."""
        return tuple(_out_of_memory(watched) for watched in self.processes if watched.case is not None)

    @cached_property
    def growing(self) -> tuple[Growing, ...]:
        """The processes whose memory rises."""
        return tuple(one for watched in self.processes for one in _growing(watched))

    @cached_property
    def stopped(self) -> tuple[Stopped, ...]:
        """The jobs in which ranks wait for one that has stopped."""
        return tuple(_stopped(self.processes)) if any(each.process.is_silent for each in self.processes) else ()


def _stopped(processes: Sequence[WatchedProcess]) -> Iterator[Stopped]:
    from gpumem_tui.watch.stops import stopped_jobs  # not before the first frame

    places = {watched.process.key: watched.own for watched in processes}
    for job in stopped_jobs(watched.process for watched in processes):
        uuids = [placed.gpu_uuid for placed in places[job.first.key]]
        if job.stop.waiting:
            yield Stopped(uuids[0] if uuids and isinstance(uuids[0], str) else "", job.line, job.stop.since_s)


def _growing(watched: WatchedProcess) -> Iterator[Growing]:
    who, bracket, command = watched.process.title.partition(" (")
    uuids = {placed.sample.record.device: placed.gpu_uuid for placed in watched.placed}
    for growth in watched.growth:
        uuid = uuids.get(growth.device, "")
        left_s = math.inf if growth.left_s is None else growth.left_s
        yield Growing(uuid if isinstance(uuid, str) else "", f"{who}: {growth.phrase}{bracket}{command}", left_s)


class ProbeSource(Protocol):
    """A source of what probes publish. Nothing in it waits."""

    @property
    def is_reading(self) -> bool:
        """Return whether a reading that was asked for is still under way."""

    def ask(self, gpus: Sequence[GpuReading], followed: Key | None) -> None:
        """Read again. `followed`: the process whose history is wanted too."""

    def latest(self) -> Published:
        """Return what was read last; a new object only if something changed."""

    def subscribe(self, tell: Callable[[], None]) -> None:
        """Have this called after each reading, changed or not, from another thread; it must not wait."""

    def stop(self) -> None:
        """End; returns at once."""


def _out_of_memory(watched: WatchedProcess) -> RanOutOfMemory:
    assert watched.case is not None
    found = watched.case.post_mortem
    asked = "" if found.requested_bytes is None else f" asking for {format_bytes(found.requested_bytes)}"
    where = f" at {found.source}" if found.source else ""
    who, bracket, command = watched.process.title.partition(" (")
    grew_bytes = watched.case.grew.bytes
    grew = f", as memory grew {format_bytes(grew_bytes)} a step" if grew_bytes else ""
    message = f"{who} {watched.case.what_happened}{asked}{where}{grew}{bracket}{command}"
    return RanOutOfMemory(found.device_uuid, found.wall_ns / 1e9, message)


# Jobs


class Rank(Struct, frozen=True):
    """A rank and the device that it trains on; `placed` is None before its first step."""

    watched: WatchedProcess
    placed: Placed | None

    @property
    def number(self) -> int:
        """The number of the rank in its job."""
        return self.watched.process.process.rank or 0


class Job(Struct, frozen=True):
    """The ranks of one job that publish here, by number. `world_size`: how many the whole job has."""

    world_size: int
    ranks: tuple[Rank, ...]

    @property
    def absent(self) -> int:
        """Ranks that do not publish here: on other machines, or not yet."""
        return self.world_size - len({rank.number for rank in self.ranks})

    @property
    def worst(self) -> Rank | None:
        """The rank that is nearest to its end: the highest peak, or where there is no allocator the most bytes."""
        found = self.sizes(lambda sample: sample.peak_allocated_bytes) or self.sizes(total_bytes)
        return max(found, key=lambda pair: pair[0])[1] if found else None

    def sizes(self, figure: Callable[[ProbeSample], Value]) -> list[tuple[int, Rank]]:
        """Return a figure of the ranks that have it, in bytes, each with its rank."""
        sizes: list[tuple[int, Rank]] = []
        for rank in self.ranks:
            value = figure(rank.placed.sample) if rank.placed is not None else Unknown("no step has finished yet")
            if isinstance(value, int):
                sizes.append((value, rank))
        return sizes


def total_bytes(sample: ProbeSample) -> Value:
    """Return what is allocated; without an allocator all bytes that were found."""
    if isinstance(sample.allocated_bytes, int):
        return sample.allocated_bytes
    found = [value for value in sample.buckets.values() if isinstance(value, int)]
    return sum(found) if found else sample.allocated_bytes


def job_of(published: Published, watched: WatchedProcess) -> Job | None:
    """Find the job that a process is a rank of; None if it is of none.

    The ranks of a job have one world size and one launcher. A launcher that is gone, or cannot be seen, is recognized
    by the command line that its ranks share.
    """
    world_size = watched.process.process.world_size
    if world_size is None or world_size < 2 or watched.process.process.rank is None:
        return None
    alike = [other for other in published.processes if other.is_running and _launch(other) == _launch(watched)]
    ranks = [rank for other in alike for rank in _ranks(other)]
    return Job(world_size, tuple(sorted(ranks, key=lambda rank: rank.number)))


def _launch(watched: WatchedProcess) -> tuple[int | None, int | tuple[str, ...]]:
    who = watched.process.process
    host = watched.host
    return who.world_size, who.command if isinstance(host, Unknown) else host.parent_pid


def _ranks(watched: WatchedProcess) -> Sequence[Rank]:
    return [Rank(watched, placed) for placed in watched.own] or [Rank(watched, None)]
