"""The program in a real terminal on a machine without a GPU, next to a process that publishes."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attach.loops import LET_US_TRACE
from tests.terminal.terminal import terminal
from tests.watch.rings import ON_CPU, RingFile, this_process


def test_the_bare_command_opens_on_the_monitor_where_a_probe_answers(tmp_path: Path) -> None:
    folder = tmp_path / "probes"
    RingFile(folder, this_process()).sample(ON_CPU)
    with terminal(env={"GPUMEM_TUI_DIR": str(folder)}) as screen:
        screen.wait_for("host memory PID", "python train.py", "parameters", "STEP TIME")
        screen.press("\x1b[B")
        screen.wait_for("l look")
        screen.press("\r")
        screen.wait_for("started by gpumem-tui run", "host memory has no caching allocator")
        screen.press("q")
        screen.wait_until(lambda text: "started by" not in text and "l look" in text, "the dialogue to close")
        screen.press("q")
        assert screen.exit_code() == 0


@pytest.mark.skipif(platform.machine() != "x86_64", reason="attaching works on x86-64 only")
def test_who_does_not_want_to_attach_is_told_that_nothing_was_done(tmp_path: Path) -> None:
    folder = tmp_path / "probes"
    script = [sys.executable, "-c", f"{LET_US_TRACE}\nimport sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # it ends with its input
        assert process.stdout is not None
        process.stdout.readline()
        with terminal("attach", str(process.pid), env={"GPUMEM_TUI_DIR": str(folder)}) as screen:
            screen.wait_for("Its main thread is stopped for some milliseconds", "Attach? [y/N]")
            screen.press("n\r")
            screen.wait_for("gpumem-tui: not attached")
            assert screen.exit_code() == 4
    assert not folder.exists()
