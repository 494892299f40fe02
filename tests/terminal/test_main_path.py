"""The main job as a user sees it: the real program, a real terminal, real child processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.pairs import slow_beyond
from tests.terminal.terminal import Terminal, terminal
from tests.waiting import wait_until_gone

_SMALL = ["--layers", "2", "--hidden", "128", "--heads", "2", "--vocab", "4096", "--seq-len", "512"]


def _search_in(screen: Terminal) -> list[psutil.Process]:
    """Wait until a trial process runs."""
    screen.wait_until(lambda _: bool(screen.children()), "a child process")
    return screen.children()


@pytest.mark.parametrize(("columns", "lines"), [pytest.param(120, 40, marks=pytest.mark.slow), (80, 24)])
def test_search_from_start_to_verdict(columns: int, lines: int) -> None:
    with terminal("search", *_SMALL, "--limit", "2GiB", columns=columns, lines=lines) as screen:
        text = screen.wait_for("SIMULATED")
        assert "measured" not in text.lower()
        screen.wait_for("VERIFIED", "out of memory")
        screen.press("q")
        assert screen.exit_code() == 0


def test_opening_without_a_command_waits_for_the_user() -> None:
    with terminal() as screen:
        screen.wait_for("SIMULATED", "gpt2")
        assert screen.children() == []
        screen.press("s")
        _search_in(screen)
        screen.press("c")
        screen.wait_for("CANCELLED")
        screen.press("q")
        screen.exit_code()


def test_quitting_while_a_trial_runs_leaves_nothing_behind() -> None:
    with terminal("search", python=sys.executable) as screen:
        children = _search_in(screen)
        screen.press("q")
        assert screen.exit_code() == 130
        wait_until_gone([child.pid for child in children])


@pytest.mark.parametrize("number", slow_beyond(1, [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP]))
def test_being_killed_leaves_nothing_behind(number: signal.Signals) -> None:
    with terminal("search", python=sys.executable) as screen:
        children = _search_in(screen)
        os.kill(screen.pid, number)
        screen.exit_code()
        wait_until_gone([child.pid for child in children])


@pytest.mark.parametrize(
    "keys", slow_beyond(3, ["q", "3e\x03", "\x10\x03", "1q", "3q", "32q", "e\x03", "?\x03", "\x03"])
)
def test_leaving_while_something_is_being_put_up(keys: str) -> None:
    """Typed ahead: what a key opens is not there yet when the next one leaves."""
    with terminal() as screen:
        screen.wait_until(lambda text: bool(text.strip()), "anything at all")
        screen.press(keys)
        assert screen.exit_code() == 0
        assert "Traceback" not in screen.text


def _ctrl_z(screen: Terminal) -> None:
    screen.press("\x1a")


def _stopped_by_others(screen: Terminal) -> None:
    os.kill(screen.pid, signal.SIGSTOP)


@pytest.mark.parametrize("stop", [_ctrl_z, _stopped_by_others])
def test_a_stop_harms_nothing_and_afterwards_all_is_drawn_again(stop: Callable[[Terminal], None]) -> None:
    with terminal("plan", *_SMALL) as screen:
        screen.wait_for("parameters", "? help")
        for _ in range(2):
            stop(screen)
            screen.wait_until(lambda _: screen.is_stopped(), "the stop")
            screen.clear()
            os.kill(screen.pid, signal.SIGCONT)
            screen.wait_for("parameters", "? help")
        screen.press("q")
        assert screen.exit_code() == 0


@pytest.mark.slow
def test_resizing_at_any_moment() -> None:
    with terminal("search", *_SMALL, "--limit", "2GiB") as screen:
        for columns, lines in [(80, 24), (40, 10), (200, 60), (20, 5), (120, 40)]:
            screen.resize(columns, lines)
            time.sleep(0.3)
        screen.wait_for("VERIFIED")


@pytest.mark.slow
def test_without_colour_and_in_ascii_it_says_the_same() -> None:
    with terminal("search", *_SMALL, "--limit", "2GiB", env={"NO_COLOR": "1", "GPUMEM_TUI_ASCII": "1"}) as screen:
        text = screen.wait_for("VERIFIED")
        assert text.isascii()


@pytest.mark.parametrize("command", ["search", "plan"])
def test_the_settings_file_counts_for_every_screen(command: str, tmp_path: Path) -> None:
    settings = tmp_path / "gpumem-tui/settings.toml"
    settings.parent.mkdir()
    settings.write_text("ascii = true\n")
    with terminal(command, "--gpu", "sim:t4-16gb", *_SMALL, env={"XDG_CONFIG_HOME": str(tmp_path)}) as screen:
        assert screen.wait_for("gpt2", "T4").isascii()
        screen.press("q")
        screen.exit_code()
        settings.write_text("asci = true\n")
    with terminal(command, "--gpu", "sim:t4-16gb", *_SMALL, env={"XDG_CONFIG_HOME": str(tmp_path)}) as screen:
        screen.wait_for("settings.toml:1: unknown key 'asci'; did you mean ascii?")
        assert screen.exit_code() == 2
