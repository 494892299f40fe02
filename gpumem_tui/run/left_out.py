"""Files that stand where checkpoints would, and what reading one of them gives.

Nothing was trained, so no checkpoint is worth a file; but programs ask for its size, rename, copy, link and remove it,
write their own next to it, and load it again.
"""

from __future__ import annotations

import atexit
import functools
import io
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from gpumem_tui.importing import after_import
from gpumem_tui.run.spared import SparedFiles

_TRUSTED = {"weights_only": False}
"""How to read what was pickled here, by any rules of its format that the program loads it."""

_Write = Callable[[object, io.BytesIO], object]


@dataclass(frozen=True)
class _Kept:
    """A file that was left out.

    Attributes:
        pickled: what it would hold, of tensors without data how they look.
        state: of the file that takes its place, or that was there before.
    """

    pickled: bytes
    state: tuple[int, int]


class LeftOutFiles:
    """Files of the size of checkpoints, without data, and gone at the end. One that was there before stays as it was.

    Args:
        write: `torch.save`, as it is without this.
    """

    def __init__(self, write: _Write) -> None:
        self._write = write
        self._paths: dict[str, tuple[int, int]] = {}
        """Files that stand for others, with their states: one that has changed is the program's own."""

        self._kept: dict[str, _Kept] = {}
        self._folders: dict[str, None] = {}
        self._load: Callable[..., Any] = torch.load
        self._spared = SparedFiles()
        self._pid = os.getpid()

    def follow(self) -> None:
        """Follow what the program does to them from now on, and remove what is left when it ends."""
        self._spared.follow()
        for module, name, moves in (
            (os, "rename", True), (os, "replace", True), (os, "link", False), (shutil, "copyfile", False),
        ):  # fmt: skip
            self._wrap(module, name, moves)
        modules: Any = torch
        modules.load = self._reading(torch.load, lambda f, *args, **kwargs: (args, {**kwargs, "mmap": None}))  # noqa: ARG005
        after_import("safetensors.torch", self._follow_safetensors)
        after_import("safetensors", self._follow_opening)
        atexit.register(self._remove)
        exit_at_once = os._exit

        def remove_and_exit(status: int) -> None:
            self._remove()
            exit_at_once(status)

        os._exit = remove_and_exit  # type: ignore[assignment]  # typed as never to return, which it does not

    def put(self, target: Any, held: object) -> None:
        """Put one where a checkpoint of what is held would be written: a path, or a file that is open."""
        path = _path_of(target)
        if path is None or not os.path.isdir(os.path.dirname(path)):
            return
        size_bytes = _size_of(held)
        if not isinstance(target, (str, os.PathLike)):
            if not os.path.isfile(path):  # a device or a pipe
                return
            if set(getattr(target, "mode", "w")) & set("wx"):  # else what is there stays
                target.seek(size_bytes, os.SEEK_CUR)
                target.truncate()
                self._paths[path] = _state_of(path)
        elif self._is_ours(path) or not os.path.exists(path):
            self._make(path, size_bytes)
        file = io.BytesIO()
        with suppress(Exception):  # what cannot be written cannot be read again
            self._write(held, file)
            self._kept[path] = _Kept(file.getvalue(), _state_of(path))

    def leave_folder(self, folder: Any) -> None:
        """Make the folder that a checkpoint would be written into, which programs write their own files into."""
        if not isinstance(folder, (str, os.PathLike)):
            return
        path, missing = os.path.abspath(folder), []
        while path and not os.path.exists(path):
            missing.append(path)
            path = os.path.dirname(path)
        with suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            self._folders.update(dict.fromkeys(missing))

    def new_files(self, folder: str, made_in: str) -> None:
        """Move files from one folder into another, of whose names it has none."""
        for name in os.listdir(made_in):
            path = os.path.abspath(os.path.join(folder, name))
            if os.path.isfile(os.path.join(made_in, name)) and not os.path.exists(path):
                shutil.move(os.path.join(made_in, name), path)
                self._paths[path] = _state_of(path)

    def _is_ours(self, path: str) -> bool:
        return path in self._paths and os.path.exists(path) and _state_of(path) == self._paths[path]

    def _make(self, path: str, size_bytes: int) -> None:
        with open(path, "wb") as file:
            file.truncate(size_bytes)
        self._paths[path] = _state_of(path)

    def _kept_of(self, target: Any) -> bytes | None:
        """Return what a file would hold; None where it holds something else by now."""
        path = _path_of(target)
        kept = None if path is None else self._kept.get(path)
        return kept.pickled if path and kept and os.path.exists(path) and _state_of(path) == kept.state else None

    def _wrap(self, module: Any, name: str, moves: bool) -> None:
        call = getattr(module, name)

        @functools.wraps(call)
        def followed(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(src, (str, os.PathLike)) or os.path.abspath(src) not in self._paths:
                return call(src, dst, *args, **kwargs)
            before, after = os.path.abspath(src), os.path.abspath(dst)
            pickled = self._kept_of(before)
            result: Any = dst if name == "copyfile" else None
            if self._is_ours(after) or not os.path.exists(after):
                if name == "copyfile":
                    self._make(after, os.path.getsize(before))
                else:
                    call(src, dst, *args, **kwargs)
                self._paths[after] = _state_of(after)
            elif moves:
                os.unlink(before)
            if pickled is not None:
                self._kept[after] = _Kept(pickled, _state_of(after))
            if moves:
                self._paths.pop(before, None)
                self._kept.pop(before, None)
            return result

        setattr(module, name, followed)

    def _reading(self, load: Callable[..., Any], how: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that loads a file, or what one would hold that was left out.

        Args:
            how: returns the arguments of `torch.load` after the file, for what `load` is called with.
        """

        @functools.wraps(load)
        def loaded(*args: Any, **kwargs: Any) -> Any:
            pickled = self._kept_of(args[0] if args else kwargs.get("f", kwargs.get("filename")))
            if pickled is None:
                return load(*args, **kwargs)
            positional, named = how(*args, **kwargs)
            return self._load(io.BytesIO(pickled), *positional, **named)

        return loaded

    def _follow_safetensors(self, module: Any) -> None:
        load = module.load_file
        _set(load, self._reading(load, lambda filename, device="cpu", **_: ((_named(device),), _TRUSTED)))  # noqa: ARG005

    def _follow_opening(self, module: Any) -> None:
        opens = module.safe_open

        def opened(filename: Any, framework: str = "pt", device: Any = "cpu", **kwargs: Any) -> Any:
            pickled = self._kept_of(filename)
            if pickled is None:
                return opens(filename, framework, device, **kwargs)
            return _Opened(self._load(io.BytesIO(pickled), map_location=_named(device), **_TRUSTED))

        _set(opens, opened)

    def _remove(self) -> None:
        is_followed = os.getpid() == self._pid
        for path in filter(self._is_ours, self._paths) if is_followed else ():
            with suppress(OSError):
                os.unlink(path)
        self._spared.put_back(self._paths)
        for folder in sorted(self._folders, key=len, reverse=True) if is_followed else ():
            with suppress(OSError):  # it has files of the program
                os.rmdir(folder)


def _set(function: Any, instead: Any) -> None:
    """Put a function of safetensors' in the place of another, in all modules that have imported that by now."""
    for module in list(sys.modules.values()):
        for name in ("safe_open", "load_file", "safe_load_file"):
            if getattr(module, "__dict__", {}).get(name) is function:
                setattr(module, name, instead)


class _Opened:
    """The result of `safetensors.safe_open` gives, of a file that was left out."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.keys = self.offset_keys = lambda: list(tensors)
        self.metadata = lambda: {"format": "pt"}
        self.get_tensor = tensors.__getitem__
        self.get_slice = lambda name: _Slice(tensors[name])

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)


class _Slice:
    """A tensor of such a file that is read in parts."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.get_shape = lambda: list(tensor.shape)
        self.get_dtype = lambda: _TYPES.get(tensor.dtype, "F32")

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]


_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""The names of types in a file of safetensors' (its format's description)."""


def _path_of(target: Any) -> str | None:
    """Return the path of a file, or of one that is open; None of one that is no file."""
    if isinstance(target, io.IOBase):
        target = getattr(target, "name", None)
    return os.path.abspath(target) if isinstance(target, (str, os.PathLike)) else None


class _Sizes(pickle.Pickler):
    """Adds up the bytes of the tensors within an object, going through it as saving does."""

    size_bytes = 0

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return (int, ()) if isinstance(obj, torch.UntypedStorage) else NotImplemented
        self.size_bytes += obj.numel() * obj.element_size()
        return int, ()


def _size_of(held: object) -> int:
    sizes = _Sizes(io.BytesIO(), protocol=5)
    with suppress(Exception):  # what cannot be pickled ends there
        sizes.dump(held)
    return sizes.size_bytes


def _state_of(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, found.st_ino


def _named(device: Any) -> Any:
    return f"cuda:{device}" if isinstance(device, int) else device
