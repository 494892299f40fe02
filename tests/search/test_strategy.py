"""Every strategy finds the largest size that runs, after any prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_tui.run.events import Outcome, TrialDone
from gpumem_tui.search import verdict
from gpumem_tui.search.strategy import (
    NAMES,
    PATIENCE_TRIALS,
    RAMP_TRIALS,
    Name,
    Sizes,
    StrategySettings,
    Tried,
    bracket,
    next_size,
)

BYTES_A_SAMPLE = 1000
CAPACITY = 5000 * BYTES_A_SAMPLE
every_strategy = pytest.mark.parametrize("name", NAMES)
truths = st.integers(0, 5000)
predictions = st.none() | st.integers(0, 50_000) | st.integers(0, 10)
Fits = Callable[[int], bool]


def reachable(name: Name, largest: int) -> int:
    """A ramp may climb one by one, which is what it is for but takes long to test."""
    return largest % 300 if name == "ramp" else largest


def explore(
    settings: StrategySettings, fits: Fits, peak: Callable[[int], int] = lambda size: size * 1000
) -> list[Tried]:
    """Run the strategy to its end; fails if it repeats itself or does not stop."""
    tried: list[Tried] = []
    while (size := next_size(tried, settings)) is not None:
        assert size >= 1
        assert size not in {t.batch_size for t in tried}, "a size was tried twice"
        assert len(tried) < 6000, "the search does not end"
        tried.append(Tried(size, fits(size), peak(size)))
    return tried


def assert_proven(tried: list[Tried], largest: int) -> None:
    outcomes = {t.batch_size: t.fits for t in tried}
    assert outcomes.get(largest, True), f"{largest} was not run"
    assert largest == 0 or largest in outcomes
    assert outcomes[largest + 1] is False
    assert bracket(tried) == (largest, largest + 1)


@every_strategy
@given(largest=truths, predicted=predictions, step=st.none() | st.integers(1, 500))
def test_every_search_ends_with_the_largest_size_run_and_the_next_one_failed(
    name: Name, largest: int, predicted: int | None, step: int | None
) -> None:
    largest = reachable(name, largest)
    settings = StrategySettings(name, predicted, CAPACITY, step)
    assert_proven(explore(settings, lambda size: size <= largest), largest)


@every_strategy
@given(largest=truths, predicted=predictions, peaks=st.lists(st.integers(0, 2 * CAPACITY), min_size=1, max_size=20))
def test_misleading_peaks_do_not_mislead(name: Name, largest: int, predicted: int | None, peaks: list[int]) -> None:
    largest = reachable(name, largest)
    settings = StrategySettings(name, predicted, CAPACITY)
    tried = explore(settings, lambda size: size <= largest, lambda size: peaks[size % len(peaks)])
    assert_proven(tried, largest)
    if name == "guided":
        farthest = max(t.batch_size for t in tried)
        assert len(tried) <= PATIENCE_TRIALS + 3 * farthest.bit_length()


@every_strategy
@given(largest=truths, predicted=predictions, ceiling=st.integers(1, 5000))
def test_no_size_beyond_the_ceiling_is_tried(name: Name, largest: int, predicted: int | None, ceiling: int) -> None:
    largest = reachable(name, largest)
    tried = explore(StrategySettings(name, predicted, CAPACITY, ceiling=ceiling), lambda size: size <= largest)
    assert max(t.batch_size for t in tried) <= ceiling
    assert bracket(tried)[0] == min(largest, ceiling)
    if name == "guided":
        assert len(tried) <= PATIENCE_TRIALS + 3 * ceiling.bit_length(), "it goes down one by one"


@given(largest=st.integers(1, 10**6))
def test_a_right_prediction_takes_two_trials(largest: int) -> None:
    tried = explore(StrategySettings("guided", largest, CAPACITY), lambda size: size <= largest)
    assert [t.batch_size for t in tried] == [largest, largest + 1]


@given(largest=st.integers(100, 5000), percent=st.integers(-20, 20).filter(bool))
def test_a_prediction_that_is_off_costs_few_trials_where_memory_is_linear(largest: int, percent: int) -> None:
    predicted = largest + largest * percent // 100
    capacity = largest * BYTES_A_SAMPLE + BYTES_A_SAMPLE // 2
    tried = explore(StrategySettings("guided", predicted, capacity), lambda size: size <= largest)
    assert_proven(tried, largest)
    assert len(tried) <= 6


@given(largest=truths, step=st.integers(1, 500))
def test_a_ramp_climbs_in_equal_steps_until_the_first_failure(largest: int, step: int) -> None:
    largest = reachable("ramp", largest)
    tried = explore(StrategySettings("ramp", None, CAPACITY, step), lambda size: size <= largest)
    climbed = [t.batch_size for t in tried[: next(i for i, t in enumerate(tried) if not t.fits) + 1]]
    assert climbed == [1 + step * index for index in range(len(climbed))]


@given(predicted=st.integers(1, 5000))
def test_a_ramp_without_a_step_suits_the_prediction(predicted: int) -> None:
    tried = explore(StrategySettings("ramp", predicted, CAPACITY), lambda size: size <= predicted)
    before_failing = next(index for index, t in enumerate(tried) if not t.fits)
    assert before_failing <= 2 * RAMP_TRIALS


@given(largest=truths)
def test_doubling_doubles(largest: int) -> None:
    tried = explore(StrategySettings("double", None, CAPACITY), lambda size: size <= largest)
    upward = [t.batch_size for t in tried if t.fits or t.batch_size & (t.batch_size - 1) == 0]
    assert upward[: largest.bit_length() + 1] == [2**power for power in range(largest.bit_length() + 1)]


MOST_TRIALS: dict[Name, Callable[[int], int]] = {
    "guided": lambda largest: 2,
    "double": lambda largest: 2 * (largest + 2).bit_length() + 2,
    "binary": lambda largest: 2 * (largest + 2).bit_length() + 2,
    "ramp": lambda largest: 2 * RAMP_TRIALS + (largest + 2).bit_length(),
}
"""The trials of a search with a right prediction, by the largest batch size."""


@every_strategy
@given(largest=st.integers(0, 5000))
def test_a_right_prediction_bounds_the_trials(name: Name, largest: int) -> None:
    tried = explore(StrategySettings(name, largest, CAPACITY), lambda size: size <= largest)
    assert_proven(tried, largest)
    assert len(tried) <= MOST_TRIALS[name](largest)


@pytest.mark.parametrize("name", ["double", "binary"])
@given(largest=truths, predicted=predictions)
def test_halving_takes_a_logarithm_of_trials(name: Name, largest: int, predicted: int | None) -> None:
    tried = explore(StrategySettings(name, predicted, CAPACITY), lambda size: size <= largest)
    assert len(tried) <= 3 * max(largest + 2, predicted or 32).bit_length() + 2


@every_strategy
def test_a_failure_of_any_kind_bounds_the_search(name: Name) -> None:
    """A size that ran once is believed although a smaller one failed, as an unlucky process may."""
    unlucky = [Tried(10, fits=False), Tried(40, fits=True, peak_bytes=40), Tried(41, fits=False)]
    assert bracket(unlucky) == (40, 41)
    assert next_size(unlucky, StrategySettings(name, 10, CAPACITY)) is None


def test_nothing_tried_is_an_open_bracket() -> None:
    assert bracket([]) == (0, None)


@every_strategy
@given(largest=truths, predicted=predictions)
def test_a_floor_is_never_gone_below(name: Name, largest: int, predicted: int | None) -> None:
    largest = max(2, reachable(name, largest))
    tried = explore(StrategySettings(name, predicted, CAPACITY, floor=2), lambda size: size <= largest)
    assert min(t.batch_size for t in tried) >= 2
    assert bracket(tried, floor=2) == (largest, largest + 1)


def test_a_line_that_points_one_further_each_time_is_not_followed_for_long() -> None:
    """Reserved bytes that halve what is left with every sample: by the two largest sizes, one more fits, again and
    again."""
    capacity, largest = 1 << 60, 50
    settings = StrategySettings("guided", predicted=1, capacity_bytes=capacity)
    tried = explore(settings, lambda size: size <= largest, lambda size: capacity - (capacity >> size))
    assert_proven(tried, largest)
    assert [one.batch_size for one in tried[:7]] == [1, 2, 3, 4, 5, 6, 7]
    assert len(tried) <= 7 + 10, "from the eighth trial on it doubles its step, then halves the gap"


@every_strategy
@given(
    largest=truths, predicted=predictions, multiple=st.integers(1, 64), doubles=st.booleans(), ceiling=truths.map(abs)
)
def test_only_sizes_that_may_be_are_tried(
    name: Name, largest: int, predicted: int | None, multiple: int, doubles: bool, ceiling: int
) -> None:
    sizes, largest = Sizes(multiple, doubles), reachable(name, largest)
    allowed = {multiple << power for power in range(13)} if doubles else set(range(multiple, 10_100, multiple))
    settings = StrategySettings(name, predicted, CAPACITY, sizes=sizes)
    tried = explore(settings, lambda size: size <= largest)
    assert {one.batch_size for one in tried if one.batch_size < 10_000} <= allowed
    best = max((size for size in allowed if size <= largest), default=0)
    assert bracket(tried) == (best, min(size for size in allowed if size > best))
    limited = explore(replace(settings, ceiling=ceiling), lambda _: True)
    assert all(one.batch_size <= ceiling for one in limited)


@given(allows=st.sampled_from([1, 2, 3, 4, 5, 8, 16]), refused=st.lists(st.integers(2, 500), max_size=5))
def test_what_is_refused_makes_sizes_coarser(allows: int, refused: list[int]) -> None:
    """No size that was refused is left, or none is left out: then it is no matter of divisibility."""
    sizes = Sizes().without([size for size in refused if size % allows])
    assert sizes == Sizes() or all(sizes.at_most(size) != size for size in refused if size % allows)
    if allows in (1, 2, 4, 8):
        assert sizes.at_most(allows) == allows or sizes.multiple > allows


def searched(largest: int, allows: int, settings: StrategySettings) -> list[TrialDone]:
    """Run a search of a step that runs with multiples of `allows` only, and up to `largest` of them, to its end."""
    results: list[TrialDone] = []
    given = settings.sizes
    while (size := next_size(verdict.tried(results, given), settings)) is not None:
        outcome: Outcome = "error" if size % allows else "fit" if size <= largest else "oom"
        results.append(TrialDone(size, outcome, size * 1000, size * 1000, 0, {}, "", 1.0, 3))
        settings = replace(settings, floor=verdict.floor(results), sizes=verdict.sizes(results, given))
        if verdict.always_raises(results):
            break
    return results


@given(largest=st.integers(4, 5000), times=st.integers(2, 100))
def test_a_size_that_fails_otherwise_is_searched_below_between_what_was_traced_and_it(largest: int, times: int) -> None:
    settings, tried = StrategySettings("guided", largest * times, CAPACITY, traced_at=3), list[Tried]()
    while (size := next_size(tried, settings)) is not None:
        tried.append(Tried(size, size <= largest, size * 1000 if size <= largest else 0, raised=size > largest))
    assert_proven(tried, largest)
    assert len(tried) <= 3 + 2 * (largest * times).bit_length()


@every_strategy
@given(largest=truths, predicted=predictions, multiple=st.integers(1, 16), allows=st.sampled_from([1, 2, 4, 8]))
def test_a_verified_size_ran_and_the_next_that_may_be_was_out_of_memory(
    name: Name, largest: int, predicted: int | None, multiple: int, allows: int
) -> None:
    largest, given = reachable(name, largest), Sizes(multiple)
    results = searched(largest, allows, StrategySettings(name, predicted, CAPACITY, sizes=given))
    found = verdict.concluded(results, "simulated GPU", grows=True, given=given)
    outcomes = {one.batch_size: one.outcome for one in results}
    proven = outcomes.get(found.max_batch_size), outcomes.get(found.first_failing or 0)
    assert found.verified == (proven == ("fit", "oom"))
    if found.verified:
        assert verdict.sizes(results, given).after(found.max_batch_size) == found.first_failing


@pytest.mark.parametrize("multiple", [1, 3, 4096])
def test_the_largest_size_that_is_tried_at_all_has_none_after_it(multiple: int) -> None:
    given = Sizes(multiple)
    results = searched(1 << 30, 1, StrategySettings("double", None, CAPACITY, sizes=given))
    found = verdict.concluded(results, "simulated GPU", grows=True, given=given)
    largest = (1 << 24) // multiple * multiple
    assert (found.max_batch_size, found.first_failing, found.verified) == (largest, None, False)
    assert found.message == f"at least batch {largest:,} fits; larger batches are not tried"
