"""Recordings of the GPUs of hosts, which may be one machine alone: how each stood at every moment, written and read.

A picture is how all hosts stood at one moment. A recording of one machine has a single host, and its header notes this:
it is shown as that machine's Monitor, and judged by the settings of who plays it. A recording of several hosts also
keeps their probes' reports, with ranks: "when did rank 3 fill up" is asked of a recording. Files of version 1 hold the
snapshots of one machine by themselves; each is read as a picture.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from gpumem_tui.errors import own_error
from gpumem_tui.monitor.alerts import Alert, AlertMark, Alerts, NewAlerts
from gpumem_tui.monitor.probes import NOTHING_SAID, Ask, ProbeReport, no_probes, with_unlisted
from gpumem_tui.monitor.snapshot import Snapshot, Source
from gpumem_tui.monitor.wire import HostReport
from gpumem_tui.recording.file import HEADER_KEY, RecordingEnds, RecordingError, RecordingFile, RecordingWriter, when
from gpumem_tui.remote.hosts import RemoteHost
from gpumem_tui.remote.status import AwayMarks, HostPhase, HostStatus

SNAPSHOTS_VERSION, VERSION = 1, 3
"""In the header: pictures are the snapshots of one machine by themselves, or those of hosts. Files of version 2 have
ledgers too, and `Unknown` in other words."""
BEGAN = "began"
"""In a line: the alerts that began with it. `_MARKED` in the header states that lines have it, `_MACHINE` that the only
host is the machine itself."""
_MARKED, _MACHINE = "marks", "machine"
_POLL_S = 0.5
_IDLE_S = 0.05
"""Between two looks at a source that has nothing new and does not wait for it, as it has ended."""
_END_S = 10.0


class RecordedHost(Struct, frozen=True):
    """How a host stood, as `HostStatus` states; but `received_s` is in seconds since the epoch."""

    destination: str
    port: int | None
    phase: HostPhase
    problem: str
    note: str
    received_s: float | None
    report: HostReport | None


class RecordedPicture(Struct, frozen=True):
    """A picture as the file has it: hosts by their names."""

    time_s: float
    hosts: Mapping[str, RecordedHost]


@dataclass(frozen=True)
class HostsPicture:
    """The state of all hosts at one moment, in seconds since the epoch."""

    time_s: float
    statuses: tuple[HostStatus, ...]

    @property
    def snapshot(self) -> Snapshot | None:
        """Return the snapshot of the first host, which is the machine's in a recording of one; None without one."""
        report = self.statuses[0].report if self.statuses else None
        return None if report is None else report.with_ledgers


class GpuRecording:
    """A recording that can be read and played.

    Attributes:
        file: what it is in.
        of_one_machine: it is of the machine it was made on, and of no other.
        damage: after `pictures` came to an end: one line if it did not read the whole file, else empty.

    Raises:
        RecordingError: the file cannot be read, is no recording, or one of a later version.
    """

    def __init__(self, path: Path | RecordingFile) -> None:
        self.file = path if isinstance(path, RecordingFile) else RecordingFile(path)
        self.damage = ""
        self._version = self.file.header[HEADER_KEY]
        if self._version not in range(SNAPSHOTS_VERSION, VERSION + 1):
            raise RecordingError(
                f"--replay: {self.path} is a recording of version {self._version}; install a newer gpumem-tui, as this "
                f"one plays versions {SNAPSHOTS_VERSION} to {VERSION}"
            )
        self.of_one_machine = self._version == SNAPSHOTS_VERSION or self.file.header.get(_MACHINE) is True

    @property
    def path(self) -> Path:
        """Return the file's path."""
        return self.file.path

    @property
    def is_marked(self) -> bool:
        """Return whether its lines say which alerts began."""
        return self.file.header.get(_MARKED) is True

    @property
    def has_reading(self) -> bool:
        """Return whether any host ever answered; looked for up to the first that did."""
        return any(status.report is not None for picture in self.pictures() for status in picture.statuses)

    def recorded(self, offset: int = 0) -> Iterator[RecordedPicture]:
        """Yield every picture from a member on, as the file has them.

        Raises:
            RecordingEnds: the file is damaged there, or cut off.
        """
        if self._version != SNAPSHOTS_VERSION:
            yield from self.file.pictures(RecordedPicture, offset)
            return
        for snapshot in self.file.pictures(Snapshot, offset):
            here = RemoteHost(snapshot.host.name, snapshot.host.name)
            host = _recorded_host(HostStatus(here, HostPhase.LIVE, HostReport(snapshot)))
            yield RecordedPicture(snapshot.time_s, {here.name: host})

    def undamaged(self, offset: int) -> Iterator[RecordedPicture]:
        """Yield every picture from a member on, as the file has them, up to the first damage."""
        with suppress(RecordingEnds):
            yield from self.recorded(offset)

    def pictures(self, offset: int = 0, after_s: float = -math.inf) -> Iterator[HostsPicture]:
        """Yield every picture up to the end or to the first damage.

        Args:
            offset: the member to begin with.
            after_s: begin with the last one that is no later, or else with the first.
        """
        count, last_s = 0, math.nan
        skipped: RecordedPicture | None = None
        noun = "snapshot" if self.of_one_machine else "picture"
        try:
            for picture in self.recorded(offset):
                if skipped is not None and picture.time_s > after_s:
                    yield _played(skipped)
                    after_s = -math.inf
                count, last_s = count + 1, picture.time_s
                skipped = picture if last_s <= after_s else None
                if skipped is None:
                    yield _played(picture)
        except RecordingEnds as ends:
            rest = "all before is played" if str(ends) == "cut off" else "the rest is not played"
            if not count:
                where = f"before the {'next' if offset else 'first'} {noun}"
            else:
                where = f"after {when(last_s)}; {rest}" if offset else f"after {noun} {count} ({when(last_s)}); {rest}"
            self.damage = f"{self.path}: {ends} {where}"
        if skipped is not None:
            yield _played(skipped)

    def snapshots(self) -> Iterator[Snapshot]:
        """Yield the snapshots of the first host, which is the machine in a recording of one."""
        return (picture.snapshot for picture in self.pictures() if picture.snapshot is not None)


def _played(picture: RecordedPicture) -> HostsPicture:
    """Return a picture as screens have it, with its times by this machine's monotonic clock."""
    ahead_s = time.monotonic() - picture.time_s
    return HostsPicture(
        picture.time_s,
        tuple(
            HostStatus(
                host=RemoteHost(name, host.destination, host.port),
                phase=host.phase,
                report=host.report,
                received_s=None if host.received_s is None else host.received_s + ahead_s,
                problem=host.problem,
                note=host.note,
            )
            for name, host in picture.hosts.items()
        ),
    )


def _recorded_host(status: HostStatus, received_s: float | None = None) -> RecordedHost:
    """Return the state of a host as the file has it; `received_s`: when its report came, seconds since the epoch."""
    return RecordedHost(
        destination=status.host.destination,
        port=status.host.port,
        phase=status.phase,
        problem=status.problem,
        note=status.note,
        received_s=received_s,
        report=status.report,
    )


class GpuRecorder:
    """Appends pictures to a new file.

    Args:
        of_one_machine: what is appended are snapshots of this machine.

    Raises:
        RecordingError: the file exists already or cannot be made.
    """

    def __init__(self, path: Path, *, of_one_machine: bool = True) -> None:
        header = {_MARKED: True, **({_MACHINE: True} if of_one_machine else {})}
        self._writer = RecordingWriter(path, VERSION, RecordedPicture, **header)
        self._new = NewAlerts()

    def add(self, snapshot: Snapshot, alerts: tuple[Alert, ...] = (), probes: ProbeReport = NOTHING_SAID) -> None:
        """Append a snapshot of this machine.

        Args:
            alerts: what is the matter at that moment, and `probes` what they say, for the ranks that it concerns and
                for what trains on no GPU.

        Raises:
            RecordingError: the disk is full or gone; what was written before can still be played.
        """
        snapshot, began = with_unlisted(snapshot, probes), self._new.begun(snapshot.time_s, alerts, probes.said)
        here = RemoteHost(snapshot.host.name, snapshot.host.name)
        host = _recorded_host(HostStatus(here, HostPhase.LIVE, HostReport.of(snapshot)))
        self._append(snapshot.time_s, {here.name: host}, began)

    def add_hosts(self, picture: HostsPicture, away: Sequence[AlertMark] = ()) -> list[AlertMark]:
        """Append how hosts stand, and return which alerts began with it.

        Args:
            away: the hosts that went away with it or came back: found with the alerts when it is played.

        Raises:
            RecordingError: as `add`.
        """
        now_s = time.monotonic()
        hosts = {each.host.name: _recorded(each, picture.time_s, now_s) for each in picture.statuses}
        began: list[AlertMark] = []
        for each in picture.statuses:
            if each.report is not None and each.phase is HostPhase.LIVE:
                began += self._new.begun(picture.time_s, each.report.alerts, each.report.said, each.host.name)
        self._append(picture.time_s, hosts, [*away, *began])
        return began

    def close(self) -> None:
        """Complete the file.

        Raises:
            RecordingError: as `add`.
        """
        self._writer.close()

    def _append(self, time_s: float, hosts: Mapping[str, RecordedHost], began: Sequence[AlertMark]) -> None:
        marks = {BEGAN: began} if began else {}
        self._writer.add(RecordedPicture(time_s, hosts), **marks)


def _recorded(status: HostStatus, time_s: float, now_s: float) -> RecordedHost:
    """Return the state of a host; one that is away has the same time each time, so that nothing has to be written."""
    age_s = status.age_s(now_s)
    digits = 0 if status.phase is HostPhase.AWAY else 3
    return _recorded_host(status, None if age_s is None else round(time_s - age_s, digits))


class RecorderThread:
    """Records in a thread of its own, at most once an interval, until it is stopped or cannot continue.

    Args:
        append: appends what there is to append to the recorder, and returns whether there was any.
        delay_s: how long it waits before the first time.
        say: called with each new `notice`.

    Attributes:
        notice: one line if recording had to stop, or if the last picture failed; else empty.
    """

    def __init__(
        self,
        recorder: GpuRecorder,
        append: Callable[[], bool],
        interval_s: float,
        *,
        delay_s: float = 0.0,
        say: Callable[[str], None] = lambda _notice: None,
    ) -> None:
        self.notice = ""
        self._recorder = recorder
        self._append = append
        self._interval_s = interval_s
        self._delay_s = delay_s
        self._say = say
        self._stopped = threading.Event()
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin; returns at once."""
        threading.Thread(target=self._run, name="recorder", daemon=True).start()

    def stop(self) -> None:
        """End, and complete the file."""
        self._stopped.set()
        self._ended.wait(_END_S)

    def wait(self) -> None:
        """Wait until it is stopped, or has to stop."""
        self._ended.wait()  # a `join` that ctrl+c ends lets no other one wait, before Python 3.13 (gh-90882)

    def _run(self) -> None:
        wait_s = self._delay_s
        try:
            while not self._stopped.wait(wait_s):
                try:
                    wait_s = self._interval_s if self._append() else _IDLE_S
                    self._set_notice("")
                except RecordingError:
                    raise
                except Exception as error:  # noqa: BLE001  named on the screen; the next picture may go well
                    wait_s = self._interval_s
                    self._set_notice(own_error(error))
            self._recorder.close()
        except RecordingError as error:
            self._set_notice(str(error))
        finally:
            self._ended.set()

    def _set_notice(self, notice: str) -> None:
        if notice != self.notice:
            self.notice = notice
            self._say(notice)


def record_source(
    source: Source,
    recorder: GpuRecorder,
    interval_s: float,
    alerts: Alerts | None = None,
    ask: Ask = no_probes,
    say: Callable[[str], None] = lambda _notice: None,
) -> RecorderThread:
    """Record the snapshots of a source while it is watched; the thread is yet to be started.

    Args:
        alerts, ask: what judges them for the recording, and what probes say next to them.
        say: called with each new notice.
    """
    judge = alerts or Alerts()
    last: Snapshot | None = None

    def append() -> bool:
        nonlocal last
        snapshot = source.wait(last, _POLL_S)
        if snapshot is None:
            return False
        last = snapshot
        probes = ask(snapshot)
        alerts = judge.update(snapshot, probes)
        recorder.add(snapshot, alerts, probes)
        return True

    return RecorderThread(recorder, append, interval_s, say=say)


def record_hosts(
    statuses: Callable[[], Iterable[HostStatus]],
    recorder: GpuRecorder,
    interval_s: float,
    tell: Callable[[Sequence[AlertMark]], None] = lambda _marks: None,
    tell_away: Callable[[Sequence[AlertMark]], None] = lambda _marks: None,
) -> RecorderThread:
    """Record how hosts stand, once an interval; the thread is yet to be started.

    Args:
        statuses: their states now.
        tell: called with the alerts that begin, `tell_away` with the hosts that go away or come back.
    """
    marks = AwayMarks()

    def append() -> bool:
        picture = HostsPicture(time.time(), tuple(statuses()))
        away = marks.new(picture.time_s, picture.statuses)
        tell_away(away)
        tell(recorder.add_hosts(picture, away))
        return True

    return RecorderThread(recorder, append, interval_s, delay_s=interval_s)
