"""A search on another machine as a user sees it: the real program at both ends; ssh is a stand-in."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from tests.remote.standins import Ssh
from tests.sharing import WarmPython
from tests.terminal.terminal import terminal


def test_trials_run_there_and_show_here(tmp_path: Path) -> None:
    ssh = Ssh(tmp_path)
    ssh.host("box", "echo Welcome to box", 'exec sh -c "$1"')
    there = f"env PYTHONPATH={shlex.quote(str(Path(__file__).parents[2]))} {shlex.quote(sys.executable)} -m gpumem_tui"
    words = ["search", "--host", "box", "--remote-command", there, "--remote-directory", str(tmp_path)]
    trained = ["--model", "mlp", "--gpu", "sim:t4-16gb", "--limit", "3GiB", "--python", WarmPython.path()]
    with terminal(*words, *trained, columns=80, lines=24, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}) as screen:
        screen.wait_for("box: SIMULATED NVIDIA T4", "c cancel")
        screen.press("p")
        screen.wait_for("p go on")
        screen.press("p")
        screen.wait_for("s start", "e edit", "out of memory", "VERIFIED")
        screen.press("q")
        assert screen.exit_code() == 0
    assert len(ssh.called) == 1
