"""The Plan screen of a command, driven by its keys."""

from __future__ import annotations

import re
import threading

import pytest
from textual.pilot import Pilot

from gpumem_tui.errors import EXIT_BAD_INPUT
from gpumem_tui.plan.combination import Combination
from gpumem_tui.plan.command import Watch
from gpumem_tui.run.control import Control
from gpumem_tui.search.predicting import Predicted
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.kit.dialogs import PickScreen, TextScreen
from gpumem_tui.tui.kit.help import key_lines
from gpumem_tui.tui.kit.row_list import RowList
from tests.scenes.command_plan import ScriptedRuns, command_app, command_config, plan_screen, state_of
from tests.scenes.pictures import until

SIZES = [(80, 24), (120, 40)]


def _text(app: GpuMemApp) -> str:
    """The screen as it is drawn."""
    return "\n".join("".join(part.text for part in strip) for strip in app.screen._compositor.render_strips())


def _rows(app: GpuMemApp) -> str:
    return "\n".join(row.text for row in plan_screen(app).query_one("#pane", RowList).rows)


async def _finished(pilot: Pilot[int], app: GpuMemApp) -> None:
    await until(pilot, lambda: state_of(app).plan is not None and plan_screen(app).settled)


@pytest.mark.parametrize("size", SIZES)
async def test_ledger_verdict_and_what_ifs_at_once(size: tuple[int, int]) -> None:
    runs = ScriptedRuns(command_config())
    app = command_app(runs)
    async with app.run_test(size=size) as pilot:
        await _finished(pilot, app)
        shown, (verdict, again) = _text(app), plan_screen(app).parting_lines()
    assert verdict.startswith("Batch 8 fits on NVIDIA A100 80 GB: ")
    assert again.startswith("This plan again: gpumem-tui plan ")
    assert runs.made == ["as it is", "checkpointing", "sgd", "fused"]
    assert "✓ fits · 62.30 GiB left" in shown
    assert "batch 8" in shown
    assert "It fits as it is, traced" in shown
    if size == (120, 40):
        assert "largest batch 40 traced" in " ".join(shown.split())
        assert "parameters" in shown
        assert "14.29" in shown
    assert shown.index("checkpointed blocks") < shown.index("SGD")
    assert "fused optimizer step: its run failed" in shown


async def test_what_runs_is_said_and_can_be_stopped_and_gone_on_with() -> None:
    runs = ScriptedRuns(command_config(), held=("sgd",))
    app = command_app(runs)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = plan_screen(app)
        await until(pilot, lambda: "SGD: its run is under way" in _rows(app))
        await until(pilot, lambda: "checkpointed blocks   " in _rows(app))
        assert "what-if: SGD, 1 to go" in _text(app)
        await until(pilot, lambda: "step 1 forward │ step 0: loss 0.000" in _text(app))
        await pilot.press("x")
        await until(pilot, lambda: not state_of(app).busy)
        assert "2 what-ifs not run: r runs them" in _text(app)
        runs.held = ()
        await pilot.press("r")
        await until(pilot, lambda: not state_of(app).waiting and screen.settled)
    assert runs.made == ["as it is", "checkpointing", "sgd", "sgd", "fused"]


@pytest.mark.parametrize("size", SIZES)
async def test_what_was_not_needed_is_run_when_asked_for(size: tuple[int, int]) -> None:
    keys = ("checkpointing", "autocast", "sgd", "chunked-loss", "adafactor", "no-foreach")
    runs = ScriptedRuns(command_config(), held=("checkpointing", "no-foreach"), changes=keys)
    app = command_app(runs)
    async with app.run_test(size=size) as pilot:
        screen = plan_screen(app)
        await until(pilot, lambda: "what-if: checkpointed blocks, 3 to go" in _text(app))
        await pilot.press("x")
        await until(pilot, lambda: not state_of(app).busy)
        runs.held = ("no-foreach",)
        await pilot.press("r")
        await until(pilot, lambda: not state_of(app).busy and screen.settled)
        assert runs.made[2:] == ["checkpointing", "autocast", "sgd", "chunked-loss"]
        assert "2 what-ifs skipped, already fits: r runs them" in _text(app)
        for _ in range(2):  # stopped and gone on with, they are not left out again
            await pilot.press("r")
            await until(pilot, lambda: "no-foreach" in runs.made)
            await until(pilot, lambda: "optimizer step by parameter: its run is under way" in _rows(app))
            await pilot.press("x")
            await until(pilot, lambda: not state_of(app).busy)
            runs.made.remove("no-foreach")
            assert "1 what-if not run: r runs it" in _text(app)
        runs.held = ()
        await pilot.press("r")
        await until(pilot, lambda: not state_of(app).busy and screen.settled)
        assert "every what-if has been run" in _text(app)
    assert runs.made.count("adafactor") == 1


async def test_another_gpu_is_answered_without_running_again() -> None:
    runs = ScriptedRuns(command_config())
    app = command_app(runs)
    async with app.run_test(size=(120, 40)) as pilot:
        await _finished(pilot, app)
        made = list(runs.made)
        await pilot.press("g")
        await until(pilot, lambda: isinstance(app.screen, PickScreen))
        await pilot.press(*"rtx-4070-12gb", "enter")
        await until(pilot, lambda: plan_screen(app).settled and state_of(app).gpu.name == "rtx-4070-12gb")
        await until(pilot, lambda: "✗ too large by" in _text(app) and plan_screen(app).settled)
        assert "✓ checkpointed blocks" in _rows(app)
        assert "✗ SGD" in _rows(app)
    assert runs.made == made


async def test_the_gpus_to_pick_from_say_where_it_fits() -> None:
    app = command_app(ScriptedRuns(command_config()))
    async with app.run_test(size=(120, 40)) as pilot:
        await _finished(pilot, app)
        await until(pilot, lambda: bool(plan_screen(app).planned.fits))
        await pilot.press("g")
        await until(pilot, lambda: isinstance(app.screen, PickScreen))
        await pilot.press(*"a100-80gb")
        await until(pilot, lambda: "✓ NVIDIA A100 80 GB, 80.00 GiB, up to batch 40" in _text(app))
        await pilot.press(*["backspace"] * 9, *"rtx-4070-12")
        await until(pilot, lambda: "✗ NVIDIA GeForce RTX 4070" in _text(app))


async def test_a_gpu_can_be_picked_before_it_is_known_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()
    monkeypatch.setattr("gpumem_tui.tui.plan.planned.largest_of_command", lambda _: asked.wait(30) and ())
    app = command_app(ScriptedRuns(command_config()))
    async with app.run_test(size=(120, 40)) as pilot:
        await _finished(pilot, app)
        await pilot.press("g")
        await until(pilot, lambda: "NVIDIA A100 80 GB, 80.00 GiB" in _text(app))
        asked.set()


async def test_y_copies_the_line_that_opens_it_for_the_gpu_of_now() -> None:
    app = command_app(ScriptedRuns(command_config()))
    async with app.run_test(size=(120, 40)) as pilot:
        await _finished(pilot, app)
        await pilot.press("y")
        assert app.clipboard == "gpumem-tui plan --gpu sim:a100-80gb"
        await pilot.press("g", *"h100-80gb", "enter")
        await until(pilot, lambda: state_of(app).gpu.name == "h100-80gb")
        await pilot.press("y")
        assert app.clipboard == "gpumem-tui plan --gpu sim:h100-80gb"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("optimizer", "Memory at the peak"),
        ("peak", "The most that is allocated at one moment of the traced step"),
        ("max-batch", "The largest batch at which the traced step"),
        ("accumulation", "steps = target / (b · D), rounded up"),
    ],
)
async def test_enter_on_a_figure_explains_it(row: str, said: str) -> None:
    app = command_app(ScriptedRuns(command_config()))
    async with app.run_test(size=(120, 40)) as pilot:
        await _finished(pilot, app)
        rows = plan_screen(app).query_one("#facts" if row in ("max-batch", "accumulation") else "#ledger", RowList)
        rows.focus()
        await pilot.pause()
        rows.move_to(row)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, TextScreen) and said in _text(app))


async def test_another_gpu_is_offered_once_there_is_a_trace_to_answer_for_it() -> None:
    runs = ScriptedRuns(command_config(), fails="train.py has no step")
    app = command_app(runs)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: bool(state_of(app).failure))
        await pilot.press("g")
        assert "g GPU" not in _text(app)
        assert not isinstance(app.screen, PickScreen)
        runs.fails = ""
        await pilot.press("r")
        await _finished(pilot, app)
        await until(pilot, lambda: "g GPU" in _text(app))


async def test_the_gpus_open_at_the_smallest_that_fits_and_enter_plans_for_one() -> None:
    app = command_app(ScriptedRuns(command_config()))
    async with app.run_test(size=(80, 24)) as pilot:
        await _finished(pilot, app)
        await pilot.press("p")
        await until(pilot, lambda: "✓ NVIDIA A10 " in _text(app) and plan_screen(app).settled)
        assert plan_screen(app).query_one("#pane", RowList).key == "a10-24gb"
        await pilot.press("end", "enter")
        await until(pilot, lambda: state_of(app).gpu.name == "mi355x-288gb" and plan_screen(app).settled)


async def test_enter_on_a_what_if_says_all_of_it() -> None:
    app = command_app(ScriptedRuns(command_config()))
    async with app.run_test(size=(80, 24)) as pilot:
        await _finished(pilot, app)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, TextScreen))
        shown = _text(app)
    assert "torch.utils.checkpoint.checkpoint(block, x," in shown
    assert re.search(r"device used\s+[\d.]+ GiB instead of [\d.]+ GiB", shown)
    assert "traced: a run of the command with the change made to it" in shown


@pytest.mark.parametrize(
    ("key", "said"), [("b", "✗ 41"), ("p", "✓ NVIDIA A10 "), ("a", "optimizer state"), ("n", "CUDA context")]
)
async def test_every_list_is_a_key_away(key: str, said: str) -> None:
    app = command_app(ScriptedRuns(command_config()))
    async with app.run_test(size=(80, 24)) as pilot:
        await _finished(pilot, app)
        await pilot.press(key)
        await until(pilot, lambda: said in _text(app))


async def test_a_trace_that_is_ended_is_not_said_to_go_on() -> None:
    class Held(ScriptedRuns):
        def trace(
            self, control: Control | None, watch: Watch
        ) -> tuple[Predicted, list[Combination], list[Combination]]:
            while control is not None:
                control.check()
                threading.Event().wait(0.01)
            return super().trace(control, watch)

    app = command_app(Held(command_config()))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "tracing the command as it is" in _text(app))
        await pilot.press("x")
        await until(pilot, lambda: not state_of(app).busy)
        assert "the command as it is has not been traced" in _text(app)
        assert "r traces it" in _text(app)


async def test_without_what_ifs_they_wait_to_be_asked_for() -> None:
    runs = ScriptedRuns(command_config())
    app = command_app(runs, run_all=False)
    async with app.run_test(size=(80, 24)) as pilot:
        await _finished(pilot, app)
        assert runs.made == ["as it is"]
        assert "3 what-ifs not run: r runs them" in _text(app)


async def test_a_command_that_fails_says_why_and_can_be_run_again() -> None:
    runs = ScriptedRuns(command_config(), fails="train.py:3: NameError: name 'modle' is not defined")
    app = command_app(runs)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "NameError: name 'modle' is not defined" in _text(app))
        assert state_of(app).leaving_code == EXIT_BAD_INPUT
        runs.fails = ""
        await pilot.press("r")
        await _finished(pilot, app)
        assert await plan_screen(app).end() == 0


@pytest.mark.parametrize("size", SIZES)
async def test_what_does_not_fit_has_the_cheapest_that_does_with_the_command_to_copy(size: tuple[int, int]) -> None:
    runs = ScriptedRuns(command_config(), batch_size=64)
    app = command_app(runs)
    async with app.run_test(size=size) as pilot:
        await _finished(pilot, app)
        assert runs.made[:2] == ["as it is", "2 passes of 32"]
        assert _rows(app).splitlines()[:2] == ["Cheapest combination that fits", "✓ 2 passes of 32"]
        await pilot.press("home", "enter")
        await until(pilot, lambda: isinstance(app.screen, TextScreen))
        shown = _text(app)
        await pilot.press("y")
    assert "python train.py --batch-size 32" in shown
    assert "2 passes before each optimizer step" in " ".join(shown.split())
    assert app.clipboard == "python train.py --batch-size 32"


async def test_escape_ends_no_run_and_x_does() -> None:
    app = command_app(ScriptedRuns(command_config(), held=("sgd",)))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "SGD: its run is under way" in _rows(app))
        await pilot.press("escape")
        await pilot.pause(0.1)
        assert state_of(app).busy
        await pilot.press("x")
        await until(pilot, lambda: not state_of(app).busy)
        assert "r runs them" in _text(app)


async def test_the_help_names_the_keys_that_a_command_has() -> None:
    app = command_app(ScriptedRuns(command_config()))
    async with app.run_test(size=(120, 40)) as pilot:
        await _finished(pilot, app)
        keys = ["".join(text for text, _ in line) for line in key_lines(plan_screen(app))]
    assert any(line.split()[:6] == ["n", "t", "p", "b", "a", "numbers,"] for line in keys)
    assert not [line for line in keys if "curves" in line or "control under" in line or "type a number" in line]
