"""Snapshots in a file, and played back from it.

The file is gzip: `zcat` shows JSON lines. The first line is the header; then comes, in each gzip member, one whole
snapshot and up to 59 patches to it (`codec.difference`). Every line is flushed when it is written, so a recorder that
is killed loses nothing, and each member has its checksum: what is damaged is not played.
"""

from __future__ import annotations

import json
import math
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from gpumem_tui import __version__
from gpumem_tui.monitor.codec import CodecError, Plain, difference, from_plain, patched, to_plain
from gpumem_tui.monitor.newest import Snapshots
from gpumem_tui.monitor.snapshot import Snapshot, Source

VERSION = 1
_HEADER_KEY = "gpumem_tui_recording"
_MEMBER_LINES = 60
_GZIP = 16 + zlib.MAX_WBITS
_CHUNK_BYTES = 1 << 16
_LARGEST_MEMBER_BYTES = 1 << 28
_POLL_S = 0.5
_LONGEST_GAP_S = 10.0
"""A longer pause in a recording (the machine slept) is cut to this when it is played."""


class RecordingError(Exception):
    """The file cannot be recorded to, or is no recording that can be played; one line that names it."""


class SnapshotRecorder:
    """Appends snapshots to a new file.

    Raises:
        RecordingError: the file exists already or cannot be made.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("xb", buffering=0)
        except FileExistsError as error:
            raise RecordingError(f"{path} exists already; a recording overwrites nothing, give another name") from error
        except OSError as error:
            raise RecordingError(f"{path} cannot be written: {error.strerror}") from error
        self._path = path
        self._packer: zlib._Compress | None = None
        self._last: Plain = None
        self._lines = 0
        try:
            self._append({_HEADER_KEY: VERSION, "program": __version__})
            self._end_member()
        except RecordingError:
            path.unlink(missing_ok=True)  # nothing is in it
            raise

    def add(self, snapshot: Snapshot) -> None:
        """Append one snapshot.

        Raises:
            RecordingError: the disk is full or gone; what was written before can still be played.
        """
        plain = to_plain(snapshot)
        self._append({"full": plain} if self._packer is None else {"patch": difference(self._last, plain)})
        self._last = plain
        if self._lines == _MEMBER_LINES:
            self._end_member()

    def close(self) -> None:
        """Complete the file.

        Raises:
            RecordingError: as `add`.
        """
        if not self._file.closed:
            if self._packer is not None:
                self._end_member()
            self._file.close()

    def _append(self, body: Plain) -> None:
        line = json.dumps(body, separators=(",", ":")).encode() + b"\n"
        if self._packer is None:
            self._packer = zlib.compressobj(wbits=_GZIP)
        try:
            self._write(self._packer.compress(line) + self._packer.flush(zlib.Z_SYNC_FLUSH))
        except KeyboardInterrupt:  # what is packed may not be written: more after it could not be read
            self._file.close()
            raise
        self._lines += 1

    def _end_member(self) -> None:
        assert self._packer is not None
        self._write(self._packer.flush())
        self._packer = None
        self._lines = 0

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self._file.close()
            raise RecordingError(f"recording to {self._path} stopped: {error.strerror}") from error


class SnapshotRecording:
    """A recording that can be played.

    Attributes:
        path: the file.
        damage: after `snapshots` came to an end: one line if it did not play the whole file, else empty.

    Raises:
        RecordingError: the file cannot be read, is no recording, or one of a later version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage = ""
        try:
            header = next(self._members(), [])
        except OSError as error:
            raise RecordingError(f"{path} cannot be read: {error.strerror}") from error
        except (zlib.error, CodecError):
            header = []
        version = header[0].get(_HEADER_KEY) if header and isinstance(header[0], dict) else None
        if version is None:
            raise RecordingError(f"{path} is no recording; `gpumem-tui monitor --record FILE` makes one")
        if version != VERSION:
            raise RecordingError(f"{path} is a recording of version {version}, this program plays version {VERSION}")

    def snapshots(self) -> Iterator[Snapshot]:
        """Every snapshot up to the end or to the first damage."""
        count = 0
        last_s = math.nan
        try:
            for number, member in enumerate(self._members()):
                plain: Plain = None
                for body in member if number else ():
                    plain = body["full"] if "full" in body else patched(plain, body["patch"])
                    snapshot = from_plain(Snapshot, plain)
                    count, last_s = count + 1, snapshot.time_s
                    yield snapshot
        except _CutOff:
            self.damage = f"{self.path}: cut off after snapshot {count}{_when(last_s)}; all before is played"
        except (OSError, zlib.error, CodecError, KeyError, TypeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "damaged"
            self.damage = f"{self.path}: {reason} after snapshot {count}{_when(last_s)}; the rest is not played"

    def _members(self) -> Iterator[list[Plain]]:
        """The lines of each gzip member, once its checksum is right; of the last one those that were written whole.

        Raises:
            _CutOff: after those of a last member that has no end.
        """
        with self.path.open("rb") as file:
            data = b""
            while data or (data := file.read(_CHUNK_BYTES)):
                unpacker = zlib.decompressobj(wbits=_GZIP)
                text = b""
                while data and not unpacker.eof:
                    text += unpacker.decompress(data)
                    data = unpacker.unused_data or (b"" if unpacker.eof else file.read(_CHUNK_BYTES))
                    if len(text) > _LARGEST_MEMBER_BYTES:
                        raise CodecError("far too large")
                yield [_parsed(line) for line in text.split(b"\n")[:-1]]
                if not unpacker.eof:
                    raise _CutOff


class Recorded:
    """A source whose snapshots are also recorded, at most one an interval.

    Attributes:
        notice: one line if recording had to stop, else empty; the source goes on.
    """

    def __init__(self, source: Source, recorder: SnapshotRecorder, interval_s: float) -> None:
        self.notice = ""
        self._source = source
        self._recorder = recorder
        self._interval_s = interval_s
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
                    self._recorder.add(snapshot)
                    last = snapshot
                    self._stopped.wait(self._interval_s)
            self._recorder.close()
        except RecordingError as error:
            self.notice = str(error)


class RecordingReplay(Snapshots):
    """Plays a recording as a source of snapshots, in the time that it took or faster; stays on the last one.

    Args:
        speed: 2 plays two recorded seconds in one.

    Attributes:
        notice: says so at the end.
    """

    def __init__(self, recording: SnapshotRecording, speed: float = 1.0) -> None:
        super().__init__()
        self._recording = recording
        self._speed = speed
        self.notice = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._play, name="replay", daemon=True)

    def start(self) -> None:
        """Begin, unless it has begun; returns at once."""
        if self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        """End; returns at once."""
        self._stopped.set()

    def _play(self) -> None:
        due_s = time.monotonic()
        last: Snapshot | None = None
        for snapshot in self._recording.snapshots():
            if last is not None:
                gap_s = snapshot.time_s - last.time_s
                due_s += min(max(0.0, gap_s), _LONGEST_GAP_S) / self._speed
            if self._stopped.wait(max(0.0, due_s - time.monotonic())):
                return
            self._newest.put(snapshot)
            last = snapshot
        self.notice = "end of recording"
        self._newest.end()


class _CutOff(Exception):
    """The file has no end: its recorder was killed, or still records."""


def _when(time_s: float) -> str:
    return "" if math.isnan(time_s) else time.strftime(" (%Y-%m-%d %H:%M:%S)", time.localtime(time_s))


def _parsed(line: bytes) -> Plain:
    try:
        return json.loads(line)
    except ValueError as error:
        raise CodecError(f"no JSON: {error}") from error
