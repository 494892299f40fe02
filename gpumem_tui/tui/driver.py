"""The terminal, for a program that may be stopped and continued by others."""

from __future__ import annotations

import asyncio

from textual.drivers.linux_driver import LinuxDriver


class TerminalDriver(LinuxDriver):
    """Textual's, and it may be continued after a stop that it did not see.

    Textual takes the terminal whenever the process is continued. After SIGSTOP, as batch systems send it, the terminal
    had never been given back: Textual 8 would start a second thread that reads keys, and both wait for each other at
    the end.
    """

    _gave_back = False

    def suspend_application_mode(self) -> None:
        """Give the terminal back."""
        super().suspend_application_mode()
        self._gave_back = True

    def resume_application_mode(self) -> None:
        """Take the terminal, soon: Textual asks in a signal's handler, where a lock that it needs may be held."""
        asyncio.get_running_loop().call_soon_threadsafe(self._take)

    def _take(self) -> None:
        """Take the terminal, and draw everything again: the shell may have written on it."""
        if not self._gave_back:
            super().suspend_application_mode()
        super().resume_application_mode()
        self._gave_back = False
        self._app.call_later(self._app.refresh)
