"""Where in a recording each moment is, and which alerts began when: read once, by a thread, while it is played already.

A night of eight GPUs a second is some 20 MB, 700 members and 100 MB of JSON: to unpack it takes a second or two, to
read every picture of it minutes. So only the first line of each member is read, and the lines that say of alerts.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from typing import Generic

from gpumem_tui.monitor.alerts import Alerts
from gpumem_tui.monitor.codec import CodecError, from_plain
from gpumem_tui.monitor.marks import Mark, NewAlerts
from gpumem_tui.monitor.recording import BEGAN, Picture, Recording
from gpumem_tui.monitor.recording_file import Member, RecordingEnds, parsed, when
from gpumem_tui.monitor.snapshot import Snapshot

_MOST_MARKS = 10_000
_BEGAN = f'"{BEGAN}":['.encode()


class RecordingIndex(Generic[Picture]):
    """Filled from the beginning of the file to its end.

    Attributes:
        marks: the alerts that began, in their order.
        last_s: the latest moment that is known; `share`: of the file, how much.
        is_done: all of it is.
        damage: one line if the file ends early, else empty.
    """

    def __init__(self, recording: Recording[Picture]) -> None:
        self.last_s = 0.0
        self.share = 0.0
        self.is_done = False
        self.damage = ""
        self._recording = recording
        self._marks: list[Mark] = []
        self._times: list[float] = []
        self._offsets: list[int] = []
        self._grown = threading.Condition()
        self._stopped = threading.Event()
        self._judge = None if recording.is_marked else _Judge()
        self._thread = threading.Thread(target=self._fill, name="recording index", daemon=True)

    @property
    def marks(self) -> Sequence[Mark]:
        """The alerts that began, as far as the file was read."""
        return tuple(self._marks)

    @property
    def first_s(self) -> float:
        """Where the recording begins; 0 before that is known."""
        return self._times[0] if self._times else 0.0

    @property
    def is_exact(self) -> bool:
        """Whether alerts are as they were judged; else the GPUs were looked at once in each part of the file."""
        return self._judge is None

    def start(self) -> None:
        """Begin, unless it has begun; returns at once."""
        if self._thread.ident is None:
            self._thread.start()

    def wait(self) -> None:
        """Until all of the file is read."""
        self._thread.join()

    def stop(self) -> None:
        """End; returns at once."""
        self._stopped.set()

    def offset_at(self, time_s: float, timeout_s: float) -> int | None:
        """The member in which a moment is, or the nearest to it; None if it is not known in time."""
        with self._grown:
            if not self._grown.wait_for(lambda: self.is_done or self.last_s > time_s, timeout_s) or not self._times:
                return None
            return self._offsets[max(0, bisect_right(self._times, time_s) - 1)]

    def _fill(self) -> None:
        try:
            size_bytes = max(1, self._recording.file.size_bytes)
            for member in self._recording.file.parts():
                if self._stopped.is_set():
                    return
                self._take(member)
                self.share = min(1.0, member.end / size_bytes)
        except (RecordingEnds, CodecError, KeyError, TypeError, ValueError, OSError) as error:
            reason = error.reason if isinstance(error, RecordingEnds) else "damaged"
            self.damage = f"{self._recording.path}: {reason} after {when(self.last_s)}; what is after it is not played"
        with self._grown:
            self.is_done = True
            self._grown.notify_all()

    def _take(self, member: Member) -> None:
        if not member.lines:
            return
        first = parsed(member.lines[0])["full"]
        time_s = float(first["time_s"])
        began = [parsed(line).get(BEGAN, ()) for line in member.lines if _BEGAN in line]
        marks = [from_plain(Mark, mark) for line in began for mark in line]
        if self._judge is not None:
            picture = self._recording.read(first)
            marks += self._judge(picture) if isinstance(picture, Snapshot) else []
        last = parsed(member.lines[-1]).get("patch") or {}
        (last_s,) = last.get("time_s", [time_s]) if isinstance(last, dict) else [time_s]
        with self._grown:
            self._times.append(time_s)
            self._offsets.append(member.offset)
            self.last_s = max(self.last_s, time_s, float(last_s))
            self._marks += marks[: _MOST_MARKS - len(self._marks)]
            self._grown.notify_all()


class _Judge:
    """Of a recording that does not say which alerts began."""

    def __init__(self) -> None:
        self._alerts, self._new = Alerts(), NewAlerts()

    def __call__(self, snapshot: Snapshot) -> list[Mark]:
        return self._new.begun(snapshot.time_s, self._alerts.update(snapshot), {})
