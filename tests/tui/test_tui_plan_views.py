"""The Plan screen's lists, read as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest

from gpumem_tui.catalog.loader import find_gpu, find_model, gpus, models
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import GIB, Range, Unknown
from gpumem_tui.plan.answers import Answer, answer, largest_by_gpu, traced_answer
from gpumem_tui.plan.command import CommandPlan, largest_of_command
from gpumem_tui.plan.command_state import CommandPlanState, begun, ended, planned_for, unanswered
from gpumem_tui.plan.curves import Curve, CurveMark, CurveSeries, curves, memory_over_step
from gpumem_tui.plan.goals import QUANTITIES
from gpumem_tui.plan.judgement import judgements
from gpumem_tui.plan.limits import limit
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.report import plan_markdown
from gpumem_tui.plan.speed import throughput
from gpumem_tui.plan.state import entered, opened
from gpumem_tui.plan.tracing import Pending, TraceFailed, TraceReady, TraceState
from gpumem_tui.search.prediction import Traced
from gpumem_tui.search.words import PHASE_WORDS
from gpumem_tui.step import Phase
from gpumem_tui.tui.kit.chart import nice_ceiling
from gpumem_tui.tui.kit.figures import compact_bytes, said, signed, span_width
from gpumem_tui.tui.plan.controls import control_rows
from gpumem_tui.tui.plan.curves import chart_rows, open_curve, value_rows
from gpumem_tui.tui.plan.explain import control_help, explanation
from gpumem_tui.tui.plan.lists import Compared, batch_rows, compare_rows, gpu_rows, limit_rows
from gpumem_tui.tui.plan.numbers import (
    PANES,
    fact_rows,
    header_row,
    ledger_rows,
    pane_places,
    pane_row,
    shown_command,
    shown_model,
    verdict_rows,
)
from gpumem_tui.tui.plan.panes import PaneRequest, judgement_rows, model_content
from tests.plan.commands import base_predicted, command_config
from tests.plan.plans import with_figures
from tests.scenes.plan import FITS, GPT2, LLAMA, RESNET, HandTracer, traced_of

NARROW, ROOMY = 46, 90


def traced(plan: Plan) -> TraceState:
    return HandTracer(lambda state: None).want(plan)


def requested(pane: str, plan: Plan) -> PaneRequest:
    return PaneRequest(pane, plan, ("other", FITS))


Drawn = TypeVar("Drawn")


def drawn(rows: Callable[..., Drawn], now: Answer, trace: TraceState, *rest: int | str) -> Drawn:
    """The drawn numbers of a plan and its trace."""
    return rows(shown_model(now, trace), *rest)


# Numbers


@pytest.mark.parametrize("plan", [GPT2, LLAMA, FITS, RESNET], ids=["gpt2", "llama", "fits", "resnet"])
def test_each_column_sums_to_the_gpus_memory(plan: Plan) -> None:
    known = traced(plan)
    assert isinstance(known, TraceReady)
    total = plan.gpu.total_bytes / GIB
    sums = [0.0, 0.0]
    for line in said(drawn(ledger_rows, answer(plan), known, NARROW))[1:]:
        if not line.strip().startswith("="):
            figures = re.findall(r"(−?[\d.]+)( [MK]iB| B)?", line.split("%")[-1])[:2]
            columns = [0, 1] if "–" not in line else ([0] if line.strip().startswith("headroom") else [1])
            for column, (number, unit) in zip(columns, figures, strict=False):
                scale = {"": 1, " MiB": 1024, " KiB": 1024**2, " B": 1024**3}[unit]
                sums[column] += float(number.replace("−", "-")) / scale
    assert sums[0] == pytest.approx(total, abs=0.05)
    assert sums[1] == pytest.approx(total, abs=0.05)


def test_the_verdict_says_by_how_much() -> None:
    now = answer(LLAMA)
    lines = said(drawn(verdict_rows, now, Pending(LLAMA), ROOMY))
    assert (
        lines[0]
        == f"formula  ✗ too large by {-now.spare_bytes / GIB:.2f} GiB of {now.usable_bytes / GIB:.2f} GiB usable"
    )
    assert "tracing one step" in lines[2]
    assert (
        "tracing one step without a GPU, 4 s; x ends it"
        in said(drawn(verdict_rows, now, Pending(LLAMA), ROOMY, "4 s"))[2]
    )
    assert "– no torch" in said(drawn(verdict_rows, now, TraceFailed(LLAMA, "no torch"), ROOMY))[2]
    assert "✓ fits" in said(drawn(verdict_rows, answer(GPT2), traced(GPT2), NARROW))[2]


def test_the_formula_has_no_verdict_beside_a_trace() -> None:
    for plan in (GPT2, LLAMA):
        formula = said(drawn(verdict_rows, answer(plan), traced(plan), ROOMY))[0]
        assert formula.startswith(f"formula  ≈ {answer(plan).prediction.needed_bytes / GIB:.2f} GiB needed of ")
        assert not re.search("[✓✗]|fits|too large", formula)


def test_what_may_fit_is_neither_green_nor_red() -> None:
    exact = traced_of(GPT2)
    unsure = replace(exact, ready=replace(exact.ready, context_range=Range(GIB // 4, 70 * GIB)))
    known = TraceReady(GPT2, traced_answer(GPT2, unsure), unsure)
    assert re.fullmatch(
        r"traced   \? may fit · [\d.]+ GiB missing to [\d.]+ GiB left",
        said(drawn(verdict_rows, answer(GPT2), known, 80))[2],
    )
    shown = drawn(header_row, answer(GPT2), known, "12:00", 80)
    assert "? may fit  12:00" in shown.text
    largest = next(
        line for line in said(drawn(fact_rows, answer(GPT2), known, ROOMY)) if line.startswith("largest batch")
    )
    assert re.search(r"\d traced, formula ≈\d+, 10 % free$", largest)


@pytest.mark.parametrize("width", [1, 7, NARROW, ROOMY])
@pytest.mark.parametrize("plan", [GPT2, LLAMA], ids=["fits", "too large"])
def test_both_bars_fill_the_width_and_show_what_may_be_used(plan: Plan, width: int) -> None:
    _, formula, _, by_trace = drawn(verdict_rows, answer(plan), traced(plan), width)
    assert len(formula.text) == len(by_trace.text) == width
    assert "│" in formula.text
    assert ("│" in by_trace.text) == (plan is LLAMA)


def test_a_missing_trace_is_a_dash_and_one_on_its_way_an_ellipsis() -> None:
    now = answer(GPT2)
    waiting, missing = (said(drawn(ledger_rows, now, s, ROOMY)) for s in (Pending(GPT2), TraceFailed(GPT2, "why")))
    assert sum("…" in line for line in waiting) == 12
    assert not any("…" in line for line in missing)
    assert sum("–" in line for line in missing) == 13


def test_the_facts_say_how_a_step_is_made_up() -> None:
    plan = replace(GPT2, batch_size=4, recipe=Recipe(gpus=8), target_batch=256)  # the documents' own example
    lines = said(drawn(fact_rows, answer(plan), Pending(plan), ROOMY))
    assert lines[1].split(maxsplit=2)[2] == "8 passes × 4 × 8 GPUs"
    assert lines[2].endswith("256 samples, 262 k tokens")
    odd = said(drawn(fact_rows, answer(replace(plan, target_batch=250)), Pending(plan), ROOMY))
    assert "256 samples for 250" in odd[2]


def test_a_trace_of_one_batch_size_alone_says_so_and_why() -> None:
    ready = traced(GPT2)
    assert isinstance(ready, TraceReady)
    alone = replace(
        ready, answer=with_figures(ready.answer, max_batch_size=Unknown("the step at batch size 5 is another"))
    )
    for width in (NARROW, ROOMY):
        text = " ".join(" ".join(said(drawn(fact_rows, answer(GPT2), alone, width))).split())
        assert f"≈{answer(GPT2).max_batch_size} by formula" in text
        assert "traced at batch 8 alone: the step at batch size 5 is another" in text


def test_what_is_in_the_way_by_formula_is_not_where_the_trace_fits() -> None:
    """Llama 3 8B in bf16 with full recompute over four cards: 21.79 GiB with pieces by formula, 19.62 traced."""
    close = replace(LLAMA, recipe=Recipe("bf16", recompute="full", sharding="zero3", gpus=4), headroom=0.1)
    now = answer(close)
    assert now.obstacle is not None
    small = traced(GPT2)
    assert isinstance(small, TraceReady)
    assert small.answer.fits
    assert now.obstacle not in " ".join(said(drawn(fact_rows, now, replace(small, plan=close), 200)))
    assert now.obstacle in " ".join(said(drawn(fact_rows, now, Pending(close), 200)))


def test_what_is_in_the_way_is_named() -> None:
    text = " ".join(said(drawn(fact_rows, answer(LLAMA), Pending(LLAMA), ROOMY)))
    assert "activations alone needs 30.05 GiB" in text


@pytest.mark.parametrize("width", [34, NARROW, ROOMY])
def test_a_traced_peak_of_another_phase_than_the_formula_s_is_said_beside_the_numbers(width: int) -> None:
    """They agree wherever both have values; where the trace peaks elsewhere, the line notes this."""
    whole = replace(LLAMA, recipe=Recipe(gpus=4))
    first_step = traced_of(whole, steps=1)
    found_here = traced_answer(whole, first_step)
    assert "two moments" not in plan_markdown(whole, first_step)
    elsewhere = with_figures(found_here, peak_phase=Phase.BACKWARD)
    rows = drawn(fact_rows, answer(whole), TraceReady(whole, elsewhere, first_step), width)
    assert f"differ traced peak {PHASE_WORDS[Phase.BACKWARD]}" in " ".join(" ".join(said(rows)).split())
    assert "moment" in [row.key for row in rows]
    found = explanation(whole, "moment")
    assert found is not None
    assert "two moments" in found[1][0][0][0]
    assert "moment" not in [row.key for row in drawn(fact_rows, answer(GPT2), traced(GPT2), width)]


def test_one_sample_is_one() -> None:
    one = Plan(find_model("gpt2-xl"), Recipe(), find_gpu("rtx-4090-24gb"))
    text = " ".join(said(model_content(requested("techniques", one), HandTracer(print)).view(ROOMY, "")))
    assert "1 pass × 1 = 1 sample a step" in text


def test_a_command_says_why_its_trace_tells_nothing_of_a_gpu() -> None:
    config = command_config()
    state = CommandPlanState(config, 8, CommandPlan(config, 8, base_predicted(config)))
    assert "working it out" in said(verdict_rows(shown_command(state, 0), 80))[0]
    there = find_gpu("t4-16gb")
    failed = unanswered(planned_for(state, there), "NotAffine: of no form", there)
    shown = shown_command(failed, 0)
    assert "– NotAffine: of no form" in said(verdict_rows(shown, 80))[0]
    assert "Formula" not in said(ledger_rows(shown, 80))[0]
    assert ended(begun(failed)).failure == failed.failure, "further runs do not answer for the GPU"
    elsewhere = planned_for(failed, find_gpu("a100-80gb"))
    assert unanswered(elsewhere, "NotAffine: of no form", there) is elsewhere


# Controls


def test_the_problem_stands_under_its_control() -> None:
    state = entered(opened(GPT2), "heads", 7)
    lines = control_rows(state, 32, 20, selected="heads")
    index = next(number for number, line in enumerate(lines) if line.key == "heads")
    assert "7 *" in lines[index].text
    assert "! 7 heads do not divide" in lines[index + 1].text
    assert not lines[index + 1].key


def test_groups_show_where_there_is_room() -> None:
    state = opened(GPT2)
    assert "Hardware" in said(control_rows(state, 32, 40))
    compact = control_rows(state, 32, 21)
    assert all(line.key for line in compact), "controls alone, which scroll"


def test_remarks_stand_beside_what_is_odd() -> None:
    odd = opened(replace(GPT2, recipe=Recipe(sharding="zero3")))
    assert any("nothing to shard over" in line for line in said(control_rows(odd, 60, 40)))


def test_what_is_typed_shows_with_its_caret() -> None:
    lines = control_rows(opened(GPT2), 32, 20, selected="batch_size", typed="12")
    assert any("12▏" in line.text for line in lines)


# Panes


_ONE_OF_EACH_FAMILY = {shape.family: name for name, shape in models().items()}.values()


@pytest.mark.parametrize(
    "model",
    [pytest.param(name, marks=[] if name in _ONE_OF_EACH_FAMILY else pytest.mark.slow) for name in models()],
)
@pytest.mark.parametrize("pane", [pane for pane in PANES if pane != "numbers"])
def test_every_pane_of_every_model_keeps_to_its_width(model: str, pane: str) -> None:
    plan = Plan(find_model(model), Recipe("amp-bf16"), find_gpu("t4-16gb"), batch_size=2)
    content = model_content(requested(pane, plan), HandTracer(print))
    for width in (NARROW, ROOMY):
        keys = [row.key for row in content.view(width, "") if row.key]
        for selected in keys or [""]:
            rows = content.view(width, selected)
            assert rows
            assert not [row.text for row in rows if len(row.text) > width]


def test_the_cheapest_combination_says_what_it_comes_to() -> None:
    content = model_content(requested("techniques", LLAMA), HandTracer(print))
    lines = said(content.view(ROOMY, ""))
    assert lines[0] == "Cheapest combination that fits"
    assert lines[2].strip().startswith("16 passes × 1 × 4 GPUs = 64 samples a step; needs ≈")
    assert content.choice("combination") is not None
    assert content.choice("no such") is None


def test_the_cost_of_the_chosen_technique_shows_at_80_columns() -> None:
    content = model_content(requested("techniques", GPT2), HandTracer(print))
    assert not any("costs:" in line for line in said(content.view(NARROW, "")))
    chosen = said(content.view(NARROW, "full-recompute"))
    assert any("30 to 40 % more time" in line for line in chosen)


def test_comparing_shows_only_the_controls_that_differ() -> None:
    this, other = answer(LLAMA), answer(FITS)
    lines = said(compare_rows(Compared(this), Compared(other), "a long name of a plan", NARROW))
    settings = lines[lines.index("") + 2 : lines.index("GiB by formula") - 1]
    assert [line.split() for line in settings] == [["precision", "amp-bf16", "bf16"], ["recompute", "none", "full"]]
    peak = next(line for line in lines if "= peak" in line)
    assert peak.split()[2:] == [compact_bytes(n) for n in (this.peak_bytes, other.peak_bytes)] + [
        signed(this.peak_bytes - other.peak_bytes)
    ]
    assert "neither plan has been traced" in lines
    same = said(compare_rows(Compared(this), Compared(this), "x", NARROW))
    assert "all controls are equal" in same
    assert "+" not in "".join(same)


@pytest.mark.parametrize("width", [NARROW, ROOMY])
def test_two_plans_are_compared_by_trace_too(width: int) -> None:
    larger = replace(GPT2, batch_size=16)
    mine, theirs = (
        Compared(answer(plan), found.answer) for plan in (GPT2, larger) if isinstance(found := traced(plan), TraceReady)
    )
    assert mine.traced is not None
    assert theirs.traced is not None
    lines = said(compare_rows(mine, theirs, "larger", width))
    by_trace = lines[lines.index("GiB by trace") + 1 :]
    used = [found.peak_allocated_bytes for found in (mine.traced, theirs.traced)]
    assert by_trace[0].split()[-3:] == [*map(compact_bytes, used), signed(used[0] - used[1])]
    assert by_trace[2].split()[:2] == ["largest", "batch"]
    half = said(compare_rows(mine, Compared(answer(larger)), "larger", width))
    assert "larger has not been traced" in half
    assert half[half.index("GiB by trace") + 1].split()[-1] == "–"


def test_throughput_is_called_a_model() -> None:
    modelled = said(judgement_rows(judgements(GPT2), throughput(GPT2), ROOMY))
    assert any("roofline, not measured" in line for line in modelled)


def test_batch_norm_under_16_is_a_warning() -> None:
    small = said(judgement_rows(judgements(RESNET), throughput(RESNET), ROOMY))
    assert any(line.startswith("! Batch norm") for line in small)
    enough = replace(RESNET, batch_size=16)
    lines = said(judgement_rows(judgements(enough), throughput(enough), ROOMY))
    assert not any(line.startswith("! Batch norm") for line in lines)


# Charts


def test_a_line_begins_and_ends_where_its_points_do() -> None:
    curve = Curve(
        "k", "title", "x", "y", (CurveSeries("up", ((0, 0), (10, 10))), CurveSeries("flat", ((0, 5), (10, 5)))), ""
    )
    rows = said(chart_rows(curve, 50, 9))
    plot = rows[1:10]
    assert plot[0].startswith("     10 ┤")
    assert plot[0].endswith("up")
    assert plot[4].startswith("      5 ┤")
    assert plot[4].endswith("flat")
    assert plot[8].startswith("      0 ┤⣀")


@pytest.mark.parametrize("most", [1, 2, 3, 7, 15, 23, 45, 107])
def test_an_axis_of_counts_has_whole_numbers_only(most: int) -> None:
    curve = Curve("k", "title", "x", "largest batch", (CurveSeries("formula", ((0, most), (10, 0))),), "")
    ticks = [line.split("┤")[0].strip() for line in said(chart_rows(curve, 50, 9)) if "┤" in line]
    assert len(ticks) == 3
    assert int(ticks[0]) >= most
    assert int(ticks[0]) == 2 * int(ticks[1])


def test_where_nothing_fits_one_line_says_so_in_place_of_a_chart() -> None:
    whole = replace(LLAMA, recipe=Recipe(gpus=4))
    by_length, _, by_gpu, activations = curves(whole)
    assert said(open_curve(by_length, ROOMY)) == ["by formula, nothing fits at any sequence length from 128 upward", ""]
    assert any("┤" in line for line in said(open_curve(by_gpu, ROOMY)))
    assert any("┤" in line for line in said(open_curve(activations, ROOMY)))
    for width in range(-2, 9):
        assert open_curve(activations, width), "without room too"


def test_doublings_are_equally_far_apart_on_a_logarithmic_axis() -> None:
    points = tuple((float(2**power), 1.0) for power in range(5))
    curve = Curve("k", "t", "x", "y", (CurveSeries("s", points),), "", log_x=True)
    labels = said(chart_rows(curve, 60, 9))[11]
    places = [labels.index(number) + (len(number) - 1) / 2 for number in (" 2 ", " 4 ", " 8 ")]
    assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=1)


def test_parts_of_a_sum_lie_on_one_another() -> None:
    series = (CurveSeries("parameters", ((0, 5), (1, 5))), CurveSeries("activations", ((0, 0), (1, 5))))
    curve = Curve(
        "k", "t", "x", "GiB", series, "", stacked=True, marks=(CurveMark(0, "forward"), CurveMark(1, "backward"))
    )
    rows = said(chart_rows(curve, 40, 9))
    plot = [row.split("┤")[-1].split("│")[-1] for row in rows[1:10]]
    assert plot[8].startswith("█" * 20)
    assert [line[-1:] for line in plot][:4] == ["▚"] * 4
    assert "forward" in rows[11]
    assert "parameters" in rows[12]


def test_optimizer_state_appears_at_the_first_step_and_stays() -> None:
    for curve in (memory_over_step(GPT2), memory_over_step(GPT2, _traced_of(GPT2))):
        state = next(series for series in curve.series if series.name == "optimizer state")
        heights = [y for _, y in state.points]
        first = next(index for index, y in enumerate(heights) if y > 0)
        assert first > 0
        assert min(heights[first:]) > 0
        assert "▒" in "".join(said(chart_rows(curve, NARROW, 9)))


def _traced_of(plan: Plan) -> Traced:
    known = traced(plan)
    assert isinstance(known, TraceReady)
    return known.traced


def test_every_curve_has_its_numbers_and_the_plans_among_them() -> None:
    for curve in curves(LLAMA):
        lines = said(value_rows(curve, NARROW))
        assert len(lines) >= 3
        assert any("←" in line for line in lines), curve.key


@pytest.mark.parametrize(
    ("value", "ceiling"), [(0, 1), (0.9, 1), (1.2, 1.5), (23, 25), (100, 100), (101, 150), (999, 1000)]
)
def test_axes_end_at_round_numbers(value: float, ceiling: float) -> None:
    assert nice_ceiling(value) == ceiling


# Header and help


@pytest.mark.parametrize("width", [20, 47, 60, 100, 200])
def test_the_header_keeps_the_verdict_whatever_the_width(width: int) -> None:
    line = drawn(header_row, answer(LLAMA), traced(LLAMA), "12:00", width)
    assert "✗ too large" in line.text
    if width >= 60:
        assert span_width(list(line.spans)) == width
        assert LLAMA.shape.name in line.text


@pytest.mark.parametrize("width", [80, 120])
def test_the_header_says_that_a_trace_is_on_its_way(width: int) -> None:
    waiting, formula = (
        drawn(header_row, answer(LLAMA), state, "12:00", width).text
        for state in (Pending(LLAMA), TraceFailed(LLAMA, "formula only"))
    )
    assert "✗ too large, tracing …" in waiting
    assert waiting.replace(", tracing …", " by formula") == formula, "nothing moves when the trace is there"


@pytest.mark.parametrize("width", [30, 36, 47, 80])
def test_panes_are_where_their_names_are(width: int) -> None:
    panes = list(PANES)
    text = pane_row(panes, "numbers", width).text
    assert len(text) <= width
    for pane, first, after in pane_places(panes, width):
        assert pane.startswith(text[first:after])
        assert PANES[pane] in text[first:after]


@pytest.mark.parametrize("model", ["gpt2", "llama-3-8b", "bert-base", "vit-b-16", "resnet-50", "mlp"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_every_row_of_the_formula_is_explained_on_the_screen(model: str, recompute: str) -> None:
    recipe = Recipe("amp-fp16", recompute=recompute, attention="math", sharding="zero3", gpus=4)  # type: ignore[arg-type]
    plan = Plan(find_model(model), recipe, find_gpu("v100-16gb"), batch_size=4)
    rows = answer(plan).prediction.rows
    shown = {row.key for row in drawn(ledger_rows, answer(plan), traced(GPT2), NARROW)}
    for row in rows:
        assert row.bucket.value in shown
        found = explanation(plan, row.bucket.value)
        assert found is not None
        text = "\n".join("".join(part for part, _ in line) for line in found[1])
        assert row.expression in text
        assert row.source in text


def test_a_control_explains_its_values() -> None:
    title, lines = control_help(opened(GPT2), "recompute")
    text = "\n".join("".join(part for part, _ in line) for line in lines)
    assert title == "recompute"
    assert "keep every activation" in text
    assert "from 1 to 1,000,000" in "".join(
        part for line in control_help(opened(GPT2), "batch_size")[1] for part, _ in line
    )


def test_every_number_that_can_be_solved_for_is_named() -> None:
    found = tuple(limit(quantity, GPT2, lambda _: Unknown("not traced")) for quantity in QUANTITIES)
    names = [line.spans[1][0].strip() for line in limit_rows(found, GPT2, ROOMY, "") if line.key]
    assert names == ["Largest micro-batch", "Longest sequence", "Fewest GPUs", "Fewest passes of a step"]


def test_every_gpu_has_a_line_and_the_chosen_one_says_what_it_lacks() -> None:
    rows = gpu_rows(largest_by_gpu(replace(GPT2, recipe=Recipe("bf16")), None), GPT2, ROOMY, "t4-16gb")
    assert {row.key for row in rows if row.key} == set(gpus())
    assert "has no bfloat16 arithmetic" in " ".join(said(rows))


def test_a_gpu_of_a_command_says_what_its_tilde_stands_for_where_one_batch_is_known() -> None:
    config = command_config()
    plan = CommandPlan(config, 8, base_predicted(config))
    found = [replace(one, traced=Unknown("the command has no {batch}")) for one in largest_of_command(plan)]
    text = " ".join(said(gpu_rows(found, plan, ROOMY, "t4-16gb")))
    assert "from the trace of another kind of GPU" in text
    assert "the command has no {batch}" in text


def test_the_planned_batch_stands_out_among_the_others() -> None:
    config = command_config()
    found = CommandPlan(config, 8, base_predicted(config)).answer().batches()
    rows = batch_rows(found, 8, "", "", ROOMY)
    assert len(found) > 3
    assert [text.strip() for line in rows[2:] for text, style in line.spans if style == "bold $primary"] == ["8"]
