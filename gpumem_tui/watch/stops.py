"""Processes of this machine whose steps have stopped: of a job the rank that stopped first, and where it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpumem_tui.memory import Unknown
from gpumem_tui.report.objects import SCHEMA
from gpumem_tui.watch.ranks import RankState, Stop, StoppedAt, stop_of
from gpumem_tui.watch.records import ProbedProcess


@dataclass(frozen=True)
class StoppedJob:
    """The processes of a job, or one that is of none, of which some have stopped."""

    processes: tuple[ProbedProcess, ...]
    stop: Stop

    @property
    def first(self) -> ProbedProcess:
        """Return the process that stopped first; where that cannot be told one that has stopped."""
        wanted = self.stop.first or self.stop.silent[0]
        return next(each for each in self.processes if _state(each) == wanted)

    @property
    def line(self) -> str:
        """Return it in one line."""
        who, bracket, command = self.first.title.partition(" (")
        who = who if self.stop.first is None else who.replace(f", rank {self.stop.first.rank}", "")
        return f"{who}: {self.stop.words}{bracket}{command}"

    @property
    def place(self) -> object:
        """Return what is another once something else has stopped, or is elsewhere."""
        first = self.stop.first
        return (first is None or (first.rank, first.at)), len(self.stop.silent), len(self.stop.waiting)

    def as_json(self) -> dict[str, object]:
        """Return it as a line of its own."""
        first = self.stop.first
        return {
            "event": "stopped",
            "schema": SCHEMA,
            "job": self.first.process.job,
            "world_size": self.first.process.world_size,
            "message": self.line,
            "first": None if first is None else self._rank_json(first),
            "stopped": [self._rank_json(each) for each in self.stop.silent],
        }

    def _rank_json(self, rank: RankState) -> dict[str, object]:
        process = next(each for each in self.processes if _state(each) == rank)
        return {
            "pid": process.known_pid,
            "rank": rank.rank,
            "step": rank.step,
            "silent_s": rank.silent_s,
            "stopped_at": stopped_at_json(process),
        }


def stopped_jobs(processes: Iterable[ProbedProcess]) -> list[StoppedJob]:
    """Return the jobs of which ranks have stopped, and the other processes that have."""
    together: dict[object, list[ProbedProcess]] = {}
    for each in processes:
        if each.is_running:
            together.setdefault(_job(each), []).append(each)
    found = [(several, stop_of(map(_state, several))) for several in together.values()]
    return [StoppedJob(tuple(several), stop) for several, stop in found if stop is not None]


def stopped_at_json(process: ProbedProcess) -> dict[str, object] | None:
    """Return where a process is that has stopped, with its stack; None where its probe does not say."""
    at, stall = stopped_at(process), process.stall
    return None if at is None or stall is None else {**at.as_json(), "stack": list(stall.stack)}


def stopped_at(process: ProbedProcess) -> StoppedAt | None:
    """Return where a process is that has stopped; None where its probe does not say."""
    return None if process.stall is None else StoppedAt.of_stall(process.stall)


def _job(process: ProbedProcess) -> object:
    """Return what the ranks of a job have in common; of a process that is of none its own name."""
    who = process.process
    if who.rank is None or (who.world_size or 1) < 2:
        return process.key
    return process.uid, who.job or who.command, who.world_size


def _state(process: ProbedProcess) -> RankState:
    silent_s = 0.0 if isinstance(process.heard_s, Unknown) else process.heard_s
    rank = process.process.rank if (process.process.world_size or 1) > 1 else None
    return RankState(rank, process.step, silent_s, process.is_silent, stopped_at(process))
