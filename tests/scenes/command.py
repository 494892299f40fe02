"""A search of a user's command without torch: scripts of events, with what the command prints between them."""

from __future__ import annotations

from dataclasses import replace

from gpumem_tui.options.workload import WorkloadOptions, simulated_device
from gpumem_tui.run.events import Output
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.predicting import Predicted, TraceProgress
from gpumem_tui.search.prediction import Traced
from gpumem_tui.search.runner import SearchEvent, TrialFinished, TrialProgress
from gpumem_tui.search.verdict import Verdict
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.search.screen import SearchFunction, SearchScreen
from tests.scenes import search as scene

OPTIONS = WorkloadOptions(command=("python3", "train.py", "--batch-size", "{batch}"))
CONFIG = SearchConfig(OPTIONS.spec(), simulated_device("a100-80gb"))
NOTE = "torch.compile: 1 graph compiled, traced by the compiler's own buffers; no frame ran eager"
TRIAL_NOTE = "a checkpoint is not written"


def app(search_function: SearchFunction, *, autostart: bool = True, options: WorkloadOptions = OPTIONS) -> GpuMemApp:
    """The program with a scripted search and a clock that is stopped."""
    searched = replace(CONFIG, workload=options.spec())

    def screen() -> SearchScreen:
        return SearchScreen(searched, options, autostart=autostart, search_function=search_function, clock=scene.noon)

    return GpuMemApp({"search": screen}, "search")


def steps(count: int) -> list[SearchEvent]:
    """The output of a script."""
    return [Output(f"step {step}: loss 0.000") for step in range(count)]


def tracing(lines: int = 2) -> list[SearchEvent]:
    """The command runs at two batch sizes to be traced."""
    return [TraceProgress(2), *steps(lines), TraceProgress(3), *steps(lines)]


def predicted() -> Predicted:
    """The answer then: no closed form, and a trace with a note."""
    found = scene.predicted(CONFIG)
    traced = found.prediction.traced
    assert isinstance(traced, Traced)
    noted = replace(traced, done=replace(traced.done, notes=(NOTE,)))
    return replace(found, prediction=replace(found.prediction, traced=noted))


def running() -> list[SearchEvent]:
    """In the first trial."""
    sample = replace(scene.sample(), buckets={})
    return [*tracing(), predicted(), TrialProgress(1, 40), *steps(2), TrialProgress(1, 40, sample)]


def found() -> list[SearchEvent]:
    """A whole search."""
    fits = replace(scene.trial(CONFIG, 40, off_bytes=0), notes=(NOTE, TRIAL_NOTE))
    message = "safe batch 39; batch 40 ran, 41 was out of memory"
    return [
        *tracing(), predicted(),
        TrialProgress(1, 40), *steps(3), TrialFinished(1, fits),
        TrialProgress(2, 41), *steps(1), TrialFinished(2, scene.trial(CONFIG, 41)),
        Verdict("found", 40, 41, True, 2, 1, message, 39, 40),
    ]  # fmt: skip
