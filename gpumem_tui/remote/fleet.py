"""All hosts together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from gpumem_tui.monitor.snapshot import Source
from gpumem_tui.remote.connection import Connection
from gpumem_tui.remote.hosts import RemoteHost
from gpumem_tui.remote.ssh import SshOptions
from gpumem_tui.remote.status import HostStatus


class WatchedHost(Source, Protocol):
    """A host as a screen sees it: a connection to it, or one of a recording."""

    @property
    def status(self) -> HostStatus:
        """The host's state."""

    def unsubscribe(self, tell: Callable[[], None]) -> None:
        """Have it called no more."""


class WatchedHosts(Protocol):
    """Several of them, as a screen sees them."""

    @property
    def connections(self) -> Mapping[str, WatchedHost]:
        """By the host's name."""

    @property
    def statuses(self) -> tuple[HostStatus, ...]:
        """Each host's state."""

    def subscribe(self, tell: Callable[[], None]) -> None:
        """Have this called whenever a status changes, from another thread; it must not wait."""

    def connect_now(self) -> None:
        """Try all that are away at once."""

    def stop(self) -> None:
        """End; returns at once, from any thread."""


class Fleet:
    """A connection a host, none of which waits for another.

    Attributes:
        connections: by the host's name, in the order in which they were named.
    """

    def __init__(self, hosts: Iterable[RemoteHost], options: SshOptions) -> None:
        self.connections = {host.name: Connection(host, options) for host in hosts}

    @property
    def statuses(self) -> tuple[HostStatus, ...]:
        """Each host's state now."""
        return tuple(each.status for each in self.connections.values())

    def start(self) -> None:
        """Connect to all of them; returns at once."""
        for each in self.connections.values():
            each.start()

    def subscribe(self, tell: Callable[[], None]) -> None:
        """Have this called whenever a status changes, from another thread; it must not wait."""
        for each in self.connections.values():
            each.subscribe(tell)

    def connect_now(self) -> None:
        """Try all that are away at once."""
        for each in self.connections.values():
            each.connect_now()

    def stop(self) -> None:
        """End all connections; returns at once, from any thread."""
        for each in self.connections.values():
            each.stop()
