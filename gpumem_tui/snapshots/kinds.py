"""Recognises files that are no memory snapshot by how they begin, and names the command to type (`kinds.toml`)."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import shlex
import sys
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import BinaryIO

import msgspec

from gpumem_tui.decoding import decodable
from gpumem_tui.text import shortened

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Unpacked = gzip.GzipFile | lzma.LZMAFile | bz2.BZ2File
UNPACKERS: dict[bytes, Callable[[BinaryIO], Unpacked]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"\xfd7zXZ\0": lzma.LZMAFile,
    b"BZh": bz2.BZ2File,
}
"""How packed files begin, and what unpacks them."""
BROKEN = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
"""Raised by these for a file that is damaged or not whole."""
_HEAD_BYTES = 1 << 16
_UTF_16, _UTF_8 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), codecs.BOM_UTF8
"""The marks that text files of Windows begin with; PowerShell writes UTF-16."""
_LONGEST_PATH = 200


class FileKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"command": "type"}):
    """A row of the table; `kinds.toml` explains the fields."""

    name: str
    command: str
    starts: tuple[str, ...] = ()
    pattern: str = ""
    ends: tuple[str, ...] = ()

    def matches(self, head: str, name: str) -> bool:
        """Return whether a file begins so (its bytes as latin-1), and has such a name."""
        return (
            (not self.starts or head.startswith(self.starts))
            and (not self.pattern or bool(re.search(self.pattern, head)))
            and (not self.ends or name.lower().endswith(self.ends))
        )

    @property
    def is_snapshot(self) -> bool:
        """Return whether `look` reads it."""
        return self.command == "`gpumem-tui look {file}`"

    @property
    def may_be_snapshot(self) -> bool:
        """Return whether `look` reads it, or tries to: JSON may have its keys in any order."""
        return self.is_snapshot or self is kinds()["json"]


@cache
def kinds() -> dict[str, FileKind]:
    """Return the table, in the order in which kinds are tried."""
    text = Path(__file__).with_name("kinds.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), decodable(dict[str, FileKind]))


def kind_of(head: bytes, name: str) -> FileKind | None:
    """Return the kind of a file that begins so; None for one that nothing in the table is like."""
    text = head.decode("utf-16", "replace") if head.startswith(_UTF_16) else head.removeprefix(_UTF_8).decode("latin-1")
    return next((kind for kind in kinds().values() if kind.matches(text, name)), None)


def head_of(file: BinaryIO) -> bytes:
    """Return a file's first bytes and, of a longer one, its last; of a packed one the first that it unpacks to."""
    size_bytes = file.seek(0, io.SEEK_END)
    file.seek(0)
    start = file.read(_HEAD_BYTES)
    unpack = unpacker_of(start)
    if unpack is None:
        file.seek(max(len(start), size_bytes - _HEAD_BYTES))
        return start + file.read(_HEAD_BYTES)
    file.seek(0)
    try:
        return unpack(file).read(_HEAD_BYTES)
    except (*BROKEN, OSError):
        return start
    finally:
        file.seek(0)


def unpacker_of(start: bytes) -> Callable[[BinaryIO], Unpacked] | None:
    """Return what unpacks a file that begins so; None for one that is not packed."""
    return next((unpack for magic, unpack in UNPACKERS.items() if start.startswith(magic)), None)


def what_to_type(kind: FileKind, path: Path) -> str:
    """Return what a file is and what to type, in a line, without its name."""
    file, folder = (shlex.quote(shortened(str(one), _LONGEST_PATH)) for one in (path, path.parent))
    return f"is {kind.name}: {kind.command.format(file=file, folder=folder)}"


def folder_words(path: Path) -> str:
    """Return what to type for a folder: `look` at the newest file in it that may be a snapshot."""
    found = [one for one in path.iterdir() if one.name.endswith((".pickle", ".pkl", ".pickle.gz")) and one.is_file()]
    if not found:
        return "is a folder without a .pickle: name the snapshot's file"
    newest = max(found, key=lambda one: one.stat().st_mtime)
    return f"is a folder: `gpumem-tui look {shlex.quote(shortened(str(newest), _LONGEST_PATH))}` opens the newest of it"
