"""Traces without a screen, several at once, within a time: what solves a plan for a number, what would help it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from gpumem_tui.memory import Unknown
from gpumem_tui.plan.answers import TracedAnswer, traced_answer
from gpumem_tui.plan.limits import Limit, limit
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.quantities import AT_ONE_SIZE, TRACE_LIMIT_S, Quantity
from gpumem_tui.plan.tracing import TraceKey, TraceOptions, trace_key
from gpumem_tui.search.control import Cancelled, Control, Unusable
from gpumem_tui.search.predicting import predict
from gpumem_tui.search.prediction import Traced
from gpumem_tui.search.process import ChildDied
from gpumem_tui.simulator.finder import BatchFinder

_ONE_SIZE = "this trace is of one batch size"
_AT_ONCE = 3

Say = Callable[[str], None]


def too_long(limit_s: float) -> Unknown:
    """Why there is no trace where it took longer."""
    return Unknown(f"not traced within {limit_s:g} s; --trace-limit allows more" if limit_s else "not traced")


@dataclass
class Solver:
    """Traces plans for the numbers that they are solved for, and plans that are recommended.

    Attributes:
        limit_s: seconds for all traces together; the closed form answers where they are over.
        say: called with a line before traces are made.
        ends: when they are over, of `time.monotonic`; None for `limit_s` from the first trace on.
    """

    options: TraceOptions
    limit_s: float = TRACE_LIMIT_S
    say: Say = lambda line: None
    ends: float | None = None
    _found: dict[tuple[TraceKey, int], Traced | Unknown] = field(default_factory=dict)

    def solve(self, quantity: Quantity, plan: Plan, passes: int | None = None) -> Limit:
        """As far as traces tell within the time limit.

        Args:
            passes: of an optimizer step, where the GPUs are asked for; None for as many as it takes.
        """
        every_batch = quantity not in AT_ONE_SIZE

        def known(one: Plan) -> Traced | Unknown | None:
            key = trace_key(one)
            if isinstance(key, Unknown):
                return key
            return self._found.get((key, 0 if every_batch else one.batch_size))

        while (found := limit(quantity, plan, known, passes)).wanted:
            self._trace(found.wanted, every_batch=every_batch)
        return found

    def answer(self, plan: Plan) -> TracedAnswer | Unknown:
        """What a trace says of a plan, if there is time for one; else why there is none."""
        key = trace_key(plan)
        if isinstance(key, Unknown):
            return key
        if (key, 0) not in self._found:
            self._trace((plan,), every_batch=True)
        traced = self._found[key, 0]
        return traced if isinstance(traced, Unknown) else traced_answer(plan, traced)

    def _trace(self, plans: tuple[Plan, ...], *, every_batch: bool) -> None:
        lengths = " and ".join(f"{one.shape.seq_len:,}" for one in plans if one.shape.seq_len)
        at = f" at sequence length {lengths}" if lengths else ""
        self.say(f"tracing {plans[0].shape.name}{at} without a GPU")
        if self.ends is None:
            self.ends = time.monotonic() + self.limit_s
        with ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1)) as pool:
            traced = list(pool.map(lambda one: self._traced(one, every_batch=every_batch), plans))
        for plan, found in zip(plans, traced, strict=True):
            key = trace_key(plan)
            assert isinstance(key, TraceKey), "what cannot be traced is never wanted"
            self._found[key, 0 if every_batch else plan.batch_size] = found

    def _traced(self, plan: Plan, *, every_batch: bool) -> Traced | Unknown:
        assert self.ends is not None
        left_s = self.ends - time.monotonic()
        if left_s <= 0:
            return too_long(self.limit_s)
        control = Control()
        config = self.options.config(plan)
        try:
            with control.within(left_s):
                found = predict(config, control, plan.batch_size, "" if every_batch else _ONE_SIZE).prediction.traced
        except Cancelled:
            return too_long(self.limit_s)
        except (Unusable, ChildDied) as error:
            return Unknown(str(error))
        # What it finds for one question spares work on the next.
        return found if isinstance(found, Unknown) else replace(found, finder=BatchFinder(found.trace, found.settings))
