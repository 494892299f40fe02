"""The panels' contents, as data."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.memory import ALLOCATED_BUCKETS, GIB, MIB, Bucket, Unknown
from gpumem_tui.options.workload import WorkloadOptions
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.fragmentation import larger_batch
from gpumem_tui.search.runner import TrialFinished
from gpumem_tui.simulator.allocator.replay import AffineTrace
from gpumem_tui.tui.kit.figures import proportions
from gpumem_tui.tui.search.bar import bar_of
from gpumem_tui.tui.search.ledger import PEAK, RESERVED, USED, LedgerLine, ledger_view
from gpumem_tui.tui.search.panels import device_words, strategy_lines, verdict_view, workload_lines, workload_summary
from gpumem_tui.tui.search.plot import clipped, plot_view
from gpumem_tui.tui.search.state import SearchState, cancelling, held, reduce, selecting
from gpumem_tui.workload.spec import WorkloadSpec
from tests.scenes import search as scene
from tests.search.traces import lengths, traced

CONFIG = scene.config()
FOUND = scene.folded(CONFIG, scene.found(CONFIG))
MEASURED = replace(FOUND, config=replace(CONFIG, device=replace(CONFIG.device, simulated=False)))
FREE = "free of 80.0 GiB"


def rows(state: SearchState) -> dict[str, LedgerLine]:
    return {row.title: row for row in ledger_view(state).rows}


# Ledger


def test_the_rows_of_every_known_column_sum_to_the_device() -> None:
    table = rows(FOUND)
    parts = [bucket.title for bucket in ALLOCATED_BUCKETS]
    parts += ["allocator cache", "CUDA context", "driver reserved", FREE]
    for column in ("traced", "tried"):
        values = [getattr(table[title], column) for title in parts]
        assert sum(values) == CONFIG.device.gpu.total_bytes


def test_the_sums_are_sums() -> None:
    table = rows(FOUND)
    for column in ("traced", "tried"):
        peak = sum(getattr(table[bucket.title], column) for bucket in ALLOCATED_BUCKETS)
        assert getattr(table[PEAK], column) == peak
        assert getattr(table[RESERVED], column) == peak + getattr(table["allocator cache"], column)
        assert getattr(table[USED], column) == getattr(table[RESERVED], column) + getattr(table["CUDA context"], column)


def test_on_a_real_gpu_the_error_is_traced_less_measured_in_bytes_and_as_a_share() -> None:
    assert ledger_view(MEASURED).error_title == "traced error"
    row = rows(MEASURED)["temporary"]
    assert row.error == 12 * MIB
    assert isinstance(row.tried, int)
    assert row.error_share == pytest.approx(12 * MIB / row.tried)
    assert rows(MEASURED)["parameters"].error_share == 0.0


def test_on_a_simulated_gpu_the_formula_is_compared_because_the_trace_is_the_same_simulation() -> None:
    assert ledger_view(FOUND).error_title == "formula error"
    row = rows(FOUND)["activations"]
    assert isinstance(row.formula, int)
    assert isinstance(row.tried, int)
    assert row.error == row.formula - row.tried != 0
    assert isinstance(rows(FOUND)[USED].error, Unknown)


def test_where_only_the_same_simulation_can_be_compared_there_is_no_error() -> None:
    file = WorkloadSpec(WorkloadOptions().spec().recipe, file="train.py")
    view = ledger_view(replace(FOUND, config=replace(CONFIG, workload=file)))
    assert view.error_title == ""


def test_the_formula_counts_no_cache_and_says_so() -> None:
    view = ledger_view(FOUND)
    assert isinstance(rows(FOUND)["allocator cache"].formula, Unknown)
    assert "– formula: not counted by the closed form" in view.notes


def test_without_a_trace_the_error_is_the_formula_s() -> None:
    untraced = scene.predicted(CONFIG, traceable=False)
    state = replace(FOUND, predicted=untraced)
    view = ledger_view(state)
    assert view.error_title == "formula error"
    assert any(note.startswith("– traced: the step at batch size 5") for note in view.notes)
    row = rows(state)[PEAK]
    assert isinstance(row.formula, int)
    assert isinstance(row.tried, int)
    assert row.error == row.formula - row.tried


def test_a_trial_that_ran_out_of_memory_is_not_compared_with() -> None:
    view = ledger_view(selecting(FOUND, 3))
    assert view.batch_size == 41
    assert all(isinstance(row.error, Unknown) for row in view.rows)
    assert view.notes[-1] == f"trial 3 said: {scene.OUT_OF_MEMORY}"


def test_of_a_trial_that_did_not_fit_each_column_says_what_it_is() -> None:
    assert ledger_view(selecting(FOUND, 3)).captions == (
        "wanted 15.70 GiB, 14.06 GiB free",
        "Simulated: reached by then · Traced: what batch 41 needs",
    )
    assert ledger_view(FOUND).captions == ()
    untraced = replace(selecting(FOUND, 3), predicted=scene.predicted(CONFIG, traceable=False))
    assert ledger_view(untraced).captions[-1] == "Simulated: reached by then"


def test_before_any_trial_the_third_column_is_unknown_at_the_foretold_size() -> None:
    view = ledger_view(SearchState(CONFIG))
    assert view.trial is None
    assert view.batch_size == SearchState(CONFIG).predicted_size
    assert all(isinstance(row.tried, Unknown) for row in view.rows)
    assert "– simulated: no trial has ended yet" in view.notes


def test_a_trial_that_died_knows_nothing_rather_than_zero() -> None:
    dead = replace(
        scene.trial(CONFIG, 8), outcome="error", peak_allocated_bytes=0, peak_reserved_bytes=0, device_used_bytes=0,
        buckets=None, buckets_unknown="the trial process died",
    )  # fmt: skip
    state = reduce(scene.folded(CONFIG, scene.ended(CONFIG)), TrialFinished(1, dead))
    assert all(isinstance(row.tried, Unknown) for row in ledger_view(state).rows)
    assert "– simulated: the trial process died" in ledger_view(state).notes


def test_more_than_the_device_has_leaves_a_negative_rest() -> None:
    free = rows(selecting(FOUND, 3))[FREE]
    assert isinstance(free.traced, int)
    assert free.traced < 0


def test_only_a_simulated_device_is_headed_simulated() -> None:
    assert ledger_view(FOUND).tried_title == "Simulated"
    real = replace(CONFIG, device=replace(CONFIG.device, simulated=False))
    assert ledger_view(SearchState(real)).tried_title == "Measured"


# Bar


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=12), st.integers(0, 300))
def test_proportions_fill_the_bar_exactly(sizes: list[int], cells: int) -> None:
    given_cells = proportions(sizes, cells)
    assert sum(given_cells) == (cells if any(sizes) else 0)
    assert all(count >= 0 for count in given_cells)
    assert all(not count for count, size in zip(given_cells, sizes, strict=True) if not size)


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=12), st.integers(12, 300))
def test_what_is_there_is_seen_where_there_is_room(sizes: list[int], cells: int) -> None:
    assert min(proportions(sizes, cells)) >= 1


def test_the_live_bar_shows_the_running_trial_and_sums_to_the_device() -> None:
    title, segments = bar_of(scene.folded(CONFIG, scene.running(CONFIG)))
    assert title == "Trial 3 · batch 40 · step 2 of 3 · backward"
    assert sum(segments.values()) == CONFIG.device.gpu.total_bytes
    assert segments[Bucket.OTHER] == GIB
    assert segments[Bucket.CACHE] == 3 * GIB


def test_after_the_end_the_bar_is_the_shown_trial_s_peak() -> None:
    title, segments = bar_of(FOUND)
    assert title == "Peak of trial 2 · batch 40"
    assert segments[Bucket.ACTIVATIONS] == 40 * 12 * 100 * MIB


def test_a_peak_beyond_the_device_says_by_how_much() -> None:
    big = scene.config("llama-2-7b", "t4-16gb")
    title, segments = bar_of(SearchState(big))
    assert "more than the device has" in title
    assert segments[Bucket.FREE] == 0


# Plot


def test_every_outcome_has_its_mark_and_failures_lie_above_the_capacity() -> None:
    view = plot_view(FOUND)
    assert [x for x, _ in view.fits] == [25, 40]
    assert [x for x, _ in view.ooms] == [41]
    assert all(y <= view.capacity for _, y in view.fits)
    assert all(y > view.capacity for _, y in view.ooms)


def test_out_of_memory_is_marked_at_what_the_ledger_says_it_needs_above_what_cuda_can_give() -> None:
    ((_, height),) = plot_view(FOUND).ooms
    needed = rows(selecting(FOUND, 3))[USED].traced
    assert isinstance(needed, int)
    assert height == needed / GIB
    assert plot_view(FOUND).capacity == CONFIG.device.gpu.cuda_total_bytes / GIB
    untraced = replace(FOUND, predicted=scene.predicted(CONFIG, traceable=False))
    assert plot_view(untraced).ooms[0][1] > plot_view(untraced).capacity


def test_everything_drawn_lies_within_the_axes() -> None:
    for state in (FOUND, SearchState(CONFIG), SearchState(scene.config("llama-2-7b", "t4-16gb"))):
        view = plot_view(state)
        for x, y in (*view.formula, *view.traced, *view.fits, *view.ooms, *view.failures):
            assert 0 <= x <= view.x_max
            assert 0 <= y <= view.y_max


def test_the_capacity_is_the_cap_where_there_is_one() -> None:
    capped = replace(CONFIG, limit_bytes=10 * GIB)
    assert plot_view(SearchState(capped)).capacity == 10.0


def test_a_line_is_cut_where_it_leaves_the_chart() -> None:
    assert clipped([(1, 10.0), (3, 30.0), (5, 50.0)], 20.0) == ((1, 10.0), (2.0, 20.0))
    assert clipped([(1, 30.0)], 20.0) == ()


# Verdict


def test_the_headline_is_the_safe_size_and_only_what_ran_is_verified() -> None:
    view = verdict_view(FOUND)
    assert (view.badge, view.tone) == ("SAFE", "good")
    assert view.headline == (
        "Safe batch 39 on simulated NVIDIA A100 80 GB; batch 40 ran with 78.85 GiB of the device used, 41 was out of "
        "memory"
    )
    assert FOUND.verdict is not None
    proved = replace(FOUND, verdict=replace(FOUND.verdict, safe_batch_size=40))
    assert verdict_view(proved).badge == "VERIFIED IN SIMULATION"
    assert verdict_view(replace(proved, config=MEASURED.config)).badge == "VERIFIED"
    none = verdict_view(replace(FOUND, verdict=replace(FOUND.verdict, safe_batch_size=0)))
    assert (none.badge, none.tone) == ("NOT SAFE", "warning")
    assert view.room == "Batch 35 keeps 10 % (8.00 GiB) free"
    summary, gap = view.details
    assert summary == "3 trials, 1 out of memory"
    assert gap.startswith("The formula counts ")
    assert "at batch 35, the traced step " in gap


def test_a_larger_batch_at_no_cost_comes_right_after_the_headline() -> None:
    assert FOUND.verdict is not None
    two, three = (lengths(*(size * share for share in (3, 4, 5, 7))) for size in (2, 3))
    growing = traced(AffineTrace.fit((2, two), (3, three)), find_gpu("rtx-3090-24gb"))
    view = verdict_view(replace(FOUND, verdict=replace(FOUND.verdict, remedy=larger_batch(growing))))
    assert (verdict_view(FOUND).larger, view.headline) == ("", verdict_view(FOUND).headline)
    assert view.larger.startswith("Batch ")
    assert view.larger.endswith(" at no cost: export PYTORCH_ALLOC_CONF=expandable_segments:True")


def test_the_gap_between_the_predictions_is_explained_from_the_prediction_on() -> None:
    (gap,) = verdict_view(scene.folded(CONFIG, scene.ended(CONFIG))).details
    assert verdict_view(FOUND).details[-1] == gap
    untraced = scene.folded(CONFIG, [scene.predicted(CONFIG, traceable=False)])
    assert verdict_view(untraced).details == ()


def test_how_the_found_batch_reaches_the_wanted_one() -> None:
    wanted = scene.folded(replace(CONFIG, target_batch=64), scene.found(CONFIG))
    assert verdict_view(wanted).reach == (
        "2 accumulation steps of batch 39 make a global batch of 78 sequences, 79,872 tokens"
        "; batch 32 would make exactly 64"
    )
    assert verdict_view(FOUND).reach == ""
    assert ("target", "64 a step") in strategy_lines(wanted)
    assert workload_summary(wanted.config).endswith("guided · target 64")


def test_nothing_fits_names_the_obstacle_and_what_would_help() -> None:
    big = scene.config("llama-2-7b", "t4-16gb")
    view = verdict_view(scene.folded(big, scene.nothing_fits(big)))
    assert view.badge == "NOTHING FITS"
    assert view.headline.startswith("optimizer state alone needs 50.21 GiB")
    together, *single = view.advice
    assert len(single) == 2
    assert together.buys == "batch 3 fits"
    assert together.option.count("--") > 1
    assert all(one.buys.startswith("saves ") and one.buys.endswith("not enough alone") for one in single)
    for one in view.advice:
        assert ("needs more GPUs than the one that is searched" in one.cost) == ("--gpus" in one.option)


def test_the_cap_and_the_moment_of_the_traced_peak_are_named() -> None:
    capped = replace(CONFIG, limit_bytes=10 * GIB)
    assert device_words(capped)[0] == "SIMULATED NVIDIA A100 80 GB · cap 10.00 GiB"
    assert "traced peak: in backward of step 2" in ledger_view(FOUND).notes[1]


def test_pause_and_cancel_stand_before_what_runs() -> None:
    state = scene.folded(CONFIG, scene.running(CONFIG))
    assert verdict_view(state).headline.startswith("batch 25 fits, 64 does not")
    assert verdict_view(state, short=True).headline == "trial 3 · batch 40 · step 2 of 3 · backward"
    assert verdict_view(held(state, paused=True)).badge == "PAUSED"
    assert verdict_view(cancelling(held(state, paused=True))).badge == "CANCELLING"


def test_the_empty_screen_says_which_key_starts_and_where() -> None:
    view = verdict_view(SearchState(CONFIG), "the first free GPU")
    assert view.headline.startswith("s finds the largest batch of gpt2")
    assert view.details[-1] == "On the first free GPU."


# Workload


def test_the_workload_is_told_in_lines_and_in_one() -> None:
    lines = dict(workload_lines(CONFIG))
    assert lines["params"] == "124,439,808"
    assert lines["seq len"] == "1,024"
    assert workload_summary(CONFIG) == "gpt2 · 124 M params · seq 1,024 · fp32 · adamw · guided"


@pytest.mark.parametrize(("model", "line"), [("resnet-50", ("image", "224 px")), ("mlp", ("precision", "fp32"))])
def test_models_without_a_sequence_have_no_such_line(model: str, line: tuple[str, str]) -> None:
    lines = dict(workload_lines(scene.config(model)))
    assert line in lines.items()
    assert "seq len" not in lines


def test_a_workload_file_goes_by_its_name() -> None:
    recipe = WorkloadOptions().spec().recipe
    config = SearchConfig(WorkloadSpec(recipe, file="/home/someone/train.py:Big"), CONFIG.device)
    assert workload_summary(config) == "train.py:Big · guided"
    assert dict(workload_lines(config))["file"] == "train.py:Big"
    assert ledger_view(SearchState(config)).notes[0] == "– traced: known once a search starts"


def test_both_predictions_stand_beside_the_strategy() -> None:
    predicted = {"formula": "batch 43", "traced": "batch 35", "safe": "batch 39", "at most": "batch 40"}
    assert dict(strategy_lines(FOUND)) | predicted == dict(strategy_lines(FOUND))
