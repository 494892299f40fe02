"""Makes a command fit that no single change does: changes together, and smaller passes for the same step.

The saving of each change in its own run shows which sets are likely; those are run, the cheapest first, until one fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

from gpumem_tui.formula.records import OPTIMIZER_RECORDS
from gpumem_tui.formula.techniques import (
    ADAPTERS,
    DEEPSPEED,
    MORE_RANKS,
    SHARDED,
    SHARDS,
    Price,
    Technique,
    is_advisable,
)
from gpumem_tui.memory import Breakdown, Bucket, Unknown
from gpumem_tui.plan.combination import Combination, worth_running
from gpumem_tui.plan.command import DIED, CommandPlan, Runs, Watch
from gpumem_tui.plan.dialects import launched, typed_command
from gpumem_tui.plan.replayed import assignment_of
from gpumem_tui.run.control import Control, has_room_for_two
from gpumem_tui.search.prediction import Traced
from gpumem_tui.simulator.allocator.replay import Replay
from gpumem_tui.step import Phase

MOST_RUNS = 5
"""So many sets are run at most: work, not seconds, so that a slow machine gives the same answer."""

MOST_WHERE_IT_FITS = 4
"""So many changes are run where the command fits as it is, or by what costs no more: those that mostly save most, of
optimizers the first."""

_MOST_CHANGES = 4
_MOST_SIZES = 2
"""Sizes of a pass that are tried with one set of changes."""

_HELD = (Bucket.PARAMETERS, Bucket.GRADIENTS, Bucket.OPTIMIZER)
_OF_ONE_SIZE = (Phase.BUILD, Phase.OPTIMIZER)
"""Buckets, and phases, that do not grow with the batch."""
OF_THE_HELD = {*OPTIMIZER_RECORDS, *ADAPTERS}
"""Changes that make that smaller: of them one at a time."""


@dataclass(frozen=True)
class _Seen:
    """A run's memory: at the highest moment of each phase, and the most of each bucket at any."""

    moments: Mapping[Phase, Breakdown]
    most: Mapping[Bucket, int]

    @classmethod
    def of(cls, replay: Replay) -> _Seen:
        phases = sorted(replay.phases, key=lambda one: one.peak_allocated_bytes)
        most = {bucket: peak.size_bytes for bucket, peak in replay.bucket_peaks.items()}
        return cls({one.phase: one.breakdown for one in phases}, most)

    def share(self, base: _Seen, phase: Phase, bucket: Bucket) -> float:
        """Return how much of a bucket stays of what there was before, 1 for more; of temporary bytes by phase."""
        before, after = base.most, self.most
        if bucket is Bucket.TEMPORARY and phase in base.moments and phase in self.moments:
            before, after = base.moments[phase].buckets, self.moments[phase].buckets
        return min(1.0, after.get(bucket, 0) / before[bucket]) if before.get(bucket) else 1.0


class _Estimates:
    """Estimates the memory of sets of changes, from each change alone and from the misses on earlier sets.

    Each change leaves a share of every bucket; of changes together the shares are multiplied, at each moment that was
    the highest of a phase without them or with one of them.

    Attributes:
        helping: the changes that make less of a phase which lacks room.
    """

    def __init__(self, plan: CommandPlan) -> None:
        base, self._whole = plan.there(plan.base), plan.batch_size
        self._context_bytes, self._base = base.ready.context_bytes, _Seen.of(base.at(self._whole))
        totals = {phase: held.total_bytes for phase, held in self._base.moments.items()}
        most = max(totals.values())
        used_bytes = plan.least_used_bytes(Combination((), self._whole, traced=plan.base))
        self._unused_bytes = used_bytes - self._context_bytes - most
        room_bytes = min(plan.gpu.cuda_total_bytes - self._context_bytes, most - 1)
        self._with: dict[Technique, _Seen] = {}
        for tried in plan.what_ifs:
            (change,) = tried.changes
            if isinstance(tried.traced, Traced) and change.key != MORE_RANKS:
                seen = _Seen.of(plan.there(tried.traced).at(self._whole))
                moments = seen.moments.items()
                if any(totals.get(phase, 0) > max(room_bytes, held.total_bytes) for phase, held in moments):
                    self._with[change] = seen
        self.helping = list(self._with)
        self._missed: list[tuple[set[Technique], int]] = []
        for one in plan.together:
            if isinstance(one.traced, Traced) and self._with.keys() >= set(one.changes):
                self._missed.append((set(one.changes), plan.least_used_bytes(one) - self.of(one)))

    def of(self, one: Combination) -> int:
        """Return the bytes of the device at the most."""
        size = one.batch_size / self._whole
        most = 0.0
        for seen in (self._base, *(self._with[change] for change in one.changes)):
            others = [self._with[change] for change in one.changes if self._with[change] is not seen]
            for phase, held in seen.moments.items():
                total = 0.0
                for bucket, size_bytes in held.buckets.items():
                    if bucket is Bucket.GRADIENTS and one.passes > 1:  # those of the passes before are there throughout
                        size_bytes = seen.most[bucket]
                    left = size_bytes * prod(other.share(self._base, phase, bucket) for other in others)
                    total += left if bucket in _HELD or phase in _OF_ONE_SIZE else left * size
                most = max(most, total)
        return self._context_bytes + int(most + self._unused_bytes * size)

    def corrected(self, one: Combination) -> int:
        """Return the estimate with the most that was missed of sets within this one."""
        return self.of(one) + max((0, *(missed for changes, missed in self._missed if changes <= set(one.changes))))


def likely(plan: CommandPlan) -> list[Combination]:
    """Return the sets that may fit by what each change saved alone, the cheapest first, then those of fewest passes.

    Where a set was run and took more, those that have all of its changes come last if they lack room by as much.
    """
    estimates, room_bytes = _Estimates(plan), plan.gpu.cuda_total_bytes
    found = [one for one in _sets(plan, estimates) if estimates.of(one) <= room_bytes]
    found.sort(key=lambda one: (estimates.corrected(one) > room_bytes, one.price, one.passes))
    kept: list[Combination] = []
    for one in found:  # of one set of changes the two largest passes
        if sum(other.changes == one.changes for other in kept) < _MOST_SIZES:
            kept.append(one)
    return kept


def least(plan: CommandPlan) -> list[Combination]:
    """Return the sets of two changes and more, first that which takes the least by what each change saved alone."""
    estimates = _Estimates(plan)
    found = [one for one in _sets(plan, estimates) if len(one.changes) > 1]
    return sorted(found, key=lambda one: (estimates.of(one), one.price))


def _sets(plan: CommandPlan, estimates: _Estimates) -> Iterator[Combination]:
    """Yield the sets of changes that go together, with each size of a pass."""
    whole = plan.batch_size
    for batch_size in _micro_batches(plan):
        for count in range(min(_MOST_CHANGES, len(estimates.helping)) + 1):
            for chosen in combinations(estimates.helping, count):
                sharing = max((change.gpus for change in chosen), default=1)
                gpus = max(1, sharing // plan.ranks)  # each has its part of the samples
                one = Combination.of_command(chosen, batch_size, passes=-(-whole // (batch_size * gpus)))
                alike = (sum(change.key in kind for change in one.changes) for kind in (OF_THE_HELD, SHARDS))
                same = gpus == 1 or not plan.says_batch or batch_size * gpus <= max(whole, gpus)
                if one.price != Price() and same and max(alike) <= 1 and is_advisable(chosen, estimates.helping):
                    yield one


def _micro_batches(plan: CommandPlan) -> list[int]:
    """Return the planned batch, and its halves where the command's line states the batch and so can say another."""
    command, size = plan.config.workload.command, plan.batch_size
    sizes = [size]
    if command is not None and command.says_batch:
        while sizes[-1] > 1:
            sizes.append(-(-sizes[-1] // 2))
    return sizes


# The runs of a plan, in their order


@dataclass(frozen=True)
class Planning:
    """The progress of a plan's runs.

    Attributes:
        running: what is being run; None: `ran` has just ended.
        waiting: changes whose runs have not begun. `to_go`: how many of them are run, as far as known.
        left_s: about how long the rest takes, by the runs so far.
    """

    plan: CommandPlan
    running: Combination | None
    ran: Combination | None
    waiting: tuple[Combination, ...]
    to_go: int
    left_s: float


class _Ahead:
    """Runs changes, of which the next one continues already next to what is run now, where each takes one trace."""

    def __init__(self, runs: Runs, plan: CommandPlan, control: Control, watch: Watch) -> None:
        self._pool = ThreadPoolExecutor(2) if plan.base.done.only_at and has_room_for_two() else None
        self._run: Callable[[Combination], Combination] = lambda one: runs.run(one, plan, control, watch)
        self.begun: dict[tuple[Technique, ...], Future[Combination]] = {}

    def begin(self, left: Sequence[Combination]) -> None:
        """Begin the first of the changes that are left, unless one has begun."""
        if self._pool is not None and left and not self.begun:
            self.begun[left[0].changes] = self._pool.submit(self._run, left[0])

    def ran(self, one: Combination, left: Sequence[Combination]) -> Combination:
        """Run a change to its end, and begin the next of those that are left; what dies besides that is run again."""
        begun = self.begun.pop(one.changes, None)
        self.begin(left)
        found = self._run(one) if begun is None else begun.result()
        died = begun is not None and isinstance(found.traced, Unknown) and found.traced.reason.startswith(DIED)
        return self._run(one) if died else found


@dataclass
class Planner:
    """Runs what may make a command fit: smaller passes alone, as nothing is cheaper, every change, then sets of them.

    A command that fits asks for no sets but cheaper ones, nor for further GPUs, nor for more than `MOST_WHERE_IT_FITS`
    changes that cost as much, unless they are asked for.

    Attributes:
        plan: with what was run by now.
        left: the changes to run, each alone.
        every: all of them are asked for.
        clock: seconds, from any moment.
    """

    plan: CommandPlan
    runs: Runs
    left: Sequence[Combination]
    control: Control
    watch: Watch = lambda _: None
    every: bool = False
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._unasked = [one for one in self.left if not self.every and _key(one) not in self.runs.wanted]
        further = {_key(one) for one in self._unasked if _key(one) == SHARDED and one.price.gpus} | DEEPSPEED.keys()
        self._further = [one for one in self._unasked if _key(one) in further]
        self.left = (*(one for one in self.left if one not in self._further), *self._further)
        self._run: list[str] = []
        self._ahead = _Ahead(self.runs, self.plan, self.control, self.watch)
        self._began_s, self._made = self.clock(), 0

    def run(self) -> Iterator[Planning]:
        """Run all that is to be run; yields before each run and after it.

        Raises:
            Cancelled: the user ended it; the value yielded last is the result.
        """
        yield from self._run_sets()
        while self.left:
            change, *others = self.left
            self.left = tuple(others)
            if change in self._further:
                yield from self._run_sets()
            if self._is_spared(change, self._run):
                spared = Unknown(f"skipped, {self._fitting_words}; --what-if {_key(change)} runs it")
                self._take(replace(change, traced=spared, is_spared=True))
                continue
            self._run.append(_key(change))
            yield from self._ran(change, lambda one: self._ahead.ran(one, self._to_run()))
        yield from self._run_sets()
        if self.plan.cost is None and not any(len(one.changes) > 1 for one in self.plan.tried):
            yield from self._run_sets(least, most=1)  # by the estimate it does not fit, which may be wrong
        yield self._now(None)

    def _run_sets(
        self, sets_of: Callable[[CommandPlan], list[Combination]] = likely, most: int = MOST_RUNS
    ) -> Iterator[Planning]:
        """Run what is likely to fit, the cheapest first, until nothing that is left would cost less than what does."""
        sets = worth_running(lambda: sets_of(self.plan), lambda: self.plan.tried, lambda: self.plan.cost, most)
        for one in sets:
            yield from self._ran(one, self._together)

    def _together(self, one: Combination) -> Combination:
        self._ahead.begin(self._to_run())
        return self.runs.run(one, self.plan, self.control, self.watch)

    def _ran(self, one: Combination, run: Callable[[Combination], Combination]) -> Iterator[Planning]:
        yield self._now(one)
        done = run(one)
        self._take(done)
        self._made += 1
        yield self._now(None, done)

    def _take(self, found: Combination) -> None:
        self.plan = replace(self.plan, tried=(*self.plan.tried, found))

    def _now(self, running: Combination | None, ran: Combination | None = None) -> Planning:
        each_s = (self.clock() - self._began_s) / self._made if self._made else self.plan.base.done.seconds
        to_go = len(self._to_run())
        left_s = each_s * (to_go + (running is not None))
        return Planning(self.plan, running, ran, tuple(self.left), to_go, left_s)

    def _to_run(self) -> list[Combination]:
        """Return the changes that will be run, as far as known; further GPUs are a matter of what comes before."""
        found: list[Combination] = []
        for one in self.left:
            if one not in self._further and not self._is_spared(one, [*self._run, *map(_key, found)]):
                found.append(one)
        return found

    @property
    def _fitting_words(self) -> str:
        """Say what fits already: the command as it is, or what costs no more than the change that is not run."""
        best = None if self.plan.fits_as_it_is else self.plan.fitting
        return "already fits" if best is None else f"{best.words} already fits at no higher cost"

    def _is_spared(self, one: Combination, run: Sequence[str]) -> bool:
        """Return whether a change need not be run after those that were: it costs as much as what fits."""
        cost = self.plan.cost
        if cost is None or one not in self._unasked or one.changes in self._ahead.begun:
            return False
        most = MOST_WHERE_IT_FITS if self.plan.config.workload.hugging_face is None else 0  # nobody trains it yet
        alike = _key(one) in OPTIMIZER_RECORDS and any(key in OPTIMIZER_RECORDS for key in run)
        return one in self._further or ((len(run) >= most or alike) and cost <= one.price)


def _key(alone: Combination) -> str:
    (change,) = alone.changes
    return change.key


def command_of(plan: CommandPlan, one: Combination) -> tuple[str, tuple[str, ...]]:
    """Return the command to copy, and what is to be written into the program besides."""
    typed = typed_command(plan.config, one.changes, one.passes)
    command = typed.command if typed.shards else launched(typed.command, max(one.gpus, plan.ranks))
    files, text = command.files_at(one.batch_size, one.passes), command.text_at(one.batch_size, one.passes)
    return files + assignment_of(one.changes) + text, typed.written
