"""Ranks that have stopped: which is named as the first, and in which words."""

from __future__ import annotations

import pytest

from gpumem_tui.watch.ranks import RankState, StoppedAt, stop_of

IN_FORWARD = StoppedAt("forward", "", "model.py:10", "forward")
IN_REDUCE = StoppedAt("", "all_reduce", "train.py:30", "<module>")
IN_BACKWARD = StoppedAt("backward", "", "train.py:27", "<module>")
SPINNING = StoppedAt("", "", "train.py:44", "<module>", busy=True)


def rank(number: int, at: StoppedAt | None = None, step: int = 9, silent_s: float = 30.0) -> RankState:
    return RankState(number, step, silent_s, silent_s > 15, at)


def words(*ranks: RankState) -> str:
    stop = stop_of(ranks)
    return "" if stop is None else stop.words


def test_while_all_go_on_there_is_nothing_to_say() -> None:
    assert words(rank(0, silent_s=1.0), rank(1, silent_s=2.0)) == ""


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (IN_REDUCE, "wait in all_reduce at train.py:30"),
        (IN_BACKWARD, "wait in backward at train.py:27"),
        (SPINNING, "at train.py:44, computing"),
    ],
)
def test_where_they_stand_tells_who_stopped_first_of_ranks_in_lockstep(others: StoppedAt, said: str) -> None:
    stopped = words(rank(0, others), rank(1, IN_FORWARD), rank(2, others))
    first = "rank 1 stopped first, after step 9, 30 s ago, in forward at model.py:10 (forward), idle"
    assert stopped == first + (f"; ranks 0, 2 {said}" if others.waits else "")


def test_of_two_in_lockstep_the_one_that_waits_is_not_the_first() -> None:
    assert words(rank(0, IN_FORWARD, silent_s=29.0), rank(1, IN_REDUCE)) == (
        "rank 0 stopped first, after step 9, 29 s ago, in forward at model.py:10 (forward), idle; "
        "rank 1 waits in all_reduce at train.py:30"
    )


def test_two_that_wait_at_one_place_for_nobody_that_is_known() -> None:
    assert words(rank(0, IN_REDUCE), rank(1, IN_REDUCE)) == (
        "no rank has finished a step for 30 s; ranks 0, 1 wait in all_reduce at train.py:30"
    )


def test_steps_tell_where_nothing_else_does() -> None:
    assert words(rank(0), rank(1, step=8)) == "rank 1 stopped first, after step 8, 30 s ago"
    assert words(rank(0), rank(1)) == "no rank has finished a step for 30 s"


def test_one_rank_of_several_and_a_process_alone() -> None:
    assert words(rank(0, silent_s=1.0), rank(1, IN_FORWARD)) == (
        "rank 1 has finished no step for 30 s, in forward at model.py:10 (forward), idle"
    )
    alone = RankState(None, 4, 40.0, is_silent=True, at=SPINNING)
    assert words(alone) == "no step has finished for 40 s: at train.py:44, computing"


def test_what_others_say_is_bounded_and_checked() -> None:
    assert StoppedAt.of("nonsense") is None
    odd = StoppedAt.of({"phase": 3, "source": "x" * 1000, "busy": "yes"})
    assert odd is not None
    assert odd.phase == ""
    assert len(odd.source) <= 60
    assert not odd.busy
