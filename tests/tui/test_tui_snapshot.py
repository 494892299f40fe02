"""The screen of a memory snapshot, driven by its keys, and how it looks."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from textual.pilot import Pilot

from gpumem_tui.memory import MIB
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.kit.dialogs import TextScreen
from gpumem_tui.tui.kit.help import HelpScreen
from gpumem_tui.tui.kit.row_list import RowList
from gpumem_tui.tui.snapshot.screen import SnapshotScreen
from tests.scenes.pictures import SIZES, Compare, stands_still, until
from tests.scenes.snapshot import comparison_app, fits, out_of_memory, snapshot_app
from tests.snapshots import files


def _text(app: GpuMemApp) -> str:
    """The screen as it is drawn."""
    return "\n".join("".join(part.text for part in strip) for strip in app.screen._compositor.render_strips())


def _rows(app: GpuMemApp, name: str) -> str:
    screen = app.main_screen("snapshot")
    return "\n".join(row.text for row in screen.query_one(f"#{name}", RowList).rows)


async def _drawn(pilot: Pilot[int], app: GpuMemApp) -> None:
    await until(pilot, lambda: "= allocated" in _text(app))


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_peak_categories_and_lines_at_once(tmp_path: Path, size: tuple[int, int]) -> None:
    app = snapshot_app(tmp_path, files.training())
    async with app.run_test(size=size) as pilot:
        await _drawn(pilot, app)
        shown = _text(app)
    assert "snapshot.pickle · cuda:0" in shown
    assert "▲ Peak 100.0 MiB allocated, most of it model (" in shown
    for line in ("model           ", "ada/model.py:12 forward", "▲ peak", "8 events"):
        assert line in shown


async def test_lists_by_key_and_by_arrows(tmp_path: Path) -> None:
    app = snapshot_app(tmp_path, files.training())
    async with app.run_test(size=(80, 24)) as pilot:
        await _drawn(pilot, app)
        titles = {"s": "Peak by stack", "m": "Segments when", "o": "Out of memory", "l": "Peak by source"}
        for key, said in titles.items():
            await pilot.press(key)
            await until(pilot, lambda said=said: said in _text(app))  # type: ignore[misc]
        await pilot.press("left")
        await until(pilot, lambda: "No request of this recording ran out of memory" in _text(app))


async def test_a_stack_opens_with_all_its_frames(tmp_path: Path) -> None:
    app = snapshot_app(tmp_path, files.training())
    async with app.run_test(size=(120, 40)) as pilot:
        await _drawn(pilot, app)
        await pilot.press("s", "down", "enter")
        await until(pilot, lambda: isinstance(app.screen, TextScreen))
        await until(pilot, lambda: "/home/ada/train.py:9 <module>" in _text(app))
        await pilot.press("escape", "m", "enter")
        await until(pilot, lambda: "in use in 1 blocks" in _text(app))


@pytest.mark.parametrize("size", [(60, 18), (80, 24)])
async def test_the_headline_is_whole_on_narrow_terminals(tmp_path: Path, size: tuple[int, int]) -> None:
    app = snapshot_app(tmp_path, files.fragmented())
    async with app.run_test(size=size) as pilot:
        await _drawn(pilot, app)
        verdict = app.main_screen("snapshot").query_one("#verdict", RowList)
        assert " ".join(_rows(app, "verdict").split()).endswith("enough, but not in one piece")
        assert verdict.size.height == len(verdict.rows)
        assert all(len(row.text) <= size[0] for row in verdict.rows)


async def test_out_of_memory_comes_first(tmp_path: Path) -> None:
    app = snapshot_app(tmp_path, files.fragmented())
    async with app.run_test(size=(120, 40)) as pilot:
        await _drawn(pilot, app)
        await until(pilot, lambda: "what keeps the largest free pieces" in _text(app))
        shown = _text(app)
        assert "✗ Out of memory: 0.15 GiB wanted, 0.40 GiB free in all" in shown
        assert "8 pieces, the largest of 45.0 MiB" in shown
        assert "✗" in _rows(app, "course")


async def test_devices_in_turn(tmp_path: Path) -> None:
    body = files.training()
    body["segments"] += [{**copy.deepcopy(segment), "device": 1} for segment in files.fragmented()["segments"]]
    body["device_traces"].append([])
    app = snapshot_app(tmp_path, body)
    async with app.run_test(size=(120, 40)) as pilot:
        await _drawn(pilot, app)
        assert "cuda:0 (1 of 2, d)" in _text(app)
        await pilot.press("d")
        await until(pilot, lambda: "cuda:1 (2 of 2, d)" in _text(app))
        await pilot.press("m")
        await until(pilot, lambda: "0.35 GiB" in _rows(app, "segments"))


async def test_text_of_a_file_cannot_reach_the_terminal(tmp_path: Path) -> None:
    body = files.training()
    hostile = "\x1b[31mred [bold]\x07"
    body["device_traces"][0][0]["frames"] = [{"filename": "/a.py", "line": 1, "name": hostile}]
    app = snapshot_app(tmp_path, body)
    async with app.run_test(size=(120, 40)) as pilot:
        await _drawn(pilot, app)
        assert "red [bold]" in _text(app)
        await pilot.press("s", "down", "enter")
        await until(pilot, lambda: isinstance(app.screen, TextScreen))
        await until(pilot, lambda: "a.py:1" in _text(app))
        assert "red [bold]" in _text(app)
        assert "\x1b" not in _text(app)


async def test_help_and_a_tiny_terminal(tmp_path: Path) -> None:
    app = snapshot_app(tmp_path, files.training())
    async with app.run_test(size=(120, 40)) as pilot:
        await _drawn(pilot, app)
        await pilot.press("question_mark")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        await pilot.press("escape")
        await pilot.resize_terminal(40, 10)
        await until(pilot, lambda: "needs 60×18, this is 40×10" in _text(app))
        assert isinstance(app.screen, SnapshotScreen)


@pytest.mark.parametrize("pane", ["l", "s", "m"])
@pytest.mark.parametrize("size", [SIZES["80x24"], SIZES["120x40"]], ids=["80x24", "120x40"])
def test_a_run_that_fits(snap_compare: Compare, tmp_path: Path, size: tuple[int, int], pane: str) -> None:
    async def shown(pilot: Pilot[int]) -> None:
        await pilot.press(pane)
        await stands_still(pilot)

    assert snap_compare(snapshot_app(tmp_path, fits()), terminal_size=size, run_before=shown)


@pytest.mark.parametrize("size", [SIZES["80x24"], SIZES["120x40"]], ids=["80x24", "120x40"])
def test_a_run_that_does_not(snap_compare: Compare, tmp_path: Path, size: tuple[int, int]) -> None:
    assert snap_compare(snapshot_app(tmp_path, out_of_memory()), terminal_size=size, run_before=stands_still)


async def test_it_opens_on_the_gpu_that_was_used(tmp_path: Path) -> None:
    body = files.training()
    for segment in body["segments"]:
        segment["device"] = 1
    body["device_traces"].insert(0, [files.event("alloc", files.BASE + 90, 512)])
    app = snapshot_app(tmp_path, body)
    async with app.run_test(size=(120, 40)) as pilot:
        await _drawn(pilot, app)
        assert "cuda:1 (2 of 2, d)" in _text(app)


async def test_without_a_history_it_says_how_to_record_one(tmp_path: Path) -> None:
    app = snapshot_app(tmp_path, files.body([files.event("snapshot", 0, 0)], files.training()["segments"]))
    async with app.run_test(size=(80, 24)) as pilot:
        await _drawn(pilot, app)
        assert "_record_memory_history(enabled='all')" in " ".join(_text(app).split())
        assert "▲ peak" not in _text(app)
        await until(pilot, lambda: "Held when written, by source line" in _text(app))


async def test_without_anything_recorded_the_segments_come_first(tmp_path: Path) -> None:
    held = files.block(files.BASE, 64 * MIB, "active_allocated")
    app = snapshot_app(tmp_path, files.body([], [files.segment(files.BASE, [held])]))
    async with app.run_test(size=(80, 24)) as pilot:
        await _drawn(pilot, app)
        assert "Segments when it was written" in _text(app)
        assert "64 MiB" in _rows(app, "segments")


async def test_two_files_and_a_line_that_changed(tmp_path: Path) -> None:
    app = comparison_app(tmp_path, fits(), out_of_memory())
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "before.pickle → after.pickle · cuda:0 · compared at the peak" in _text(app))
        await until(pilot, lambda: "model.py:20 forward (activations" in _rows(app, "lines"))
        assert "reserved at most" in _rows(app, "figures")
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, TextScreen))
        await until(pilot, lambda: "blocks after" in _text(app))
        await pilot.press("escape", "question_mark")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))


async def test_the_devices_of_two_files_in_turn(tmp_path: Path) -> None:
    after = files.training()
    after["segments"] += [{**copy.deepcopy(segment), "device": 1} for segment in files.fragmented()["segments"]]
    app = comparison_app(tmp_path, files.training(), after)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "cuda:1 (2 of 2, d)" in _text(app))
        await pilot.press("d")
        await until(pilot, lambda: "= No change" in _text(app))


@pytest.mark.parametrize("size", [SIZES["80x24"], SIZES["120x40"]], ids=["80x24", "120x40"])
def test_two_runs(snap_compare: Compare, tmp_path: Path, size: tuple[int, int]) -> None:
    assert snap_compare(comparison_app(tmp_path, fits(), out_of_memory()), terminal_size=size, run_before=stands_still)
