"""Whether probes can publish in a folder, and why not, before any of them tries."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from gpumem_tui.memory import format_bytes
from gpumem_tui.probe.files import WireError, check_directory
from gpumem_tui.probe.wire import RING_BYTES


def why_unusable(directory: Path) -> str:
    """Why no process of this user can publish in a folder; empty if one can. One that is not there is not made."""
    try:
        check_directory(directory, (os.getuid(),))
        return full_reason(directory)
    except FileNotFoundError:
        return _why_not_made(directory)
    except WireError as error:
        return str(error)
    except OSError as error:
        return f"{directory}: {error.strerror}"


def full_reason(directory: Path) -> str:
    """Why no other process can publish in a folder, if its file system is full; empty if it is not.

    Raises:
        OSError: it is not there.
    """
    found = os.statvfs(directory)
    free_bytes = found.f_bavail * found.f_frsize
    if free_bytes >= RING_BYTES:
        return ""
    needed = format_bytes(RING_BYTES)
    return f"{directory} is full ({format_bytes(free_bytes)} free, {needed} needed): no other process can publish there"


def _why_not_made(directory: Path) -> str:
    """Permissions alone do not say: nobody makes a folder in /proc. So another one is made there, and removed."""
    try:
        above = directory.parent
        while not above.exists():
            above = above.parent
        os.rmdir(tempfile.mkdtemp(prefix=".gpumem-tui-", dir=above))
        return full_reason(above)
    except OSError as error:
        return f"{directory} cannot be made: {error.strerror}"
