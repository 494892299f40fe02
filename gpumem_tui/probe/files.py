"""The files by which a watched process and its viewers talk: their names, whose they must be, how they are replaced.

Standard library only, Python 3.9. Both sides run this code.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

SITE_DIRECTORY = Path(__file__).resolve().parent / "site"
"""First on PYTHONPATH, it puts the probe into every Python process that a command starts. Nothing else is needed."""


class WireError(ValueError):
    """What was read is not what a probe of this schema writes; the message says why, for a person."""


def default_directory() -> Path:
    """Where probes of this user publish: ``$GPUMEM_TUI_DIR``, else ``/tmp/gpumem-tui-UID``.

    Not the run-time directory: that vanishes at logout while a training run in tmux lives on.
    """
    return Path(os.environ.get("GPUMEM_TUI_DIR") or f"/tmp/gpumem-tui-{os.getuid()}")


def start_ticks(pid: int | str = "self") -> int:
    """When a process started, in clock ticks since boot: with its pid, a name that is never used twice.

    Raises:
        OSError: no such process.
        WireError: /proc holds something else.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        text = file.read()
    try:
        return int(text[text.rindex(b")") + 2 :].split()[19])  # the command before it may hold spaces and brackets
    except (ValueError, IndexError):
        raise WireError(f"/proc/{pid}/stat cannot be understood") from None


@dataclass(frozen=True)
class Files:
    """The files of one watched process."""

    directory: Path
    pid: int
    start_ticks: int

    @property
    def ring(self) -> Path:
        return self._path("ring")

    @property
    def model(self) -> Path:
        return self._path("model.json")

    @property
    def look(self) -> Path:
        return self._path("look.json")

    @property
    def oom(self) -> Path:
        return self._path("oom.json")

    @property
    def error(self) -> Path:
        return self._path("error.json")

    @property
    def exit(self) -> Path:
        return self._path("exit.json")

    @property
    def control(self) -> Path:
        return self._path("control")

    def all(self) -> tuple[Path, ...]:
        """Every file that may exist."""
        return (self.ring, self.model, self.look, self.oom, self.error, self.exit, self.control)

    def _path(self, ending: str) -> Path:
        return self.directory / f"{self.pid}-{self.start_ticks}.{ending}"

    @classmethod
    def of_ring(cls, path: Path) -> Files:
        """The files beside a ring.

        Raises:
            WireError: the name is no ring's.
        """
        pid, dash, ticks = path.name[: -len(".ring")].partition("-")
        if not (path.name.endswith(".ring") and dash and pid.isdecimal() and ticks.isdecimal()):
            raise WireError(f"{path.name} is no name of a ring")
        return cls(path.parent, int(pid), int(ticks))


def check_directory(path: Path, owners: Collection[int]) -> None:
    """Refuse a directory that others could have put files into.

    Raises:
        WireError: it is a link, not a directory, somebody else's, or open to others.
        OSError: it is not there or cannot be reached.
    """
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise WireError(f"{path} is not a directory")
    if found.st_uid not in owners:
        raise WireError(f"{path} belongs to user {found.st_uid}")
    if found.st_mode & 0o077:
        raise WireError(f"{path} is open to other users (mode {stat.S_IMODE(found.st_mode):o}, wanted 700)")


@contextmanager
def open_private(path: Path, limit_bytes: int, owners: Collection[int]) -> Iterator[FileIO]:
    """A regular file that belongs to one of `owners` (user numbers), open to be read; links are never followed.

    Raises:
        WireError: it is a link, not a regular file, somebody else's, writable by others, or over `limit_bytes`.
        OSError: it is not there or cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise WireError(f"{path.name} is a link") from error
        raise
    with FileIO(descriptor) as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise WireError(f"{path.name} is not a regular file")
        if found.st_uid not in owners:
            raise WireError(f"{path.name} belongs to user {found.st_uid}")
        if found.st_mode & 0o022:
            raise WireError(f"{path.name} can be written by other users (mode {stat.S_IMODE(found.st_mode):o})")
        if found.st_size > limit_bytes:
            raise WireError(f"{path.name} has {found.st_size} bytes, more than {limit_bytes}")
        yield file


def read_private(path: Path, limit_bytes: int, owners: Collection[int]) -> bytes:
    """The bytes of such a file.

    Raises:
        WireError, OSError: as `open_private`.
    """
    with open_private(path, limit_bytes, owners) as file:
        return file.read(limit_bytes) or b""


def write_document(path: Path, content: bytes) -> None:
    """Replace a file as a whole: a reader sees the old content or the new.

    Raises:
        OSError: the directory cannot be written or is full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.rename(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
