"""A Plan screen without torch: traces made by hand, and a tracer that answers when the test lets it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.app import App
from textual.pilot import Pilot

from gpumem_tui.memory import Unknown
from gpumem_tui.plan.answers import TracedAnswer, traced_answer
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.tracing import BackgroundTracer, Pending, TraceFailed, TraceKey, TraceReady, TraceState, trace_key
from gpumem_tui.search.prediction import Traced
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.kit.row_list import RowList
from gpumem_tui.tui.plan.controls import PlanControls
from gpumem_tui.tui.plan.planned import ModelPlanned, of_model
from gpumem_tui.tui.plan.screen import PlanScreen
from tests.plan.plans import FITS, GPT2_FOR_64, LLAMA, RESNET, traced_of
from tests.scenes.pictures import until
from tests.scenes.search import noon

GPT2 = GPT2_FOR_64
__all__ = ["FITS", "GPT2", "LLAMA", "RESNET", "traced_of"]


class HandTracer(BackgroundTracer):
    """Answers at once, or not before `release`; counts the traces that a real one would have made."""

    def __init__(self, on_change: Callable[[TraceState], None], *, holds: bool = False) -> None:
        super().__init__(on_change)
        self.traces = 0
        self.wanted: list[Plan] = []
        self.closed = False
        self.further: list[Plan] = []
        self._holds = holds
        self._made: dict[TraceKey, Traced] = {}

    def want(self, plan: Plan) -> TraceState:
        """The plan's answer, where it need not wait."""
        self.wanted.append(plan)
        key = trace_key(plan)
        if isinstance(key, Unknown):
            return TraceFailed(plan, key.reason)
        if self._holds:
            return Pending(plan)
        return self._answer(plan, key)

    def again(self, plan: Plan) -> TraceState:
        """As if it had never failed."""
        return self.want(plan)

    def failed(self, plan: Plan) -> bool:
        """Where it cannot be traced at all."""
        return isinstance(trace_key(plan), Unknown)

    def trace_of(self, plan: Plan, *, one_size: bool = False) -> Traced | Unknown | None:
        """The plans made."""
        key = trace_key(plan)
        return key if isinstance(key, Unknown) else self._made.get(key)

    def also(self, plans: Sequence[Plan], *, one_size: bool = False) -> None:
        """Asked for; none is made."""
        self.further = list(plans)

    def known(self, plan: Plan) -> TracedAnswer | None:
        """From a trace that was made for another plan too."""
        key = trace_key(plan)
        found = None if isinstance(key, Unknown) else self._made.get(key)
        return None if found is None else traced_answer(plan, found)

    def release(self, plan: Plan) -> None:
        """Say now what the plan's trace reports."""
        key = trace_key(plan)
        assert isinstance(key, TraceKey)
        self._on_change(self._answer(plan, key))

    def fail(self, plan: Plan, reason: str) -> None:
        """Say now that none exists."""
        self._on_change(TraceFailed(plan, reason))

    def close(self, timeout_s: float = 5.0) -> None:
        """Nothing runs."""
        self.closed = True

    def _answer(self, plan: Plan, key: TraceKey) -> TraceReady:
        if key not in self._made:
            self.traces += 1
            self._made[key] = traced_of(plan)
        return TraceReady(plan, traced_answer(plan, self._made[key]), self._made[key])


def app(plan: Plan, *, holds: bool = False, ascii_only: bool = False) -> GpuMemApp:
    """The program on its Plan screen, with a tracer by hand and a clock that is stopped."""

    def plan_screen() -> PlanScreen:
        return PlanScreen(of_model(plan, lambda on_change: HandTracer(on_change, holds=holds)), clock=noon)

    return GpuMemApp({"plan": plan_screen}, "plan", ascii_only=ascii_only)


def plan_screen(program: App[int]) -> PlanScreen:
    """The program's Plan screen."""
    assert isinstance(program, GpuMemApp)
    screen = program.main_screen("plan")
    assert isinstance(screen, PlanScreen)
    return screen


def model(program: App[int]) -> ModelPlanned:
    """Its plan."""
    found = plan_screen(program).planned
    assert isinstance(found, ModelPlanned)
    return found


def tracer(program: App[int]) -> HandTracer:
    """The tracer behind it."""
    found = model(program).tracer
    assert isinstance(found, HandTracer)
    return found


async def settled(pilot: Pilot[int]) -> PlanScreen:
    """Wait until nothing is being worked out."""
    screen = plan_screen(pilot.app)
    await until(pilot, lambda: screen.settled)
    await pilot.pause()
    return screen


def text_of(pilot: Pilot[int], name: str) -> str:
    """The rows of a list."""
    return "\n".join(row.text for row in plan_screen(pilot.app).query_one(name, RowList).rows)


def controls(pilot: Pilot[int]) -> PlanControls:
    """The controls."""
    return plan_screen(pilot.app).query_one(PlanControls)


async def choose(pilot: Pilot[int], key: str) -> None:
    """Walk to a control."""
    await pilot.press("escape", "home")
    for _ in range(30):
        if controls(pilot).key == key:
            return
        await pilot.press("down")
    raise AssertionError(f"there is no control {key}")


def plan_now(pilot: Pilot[int]) -> Plan:
    """The plan whose numbers are shown."""
    return model(pilot.app).plan
