"""Plans without a screen: how many traces are made for one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_tui.memory import Unknown
from gpumem_tui.plan import headless
from gpumem_tui.plan.answers import TracedAnswer
from gpumem_tui.plan.goals import MOST_TRACES
from gpumem_tui.plan.headless import Solver
from gpumem_tui.plan.tracing import TraceOptions
from gpumem_tui.search.predicting import Predicted
from gpumem_tui.search.prediction import Formula, Prediction
from tests.plan.plans import GPT2, TRACED


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
    assert solver.answer(plans[0]) == answers[0], "what is there is answered all the same"
