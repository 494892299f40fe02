"""The folders that probes on this machine publish in, without what it takes to read them: most machines have none."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from gpumem_tui.probe.files import Folder, WireError, default_directory
from gpumem_tui.watch import hosts

_TMP = Path("/tmp")  # noqa: S108 - each folder in it is checked by `Folder`
_OWNER_IN_NAME = re.compile(r"gpumem-tui-(\d+)")
_FOREIGN_EVERY_S = 10.0
_TICK_NS = 100_000_000
"""A folder that changed more lately may change once more with the same time: the kernel's clock of files has ticks."""
_ROOM_BYTES = 64 << 20
"""With less, what does not fit is looked at more closely."""
_MOST_FOLDERS = 16
"""Limits of one user, in /tmp. Nobody takes the place of others by making more."""


class PublishingFolders:
    """The folders to look into, in their order. For one thread at a time.

    Args:
        given: by default our own, for root everybody's, and those of containers.
        proc: where processes are looked up.
        clock_ns: the machine's monotonic clock.
    """

    def __init__(
        self,
        given: Iterable[Path] | None = None,
        proc: Path = hosts.PROC,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._given = None if given is None else tuple(given)
        self._followed: set[Path] = set()
        self._proc = proc
        self._clock_ns = clock_ns
        self._foreign: tuple[Path, ...] = ()
        self._foreign_at_s = -_FOREIGN_EVERY_S
        self._everybodys: tuple[Path, ...] = ()
        self._listed_ns: int | None = None

    def follow(self, directory: Path) -> None:
        """Also look into this one."""
        self._followed.add(directory)

    def directories(self) -> tuple[Path, ...]:
        """Return them as they are now; those of containers are looked for every ten seconds."""
        if self._given is not None:
            return tuple(dict.fromkeys([*self._given, *self._followed]))
        now_s = self._clock_ns() / 1e9
        if now_s - self._foreign_at_s >= _FOREIGN_EVERY_S:
            self._foreign_at_s = now_s
            self._foreign = foreign_directories(self._proc)
        everybodys = self._of_everybody() if os.geteuid() == 0 else ()
        return tuple(dict.fromkeys([default_directory(), *self._followed, *everybodys, *self._foreign]))

    def _of_everybody(self) -> tuple[Path, ...]:
        """Return `everybodys_directories`; /tmp, which may be large, is listed again only once it has changed."""
        changed_ns = os.stat(_TMP).st_mtime_ns
        if changed_ns != self._listed_ns:
            self._listed_ns = changed_ns if time.time_ns() - changed_ns > _TICK_NS else None
            self._everybodys = everybodys_directories()
        return self._everybodys

    def are_quiet(self) -> bool:
        """Return whether nothing is to be said of any of them, so that nobody need read them."""
        return all(map(_is_quiet, self.directories()))


def _is_quiet(directory: Path) -> bool:
    """Return whether a folder is not there, or has no rings, is as it should be, with room for whoever will publish."""
    try:
        with Folder(directory, expected_owners(directory)) as folder:
            found = folder.file_system()
            has_room = found.f_bavail * found.f_frsize > _ROOM_BYTES
            return has_room and not any(name.endswith(".ring") for name in folder.names())
    except FileNotFoundError:
        return True
    except (OSError, WireError):
        return False


def expected_owners(directory: Path) -> tuple[int, ...] | None:
    """Return whose a folder must be: ours; for root anybody's (None), or theirs if its name tells whose."""
    if os.geteuid() != 0:
        return (os.geteuid(),)
    named = _OWNER_IN_NAME.fullmatch(directory.name)
    if named is not None and directory.parent == _TMP:
        return (int(named[1]),)
    return None


def everybodys_directories() -> tuple[Path, ...]:
    """List the folders in /tmp where probes of any user may publish, so many of each user at most."""
    found: Counter[int] = Counter()
    taken = []
    names = [name for name in os.listdir(_TMP) if name.startswith("gpumem-tui-")]
    for path in (_TMP / name for name in sorted(names, key=lambda name: _OWNER_IN_NAME.fullmatch(name) is None)):
        with suppress(OSError):
            uid = path.lstat().st_uid
            found[uid] += 1
            taken += [path] if found[uid] <= _MOST_FOLDERS else []
    return tuple(taken)


def foreign_directories(proc: Path = hosts.PROC) -> tuple[Path, ...]:
    """List where the probes of containers publish, by names that we can open, of processes that we may look at."""
    pids = (int(name) for name in os.listdir(proc) if name.isdecimal())
    contained = (hosts.find(pid, proc) for pid in pids if not hosts.shares_files(f"{proc}/{pid}"))
    found = [host.files.directory for host in contained if host is not None and os.geteuid() in (0, host.uid)]
    distinct: dict[object, Path] = {}
    for path in found:
        try:
            with Folder(path, None) as folder:
                distinct.setdefault(folder.identity, path)
        except WireError:
            distinct[path] = path  # the reader reports why it is refused
        except OSError:
            continue
    return tuple(distinct.values())
