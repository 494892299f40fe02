"""Controls, numbers and the trace of the Plan screen."""

from __future__ import annotations

import re
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
from textual.events import MouseScrollDown, MouseScrollUp

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.errors import OptionError
from gpumem_tui.memory import Bucket
from gpumem_tui.options.configuration import Options, configure
from gpumem_tui.plan.answers import answer
from gpumem_tui.plan.combination import Techniques
from gpumem_tui.plan.curves import curves
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.techniques import techniques
from gpumem_tui.plan.tracing import BackgroundTracer, Pending, TraceFailed, TraceReady
from gpumem_tui.run.control import Control
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.predicting import Predicted
from gpumem_tui.search.prediction import Formula, Prediction
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.kit.dialogs import PickScreen
from gpumem_tui.tui.kit.figures import compact_bytes
from gpumem_tui.tui.kit.help import HelpScreen
from gpumem_tui.tui.plan.controls import PlanControls
from gpumem_tui.tui.plan.planned import of_model
from gpumem_tui.tui.plan.screen import PlanScreen
from gpumem_tui.tui.start import open_plan
from gpumem_tui.workload.spec import WorkloadSpec
from tests.scenes import plan as plan_scene
from tests.scenes.pictures import SIZES, until
from tests.scenes.plan import FITS, GPT2, LLAMA, choose, controls, plan_now, text_of
from tests.scenes.search import READY
from tests.waiting import DEADLINE_S

MEDIUM, SMALL = SIZES["120x40"], SIZES["80x24"]


# Controls


async def test_arrows_choose_and_change_and_the_numbers_follow() -> None:
    async with plan_scene.app(GPT2).run_test(size=MEDIUM) as pilot:
        await plan_scene.settled(pilot)
        await choose(pilot, "batch_size")
        await pilot.press("right", "right")
        assert plan_now(pilot).batch_size == 10
        verdict, again = plan_scene.plan_screen(pilot.app).parting_lines()
        assert verdict.startswith("Batch 10 fits on NVIDIA A100 80 GB: ")
        assert again.startswith("This plan again: gpumem-tui plan --model gpt2 --batch-size 10 ")
        await pilot.press("shift+right")
        assert plan_now(pilot).batch_size == 16
        await pilot.press("shift+left", "left")
        assert plan_now(pilot).batch_size == 7
        expected = answer(replace(GPT2, batch_size=7)).breakdown[Bucket.ACTIVATIONS]
        assert f"activations{compact_bytes(expected):>14}" in text_of(pilot, "#ledger")
        assert "10 passes × 7" in text_of(pilot, "#facts")


async def test_every_digit_counts_at_once() -> None:
    async with plan_scene.app(replace(GPT2, target_batch=None)).run_test(size=MEDIUM) as pilot:
        await plan_scene.settled(pilot)
        await choose(pilot, "batch_size")
        for digit, batch_size in (("1", 1), ("2", 12), ("8", 128)):
            await pilot.press(digit)
            assert plan_now(pilot).batch_size == batch_size
        await pilot.press("backspace")
        assert plan_now(pilot).batch_size == 12
        await pilot.press("enter", "u")
        assert plan_now(pilot).batch_size == 8
        await pilot.press("ctrl+r")
        assert plan_now(pilot).batch_size == 12


async def test_a_digit_picks_the_choice_at_its_place_or_says_why_not() -> None:
    async with plan_scene.app(GPT2).run_test(size=MEDIUM) as pilot:
        await plan_scene.settled(pilot)
        await choose(pilot, "recompute")
        await pilot.press("3")
        assert plan_now(pilot).recipe.recompute == "full"
        await pilot.press("4")
        assert plan_now(pilot).recipe.recompute == "full"
        assert "4 picks nothing: 1 to 3 are" in text_of(pilot, "#controls")
        await choose(pilot, "gpu")
        await pilot.press("1")
        assert plan_now(pilot).gpu == GPT2.gpu
        assert "too many for a digit" in " ".join(text_of(pilot, "#controls").split())


async def test_escape_leaves_the_number_that_was() -> None:
    async with plan_scene.app(GPT2).run_test(size=MEDIUM) as pilot:
        await plan_scene.settled(pilot)
        await choose(pilot, "layers")
        await pilot.press("right", "4", "0", "escape")
        assert plan_now(pilot).shape.layers == 13


async def test_what_cannot_be_is_explained_and_the_last_good_numbers_stay() -> None:
    async with plan_scene.app(GPT2).run_test(size=MEDIUM) as pilot:
        await plan_scene.settled(pilot)
        before = text_of(pilot, "#ledger")
        await choose(pilot, "heads")
        await pilot.press("7")
        lines = [row.text for row in controls(pilot).rows]
        heads = next(index for index, line in enumerate(lines) if line.startswith("heads"))
        assert "7 heads do not divide" in lines[heads + 1]
        assert plan_now(pilot) == GPT2
        assert text_of(pilot, "#ledger") == before
        assert "last plan that can be" in text_of(pilot, "#plan-header")
        await pilot.press("backspace", "8")
        assert plan_now(pilot).shape.heads == 8
        assert "last plan" not in text_of(pilot, "#plan-header")


async def test_undo_takes_the_typed_number_out_of_its_control() -> None:
    async with plan_scene.app(GPT2).run_test(size=MEDIUM) as pilot:
        await plan_scene.settled(pilot)
        await choose(pilot, "batch_size")
        await pilot.press("3", "2")
        assert plan_now(pilot).batch_size == 32
        await pilot.press("u")
        await until(pilot, lambda: plan_now(pilot) == GPT2)
        line = next(row.text for row in controls(pilot).rows if row.key == "batch_size")
        assert line.split()[1:] == ["←", "8", "→"]


@pytest.mark.parametrize(
    ("key", "digits", "said"),
    [
        ("seq_len", "1025", "1024 positions"),
        ("target_batch", "7", "less than one pass of 8"),
        ("gpus", "0", "give at least 1"),
    ],
)
async def test_more_that_cannot_be(key: str, digits: str, said: str) -> None:
    async with plan_scene.app(replace(GPT2, target_batch=None)).run_test(size=MEDIUM) as pilot:
        await plan_scene.settled(pilot)
        await choose(pilot, key)
        await pilot.press(*digits)
        assert said in text_of(pilot, "#controls").replace("\n ", "")
        good = plan_now(pilot)
        assert good.target_batch is None
        assert good.shape.seq_len <= 1024
        assert good.recipe.gpus == 1


async def test_a_model_is_picked_by_filtering() -> None:
    async with plan_scene.app(GPT2).run_test(size=SMALL) as pilot:
        await plan_scene.settled(pilot)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(pilot.app.screen, PickScreen))
        await pilot.press(*"8b llama", "down", "up", "enter")
        await until(pilot, lambda: plan_now(pilot).shape == find_model("llama-3-8b"))
        assert "kv heads" in text_of(pilot, "#controls")
        await pilot.press("u")
        assert plan_now(pilot) == GPT2


async def test_a_filter_without_a_match_picks_nothing() -> None:
    async with plan_scene.app(GPT2).run_test(size=SMALL) as pilot:
        await plan_scene.settled(pilot)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(pilot.app.screen, PickScreen))
        await pilot.press(*"none such", "down", "enter")
        assert isinstance(pilot.app.screen, PickScreen)
        await pilot.press("escape")
        assert plan_now(pilot) == GPT2


async def test_the_mouse_chooses_changes_and_turns() -> None:
    async with plan_scene.app(GPT2).run_test(size=SMALL) as pilot:
        await plan_scene.settled(pilot)
        lines = [row.key for row in controls(pilot).rows]
        y = lines.index("batch_size") + 1  # below the border
        await pilot.click(PlanControls, offset=(5, y))
        assert controls(pilot).key == "batch_size"
        await pilot.click(PlanControls, offset=(29, y))
        assert plan_now(pilot).batch_size == 9
        await pilot.click(PlanControls, offset=(13, y))
        assert plan_now(pilot).batch_size == 8
        for wheel, batch_size in ((MouseScrollUp, 9), (MouseScrollDown, 8)):
            region = controls(pilot).region
            turned = wheel(controls(pilot), 5, y, 0, 0, 0, False, False, False, region.x + 5, region.y + y)
            controls(pilot).post_message(turned)
            await until(pilot, lambda wanted=batch_size: plan_now(pilot).batch_size == wanted)  # type: ignore[misc]


async def test_digits_are_the_programs_outside_the_controls() -> None:
    def search() -> PlanScreen:
        return PlanScreen(of_model(FITS, plan_scene.HandTracer))

    def plan() -> PlanScreen:
        return PlanScreen(of_model(GPT2, plan_scene.HandTracer))

    app = GpuMemApp({"search": search, "plan": plan}, "plan")
    async with app.run_test(size=MEDIUM) as pilot:
        await plan_scene.settled(pilot)
        await choose(pilot, "batch_size")
        await pilot.press("2")
        assert pilot.app.screen is app.main_screen("plan")
        assert plan_now(pilot).batch_size == 2
        await pilot.press("tab", "2")
        await until(pilot, lambda: pilot.app.screen is not app.main_screen("plan"))


# The trace


async def test_the_traced_column_is_visibly_pending_and_then_there() -> None:
    async with plan_scene.app(GPT2, holds=True).run_test(size=MEDIUM) as pilot:
        tracer = plan_scene.tracer(pilot.app)
        await pilot.pause()
        assert "tracing one step" in text_of(pilot, "#verdict")
        assert text_of(pilot, "#ledger").count("…") >= 10
        await choose(pilot, "batch_size")
        await pilot.press("right")
        tracer.release(GPT2)  # overtaken: the plan is another by now
        await pilot.pause()
        assert isinstance(plan_scene.model(pilot.app).trace, Pending)
        tracer.release(plan_now(pilot))
        await until(pilot, lambda: "…" not in text_of(pilot, "#ledger"))
        assert isinstance(plan_scene.model(pilot.app).trace, TraceReady)
        assert "left" in text_of(pilot, "#verdict")


async def test_why_there_is_no_trace_stands_where_it_would_be() -> None:
    async with plan_scene.app(GPT2, holds=True).run_test(size=MEDIUM) as pilot:
        plan_scene.tracer(pilot.app).fail(GPT2, "no torch in this Python: give --python")
        await until(pilot, lambda: isinstance(plan_scene.model(pilot.app).trace, TraceFailed))
        assert "– no torch in this Python: give --python" in text_of(pilot, "#verdict")


async def test_a_trace_that_failed_is_tried_again() -> None:
    async with plan_scene.app(GPT2, holds=True).run_test(size=MEDIUM) as pilot:
        tracer = plan_scene.tracer(pilot.app)
        tracer.fail(GPT2, "tracing failed: killed by SIGKILL")
        await until(pilot, lambda: "SIGKILL" in text_of(pilot, "#verdict"))
        await pilot.press("r")
        assert "tracing one step" in text_of(pilot, "#verdict")
        tracer.release(GPT2)
        await until(pilot, lambda: isinstance(plan_scene.model(pilot.app).trace, TraceReady))


@pytest.mark.slow
async def test_escape_goes_back_to_the_controls_x_ends_the_trace_and_r_makes_it() -> None:
    async with plan_scene.app(GPT2, holds=True).run_test(size=MEDIUM) as pilot:
        await pilot.press("t", "escape", "escape")
        assert isinstance(plan_scene.model(pilot.app).trace, Pending)
        assert controls(pilot).has_focus
        await pilot.press("x")
        assert "– the trace was ended; r traces again" in text_of(pilot, "#verdict")
        await pilot.press("r")
        assert "tracing one step" in text_of(pilot, "#verdict")


@pytest.mark.slow
async def test_a_sweep_of_the_batch_needs_no_second_trace() -> None:
    traced: list[WorkloadSpec] = []

    def predict(config: SearchConfig, control: Control, batch_size: int, not_affine: str) -> Predicted:
        traced.append(config.workload)
        formula = Formula(config.workload, config.device.gpu.total_bytes, config.headroom)
        return Predicted(Prediction(formula, plan_scene.traced_of(GPT2)), READY)

    def screen() -> PlanScreen:
        return PlanScreen(
            of_model(
                replace(GPT2, target_batch=None),
                lambda on_change: BackgroundTracer(on_change, predict=predict, settle_s=0.0),
            )
        )

    async with GpuMemApp({"plan": screen}, "plan").run_test(size=MEDIUM) as pilot:
        await plan_scene.settled(pilot)
        assert traced.count(traced[0]) == 1, "the plan; what would change it has traces of its own"
        await choose(pilot, "batch_size")
        for _ in range(20):
            await pilot.press("right")
        assert plan_now(pilot).batch_size == 28
        await choose(pilot, "headroom")
        await pilot.press("right", "right")
        await plan_scene.settled(pilot)
        shown = plan_scene.model(pilot.app).trace
        assert isinstance(shown, TraceReady)
        assert shown.answer.plan == plan_now(pilot)
        assert traced.count(traced[0]) == 1, "the plan; what would change it has traces of its own"


async def test_leaving_ends_the_trace() -> None:
    async with plan_scene.app(GPT2, holds=True).run_test(size=MEDIUM) as pilot:
        tracer = plan_scene.tracer(pilot.app)
        await pilot.press("q")
    assert tracer.closed


async def test_a_slow_pane_never_holds_the_controls_up(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def slow(*given: Any) -> Techniques:
        assert go.wait(30)
        return techniques(*given)

    monkeypatch.setattr("gpumem_tui.plan.recommended.techniques", slow)
    async with plan_scene.app(GPT2).run_test(size=MEDIUM) as pilot:
        await pilot.pause(0.1)
        await choose(pilot, "batch_size")
        await pilot.press("right")
        assert plan_now(pilot).batch_size == 9
        assert "9" in text_of(pilot, "#facts")
        assert not plan_scene.plan_screen(pilot.app).settled
        go.set()
        await plan_scene.settled(pilot)
        assert "It fits as it is" in text_of(pilot, "#pane")


async def test_a_pane_that_takes_long_says_so_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def slow(*given: Any, **named: Any) -> Any:
        assert go.wait(DEADLINE_S)
        return curves(*given, **named)

    monkeypatch.setattr("gpumem_tui.tui.plan.panes.curves", slow)
    async with plan_scene.app(GPT2).run_test(size=MEDIUM) as pilot:
        await plan_scene.settled(pilot)
        await pilot.press("v")
        seen: set[str] = set()

        def counts() -> bool:
            seen.update(re.findall(r"^working out curves … (\d+) s", text_of(pilot, "#pane")))
            return len(seen) > 1

        await until(pilot, counts)
        await pilot.press("b")  # which answers, once what was begun is done
        go.set()
        await plan_scene.settled(pilot)
        assert "working out" not in text_of(pilot, "#pane")


# The screen as a whole


@pytest.mark.slow
async def test_any_size_at_any_moment() -> None:
    async with plan_scene.app(LLAMA).run_test(size=SMALL) as pilot:
        screen = await plan_scene.settled(pilot)
        for size in ((200, 60), (40, 10), (120, 40), (72, 18), (160, 24), (110, 36), (1, 1), (80, 24)):
            await pilot.resize_terminal(*size)
            await pilot.press("down", "right")
            await pilot.pause()
        await plan_scene.settled(pilot)
        assert screen.query_one("#body").display


def test_a_plan_that_cannot_be_is_refused_before_the_screen() -> None:
    config = configure(Options(gpu="sim:t4-16gb"))
    impossible = Plan(find_model("gpt2"), config.workload.recipe, find_gpu("t4-16gb"), batch_size=8, target_batch=4)
    with pytest.raises(OptionError, match="--target-batch: 4 is less than one pass of 8"):
        open_plan(impossible, config)


async def test_explain_before_anything_was_ever_drawn() -> None:
    async with plan_scene.app(GPT2).run_test(size=(20, 5)) as pilot:
        await pilot.press("h")
        await until(pilot, lambda: isinstance(pilot.app.screen, HelpScreen))


async def test_threads_get_their_turns_back_when_the_program_ends() -> None:
    before = sys.getswitchinterval()
    async with plan_scene.app(GPT2).run_test(size=SMALL) as pilot:
        await plan_scene.settled(pilot)
        assert sys.getswitchinterval() < before
    assert sys.getswitchinterval() == before
