"""A search on a host, seen from here: the same events as of a search on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace

from gpumem_tui import __version__
from gpumem_tui.errors import OptionError
from gpumem_tui.options.configuration import Options
from gpumem_tui.remote.hosts import RemoteHost
from gpumem_tui.remote.ssh import HostLink, LinkLost, SshOptions
from gpumem_tui.run.control import Control, Unusable
from gpumem_tui.run.events import EventError, Failed, TrialDone
from gpumem_tui.search import verdict
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.runner import SearchEvent, SearchFinished, TrialFinished
from gpumem_tui.search.wire import Configured, NotSearchable, Reply, decode_reply
from gpumem_tui.text import shortened

COMMAND = "search-for-viewer"
"""The program's command on the host."""
_POLL_S = 0.1
_FIRST_ANSWER_S = 60.0
"""For ssh to connect, the program there to start and the driver there to answer."""
_CANCEL_S = 10.0
_MOST_BANNER = 64 << 10
"""Bytes that a host's shell may print before the first answer."""


class RemoteSearch:
    """Searches on one host; `search` takes the place of `search.runner.search`.

    Attributes:
        ssh: how the host is reached.
        directory: where the trials run there; empty for the login's home.
        asked: what was typed: paths in it are the host's.
    """

    def __init__(self, host: RemoteHost, options: SshOptions, directory: str, asked: Options) -> None:
        self.host = host
        self.ssh = options
        self.directory = directory
        self.asked = asked
        self._link: HostLink | None = None

    def configure(self) -> Configured:
        """Ask what is searched there: the host chooses the GPU, reads the files and checks the options.

        Raises:
            OptionError: the options are wrong there, or the program there is of another version.
            LinkLost: the host cannot be reached, or has no such program.
        """
        if self._link is not None:
            self._link.end()
        self._link = link = HostLink(self.host, self.ssh, self.ssh.program(COMMAND))
        link.send("configure", version=__version__, directory=self.directory, options=asdict(self.asked))
        deadline_s, banner, said = time.monotonic() + _FIRST_ANSWER_S, 0, ""
        while time.monotonic() < deadline_s:
            line = link.receive(_POLL_S)
            if line is None:
                continue
            try:
                reply = decode_reply(line)
            except EventError:
                banner += len(line) + 1
                said = shortened(line[:200].decode("utf-8", "replace").strip(), 40)
                if banner <= _MOST_BANNER:
                    continue
                link.end()
                raise LinkLost(f"prints “{said}”, which is no answer; does its shell write to stdout?") from None
            if isinstance(reply, Configured):
                here = replace(reply.config.device, host=self.host.name)
                return replace(reply, config=replace(reply.config, device=here))
            link.end()
            raise OptionError(f"{self.host.name}: {reply.detail if isinstance(reply, NotSearchable) else 'no answer'}")
        link.end()
        raise LinkLost(f"no answer within {_FIRST_ANSWER_S:.0f} s" + (f", but “{said}”" if said else ""))

    def search(self, config: SearchConfig, control: Control | None = None) -> Iterator[SearchEvent]:
        """Yield the events of a search there.

        Raises:
            Unusable: it cannot start there, or the connection is lost before the first trial.
        """
        control = control or Control()
        results: list[TrialDone] = []
        try:
            if self._link is None or not self._link.is_open:
                config = self.configure().config
            assert self._link is not None
            steered = _Steered(self._link)
            with control.running(steered):
                yield from self._events(self._link, config, control, results)
                steered.is_over = True
        except (LinkLost, OptionError) as error:
            said = str(error) if isinstance(error, OptionError) else f"{self.host.name}: {error}"
            if not results:
                raise Unusable(Failed("device", said)) from error
            yield SearchFinished(verdict.failed(results, said))

    def end(self) -> None:
        """End the connection, and with it what runs there."""
        if self._link is not None:
            self._link.end()

    def _events(
        self, link: HostLink, config: SearchConfig, control: Control, results: list[TrialDone]
    ) -> Iterator[SearchEvent]:
        link.send("search")
        cancelled_s: float | None = None
        while True:
            if control.cancelled:
                if cancelled_s is None:
                    cancelled_s = time.monotonic()
                    link.send("cancel")
                elif time.monotonic() - cancelled_s > _CANCEL_S:
                    link.end()
                    yield SearchFinished(verdict.cancelled(results))
                    return
            line = link.receive(_POLL_S)
            if line is None:
                continue
            event = self._decoded(line, config)
            if isinstance(event, Failed):
                raise Unusable(replace(event, detail=f"{self.host.name}: {event.detail}"))
            if isinstance(event, Configured | NotSearchable):
                continue
            if isinstance(event, TrialFinished):
                results.append(event.result)
            yield event
            if isinstance(event, SearchFinished):
                return

    @staticmethod
    def _decoded(line: bytes, config: SearchConfig) -> Reply:
        try:
            return decode_reply(line, config)
        except EventError as error:
            raise LinkLost(f"its answer cannot be read: {error}") from error


class _Steered:
    """The remote search that `Control` holds and ends. One that is over leaves the connection for the next."""

    def __init__(self, link: HostLink) -> None:
        self._link = link
        self.is_over = False

    def pause(self) -> None:
        self._link.send("pause")

    def resume(self) -> None:
        self._link.send("resume")

    def end(self) -> None:
        if not self.is_over:
            self._link.end()
