"""The processes on the GPUs of hosts, and the ranks of a job among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.snapshot import GpuProcess, GpuReading, HostProcess
from gpumem_tui.remote.decode import HostReport

_PEAK = "peak_allocated_bytes"
_LARGEST = 2**63
"""What a probe counts is less."""


@dataclass(frozen=True)
class RemoteProcess:
    """A process on a GPU of a host.

    Attributes:
        probe: what the probe inside it says, as JSON; empty without one.
    """

    host_name: str
    gpu: GpuReading
    process: GpuProcess
    probe: Mapping[str, Any]

    @property
    def known(self) -> HostProcess | None:
        """The process as its operating system knows it."""
        return None if isinstance(self.process.host, Unknown) else self.process.host

    @property
    def place(self) -> str:
        """The GPU by its number, the MIG instance with it."""
        inside = next((each.index for each in self.gpu.instances if each.uuid == self.process.instance), None)
        return str(self.gpu.index) if inside is None else f"{self.gpu.index}:{inside}"

    @cached_property
    def key(self) -> str:
        """What names it among those of all hosts."""
        return "\t".join((self.host_name, self.gpu.uuid, self.process.instance, str(self.process.pid)))

    @cached_property
    def about(self) -> str:
        """What a filter looks through, in small letters."""
        about = f"{self.host_name} gpu{self.place} {self.process.pid}"
        known = self.known
        if known is not None:
            about += f" {known.user} {known.name} {known.command} {known.container}"
        return about.lower()

    def count(self, key: str) -> int | None:
        """A whole number of what its probe says, if it says so."""
        value = self.probe.get(key)
        return value if type(value) is int and abs(value) < _LARGEST else None


def processes_of(host_name: str, report: HostReport) -> tuple[RemoteProcess, ...]:
    """The processes of a host's reading, by GPU and pid."""
    found = [
        RemoteProcess(host_name, gpu, process, report.probes.get((gpu.uuid, process.pid), {}))
        for gpu in report.snapshot.gpus
        for process in (() if isinstance(gpu.processes, Unknown) else gpu.processes)
    ]
    return tuple(sorted(found, key=lambda each: (each.gpu.index, each.process.pid)))


def job_of(each: RemoteProcess) -> tuple[str, str, int]:
    """What the ranks of a job have in common on whatever host: user, the job's name or their command, how many.

    Where the launcher gives no name, two runs of one user with the same command and size at once count as one.
    """
    known, job = each.known, each.probe.get("job")
    user, command = ("", "") if known is None else (known.user, known.command)
    return user, job if isinstance(job, str) and job else command, each.count("world_size") or 0


@dataclass(frozen=True)
class JobRanks:
    """The ranks of one job, on whatever hosts, as their probes say.

    Attributes:
        ranks: a process each, by rank.
        world_size: how many there should be; 0 where no probe says so.
    """

    command: str
    world_size: int
    ranks: tuple[RemoteProcess, ...]

    @property
    def fullest(self) -> RemoteProcess | None:
        """The one with the highest peak of allocated bytes."""
        known = [each for each in self.ranks if each.count(_PEAK) is not None]
        return max(known, key=lambda each: each.count(_PEAK) or 0, default=None)

    @property
    def spread_bytes(self) -> int:
        """Between the highest and the lowest of these peaks."""
        peaks = [peak for each in self.ranks if (peak := each.count(_PEAK)) is not None]
        return max(peaks) - min(peaks) if peaks else 0

    @property
    def behind(self) -> tuple[RemoteProcess, int] | None:
        """The one that lags most, and by how many steps; None if none does by more than the one that is under way."""
        steps = [(step, each) for each in self.ranks if (step := each.count("step")) is not None]
        if not steps:
            return None
        least, last = min(steps, key=lambda pair: pair[0])
        lag = max(step for step, _ in steps) - least
        return (last, lag) if lag > 1 else None


def jobs(listed: Sequence[RemoteProcess]) -> dict[tuple[str, str, int], JobRanks]:
    """The jobs of several ranks among the listed processes."""
    found: dict[tuple[str, str, int], list[RemoteProcess]] = {}
    for each in listed:
        if each.count("rank") is not None and (each.count("world_size") or 0) > 1:
            found.setdefault(job_of(each), []).append(each)
    return {
        key: JobRanks(_command(ranks[0]), key[2], tuple(sorted(ranks, key=lambda each: each.count("rank") or 0)))
        for key, ranks in found.items()
    }


def _command(each: RemoteProcess) -> str:
    return "" if each.known is None else each.known.command
