"""The ranks of a distributed job on this machine, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumem_tui.memory import Unknown, Value
from gpumem_tui.watch.published import Placed, Published, WatchedProcess

if TYPE_CHECKING:
    from gpumem_tui.watch.records import ProbeSample


@dataclass(frozen=True)
class Rank:
    """One rank and the device that it trains on; `placed` is None before its first step."""

    watched: WatchedProcess
    placed: Placed | None

    @property
    def number(self) -> int:
        """Its place in the job."""
        return self.watched.process.process.rank or 0


@dataclass(frozen=True)
class Spread:
    """How far a figure differs between ranks: the least, the most, and which has most."""

    least_bytes: int
    most_bytes: int
    worst: Rank


@dataclass(frozen=True)
class Job:
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
        found = self.spread(lambda sample: sample.peak_allocated_bytes) or self.spread(total_bytes)
        return None if found is None else found.worst

    def spread(self, figure: Callable[[ProbeSample], Value]) -> Spread | None:
        """The spread of a figure over the ranks that have it; None if none has."""
        sizes: list[tuple[int, Rank]] = []
        for rank in self.ranks:
            value = figure(rank.placed.sample) if rank.placed is not None else Unknown("no step has finished yet")
            if isinstance(value, int):
                sizes.append((value, rank))
        if not sizes:
            return None
        most_bytes, worst = max(sizes, key=lambda pair: pair[0])
        return Spread(min(size for size, _ in sizes), most_bytes, worst)


def total_bytes(sample: ProbeSample) -> Value:
    """What is allocated; without an allocator all bytes that were found."""
    if isinstance(sample.allocated_bytes, int):
        return sample.allocated_bytes
    found = [value for value in sample.buckets.values() if isinstance(value, int)]
    return sum(found) if found else sample.allocated_bytes


def job_of(published: Published, watched: WatchedProcess) -> Job | None:
    """The job that a process is a rank of; None if it is of none.

    The ranks of a job have one world size and one launcher. A launcher that is gone, or cannot be seen, is told by the
    command line that its ranks share.
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
