"""A chosen theme and a copied text outlive the screen."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpumem_tui.settings import Settings, keep_theme, theme_of
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.kit.clipboard import copy_to_clipboard, to_tmux
from gpumem_tui.tui.kit.main_screen import EVERY_ACT, Act, MainScreen
from tests.scenes.pictures import until


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of state of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "gpumem-tui" / "theme.json"


def test_a_chosen_theme_is_opened_with_until_the_settings_change() -> None:
    settings = Settings()
    assert theme_of(settings) == ""
    keep_theme(settings, "nord")
    assert theme_of(settings) == "nord"
    assert theme_of(Settings(theme="gruvbox")) == "gruvbox"


def test_a_damaged_file_is_as_none(own_state: Path) -> None:
    keep_theme(Settings(), "nord")
    own_state.write_bytes(b'{"chosen": 3')
    assert theme_of(Settings(theme="gruvbox")) == "gruvbox"


@pytest.mark.parametrize(("forbidden", "kept"), [(frozenset(), ["nord"]), (EVERY_ACT, [])])
async def test_choosing_keeps_it_unless_nothing_may_be_written(forbidden: frozenset[Act], kept: list[str]) -> None:
    said: list[str] = []
    app = GpuMemApp({"plan": MainScreen}, "plan", keep_theme=said.append, forbidden=forbidden)
    async with app.run_test() as pilot:
        await pilot.pause()
        assert said == []
        app.theme = "nord"
        await pilot.pause()
        await until(pilot, lambda: said == kept)


async def test_a_theme_that_cannot_be_kept_is_said() -> None:
    def keep(_: str) -> None:
        raise OSError(28, "No space left on device")

    app = GpuMemApp({"plan": MainScreen}, "plan", keep_theme=keep)
    async with app.run_test() as pilot:
        app.theme = "nord"
        await until(pilot, lambda: any("not kept: No space" in each.message for each in app._notifications))


_TMUX = """#!/bin/sh
[ "$2" = "$REFUSED" ] && exit 1
echo "$@" > "$FOLDER/words"
cat > "$FOLDER/copied"
"""


@pytest.fixture
def tmux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tmux that keeps what it is given in a folder."""
    program = tmp_path / "tmux"
    program.write_text(_TMUX)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("FOLDER", str(tmp_path))
    return tmp_path


async def test_within_tmux_a_copy_reaches_its_buffer(tmux: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMUX", "/tmp/tmux-0/default,1,0")
    app = GpuMemApp({"plan": MainScreen}, "plan")
    async with app.run_test() as pilot:
        copy_to_clipboard(app.screen, "gpumem-tui plan é")
        await until(pilot, lambda: (tmux / "copied").exists() and bool((tmux / "copied").read_text()))
    assert (tmux / "copied").read_text() == "gpumem-tui plan é"
    assert (tmux / "words").read_text() == "load-buffer -w -\n"


def test_an_older_tmux_gets_its_buffer_alone(tmux: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSED", "-w")
    to_tmux("a line")
    assert ((tmux / "words").read_text(), (tmux / "copied").read_text()) == ("load-buffer -\n", "a line")


async def test_without_tmux_none_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMUX", raising=False)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    app = GpuMemApp({"plan": MainScreen}, "plan")
    async with app.run_test() as pilot:
        copy_to_clipboard(app.screen, "a line")
        await pilot.pause()
