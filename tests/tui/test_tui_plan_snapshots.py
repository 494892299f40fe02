"""How the Plan screen looks. After a change that is meant: `pytest tests/tui --snapshot-update`, then the report."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from tests.tui import plan_scene
from tests.tui.pictures import SIZES, Compare, pressed, stands_still
from tests.tui.plan_scene import FITS, GPT2, LLAMA, RESNET

MEDIUM, SMALL = SIZES["120x40"], SIZES["80x24"]


def after(*keys: str) -> object:
    """Wait until everything is worked out, press keys, and wait again."""

    return pressed(*keys, there=lambda pilot: plan_scene.plan_screen(pilot.app).settled)


async def held(pilot: Pilot[int]) -> None:
    """Wait for what can be had without the trace."""
    await stands_still(pilot)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_too_large(snap_compare: Compare, size: tuple[int, int], tmp_path: Path) -> None:
    assert snap_compare(plan_scene.app(LLAMA, tmp_path), terminal_size=size, run_before=after())


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_it_fits(snap_compare: Compare, size: tuple[int, int], tmp_path: Path) -> None:
    assert snap_compare(plan_scene.app(FITS, tmp_path), terminal_size=size, run_before=after("v"))


@pytest.mark.parametrize("pane", ["t", "v", "j", "c"], ids=["techniques", "curves", "judgement", "compare"])
def test_every_pane_at_80x24(snap_compare: Compare, pane: str, tmp_path: Path) -> None:
    keys = ("down", "right", pane, "down")
    assert snap_compare(plan_scene.app(GPT2, tmp_path), terminal_size=SMALL, run_before=after(*keys))


def test_memory_over_a_step(snap_compare: Compare, tmp_path: Path) -> None:
    keys = ("v", *["down"] * 4)
    assert snap_compare(plan_scene.app(GPT2, tmp_path), terminal_size=SIZES["200x60"], run_before=after(*keys))


def test_while_the_step_is_traced(snap_compare: Compare, tmp_path: Path) -> None:
    assert snap_compare(plan_scene.app(GPT2, tmp_path, holds=True), terminal_size=MEDIUM, run_before=held)


def test_what_cannot_be_is_explained_beside_the_control(snap_compare: Compare, tmp_path: Path) -> None:
    keys = ("down", "down", "down", "7")
    assert snap_compare(plan_scene.app(GPT2, tmp_path), terminal_size=SMALL, run_before=after(*keys))


def test_a_convolutional_network(snap_compare: Compare, tmp_path: Path) -> None:
    assert snap_compare(plan_scene.app(RESNET, tmp_path), terminal_size=MEDIUM, run_before=after("j", "end"))


def test_picking_a_model(snap_compare: Compare, tmp_path: Path) -> None:
    keys = ("enter", *"llama 8b")
    assert snap_compare(plan_scene.app(GPT2, tmp_path), terminal_size=SMALL, run_before=after(*keys))


def test_an_explanation(snap_compare: Compare, tmp_path: Path) -> None:
    keys = ("n", "down", "down", "down", "h")
    assert snap_compare(plan_scene.app(GPT2, tmp_path), terminal_size=MEDIUM, run_before=after(*keys))


def test_the_keys(snap_compare: Compare, tmp_path: Path) -> None:
    assert snap_compare(plan_scene.app(GPT2, tmp_path), terminal_size=MEDIUM, run_before=after("question_mark"))


def test_ascii_only(snap_compare: Compare, tmp_path: Path) -> None:
    app = plan_scene.app(GPT2, tmp_path, ascii_only=True)
    assert snap_compare(app, terminal_size=MEDIUM, run_before=after("v"))


def test_without_colour(snap_compare: Compare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert snap_compare(plan_scene.app(LLAMA, tmp_path), terminal_size=MEDIUM, run_before=after())


@pytest.mark.parametrize("size", [(68, 18), (40, 10)], ids=["smallest", "tiny"])
def test_small_terminals(snap_compare: Compare, size: tuple[int, int], tmp_path: Path) -> None:
    assert snap_compare(plan_scene.app(GPT2, tmp_path), terminal_size=size, run_before=after())
