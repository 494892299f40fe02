"""The last good plan stays, and every change can be taken back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.plan.controls import controls
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.state import PlanState, chosen, entered, nudged, opened, paused, redone, replaced, undone

PLAN = Plan(find_model("gpt2"), Recipe(), find_gpu("a100-80gb"), batch_size=8)
STATE = opened(PLAN)


def test_opening_shows_the_plan() -> None:
    assert STATE.plan == PLAN
    assert STATE.problem is None
    assert undone(STATE) == STATE == redone(STATE)


def test_a_plan_that_cannot_be_is_opened_with_what_to_mend() -> None:
    state = opened(replace(PLAN, target_batch=4))
    assert state.problem is not None
    assert state.problem.control == "target_batch"
    assert "less than one pass of 8" in state.problem.message
    assert nudged(state, "batch_size", -1, jump=True).problem is None


@pytest.mark.parametrize("headroom", [0.0, 0.95, 0.999])
def test_any_share_that_a_search_takes_as_headroom_can_be_planned_with(headroom: float) -> None:
    assert opened(replace(PLAN, headroom=headroom)).problem is None


def test_what_cannot_be_is_explained_and_the_last_good_plan_stays() -> None:
    state = entered(STATE, "heads", 7)
    assert state.plan == PLAN
    assert state.draft.changes == {"heads": 7}
    assert state.problem is not None
    assert state.problem.control == "heads"
    assert "7 heads do not divide" in state.problem.message


def test_a_later_change_can_mend_it() -> None:
    state = entered(entered(STATE, "heads", 7), "hidden", 7 * 64)
    assert state.problem is None
    assert (state.plan.shape.heads, state.plan.shape.hidden) == (7, 448)


def test_digits_of_one_number_are_one_step_back() -> None:
    state = STATE
    for value in (1, 12, 128):
        state = entered(state, "batch_size", value)
    assert state.plan.batch_size == 128
    assert undone(state).plan == PLAN
    assert redone(undone(state)).plan.batch_size == 128


def test_going_elsewhere_ends_the_step() -> None:
    state = nudged(paused(nudged(STATE, "batch_size", 1)), "batch_size", 1)
    assert state.plan.batch_size == 10
    assert undone(state).plan.batch_size == 9


def test_a_nudge_that_would_break_the_plan_is_refused_with_the_reason() -> None:
    state = nudged(entered(STATE, "target_batch", 8), "batch_size", 1)
    assert state.plan.batch_size == 8
    assert state.problem is not None
    assert state.problem.control == "target_batch"
    assert paused(state).problem is None


def test_nudges_lead_out_of_what_cannot_be() -> None:
    broken = entered(STATE, "seq_len", 1500)
    assert broken.problem is not None
    assert nudged(nudged(broken, "seq_len", -1), "seq_len", -1).problem is not None
    assert nudged(broken, "seq_len", -1, jump=True).plan.shape.seq_len == 1024


def test_a_new_change_forgets_what_was_undone() -> None:
    state = chosen(undone(chosen(STATE, "precision", "bf16")), "optimizer", "sgd")
    assert redone(state).plan == state.plan
    assert state.plan.recipe == Recipe(optimizer="sgd")


def test_another_plan_altogether_can_be_undone() -> None:
    other = replace(PLAN, recipe=Recipe("amp-bf16", sharding="zero3", gpus=4), batch_size=3, target_batch=24)
    assert replaced(STATE, other).plan == other
    assert undone(replaced(STATE, other)).plan == PLAN


def test_values_of_the_wrong_kind_are_mistakes_of_the_caller() -> None:
    with pytest.raises(TypeError):
        entered(STATE, "precision", 4)
    with pytest.raises(TypeError):
        chosen(STATE, "layers", "12")
    with pytest.raises(KeyError):
        nudged(STATE, "kv_heads", 1)


CHANGES = st.one_of(
    st.tuples(st.just("nudge"), st.sampled_from(["batch_size", "layers", "gpus", "sharding", "model"]),
              st.sampled_from([-1, 1])),
    st.tuples(st.just("enter"), st.sampled_from(["batch_size", "heads", "seq_len", "target_batch"]),
              st.integers(0, 5000)),
)  # fmt: skip


@given(st.lists(CHANGES, max_size=20))
def test_undoing_everything_comes_back_to_the_start_and_redoing_to_the_end(
    changes: list[tuple[str, str, int]],
) -> None:
    states: list[PlanState] = [STATE]
    for kind, key, value in changes:
        if key in ("heads", "seq_len") and key not in _keys(states[-1]):
            continue
        act = nudged if kind == "nudge" else entered
        states.append(act(states[-1], key, value))
    end = states[-1]
    state = end
    while state.past:
        state = undone(state)
    assert state.now == STATE.now
    while state.future:
        state = redone(state)
    assert state.now == end.now


def _keys(state: PlanState) -> set[str]:
    return {control.key for control in controls(state.draft)}
