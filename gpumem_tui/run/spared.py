"""Keeps the checkpoints that were there before a run from the followed program.

Nothing was trained, so nothing that the program writes is worth one of them: a script that empties `best.pt` to write
it anew, removes it first, or renames another file over it would end without it. Each is set aside before that, by
renaming, and is back where it was when the program ends, unless the program has written a file of its own there.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Container
from contextlib import suppress
from stat import S_ISREG
from typing import Any

_BEGINNINGS = (b"PK\x03\x04", *(b"\x80" + bytes((version,)) for version in range(2, 6)))
"""How files of `torch.save` begin: a zip archive, and a pickle in its older format."""

_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".tar", ".pkl")
_CLOCK_S = 0.02
"""By how much a file's time may be behind the clock's (the kernel takes it from its last tick)."""


class SparedFiles:
    """Checkpoints that were there before the run, and where those are that the program would have destroyed."""

    def __init__(self) -> None:
        self._began_s = time.time() - _CLOCK_S
        self._forget()
        os.register_at_fork(after_in_child=self._forget)  # each process puts back what it has set aside

    def _forget(self) -> None:
        self._aside: dict[str, str] = {}
        self._moved: list[tuple[str, str, int]] = []
        self._folders: list[str] = []

    def follow(self) -> None:
        """Follow from now on what would destroy them: opening to write, removing, renaming another file over one."""
        opens = builtins.open

        @functools.wraps(opens)
        def opened(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(mode, str) and "w" in mode and isinstance(file, (str, os.PathLike)):
                self.set_aside(os.path.realpath(file))
            return opens(file, mode, *args, **kwargs)

        builtins.open = io.open = opened
        for name in ("remove", "unlink"):
            setattr(os, name, self._removing(getattr(os, name)))
        for name in ("rename", "replace"):
            setattr(os, name, self._renaming(getattr(os, name)))
        remove_tree: Any = shutil.rmtree

        @functools.wraps(remove_tree)
        def removed(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, (str, os.PathLike)) and not os.path.islink(path):
                for folder, _, names in os.walk(os.fspath(path)):
                    for name in names:
                        self.set_aside(os.path.join(folder, name), around=path)
            return remove_tree(path, *args, **kwargs)

        modules: Any = shutil
        modules.rmtree = removed

    def set_aside(self, file: Any, around: Any = None) -> bool:
        """Move a checkpoint that was there before away; return whether it was one.

        Args:
            around: a folder around it that is removed whole.
        """
        path = os.path.abspath(file)
        if path in self._aside or not self._is_from_before(path):
            return False
        with suppress(OSError):
            folder = tempfile.mkdtemp(prefix=".gpumem-tui-", dir=os.path.dirname(os.path.abspath(around or path)))
            self._folders.append(folder)
            aside = os.path.join(folder, os.path.basename(path))
            os.rename(path, aside)
            self._aside[path] = aside
            return True
        return False

    def put_back(self, left_out: Container[str]) -> None:
        """Put all of them back, at the end of the program.

        Args:
            left_out: paths where the program would have written a checkpoint.
        """
        for before, after, number in reversed(self._moved):
            with suppress(OSError):
                if not os.path.exists(before) and os.stat(after).st_ino == number:
                    os.rename(after, before)
        for path, aside in self._aside.items():
            with suppress(OSError):
                if path in left_out or not os.path.exists(path) or not os.path.getsize(path):
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    os.replace(aside, path)
                else:
                    os.unlink(aside)
        for folder in self._folders:
            with suppress(OSError):
                os.rmdir(folder)
        self._forget()

    def _is_from_before(self, path: str) -> bool:
        with suppress(OSError):
            found = os.lstat(path)
            if not S_ISREG(found.st_mode) or not found.st_size:
                return False
            if max(found.st_mtime, found.st_ctime) >= self._began_s:
                return False
            with io.FileIO(path) as file:
                return path.endswith(_SUFFIXES) or file.read(4).startswith(_BEGINNINGS)
        return False

    def _removing(self, remove: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(remove)
        def removed(path: Any, **kwargs: Any) -> None:
            if kwargs.get("dir_fd") is not None or not self.set_aside(path):
                remove(path, **kwargs)

        return removed

    def _renaming(self, rename: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(rename)
        def renamed(src: Any, dst: Any, **kwargs: Any) -> None:
            if kwargs:
                rename(src, dst, **kwargs)
                return
            before, after = os.path.abspath(src), os.path.abspath(dst)
            if before != after and os.path.exists(before):
                self.set_aside(after)
                if self._is_from_before(before):
                    self._moved.append((before, after, os.stat(before).st_ino))
            rename(src, dst)

        return renamed
