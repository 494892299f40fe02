"""The file of a recording: pictures as lines of JSON (`monitor.wire`), and what changed from one to the next.

It is gzip: `zcat` shows the lines. The first line is the header; then comes, in each gzip member, one whole picture and
up to 59 patches to it. Every line is flushed when it is written, so a recorder that is killed
loses nothing. Each member has its checksum, and each picture one of its own, which marks those before a damage as
whole: what is damaged is not played. A member can be read without those before it, which is how a moment is sought.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO, Generic, NamedTuple, NoReturn, TypeVar

from gpumem_tui import __version__
from gpumem_tui.errors import OptionError
from gpumem_tui.monitor.wire import Json, LineError, LineReader, LineWriter, encoded, parsed

HEADER_KEY = "gpumem_tui_recording"
_CHECKSUM = b',"crc":'
"""Before the last value of a line: the CRC-32 of what is before it. Recordings of older programs lack it."""
_MEMBER_LINES = 60
_GZIP = 16 + zlib.MAX_WBITS
_CHUNK_BYTES = 1 << 16
_LARGEST_MEMBER_BYTES = 1 << 30


class RecordingError(OptionError):
    """The file cannot be recorded to, or is no recording that can be played; one line that names it."""


class RecordingEnds(Exception):
    """The rest of the file cannot be played: why, in a few words."""


T = TypeVar("T")


class _Written(NamedTuple):
    """The part of a file that is whole. It is replaced at once, as a signal may end the program between any two steps.

    Attributes:
        end: where it ends.
        packer: of the member that is not ended, which nothing else was put through.
        lines: in that member.
    """

    end: int = 0
    packer: zlib._Compress | None = None
    lines: int = 0


class RecordingWriter(Generic[T]):
    """Appends pictures to a new file.

    Args:
        kind: of the pictures.
        header: what is in the first line besides the program.

    Raises:
        RecordingError: the file exists already or cannot be made.
    """

    def __init__(self, path: Path, version: int, kind: type[T], **header: bool) -> None:
        try:
            self._file = path.open("xb", buffering=0)
        except FileExistsError as error:
            raise RecordingError(f"--record: {path} exists already; give another name") from error
        except OSError as error:
            raise RecordingError(
                f"--record: {path} cannot be written: {error.strerror}; name a file elsewhere"
            ) from error
        self._path = path
        self._written = _Written()
        self._writer = LineWriter(kind)
        try:
            self._append(encoded({HEADER_KEY: version, "program": __version__, **header}))
            self._end_member()
        except RecordingError:
            path.unlink(missing_ok=True)  # nothing is in it
            raise

    def add(self, picture: T, **more: object) -> None:
        """Append one picture.

        Args:
            more: further fields of its line.

        Raises:
            RecordingError: the disk is full or gone; what was written before can still be played.
        """
        text = self._writer.line(picture, more, whole=self._written.packer is None)[:-1]
        self._append(b"%b%b%d}" % (text, _CHECKSUM, zlib.crc32(text)))
        if self._written.lines == _MEMBER_LINES:
            self._end_member()

    def close(self) -> None:
        """Complete the file: without what a signal interrupted.

        Raises:
            RecordingError: as `add`.
        """
        if not self._file.closed:
            try:
                self._file.truncate(self._written.end)
                self._file.seek(self._written.end)
            except OSError as error:
                self._fail(error)
            if self._written.packer is not None:
                self._end_member()
            self._file.close()

    def _append(self, line: bytes) -> None:
        packer = self._written.packer
        packer = zlib.compressobj(wbits=_GZIP) if packer is None else packer.copy()
        data = packer.compress(line + b"\n") + packer.flush(zlib.Z_SYNC_FLUSH)
        self._write(data)
        self._written = _Written(self._written.end + len(data), packer, self._written.lines + 1)

    def _end_member(self) -> None:
        assert self._written.packer is not None
        data = self._written.packer.copy().flush()
        self._write(data)
        self._written = _Written(self._written.end + len(data))

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> NoReturn:
        self._file.close()
        raise RecordingError(
            f"recording to {self._path} stopped: {error.strerror}; free space there, or name another file"
        ) from error


@dataclass(frozen=True)
class Member:
    """A part of the file that can be read by itself.

    Attributes:
        offset: where it begins; `end` where the next one does.
        lines: as JSON; those that were written whole.
    """

    offset: int
    end: int
    lines: tuple[bytes, ...]


class RecordingFile:
    """A file to read from, as often and from wherever it is wanted.

    Attributes:
        header: its first line.

    Raises:
        RecordingError: it cannot be read, or is no recording.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        first: Member | None = None
        header: Json = None
        try:
            first = next(self.members(0), None)
            if first is not None and first.lines:
                header = parsed(first.lines[0])
        except OSError as error:
            raise RecordingError(f"{path} cannot be read: {error.strerror}; check the path") from error
        except (zlib.error, LineError, RecordingEnds):
            pass  # said below
        if first is None or not isinstance(header, dict) or HEADER_KEY not in header:
            raise RecordingError(f"{path} is no recording; `gpumem-tui monitor --record FILE` makes one")
        self.header: Mapping[str, Json] = header
        self._begins = first.end

    @property
    def size_bytes(self) -> int:
        """Return how large it is now."""
        return self.path.stat().st_size

    def parts(self, offset: int = 0) -> Iterator[Member]:
        """Yield the members of pictures from one on.

        Raises:
            RecordingEnds: the file is damaged there, or cut off: after what was written whole.
        """
        try:
            yield from self.members(max(offset, self._begins))
        except OSError as error:
            raise RecordingEnds(error.strerror or "cannot be read") from error
        except (zlib.error, LineError) as error:
            raise RecordingEnds("damaged") from error

    def pictures(self, kind: type[T], offset: int = 0) -> Iterator[T]:
        """Yield every picture from a member on.

        Args:
            kind: of the pictures.

        Raises:
            RecordingEnds: as `parts`.
        """
        for member in self.parts(offset):
            reader = LineReader(kind)
            try:
                for line in member.lines:
                    yield reader.read(parsed(line))
            except LineError as error:
                raise RecordingEnds("damaged") from error

    def members(self, offset: int) -> Iterator[Member]:
        """Yield the lines of each gzip member from one on, once its checksum is right.

        Raises:
            RecordingEnds: the last one has no end, or is damaged; after those of its lines that are whole.
        """
        with self.path.open("rb") as file:
            file.seek(offset)
            data = b""
            while data or (data := file.read(_CHUNK_BYTES)):
                unpacker = zlib.decompressobj(wbits=_GZIP)
                text, begins = bytearray(), file.tell() - len(data)
                while data and not unpacker.eof:
                    try:
                        text += unpacker.decompress(data)
                    except zlib.error as error:
                        file.seek(begins)
                        yield Member(begins, begins, _whole(_before_damage(file)))
                        raise RecordingEnds("damaged") from error
                    data = unpacker.unused_data or (b"" if unpacker.eof else file.read(_CHUNK_BYTES))
                    if len(text) > _LARGEST_MEMBER_BYTES:
                        raise LineError("far too large")
                lines = tuple(bytes(text).split(b"\n")[:-1])
                whole = lines if unpacker.eof else _whole(lines, older=True)
                yield Member(begins, file.tell() - len(data), whole)
                if not unpacker.eof:
                    raise RecordingEnds("cut off" if whole == lines else "damaged")


def _before_damage(file: BinaryIO) -> tuple[bytes, ...]:
    """Return the lines of a damaged member, up to where its data makes no sense."""
    unpacker, text = zlib.decompressobj(wbits=_GZIP), bytearray()
    with suppress(zlib.error):
        while (byte := file.read(1)) and len(text) <= _LARGEST_MEMBER_BYTES:
            text += unpacker.decompress(byte)
    return tuple(bytes(text).split(b"\n")[:-1])


def _whole(lines: tuple[bytes, ...], *, older: bool = False) -> tuple[bytes, ...]:
    """Return the lines before the first with a wrong checksum; `older`: those of older programs have none."""

    def is_whole(line: bytes) -> bool:
        before, checksum, after = line.rpartition(_CHECKSUM)
        return after == b"%d}" % zlib.crc32(before) if checksum else older

    return tuple(takewhile(is_whole, lines))


def when(time_s: float) -> str:
    """Return a moment as a recording's messages write it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
