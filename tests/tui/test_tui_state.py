"""The state and its transitions, without a screen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_tui.memory import Unknown
from gpumem_tui.search.runner import TrialFinished, TrialProgress
from gpumem_tui.search.verdict import Verdict
from gpumem_tui.tui.search.state import (
    Failure,
    SearchState,
    Stage,
    cancelling,
    failed,
    held,
    reduce,
    selecting,
    started,
)
from tests.scenes import search as scene

CONFIG = scene.config()


def test_a_search_goes_from_predicting_through_running_to_its_verdict() -> None:
    state = started(SearchState(CONFIG))
    stages = [state.stage]
    for event in scene.found(CONFIG):
        state = reduce(state, event)
        stages.append(state.stage)
    assert stages[0] is Stage.PREDICTING
    assert set(stages[1:-1]) == {Stage.RUNNING}
    assert stages[-1] is Stage.FOUND
    assert [trial.result.batch_size for trial in state.trials] == [25, 40, 41]
    assert state.running is None


@pytest.mark.parametrize(
    ("outcome", "stage", "code"),
    [
        ("found", Stage.FOUND, 0),
        ("nothing_fits", Stage.NOTHING_FITS, 3),
        ("failed", Stage.FAILED, 4),
        ("cancelled", Stage.CANCELLED, 130),
    ],
)
def test_the_verdict_decides_stage_and_exit_code(outcome: str, stage: Stage, code: int) -> None:
    verdict = Verdict(outcome, 1, None, False, 0, 0, "", safe_batch_size=1)  # type: ignore[arg-type]
    state = reduce(started(SearchState(CONFIG)), verdict)
    assert state.stage is stage
    assert state.exit_code == code
    assert not state.busy


def test_a_running_search_exits_as_cancelled_and_an_idle_screen_as_done() -> None:
    assert started(SearchState(CONFIG)).exit_code == 130
    assert SearchState(CONFIG).exit_code == 0


def test_a_failure_ends_the_search_with_its_own_exit_code() -> None:
    state = failed(held(started(SearchState(CONFIG)), paused=True), Failure("no torch", 2))
    assert (state.stage, state.exit_code, state.paused) == (Stage.FAILED, 2, False)


def test_starting_over_forgets_everything_but_the_configuration() -> None:
    state = scene.folded(CONFIG, scene.found(CONFIG))
    assert started(state) == SearchState(CONFIG, Stage.PREDICTING)


def test_the_end_clears_pause_and_cancelling() -> None:
    state = cancelling(held(scene.folded(CONFIG, scene.running(CONFIG)), paused=True))
    verdict = Verdict("cancelled", 25, None, False, 2, 1, "cancelled")
    after = reduce(state, verdict)
    assert (after.paused, after.cancelling, after.running) == (False, False, None)


def test_progress_is_what_the_running_trial_last_said() -> None:
    state = scene.folded(CONFIG, scene.running(CONFIG))
    assert state.running is not None
    assert (state.running.number, state.running.sample) == (3, scene.sample())


def test_without_a_choice_the_last_fitting_trial_is_shown() -> None:
    state = scene.folded(CONFIG, scene.found(CONFIG))
    assert state.shown is not None
    assert state.shown.result.batch_size == scene.LARGEST


def test_without_a_fitting_trial_the_last_one_is_shown() -> None:
    state = scene.folded(CONFIG, scene.nothing_fits(CONFIG))
    assert state.shown is not None
    assert state.shown.number == 1


def test_a_chosen_trial_stays_chosen_while_others_come() -> None:
    state = selecting(scene.folded(CONFIG, scene.ended(CONFIG, 10, 20)), 1)
    assert state.selected == 1
    state = reduce(reduce(state, TrialProgress(3, 30)), TrialFinished(3, scene.trial(CONFIG, 30)))
    assert state.shown is not None
    assert state.shown.number == 1


def test_choosing_the_followed_trial_goes_on_following() -> None:
    state = selecting(scene.folded(CONFIG, scene.ended(CONFIG, 10, 20)), 2)
    assert state.selected is None
    state = reduce(state, TrialFinished(3, scene.trial(CONFIG, 30)))
    assert state.shown_batch_size == 30


def test_the_formula_answers_before_any_search_and_the_trace_says_why_it_does_not() -> None:
    state = SearchState(CONFIG)
    assert state.predicted_size == state.formula.max_batch_size
    assert isinstance(state.traced, Unknown)
    running = scene.folded(CONFIG, scene.ended(CONFIG))
    assert running.predicted_size == scene.LARGEST


def test_what_is_no_event_is_refused() -> None:
    with pytest.raises(TypeError, match="Failure is no event"):
        reduce(SearchState(CONFIG), Failure("", 1))  # type: ignore[arg-type]


def test_folding_never_changes_the_state_before() -> None:
    before = scene.folded(CONFIG, scene.ended(CONFIG, 10))
    copy = replace(before)
    reduce(before, TrialFinished(2, scene.trial(CONFIG, 20)))
    assert before == copy
