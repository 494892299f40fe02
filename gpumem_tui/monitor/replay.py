"""Plays a recording: in the time that it took or faster, from any moment, held or not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic

from gpumem_tui.monitor.codec import CodecError, Plain
from gpumem_tui.monitor.latest import LatestValue
from gpumem_tui.monitor.marks import Mark
from gpumem_tui.monitor.recording import Picture, Recording
from gpumem_tui.monitor.recording_index import RecordingIndex
from gpumem_tui.monitor.snapshot import Snapshot

_LONGEST_GAP_S = 10.0
"""A longer pause in a recording (the machine slept) is cut to this when it is played."""
_INDEX_S = 0.2
_PAST_STEPS = 60
"""Pictures from before a moment that is sought, for the charts."""


class Replay(Generic[Picture]):
    """Plays a recording and stays on its last picture.

    Args:
        speed: 2 plays two recorded seconds in one.
        past_s: how far back charts reach.

    Attributes:
        notice: how it stands, in a few words.
        shown_s: when the newest picture was (`time.monotonic`): while it is held, nothing grows older.
        jumps: how often a moment was sought: what was remembered of the pictures before counts no more.
        past: the pictures before the one that was sought last, `past_step_s` apart, as plain data.
    """

    def __init__(self, recording: Recording[Picture], speed: float = 1.0, past_s: float = 600.0) -> None:
        self.index = RecordingIndex(recording)
        self.notice = ""
        self.jumps = 0
        self.shown_s = time.monotonic()
        self.past: Sequence[Plain] = ()
        self.past_step_s = past_s / _PAST_STEPS
        self._recording = recording
        self._speed = speed
        self._past_s = past_s
        self._newest: LatestValue[Picture] = LatestValue()
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

    def subscribe(self, tell: Callable[[], None]) -> None:
        """Have this called after each picture and at the end, from another thread; it must not wait."""
        self._newest.subscribe(tell)

    def unsubscribe(self, tell: Callable[[], None]) -> None:
        """Have it called no more."""
        self._newest.unsubscribe(tell)

    @property
    def picture(self) -> Picture | None:
        """The newest; None before the first."""
        return self._newest.value

    def next(self, timeout_s: float) -> Picture | None:
        """The picture after the newest; None if there is none in time, or none ever again."""
        return self._newest.wait(self._newest.value, timeout_s)

    @property
    def now_s(self) -> float:
        """The moment that is shown, seconds since the epoch."""
        return 0.0 if self.picture is None else self._recording.time_s(self.picture)

    @property
    def marks(self) -> Sequence[Mark]:
        """The alerts that began, in their order, as far as the file was read."""
        return self.index.marks

    @property
    def is_held(self) -> bool:
        """Whether it stands still."""
        return self._is_held

    def hold(self, held: bool) -> None:
        """Stand still, or go on."""
        self._is_held = held
        self._wake.set()

    def seek(self, time_s: float) -> None:
        """Go to a moment, or as near to it as the recording has one."""
        self._wanted_s = time_s
        self._wake.set()

    # In its thread

    def _play(self) -> None:
        while not self._stopped.is_set():
            pictures = self._recording.pictures() if self._wanted_s is None else self._sought()
            self._run(pictures)

    def _run(self, pictures: Iterator[Picture]) -> None:
        """Show them in their time, until there is no other or a moment is sought."""
        due_s, last_s = time.monotonic(), None
        self.notice = ""
        for picture in pictures:
            time_s = self._recording.time_s(picture)
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
            while self._wanted_s is None and not self._stopped.is_set():
                self._wake.wait()
                self._wake.clear()

    def _wait_until(self, due_s: float) -> float:
        """Wait, and for as long as it is held; when the wait was to end, later by what it was held for."""
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

    def _sought(self) -> Iterator[Picture]:
        """The pictures from the moment that is sought on; what was before it is in `past`."""
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
        return _chained(first, pictures)

    def _thinned(self, from_s: float, until_s: float) -> Iterator[Plain]:
        """The pictures of a time, some seconds apart, and its last one."""
        offset = self.index.offset_at(from_s, _INDEX_S)
        due_s, last = from_s, None
        for plain in () if offset is None else self._recording.plain(offset):
            if plain["time_s"] >= until_s or self._stopped.is_set():
                break
            last = plain
            if plain["time_s"] >= due_s:
                due_s, last = plain["time_s"] + self.past_step_s, None
                yield plain
        if last is not None:
            yield last


def _chained(first: Picture, others: Iterator[Picture]) -> Iterator[Picture]:
    yield first
    yield from others


class RecordingReplay(Replay[Snapshot]):
    """Plays a recording of one machine, as a source of snapshots."""

    def past_snapshots(self) -> Sequence[Snapshot]:
        """The snapshots before the moment that was sought last; none where they cannot be read."""
        try:
            return [self._recording.read(plain) for plain in self.past]
        except CodecError:
            return ()

    def latest(self) -> Snapshot | None:
        """The newest snapshot, None before the first."""
        return self.picture

    def wait(self, after: Snapshot | None, timeout_s: float) -> Snapshot | None:
        """The first snapshot that is not `after`, or None if there is none in time, or none ever again."""
        return self._newest.wait(after, timeout_s)
