"""One host over ssh: a thread that reads its lines, knows its state, and connects again after a while.

Bounded whatever the host does: a line, what ssh says, how many lines are taken in a second. Nothing is written there;
what is called is the user's own ssh with the user's own configuration, so agent, jump hosts and ControlMaster work.
"""

from __future__ import annotations

import os
import selectors
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from gpumem_tui.monitor.latest import LatestValue
from gpumem_tui.monitor.snapshot import HostProcess, Snapshot
from gpumem_tui.remote.decode import HostReport, NoReading, OtherSchema, decoded
from gpumem_tui.remote.explain import explained
from gpumem_tui.remote.hosts import RemoteHost
from gpumem_tui.remote.signals import RemoteSignal, send_signal
from gpumem_tui.remote.ssh import SshOptions
from gpumem_tui.remote.ssh_process import StderrTail, end_process, exit_code
from gpumem_tui.remote.status import HostStatus, Phase
from gpumem_tui.text import shortened

_LONGEST_LINE = 4 << 20
"""Bytes: 64 GPUs with a hundred processes each need half of it."""
_CHUNK = 1 << 16
_MOST_BANNER = 64 << 10
"""Bytes that a host's shell may print before the first reading."""
_MOST_ERRORS = 1 << 20
"""Bytes that may come on stderr between two readings: `ssh -vvv` writes a tenth of that."""
_MOST_LINES = 40
"""Readings in one second beyond which a host floods: the shortest interval asks for five."""
_FIRST_ANSWER_S = 45.0
"""For ssh to connect and the program there to start."""
_LEAST_SILENCE_S = 15.0
_SILENT_INTERVALS = 10
_POLL_S = 0.5
_BACK_OFF_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
_REFUSED_BACK_OFF_S = 60.0
"""Between two tries of a host that refuses the key or is refused itself: nothing changes there by itself."""
_END_S = 1.0


class _Broken(Exception):
    """The connection is of no use any more; one line says why."""


class Connection:
    """A host, connected to again and again until it is stopped.

    It is a source of snapshots too (`monitor.snapshot.Source`), for a Monitor of this host alone.
    """

    def __init__(self, host: RemoteHost, options: SshOptions) -> None:
        self.host = host
        self.ssh = options
        self._status: LatestValue[HostStatus] = LatestValue()
        self._status.put(HostStatus(host))
        self._stopped = threading.Event()
        self._again = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name=f"ssh {host.name}", daemon=True)

    @property
    def status(self) -> HostStatus:
        """The connection's state now."""
        assert self._status.value is not None
        return self._status.value

    @property
    def notice(self) -> str:
        """The host's name, and why it is away if it is."""
        status = self.status
        return f"{self.host.name} away: {status.problem}" if status.phase is Phase.AWAY else self.host.name

    def start(self) -> None:
        """Begin, unless it has begun; returns at once."""
        if self._thread.ident is None:
            self._thread.start()

    def latest(self) -> Snapshot | None:
        """The newest snapshot, None before the first."""
        report = self.status.report
        return None if report is None else report.snapshot

    def wait(self, after: Snapshot | None, timeout_s: float) -> Snapshot | None:
        """The first snapshot that is not `after`, or None if there is none in time."""
        deadline_s = time.monotonic() + timeout_s
        status = self._status.value
        while self.latest() is after and (left_s := deadline_s - time.monotonic()) > 0:
            status = self._status.wait(status, left_s) or status
        return None if self.latest() is after else self.latest()

    def subscribe(self, tell: Callable[[], None]) -> None:
        """Have this called whenever the status changes, from another thread; it must not wait."""
        self._status.subscribe(tell)

    def unsubscribe(self, tell: Callable[[], None]) -> None:
        """Have it called no more."""
        self._status.unsubscribe(tell)

    def signal(self, process: HostProcess, signal: RemoteSignal) -> None:
        """Signal a process there; takes as long as ssh does.

        Raises:
            NotSignalled: one line says why.
        """
        send_signal(self.host, self.ssh, process, signal)

    def connect_now(self) -> None:
        """Do not wait any longer before the next try."""
        self._again.set()

    def stop(self) -> None:
        """End; returns at once."""
        self._stopped.set()
        self._again.set()
        process = self._process
        if process is not None:
            end_process(process, 0.0)

    # In its thread

    def _run(self) -> None:
        tries = 0
        while not self._stopped.is_set():
            self._say(replace(self.status, phase=Phase.CONNECTING, retry_s=None, note=""))
            self._again.clear()
            problem, is_refused, answered = self._attempt()
            if self._stopped.is_set():
                return
            tries = 0 if answered else tries + 1
            wait_s = _REFUSED_BACK_OFF_S if is_refused else _BACK_OFF_S[min(tries, len(_BACK_OFF_S) - 1)]
            retry_s = time.monotonic() + wait_s
            self._say(replace(self.status, phase=Phase.AWAY, problem=problem, note="", retry_s=retry_s))
            self._again.wait(wait_s)

    def _attempt(self) -> tuple[str, bool, bool]:
        """Connect and read to the end: why it ended, whether a person has to see to it, whether it had answered."""
        try:
            process = subprocess.Popen(
                self.ssh.command(self.host), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, bufsize=0, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return f"{shlex.split(self.ssh.ssh)[0]} cannot be started: {error.strerror}", True, False
        self._process = process
        if self._stopped.is_set():
            end_process(process, 0.0)
        reading = _Reading(process, self.ssh.interval_s, self._take)
        try:
            reading.to_the_end(self._stopped)
            problem, is_refused = explained(exit_code(process), reading.errors, self.host, self.ssh)
        except _Broken as broken:
            problem, is_refused = str(broken), False
        finally:
            end_process(process, _END_S)
            self._process = None
        return problem, is_refused, reading.answered

    def _take(self, report: HostReport, note: str) -> None:
        self._say(
            replace(
                self.status, phase=Phase.LIVE, report=report, received_s=time.monotonic(), problem="", note=note,
                retry_s=None,
            )
        )  # fmt: skip

    def _say(self, status: HostStatus) -> None:
        self._status.put(status)


class _Reading:
    """What a process writes, taken apart into readings.

    Attributes:
        answered: a reading came.
    """

    def __init__(self, process: subprocess.Popen[bytes], interval_s: float, take: Callable[[HostReport, str], None]):
        self._said = StderrTail()
        self.answered = False
        self._process = process
        self._take = take
        self._silence_s = max(_LEAST_SILENCE_S, _SILENT_INTERVALS * interval_s)
        self._out = b""
        self._banner = 0
        self._complained = 0
        self._first_line = ""
        self._second, self._lines = 0, 0

    @property
    def errors(self) -> Sequence[str]:
        """The last lines of its stderr."""
        return self._said.lines

    def to_the_end(self, stopped: threading.Event) -> None:
        """Until stdout ends.

        Raises:
            _Broken: silence, a flood, or what is no reading.
        """
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        out, error = self._process.stdout.fileno(), self._process.stderr.fileno()
        heard_s = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            selector.register(error, selectors.EVENT_READ)
            while not stopped.is_set():
                ready = [key.fd for key, _ in selector.select(_POLL_S)]
                if error in ready and not self._read_stderr(os.read(error, _CHUNK)):
                    selector.unregister(error)
                if out in ready:
                    data = os.read(out, _CHUNK)
                    if not data:
                        self._said.take_rest(selector, error, self._process, self._read_stderr)
                        return
                    heard_s = time.monotonic()
                    self._read(data)
                self._check_silence(time.monotonic() - heard_s)

    def _read_stderr(self, data: bytes) -> bool:
        """Keep the last lines of stderr; False at its end."""
        self._complained += len(data)
        if self._complained > _MOST_ERRORS:
            raise _Broken(f"writes more than {_MOST_ERRORS >> 20} MiB to stderr between two readings")
        return self._said.take(data)

    def _check_silence(self, silent_s: float) -> None:
        patience_s = self._silence_s if self.answered else _FIRST_ANSWER_S
        if silent_s > patience_s:
            raise _Broken(f"silent for {silent_s:.0f} s" if self.answered else f"no answer within {silent_s:.0f} s")

    def _read(self, data: bytes) -> None:
        *lines, self._out = (self._out + data).split(b"\n")
        if len(self._out) > _LONGEST_LINE:
            raise _Broken(f"prints a line of more than {_LONGEST_LINE >> 20} MiB, which is no reading")
        for line in lines:
            self._count()
            self._line(line)

    def _count(self) -> None:
        second = int(time.monotonic())
        self._second, self._lines = second, self._lines + 1 if second == self._second else 1
        if self.answered and self._lines > _MOST_LINES:
            raise _Broken(f"prints more than {_MOST_LINES} lines a second, which are no readings")

    def _line(self, line: bytes) -> None:
        if not line.lstrip().startswith(b"{"):
            self._pass_over(line)
            return
        try:
            report = decoded(line)
        except OtherSchema as error:
            raise _Broken(f"its gpumem-tui is of another version: install the same one there ({error})") from error
        except NoReading:
            self._pass_over(line)
            return
        self.answered, self._banner, self._complained = True, 0, 0
        note = f"its shell prints “{self._first_line}”: passed over" if self._first_line else ""
        self._take(report, note)

    def _pass_over(self, line: bytes) -> None:
        """A shell's greeting before the first reading; more than that is no host to be read."""
        self._banner += len(line) + 1
        text = shortened(line[:200].decode("utf-8", "replace").strip(), 40)
        self._first_line = self._first_line or ("" if self.answered else text)
        if self._banner > _MOST_BANNER:
            raise _Broken(f"prints “{text}”, which is no reading; does its shell write to stdout?")
