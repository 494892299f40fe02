"""One trace serves many plans, the latest plan wins, and nothing waits on the screen's thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import Unknown
from gpumem_tui.plan.answers import traced_answer
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.tracing import BackgroundTracer, Pending, TraceFailed, TraceReady, TraceState, trace_key
from gpumem_tui.run.children import ChildDied
from gpumem_tui.run.control import Cancelled, Control, Unusable
from gpumem_tui.run.events import Failed as ChildFailed
from gpumem_tui.run.events import Ready as ChildReady
from gpumem_tui.run.events import TraceDone
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.predicting import Predicted
from gpumem_tui.search.prediction import Formula, Prediction, Traced
from gpumem_tui.simulator.allocator.replay import AffineTrace
from tests.plan.plans import GPT2, TRACED, timeline
from tests.search.traces import CONTEXT_BYTES, PROFILE
from tests.waiting import DEADLINE_S


class Traces:
    """Stand-in for `predicting.predict`: gives the trace made by hand, and holds each one until told to finish."""

    def __init__(self) -> None:
        self.started: queue.Queue[SearchConfig] = queue.Queue()
        self.finish = threading.Event()
        self.finish.set()
        self.cancelled = 0
        self.result: Callable[[], Traced | Unknown] = lambda: TRACED
        self.asked: list[tuple[int, str]] = []

    def __call__(self, config: SearchConfig, control: Control, batch_size: int, not_affine: str) -> Predicted:
        self.asked.append((batch_size, not_affine))
        self.started.put(config)
        while not self.finish.wait(0.005):
            try:
                control.check()
            except Cancelled:
                self.cancelled += 1
                raise
        formula = Formula(config.workload, config.device.gpu.total_bytes)
        ready = ChildReady("2.13.0", PROFILE, CONTEXT_BYTES, "assumed")
        return Predicted(Prediction(formula, self.result()), ready)


class Session:
    """A tracer whose reports can be waited for."""

    def __init__(self, traces: Traces | None = None) -> None:
        self.traces = traces or Traces()
        self.reported: queue.Queue[TraceState] = queue.Queue()
        self.tracer = BackgroundTracer(self.reported.put, predict=self.traces, settle_s=0.0)

    def next(self) -> TraceState:
        return self.reported.get(timeout=DEADLINE_S)

    def started(self) -> SearchConfig:
        return self.traces.started.get(timeout=DEADLINE_S)


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session()
    yield made
    made.traces.finish.set()
    made.tracer.close()


def test_a_trace_is_pending_then_ready(session: Session) -> None:
    assert session.tracer.want(GPT2) == Pending(GPT2)
    state = session.next()
    assert isinstance(state, TraceReady)
    assert state.answer == traced_answer(GPT2, TRACED)


def test_a_sweep_over_100_batch_sizes_traces_once(session: Session) -> None:
    session.tracer.want(GPT2)
    session.next()
    for batch_size in range(1, 101):
        plan = replace(GPT2, batch_size=batch_size)
        if isinstance(session.tracer.want(plan), Pending):
            state = session.next()
            assert isinstance(state, TraceReady)
            assert state.plan == plan
    assert session.traces.started.qsize() == 1


def test_an_answer_given_once_comes_at_once(session: Session) -> None:
    session.tracer.want(GPT2)
    ready = session.next()
    assert session.tracer.want(GPT2) == ready


def test_gpu_memory_headroom_and_target_need_no_new_trace(session: Session) -> None:
    session.tracer.want(GPT2)
    session.next()
    for plan in (
        replace(GPT2, gpu=find_gpu("a100-40gb")),
        replace(GPT2, headroom=0.3),
        replace(GPT2, target_batch=64),
        replace(GPT2, recipe=Recipe(gpus=8)),
    ):
        session.tracer.want(plan)
        assert isinstance(session.next(), TraceReady)
    assert session.traces.started.qsize() == 1


def test_another_network_recipe_or_architecture_needs_one() -> None:
    others = [
        replace(GPT2, shape=find_model("gpt2-medium")),
        replace(GPT2, recipe=Recipe("amp-bf16")),
        replace(GPT2, recipe=Recipe(sharding="zero3", gpus=8)),
        replace(GPT2, gpu=find_gpu("h100-80gb")),
    ]
    assert len({trace_key(plan) for plan in [GPT2, *others]}) == 5


def test_the_latest_plan_wins_and_the_overtaken_trace_is_cancelled(session: Session) -> None:
    session.traces.finish.clear()
    session.tracer.want(GPT2)
    session.started()
    other = replace(GPT2, shape=find_model("gpt2-medium"))
    assert session.tracer.want(other) == Pending(other)
    assert session.started().workload.shape == other.shape
    session.traces.finish.set()
    state = session.next()
    assert isinstance(state, TraceReady)
    assert state.plan == other
    assert session.traces.cancelled == 1
    assert session.reported.empty()


def test_a_change_that_needs_no_other_trace_lets_it_run(session: Session) -> None:
    session.traces.finish.clear()
    session.tracer.want(GPT2)
    session.started()
    larger = replace(GPT2, batch_size=16)
    session.tracer.want(larger)
    session.traces.finish.set()
    state = session.next()
    assert state.plan == larger
    assert session.traces.cancelled == 0
    assert session.reported.empty()


def test_what_only_the_formula_knows_fails_at_once(session: Session) -> None:
    plan = replace(GPT2, extras=frozenset({"chunked-loss"}))
    state = session.tracer.want(plan)
    assert isinstance(state, TraceFailed)
    assert "formula only" in state.reason
    assert session.traces.started.empty()


def untraceable() -> Unknown:
    return Unknown("PyTorch does not implement it")


def no_torch() -> Traced:
    raise Unusable(ChildFailed("torch", "no torch there"))


def killed() -> Traced:
    raise ChildDied("killed by SIGKILL")


@pytest.mark.parametrize(
    ("result", "reason"),
    [(untraceable, "does not implement"), (no_torch, "no torch"), (killed, "SIGKILL")],
)
def test_failures_carry_their_reason(session: Session, result: Callable[[], Traced | Unknown], reason: str) -> None:
    session.traces.result = result
    session.tracer.want(GPT2)
    state = session.next()
    assert isinstance(state, TraceFailed)
    assert reason in state.reason
    later = session.tracer.want(replace(GPT2, batch_size=9))
    assert isinstance(later, TraceFailed)
    assert session.traces.started.qsize() == 1


def test_what_nobody_foresaw_is_said_and_the_next_plan_is_answered(session: Session) -> None:
    def full() -> Traced:
        raise OSError(28, "No space left on device")

    session.traces.result = full
    session.tracer.want(GPT2)
    failed = session.next()
    assert isinstance(failed, TraceFailed)
    assert "OSError: [Errno 28] No space left on device" in failed.reason
    session.traces.result = lambda: TRACED
    session.tracer.again(GPT2)
    assert isinstance(session.next(), TraceReady)


def test_a_trace_that_failed_is_tried_again_when_asked_to(session: Session) -> None:
    session.traces.result = killed
    session.tracer.want(GPT2)
    assert isinstance(session.next(), TraceFailed)
    session.traces.result = lambda: TRACED
    assert isinstance(session.tracer.want(GPT2), TraceFailed)
    assert session.tracer.again(GPT2) == Pending(GPT2)
    assert isinstance(session.next(), TraceReady)
    assert isinstance(session.tracer.again(GPT2), TraceReady)
    assert session.traces.started.qsize() == 2


def test_a_batch_size_that_the_trace_cannot_answer_fails_and_the_next_one_does_not(session: Session) -> None:
    shrinking = replace(TRACED.trace, slopes=(-1, *TRACED.trace.slopes[1:]))
    session.traces.result = lambda: TRACED.with_trace(shrinking)
    always_raises = replace(GPT2, batch_size=2 * shrinking.at_none.sizes[0])
    session.tracer.want(always_raises)
    state = session.next()
    assert isinstance(state, TraceFailed)
    assert "less than none" in state.reason
    session.tracer.want(GPT2)
    assert isinstance(session.next(), TraceReady)


class Uneven(Traces):
    """Traces of a network whose memory does not grow evenly with the batch: each is about its own size."""

    REASON = "the step at batch size 5 is not what smaller ones predict"

    def __init__(self) -> None:
        super().__init__()
        self.result = self.alone

    def alone(self) -> Traced:
        size, _ = self.asked[-1]
        done = TraceDone(AffineTrace.constant(timeline(size)), 1.0, only_at=size, not_affine=self.REASON)
        return replace(TRACED, done=done)


@pytest.fixture
def uneven() -> Iterator[Session]:
    made = Session(Uneven())
    yield made
    made.traces.finish.set()
    made.tracer.close()


def test_where_memory_is_not_affine_every_batch_size_is_traced_once(uneven: Session) -> None:
    larger = replace(GPT2, batch_size=16)
    for plan in (GPT2, larger):
        assert uneven.tracer.want(plan) == Pending(plan)
        state = uneven.next()
        assert isinstance(state, TraceReady)
        assert state.answer.breakdown == traced_answer(plan, TRACED).breakdown
        assert state.answer.max_batch_size == Unknown(Uneven.REASON)
    assert uneven.traces.asked == [(8, ""), (16, Uneven.REASON)]
    assert isinstance(uneven.tracer.want(GPT2), TraceReady)
    assert uneven.tracer.known(replace(larger, headroom=0.5)) is not None
    assert uneven.tracer.known(replace(GPT2, batch_size=9)) is None
    uneven.tracer.want(replace(GPT2, gpu=find_gpu("a100-40gb")))
    assert isinstance(uneven.next(), TraceReady)
    assert len(uneven.traces.asked) == 2


def test_where_memory_is_not_affine_another_batch_size_cancels_the_trace(uneven: Session) -> None:
    uneven.tracer.want(GPT2)
    uneven.next()
    uneven.traces.finish.clear()
    uneven.started()
    uneven.tracer.want(replace(GPT2, batch_size=16))
    uneven.started()
    latest = replace(GPT2, batch_size=17)
    uneven.tracer.want(latest)
    uneven.started()
    uneven.traces.finish.set()
    assert uneven.next().plan == latest
    assert uneven.traces.cancelled == 1
    assert uneven.reported.empty()


def test_a_batch_size_changed_during_the_first_trace_is_traced_after_it(uneven: Session) -> None:
    uneven.traces.finish.clear()
    uneven.tracer.want(GPT2)
    uneven.started()
    larger = replace(GPT2, batch_size=16)
    uneven.tracer.want(larger)
    uneven.traces.finish.set()
    state = uneven.next()
    assert isinstance(state, TraceReady)
    assert state.plan == larger
    assert state.answer.peak_allocated_bytes == traced_answer(larger, TRACED).peak_allocated_bytes
    assert uneven.traces.cancelled == 0


def test_one_batch_size_that_fails_does_not_speak_for_the_others(uneven: Session) -> None:
    uneven.tracer.want(GPT2)
    uneven.next()
    traces = uneven.traces
    works, traces.result = traces.result, killed
    always_raises = replace(GPT2, batch_size=1_000)
    uneven.tracer.want(always_raises)
    assert isinstance(uneven.next(), TraceFailed)
    traces.result = works
    uneven.tracer.want(replace(GPT2, batch_size=9))
    assert isinstance(uneven.next(), TraceReady)
    assert isinstance(uneven.tracer.want(always_raises), TraceFailed)
    assert uneven.tracer.again(always_raises) == Pending(always_raises)
    assert isinstance(uneven.next(), TraceReady)


def test_what_is_known_of_a_plan_that_is_not_wanted(session: Session) -> None:
    other = replace(GPT2, batch_size=4)
    assert session.tracer.known(other) is None
    session.tracer.want(GPT2)
    session.next()
    assert session.tracer.known(other) == traced_answer(other, TRACED)
    assert session.tracer.known(replace(GPT2, recipe=Recipe("amp-bf16"))) is None
    assert session.tracer.known(replace(GPT2, extras=frozenset({"chunked-loss"}))) is None
    assert session.traces.started.qsize() == 1
    assert session.reported.empty()


def test_closing_cancels_and_reports_nothing(session: Session) -> None:
    session.traces.finish.clear()
    session.tracer.want(GPT2)
    session.started()
    session.tracer.close()
    assert session.traces.cancelled == 1
    assert session.reported.empty()
    assert isinstance(session.tracer.want(GPT2), TraceFailed)


def test_a_plan_that_does_not_rest_starts_no_trace() -> None:
    traces, reported = Traces(), queue.Queue[TraceState]()
    tracer = BackgroundTracer(reported.put, predict=traces, settle_s=DEADLINE_S)
    tracer.want(GPT2)
    tracer.want(replace(GPT2, shape=find_model("gpt2-medium")))
    tracer.close()
    assert traces.started.empty()


def test_a_real_trace() -> None:
    """Through the real child process, on a network small enough to wait for."""
    small = Plan(find_model("mlp").overridden(layers=2, hidden=64), Recipe(), find_gpu("a100-80gb"), batch_size=4)
    reported: queue.Queue[TraceState] = queue.Queue()
    tracer = BackgroundTracer(reported.put, settle_s=0.0)
    tracer.want(small)
    state = reported.get(timeout=120)
    tracer.close()
    assert isinstance(state, TraceReady), state
    assert state.answer.fits
    assert isinstance(state.answer.max_batch_size, int)


def test_a_trace_that_is_ended_says_so_and_is_made_when_asked_for_again(session: Session) -> None:
    session.traces.finish.clear()
    assert isinstance(session.tracer.want(GPT2), Pending)
    session.started()
    ended = session.tracer.stop(GPT2)
    assert isinstance(ended, TraceFailed)
    assert ended.reason == "the trace was ended; r traces again"
    assert isinstance(session.tracer.again(GPT2), Pending)
    session.started()
    assert session.traces.cancelled == 1
    session.traces.finish.set()
    assert isinstance(session.next(), TraceReady)
