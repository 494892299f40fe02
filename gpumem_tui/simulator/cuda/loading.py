"""`torch.load` on the simulated GPU: what the file's tensors hold is kept for the host, and dropped for the device.

Under fake tensors torch would drop the data of every tensor in the file, the program's own data included.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import serialization

from gpumem_tui.simulator.cuda.placing import placing
from gpumem_tui.simulator.device import host

_MAPPED_FROM_BYTES = 16 << 20
"""From here on a file is mapped into memory, so that only what is read of it takes memory."""
_FIRST = 0
"""Priority before that of every device type that torch knows (`torch.serialization.register_package`)."""
_SIMULATED = "_gpumem_tui_device"

Registry = list[tuple[int, Callable[[Any], Any], Callable[[Any, str], Any]]]


class Loading:
    """The rules by which files are loaded while a simulated GPU is presented as CUDA.

    Args:
        device: the simulated one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = threading.local()
        self._mapped: set[str] = set()
        self._map: Any = None
        """Where the program states that what is being loaded goes."""

    def load(self, load: Callable[..., Any], f: Any, *args: Any, **kwargs: Any) -> Any:
        """Do as `torch.load`; large files are mapped, where their format allows."""
        is_named = isinstance(f, (str, os.PathLike))
        if is_named and kwargs.get("mmap") is None and _is_large_zip(f):
            kwargs["mmap"] = True
        if is_named and kwargs.get("mmap"):
            self._mapped.add(os.path.realpath(f))
            host.holds_data(f)
        before = self.is_loading
        self._thread.is_loading = True
        self._map = args[0] if args else kwargs.get("map_location")
        try:
            return load(f, *args, **kwargs)
        finally:
            self._thread.is_loading, self._map = before, None

    @property
    def is_loading(self) -> bool:
        """Return whether this thread is within `load`."""
        return getattr(self._thread, "is_loading", False)

    def make_room(self, f: Any) -> None:
        """Make room for a file that is to be written: tensors that are mapped from it keep their content."""
        if isinstance(f, (str, os.PathLike)) and os.path.realpath(f) in self._mapped:
            self._mapped.discard(os.path.realpath(f))
            os.unlink(f)

    def fake_mode(self, find: Callable[..., Any], *args: Any) -> Any:
        """Answer what `torch.load` asks in order to drop all data."""
        return None if self.is_loading else find(*args)

    def registry(self, known: Registry) -> Registry:
        """Return how storages get to the devices that files name, the simulated one before all others."""
        to = self.to_device
        return [(_FIRST, lambda _: None, lambda kept, at: to(kept) if at.startswith("cuda") else None), *known]

    def rebuild(self, rebuild: Callable[..., torch.Tensor], storage: Any, *layout: Any) -> torch.Tensor:
        """Do as `torch._utils._rebuild_tensor`; a storage goes to the device once for all tensors in it."""
        made = rebuild(storage, *layout)
        untyped = storage._untyped_storage
        marked = getattr(untyped, _SIMULATED, None)
        if marked is None:
            return made
        if marked is True:
            if self._map is None:
                placing.loaded()
            marked = torch.empty(0, dtype=torch.uint8).set_(untyped).to(self._device)
            setattr(untyped, _SIMULATED, marked)
        looked_at: torch.Tensor = marked.view(made.dtype)
        return looked_at.as_strided(made.shape, made.stride(), made.storage_offset())

    def place(self, saved: Literal["cuda", "cpu"]) -> Literal["cuda", "cpu"]:
        """Return where a storage without data goes that was saved there, and is being loaded."""
        told = self._map
        if told is None:
            if self.is_loading and saved == "cuda":
                placing.loaded()
            return saved
        at = "cuda:0" if saved == "cuda" else "cpu"
        if callable(told):
            to = told(torch.UntypedStorage(0), at)
            return saved if to is None else "cuda" if getattr(to, _SIMULATED, False) else "cpu"
        named = told.get(at, at) if isinstance(told, Mapping) else told
        return "cpu" if torch.device(named).type == "cpu" else "cuda"

    def to_device(self, storage: torch.UntypedStorage, *_: object, **__: object) -> torch.UntypedStorage:
        """Do ``storage.cuda()``, as functions do that programs give as ``map_location``."""
        setattr(storage, _SIMULATED, True)
        return storage


def load_script(load: Callable[..., Any], f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Do as `torch.jit.load`, whose C++ knows no simulated device: a network for the GPU is loaded for the host first.

    Without a `map_location` that is one which was saved on a GPU: it cannot be loaded if missing.
    """
    if map_location is not None:
        if torch.device(map_location).type != "cuda":
            return load(f, map_location, *args, **kwargs)
        return load(f, "cpu", *args, **kwargs).to(map_location)
    start = f.tell() if hasattr(f, "tell") else None
    try:
        return load(f, None, *args, **kwargs)
    except RuntimeError:
        if start is not None:
            f.seek(start)
        return load(f, "cpu", *args, **kwargs).to("cuda")


def _is_large_zip(f: str | os.PathLike[str]) -> bool:
    try:
        if os.path.getsize(f) < _MAPPED_FROM_BYTES:
            return False
        with open(f, "rb") as file:
            return bool(serialization._is_zipfile(file))
    except OSError:  # said by `torch.load` itself
        return False
