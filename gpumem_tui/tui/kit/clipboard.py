"""Copies: to the terminal's clipboard, and into tmux's buffer where the program runs within it."""

from __future__ import annotations

import os
import subprocess
from typing import TypeVar

from textual.screen import Screen

Answer = TypeVar("Answer")
_TMUX_S = 2.0
_WAYS = (("load-buffer", "-w", "-"), ("load-buffer", "-"))
"""With -w tmux hands it to its terminal's clipboard too (tmux 3.2); older ones have the buffer alone (tmux(1))."""


def copy_to_clipboard(screen: Screen[Answer], text: str) -> None:
    """Copy to the terminal's clipboard (OSC 52), over SSH too where the terminal allows it; and say what was copied."""
    screen.app.copy_to_clipboard(text)
    what = text if "\n" not in text else f"{text.count(chr(10))} lines"
    into = " into tmux's buffer, and further" if is_in_tmux() else ""
    screen.notify(f"copied{into}, if the terminal lets programs do that: {what}", markup=False)


def is_in_tmux() -> bool:
    """Return whether the program's terminal is a pane of tmux's."""
    return bool(os.environ.get("TMUX"))


def to_tmux(text: str) -> None:
    """Put a text into tmux's newest buffer, which its key ] pastes; nothing where there is no tmux. Not for the loop.

    By default tmux sets its terminal's clipboard itself, and ignores programs that ask for it by OSC 52 (tmux(1),
    "set-clipboard external").
    """
    for way in _WAYS:
        try:
            done = subprocess.run(
                ["tmux", *way], input=text.encode(), capture_output=True, timeout=_TMUX_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return
        if done.returncode == 0:
            return
