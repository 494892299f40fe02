"""The files by which a watched process and its viewers talk: their names, whose they must be, how they are replaced.

Standard library only, Python 3.9. Both sides run this code.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from gpumem_tui.probe.folder import Folder
from gpumem_tui.probe.folder import WireError as WireError  # that of everything read from these files

SITE_DIRECTORY = Path(__file__).resolve().parent / "site"
"""First on PYTHONPATH, it puts the probe into every Python process that a command starts. Nothing else is needed."""


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

    @property
    def attached(self) -> Path:
        """Left by whoever put the probe into a process that ran already: before it trains there is nothing else."""
        return self._path("attached")

    def all(self) -> tuple[Path, ...]:
        """Every file that may exist."""
        return (self.ring, self.model, self.look, self.oom, self.error, self.exit, self.control, self.attached)

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
    """Refuse a folder that others could have put files into.

    Raises:
        WireError, OSError: as `Folder`.
    """
    Folder(path, owners).close()


def read_private(path: Path, limit_bytes: int, owners: Collection[int]) -> bytes:
    """The bytes of a file of one of `owners`, in a private folder of one of them.

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
