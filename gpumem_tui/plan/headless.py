"""A plan without a screen: traced as far as the time reaches, then as text, Markdown or JSON on stdout."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from gpumem_tui.errors import EXIT_INTERRUPTED, EXIT_NOTHING_FITS
from gpumem_tui.memory import Unknown, format_bytes
from gpumem_tui.plan.answers import TracedAnswer, answer, kernel_plans, traced_answer
from gpumem_tui.plan.combination import Combination
from gpumem_tui.plan.combining import Planner, Planning
from gpumem_tui.plan.command import CommandPlan, CommandRuns
from gpumem_tui.plan.goals import AT_ONE_SIZE, MOST_TRACES, TRACE_LIMIT_S, Quantity
from gpumem_tui.plan.limits import Limit, limit
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.printed import CommandPlanObject, PlanObject, SolveObject
from gpumem_tui.plan.recommended import fits_answer, verdict_line
from gpumem_tui.plan.report import capitalized, command_plan_markdown, limit_lines, limit_markdown, plan_markdown
from gpumem_tui.plan.techniques import compiled_or_eager
from gpumem_tui.plan.tracing import ONE_SIZE, TraceKey, TraceOptions, trace_key, workload_of
from gpumem_tui.report.output import Printer, Progress, interrupts, note
from gpumem_tui.run.children import ChildDied
from gpumem_tui.run.control import Cancelled, Control, Unusable
from gpumem_tui.search.config import Device, SearchConfig
from gpumem_tui.search.headless import CommandLog, run_error
from gpumem_tui.search.predicting import predict
from gpumem_tui.search.prediction import Traced
from gpumem_tui.simulator.allocator.finder import BatchFinder

_AT_ONCE = 3


# A model's plan


def show_plan(plan: Plan, traced: Traced | Unknown, solver: Solver, device: Device, *, as_json: bool) -> int:
    """Print the plan of a model.

    Args:
        solver: traces what would help.
        device: where it would run.
    """
    network = workload_of(plan, solver.options.python).network
    if isinstance(traced, Traced):
        note(f"{fits_answer(answer(plan), traced_answer(plan, traced), network)[0]}; what would help is worked out …")
    with solver.progress.during("working out the largest batch on every GPU …"):
        shown = PlanObject.of(plan, traced, device, solver.answer, network) if as_json else None
        lines = [] if as_json else plan_markdown(plan, traced, solver.answer, network).splitlines()
    Printer(as_json=as_json).show(body=lambda: shown, lines=lambda: lines)
    return 0


def show_limit(plan: Plan, found: Limit, *, as_json: bool, markdown: bool) -> int:
    """Print what a plan was solved for, and return the exit code."""
    Printer(as_json=as_json).show(
        body=lambda: SolveObject.of(plan, found),
        lines=lambda: limit_markdown(plan, found).splitlines() if markdown else limit_lines(plan, found),
    )
    return EXIT_NOTHING_FITS if found.value is None else 0


def too_long(limit_s: float) -> Unknown:
    """Return why there is no trace where it took longer."""
    return Unknown(f"not traced within {limit_s:g} s; --trace-limit allows more" if limit_s else "not traced")


@dataclass
class Solver:
    """Traces plans for the numbers that they are solved for, and plans that are recommended.

    `MOST_TRACES` are made; the closed form answers what is left.

    Attributes:
        limit_s: seconds for all traces together; the closed form answers where they are over.
        progress: shows which traces are made.
        ends: when they are over, of `time.monotonic`; None for `limit_s` from the first trace on.
    """

    options: TraceOptions
    limit_s: float = TRACE_LIMIT_S
    progress: Progress = field(default_factory=lambda: Progress(quiet=True))
    ends: float | None = None
    _found: dict[tuple[TraceKey, int], Traced | Unknown] = field(default_factory=dict)
    _took_s: float = 0.0
    _control: Control = field(default_factory=Control)

    @contextmanager
    def beside(self, plan: Plan) -> Iterator[None]:
        """Trace a plan for GPUs of other kernels, and compiled or eager, while it is traced itself."""
        shown, self.progress = self.progress, Progress(quiet=True)
        with ThreadPoolExecutor(1) as pool:
            compiled = compiled_or_eager(plan, Unknown("not traced so far"))
            for one in (*kernel_plans(plan), *([compiled.plan] if isinstance(compiled, Combination) else [])):
                if isinstance(trace_key(one), TraceKey):
                    pool.submit(self._trace, (one,), every_batch=True)
            try:
                yield
            except BaseException:
                self._control.cancel()
                raise
        self.progress = shown

    def solve(self, quantity: Quantity, plan: Plan, passes: int | None = None) -> Limit:
        """Solve a plan for a number, as far as traces tell within the time limit.

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
        """Return what a trace reports of a plan, if there is time for one; else why it is missing."""
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
        more = f"; {len(self._found)} traces are made, of {MOST_TRACES} at most" if self._found else ""
        line = f"tracing {plans[0].shape.name}{at} on {plans[0].gpu.title} without a GPU{more} …"
        began_s = time.monotonic()
        if self.ends is None:
            self.ends = began_s + self.limit_s
        with self.progress.during(line, self._took_s), ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1)) as pool:
            traced = list(pool.map(lambda one: self._traced(one, every_batch=every_batch), plans))
        self._took_s = time.monotonic() - began_s
        for plan, found in zip(plans, traced, strict=True):
            key = trace_key(plan)
            assert isinstance(key, TraceKey), "what cannot be traced is never wanted"
            self._found[key, 0 if every_batch else plan.batch_size] = found

    def _traced(self, plan: Plan, *, every_batch: bool) -> Traced | Unknown:
        assert self.ends is not None
        if len(self._found) >= MOST_TRACES:
            return Unknown(f"not traced: {MOST_TRACES} traces were made for this plan")
        left_s = self.ends - time.monotonic()
        if left_s <= 0:
            return too_long(self.limit_s)
        control = self._control
        config = self.options.config(plan)
        try:
            with control.within(left_s):
                found = predict(config, control, plan.batch_size, "" if every_batch else ONE_SIZE).prediction.traced
        except Cancelled:
            return too_long(self.limit_s)
        except (Unusable, ChildDied) as error:
            return Unknown(str(error))
        # Traces of one question are reused for the next.
        return found if isinstance(found, Unknown) else replace(found, finder=BatchFinder(found.trace, found.settings))


# A command's plan


def show_command_plan(
    config: SearchConfig, batch_size: int, wanted: Sequence[str] | None, *, as_json: bool, quiet: bool
) -> int:
    """Run the command, print its plan, and return the exit code.

    Ctrl-C ends the runs; the answer so far is printed anyway.

    Args:
        wanted: the changes to try, empty for all that can be made; None for none.
        quiet: do not show what the command prints.

    Raises:
        RunError: the command cannot be followed.
    """
    control = Control()
    try:
        with interrupts(control.cancel):
            plan, interrupted = _planned(config, batch_size, wanted, control, quiet=quiet)
    except Cancelled:
        return EXIT_INTERRUPTED
    except (Unusable, ChildDied) as error:
        raise run_error(config, error) from error
    Printer(as_json=as_json).show(
        body=lambda: CommandPlanObject.of(plan), lines=lambda: command_plan_markdown(plan).splitlines()
    )
    return EXIT_INTERRUPTED if interrupted else 0


def _planned(
    config: SearchConfig, batch_size: int, wanted: Sequence[str] | None, control: Control, *, quiet: bool
) -> tuple[CommandPlan, bool]:
    """Return the plan with its what-ifs, and whether it was interrupted before they all had run."""
    runs = CommandRuns(config, batch_size, tuple(wanted or ()))
    output = CommandLog(config, quiet=quiet)
    with output.following():
        predicted, changes, refused = runs.trace(control, output.show)
    plan = CommandPlan(config, batch_size, predicted)
    if wanted is None:
        return plan, False
    if not quiet:
        note(f"{capitalized(verdict_line(plan.answer()))}; what would help is run …")
    left = tuple(changes)
    interrupted, log = True, _PlanLog(quiet=quiet)
    try:
        for step in Planner(plan, runs, changes, control).run():
            log.show(step)
            plan, left = step.plan, step.waiting
            if step.running is not None and plan.is_alone(step.running):
                left = (step.running, *left)
        interrupted = False
    except Cancelled:
        log.end()
    stopped = Unknown("not run: the plan was interrupted")
    more = (*(replace(one, traced=stopped) for one in left), *refused)
    return replace(plan, tried=(*plan.tried, *more)), interrupted


class _PlanLog:
    """A line on stderr for each run of a plan: what it is, about how long the rest takes, and what came of it."""

    def __init__(self, *, quiet: bool) -> None:
        self._number = 0
        self._quiet = quiet

    def show(self, step: Planning) -> None:
        """Begin a line, or end it."""
        if step.ran is not None:
            self._say(f" {_outcome(step.plan, step.ran)}\n")
        elif step.running is not None and step.plan.is_alone(step.running):
            self._number += 1
            self._begin(f"what-if {self._number} of {self._number + step.to_go}: {step.running.words}", step)
        elif step.running is not None:
            self._begin(f"together: {step.running.words}", step)

    def end(self) -> None:
        """End the line that was begun."""
        self._say(" interrupted\n")

    def _begin(self, what: str, step: Planning) -> None:
        self._say(f"{what} (about {step.left_s:,.0f} s to go) …")

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(text, end="", file=sys.stderr, flush=True)


def _outcome(plan: CommandPlan, found: Combination) -> str:
    peak_bytes = plan.peak_bytes(found)
    return (
        peak_bytes.reason if isinstance(peak_bytes, Unknown) else f"{format_bytes(peak_bytes)}, {plan.fit_with(found)}"
    )
