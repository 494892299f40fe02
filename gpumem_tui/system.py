"""Calls to the operating system shared by rooms: a user's name, and a file that is written whole or not at all."""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from gpumem_tui.text import printable


def host_name() -> str:
    """Return the name of this machine, which may be any bytes, as it can be printed and written."""
    return printable(socket.gethostname())


def user_name(uid: int) -> str:
    """Return the name of a user of this machine; its number where it has none."""
    try:
        return printable(pwd.getpwuid(uid).pw_name)
    except KeyError:
        return str(uid)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that takes a path's place once it is written: a crash leaves the old one or the new one."""
    beside = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
