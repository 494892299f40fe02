"""A search without torch: a small trace built by hand, trials that the replay answers, and scripts of events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone

from textual.app import App

from gpumem_tui.memory import ALLOCATED_BUCKETS, GIB, MIB, Bucket, Range, Unknown
from gpumem_tui.options.workload import WorkloadOptions, simulated_device
from gpumem_tui.run.control import Cancelled, Control, Unusable
from gpumem_tui.run.events import Failed, Ready, Sample, TrialDone
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.predicting import Predicted
from gpumem_tui.search.prediction import Formula, Prediction, Traced
from gpumem_tui.search.runner import SearchEvent, TrialFinished, TrialProgress
from gpumem_tui.search.verdict import Known, Verdict, WithHeadroom, concluded
from gpumem_tui.simulator.allocator.replay import AffineTrace, replay
from gpumem_tui.simulator.allocator.timeline import Timeline
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.search.screen import SearchFunction, SearchScreen
from gpumem_tui.tui.search.state import SearchState, reduce, started
from tests.search.traces import CONTEXT_BYTES, PROFILE, traced, training

REASON = "no NVIDIA driver on this machine"
CONTEXT_RANGE = Range(CONTEXT_BYTES - 200 * MIB, CONTEXT_BYTES + 1200 * MIB)
READY = Ready("2.13.0", PROFILE, CONTEXT_BYTES, "measured on an A100", CONTEXT_RANGE)
LARGEST, SAFE = 40, 39
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 15.70 GiB. GPU 0 has a total capacity of 79.15 GiB of which 14.06 GiB is "
    "free. Including non-PyTorch memory, this process has 65.09 GiB memory in use. Of the allocated memory 64.66 GiB "
    "is allocated by PyTorch, and 13.00 MiB is reserved by PyTorch but unallocated."
)


def config(model: str = "gpt2", gpu: str = "a100-80gb") -> SearchConfig:
    """A search on a simulated GPU."""
    device = simulated_device(gpu, reason=REASON)
    return SearchConfig(WorkloadOptions(model=model).spec(), device, python="python")


def timeline(batch_size: int) -> Timeline:
    """A network whose activations take 1.2 GiB a sample."""
    sizes = {
        Bucket.PARAMETERS: 475 * MIB,
        Bucket.BATCH_DATA: 16384 * batch_size,
        Bucket.ACTIVATIONS: 1200 * MIB * batch_size,
        Bucket.TEMPORARY: 392 * MIB * batch_size,
        Bucket.GRADIENTS: 475 * MIB,
        Bucket.OPTIMIZER: 950 * MIB,
    }
    return training(sizes, layers=12)


TRACE = AffineTrace.fit((2, timeline(2)), (3, timeline(3)))


def predicted(searched: SearchConfig, *, traceable: bool = True) -> Predicted:
    """Both predictions for a configuration."""
    gpu = searched.device.gpu
    formula = Formula(searched.workload, gpu.total_bytes, searched.headroom)
    by_trace: Traced | Unknown = Unknown("the step at batch size 5 is not what smaller ones predict")
    if traceable:
        by_trace = replace(traced(TRACE, gpu), ready=READY)
    return Predicted(Prediction(formula, by_trace), READY)


def trial(searched: SearchConfig, batch_size: int, *, off_bytes: int = 12 * MIB) -> TrialDone:
    """The report of a trial; its temporary bytes are `off_bytes` less than traced."""
    capacity_bytes = searched.device.gpu.cuda_total_bytes - CONTEXT_BYTES
    ran = replay(TRACE.at(batch_size), capacity_bytes)
    off_bytes = min(off_bytes, ran.breakdown[Bucket.TEMPORARY])
    buckets = {bucket.value: ran.breakdown[bucket] for bucket in ALLOCATED_BUCKETS}
    buckets[Bucket.TEMPORARY.value] -= off_bytes
    return TrialDone(
        batch_size=batch_size,
        outcome="fit" if ran.fits else "oom",
        peak_allocated_bytes=ran.peak_allocated_bytes - off_bytes,
        peak_reserved_bytes=ran.peak_reserved_bytes,
        device_used_bytes=ran.peak_reserved_bytes + CONTEXT_BYTES,
        buckets=buckets,
        buckets_unknown="",
        seconds=0.8,
        steps=3,
        detail="" if ran.fits else OUT_OF_MEMORY,
    )


def sample(step: int = 2, phase: str = "backward") -> Sample:
    """A running trial in the middle of a step; 1 GiB of what it holds is not explained."""
    buckets = {"parameters": 475 * MIB, "optimizer": 950 * MIB, "activations": 46 * GIB, "batch_data": 800_000}
    allocated_bytes = sum(buckets.values()) + GIB
    return Sample(step, phase, allocated_bytes, allocated_bytes + 3 * GIB, buckets)


def ended(searched: SearchConfig, *sizes: int) -> list[SearchEvent]:
    """Prediction and finished trials."""
    events: list[SearchEvent] = [predicted(searched)]
    for number, size in enumerate(sizes, 1):
        events += [TrialProgress(number, size), TrialFinished(number, trial(searched, size))]
    return events


def found(searched: SearchConfig) -> list[SearchEvent]:
    """A whole search that finds the largest batch."""
    events = ended(searched, 25, LARGEST, LARGEST + 1)
    results = [event.result for event in events if isinstance(event, TrialFinished)]
    known = Known(predicted(searched).prediction.traced)
    verdict = concluded(results, searched.where, grows=True, known=known)
    return [*events, replace(verdict, with_headroom=WithHeadroom(0.1, 35, 8 * GIB, "trace"))]


def running(searched: SearchConfig) -> list[SearchEvent]:
    """A search in its third trial."""
    return [*ended(searched, 25, 64), TrialProgress(3, 40), TrialProgress(3, 40, sample())]


def nothing_fits(searched: SearchConfig) -> list[SearchEvent]:
    """Not even one sample fits."""
    done = TrialDone(1, "oom", 14 * GIB, 14 * GIB, 14 * GIB + CONTEXT_BYTES,
                     {"parameters": 14 * GIB}, "", 1.2, 0, detail="CUDA out of memory")  # fmt: skip
    message = f"nothing fits: one sample is out of memory on simulated {searched.device.gpu.title}"
    verdict = Verdict("nothing_fits", 0, 1, False, 1, 1, message)
    untraced = predicted(searched, traceable=False)
    return [untraced, TrialProgress(1, 1), TrialFinished(1, done), verdict]


TORCH_MISSING = (
    "/usr/bin/python3 cannot import torch (No module named 'torch'): "
    "install torch there, or give --python the interpreter of the environment you train in"
)


def missing_torch(searched: SearchConfig, control: Control) -> Iterator[SearchEvent]:
    """A search whose interpreter has no torch."""
    yield from ()
    raise Unusable(Failed("torch", TORCH_MISSING))


def scripted(events: list[SearchEvent]) -> SearchFunction:
    """A search that states `events` and, if they do not end it, waits to be cancelled."""

    def run(searched: SearchConfig, control: Control) -> Iterator[SearchEvent]:
        yield from events
        if isinstance(events[-1], Verdict):
            return
        try:
            while True:
                control.check()
                time.sleep(0.01)
        except Cancelled:
            message = "cancelled; the largest batch that ran is 25"
            yield Verdict("cancelled", 25, None, False, 2, 1, message)

    return run


def folded(searched: SearchConfig, events: list[SearchEvent]) -> SearchState:
    """The state after a search has said `events`."""
    state = started(SearchState(searched))
    for event in events:
        state = reduce(state, event)
    return state


def noon() -> datetime:
    """A clock that is stopped."""
    return datetime(2026, 3, 2, 12, 0, tzinfo=timezone.utc)


def app(
    searched: SearchConfig,
    search_function: SearchFunction,
    *,
    autostart: bool = True,
    ascii_only: bool = False,
    options: WorkloadOptions | None = None,
) -> GpuMemApp:
    """The program with a scripted search and a clock that is stopped."""
    shape = searched.workload.shape
    assert shape is not None
    chosen = options or WorkloadOptions(model=shape.name)

    def search_screen() -> SearchScreen:
        return SearchScreen(searched, chosen, autostart=autostart, search_function=search_function, clock=noon)

    return GpuMemApp({"search": search_screen}, "search", ascii_only=ascii_only)


def search_screen(program: App[int]) -> SearchScreen:
    """The program's Search screen."""
    assert isinstance(program, GpuMemApp)
    screen = program.main_screen("search")
    assert isinstance(screen, SearchScreen)
    return screen
