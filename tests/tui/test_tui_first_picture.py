"""The picture that is there before Textual is, and who takes it away."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys

import pyte
import pytest
from textual.drivers.headless_driver import HeadlessDriver

from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.kit import first_picture as module
from gpumem_tui.tui.kit.first_picture import ALTERNATE, first_picture, taken_over
from gpumem_tui.tui.kit.main_screen import MainScreen
from tests.monitor.scripted import Scripted
from tests.nvml_stub.machine import FakeMachine
from tests.scenes import monitor as scene
from tests.terminal.terminal import terminal
from tests.terminal.test_monitor_screen import WELL

_BACK = "\x1b[?1049l"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """The terminal's output."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", stream)
    return stream


def test_it_is_left_to_who_draws_over_it(written: io.StringIO) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with first_picture(Scripted(scene.machine(2)), mine=False):
        assert written.getvalue().startswith(ALTERNATE)
        assert "GPU  Name" in written.getvalue()
        assert signal.getsignal(signal.SIGTERM) is not before
        assert taken_over()
        assert not taken_over()
    assert _BACK not in written.getvalue()
    assert signal.getsignal(signal.SIGTERM) is before


def test_it_is_taken_away_where_nobody_draws(written: io.StringIO) -> None:
    with pytest.raises(KeyboardInterrupt), first_picture(Scripted(scene.machine(2)), mine=False):
        raise KeyboardInterrupt
    assert written.getvalue().endswith(_BACK)


def test_it_fits_the_terminal_and_lists_whom_it_may(written: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "12")
    with first_picture(Scripted(scene.machine(8)), mine=True):
        lines = written.getvalue().partition("\x1b[?7l")[2].replace("\x1b[K", "").split("\r\n")
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 60
    monkeypatch.setenv("LINES", "60")
    with first_picture(Scripted(scene.machine(8)), mine=True):
        assert not any(user in written.getvalue() for user in scene.USERS)


@pytest.mark.parametrize("source", [Scripted(), Scripted(scene.of([]))], ids=["nothing read", "no GPU"])
def test_without_a_gpu_there_is_none(written: io.StringIO, source: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    with first_picture(source, mine=False):
        assert not taken_over()
    assert not written.getvalue()


_SHOWS = (
    "import os, signal, time; from gpumem_tui.tui.kit.first_picture import first_picture; "
    "from tests.monitor.scripted import Scripted; from tests.scenes import monitor as scene\n"
    "with first_picture(Scripted(scene.machine(1)), mine=False): "
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_takes_it_away(number: signal.Signals) -> None:
    code = f"{_SHOWS}os.kill(os.getpid(), {int(number)})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.returncode == 128 + number
    assert done.stderr.endswith(_BACK)


def test_a_stop_gives_the_terminal_back_until_it_continues() -> None:
    code = f"{_SHOWS}os.kill(os.getpid(), signal.SIGTSTP)"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        written = process.communicate(timeout=60)[1]
    assert process.returncode == 0
    shown, again, end = written.split(_BACK)
    assert shown.startswith(ALTERNATE)
    assert shown.split("\x1b[?7h")[0] == again.split("\x1b[?7h")[0]
    assert not end


def test_it_begins_at_the_top_and_clears_what_a_shell_left(written: io.StringIO) -> None:
    screen = pyte.Screen(120, 40)  # it has no second screen
    stream = pyte.Stream(screen)
    stream.feed("\r\n".join(f"line {number} of the shell" for number in range(60)))
    with first_picture(Scripted(scene.machine(1)), mine=False):
        stream.feed(written.getvalue())
    assert "driver" in screen.display[0]
    assert not any("of the shell" in line for line in screen.display)


def test_it_is_drawn_in_ascii_where_the_settings_say_so(written: io.StringIO) -> None:
    with first_picture(Scripted(scene.machine(2)), mine=False, ascii_only=True):
        assert "Name" in written.getvalue()
        assert written.getvalue().isascii()


async def test_the_program_answers_signals_before_it_takes_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    app = GpuMemApp({"monitor": MainScreen}, "monitor")
    before, takes = signal.getsignal(signal.SIGTERM), HeadlessDriver.start_application_mode
    answered: list[object] = []

    def start(driver: HeadlessDriver) -> None:
        answered.extend(signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT))
        takes(driver)

    monkeypatch.setattr(HeadlessDriver, "start_application_mode", start)
    async with app.run_test():
        pass
    assert set(answered) == {app._on_signal}
    assert signal.getsignal(signal.SIGTERM) is before


def test_nothing_is_cleared_until_all_is_drawn_over(fake_machine: FakeMachine) -> None:
    fake_machine.show(WELL)
    with terminal("monitor", env=fake_machine.environment) as screen:
        screen.wait_for("palette")
        heard = screen.heard.decode()
        screen.press("q")
        assert screen.exit_code() == 0
    assert heard.count(ALTERNATE) == 1
    assert "\x1b[2J" not in heard
