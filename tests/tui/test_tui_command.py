"""The Search screen on a user's command: what it prints, what we know about it, and the form that takes one."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import Button, Input, Static

from gpumem_tui.options.workload import WorkloadOptions
from gpumem_tui.run.children import side_effects
from gpumem_tui.run.control import Control, Unusable
from gpumem_tui.run.events import Failed, Output
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.predicting import TraceProgress
from gpumem_tui.search.report import command_found
from gpumem_tui.search.runner import SearchEvent
from gpumem_tui.search.verdict import Verdict
from gpumem_tui.tui.kit import output_pane
from gpumem_tui.tui.kit.choice import ChoiceField
from gpumem_tui.tui.kit.help import HelpScreen
from gpumem_tui.tui.kit.output_pane import KEPT_LINES, OutputPane, Printed, PrintedLine
from gpumem_tui.tui.search.bar import bar_of
from gpumem_tui.tui.search.form import EditScreen
from gpumem_tui.tui.search.ledger import ledger_view
from gpumem_tui.tui.search.panels import (
    VerdictPanel,
    strategy_lines,
    verdict_view,
    workload_lines,
    workload_summary,
)
from gpumem_tui.tui.search.screen import SearchScreen
from gpumem_tui.tui.search.state import Stage
from gpumem_tui.tui.search.trial_log import TrialLog
from tests.scenes import command as command_scene
from tests.scenes import search as scene
from tests.scenes.pictures import SIZES, Compare, stands_still, until

PYTHON = sys.executable


def screen_of(pilot: Pilot[int]) -> SearchScreen:
    return scene.search_screen(pilot.app)


def pane_of(pilot: Pilot[int]) -> OutputPane:
    return screen_of(pilot).query_one(OutputPane)


def shown(widget: Widget) -> bool:
    return bool(widget.display)


def keys(pilot: Pilot[int]) -> set[str]:
    """The footer's offers, in words."""
    return {active.binding.description for active in pilot.app.screen.active_bindings.values() if active.binding.show}


# Words


def test_the_batch_size_that_is_traced_is_the_stage() -> None:
    state = scene.folded(command_scene.CONFIG, [TraceProgress(2), Output("step 0")])
    assert verdict_view(state).headline.startswith("tracing batch size 2:")
    state = scene.folded(command_scene.CONFIG, command_scene.tracing())
    assert verdict_view(state).headline.startswith("tracing batch size 3:")
    assert verdict_view(replace(state, paused=True)).headline.startswith("held after the step that runs")
    assert scene.folded(command_scene.CONFIG, command_scene.running()).tracing is None


def test_notes_of_the_trace_and_of_the_shown_trial_stand_below_the_table_once() -> None:
    traced = ledger_view(scene.folded(command_scene.CONFIG, [*command_scene.tracing(), command_scene.predicted()]))
    assert command_scene.NOTE in traced.notes
    assert command_scene.TRIAL_NOTE not in traced.notes
    tried = ledger_view(scene.folded(command_scene.CONFIG, command_scene.found()))
    assert [tried.notes.count(note) for note in (command_scene.NOTE, command_scene.TRIAL_NOTE)] == [1, 1]


def test_a_command_has_no_formula_and_no_error_that_proves_nothing() -> None:
    state = scene.folded(command_scene.CONFIG, command_scene.found())
    view = ledger_view(state)
    assert view.error_title == ""
    assert not any("formula" in note for note in view.notes)
    assert verdict_view(state).details[0] == "2 trials, 1 out of memory"
    assert "formula" not in dict(strategy_lines(state))


def test_nothing_fits_of_a_command_names_no_remedy_that_nobody_computed() -> None:
    verdict = Verdict("nothing_fits", 0, 1, False, 1, 1, "nothing fits: one sample is out of memory")
    state = scene.folded(command_scene.CONFIG, [command_scene.predicted(), verdict])
    view = verdict_view(state)
    assert view.headline.lower() == verdict.message
    assert view.details == ("no formula for a command: no known remedy",)


def test_the_panels_name_the_command_and_its_ranks() -> None:
    options = WorkloadOptions(command=("torchrun", "--nproc-per-node", "4", "train.py", "{batch}", "x" * 400))
    config = replace(command_scene.CONFIG, workload=options.spec())
    lines = list(workload_lines(config))
    assert lines[1][1].startswith("torchrun --nproc-per-node 4 train.py {batch} xxx")
    assert len(lines[1][1]) <= 160
    assert ("ranks", "4") in lines
    assert workload_summary(config).endswith(" · 4 ranks · guided")


def test_a_live_trial_that_tells_no_buckets_says_when_they_come() -> None:
    state = scene.folded(command_scene.CONFIG, command_scene.running())
    assert bar_of(state)[0].endswith("by bucket at its end")
    assert "being traced" in bar_of(scene.folded(command_scene.CONFIG, command_scene.tracing()))[0]


def test_lines_are_kept_up_to_a_number_and_read_from_where_one_stopped() -> None:
    printed = Printed([PrintedLine("first", "notice")])
    assert printed.since(0) == ([PrintedLine("first", "notice")], 1)
    for number in range(KEPT_LINES + 10):
        printed.take(Output(str(number)))
    lines, seen = printed.since(1)
    assert (lines[0].text, len(lines), seen) == ("10", KEPT_LINES, KEPT_LINES + 11)
    assert printed.since(seen) == ([], seen)
    printed.take(Output("y" * 100_000))
    assert len(printed.since(seen)[0][0].text) == 2000


# The log pane


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
async def test_what_the_command_prints_is_on_the_screen_from_the_start(size: tuple[int, int]) -> None:
    async with command_scene.app(scene.scripted(command_scene.tracing())).run_test(size=size) as pilot:
        screen, pane = screen_of(pilot), pane_of(pilot)
        await until(pilot, lambda: pane.text.count("step 1: loss") == 2)
        assert pane.display
        assert pane.size.height >= 6
        assert pane.text.startswith("$ python3 train.py --batch-size {batch}")
        assert pane.text.replace("\n", "").count(side_effects(3)) == 1
        assert screen.query_one("#ledger-pane").size.height >= 8
        await until(pilot, lambda: "tracing batch size 3" in str(screen.query_one(VerdictPanel).render()))


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
async def test_trials_take_the_place_of_the_output_or_stand_beside_it(size: tuple[int, int]) -> None:
    async with command_scene.app(scene.scripted(command_scene.found())).run_test(size=size) as pilot:
        screen, pane = screen_of(pilot), pane_of(pilot)
        log = screen.query_one(TrialLog)
        await until(pilot, lambda: screen.settled and screen.state.stage is Stage.FOUND and log.row_count == 2)
        await stands_still(pilot)
        beside = size[0] >= 160
        assert (shown(log), shown(pane)) == (True, beside)
        assert ("output" in keys(pilot)) is not beside
        if beside:
            assert log.region.right < pane.region.x
            return
        await pilot.press("o")
        await stands_still(pilot)
        assert (shown(log), shown(pane)) == (False, True)
        assert pane.has_focus
        await pilot.press("o")
        await stands_still(pilot)
        assert log.has_focus


async def test_the_output_can_have_the_whole_screen() -> None:
    async with command_scene.app(scene.scripted(command_scene.found())).run_test(size=(80, 24)) as pilot:
        screen, pane = screen_of(pilot), pane_of(pilot)
        await until(pilot, lambda: screen.state.stage is Stage.FOUND)
        assert "zoom" not in keys(pilot), "the output is not shown"
        await pilot.press("o", "z")
        await stands_still(pilot)
        assert pane.size.height >= 14
        assert not screen.query_one("#panels").display
        assert "plot/table" not in keys(pilot)
        await pilot.press("escape")
        await stands_still(pilot)
        assert screen.query_one("#panels").display
        assert {"zoom", "trials"} <= keys(pilot)


async def test_the_command_with_the_safe_size_can_be_copied() -> None:
    words = ("python", "train.py", "--name", "my run", "--batch", "{batch}", "--micro-batches", "{accumulation}")
    config = replace(command_scene.CONFIG, workload=WorkloadOptions(command=words).spec(), target_batch=100)
    assert command_found(config, scene.folded(config, command_scene.running()).verdict) == ""
    found = scene.folded(config, command_scene.found())
    assert command_found(config, found.verdict) == "python train.py --name 'my run' --batch 39 --micro-batches 3"
    async with command_scene.app(scene.scripted(command_scene.running())).run_test(size=SIZES["120x40"]) as pilot:
        await until(pilot, lambda: screen_of(pilot).state.running is not None)
        assert "copy" not in keys(pilot)
    async with command_scene.app(scene.scripted(command_scene.found())).run_test(size=SIZES["120x40"]) as pilot:
        await until(pilot, lambda: screen_of(pilot).state.stage is Stage.FOUND)
        await until(pilot, lambda: "copy" in keys(pilot))
        await pilot.press("y")
        assert pilot.app.clipboard == "python3 train.py --batch-size 39"
        left = list(screen_of(pilot).parting_lines())
        assert left[0] == "Safe batch 39; batch 40 ran, 41 was out of memory."
        assert left[1:] == ["To run: python3 train.py --batch-size 39"]


async def test_other_workloads_have_no_such_pane() -> None:
    searched = scene.config()
    async with scene.app(searched, scene.scripted(scene.found(searched))).run_test(size=(200, 60)) as pilot:
        await until(pilot, lambda: screen_of(pilot).state.stage is Stage.FOUND)
        await pilot.press("o", "z")
        await stands_still(pilot)
        assert not pane_of(pilot).display
        assert not {"output", "zoom", "back"} & keys(pilot)


async def test_it_follows_the_end_until_the_user_scrolls_up(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = 200
    monkeypatch.setattr(output_pane, "KEPT_LINES", kept)
    told: list[SearchEvent] = []

    def talking(searched: SearchConfig, control: Control) -> Iterator[SearchEvent]:
        yield TraceProgress(2)
        for _ in range(3):
            yield from command_scene.steps(kept)
        while True:
            while told:
                yield told.pop()
            control.check()
            time.sleep(0.01)  # the screen has to get its turn

    async with command_scene.app(talking).run_test(size=(120, 40)) as pilot:
        pane = pane_of(pilot)
        end = kept - pane.size.height
        await until(pilot, lambda: pane.max_scroll_y == pane.scroll_offset.y == end)  # though much came at once
        await pilot.press("home")
        await until(pilot, lambda: pane.scroll_offset.y == 0)
        told.append(Output("while the user reads"))
        await until(pilot, lambda: "while the user reads" in pane.text)
        assert pane.scroll_offset.y == 0
        await pilot.press("end")
        await until(pilot, lambda: pane.scroll_offset.y == pane.max_scroll_y)
        told.append(Output("at the end again"))
        await until(pilot, lambda: "at the end again" in pane.text and pane.scroll_offset.y == pane.max_scroll_y)


async def test_a_long_line_is_wrapped_to_the_width_there_is() -> None:
    words = " ".join(f"word{number}" for number in range(60))
    wide = "漢" * 300
    script = scene.scripted([TraceProgress(2), Output(words), Output(wide)])
    async with command_scene.app(script).run_test(size=(120, 40)) as pilot:
        pane = pane_of(pilot)
        await until(pilot, lambda: "漢" in pane.text)
        for size in ((120, 40), (80, 24), (200, 60)):
            await pilot.resize_terminal(*size)
            await stands_still(pilot)
            rows = pane.text.splitlines()
            assert words in "".join(rows)
            assert wide in "".join(rows)
            assert all(len(row) + row.count("漢") <= pane.size.width for row in rows)
            assert pane.scroll_offset.y == pane.max_scroll_y


async def test_a_command_that_fails_leaves_its_last_words_on_the_screen() -> None:
    def failing(searched: SearchConfig, control: Control) -> Iterator[SearchEvent]:
        yield TraceProgress(2)
        yield from (Output(f"  File {number}") for number in range(30))
        yield Output("SyntaxError: invalid syntax")
        raise Unusable(Failed("workload", "train.py:2: syntax error: invalid syntax"))

    async with command_scene.app(failing).run_test(size=(80, 24)) as pilot:
        screen, pane = screen_of(pilot), pane_of(pilot)
        await until(pilot, lambda: screen.state.stage is Stage.FAILED)
        await until(pilot, lambda: pane.max_scroll_y > 0 and pane.scroll_offset.y == pane.max_scroll_y)
        assert pane.text.endswith("SyntaxError: invalid syntax")
        assert "train.py:2: syntax error" in str(screen.query_one(VerdictPanel).render())
        await pilot.press("s")
        await until(pilot, lambda: screen.state.stage is Stage.FAILED)
        assert pane.text.count("SyntaxError") == 1, "a new search begins a new log"


async def test_before_the_first_run_it_is_said_what_a_run_does() -> None:
    async with command_scene.app(scene.missing_torch, autostart=False).run_test(size=(80, 24)) as pilot:
        await stands_still(pilot)
        assert side_effects(3) in pane_of(pilot).text.replace("\n", "")
        assert "s finds the largest {batch} that fits" in str(screen_of(pilot).query_one(VerdictPanel).render())


async def test_help_has_the_keys_of_the_output() -> None:
    async with command_scene.app(scene.missing_torch, autostart=False).run_test(size=(120, 40)) as pilot:
        await pilot.press("question_mark")
        assert isinstance(pilot.app.screen, HelpScreen)
        text = "\n".join(str(static.render()) for static in pilot.app.screen.query(Static))
        assert "the command's output, or the log of trials" in text
        assert "Formula" not in text


def test_a_command_runs(snap_compare: Compare) -> None:
    async def there(pilot: Pilot[int]) -> None:
        screen = screen_of(pilot)
        await until(pilot, lambda: screen.settled and screen.state.running is not None)
        await stands_still(pilot)

    app = command_scene.app(scene.scripted(command_scene.running()))
    assert snap_compare(app, terminal_size=(120, 40), run_before=there)


# The form


async def form_of(pilot: Pilot[int]) -> EditScreen:
    await pilot.press("e")
    form = pilot.app.screen
    assert isinstance(form, EditScreen)
    await until(pilot, lambda: all(node.is_mounted for node in form.walk_children(Widget, with_self=True)))
    return form


def error(form: EditScreen, name: str) -> str:
    shown = form.query_one(f"#{name}-error", Static)
    return str(shown.render()) if shown.display else ""


async def typed(pilot: Pilot[int], form: EditScreen, command: str) -> None:
    form.query_one("#kind", ChoiceField).value = "command"
    form.query_one("#command", Input).value = command
    await pilot.pause()


async def test_a_command_is_typed_into_the_form() -> None:
    app = scene.app(scene.config(), scene.missing_torch, autostart=False, options=WorkloadOptions(precision="amp-bf16"))
    async with app.run_test(size=(80, 24)) as pilot:
        form = await form_of(pilot)
        await typed(pilot, form, f"{PYTHON} 'my train.py' --bs={{batch}}")
        assert error(form, "command") == ""
        assert not form.query_one("#precision-field").display
        form.query_one("#gpus", Input).value = "8"
        await pilot.pause()
        await pilot.press("ctrl+s")
        await pilot.pause()
        workload = screen_of(pilot).state.config.workload
        assert workload.command is not None
        assert workload.command.words == (PYTHON, "my train.py", "--bs={batch}")
        assert workload.command.cwd == str(Path.cwd())
        assert workload.recipe.gpus == 8
        assert pane_of(pilot).display
        form = await form_of(pilot)
        assert form.query_one("#command", Input).value == f"{PYTHON} 'my train.py' --bs={{batch}}"
        assert form.query_one("#gpus", Input).value == "8"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("", "type what starts your training"),
        (f"{PYTHON} 'train.py {{batch}}", "no closing quotation; check quotes"),
        ("nosuchprogram --batch-size {batch}", "there is no program 'nosuchprogram'"),
        (f"{PYTHON} train.py", "write {batch} where the batch size goes"),
    ],
)
async def test_what_is_wrong_with_a_command_is_one_line_below_it(command: str, said: str) -> None:
    app = command_scene.app(scene.missing_torch, autostart=False)
    async with app.run_test(size=(80, 24)) as pilot:
        form = await form_of(pilot)
        await typed(pilot, form, command)
        assert said in error(form, "command")
        assert form.query_one("#apply", Button).disabled
        assert not form.query_one("#proposal", Button).display
        await pilot.press("ctrl+s")
        assert pilot.app.screen is form


async def test_the_flag_of_the_batch_size_is_proposed_and_taken() -> None:
    app = command_scene.app(scene.missing_torch, autostart=False)
    async with app.run_test(size=(80, 24)) as pilot:
        form = await form_of(pilot)
        await typed(pilot, form, f"{PYTHON} train.py --eval-batch-size 32 --batch-size 32 --name 'a b'")
        proposal = form.query_one("#proposal", Button)
        assert proposal.display
        assert str(proposal.label) == "--batch-size {batch} instead of --batch-size 32"
        proposal.press()
        await pilot.pause()
        value = form.query_one("#command", Input).value
        assert value == f"{PYTHON} train.py --eval-batch-size 32 --batch-size {{batch}} --name 'a b'"
        assert error(form, "command") == ""
        assert not proposal.display


async def test_model_file_and_command_are_chosen_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "steps.py"
    path.write_text("")
    app = command_scene.app(scene.missing_torch, autostart=False)
    async with app.run_test(size=(120, 40)) as pilot:
        given = screen_of(pilot).state.config
        form = await form_of(pilot)
        form.query_one("#kind", ChoiceField).value = "model"
        form.query_one("#model", ChoiceField).value = "bert-base"
        form.query_one("#optimizer", ChoiceField).value = "sgd"
        await pilot.press("ctrl+s")
        await pilot.pause()
        assert screen_of(pilot).state.config.workload.name == "bert-base"
        assert screen_of(pilot).state.config.workload.recipe.optimizer == "sgd"
        assert not pane_of(pilot).display
        form = await form_of(pilot)
        form.query_one("#kind", ChoiceField).value = "file"
        form.query_one("#workload", Input).value = str(tmp_path / "missing.py")
        await pilot.pause()
        assert "there is no file" in error(form, "workload")
        form.query_one("#workload", Input).value = str(path)
        await pilot.press("ctrl+s")
        await pilot.pause()
        assert screen_of(pilot).state.config.workload.file == str(path)
        form = await form_of(pilot)
        form.query_one("#kind", ChoiceField).value = "command"
        await pilot.press("ctrl+s")
        await pilot.pause()
        assert screen_of(pilot).state.config == given, "the command that the program was started with"


async def test_no_number_of_ranks_is_impossible_without_a_line_that_says_so() -> None:
    app = command_scene.app(scene.missing_torch, autostart=False)
    async with app.run_test(size=(80, 24)) as pilot:
        form = await form_of(pilot)
        form.query_one("#gpus", Input).value = "0"
        await pilot.pause()
        assert "at least 1" in error(form, "gpus")
        form.query_one("#gpus", Input).value = "99999999"
        await pilot.pause()
        assert "at most" in error(form, "gpus")
