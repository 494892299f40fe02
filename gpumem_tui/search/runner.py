"""The search: predict, then run trials in child processes until a size ran and the next one did not fit.

`search` is a generator of events; the screen, the plain log and the JSON lines are three readers of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

from gpumem_tui.memory import Unknown
from gpumem_tui.run.children import ChildDied
from gpumem_tui.run.control import Cancelled, Control, SideBySide, Unusable
from gpumem_tui.run.events import Failed, Output, Sample, TrialDone, TrialRequest
from gpumem_tui.search import strategy, verdict
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.fragmentation import larger_batch
from gpumem_tui.search.predicting import Predicted, WhileTracing, near_guess, predicting
from gpumem_tui.search.prediction import Traced
from gpumem_tui.search.verdict import Verdict, with_headroom
from gpumem_tui.search.words import rests_on


@dataclass(frozen=True)
class TrialProgress:
    """Trial `number` (from 1) runs. `sample`: of the phase that begins; None as the trial does."""

    number: int
    batch_size: int
    sample: Sample | None = None


@dataclass(frozen=True)
class TrialFinished:
    """The outcome of trial `number`."""

    number: int
    result: TrialDone


SearchEvent = Predicted | WhileTracing | TrialProgress | TrialFinished | Verdict
"""The events of a search. The last one is its verdict."""


def search(
    config: SearchConfig, control: Control | None = None, predicted: Predicted | None = None
) -> Iterator[SearchEvent]:
    """Find the largest batch size that runs; the last event is always its verdict.

    Args:
        predicted: by an earlier trace; None to trace it now.

    Raises:
        Unusable: the search cannot start, or the device refuses.
    """
    control = control or Control()
    with closing(SideBySide(config.terms, control)) as runner:
        yield from _searching(config, control, runner, predicted)


def _searching(
    config: SearchConfig, control: Control, runner: SideBySide, traced_before: Predicted | None
) -> Iterator[SearchEvent]:
    results: list[TrialDone] = []
    known = verdict.Known(Unknown("not traced so far"))
    try:
        for event in predicting(config, control) if traced_before is None else (traced_before,):
            yield event
            if isinstance(event, Predicted):
                predicted = event
        known = _known(config, predicted)
        if (own := predicted.settled) is not None and own.settled:
            yield from run_trial(own.settled, None, config, runner, results)
            if results[-1].outcome == "fit":
                yield verdict.settled(results, config.where, own)
                return
        near = yield from near_guess(config, runner, predicted)
        settings = _strategy_settings(config, predicted, near)
        traced = predicted.prediction.traced
        grows = traced.grows if isinstance(traced, Traced) else None
        samples, given = predicted.samples, settings.sizes
        while (size := strategy.next_size(verdict.tried(results, given), settings)) is not None:
            full = strategy.Tried(size, fits=True, peak_bytes=settings.capacity_bytes)
            if_it_fits = [*verdict.tried(results, given), full]
            yield from run_trial(size, strategy.next_size(if_it_fits, settings), config, runner, results)
            settings = replace(settings, floor=verdict.floor(results), sizes=verdict.sizes(results, given))
            may_run = settings.sizes != given  # it ran when it was traced
            if (verdict.always_raises(results, settings.traced_at) and not may_run) or (
                grows is False and results[-1].outcome == "fit"
            ):
                break
            if not samples and (samples := _samples(traced, results)):
                yield from run_trial(samples, None, config, runner, results)
                break
        known = replace(known, samples=samples, seems=samples != predicted.samples)
        concluded = verdict.concluded(results, config.where, grows, given=given, known=known)
        if concluded.outcome == "found":
            largest = concluded.max_batch_size
            ran = verdict.within(results, samples)
            roomy = with_headroom(config.room, config.headroom, traced, ran, largest, settings.sizes)
            concluded = replace(concluded, with_headroom=roomy)
        if concluded.outcome in ("found", "nothing_fits") and concluded.by_memory:
            concluded = replace(concluded, remedy=larger_batch(traced, settings.sizes))
        yield concluded
    except Cancelled:
        yield verdict.cancelled(results, known)
    except Unusable as failure:
        if not results:
            raise
        yield verdict.failed(results, str(failure))
    except ChildDied as death:
        yield verdict.failed(results, f"tracing failed: {death}")


def _known(config: SearchConfig, predicted: Predicted) -> verdict.Known:
    """Return the facts besides the trials: on a real GPU these have proved what runs."""
    traced, ready = predicted.prediction.traced, predicted.ready
    rests = rests_on(traced, config.workload.network)
    if not config.device.simulated:
        return verdict.Known(rests_on=rests)
    context_bytes = ready.context_bytes if ready.context_range is None else ready.context_range.high_bytes
    capacity_bytes = config.device.gpu.cuda_total_range.low_bytes - context_bytes
    return verdict.Known(traced, min(capacity_bytes, config.limit_bytes or capacity_bytes), rests)


def run_trial(
    size: int, following: int | None, config: SearchConfig, runner: SideBySide, results: list[TrialDone]
) -> Iterator[Output | TrialProgress | TrialFinished]:
    """Try one size in a fresh process, and again if the process died rather than failed.

    Args:
        following: the size to try next if this one fits, which may begin already.
        results: of the trials so far; this one's is added.

    Raises:
        Unusable: the device refuses.
    """
    device = config.device
    request = TrialRequest(
        workload=config.workload,
        gpu=device.gpu,
        simulated=device.simulated,
        batch_size=size,
        steps=config.steps,
        limit_bytes=config.limit_bytes,
        others_bytes=device.others_bytes,
        gpu_uuids=config.terms.gpu_uuids,
    )
    then = None if following is None else replace(request, batch_size=following)
    for attempt in (1, 2):
        number = len(results) + 1
        yield TrialProgress(number, size)
        result: TrialDone | None = None
        died = "the trial ended without a result"
        try:
            for event in runner.converse(request, then):
                if isinstance(event, Sample):
                    yield TrialProgress(number, size, event)
                elif isinstance(event, Output):
                    if config.workload.command is not None:
                        yield event
                elif isinstance(event, TrialDone):
                    result = event
                elif isinstance(event, Failed) and event.kind == "workload":
                    result = _without_figures(size, event.detail, {}, runner.seconds)
                elif isinstance(event, Failed):
                    raise Unusable(event)
        except ChildDied as death:
            died = str(death)
        finished = result or _without_figures(size, died, None, runner.seconds)
        results.append(finished)
        yield TrialFinished(number, finished)
        if result is not None or attempt == 2:
            return


def _without_figures(size: int, detail: str, buckets: dict[str, int] | None, seconds: float) -> TrialDone:
    """Return a trial that ended with nothing measured; `buckets`: None where its process died."""
    return TrialDone(
        batch_size=size,
        outcome="error",
        peak_allocated_bytes=0,
        peak_reserved_bytes=0,
        device_used_bytes=0,
        buckets=buckets,
        buckets_unknown="the trial process died" if buckets is None else "",
        seconds=seconds,
        steps=0,
        detail=detail,
    )


def _samples(traced: Traced | Unknown, results: list[TrialDone]) -> int:
    """Return from which batch on none takes more, though by the trace each would; 0 where that is not so.

    Larger batches are asked for and not made then, as of data that is smaller than the batch.
    """
    sizes = strategy.level(verdict.tried(results))
    if sizes is None or sizes[1] < 2 * sizes[0] or not isinstance(traced, Traced) or traced.done.only_at:
        return 0
    peak_bytes = next(result.peak_allocated_bytes for result in results if result.batch_size == sizes[0])
    if peak_bytes >= traced.at(sizes[1]).peak_allocated_bytes:
        return 0
    every = range(1, sizes[1])
    return bisect_right(every, peak_bytes, key=lambda size: traced.at(size).peak_allocated_bytes)


def _strategy_settings(config: SearchConfig, predicted: Predicted, near: int | None) -> strategy.StrategySettings:
    capacity = config.device.gpu.cuda_total_bytes - predicted.ready.context_bytes
    return strategy.StrategySettings(
        strategy=config.strategy,
        predicted=near or predicted.prediction.best_max_batch_size or predicted.guess,
        capacity_bytes=min(capacity, config.limit_bytes or capacity),
        step=config.ramp_step,
        ceiling=predicted.samples or strategy.MAX_BATCH_SIZE,
        sizes=strategy.Sizes(max(config.batch_multiple, predicted.multiple)),
        traced_at=predicted.traced_at,
    )
