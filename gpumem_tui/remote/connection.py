"""Hosts over ssh: for each a thread that reads its lines, knows its state, and connects again after a while.

Bounded regardless of a host: a line, what ssh states, how many lines are taken in a second. Nothing is written there;
what is called is the user's own ssh with the user's own configuration, so agent, jump hosts and ControlMaster work.
"""

from __future__ import annotations

import re
import resource
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from gpumem_tui.errors import own_error
from gpumem_tui.monitor.report import COMPLETE_S, DRIVER_ANSWER_S, is_complete, waits
from gpumem_tui.monitor.snapshot import HostProcess, Snapshot, Source
from gpumem_tui.monitor.threads import LatestSnapshot, LatestValue
from gpumem_tui.monitor.wire import (
    FULL,
    KEY,
    LONGEST_LINE,
    PATCH,
    HostReport,
    LineError,
    NoReport,
    ReportReader,
)
from gpumem_tui.remote.hosts import RemoteHost
from gpumem_tui.remote.ssh import LinkLost, RemoteSignal, SshOptions, SshProcess, send_signal
from gpumem_tui.remote.status import HostPhase, HostStatus
from gpumem_tui.text import shortened, without_escapes

_BEGINS = re.compile(rb'\{\s*"(?:%s)"' % "|".join((KEY, FULL, PATCH)).encode())
"""How a reading begins."""
_MOST_BANNER = 64 << 10
"""Bytes that a host's shell may print before the first reading."""
_MOST_ERRORS = 1 << 20
"""Bytes that may come on stderr between two readings: `ssh -vvv` writes a tenth of that."""
_MOST_LINES = 40
"""Readings in one second beyond which a host floods: the shortest interval asks for five."""
_FIRST_ANSWER_S = 45.0
"""Seconds for ssh to connect and the program there to start, where somebody watches."""
ANSWER_S = 10.0
"""Seconds for this where somebody waits for the output."""
_LEAST_SILENCE_S = 15.0
_SILENT_INTERVALS = 10
_DESCRIPTORS, _OWN_DESCRIPTORS = 8, 256
"""File descriptors of a connection while its ssh starts, and of all else: the usual limit, 1,024, ends at about 200
hosts."""
_MANY, _SWITCH_S = 256, 0.05
"""With more hosts, each thread that waits for the interpreter asks for it so rarely (`sys.setswitchinterval`): hundreds
that ask 200 times a second, as by default, leave a busy machine little else to do."""
_POLL_S, _SETTLE_S = 5.0, 0.05
"""To see that a host is silent; what comes, and that a connection is to end, is seen at once."""
_BACK_OFF_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
_REFUSED_BACK_OFF_S = 60.0
"""Between two tries of a host that refuses the key or is refused itself: nothing changes there by itself."""


T = TypeVar("T")


class BackOff:
    """The wait after each try: longer with each one that failed, from the beginning again after an answer."""

    def __init__(self) -> None:
        self._failed = 0

    def after(self, *, answered: bool, is_refused: bool) -> float:
        """Return the seconds until the next try, after one that has ended.

        Args:
            answered: a reading had come.
            is_refused: a person has to see to it.
        """
        self._failed = 0 if answered else self._failed + 1
        return _REFUSED_BACK_OFF_S if is_refused else _BACK_OFF_S[min(self._failed, len(_BACK_OFF_S) - 1)]


class WatchedHost(LatestSnapshot, Source):
    """A host as a screen sees it, a source of snapshots for a Monitor of it alone: connected to, or of a recording.

    Args:
        newest: the values that its snapshots are of.
    """

    def __init__(self, host: RemoteHost, newest: LatestValue[T]) -> None:
        super().__init__(newest)
        self.host = host

    @property
    @abstractmethod
    def status(self) -> HostStatus:
        """Return the host's state."""

    @property
    def notice(self) -> str:
        """Return the host's name, and why it is away if it is, or for how long it has not answered."""
        status = self.status
        return f"{status.title}{f': {late}' if (late := status.late(time.monotonic())) else ''}"

    def latest(self) -> Snapshot | None:
        """Return the newest snapshot, None before the first."""
        report = self.status.report
        return None if report is None else report.with_ledgers


class Connection(WatchedHost):
    """A host, connected to again and again until it is stopped."""

    def __init__(self, host: RemoteHost, options: SshOptions) -> None:
        self._status: LatestValue[HostStatus] = LatestValue()
        self._status.put(HostStatus(host))
        super().__init__(host, self._status)
        self.ssh = options
        self._stopped = threading.Event()
        self._again = threading.Event()
        self._process: SshProcess | None = None
        self._thread = threading.Thread(target=self._run, name=f"ssh {host.name}", daemon=True)

    @property
    def status(self) -> HostStatus:
        """Return the connection's state now."""
        assert self._status.value is not None
        return self._status.value

    def start(self) -> None:
        """Begin, unless it has begun; returns at once."""
        if self._thread.ident is None:
            self._thread.start()

    def signal(self, process: HostProcess, signal: RemoteSignal) -> None:
        """Signal a process there; takes as long as ssh does.

        Raises:
            NotSignalled: one line gives the reason.
        """
        send_signal(self.host, self.ssh, process, signal)

    def connect_now(self) -> None:
        """Wait no longer before the next try."""
        self._again.set()

    def stop(self) -> None:
        """End; returns at once."""
        self._stopped.set()
        self._again.set()
        process = self._process
        if process is not None:
            process.terminate()

    # ---- in its thread

    def _run(self) -> None:
        back_off = BackOff()
        while not self._stopped.is_set():
            self._status.put(
                replace(self.status, phase=HostPhase.CONNECTING, retry_s=None, note="", began_s=time.monotonic())
            )
            self._again.clear()
            readings = Readings(self.ssh.interval_s, self._take)
            try:
                problem, is_refused = self._attempt(readings)
            except LinkLost as lost:
                problem, is_refused = str(lost), self._process is None
            except Exception as error:  # noqa: BLE001  named as why the host is away; the next try may go well
                problem, is_refused = own_error(error), False
            finally:
                process, self._process = self._process, None
                if process is not None:
                    process.end()
            if self._stopped.is_set():
                return
            wait_s = back_off.after(answered=readings.answered, is_refused=is_refused)
            away = replace(self.status, phase=HostPhase.AWAY, problem=problem, note="")
            self._status.put(replace(away, retry_s=time.monotonic() + wait_s))
            self._again.wait(wait_s)

    def _attempt(self, readings: Readings) -> tuple[str, bool]:
        """Connect and read to the end: why it ended, and whether a person has to see to it."""
        self._process = process = SshProcess(self.ssh.command(self.host), LONGEST_LINE, _MOST_ERRORS)
        if self._stopped.is_set():
            process.terminate()
        while not self._stopped.is_set():
            lines = process.read(_POLL_S)
            if lines is None:
                return process.explained(self.host, self.ssh, readings.printed)
            if readings.take(lines, time.monotonic() - process.heard_s):
                process.error_bytes = 0
        return "", False

    def _take(self, report: HostReport, note: str) -> None:
        now_s = time.monotonic()
        live = HostStatus(
            self.host, HostPhase.LIVE, report=report, received_s=now_s, note=note, interval_s=self.ssh.interval_s
        )
        self._status.put(live)


class Readings:
    """The readings among the lines that a host prints.

    Args:
        interval_s: how often one is to come.
        hand_on: called with each, and with what is odd about the host.

    Attributes:
        answered: a reading has come.
        printed: the first text that came before any reading.
    """

    def __init__(self, interval_s: float, hand_on: Callable[[HostReport, str], None]) -> None:
        self.answered = False
        self.printed = ""
        self._hand_on = hand_on
        self._reader = ReportReader()
        self._silence_s = max(_LEAST_SILENCE_S, _SILENT_INTERVALS * interval_s)
        self._banner = 0
        self._second, self._lines = 0, 0

    def take(self, lines: Iterable[bytes], silent_s: float) -> bool:
        """Hand on the readings among some lines, and return whether there was one.

        Args:
            silent_s: for how long nothing has come.

        Raises:
            LinkLost: silence, a flood, or what is no reading.
        """
        found = [self._line(line) for line in lines]
        if silent_s > (self._silence_s if self.answered else _FIRST_ANSWER_S):
            said = f"silent for {silent_s:.0f} s" if self.answered else f"no answer within {silent_s:.0f} s"
            raise LinkLost(said)
        return any(found)

    def _line(self, line: bytes) -> bool:
        second = int(time.monotonic())
        self._second, self._lines = second, self._lines + 1 if second == self._second else 1
        if self.answered and self._lines > _MOST_LINES:
            raise LinkLost(f"prints more than {_MOST_LINES} lines a second, which are no readings")
        report = self._report(line)
        if report is None:
            self._banner += len(line) + 1
            self._keep(line)
            if self._banner > _MOST_BANNER:
                last = shortened(without_escapes(line[:200].decode("utf-8", "replace")), 40)
                raise LinkLost(f"prints “{last}”, which is no reading; does its shell write to stdout?")
            return False
        self.answered, self._banner = True, 0
        self._hand_on(report, f"its shell prints “{self.printed}”: passed over" if self.printed else "")
        return True

    def _report(self, line: bytes) -> HostReport | None:
        """Return the reading in a line, wherever in it that begins: what a shell prints need not end a line."""
        unread: NoReport | None = None
        for found in _BEGINS.finditer(line):
            try:
                report = self._reader.read(line[found.start() :])
            except NoReport as error:  # another may begin behind this one
                unread = error
                continue
            except LineError as error:
                if self.answered or PATCH.encode() in found[0]:
                    raise _damaged(error) from error
                raise LinkLost(f"its gpumem-tui is of another version: install the same one there ({error})") from error
            if not self.answered:
                self._keep(line[: found.start()])
            return report
        if unread is not None:
            raise _damaged(unread)
        return None

    def _keep(self, line: bytes) -> None:
        if not (self.answered or self.printed):
            self.printed = shortened(without_escapes(line[:200].decode("utf-8", "replace")), 40)


def _damaged(error: LineError) -> LinkLost:
    return LinkLost(f"a reading of its is damaged ({error}): does its shell write to stdout?")


# ---- several


def _answered(status: HostStatus, timeout_s: float) -> HostStatus:
    """Return a host's state; of one that has not said a word in time, that it is away."""
    if status.report is not None or status.problem:
        return status
    remedy = f"see what {status.host.by_hand} does, or allow more with --timeout"
    return replace(status, phase=HostPhase.AWAY, problem=f"no answer within {timeout_s:g} s: {remedy}")


class Fleet:
    """A connection a host, none of which waits for another.

    Attributes:
        connections: by the host's name, in the order in which they were named.
    """

    def __init__(self, hosts: Iterable[RemoteHost], options: SshOptions) -> None:
        self.connections = {host.name: Connection(host, options) for host in hosts}
        self._usual_switch_s: float | None = None

    @property
    def statuses(self) -> tuple[HostStatus, ...]:
        """Return each host's state now."""
        return tuple(each.status for each in self.connections.values())

    def settled(self, timeout_s: float = ANSWER_S) -> tuple[HostStatus, ...]:
        """Wait until each host has answered with every value, or is away, for a while at most; return their states.

        Args:
            timeout_s: for the first answer; a host that has given none by then is away in what is returned.
        """
        from_s = time.monotonic()
        answered_s: dict[str, float] = {}

        def is_settled(status: HostStatus) -> bool:
            now_s = time.monotonic()
            if status.report is None or status.problem:
                return bool(status.problem) or now_s - from_s > timeout_s
            waited_s = now_s - answered_s.setdefault(status.host.name, now_s)
            snapshot = status.report.snapshot
            if waits(snapshot.problem):
                return waited_s > DRIVER_ANSWER_S
            return (not snapshot.problem and is_complete(snapshot)) or waited_s > COMPLETE_S

        while not all(map(is_settled, self.statuses)):
            time.sleep(_SETTLE_S)
        return tuple(_answered(status, timeout_s) for status in self.statuses)

    def start(self) -> None:
        """Connect to all of them, with as many descriptors as that takes if we may have them; returns at once."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _OWN_DESCRIPTORS + _DESCRIPTORS * len(self.connections)
        if resource.RLIM_INFINITY != soft < wanted:
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
        if len(self.connections) > _MANY:
            self._usual_switch_s = sys.getswitchinterval()
            sys.setswitchinterval(_SWITCH_S)
        for each in self.connections.values():
            each.start()

    def subscribe(self, tell: Callable[[], None]) -> None:
        """Call `tell` whenever a status changes, from another thread; it must not wait."""
        for each in self.connections.values():
            each.subscribe(tell)

    def connect_now(self) -> None:
        """Try all that are away at once."""
        for each in self.connections.values():
            each.connect_now()

    def stop(self) -> None:
        """End all connections; returns at once, from any thread."""
        if self._usual_switch_s is not None:
            sys.setswitchinterval(self._usual_switch_s)
        for each in self.connections.values():
            each.stop()
