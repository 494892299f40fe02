"""The files by which a watched process and its viewers talk: their names, whose they must be, how they are replaced.

A publishing folder is opened once and then never looked up by its path again: the viewer may be root, and whoever owns
the folder may be hostile. Standard library only, Python 3.9: probes and viewers run this code.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from itertools import islice
from pathlib import Path
from types import TracebackType

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PARENT = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_IN_ANOTHER_ROOT = r"(.*?/proc/\d+/root)(/.+)"
_MOST_LINKS = 40
"""Links that are followed in one path, as many as the kernel follows (path_resolution(7))."""


class WireError(ValueError):
    """A file is not what a probe of this schema writes; the message gives the reason, for a person."""


class Folder:
    """An open folder that belongs to one user and is closed to all others.

    Whoever may write into its parent can put a link or another folder in its place at any moment. So the folder is
    opened once, the descriptor is checked, and all files are opened, replaced and removed by their names relative to
    that descriptor. A link in the place of a file is never followed.

    A folder of a container (``/proc/PID/root/…``) is looked up below the container's root: its absolute links, which
    the kernel would follow from our own root, do not lead out of it.

    Args:
        owners: the users whom it, and every file read from it, may belong to; None: whoever owns the folder.

    Raises:
        WireError: it is a link, not a directory, somebody else's, or open to others.
        OSError: it is not there or cannot be reached.
    """

    def __init__(self, path: Path, owners: Collection[int] | None) -> None:
        self.path = path
        self._descriptor = _open(path)
        try:
            found = os.fstat(self._descriptor)
            if owners is not None and found.st_uid not in owners:
                raise WireError(f"{path} belongs to user {found.st_uid}")
            if found.st_mode & 0o077:
                raise WireError(f"{path} is open to other users (mode {stat.S_IMODE(found.st_mode):o}, wanted 700)")
        except WireError:
            os.close(self._descriptor)
            raise
        self.owner = found.st_uid
        self.identity = (found.st_dev, found.st_ino)
        self._owners = (found.st_uid,) if owners is None else owners

    def close(self) -> None:
        """Let it go; nothing works after."""
        os.close(self._descriptor)

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def names(self, most: int | None = None) -> list[str]:
        """List the names in the folder, or so many of them.

        Raises:
            OSError: it cannot be listed.
        """
        if most is None:
            return os.listdir(self._descriptor)
        with os.scandir(self._descriptor) as entries:
            return [entry.name for entry in islice(entries, most)]

    def file_system(self) -> os.statvfs_result:
        """Return how full its file system is.

        Raises:
            OSError: it cannot be asked.
        """
        return os.fstatvfs(self._descriptor)

    def status(self, name: str) -> os.stat_result:
        """Return size, times and kind of what has that name; of a link itself.

        Raises:
            OSError: it is not there.
        """
        return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)

    def open(self, name: str, flags: int) -> int:
        """Open a file, return its descriptor; with O_CREAT it must not be there yet, and is its owner's alone.

        Raises:
            OSError: it cannot be opened; ELOOP if it is a link.
        """
        exclusive = os.O_EXCL if flags & os.O_CREAT else 0
        return os.open(name, flags | exclusive | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._descriptor)

    @contextmanager
    def opened(self, name: str, limit_bytes: int) -> Iterator[FileIO]:
        """Open a regular file of one of the owners to be read.

        Raises:
            WireError: it is a link, not a regular file, somebody else's, writable by others, or over `limit_bytes`.
            OSError: it is not there or cannot be read.
        """
        try:
            descriptor = self.open(name, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise WireError(f"{name} is a link") from error
            raise
        try:
            self._check_file(name, os.fstat(descriptor), limit_bytes)
            file = FileIO(descriptor)
        except BaseException:  # nothing else closes it: FileIO takes none that is a folder's
            os.close(descriptor)
            raise
        with file:
            yield file

    def _check_file(self, name: str, found: os.stat_result, limit_bytes: int) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise WireError(f"{name} is not a regular file")
        if found.st_uid not in self._owners:
            raise WireError(f"{name} belongs to user {found.st_uid}")
        if found.st_mode & 0o022:
            raise WireError(f"{name} can be written by other users (mode {stat.S_IMODE(found.st_mode):o})")
        if found.st_size > limit_bytes:
            raise WireError(f"{name} has {found.st_size} bytes, more than {limit_bytes}")

    def read(self, name: str, limit_bytes: int) -> bytes:
        """Read the bytes of such a file.

        Raises:
            WireError, OSError: as `opened`.
        """
        with self.opened(name, limit_bytes) as file:
            return file.read(limit_bytes) or b""

    def replace(self, name: str, content: bytes) -> None:
        """Replace a file as a whole: a reader sees the old content or the new. It is given to the folder's owner.

        Raises:
            OSError: the folder cannot be written or is full.
        """
        temporary = f".{name}.{os.getpid()}"
        self.remove(temporary)  # left by a write that was interrupted
        try:
            with FileIO(self.open(temporary, os.O_WRONLY | os.O_CREAT), "w") as file:
                if os.fstat(file.fileno()).st_uid != self.owner:
                    os.fchown(file.fileno(), self.owner, -1)
                left = memoryview(content)
                while left:
                    left = left[file.write(left) or 0 :]
            self.rename(temporary, name)
        except OSError:
            with suppress(OSError):
                self.remove(temporary)
            raise

    def rename(self, before: str, after: str) -> None:
        """Give a file another name.

        Raises:
            OSError: as of `os.rename`.
        """
        os.rename(before, after, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there.

        Raises:
            OSError: it is a folder, or the folder cannot be written.
        """
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)


def _open(path: Path) -> int:
    """Open a folder, return its descriptor; a link is none.

    Raises:
        WireError: something else has that name.
        OSError: it is not there or cannot be reached.
    """
    inside = re.fullmatch(_IN_ANOTHER_ROOT, os.fspath(path)) if "/proc/" in os.fspath(path) else None
    if inside is None:
        return _open_itself(path, os.fspath(path), None)
    root = os.open(inside[1], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _open_below(path, root, inside[2])
    finally:
        os.close(root)


def _open_itself(path: Path, name: str, parent: int | None) -> int:
    try:
        return os.open(name, _DIRECTORY, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            os.stat(name, dir_fd=parent, follow_symlinks=False)  # raises where one above it is no folder
            raise WireError(f"{path} is not a directory") from error
        raise


def _open_below(path: Path, root: int, inner: str) -> int:
    """Open a folder as a process with that root directory sees it. Links above the folder are followed, not its own."""
    for _ in range(_MOST_LINKS):
        *parents, name = os.path.normpath(inner).strip("/").split("/")
        parent, instead = _descend(root, parents)
        if instead:
            inner = os.path.join(instead, name)
            continue
        try:
            return _open_itself(path, name, parent)
        finally:
            os.close(parent)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _descend(root: int, names: list[str]) -> tuple[int, str]:
    """Open one folder after the other below `root`.

    Returns:
        The descriptor of the last one; or, where one of them is a link, the path from the root to take instead.
    """
    current = os.dup(root)
    for place, name in enumerate(names):
        try:
            following = os.open(name, _PARENT, dir_fd=current)
        except OSError as error:
            try:
                target = os.readlink(name, dir_fd=current) if error.errno in (errno.ENOTDIR, errno.ELOOP) else ""
            except OSError:
                target = ""
            finally:
                os.close(current)
            if not target:
                raise
            return -1, os.path.join("/", *names[:place], target, *names[place + 1 :])
        os.close(current)
        current = following
    return current, ""


# The files in it

SITE_DIRECTORY = Path(__file__).resolve().parent / "site"
"""First on PYTHONPATH, it puts the probe into every Python process that a command starts. Nothing else is needed."""


def default_directory() -> Path:
    """Return the folder that probes of this user publish in: ``$GPUMEM_TUI_DIR``, else ``/tmp/gpumem-tui-UID``.

    Not the run-time directory: that vanishes at logout while a training run in tmux lives on.
    """
    return Path(os.environ.get("GPUMEM_TUI_DIR") or f"/tmp/gpumem-tui-{os.getuid()}")  # noqa: S108 - checked by `Folder`


def start_ticks(pid: int | str = "self") -> int:
    """Read when a process started, in clock ticks since boot: with its pid, a name that is never used twice.

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


class _Named:
    """The path of one of a process's files, by the ending of its name."""

    def __init__(self, ending: str) -> None:
        self.ending = ending

    def __get__(self, files: Files, kind: type[Files] | None = None) -> Path:
        return files.directory / f"{files.pid}-{files.start_ticks}.{self.ending}"


@dataclass(frozen=True)
class Files:
    """The files of one watched process.

    Attributes:
        attached: left by whoever put the probe into a process that ran already: before it trains there is nothing else.
    """

    directory: Path
    pid: int
    start_ticks: int

    ring = _Named("ring")
    model = _Named("model.json")
    look = _Named("look.json")
    oom = _Named("oom.json")
    error = _Named("error.json")
    exit = _Named("exit.json")
    stall = _Named("stall.json")
    stages = _Named("stages.json")
    control = _Named("control")
    attached = _Named("attached")

    def all(self) -> tuple[Path, ...]:
        """Return every file that may exist."""
        documents = self.model, self.look, self.oom, self.error, self.exit, self.stall, self.stages
        return (self.ring, *documents, self.control, self.attached)

    @classmethod
    def of_ring(cls, path: Path) -> Files:
        """Return the files of the process that a ring is named after.

        Raises:
            WireError: the name is no ring's.
        """
        pid, dash, ticks = path.name[: -len(".ring")].partition("-")
        if not (path.name.endswith(".ring") and dash and pid.isdecimal() and ticks.isdecimal()):
            raise WireError(f"{path.name} is no name of a ring")
        return cls(path.parent, int(pid), int(ticks))


def check_directory(path: Path, owners: Collection[int]) -> None:
    """Refuse a folder that others could have put files into.

    Raises:
        WireError, OSError: as `Folder`.
    """
    Folder(path, owners).close()


def read_private(path: Path, limit_bytes: int, owners: Collection[int]) -> bytes:
    """Read the bytes of a file of one of `owners`, in a private folder of one of them.

    Raises:
        WireError, OSError: as `Folder` and `Folder.read`.
    """
    with Folder(path.parent, owners) as folder:
        return folder.read(path.name, limit_bytes)


def write_document(path: Path, content: bytes) -> None:
    """Replace a file in our own private folder as a whole: a reader sees the old content or the new.

    Raises:
        WireError, OSError: as `Folder` and `Folder.replace`.
    """
    with Folder(path.parent, (os.getuid(),)) as folder:
        folder.replace(path.name, content)
