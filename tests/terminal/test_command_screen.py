"""A search of a user's own command as a user sees it: the real program, a real terminal, real training scripts."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.sharing import WarmPython
from tests.terminal.terminal import Terminal, terminal

pytestmark = pytest.mark.scripts

_TRAIN = """
    import argparse, time
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--pause", type=float, default=0)
    arguments = parser.parse_args()
    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1000):
        model(torch.randn(arguments.batch_size, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"made step {step}")
        time.sleep(arguments.pause)
"""
_DEVICE = ("--gpu", "sim:t4-16gb")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A training script that can wait after each step."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(_TRAIN))
    return path


def _slow(script: Path, pause_s: str, python: str = "") -> tuple[str, ...]:
    return (python or WarmPython.path(), str(script), "--batch-size={batch}", "--pause", pause_s)


def _alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    _, left = psutil.wait_procs(processes, timeout=5)
    return [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


def test_a_command_from_start_to_verdict(script: Path) -> None:
    command = (WarmPython.path(), str(script), "--batch-size", "{batch}")
    with terminal("search", *_DEVICE, "--limit", "1GiB", "--", *command, columns=80, lines=24) as screen:
        screen.wait_for("tracing batch size 2", "Output of the command", "telemetry are", "c cancel")
        screen.wait_for("tracing batch size 3", "made step 1")
        screen.wait_for("VERIFIED IN SIMULATION", "out of memory", "o output")
        screen.press("o")
        screen.wait_for("o trials", "fragmentation")
        screen.press("z")
        screen.wait_until(lambda text: "OutOfMemoryError" in text and "Ledger" not in text, "the large output")
        screen.press("\x1b")
        screen.wait_for("Ledger")
        screen.press("3")
        screen.wait_for("techniques", "what-ifs not run: r runs them")
        screen.press("q")
        assert screen.exit_code() == 0


def _press(keys: str) -> Callable[[Terminal], None]:
    return lambda screen: screen.press(keys)


def _kill(screen: Terminal) -> None:
    os.kill(screen.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("leave", "code"), [(_press("q"), 130), (_press("\x03"), 130), (_kill, -9)], ids=["q", "ctrl+c", "SIGKILL"]
)
def test_leaving_in_the_middle_of_a_command_leaves_no_process(
    script: Path, leave: Callable[[Terminal], None], code: int
) -> None:
    with terminal("search", *_DEVICE, "--", *_slow(script, "5", sys.executable)) as screen:
        screen.wait_for("made step 0")
        children = screen.children()
        servers = [process for process in children if any("command_server.py" in word for word in process.cmdline())]
        assert len(servers) > 1, "runs are forked of one that has torch"
        leave(screen)
        assert screen.exit_code() == code
        assert _alive(children) == []


def test_a_command_is_held_goes_on_is_cancelled_and_edited(script: Path) -> None:
    with terminal("search", *_DEVICE, "--", *_slow(script, "1")) as screen:
        screen.wait_for("made step 0")
        screen.press("p")
        screen.wait_for("PAUSED", "held after the step that runs", "p continue")
        screen.press("p")
        screen.wait_for("tracing batch size 3", "p pause")
        children = screen.children()
        screen.press("c")
        screen.wait_for("CANCELLED", "before any batch ran", "e edit")
        assert _alive(children) == []
        screen.press("e")
        screen.wait_for("Train", "GPUs", "ctrl+s applies")
        screen.press(" --steps")
        screen.wait_for("--pause 1 --steps", "ctrl+s applies")
        screen.press("\r")
        screen.wait_for("READY", "--pause 1 --steps", "s start")
        screen.press("s")
        screen.wait_for("FAILED", "unrecognized arguments: --steps")
        screen.press("q")
        assert screen.exit_code() == 2
