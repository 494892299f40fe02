"""Recordings of several hosts in one file: how each of them stood at every moment, and played back.

What a host's probes say is kept too, with its ranks: "when did rank 3 fill up" is asked of a recording.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpumem_tui.monitor.alerts import Alert
from gpumem_tui.monitor.codec import CodecError, Plain, from_plain, to_plain
from gpumem_tui.monitor.marks import Mark, NewAlerts
from gpumem_tui.monitor.recording import MARKED, Recording, began_line
from gpumem_tui.monitor.recording_file import HEADER_KEY, RecordingError, RecordingFile, RecordingWriter
from gpumem_tui.monitor.replay import Replay
from gpumem_tui.monitor.snapshot import Snapshot
from gpumem_tui.remote.away import AwayMarks
from gpumem_tui.remote.decode import HostReport
from gpumem_tui.remote.hosts import RemoteHost
from gpumem_tui.remote.status import HostStatus, Phase

HOSTS_VERSION = 2


@dataclass(frozen=True)
class HostsPicture:
    """How all hosts stood at one moment, seconds since the epoch."""

    time_s: float
    statuses: tuple[HostStatus, ...]


class HostsRecorder:
    """Appends the hosts' states to a new file.

    Raises:
        RecordingError: the file exists already or cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._writer = RecordingWriter(path, HOSTS_VERSION, **{MARKED: True})
        self._new = NewAlerts()
        self._reports: dict[str, tuple[HostReport, Plain]] = {}

    def add(self, picture: HostsPicture, away: Sequence[Mark] = ()) -> list[Mark]:
        """Append one picture; which alerts began with it.

        Args:
            away: the hosts that went away with it or came back: found with the alerts when it is played.

        Raises:
            RecordingError: the disk is full or gone; what was written before can still be played.
        """
        now_s = time.monotonic()
        hosts = {each.host.name: self._host(each, picture.time_s, now_s) for each in picture.statuses}
        began: list[Mark] = []
        for each in picture.statuses:
            if each.report is not None and each.phase is Phase.LIVE:
                began += self._new.begun(picture.time_s, each.report.alerts, each.report.probes, each.host.name)
        self._writer.add({"time_s": picture.time_s, "hosts": hosts}, **began_line([*away, *began]))
        return began

    def close(self) -> None:
        """Complete the file.

        Raises:
            RecordingError: as `add`.
        """
        self._writer.close()

    def _host(self, status: HostStatus, time_s: float, now_s: float) -> Plain:
        age_s = status.age_s(now_s)
        return {
            "destination": status.host.destination,
            "port": status.host.port,
            "phase": status.phase.value,
            "problem": status.problem,
            "note": status.note,
            "received_s": None if age_s is None else self._received_s(status, time_s - age_s),
            "report": None if status.report is None else self._report(status.host.name, status.report),
        }

    def _received_s(self, status: HostStatus, received_s: float) -> float:
        """Of a host that is away the same each time, so that nothing has to be written."""
        return round(received_s, 0 if status.phase is Phase.AWAY else 3)

    def _report(self, name: str, report: HostReport) -> Plain:
        """Made once for each reading: a host that has nothing new costs nothing."""
        made = self._reports.get(name)
        if made is None or made[0] is not report:
            probes = [[uuid, pid, dict(body)] for (uuid, pid), body in report.probes.items()]
            plain = {"snapshot": to_plain(report.snapshot), "alerts": to_plain(report.alerts), "probes": probes}
            self._reports[name] = made = (report, plain)
        return made[1]


class HostsRecording(Recording[HostsPicture]):
    """A recording of several hosts.

    Raises:
        RecordingError: it is none, or one of a later version.
    """

    noun = "picture"

    def __init__(self, file: RecordingFile) -> None:
        super().__init__(file)
        if file.header[HEADER_KEY] != HOSTS_VERSION:
            raise RecordingError(
                f"{self.path} is a recording of version {file.header[HEADER_KEY]}, this program plays versions 1 and "
                f"{HOSTS_VERSION}"
            )

    def read(self, plain: Plain) -> HostsPicture:
        """As in `Recording`."""
        try:
            time_s, now_s = float(plain["time_s"]), time.monotonic()
            return HostsPicture(
                time_s, tuple(_status(name, body, now_s - time_s) for name, body in plain["hosts"].items())
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CodecError(f"no picture of hosts: {error}") from error

    def time_s(self, picture: HostsPicture) -> float:
        """As in `Recording`."""
        return picture.time_s

    @property
    def has_reading(self) -> bool:
        """Whether any host ever answered; looked for up to the first that did."""
        return any(status.report is not None for picture in self.pictures() for status in picture.statuses)


def _status(name: str, body: Mapping[str, Any], ahead_s: float) -> HostStatus:
    """`ahead_s`: what this machine's monotonic clock is ahead of the recorded time."""
    report = body["report"]
    return HostStatus(
        RemoteHost(name, body["destination"], body["port"]),
        Phase(body["phase"]),
        None if report is None else _report(report),
        None if body["received_s"] is None else body["received_s"] + ahead_s,
        body["problem"],
        body["note"],
    )


def _report(body: Mapping[str, Any]) -> HostReport:
    return HostReport(
        from_plain(Snapshot, body["snapshot"]),
        tuple(from_plain(Alert, alert) for alert in body["alerts"]),
        {(uuid, pid): said for uuid, pid, said in body["probes"]},
    )


class RecordedHosts:
    """Records the hosts' states, once an interval, in a thread of its own.

    Args:
        statuses: how they stand now.
        tell: called with the alerts that begin.
        tell_away: called with the hosts that go away or come back.

    Attributes:
        notice: one line if recording had to stop, else empty.
    """

    def __init__(
        self,
        statuses: Callable[[], Iterable[HostStatus]],
        recorder: HostsRecorder,
        interval_s: float,
        tell: Callable[[Sequence[Mark]], None] = lambda marks: None,
        tell_away: Callable[[Sequence[Mark]], None] = lambda marks: None,
    ) -> None:
        self.notice = ""
        self._statuses = statuses
        self._recorder = recorder
        self._interval_s = interval_s
        self._tell = tell
        self._tell_away = tell_away
        self._away = AwayMarks()
        self._stopped = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._record, name="recorder", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """End, and complete the file."""
        self._stopped.set()
        self._ended.wait()

    def wait(self) -> None:
        """Until it is stopped, or has to stop."""
        self._ended.wait()  # a `join` that ctrl+c ends lets no other one wait, before Python 3.13 (gh-90882)

    def _record(self) -> None:
        try:
            while not self._stopped.wait(self._interval_s):
                picture = HostsPicture(time.time(), tuple(self._statuses()))
                away = self._away.new(picture.time_s, picture.statuses)
                self._tell_away(away)
                self._tell(self._recorder.add(picture, away))
            self._recorder.close()
        except RecordingError as error:
            self.notice = str(error)
        finally:
            self._ended.set()


class HostsReplay(Replay[HostsPicture]):
    """Plays a recording of hosts, and is to a screen what the connections to them are.

    Attributes:
        connections: by the host's name, as the first picture has them.
    """

    def __init__(self, recording: HostsRecording, speed: float, past_s: float) -> None:
        super().__init__(recording, speed, past_s)
        first = next(recording.pictures(), HostsPicture(0.0, ()))
        self._newest.value = first
        self.connections = {status.host.name: ReplayedHost(self, status.host) for status in first.statuses}

    @property
    def statuses(self) -> tuple[HostStatus, ...]:
        """How each host stood at the moment that is shown."""
        return () if self.picture is None else self.picture.statuses

    def connect_now(self) -> None:
        """What is past cannot be connected to."""


class ReplayedHost:
    """One host of a recording, as a connection to it is: a source of snapshots too."""

    def __init__(self, replay: HostsReplay, host: RemoteHost) -> None:
        self.host = host
        self._replay = replay

    @property
    def status(self) -> HostStatus:
        """How it stood at the moment that is shown."""
        return self._in(self._replay.statuses)

    @property
    def notice(self) -> str:
        """The host's name, and why it was away if it was."""
        status = self.status
        return f"{self.host.name} away: {status.problem}" if status.phase is Phase.AWAY else self.host.name

    def past(self) -> tuple[Snapshot, ...]:
        """Its snapshots before the moment that was sought last, of this host alone, as there may be many; none where
        they cannot be read.
        """
        try:
            bodies = (plain["hosts"].get(self.host.name) for plain in self._replay.past)
            reports = [body["report"] for body in bodies if body is not None and body["report"] is not None]
            return tuple(from_plain(Snapshot, report["snapshot"]) for report in reports)
        except (CodecError, KeyError, TypeError):
            return ()

    def start(self) -> None:
        """It has begun."""

    def stop(self) -> None:
        """The others go on."""

    def latest(self) -> Snapshot | None:
        """Its snapshot at the moment that is shown."""
        report = self.status.report
        return None if report is None else report.snapshot

    def wait(self, after: Snapshot | None, timeout_s: float) -> Snapshot | None:
        """Its first snapshot that is not `after`, or None if there is none in time."""
        deadline_s = time.monotonic() + timeout_s
        while (latest := self.latest()) is after and (left_s := deadline_s - time.monotonic()) > 0:
            if self._replay.next(left_s) is None:
                break
        return None if latest is after else latest

    def subscribe(self, tell: Callable[[], None]) -> None:
        """Have this called after each picture."""
        self._replay.subscribe(tell)

    def unsubscribe(self, tell: Callable[[], None]) -> None:
        """Have it called no more."""
        self._replay.unsubscribe(tell)

    def _in(self, statuses: Iterable[HostStatus]) -> HostStatus:
        return next((each for each in statuses if each.host.name == self.host.name), HostStatus(self.host))
