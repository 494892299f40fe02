"""The program in a real terminal on a machine without a GPU, beside a process that publishes."""

from __future__ import annotations

from pathlib import Path

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
        screen.wait_until(lambda text: "started by" not in text, "the dialogue to close")
        screen.press("q")
        assert screen.exit_code() == 0
