"""The proof by a search's trials: the largest batch that ran, the first that did not, and the words for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from gpumem_tui.causes import causes_in
from gpumem_tui.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_NOT_BY_MEMORY, EXIT_NOTHING_FITS
from gpumem_tui.formula.predict import usable_bytes
from gpumem_tui.memory import Unknown, format_bytes
from gpumem_tui.report.objects import JsonObject
from gpumem_tui.run.events import RanOut, TrialDone
from gpumem_tui.search import strategy
from gpumem_tui.search.config import Room
from gpumem_tui.search.fragmentation import AllocatorRemedy
from gpumem_tui.search.prediction import BatchSizes, Traced
from gpumem_tui.search.strategy import MAX_BATCH_SIZE
from gpumem_tui.search.words import samples_words, sizes_words, tried_words
from gpumem_tui.workload.command import BATCH

Conclusion = Literal["found", "nothing_fits", "failed", "cancelled"]
_EXIT_CODES: dict[Conclusion, int] = {
    "found": 0,
    "nothing_fits": EXIT_NOTHING_FITS,
    "failed": EXIT_FAILED,
    "cancelled": EXIT_INTERRUPTED,
}


_EVERY = strategy.Sizes()


@dataclass(frozen=True)
class Known:
    """The facts that a verdict goes by besides its trials.

    Attributes:
        traced: the trace, or why it is missing; None on a real GPU, where a size that ran is safe.
        safe_bytes: reserved bytes that the device gives for certain; a trial's say whether it is safe without a trace.
        rests_on: what the verdict rests on, a phrase each.
        samples: the largest batch that the data has; 0 where that is not known.
        seems: that is so by memory alone, which grows no further, though by the trace it should.
    """

    traced: Traced | Unknown | None = None
    safe_bytes: int = 0
    rests_on: tuple[str, ...] = ()
    samples: int = 0
    seems: bool = False

    def reach(self, results: Sequence[TrialDone], ran: int, taken: strategy.Sizes) -> BatchSizes:
        """Return the safe size, the largest that ran, and the most that may fit."""
        if self.traced is None:
            return BatchSizes(ran, ran, ran)
        if isinstance(self.traced, Unknown) or isinstance(found := self.traced.sizes, Unknown):
            fit = (r for r in results if r.outcome == "fit" and r.peak_reserved_bytes <= self.safe_bytes)
            return BatchSizes(max((r.batch_size for r in fit), default=0), ran, ran)
        return BatchSizes(taken.at_most(min(found.safe, ran)), ran, max(ran, taken.at_most(found.at_most)))


KNOWN_BY_RUNNING = Known()


class WithHeadroom(JsonObject, frozen=True):
    """The largest batch that leaves a share of the memory free at its peak, as it is printed, too.

    Attributes:
        share: the headroom. `batch_size`: 0 if not even one sample leaves that.
        free_bytes: what the batch leaves, of the device or of a user's cap.
        known_by: ``trial``: it ran so; ``trace``: the trace predicts it.
    """

    share: float = msgspec.field(name="headroom")
    batch_size: int = msgspec.field(name="max_batch_size")
    free_bytes: int
    known_by: Literal["trial", "trace"]


@dataclass(frozen=True)
class Verdict:
    """The end of a search.

    Attributes:
        max_batch_size: the largest size that ran; 0 if none did.
        safe_batch_size: the largest that fits with every unknown at its most, which is not larger; 0 if none does.
        at_most_batch_size: the largest that fits with every unknown at its least, as far as known.
        first_failing: the smallest size beyond it that did not run; None if none was found.
        verified: `max_batch_size` ran in memory that does not grow, and the very next size was out of memory.
        message: one line.
        with_headroom: the largest size that leaves the headroom free, too; None if that is not wanted or not known.
        remedy: the option of the allocator by which the safe size grows; None where none does.
        samples: the data has no more, so that no larger batch was run; 0 where that is not so, or not known.
        by_memory: the search ended by memory, not as there is no more data, or as the next batch fails otherwise.
    """

    outcome: Conclusion
    max_batch_size: int
    first_failing: int | None
    verified: bool
    trials: int
    ooms: int
    message: str
    safe_batch_size: int = 0
    at_most_batch_size: int = 0
    with_headroom: WithHeadroom | None = None
    remedy: AllocatorRemedy | None = None
    samples: int = 0
    by_memory: bool = True

    @property
    def exit_code(self) -> int:
        """Return the process exit code the command line promises; it goes by the safe size."""
        if self.outcome == "found" and not self.safe_batch_size:
            return EXIT_NOTHING_FITS
        return _EXIT_CODES[self.outcome] if self.by_memory else EXIT_NOT_BY_MEMORY


def concluded(
    results: Sequence[TrialDone],
    where: str,
    grows: bool | None,
    *,
    given: strategy.Sizes = _EVERY,
    known: Known = KNOWN_BY_RUNNING,
) -> Verdict:
    """Return the verdict of a search that came to its end.

    Args:
        results: of at least one trial, in order.
        where: the device and the cap on it, in words.
        grows: whether memory depends on the batch size, as far as the trace tells; None without one.
        given: the sizes that were to be tried.
        known: what we know about the device besides the trials.
    """
    last = results[-1]
    if always_raises(results):
        return failed(results, f"the step fails at batch size {last.batch_size}: {last.detail}")
    samples = known.samples
    every, results = results, within(results, samples)
    fit, failing = _bracket(results, given)
    taken = sizes(results, given)
    reach = known.reach(results, fit, taken)

    def found(said: str, *, verified: bool, failing: int | None = None) -> Verdict:
        safe = f"safe batch {reach.safe:,}" if reach.safe else "no batch is safe"
        rests = [phrase for phrase in known.rests_on if phrase not in said]
        message = "; ".join((*([f"{safe} on {where}"] if reach.safe < fit else []), said, *rests))
        return _with_reach(_finish("found", every, fit, failing, message, verified=verified), reach)

    if samples and fit and failing is None and taken.after(fit) > samples:
        why = samples_words(samples, known.traced)
        if known.seems:
            why = f"batches above {samples:,} take no more memory, as if the data had no more samples"
        held = format_bytes(next(r.device_used_bytes for r in results if r.batch_size == fit and r.outcome == "fit"))
        ended = f"{_by_trace(known)}{why}; batch {fit:,} ran with {held} of the device used"
        return replace(found(ended, verified=False), samples=0 if known.seems else samples, by_memory=False)
    is_last = taken.after(fit) > MAX_BATCH_SIZE
    if is_last and grows:
        return found(f"at least batch {fit:,} fits; larger batches are not tried", verified=False)
    if is_last or (fit and grows is False):
        return failed(results, f"memory does not grow with the batch: batch {fit:,} fits; is batch_size used?")
    failure = next((r for r in reversed(results) if r.batch_size == failing), None)
    if failure is not None and failure.outcome == "error":
        said = f"batch {failing} failed for another reason than memory: {failure.detail}"
        if fit:
            said = f"{_by_trace(known)}batch {fit:,} ran; {said}"
            return replace(found(said, verified=False, failing=failing), by_memory=False)
        return _finish("failed", results, fit, failing, said, verified=False)
    if fit == 0:
        one = next((r.detail for r in results if r.batch_size == 1 and _raised(r)), "")
        said = f"nothing fits: {'two samples are' if one else 'one sample is'} out of memory on {where}"
        if one:
            said += f", and one fails: {one}"
        return _finish("nothing_fits", results, 0, failing, said, verified=False)
    largest = next(r for r in reversed(results) if r.batch_size == fit)
    held = format_bytes(largest.device_used_bytes)
    ran = f"batch {fit:,} ran" if reach.safe < fit else f"safe batch {fit:,} on {where}: it ran"
    said = f"{ran} with {held} of the device used, {failing:,} was out of memory"
    if largest.is_estimate:
        said = f"batch {fit:,} may fit on {where}, an estimate: it took {held} of the device"
        said += f", {failing:,} was out of memory"
    if reach.at_most > fit:
        said += f", up to {reach.at_most:,} may fit where unknown sizes are at their least"
    if taken.words:
        why = next((f": {r.batch_size} fails with {r.detail}" for r in results if taken != given and _raised(r)), "")
        said += f"; tried {taken.words} only{why}"
    leaks = causes_in(largest.notes, "leak")
    said += f"; {leaks[0]}" if leaks else ""
    return found(said, verified=not leaks, failing=failing)


def _by_trace(known: Known) -> str:
    """Say which batches memory would allow, to stand before what else ends a search; empty where that is not known."""
    traced = known.traced
    largest = sizes_words(traced.sizes, is_estimate=traced.done.is_estimate) if isinstance(traced, Traced) else ""
    return f"by trace {largest}; " if largest else ""


def settled(results: Sequence[TrialDone], where: str, ran_out: RanOut) -> Verdict:
    """Return the verdict of a command that looks for its batch itself, as it ran with the one that it settles at."""
    size, found = results[-1].batch_size, tried_words(ran_out, "fits")
    said = f"the command looks for its batch itself: on {where} it {found}; {BATCH} is only where it begins"
    return _with_reach(_finish("found", results, size, None, said, verified=False), BatchSizes(size, size, size))


def failed(results: Sequence[TrialDone], message: str) -> Verdict:
    """Return the verdict of a search that could not continue."""
    fit, failing = _bracket(results)
    return _finish("failed", results, fit, failing, message, verified=False)


def cancelled(results: Sequence[TrialDone], known: Known = KNOWN_BY_RUNNING) -> Verdict:
    """Return the verdict of a search that the user ended."""
    fit, failing = _bracket(results)
    reach = known.reach(results, fit, sizes(results))
    message = f"cancelled; the largest batch that ran is {fit}" if fit else "cancelled before any batch ran"
    if 0 < reach.safe < fit:
        message += f", and {reach.safe} is safe"
    return _with_reach(_finish("cancelled", results, fit, failing, message, verified=False), reach)


def _finish(
    outcome: Conclusion,
    results: Sequence[TrialDone],
    fit: int,
    failing: int | None,
    message: str,
    *,
    verified: bool,
) -> Verdict:
    return Verdict(
        outcome=outcome,
        max_batch_size=fit,
        first_failing=failing,
        verified=verified,
        trials=len(results),
        ooms=sum(result.outcome == "oom" for result in results),
        message=message,
    )


def _with_reach(found: Verdict, reach: BatchSizes) -> Verdict:
    return replace(found, safe_batch_size=reach.safe, at_most_batch_size=reach.at_most)


# Reading the trials


def sizes(results: Sequence[TrialDone], given: strategy.Sizes = _EVERY) -> strategy.Sizes:
    """Return which of the given sizes are left to try, where the step raised at some."""
    return given.without([r.batch_size for r in results if _raised(r) and r.batch_size > 1])


def within(results: Sequence[TrialDone], samples: int) -> Sequence[TrialDone]:
    """Return the trials of batches that the data has: larger ones ran with fewer samples. 0 where that is not known."""
    return [result for result in results if result.batch_size <= samples] if samples else results


def tried(results: Sequence[TrialDone], given: strategy.Sizes = _EVERY) -> list[strategy.Tried]:
    """Return the trials by size, of which the last counts: a retry overrules the death it follows.

    Sizes that the step refuses, while it may run at others of `given`, are left out.
    """
    taken = sizes(results, given)
    by_size = {r.batch_size: r for r in results
               if r.batch_size >= floor(results) and taken.at_most(r.batch_size) == r.batch_size}  # fmt: skip
    return [
        strategy.Tried(
            r.batch_size, r.outcome == "fit", r.peak_reserved_bytes, r.peak_allocated_bytes, raised=_raised(r)
        )
        for r in by_size.values()
    ]


def floor(results: Sequence[TrialDone]) -> int:
    """Return 2 if the step raises for one sample, which is no matter of memory; else 1."""
    return 2 if any(result.batch_size == 1 and _raised(result) for result in results) else 1


def _bracket(results: Sequence[TrialDone], given: strategy.Sizes = _EVERY) -> tuple[int, int | None]:
    """Return the largest size that ran, 0 for none, and the smallest beyond it that did not, None for none."""
    fit, failing = strategy.bracket(tried(results, given), floor(results))
    return (fit if any(result.outcome == "fit" for result in results) else 0), failing


def _raised(result: TrialDone) -> bool:
    """Return whether the step itself failed, not the process it ran in."""
    return result.outcome == "error" and result.buckets is not None


def always_raises(results: Sequence[TrialDone], traced_at: int = 0) -> bool:
    """Return whether the step itself raises at two sizes and runs at none, which is no matter of size.

    Args:
        traced_at: it ran there as it was traced, so that larger sizes may be too large; 0 where it did nowhere.
    """
    raising = {result.batch_size for result in results if _raised(result)}
    may_be_too_large = traced_at and min(raising, default=0) > traced_at
    return len(raising) > 1 and not may_be_too_large and all(result.outcome != "fit" for result in results)


# The largest batch that leaves the headroom free, too: the largest that runs may leave next to nothing


def with_headroom(
    room: Room,
    share: float,
    traced: Traced | Unknown,
    results: Iterable[TrialDone],
    largest: int,
    taken: strategy.Sizes = _EVERY,
) -> WithHeadroom | None:
    """Find the largest of `taken` up to `largest`, which ran, that leaves `share` free; None if none wanted or known.

    By trial, if the largest itself leaves it; else by trace, as `predict` and `plan` do: the largest that fits in the
    rest, where the allocator gives its cache back; else by the trials.
    """
    wanted_bytes = room.total_bytes - usable_bytes(room.total_bytes, share)
    if not share or not largest:
        return None
    ran = {r.batch_size: room.free_bytes(r.peak_reserved_bytes, r.device_used_bytes)
           for r in results if r.outcome == "fit"}  # fmt: skip
    enough = [size for size, free_bytes in ran.items() if free_bytes >= wanted_bytes]
    if largest not in enough and isinstance(traced, Traced):
        roomy = traced.max_batch_size_leaving(wanted_bytes)
        if isinstance(roomy, int):
            size = taken.at_most(min(roomy, largest))
            return WithHeadroom(share, size, _left_bytes(room, traced, size, wanted_bytes) if size else 0, "trace")
    if not enough:
        return None
    return WithHeadroom(share, max(enough), ran[max(enough)], "trial")


def _left_bytes(room: Room, traced: Traced, size: int, wanted_bytes: int) -> int:
    """Return what a batch leaves that fits in the rest: no less than is wanted, as cache is given back for that."""
    used = traced.at(size).peak_reserved_bytes, traced.device_used_bytes(size)
    return max(wanted_bytes, room.free_bytes(*used))
