"""Connections to a server: how many there may be, and which goes for a new one. Standard library only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

FIRST_BYTE_S, REQUEST_S = 5.0, 10.0
"""How long a connection may be silent, and take to say what it wants."""


@dataclass(eq=False)
class Admitted:
    """A connection that was let in. `is_idle`: it has not said yet what it wants, or no longer wants anything."""

    address: str
    close: Callable[[], None]
    is_idle: bool = True


class Admission:
    """Lets connections in, so many at once and so many of one address; the oldest that is idle goes for a new one.

    Whoever opens connections and gives nothing shuts nobody out: each new one takes the place of one of those. May be
    used by several threads.

    Args:
        most: at once. `most_of_an_address`: of one address.
    """

    def __init__(self, most: int, most_of_an_address: int) -> None:
        self._most = most
        self._most_of_an_address = most_of_an_address
        self._open: list[Admitted] = []
        self._lock = threading.Lock()

    def admit(self, address: str, close: Callable[[], None]) -> Admitted | None:
        """Let a connection in, and close the one that goes for it; None where all others are at work.

        Args:
            close: ends it, whoever else waits for it.
        """
        with self._lock:
            of_it = [one for one in self._open if one.address == address]
            crowd = of_it if len(of_it) >= self._most_of_an_address else self._open
            full = len(of_it) >= self._most_of_an_address or len(self._open) >= self._most
            goes = next((one for one in crowd if one.is_idle), None) if full else None
            if full and goes is None:
                return None
            if goes is not None:
                self._open.remove(goes)
            come = Admitted(address, close)
            self._open.append(come)
        if goes is not None:
            goes.close()
        return come

    def leave(self, connection: Admitted) -> None:
        """Forget one that has ended."""
        with self._lock:
            if connection in self._open:
                self._open.remove(connection)
