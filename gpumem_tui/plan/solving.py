"""Solves a plan for one of its numbers without a screen: traces what is wanted, several at once, within a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from gpumem_tui.memory import Unknown
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
    """Traces plans for the numbers that they are solved for.

    Attributes:
        limit_s: seconds for all traces together; the closed form answers where they are over.
        say: called with a line before traces are made.
    """

    options: TraceOptions
    limit_s: float = TRACE_LIMIT_S
    say: Say = lambda line: None
    _found: dict[tuple[TraceKey, int], Traced | Unknown] = field(default_factory=dict)
    _ends: float | None = None

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

    def _trace(self, plans: tuple[Plan, ...], *, every_batch: bool) -> None:
        lengths = " and ".join(f"{one.shape.seq_len:,}" for one in plans if one.shape.seq_len)
        at = f" at sequence length {lengths}" if lengths else ""
        self.say(f"tracing {plans[0].shape.name}{at} without a GPU")
        if self._ends is None:
            self._ends = time.monotonic() + self.limit_s
        with ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1)) as pool:
            traced = list(pool.map(lambda one: self._traced(one, every_batch=every_batch), plans))
        for plan, found in zip(plans, traced, strict=True):
            key = trace_key(plan)
            assert isinstance(key, TraceKey), "what cannot be traced is never wanted"
            self._found[key, 0 if every_batch else plan.batch_size] = found

    def _traced(self, plan: Plan, *, every_batch: bool) -> Traced | Unknown:
        assert self._ends is not None
        left_s = self._ends - time.monotonic()
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
