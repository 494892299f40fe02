"""The output of a command that runs in a terminal of its own, and the keys that are typed into it."""

from __future__ import annotations

from collections.abc import Callable

from textual.events import Blur, Focus, Key
from textual.keys import key_to_character

from gpumem_tui.tui.widgets.output_pane import OutputPane

_TITLE = "Output of the command"
_CONTROL = {
    "enter": b"\r",
    "backspace": b"\x7f",
    "ctrl+d": b"\x04",
    "ctrl+u": b"\x15",
    "ctrl+w": b"\x17",
    "ctrl+backslash": b"\x1c",
    "delete": b"\x1b[3~",
}


class CommandPane(OutputPane):
    """With the focus it types: letters and a few control keys go to the command, the rest moves the picture.

    Args:
        send: takes what is typed.

    Attributes:
        types: whether it does so; else keys mean what they mean without it.
    """

    BORDER_TITLE = f"{_TITLE} · tab: type into it"

    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__()
        self._send = send
        self.types = True

    async def _on_key(self, event: Key) -> None:
        if not self.types:
            return
        typed = _CONTROL.get(event.key)
        if typed is None and event.is_printable and event.character is not None:
            typed = event.character.encode()
        if typed is not None:
            event.stop()
            event.prevent_default()
            self._send(typed)

    def check_consume_key(self, key: str, character: str | None) -> bool:
        """Keys that it types are no bindings: the footer does not offer them meanwhile."""
        character = character or key_to_character(key)
        return self.types and (key in _CONTROL or (character is not None and character.isprintable()))

    def on_focus(self, event: Focus) -> None:
        """Say where keys go."""
        self.border_title = f"{_TITLE} · keys go to it · tab: back" if self.types else f"{_TITLE} · z: back"

    def on_blur(self, event: Blur) -> None:
        """Say how keys come here."""
        self.border_title = self.BORDER_TITLE
