"""Recordings of one machine: its snapshots in a file, and read from it again."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from gpumem_tui.monitor.alerts import Alert, Alerts
from gpumem_tui.monitor.codec import CodecError, Plain, from_plain, to_plain
from gpumem_tui.monitor.marks import Mark, NewAlerts
from gpumem_tui.monitor.probes import Ask, ProbeReport, no_probes
from gpumem_tui.monitor.recording_file import (
    HEADER_KEY,
    RecordingEnds,
    RecordingError,
    RecordingFile,
    RecordingWriter,
    when,
)
from gpumem_tui.monitor.snapshot import Snapshot, Source

VERSION = 1
MARKED = "marks"
"""In the header of a recording whose lines say which alerts began (see `BEGAN`)."""
BEGAN = "began"
_POLL_S = 0.5

Picture = TypeVar("Picture")


class Recording(ABC, Generic[Picture]):
    """A recording that can be played.

    Attributes:
        file: what it is in.
        damage: after `pictures` came to an end: one line if it did not play the whole file, else empty.
    """

    noun = "snapshot"

    def __init__(self, file: RecordingFile) -> None:
        self.file = file
        self.damage = ""

    @property
    def path(self) -> Path:
        """The file's."""
        return self.file.path

    @property
    def is_marked(self) -> bool:
        """Whether its lines say which alerts began."""
        return self.file.header.get(MARKED) is True

    @abstractmethod
    def read(self, plain: Plain) -> Picture:
        """A picture of its plain data.

        Raises:
            CodecError: it is none.
        """

    @abstractmethod
    def time_s(self, picture: Picture) -> float:
        """When it was made, seconds since the epoch."""

    def plain(self, offset: int) -> Iterator[Plain]:
        """The plain data of every picture from a member on, up to the first damage."""
        with suppress(RecordingEnds):
            yield from self.file.pictures(offset)

    def pictures(self, offset: int = 0, after_s: float = -math.inf) -> Iterator[Picture]:
        """Every picture up to the end or to the first damage.

        Args:
            offset: the member to begin with.
            after_s: begin with the last one that is no later, or else with the first.
        """
        count, last_s = 0, math.nan
        skipped: Plain = None
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
            cut_off = ends.reason == "cut off"
            rest = "all before is played" if cut_off else "the rest is not played"
            at = "" if math.isnan(last_s) else f" ({when(last_s)})"
            said = f"after {self.noun} {count}{at}" if not offset else f"after {when(last_s)}"
            self.damage = f"{self.path}: {ends.reason} {said}; {rest}"
        except (CodecError, KeyError, TypeError):
            self.damage = f"{self.path}: damaged after {self.noun} {count}; the rest is not played"
        if skipped is not None:
            yield self.read(skipped)


class SnapshotRecording(Recording[Snapshot]):
    """A recording of one machine.

    Raises:
        RecordingError: the file cannot be read, is no recording, or one of a later version.
    """

    def __init__(self, path: Path | RecordingFile) -> None:
        super().__init__(path if isinstance(path, RecordingFile) else RecordingFile(path))
        version = self.file.header[HEADER_KEY]
        if version != VERSION:
            raise RecordingError(
                f"{self.path} is a recording of version {version}, this program plays version {VERSION}"
            )

    def read(self, plain: Plain) -> Snapshot:
        """As in `Recording`."""
        return from_plain(Snapshot, plain)

    def time_s(self, picture: Snapshot) -> float:
        """As in `Recording`."""
        return picture.time_s

    def snapshots(self) -> Iterator[Snapshot]:
        """All of it."""
        return self.pictures()


class SnapshotRecorder:
    """Appends snapshots to a new file.

    Raises:
        RecordingError: the file exists already or cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._writer = RecordingWriter(path, VERSION, **{MARKED: True})
        self._new = NewAlerts()

    def add(self, snapshot: Snapshot, alerts: tuple[Alert, ...] = (), probes: ProbeReport | None = None) -> None:
        """Append one snapshot.

        Args:
            alerts: what is the matter at that moment, and what probes say, for the ranks that it concerns.

        Raises:
            RecordingError: the disk is full or gone; what was written before can still be played.
        """
        began = self._new.begun(snapshot.time_s, alerts, {} if probes is None else probes.listed)
        self._writer.add(to_plain(snapshot), **began_line(began))

    def close(self) -> None:
        """Complete the file.

        Raises:
            RecordingError: as `add`.
        """
        self._writer.close()


def began_line(began: list[Mark]) -> dict[str, Plain]:
    """How a recording's line names an alert that began with it."""
    return {BEGAN: [to_plain(mark) for mark in began]} if began else {}


class Recorded:
    """A source whose snapshots are also recorded, at most one an interval.

    Args:
        alerts, ask: what judges them for the recording, and what probes say beside them.

    Attributes:
        notice: one line if recording had to stop, else empty; the source goes on.
    """

    def __init__(
        self,
        source: Source,
        recorder: SnapshotRecorder,
        interval_s: float,
        alerts: Alerts | None = None,
        ask: Ask = no_probes,
    ) -> None:
        self.notice = ""
        self._source = source
        self._recorder = recorder
        self._interval_s = interval_s
        self._alerts = alerts or Alerts()
        self._ask = ask
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._record, name="recorder", daemon=True)

    def start(self) -> None:
        """Begin, unless it has begun; returns at once."""
        self._source.start()
        if self._thread.ident is None:
            self._thread.start()

    def latest(self) -> Snapshot | None:
        """The source's newest snapshot."""
        return self._source.latest()

    def wait(self, after: Snapshot | None, timeout_s: float) -> Snapshot | None:
        """The source's first snapshot that is not `after`."""
        return self._source.wait(after, timeout_s)

    def subscribe(self, tell: Callable[[], None]) -> None:
        """Have this called after each new snapshot of the source and at its end."""
        self._source.subscribe(tell)

    def stop(self) -> None:
        """End, and complete the file."""
        self._stopped.set()
        self._source.stop()
        if self._thread.ident is not None:
            self._thread.join(timeout=2 * _POLL_S)

    def _record(self) -> None:
        last: Snapshot | None = None
        try:
            while not self._stopped.is_set():
                snapshot = self._source.wait(last, _POLL_S)
                if snapshot is not None:
                    probes = self._ask(snapshot)
                    current = self._alerts.update(snapshot, probes.figures, probes.ended, probes.growing)
                    self._recorder.add(snapshot, current, probes)
                    last = snapshot
                    self._stopped.wait(self._interval_s)
            self._recorder.close()
        except RecordingError as error:
            self.notice = str(error)
