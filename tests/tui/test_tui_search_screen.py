"""Keys and states of the Search screen, driven by a scripted search."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from textual.command import CommandList
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import Input, Static

from gpumem_tui.catalog.loader import models
from gpumem_tui.cli.search import search as search_command
from gpumem_tui.memory import GIB
from gpumem_tui.options.workload import WorkloadOptions
from gpumem_tui.run.control import Control
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.runner import SearchEvent
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.kit.choice import ChoiceField
from gpumem_tui.tui.kit.dialogs import PickScreen
from gpumem_tui.tui.kit.help import HelpScreen
from gpumem_tui.tui.kit.lines import Lines
from gpumem_tui.tui.kit.main_screen import KeyBar
from gpumem_tui.tui.kit.steered_screen import Tell
from gpumem_tui.tui.search.form import FIELDS, EditScreen
from gpumem_tui.tui.search.panels import LedgerTable, ReasonPanel, VerdictPanel
from gpumem_tui.tui.search.screen import SearchFunction, SearchScreen
from gpumem_tui.tui.search.state import Stage
from gpumem_tui.tui.search.trial_log import TrialLog
from tests.scenes import search as scene
from tests.scenes.pictures import until
from tests.scenes.reading import text_of

CONFIG = scene.config()
SIZE = (120, 40)


def screen_of(pilot: Pilot[int]) -> SearchScreen:
    return scene.search_screen(pilot.app)


def keys(pilot: Pilot[int]) -> set[str]:
    """The keys that the footer offers."""
    return {key for key, active in pilot.app.screen.active_bindings.items() if active.binding.show}


def running_app() -> GpuMemApp:
    return scene.app(CONFIG, scene.scripted(scene.running(CONFIG)))


async def in_third_trial(pilot: Pilot[int]) -> SearchScreen:
    screen = screen_of(pilot)
    await until(pilot, lambda: screen.state.running is not None and screen.state.running.sample is not None)
    return screen


async def test_nothing_runs_until_s_is_pressed() -> None:
    app = scene.app(CONFIG, scene.scripted(scene.found(CONFIG)), autostart=False)
    async with app.run_test(size=SIZE) as pilot:
        screen = screen_of(pilot)
        assert screen.state.stage is Stage.IDLE
        assert {"s", "e", "question_mark", "q"} <= keys(pilot)
        assert not keys(pilot) & {"p", "c", "up"}
        await pilot.press("s")
        await until(pilot, lambda: screen.state.stage is Stage.FOUND)
        await until(pilot, lambda: screen.query_one(TrialLog).row_count == 3)
        assert {"s", "e", "up"} <= keys(pilot)


async def test_a_running_search_offers_pause_and_cancel_and_no_start() -> None:
    async with running_app().run_test(size=SIZE) as pilot:
        screen = await in_third_trial(pilot)
        assert {"p", "c"} <= keys(pilot)
        assert not keys(pilot) & {"s", "e"}
        await pilot.press("s", "e")
        assert pilot.app.screen is screen


async def test_p_holds_and_goes_on() -> None:
    controls: list[Control] = []

    def watched(searched: SearchConfig, control: Control) -> Iterator[SearchEvent]:
        controls.append(control)
        return scene.scripted(scene.running(CONFIG))(searched, control)

    async with scene.app(CONFIG, watched).run_test(size=SIZE) as pilot:
        screen = await in_third_trial(pilot)
        await pilot.press("p")
        assert (screen.state.paused, controls[0].paused) == (True, True)
        await pilot.press("p")
        assert (screen.state.paused, controls[0].paused) == (False, False)


async def test_a_key_cancels_and_s_starts_over() -> None:
    async with running_app().run_test(size=SIZE) as pilot:
        screen = await in_third_trial(pilot)
        await pilot.press("c")
        await until(pilot, lambda: screen.state.stage is Stage.CANCELLED)
        assert len(screen.state.trials) == 2
        await pilot.press("s")
        await in_third_trial(pilot)
        assert screen.state.verdict is None


async def test_quitting_a_running_search_cancels_it_and_exits_130() -> None:
    ended: list[str] = []

    def watched(searched: SearchConfig, control: Control) -> Iterator[SearchEvent]:
        yield from scene.scripted(scene.running(CONFIG))(searched, control)
        ended.append("by its control")

    app = scene.app(CONFIG, watched)
    async with app.run_test(size=SIZE) as pilot:
        await in_third_trial(pilot)
        await pilot.press("q")
    assert ended
    assert app.return_value == 130


async def test_quitting_after_the_end_exits_with_the_verdict() -> None:
    big = scene.config("llama-2-7b", "t4-16gb")
    cases: list[tuple[SearchConfig, SearchFunction, int]] = [
        (CONFIG, scene.scripted(scene.found(CONFIG)), 0),
        (big, scene.scripted(scene.nothing_fits(big)), 3),
        (CONFIG, scene.missing_torch, 2),
    ]
    for searched, function, code in cases:
        app = scene.app(searched, function)
        async with app.run_test(size=SIZE) as pilot:
            await until(pilot, lambda: not screen_of(pilot).state.busy and screen_of(pilot).state.stage != Stage.IDLE)
            await pilot.press("q")
        assert app.return_value == code


async def test_a_search_that_cannot_start_says_why_and_may_be_tried_again() -> None:
    async with scene.app(CONFIG, scene.missing_torch).run_test(size=SIZE) as pilot:
        screen = screen_of(pilot)
        await until(pilot, lambda: screen.state.stage is Stage.FAILED)
        assert "install torch" in str(screen.query_one(VerdictPanel).render())
        assert "s" in keys(pilot)


async def test_how_the_wanted_batch_is_reached_is_said_on_the_smallest_screen_too() -> None:
    wanted = replace(CONFIG, target_batch=64)
    async with scene.app(wanted, scene.scripted(scene.found(wanted))).run_test(size=(80, 24)) as pilot:
        screen = screen_of(pilot)
        await until(pilot, lambda: screen.settled and screen.state.stage is Stage.FOUND)
        assert "2 accumulation steps of batch 39" in str(screen.query_one(VerdictPanel).render())


async def test_an_unforeseen_error_is_one_line_and_no_traceback() -> None:
    def broken(searched: SearchConfig, control: Control) -> Iterator[SearchEvent]:
        yield scene.predicted(CONFIG)
        raise ZeroDivisionError("first line\nsecond line")

    async with scene.app(CONFIG, broken).run_test(size=SIZE) as pilot:
        screen = screen_of(pilot)
        await until(pilot, lambda: screen.state.stage is Stage.FAILED)
        assert screen.state.failure is not None
        message = screen.state.failure.message
        assert "an error of gpumem-tui itself: ZeroDivisionError: first line second line (" in message
        assert "\n" not in message
        assert screen.state.exit_code == 4


async def test_what_a_cancelled_search_still_says_is_not_believed_of_the_next() -> None:
    app = scene.app(CONFIG, scene.scripted(scene.running(CONFIG)), autostart=False)
    shown: list[str] = []
    tells: list[Tell] = []
    async with app.run_test(size=SIZE) as pilot:
        screen = screen_of(pilot)
        screen.run_behind(lambda _, tell: tells.append(tell))
        await until(pilot, lambda: len(tells) == 1)
        screen.run_behind(lambda _, tell: tells.append(tell))
        await until(pilot, lambda: len(tells) == 2)
        tells[0](lambda: shown.append("of the first"))
        tells[1](lambda: shown.append("of the second"))
        await until(pilot, lambda: "of the second" in shown)
        assert shown == ["of the second"]


async def test_the_arrows_choose_the_trial_that_the_table_shows() -> None:
    async with scene.app(CONFIG, scene.scripted(scene.found(CONFIG))).run_test(size=SIZE) as pilot:
        screen = screen_of(pilot)
        await until(pilot, lambda: screen.query_one(TrialLog).row_count == 3)
        assert screen.query_one(TrialLog).cursor_row == 1
        await pilot.press("up")
        await pilot.pause()
        assert screen.query_one(LedgerTable).title == "Ledger at batch 25 · trial 1"
        await pilot.press("down", "down")
        await pilot.pause()
        assert screen.query_one(LedgerTable).title == "Ledger at batch 41 · trial 3"


@pytest.mark.parametrize("size", [(120, 40), (200, 60)])
async def test_a_trial_that_did_not_fit_says_all_of_its_reason_below_the_log(size: tuple[int, int]) -> None:
    async with scene.app(CONFIG, scene.scripted(scene.found(CONFIG))).run_test(size=size) as pilot:
        screen = screen_of(pilot)
        await until(pilot, lambda: screen.query_one(TrialLog).row_count == 3)
        reason = screen.query_one(ReasonPanel)
        assert not reason.display
        await pilot.press("down")
        await until(pilot, lambda: reason.display)
        assert str(reason.render()) == f"trial 3 said: {scene.OUT_OF_MEMORY}"
        await until(pilot, lambda: reason.size.height * reason.size.width >= len(str(reason.render())))


async def test_the_cursor_follows_the_last_fitting_trial() -> None:
    async with running_app().run_test(size=SIZE) as pilot:
        screen = await in_third_trial(pilot)
        await until(pilot, lambda: screen.query_one(TrialLog).row_count == 2)
        assert screen.query_one(TrialLog).cursor_row == 0
        assert screen.state.selected is None


async def test_v_changes_panes_only_where_there_is_room_for_one() -> None:
    app = scene.app(CONFIG, scene.scripted(scene.found(CONFIG)), autostart=False)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = screen_of(pilot)
        panes = screen.query_one("#plot-pane"), screen.query_one("#ledger-pane")
        assert [pane.display for pane in panes] == [False, True]
        await pilot.press("v")
        assert [pane.display for pane in panes] == [True, False]
        await pilot.resize_terminal(120, 40)
        await pilot.pause()
        assert [pane.display for pane in panes] == [True, True]
        assert "v" not in keys(pilot)


async def test_a_tiny_terminal_says_what_is_needed_and_still_quits() -> None:
    app = scene.app(CONFIG, scene.scripted(scene.found(CONFIG)), autostart=False)
    async with app.run_test(size=(40, 10)) as pilot:
        screen = screen_of(pilot)
        notice = screen.query_one("#too-small", Lines)
        assert text_of(notice).split("\n") == ["needs 60×16, this is 40×10", "q quits"]
        assert [child.id for child in screen.children if child.display] == ["too-small"]
        await pilot.resize_terminal(20, 5)
        await pilot.pause()
        assert text_of(notice).split("\n") == ["needs 60×16", "q quits"]
        await pilot.resize_terminal(120, 40)
        await pilot.pause()
        assert not notice.display
        await pilot.resize_terminal(40, 10)
        await pilot.press("q")
    assert app.return_value == 0


async def test_every_size_can_be_resized_to_while_a_search_runs() -> None:
    async with running_app().run_test(size=SIZE) as pilot:
        screen = await in_third_trial(pilot)
        for width, height in ((60, 16), (200, 60), (20, 5), (80, 24), (300, 20), (80, 60), (120, 40)):
            await pilot.resize_terminal(width, height)
            await pilot.pause()
            tiny = screen.has_class("-tiny")
            assert tiny is (width < 60 or height < 16)
            footer = screen.query_one(KeyBar)
            assert tiny or footer.region.bottom == height


async def test_paging_before_there_is_a_trial_in_a_flat_terminal() -> None:
    async with scene.app(CONFIG, scene.missing_torch, autostart=False).run_test(size=(300, 5)) as pilot:
        await pilot.press("tab", "pagedown", "pageup", "end")
        await pilot.pause()
        assert pilot.app.screen is screen_of(pilot)


async def test_escape_ends_no_search() -> None:
    async with running_app().run_test(size=SIZE) as pilot:
        await until(pilot, lambda: screen_of(pilot).state.running is not None)
        await pilot.press("escape", "escape")
        await pilot.pause()
        assert screen_of(pilot).state.busy
        assert not screen_of(pilot).state.cancelling


async def test_help_lists_the_keys_and_closes() -> None:
    async with scene.app(CONFIG, scene.missing_torch, autostart=False).run_test(size=SIZE) as pilot:
        await pilot.press("question_mark")
        help_screen = pilot.app.screen
        assert isinstance(help_screen, HelpScreen)
        text = "\n".join(str(static.render()) for static in help_screen.query(Static))
        assert "hold the search" in text
        assert "Simulated" in text
        assert "Measured" not in text
        await pilot.press("escape")
        assert pilot.app.screen is screen_of(pilot)


async def test_the_palette_has_the_keys_that_do_something_now() -> None:
    async with running_app().run_test(size=SIZE) as pilot:
        screen = await in_third_trial(pilot)
        titles = {command.title for command in pilot.app.get_system_commands(screen)}
        assert {"Pause (p)", "Cancel (c)", "Quit (q)"} <= titles
        assert not titles & {"Start (s)", "Edit (e)"}


async def test_a_command_of_the_palette_acts_on_the_search() -> None:
    async with running_app().run_test(size=SIZE) as pilot:
        screen = await in_third_trial(pilot)
        await pilot.press("ctrl+p", *"cancel")
        found = pilot.app.screen.query_one(CommandList)
        await until(pilot, lambda: [str(one.prompt)[:10] for one in found.options] == ["Cancel (c)"])
        await pilot.press("enter")
        await until(pilot, lambda: screen.state.stage is Stage.CANCELLED)


# The form


async def edit(pilot: Pilot[int]) -> EditScreen:
    await pilot.press("e")
    form = pilot.app.screen
    assert isinstance(form, EditScreen)
    await until(pilot, lambda: all(node.is_mounted for node in form.walk_children(Widget, with_self=True)))
    return form


async def test_an_edited_workload_replaces_the_old_and_its_results() -> None:
    async with scene.app(CONFIG, scene.scripted(scene.found(CONFIG))).run_test(size=SIZE) as pilot:
        screen = screen_of(pilot)
        await until(pilot, lambda: screen.state.stage is Stage.FOUND)
        form = await edit(pilot)
        form.query_one("#model", ChoiceField).value = "gpt2-medium"
        form.query_one("#gpu", ChoiceField).value = "sim:t4-16gb"
        form.query_one("#precision", ChoiceField).value = "amp-bf16"
        form.query_one("#strategy", ChoiceField).value = "double"
        form.query_one("#seq_len", Input).value = "512"
        await pilot.pause()
        await pilot.press("ctrl+s")
        await pilot.pause()
        state = screen.state
        assert state.stage is Stage.IDLE
        assert not state.trials
        shape = state.config.workload.shape
        assert shape is not None
        assert (shape.name, shape.seq_len) == ("gpt2-medium", 512)
        assert state.config.workload.recipe.precision == "amp-bf16"
        assert state.config.device.gpu.name == "t4-16gb"
        assert state.config.strategy == "double"


async def test_an_impossible_value_is_told_beside_its_control_and_changes_nothing() -> None:
    app = scene.app(CONFIG, scene.missing_torch, autostart=False)
    async with app.run_test(size=(80, 24)) as pilot:
        form = await edit(pilot)
        preview = str(form.query_one("#preview", Static).render())
        form.query_one("#seq_len", Input).value = "4096"
        await pilot.pause()
        assert "1024 positions" in str(form.query_one("#seq_len-error", Static).render())
        assert str(form.query_one("#preview", Static).render()) == preview
        await pilot.press("ctrl+s")
        assert pilot.app.screen is form
        form.query_one("#seq_len", Input).value = "256"
        await pilot.pause()
        assert str(form.query_one("#seq_len-error", Static).render()) == ""
        await pilot.press("escape")
        await pilot.pause()
        assert screen_of(pilot).state.config == CONFIG


async def test_a_sequence_length_is_refused_by_a_model_that_has_none() -> None:
    app = scene.app(CONFIG, scene.missing_torch, autostart=False)
    async with app.run_test(size=SIZE) as pilot:
        form = await edit(pilot)
        form.query_one("#seq_len", Input).value = "128"
        form.query_one("#model", ChoiceField).value = "resnet-50"
        await pilot.pause()
        assert "resnet-50" in str(form.query_one("#seq_len-error", Static).render())


CUTS = (
    "tensor_parallel", "sequence_parallel", "context_parallel", "expert_parallel", "pipeline_parallel", "schedule",
    "micro_batches", "virtual_stages",
)  # fmt: skip


async def test_the_form_has_every_option_of_the_command_line() -> None:
    """`kind` represents what the command line tells from which of the options is given; output is no search's, and how
    other machines are reached is the program's."""
    options = {option.opts[0] for option in search_command.params} - {"--json", "--plain", "--quiet", "--help-all"}
    options -= {"--remote-command", "--offline"}  # the form asks the hub when enter is pressed, and else never
    options -= {"--" + name.replace("_", "-") for name in CUTS}  # only the formula answers those
    assert {option.flag for option in FIELDS} == options | {"", "-- COMMAND"}
    assert all(option.label for option in FIELDS)


async def test_whatever_is_typed_into_the_form_is_searched() -> None:
    app = scene.app(CONFIG, scene.missing_torch, autostart=False)
    async with app.run_test(size=SIZE) as pilot:
        form = await edit(pilot)
        typed = {"layers": "3", "hidden": "96", "heads": "3", "vocab": "512", "seq_len": "64", "ramp_step": "4",
                 "target_batch": "64", "headroom": "0.2", "limit_bytes": "10GiB",
                 "steps": "5", "timeout_s": "20"}  # fmt: skip
        for name, text in typed.items():
            form.query_one(f"#{name}", Input).value = text
        await pilot.pause()
        await pilot.press("ctrl+s")
        await pilot.pause()
        config = screen_of(pilot).state.config
        shape = config.workload.shape
        assert shape is not None
        assert (shape.layers, shape.hidden, shape.heads, shape.vocab, shape.seq_len) == (3, 96, 3, 512, 64)
        assert (config.ramp_step, config.target_batch, config.headroom) == (4, 64, 0.2)
        assert (config.limit_bytes, config.steps, config.timeout_s) == (10 * GIB, 5, 20.0)
        form = await edit(pilot)
        assert form.query_one("#limit_bytes", Input).value == "10GiB"
        assert form.query_one("#layers", Input).value == "3"


def says(part: Static, text: str) -> bool:
    return text in str(part.render())


@pytest.mark.slow
async def test_what_cannot_be_is_said_beside_its_field() -> None:
    wrong = {
        "limit_bytes": {"10": "write the unit", "999GiB": "the device has only"},
        "headroom": {"1.5": "from 0 to 0.99"},
        "steps": {"0": "must be from 1"},
        "python": {"/no/such/python": "not a program"},
        "gpus": {"2": "add --sharding"},
        "heads": {"7": "do not divide"},
    }
    app = scene.app(CONFIG, scene.missing_torch, autostart=False)
    async with app.run_test(size=SIZE) as pilot:
        form = await edit(pilot)
        for name, cases in wrong.items():
            field, error = form.query_one(f"#{name}", Input), form.query_one(f"#{name}-error", Static)
            before = field.value
            for text, said in cases.items():
                field.value = text
                await until(pilot, partial(says, error, said))
                assert form.query_one("#apply").disabled
            field.value = before
            await until(pilot, lambda: not form.query_one("#apply").disabled)


@pytest.mark.slow
async def test_deepspeed_is_for_predictions() -> None:
    app = scene.app(CONFIG, scene.missing_torch, autostart=False)
    async with app.run_test(size=SIZE) as pilot:
        form = await edit(pilot)
        form.query_one("#gpus", Input).value = "4"
        form.query_one("#sharding", ChoiceField).value = "deepspeed-zero3"
        await until(pilot, lambda: "predict" in str(form.query_one("#sharding-error", Static).render()))


@pytest.mark.slow
async def test_a_configuration_can_be_searched_from_the_form(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        '{"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 64, "vocab_size": 512}'
    )
    app = scene.app(CONFIG, scene.missing_torch, autostart=False)
    async with app.run_test(size=SIZE) as pilot:
        form = await edit(pilot)
        form.query_one("#kind", ChoiceField).value = "config"
        await pilot.pause()
        form.query_one("#config", Input).value = str(file)
        await pilot.pause()
        await pilot.press("ctrl+s")
        await pilot.pause()
        shape = screen_of(pilot).state.config.workload.shape
        assert shape is not None
        assert (shape.layers, shape.hidden) == (2, 64)


async def test_a_digit_makes_a_choice_or_says_why_not() -> None:
    app = scene.app(CONFIG, scene.missing_torch, autostart=False)
    async with app.run_test(size=SIZE) as pilot:
        form = await edit(pilot)
        precision = form.query_one("#precision", ChoiceField)
        precision.focus()
        await until(pilot, lambda: form.focused is precision)
        await pilot.press("2")
        await until(pilot, lambda: precision.value == "amp-bf16")
        await pilot.press("9")
        await until(pilot, lambda: "9 picks nothing" in str(form.query_one("#precision-error", Static).render()))
        model = form.query_one("#model", ChoiceField)
        model.focus()
        await until(pilot, lambda: form.focused is model)
        await pilot.press("1")
        await until(pilot, lambda: "too many" in str(form.query_one("#model-error", Static).render()))


@pytest.mark.slow
async def test_the_arrows_walk_through_the_fields_and_turn_a_choice_and_enter_lists_it() -> None:
    app = scene.app(CONFIG, scene.missing_torch, autostart=False)
    async with app.run_test(size=SIZE) as pilot:
        form = await edit(pilot)
        model = form.query_one("#model", ChoiceField)
        await until(pilot, lambda: form.focused is model)
        await pilot.press("right")
        await until(pilot, lambda: model.value == "gpt2-medium")
        await pilot.press("left", "left", "left")
        await until(pilot, lambda: model.value == next(iter(models())))
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, PickScreen))
        await pilot.press(*"resnet-50", "enter")
        await until(pilot, lambda: model.value == "resnet-50")
        await pilot.press("up")
        await until(pilot, lambda: form.focused is form.query_one("#kind", ChoiceField))
        await pilot.press("down")
        await until(pilot, lambda: form.focused is model)


async def test_the_same_gpu_keeps_the_reason_it_was_taken_for() -> None:
    app = scene.app(CONFIG, scene.missing_torch, autostart=False)
    async with app.run_test(size=SIZE) as pilot:
        form = await edit(pilot)
        form.query_one("#optimizer", ChoiceField).value = "sgd"
        await pilot.pause()
        await pilot.press("ctrl+s")
        await pilot.pause()
        config = screen_of(pilot).state.config
        assert config.workload.recipe.optimizer == "sgd"
        assert config.device.reason == scene.REASON


def given_app(tmp_path: Path) -> GpuMemApp:
    """The program started with a workload file on a real GPU, under a cap."""
    path = tmp_path / "train.py"
    path.write_text("")
    options = WorkloadOptions(workload=str(path))
    device = replace(CONFIG.device, simulated=False, uuid="GPU-0", reason="")
    own = replace(CONFIG, workload=options.spec(), device=device, limit_bytes=30 * GIB)

    def screen() -> SearchScreen:
        return SearchScreen(own, options, search_function=scene.missing_torch, clock=scene.noon)

    return GpuMemApp({"search": screen}, "search")


@pytest.mark.slow
async def test_a_workload_file_decides_its_recipe_and_can_be_chosen_again(tmp_path: Path) -> None:
    async with given_app(tmp_path).run_test(size=SIZE) as pilot:
        given = screen_of(pilot).state.config
        form = await edit(pilot)
        assert not form.query_one("#precision-field").display
        assert not form.query_one("#seq_len-field").display
        assert "the file decides" in str(form.query_one("#preview", Static).render())
        form.query_one("#kind", ChoiceField).value = "model"
        form.query_one("#model", ChoiceField).value = "gpt2-medium"
        form.query_one("#gpu", ChoiceField).value = "sim:t4-16gb"
        await pilot.pause()
        assert form.query_one("#precision-field").display
        form.query_one("#precision", ChoiceField).value = "amp-fp16"
        await pilot.pause()
        await pilot.press("ctrl+s")
        await pilot.pause()
        changed = screen_of(pilot).state.config
        assert (changed.workload.name, changed.device.gpu.name) == ("gpt2-medium", "t4-16gb")
        assert changed.limit_bytes is None, "a T4 has less than the cap"
        form = await edit(pilot)
        form.query_one("#kind", ChoiceField).value = "file"
        form.query_one("#gpu", ChoiceField).value = "own"
        await pilot.pause()
        await pilot.press("ctrl+s")
        await pilot.pause()
        assert screen_of(pilot).state.config == given


async def test_the_footer_follows_the_width() -> None:
    """The key that switches panes is offered where only one has room."""
    app = scene.app(CONFIG, scene.missing_torch, autostart=False)
    async with app.run_test(size=(120, 40)) as pilot:
        footer = screen_of(pilot).query_one(KeyBar)
        assert "v plot/table" not in text_of(footer)
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: "v plot/table" in text_of(footer))
        await pilot.resize_terminal(120, 40)
        await until(pilot, lambda: "v plot/table" not in text_of(footer))


@pytest.mark.slow
async def test_a_model_of_transformers_is_edited_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "olmo2" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}))
    options = WorkloadOptions(model=str(path))
    own = replace(CONFIG, workload=options.spec("python"))

    def screen() -> SearchScreen:
        return SearchScreen(own, options, search_function=scene.missing_torch, clock=scene.noon)

    async with GpuMemApp({"search": screen}, "search").run_test(size=SIZE) as pilot:
        form = await edit(pilot)
        assert form.query_one("#kind", ChoiceField).value == "model"
        form.query_one("#precision", ChoiceField).value = "bf16"
        form.query_one("#seq_len", Input).value = "4096"
        await pilot.pause()
        preview = str(form.query_one("#preview", Static).render())
        assert "olmo2 · olmo2 · seq 4,096 · bf16 · adamw" in preview
        assert "no formula for olmo2 models" in preview
        form.query_one("#recompute", ChoiceField).value = "selective"
        await pilot.pause()
        assert "gradient checkpointing only" in str(form.query_one("#recompute-error", Static).render())
        form.query_one("#recompute", ChoiceField).value = "full"
        await pilot.pause()
        await pilot.press("ctrl+s")
        await pilot.pause()
        workload = screen_of(pilot).state.config.workload
        assert workload.hugging_face is not None
        assert (workload.hugging_face.seq_len, workload.recipe.precision, workload.recipe.recompute) == (
            4096, "bf16", "full",
        )  # fmt: skip
