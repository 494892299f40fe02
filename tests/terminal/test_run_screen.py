"""`run --tui` in a real terminal, with a script that really trains."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.terminal.terminal import terminal

TRAIN = """
import sys
import torch
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
print("a terminal:", sys.stdin.isatty() and sys.stdout.isatty(), flush=True)
step = 0
try:
    while True:
        step += 1
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"\\r\\x1b[32mstep {step}\\x1b[0m", end="", flush=True)
        if step == 400:
            word = input("\\ncontinue? ")
            print("the answer was", word, flush=True)
except KeyboardInterrupt:
    print("\\ninterrupted", flush=True)
    sys.exit(3)
"""


def test_a_command_with_its_monitor(tmp_path: Path) -> None:
    """Its progress, its training process, an answer that is typed, Ctrl-C, and its own exit code."""
    env = {"GPUMEM_TUI_DIR": str(tmp_path / "probes")}
    with terminal("run", "--tui", "--", sys.executable, "-c", TRAIN, columns=120, lines=40, env=env) as screen:
        screen.wait_for("a terminal: True", "continue?", "STEP TIME")
        screen.press("q")
        screen.wait_for("Stop training and quit?")
        screen.press("n")
        screen.wait_until(lambda text: "End the command" not in text, "the question to close")
        screen.press("\t")  # from the processes round to the command's pane
        screen.wait_for("keys go to it")
        screen.press("yes\r")
        screen.wait_for("the answer was yes")
        screen.press("\x03")
        assert screen.exit_code(30) == 3
        assert "interrupted" in screen.text


def test_no_such_command_is_said_before_a_screen_opens(tmp_path: Path) -> None:
    with terminal("run", "--tui", "--", "no-such-command", env={"GPUMEM_TUI_DIR": str(tmp_path)}) as screen:
        screen.wait_for("gpumem-tui: there is no command no-such-command in PATH")
        assert screen.exit_code() == 127
