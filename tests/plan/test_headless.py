"""Plans without a screen: how many traces are made for one."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from gpumem_tui.memory import Unknown
from gpumem_tui.plan import headless
from gpumem_tui.plan.answers import TracedAnswer, kernel_plans
from gpumem_tui.plan.goals import MOST_TRACES
from gpumem_tui.plan.headless import Solver
from gpumem_tui.plan.tracing import TraceOptions
from gpumem_tui.run.control import Cancelled, Control
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.predicting import Predicted
from gpumem_tui.search.prediction import Formula, Prediction
from tests.plan.plans import GPT2, TRACED


def test_what_other_gpus_need_is_traced_beside_the_plan_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    began, ended, made = threading.Event(), threading.Event(), list[str]()

    def predict(config: SearchConfig, control: object, *_: object) -> Predicted:
        made.append(config.device.gpu.name)
        began.set()
        ended.wait()
        return Predicted(Prediction(Formula(config.workload, GPT2.gpu.total_bytes, 0.1), TRACED), TRACED.ready)

    monkeypatch.setattr(headless, "predict", predict)
    solver = Solver(TraceOptions())
    others = (*kernel_plans(GPT2), replace(GPT2, recipe=replace(GPT2.recipe, compile=True)))
    assert len(others) > 1
    with solver.beside(GPT2):
        began.wait()  # while the plan itself is traced
        ended.set()
    assert [solver.answer(plan).traced.done for plan in others] == [TRACED.done] * len(others)  # type: ignore[union-attr]
    assert len(made) == len(others), "none is made twice"


def test_what_ends_the_plans_own_trace_ends_those_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []

    def predict(config: object, control: Control, *_: object) -> Predicted:
        while not control.cancelled:
            threading.Event().wait(0.01)
        ended.append(True)
        raise Cancelled

    monkeypatch.setattr(headless, "predict", predict)
    solver = Solver(TraceOptions())
    with pytest.raises(SystemExit), solver.beside(GPT2):
        raise SystemExit(2)
    assert ended


def test_the_number_of_traces_is_bounded_and_not_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def predict(config: object, control: object, batch_size: int, only: str) -> Predicted:
        made.append(batch_size)
        formula = Formula(TraceOptions().config(GPT2).workload, GPT2.gpu.total_bytes, 0.1)
        return Predicted(Prediction(formula, TRACED), TRACED.ready)

    monkeypatch.setattr(headless, "predict", predict)
    solver = Solver(TraceOptions())
    plans = [replace(GPT2, shape=GPT2.shape.overridden(layers=layers)) for layers in range(1, MOST_TRACES + 2)]
    answers = [solver.answer(plan) for plan in plans]
    assert all(isinstance(found, TracedAnswer) for found in answers[:-1])
    assert len(made) == MOST_TRACES
    assert isinstance(answers[-1], Unknown)
    assert answers[-1].reason == f"not traced: {MOST_TRACES} traces were made for this plan"
    assert solver.answer(plans[0]) == answers[0], "what is there is answered anyway"
