"""Recordings of the GPUs of hosts, which may be one machine alone: how each stood at every moment, written and read.

A picture is how all hosts stood at one moment. A recording of one machine has a single host, and its header says so:
it is shown as that machine's Monitor, and judged by the settings of who plays it. Of several hosts what their probes
say is kept too, with its ranks: "when did rank 3 fill up" is asked of a recording. Files of version 1 hold the
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
from typing import Any

from gpumem_tui.errors import own_error
from gpumem_tui.monitor.alerts import Alert, AlertMark, Alerts, NewAlerts
from gpumem_tui.monitor.probes import NOTHING_SAID, Ask, ProbeReport, no_probes, with_unlisted
from gpumem_tui.monitor.snapshot import Snapshot, Source
from gpumem_tui.recording.codec import CodecError, Plain, from_plain, to_plain
from gpumem_tui.recording.file import HEADER_KEY, RecordingEnds, RecordingError, RecordingFile, RecordingWriter, when
from gpumem_tui.remote.decode import HostReport
from gpumem_tui.remote.hosts import RemoteHost
from gpumem_tui.remote.status import AwayMarks, HostPhase, HostStatus

SNAPSHOTS_VERSION, VERSION = 1, 2
"""In the header: pictures are the snapshots of one machine by themselves, or those of hosts."""
BEGAN = "began"
"""In a line: the alerts that began with it. `_MARKED` in the header says that lines have it, `_MACHINE` that the only
host is the machine itself."""
_MARKED, _MACHINE = "marks", "machine"
_POLL_S = 0.5
_IDLE_S = 0.05
"""Between two looks at a source that has nothing new and does not wait for it, as it has ended."""
_END_S = 10.0


@dataclass(frozen=True)
class HostsPicture:
    """The state of all hosts at one moment, in seconds since the epoch."""

    time_s: float
    statuses: tuple[HostStatus, ...]

    @property
    def snapshot(self) -> Snapshot | None:
        """Return the snapshot of the first host, which is the machine's in a recording of one; None without one."""
        report = self.statuses[0].report if self.statuses else None
        return None if report is None else report.snapshot


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
        if self._version not in (SNAPSHOTS_VERSION, VERSION):
            raise RecordingError(
                f"--replay: {self.path} is a recording of version {self._version}, this program plays versions "
                f"{SNAPSHOTS_VERSION} and {VERSION}"
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

    def read(self, plain: Plain) -> HostsPicture:
        """Make a picture of its plain data.

        Raises:
            CodecError: it is none.
        """
        try:
            time_s, hosts = float(plain["time_s"]), self.bodies(plain)
            ahead_s = time.monotonic() - time_s
            return HostsPicture(time_s, tuple(_status(name, body, ahead_s) for name, body in hosts.items()))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CodecError(f"no picture of hosts: {error}") from error

    def bodies(self, plain: Plain) -> Mapping[str, Plain]:
        """Return the plain data of each host in that of a picture, by the host's name."""
        if self._version == SNAPSHOTS_VERSION:
            name = plain["host"]["name"]
            return {name: _host_body(RemoteHost(name, name), HostPhase.LIVE, report=_report_body(plain))}
        bodies: dict[str, Plain] = plain["hosts"]
        return bodies

    def plain(self, offset: int) -> Iterator[Plain]:
        """Yield the plain data of every picture from a member on, up to the first damage."""
        with suppress(RecordingEnds):
            yield from self.file.pictures(offset)

    def pictures(self, offset: int = 0, after_s: float = -math.inf) -> Iterator[HostsPicture]:
        """Yield every picture up to the end or to the first damage.

        Args:
            offset: the member to begin with.
            after_s: begin with the last one that is no later, or else with the first.
        """
        count, last_s = 0, math.nan
        skipped: Plain = None
        noun = "snapshot" if self.of_one_machine else "picture"
        try:
            for plain in self.file.pictures(offset):
                if skipped is not None and plain["time_s"] > after_s:
                    yield self.read(skipped)
                    after_s = -math.inf
                count, last_s = count + 1, plain["time_s"]
                skipped = plain if last_s <= after_s else None
                if skipped is None:
                    yield self.read(plain)
        except RecordingEnds as ends:
            cut_off = str(ends) == "cut off"
            rest = "all before is played" if cut_off else "the rest is not played"
            at = "" if math.isnan(last_s) else f" ({when(last_s)})"
            place = f"after {noun} {count}{at}" if not offset else f"after {when(last_s)}"
            self.damage = f"{self.path}: {ends} {place}; {rest}"
        except (CodecError, KeyError, TypeError):
            self.damage = f"{self.path}: damaged after {noun} {count}; the rest is not played"
        if skipped is not None:
            yield self.read(skipped)

    def snapshots(self) -> Iterator[Snapshot]:
        """Yield the snapshots of the first host, which is the machine in a recording of one."""
        return (picture.snapshot for picture in self.pictures() if picture.snapshot is not None)


def _status(name: str, body: Mapping[str, Any], ahead_s: float) -> HostStatus:
    """Make a host's state; `ahead_s`: what this machine's monotonic clock is ahead of the recorded time."""
    report = body["report"]
    return HostStatus(
        RemoteHost(name, body["destination"], body["port"]),
        HostPhase(body["phase"]),
        None if report is None else _report(report),
        None if body["received_s"] is None else body["received_s"] + ahead_s,
        body["problem"],
        body["note"],
    )


def _report(body: Mapping[str, Any]) -> HostReport:
    return HostReport(
        from_plain(Snapshot, body["snapshot"]),
        tuple(from_plain(Alert, alert) for alert in body["alerts"]),
        {(uuid, pid): probe for uuid, pid, probe in body["probes"]},
    )


def _host_body(
    host: RemoteHost, phase: HostPhase, problem: str = "", note: str = "", received_s: float | None = None, *,
    report: Plain,
) -> Plain:  # fmt: skip
    return {
        "destination": host.destination,
        "port": host.port,
        "phase": phase.value,
        "problem": problem,
        "note": note,
        "received_s": received_s,
        "report": report,
    }


def _report_body(snapshot: Plain, alerts: Plain = (), probes: Sequence[Plain] = ()) -> Plain:
    return {"snapshot": snapshot, "alerts": list(alerts), "probes": list(probes)}


class GpuRecorder:
    """Appends pictures to a new file.

    Args:
        of_one_machine: what is appended are snapshots of this machine.

    Raises:
        RecordingError: the file exists already or cannot be made.
    """

    def __init__(self, path: Path, *, of_one_machine: bool = True) -> None:
        header = {_MARKED: True, **({_MACHINE: True} if of_one_machine else {})}
        self._writer = RecordingWriter(path, VERSION, **header)
        self._new = NewAlerts()
        self._reports: dict[str, tuple[HostReport, Plain]] = {}

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
        body = _host_body(here, HostPhase.LIVE, report=_report_body(to_plain(snapshot)))
        self._append(snapshot.time_s, {here.name: body}, began)

    def add_hosts(self, picture: HostsPicture, away: Sequence[AlertMark] = ()) -> list[AlertMark]:
        """Append how hosts stand, and return which alerts began with it.

        Args:
            away: the hosts that went away with it or came back: found with the alerts when it is played.

        Raises:
            RecordingError: as `add`.
        """
        now_s = time.monotonic()
        bodies = {each.host.name: self._host(each, picture.time_s, now_s) for each in picture.statuses}
        began: list[AlertMark] = []
        for each in picture.statuses:
            if each.report is not None and each.phase is HostPhase.LIVE:
                began += self._new.begun(picture.time_s, each.report.alerts, each.report.probes, each.host.name)
        self._append(picture.time_s, bodies, [*away, *began])
        return began

    def close(self) -> None:
        """Complete the file.

        Raises:
            RecordingError: as `add`.
        """
        self._writer.close()

    def _append(self, time_s: float, bodies: Plain, began: Sequence[AlertMark]) -> None:
        marks = {BEGAN: [to_plain(mark) for mark in began]} if began else {}
        self._writer.add({"time_s": time_s, "hosts": bodies}, **marks)

    def _host(self, status: HostStatus, time_s: float, now_s: float) -> Plain:
        """Write a host's state; one that is away has the same time each time, so that nothing has to be written."""
        age_s = status.age_s(now_s)
        received_s = None if age_s is None else round(time_s - age_s, 0 if status.phase is HostPhase.AWAY else 3)
        report = None if status.report is None else self._report(status.host.name, status.report)
        return _host_body(status.host, status.phase, status.problem, status.note, received_s, report=report)

    def _report(self, name: str, report: HostReport) -> Plain:
        """Make a report's plain data once for each reading: a host that has nothing new costs nothing."""
        made = self._reports.get(name)
        if made is None or made[0] is not report:
            probes = [[uuid, pid, dict(body)] for (uuid, pid), body in report.probes.items()]
            self._reports[name] = made = (
                report, _report_body(to_plain(report.snapshot), to_plain(report.alerts), probes)
            )  # fmt: skip
        return made[1]


class RecorderThread:
    """Records in a thread of its own, at most once an interval, until it is stopped or cannot go on.

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
        alerts, ask: what judges them for the recording, and what probes say beside them.
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
        statuses: how they stand now.
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
