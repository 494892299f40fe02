"""Traces of plans, made in the background and kept.

A trace depends on the network, the recipe and the GPU's architecture. Batch size, GPU memory, headroom and target do
not need another: they are answered from the trace there is. Where memory does not grow evenly with the batch, a trace
answers for its own batch size only.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from gpumem_tui.catalog.shapes import ModelFile, ModelShape
from gpumem_tui.errors import own_error
from gpumem_tui.formula.checks import why_formula_only
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import Unknown
from gpumem_tui.plan.answers import TracedAnswer, traced_answer
from gpumem_tui.plan.plan import Plan
from gpumem_tui.run.children import ChildDied
from gpumem_tui.run.control import Cancelled, Control, Unusable
from gpumem_tui.search import predicting
from gpumem_tui.search.config import Device, SearchConfig
from gpumem_tui.search.predicting import Predicted
from gpumem_tui.search.prediction import Traced
from gpumem_tui.simulator.allocator.finder import BatchFinder
from gpumem_tui.simulator.allocator.replay import NotAffine
from gpumem_tui.simulator.allocator.settings import AllocatorSettings
from gpumem_tui.workload.as_transformers import of_config
from gpumem_tui.workload.spec import WorkloadSpec

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class Lru(Generic[Key, Item]):
    """Keeps the `size` items used last."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: OrderedDict[Key, Item] = OrderedDict()

    def get(self, key: Key) -> Item | None:
        """Return the item under a key, which counts as used now; None for none."""
        if key in self._items:
            self._items.move_to_end(key)
        return self._items.get(key)

    def drop(self, key: Key) -> None:
        """Forget an item, if it is there."""
        self._items.pop(key, None)

    def put(self, key: Key, item: Item) -> None:
        """Keep an item; the one that was not used for longest goes."""
        self._items[key] = item
        self._items.move_to_end(key)
        if len(self._items) > self._size:
            self._items.popitem(last=False)


SETTLE_S = 0.3
"""A trace starts when the plan has not changed for this long: a child process for every key press would be waste."""

REST_S = 0.2
"""So long for an answer from a trace that is there: a replay holds up what the screen draws meanwhile, and arrow keys
are pressed faster than this."""

_TRACES = 32
_ANSWERS = 512

_Found = tuple[Traced, BatchFinder | None] | Unknown


@dataclass(frozen=True)
class TraceKey:
    """The parts of a plan that a trace depends on. `only_at`: the one batch size that it answers for; 0 for all."""

    shape: ModelShape
    recipe: Recipe
    architecture: str
    model_file: ModelFile | None = None
    only_at: int = 0


@dataclass(frozen=True)
class Pending:
    """A trace, or the answer from one, is on its way."""

    plan: Plan


@dataclass(frozen=True)
class TraceReady:
    """The traced answer, and the trace it is from."""

    plan: Plan
    answer: TracedAnswer
    traced: Traced


@dataclass(frozen=True)
class TraceFailed:
    """There is no trace of this plan; one line gives the reason."""

    plan: Plan
    reason: str


TraceState = Pending | TraceReady | TraceFailed


def trace_key(plan: Plan) -> TraceKey | Unknown:
    """Return what `plan` needs a trace of, or why it cannot be traced.

    Unsharded, every GPU runs the step of a single one.
    """
    if plan.extras:
        return Unknown(f"formula only: the workload cannot run {' and '.join(sorted(plan.extras))}")
    if reason := why_formula_only(plan.shape, plan.recipe):
        return Unknown(reason)
    recipe = plan.recipe if plan.recipe.sharding != "none" else replace(plan.recipe, gpus=1)
    return TraceKey(plan.shape, recipe, plan.gpu.sm, plan.model_file)


@dataclass(frozen=True)
class TraceOptions:
    """The options that all traces of a session share.

    Attributes:
        python: the interpreter that has torch.
        steps: training steps a trace has.
        settings: of the caching allocator.
    """

    python: str = sys.executable
    steps: int = 3
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)

    @classmethod
    def of(cls, config: SearchConfig) -> TraceOptions:
        """Return the options that a search has."""
        return cls(config.python, config.steps, config.allocator)

    def config(self, plan: Plan) -> SearchConfig:
        """Return the plan as a search on the simulated GPU would take it."""
        return SearchConfig(
            workload=workload_of(plan, self.python),
            device=Device(plan.gpu, simulated=True),
            python=self.python,
            steps=self.steps,
            headroom=plan.headroom,
            allocator=self.settings,
        )


def workload_of(plan: Plan, python: str) -> WorkloadSpec:
    """Return what is trained to trace a plan: what was read from a file, as transformers builds it if that is there."""
    if plan.model_file is None:
        return WorkloadSpec(plan.recipe, shape=plan.shape)
    return of_config(plan.shape, plan.recipe, plan.model_file, python)


Predict = Callable[[SearchConfig, Control, int, str], Predicted]


class BackgroundTracer:
    """Answers plans from traces in a thread of its own: one trace at a time, the latest plan wins, and traces are kept.

    All returns at once but `known`, which takes a replay, and `close`; `known`, `failed` and `trace_of` are safe
    to call from any thread.

    Args:
        on_change: called from that thread with every state that `want` did not return itself, unless overtaken.
        predict: what traces; `search.predicting.predict`.
        settle_s: seconds of rest before a trace starts; an answer from one that is there waits for `REST_S` at most.
    """

    def __init__(
        self,
        on_change: Callable[[TraceState], None],
        options: TraceOptions | None = None,
        *,
        predict: Predict = predicting.predict,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._on_change = on_change
        self._options = options or TraceOptions()
        self._predict = predict
        self._settle_s = settle_s
        self._changed = threading.Condition()
        self._latest: Plan | None = None
        self._wanted: Plan | None = None
        self._further: list[Plan] = []  # to be traced while nothing is wanted, and the one that is
        self._one_size = False  # these, at their batch sizes alone
        self._candidate: Plan | None = None
        self._candidate_one_size = False
        self._closed = False
        self._tracing: tuple[TraceKey, Control] | None = None
        self._traces: Lru[TraceKey, _Found] = Lru(_TRACES)
        self._not_affine: dict[TraceKey, str] = {}  # why no trace answers for every batch size
        self._answers: Lru[Plan, TraceReady] = Lru(_ANSWERS)
        self._thread: threading.Thread | None = None

    def want(self, plan: Plan) -> TraceState:
        """Ask for a plan: return its trace. If that is `Pending`, `on_change` is called with the rest."""
        with self._changed:
            if self._closed:
                return TraceFailed(plan, "the tracer is closed")
            key = self._key(plan)
            if self._tracing is not None and self._tracing[0] != key:
                self._tracing[1].cancel()
            known = self._known(plan, key)
            if plan != self._latest:
                self._further.clear()
            self._latest = plan
            self._wanted = plan if isinstance(known, Pending) else None
            if isinstance(known, Pending):
                self._begin()
            self._changed.notify_all()
        return known

    def also(self, plans: Sequence[Plan], *, one_size: bool = False) -> None:
        """Trace these plans too, in their order, while the wanted plan is answered; instead of those asked for before.

        Args:
            one_size: at their batch sizes alone, which is quicker.
        """
        with self._changed:
            further = [plan for plan in plans if self._found(plan, one_size=one_size) is None]
            self._one_size = one_size
            self._further = [plan for plan in further if plan != self._candidate]
            if self._further and not self._closed:
                self._begin()
            self._changed.notify_all()

    def failed(self, plan: Plan) -> bool:
        """Return whether there can be no trace of a plan."""
        with self._changed:
            key = self._key(plan)
            return isinstance(key, Unknown) or isinstance(self._traces.get(key), Unknown)

    def trace_of(self, plan: Plan, *, one_size: bool = False) -> Traced | Unknown | None:
        """Return the plan's trace; `Unknown` if it cannot be traced; None while it is pending.

        Args:
            one_size: a trace of the plan's batch size alone will do.
        """
        with self._changed:
            found = self._found(plan, one_size=one_size)
        if found is None or isinstance(found, Unknown):
            return found
        traced, finder = found
        return replace(traced, finder=finder)

    def _found(self, plan: Plan, *, one_size: bool) -> _Found | None:
        """Return the trace there is, or why there can be none."""
        key = self._key(plan)
        if isinstance(key, Unknown):
            return key
        found = self._traces.get(key)
        return self._traces.get(_at_one_size(key, plan)) if found is None and one_size else found

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="plan tracer", daemon=True)
            self._thread.start()

    def again(self, plan: Plan) -> TraceState:
        """Do as `want`, and try a trace that failed once more."""
        with self._changed:
            key = self._key(plan)
            if isinstance(key, TraceKey) and isinstance(self._traces.get(key), Unknown):
                self._traces.drop(key)
        return self.want(plan)

    def stop(self, plan: Plan) -> TraceState:
        """End the trace that is under way, and those that were to follow; return that `plan` has none."""
        with self._changed:
            self._wanted, self._latest = None, None
            self._further.clear()
            if self._tracing is not None:
                self._tracing[1].cancel()
            self._changed.notify_all()
        return TraceFailed(plan, "the trace was ended; r traces again")

    def known(self, plan: Plan) -> TracedAnswer | None:
        """Return the answer for a plan whose trace is there, also while another is wanted; None without a trace."""
        with self._changed:
            key = self._key(plan)
            if isinstance(key, Unknown):
                return None
            ready, found = self._answers.get(plan), self._traces.get(key)
        if ready is not None:
            return ready.answer
        state = None if found is None else self._answered(plan, found)
        return state.answer if isinstance(state, TraceReady) else None

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel what runs and end the thread; nothing is reported any more."""
        with self._changed:
            self._closed = True
            if self._tracing is not None:
                self._tracing[1].cancel()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _key(self, plan: Plan) -> TraceKey | Unknown:
        """Return where the plan's trace is kept, or why there can be none."""
        key = trace_key(plan)
        return replace(key, only_at=plan.batch_size) if key in self._not_affine else key

    def _known(self, plan: Plan, key: TraceKey | Unknown) -> TraceState:
        if isinstance(key, Unknown):
            return TraceFailed(plan, key.reason)
        traced = self._traces.get(key)
        if isinstance(traced, Unknown):
            return TraceFailed(plan, traced.reason)
        return self._answers.get(plan) or Pending(plan)

    def _work(self) -> None:
        while (plan := self._next()) is not None:
            state: TraceReady | TraceFailed
            try:
                found = self._trace(plan)
                if found is None or self._overtaken(plan):
                    continue
                state = self._answered(plan, found)
            except Exception as error:  # noqa: BLE001  named on the screen; another plan may be traced
                state = TraceFailed(plan, own_error(error))
            if not self._overtaken(plan):
                self._on_change(state)

    def _answered(self, plan: Plan, found: _Found) -> TraceReady | TraceFailed:
        """Return what a trace reports of a plan, and keep it for the next time."""
        if isinstance(found, Unknown):
            return TraceFailed(plan, found.reason)
        traced, finder = found
        try:
            ready = TraceReady(plan, traced_answer(plan, traced, finder), traced)
        except NotAffine as error:
            return TraceFailed(plan, str(error))
        if traced.done.not_affine != ONE_SIZE:
            with self._changed:
                self._answers.put(plan, ready)
        return ready

    def _next(self) -> Plan | None:
        """Wait for the plan that is wanted, else for one to be traced further; None when closed."""
        with self._changed:
            self._candidate = None
            self._changed.wait_for(lambda: self._closed or self._wanted is not None or bool(self._further))
            if self._closed:
                return None
            plan, self._wanted = self._wanted, None
            if plan is None:
                plan = self._candidate = self._further.pop(0)
                self._candidate_one_size = self._one_size
            return plan

    def _overtaken(self, plan: Plan) -> bool:
        if plan == self._candidate:
            return self._closed or self._wanted is not None
        return self._closed or self._latest != plan

    def _trace(self, plan: Plan) -> _Found | None:
        """Return the trace there is, or a new one; None if the plan changed before there was one."""
        control = Control()
        with self._changed:
            key = self._key(plan)
            assert isinstance(key, TraceKey), "what cannot be traced is never wanted"
            not_affine = self._not_affine.get(replace(key, only_at=0), "")
            one_size = plan == self._candidate and self._candidate_one_size
            if one_size:
                key, not_affine = _at_one_size(key, plan), not_affine or ONE_SIZE
            known = self._traces.get(key)
            rest_s = self._settle_s if known is None else min(REST_S, self._settle_s)
            if self._changed.wait_for(lambda: self._overtaken(plan), rest_s):
                return None
            if known is not None:
                return known
            self._tracing = key, control
        found: _Found
        try:
            found = _finding(self._predict(self._options.config(plan), control, plan.batch_size, not_affine))
        except Cancelled:
            return None
        except (Unusable, ChildDied) as error:
            found = Unknown(str(error))
        except Exception as error:  # noqa: BLE001  said on the screen; else it would wait for ever for this thread
            found = Unknown(f"tracing failed: {type(error).__name__}: {error}")
        finally:
            with self._changed:
                self._tracing = None
        with self._changed:
            if not one_size and not isinstance(found, Unknown) and found[0].done.only_at:
                self._not_affine[replace(key, only_at=0)] = found[0].done.not_affine
                key = replace(key, only_at=found[0].done.only_at)
            self._traces.put(key, found)
        return found


ONE_SIZE = "it was traced at one batch size"


def _at_one_size(key: TraceKey, plan: Plan) -> TraceKey:
    """Return where a trace of the plan's batch size alone is kept."""
    return replace(key, only_at=plan.batch_size)


def _finding(predicted: Predicted) -> _Found:
    """Return a trace with what finds the largest batch by it, if it answers for more than one."""
    traced = predicted.prediction.traced
    if isinstance(traced, Unknown):
        return traced
    return traced, None if traced.done.only_at else BatchFinder(traced.trace, traced.settings)
