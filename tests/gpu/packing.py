"""A session's folder made small: a few zip files, none too large to attach to an issue."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PART_BYTES = 15_000_000
MOST_PARTS = 4
_STORED = (".gz", ".zip")


def pack(work: Path, folder: Path) -> list[str]:
    """Move the files of `work` into session-1.zip, session-2.zip, … of `folder`, with those that are in there already.

    Returns:
        The names that found no room in four parts of 15 MB; they stay in `work`.

    Raises:
        OSError: there is no room on the disk: `work` and the parts are then as they were.
    """
    old = sorted(folder.glob("session-*.zip"))
    made: list[Path] = []
    packed: list[Path] = []
    left: list[str] = []
    try:
        for path, name, body in _files(old, work):
            compressed = zipfile.ZIP_STORED if name.endswith(_STORED) else zipfile.ZIP_DEFLATED
            if not made or made[-1].stat().st_size + len(body) + 1000 > PART_BYTES:
                if len(made) == MOST_PARTS or len(body) > PART_BYTES - 1000:
                    left.append(name)
                    continue
                made.append(folder / f"session-{len(made) + 1}.new")
            with zipfile.ZipFile(made[-1], "a", compressed) as part:
                part.writestr(name, body)
            packed.extend([path] if path else [])
    except OSError:
        for path in made:
            path.unlink(missing_ok=True)
        raise
    for path in made:
        path.replace(path.with_suffix(".zip"))
    for path in old[len(made) :]:
        path.unlink()
    for path in packed:
        path.unlink()
    with suppress(OSError):  # something found no room, or was written by a process that is just ending
        work.rmdir()
    return left


def _files(parts: list[Path], work: Path) -> Iterator[tuple[Path | None, str, bytes]]:
    """Yield every file: where it is outside of a part, its name and what is in it; of one name the newest."""
    loose = {path.name: path for path in sorted(work.iterdir()) if path.is_file()} if work.is_dir() else {}
    for part in parts:
        with zipfile.ZipFile(part) as file:
            for name in file.namelist():
                if name not in loose:
                    yield None, name, file.read(name)
    for name, path in loose.items():
        yield path, name, path.read_bytes()
