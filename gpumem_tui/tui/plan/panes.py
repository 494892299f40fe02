"""What the pane beside the numbers shows: worked out away from the screen, since some of it takes a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from gpumem_tui.plan.answers import TracedAnswer, answer
from gpumem_tui.plan.curves import Curve, curves
from gpumem_tui.plan.judgement import judgements
from gpumem_tui.plan.measured import MeasuredRate, rates_for
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.speed import throughput
from gpumem_tui.plan.step_memory import memory_over_step
from gpumem_tui.plan.techniques import Combination, cheapest_combination, techniques
from gpumem_tui.plan.tracing import TraceReady, TraceState
from gpumem_tui.search.prediction import Traced
from gpumem_tui.tui.kit.rows import Rows, heading, no_rows
from gpumem_tui.tui.plan.compare import Compared, compare_rows
from gpumem_tui.tui.plan.curves import curve_rows, open_curve
from gpumem_tui.tui.plan.judgement import judgement_rows
from gpumem_tui.tui.plan.techniques import Help, technique_rows


@dataclass(frozen=True)
class PaneRequest:
    """What is to be shown of a plan.

    Attributes:
        other: the plan to compare with, and what it is called.
        with_step: memory over a step is wanted too.
        traced: the trace that answers `plan`, where there is one and something of it is shown.
        measured: the throughput of the plan's step, where it is shown and known.
    """

    pane: str
    plan: Plan
    other: tuple[str, Plan]
    with_step: bool
    traced: Traced | None = None
    measured: tuple[MeasuredRate, ...] = ()

    @classmethod
    def of(
        cls,
        pane: str,
        plan: Plan,
        other: tuple[str, Plan],
        trace: TraceState,
        *,
        with_step: bool,
        measured: Iterable[MeasuredRate] = (),
    ) -> PaneRequest:
        """What `pane` needs of all that; nothing is worked out anew for what it does not show."""
        needs = with_step or pane in ("curves", "compare")
        traced = trace.traced if needs and isinstance(trace, TraceReady) else None
        return cls(pane, plan, other, with_step, traced, rates_for(plan, measured) if pane == "judgement" else ())


@dataclass(frozen=True)
class PaneContent:
    """What the pane shows, and memory over a step if that was wanted.

    Attributes:
        help: the techniques behind the pane, if it is about them.
    """

    view: Rows
    step: Rows = no_rows
    help: Help | None = None


def pane_content(request: PaneRequest, known: Callable[[Plan], TracedAnswer | None]) -> PaneContent:
    """Work it out. Milliseconds, but for the cheapest combination, which can take a second.

    Args:
        known: what a trace says of a plan, where there is one.
    """
    content = _content(request, known)
    if not request.with_step:
        return content
    curve = _step(request)
    return replace(content, step=lambda width, selected: [heading(curve.title), *open_curve(curve, width)])


def _content(request: PaneRequest, known: Callable[[Plan], TracedAnswer | None]) -> PaneContent:
    plan = request.plan
    match request.pane:
        case "techniques":
            found = _help(plan)
            return PaneContent(lambda width, selected: technique_rows(found, width, selected), help=found)
        case "curves":
            drawn = (*curves(plan), _step(request))
            return PaneContent(lambda width, selected: curve_rows(drawn, width, selected))
        case "judgement":
            advice, rate = judgements(plan, request.measured), throughput(plan, request.measured)
            return PaneContent(lambda width, selected: judgement_rows(advice, rate, width))
        case "compare":
            name, other = request.other
            mine, theirs = Compared(answer(plan), known(plan)), Compared(answer(other), known(other))
            return PaneContent(lambda width, selected: compare_rows(mine, theirs, name, width))
        case _:
            return PaneContent(no_rows)


def _step(request: PaneRequest) -> Curve:
    return memory_over_step(request.plan, request.traced)


def _help(plan: Plan) -> Help:
    cheapest = cheapest_combination(plan)
    only = isinstance(cheapest, Combination) and cheapest.formula_only
    return Help(plan, techniques(plan), cheapest, cheapest_combination(plan, traceable=True) if only else cheapest)
