"""Plays a recording: in the time that it took or faster, from any moment, held or not; and finds its moments.

A night of eight GPUs a second is some 20 MB, 700 members and 100 MB of JSON: to unpack it takes a second or two, to
read every picture of it minutes. So the index reads only the first line of each member, and the lines that say of
alerts, once, in a thread, while the recording is played already.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain

from gpumem_tui.errors import own_error
from gpumem_tui.monitor.alerts import AlertMark, Alerts, NewAlerts
from gpumem_tui.monitor.snapshot import Snapshot
from gpumem_tui.monitor.threads import LatestSnapshot, LatestValue
from gpumem_tui.monitor.wire import LineError, parsed, read
from gpumem_tui.recording.file import Member, RecordingEnds, when
from gpumem_tui.recording.recording import BEGAN, GpuRecording, HostsPicture, RecordedPicture
from gpumem_tui.remote.connection import WatchedHost
from gpumem_tui.remote.hosts import RemoteHost
from gpumem_tui.remote.status import HostStatus

_LONGEST_GAP_S = 10.0
"""A longer pause in a recording (the machine slept) is cut to this when it is played."""
_INDEX_S = 0.2
_PAST_STEPS = 60
"""Pictures from before a moment that is sought, for the charts."""
_MOST_MARKS = 10_000
_BEGAN = f'"{BEGAN}":['.encode()


class RecordingIndex:
    """The moments of a recording and when its alerts began; filled from its beginning to its end.

    Attributes:
        last_s: the latest moment known; `share`: of the file, how much.
        is_done: whether all of it was read.
        damage: one line if the file ends early, else empty.
    """

    def __init__(self, recording: GpuRecording) -> None:
        self.last_s = 0.0
        self.share = 0.0
        self.is_done = False
        self.damage = ""
        self._recording = recording
        self._marks: list[AlertMark] = []
        self._times: list[float] = []
        self._offsets: list[int] = []
        self._grown = threading.Condition()
        self._stopped = threading.Event()
        self._judges = None if recording.is_marked else (Alerts(), NewAlerts())
        self._thread = threading.Thread(target=self._fill, name="recording index", daemon=True)

    @property
    def marks(self) -> Sequence[AlertMark]:
        """Return the alerts that began, in their order, as far as the file was read."""
        return tuple(self._marks)

    @property
    def first_s(self) -> float:
        """Return where the recording begins; 0 before the first picture."""
        return self._times[0] if self._times else 0.0

    @property
    def is_exact(self) -> bool:
        """Return whether alerts are as they were judged; else the GPUs were looked at once in each part of the file."""
        return self._judges is None

    def start(self) -> None:
        """Begin, unless it has begun; returns at once."""
        if self._thread.ident is None:
            self._thread.start()

    def wait(self) -> None:
        """Wait until all of the file is read."""
        self._thread.join()

    def stop(self) -> None:
        """End; returns at once."""
        self._stopped.set()

    def offset_at(self, time_s: float, timeout_s: float) -> int | None:
        """Return the member in which a moment is, or the nearest to it; None if it is not known in time."""
        with self._grown:
            if not self._grown.wait_for(lambda: self.is_done or self.last_s > time_s, timeout_s) or not self._times:
                return None
            return self._offsets[max(0, bisect_right(self._times, time_s) - 1)]

    def _fill(self) -> None:
        reason = ""
        try:
            size_bytes = max(1, self._recording.file.size_bytes)
            for member in self._recording.file.parts():
                if self._stopped.is_set():
                    return
                self._take(member)
                self.share = min(1.0, member.end / size_bytes)
        except RecordingEnds as ends:
            reason = str(ends)
        except (LineError, OSError):
            reason = "damaged"
        except Exception as error:  # noqa: BLE001  named where damage is; what was found stays
            reason = own_error(error)
        if reason:
            self.damage = f"{self._recording.path}: {reason} after {when(self.last_s)}; what is after it is not played"
        with self._grown:
            self.is_done = True
            self._grown.notify_all()

    def _take(self, member: Member) -> None:
        if not member.lines:
            return
        time_s = _time_in(member.lines[0])
        if time_s is None:
            raise LineError("a part that begins with no picture")
        marks = [mark for line in member.lines if _BEGAN in line for mark in _marks_in(line)]
        if self._judges is not None:
            first = next(self._recording.pictures(member.offset), None)
            if first is not None and (snapshot := first.snapshot) is not None:
                alerts, new = self._judges
                marks += new.begun(snapshot.time_s, alerts.update(snapshot), {})
        last_s = _time_in(member.lines[-1])
        with self._grown:
            self._times.append(time_s)
            self._offsets.append(member.offset)
            self.last_s = max(self.last_s, time_s, last_s or 0.0)
            self._marks += marks[: _MOST_MARKS - len(self._marks)]
            self._grown.notify_all()


def _time_in(line: bytes) -> float | None:
    """Return when the picture of a line was; None where its line does not say."""
    match parsed(line):
        case {"full": {"time_s": float() | int() as time_s}} | {"patch": {"time_s": [float() | int() as time_s]}}:
            return float(time_s)
        case _:
            return None


def _marks_in(line: bytes) -> list[AlertMark]:
    match parsed(line):
        case {"began": [*marks]}:
            return [read(AlertMark, mark) for mark in marks]
        case _:
            return []


class Player(LatestSnapshot):
    """Plays a recording and stays on its last picture: to a screen it is what connections to its hosts are.

    For a recording of one machine it is a source of that machine's snapshots too (`monitor.snapshot.Source`).

    Args:
        speed: 2 plays two recorded seconds in one.
        past_s: how far back charts reach.

    Attributes:
        notice: its state, in a few words.
        shown_s: when the newest picture was (`time.monotonic`): while it is held, nothing grows older.
        connections: the hosts of the first picture, by name.
        jumps: how often a moment was sought: what was remembered of the pictures before counts no more.
        past: the pictures before the one that was sought last, `past_step_s` apart, as the file has them.
    """

    def __init__(self, recording: GpuRecording, speed: float = 1.0, past_s: float = 600.0) -> None:
        super().__init__()
        self.index = RecordingIndex(recording)
        self.notice = ""
        self.jumps = 0
        self.shown_s = time.monotonic()
        self.past: Sequence[RecordedPicture] = ()
        self.past_step_s = past_s / _PAST_STEPS
        self._recording = recording
        self._speed = speed
        self._past_s = past_s
        self._unplayed = recording.pictures()
        self._first = next(self._unplayed, None) or HostsPicture(0.0, ())
        self.connections = {
            status.host.name: PlayedHost(self, status.host, self._newest) for status in self._first.statuses
        }
        self._stopped = threading.Event()
        self._wake = threading.Event()
        self._wanted_s: float | None = None
        self._is_held = False
        self._thread = threading.Thread(target=self._play, name="replay", daemon=True)

    def start(self) -> None:
        """Begin, unless it has begun; returns at once."""
        if self._thread.ident is None:
            self.index.start()
            self._thread.start()

    def stop(self) -> None:
        """End; returns at once."""
        self._stopped.set()
        self._wake.set()
        self.index.stop()

    @property
    def picture(self) -> HostsPicture | None:
        """Return the newest picture; None before the first."""
        found: HostsPicture | None = self._newest.value
        return found

    @property
    def statuses(self) -> tuple[HostStatus, ...]:
        """Return how each host stood at the moment that is shown; at the first one before it plays."""
        return (self.picture or self._first).statuses

    def connect_now(self) -> None:
        """Do nothing: what is past cannot be connected to."""

    def latest(self) -> Snapshot | None:
        """Return the machine's newest snapshot, None before the first."""
        return None if self.picture is None else self.picture.snapshot

    def next(self, timeout_s: float) -> HostsPicture | None:
        """Return the picture after the newest; None if none comes in time, or none ever again."""
        return self._newest.wait(self._newest.value, timeout_s)

    def past_snapshots(self, name: str = "") -> Sequence[Snapshot]:
        """Return the snapshots of a host, of the first one without a `name`, before the moment that was sought last."""
        hosts = [each.hosts.get(name) if name else next(iter(each.hosts.values()), None) for each in self.past]
        return [host.report.snapshot for host in hosts if host is not None and host.report is not None]

    @property
    def now_s(self) -> float:
        """Return the moment that is shown, seconds since the epoch."""
        return 0.0 if self.picture is None else self.picture.time_s

    @property
    def marks(self) -> Sequence[AlertMark]:
        """Return the alerts that began, in their order, as far as the file was read."""
        return self.index.marks

    @property
    def is_held(self) -> bool:
        """Return whether it is stopped."""
        return self._is_held

    def hold(self, held: bool) -> None:
        """Stand still, or continue."""
        self._is_held = held
        self._wake.set()

    def seek(self, time_s: float) -> None:
        """Go to a moment, or as near to it as the recording has one."""
        self._wanted_s = time_s
        self._wake.set()

    # In its thread

    def _play(self) -> None:
        pictures = chain([self._first] if self._first.statuses else [], self._unplayed)
        while not self._stopped.is_set():
            try:
                self._run(pictures if self._wanted_s is None else self._sought())
            except Exception as error:  # noqa: BLE001  named on the screen; another moment may be played
                self._wanted_s = None
                self.notice = own_error(error)
                self._newest.end()
                self._rest()
            pictures = chain(self._recording.pictures())

    def _run(self, pictures: Iterator[HostsPicture]) -> None:
        """Show pictures in their time, until there is no other or a moment is sought."""
        due_s, last_s = time.monotonic(), None
        self.notice = ""
        for picture in pictures:
            time_s = picture.time_s
            if last_s is not None:
                due_s += min(max(0.0, time_s - last_s), _LONGEST_GAP_S) / self._speed
                due_s = self._wait_until(due_s)
            if self._stopped.is_set() or (self._wanted_s is not None and last_s is not None):
                return
            self.shown_s = time.monotonic()
            self._newest.put(picture)
            last_s = time_s
        if self._wanted_s is None:
            self.notice = "end of recording"
            self._newest.end()
            self._rest()

    def _rest(self) -> None:
        """Wait until a moment is sought."""
        while self._wanted_s is None and not self._stopped.is_set():
            self._wake.wait()
            self._wake.clear()

    def _wait_until(self, due_s: float) -> float:
        """Wait until `due_s`, not counting pauses, and return `due_s` moved on by the pauses."""
        while not self._stopped.is_set() and self._wanted_s is None:
            left_s = due_s - time.monotonic()
            if self._is_held:
                began_s = time.monotonic()
                self._wake.wait()
                due_s += time.monotonic() - began_s
            elif left_s <= 0 or not self._wake.wait(left_s):
                break
            self._wake.clear()
        return due_s

    def _sought(self) -> Iterator[HostsPicture]:
        """Return the pictures from the moment that is sought on, and put what was before it in `past`."""
        wanted_s = self._wanted_s
        assert wanted_s is not None
        while (offset := self.index.offset_at(wanted_s, _INDEX_S)) is None and not self._stopped.is_set():
            self.notice = f"reading the recording, {self.index.share:.0%}"
            if self.index.is_done:
                break
        past = tuple(self._thinned(wanted_s - self._past_s, wanted_s))
        pictures = self._recording.pictures(offset or 0, wanted_s)
        first = next(pictures, None)
        if self._wanted_s == wanted_s:
            self._wanted_s = None
        if first is None:
            return iter(())
        self.past = past
        self.jumps += 1
        return chain([first], pictures)

    def _thinned(self, from_s: float, until_s: float) -> Iterator[RecordedPicture]:
        """Yield the pictures of a time, some seconds apart, and its last one."""
        offset = self.index.offset_at(from_s, _INDEX_S)
        due_s, last = from_s, None
        for picture in () if offset is None else self._recording.undamaged(offset):
            if picture.time_s >= until_s or self._stopped.is_set():
                break
            last = picture
            if picture.time_s >= due_s:
                due_s, last = picture.time_s + self.past_step_s, None
                yield picture
        if last is not None:
            yield last


class PlayedHost(WatchedHost):
    """A host of a recording, in the place of a connection to one."""

    def __init__(self, player: Player, host: RemoteHost, newest: LatestValue[HostsPicture]) -> None:
        super().__init__(host, newest)
        self._player = player

    @property
    def status(self) -> HostStatus:
        """Return how it stood at the moment that is shown."""
        found = (each for each in self._player.statuses if each.host.name == self.host.name)
        return next(found, HostStatus(self.host))

    def past(self) -> Sequence[Snapshot]:
        """Return its snapshots before the moment that was sought last."""
        return self._player.past_snapshots(self.host.name)

    def start(self) -> None:
        """Do nothing: the player is started."""

    def stop(self) -> None:
        """Do nothing: the other hosts continue."""
