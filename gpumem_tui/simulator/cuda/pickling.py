"""Pickles of tensors without data: how they look, in which storage, and their values if known.

On the device as on the host, where a large model that is still to be moved has no data either (see `device.host`).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from pkgutil import resolve_name
from typing import Any, Literal

import torch
from torch import nn

from gpumem_tui.simulator.cuda.loading import Loading
from gpumem_tui.simulator.device.base import DEVICE_TYPE, StorageView
from gpumem_tui.simulator.device.gpu import SimulatedGpu, backend
from gpumem_tui.simulator.device.kinds import fake_device_of, is_of_fakes, is_without_data, original_of
from gpumem_tui.simulator.torch_internals import Replacements

Place = Literal["cuda", "cpu"]
_MARK = "_gpumem_tui_pickled"
"""An attribute of storages that are pickled: their `_Storage`, the same one for all tensors in it."""

_loading: Loading | None = None


class _Storage:
    """A storage without data in a pickle, once for all tensors that lie in it.

    Args:
        size_bytes: of the whole storage. `place`: where it is.
    """

    def __init__(self, size_bytes: int, place: Place) -> None:
        self.size_bytes, self.place = size_bytes, place
        self.alive: Callable[[], torch.UntypedStorage | None] = lambda: None
        self._made: torch.Tensor | None = None

    def __reduce__(self) -> tuple[Any, tuple[int, Place]]:
        return _storage, (self.size_bytes, self.place)

    def tensor(self, view: StorageView) -> torch.Tensor:
        """Make a tensor that is so laid out in the storage, which is made for the first one."""
        storage = self.alive()
        if storage is None:
            if self._made is None:
                self._made = self._make()
            storage = self._made.untyped_storage()
        if backend.current is None:
            made = torch.empty(0, dtype=view.dtype)
            made.set_(storage, view.offset, view.shape, view.stride)
            return made
        device = torch.device(DEVICE_TYPE, 0) if self.place == "cuda" else torch.device("cpu")
        return backend.current.mode.results.view_of(storage, view, device)

    def _make(self) -> torch.Tensor:
        if backend.current is None:  # in a process that a program starts; nobody writes it, so that it takes no memory
            return torch.empty(self.size_bytes, dtype=torch.uint8)
        if self.place == "cuda":
            return torch.empty(self.size_bytes, dtype=torch.uint8, device="cuda")
        with torch._C._DisableTorchDispatch():
            return torch.empty(self.size_bytes, dtype=torch.uint8, device="meta")


def follow(replacements: Replacements, gpu: SimulatedGpu, loading: Loading) -> None:
    """Have pickling, which copies and other processes go by too, work on tensors without data as on any other.

    Args:
        loading: knows where what `torch.load` reads is to go.
    """
    global _loading
    _loading = loading
    reduce: Any = torch.Tensor.__reduce_ex__
    reduce_parameter: Any = nn.Parameter.__reduce_ex__
    share: Any = torch.Tensor.share_memory_
    torch.serialization.add_safe_globals([_rebuilt, _storage])

    def reduce_ex(tensor: torch.Tensor, protocol: Any) -> Any:
        place = fake_device_of(tensor)
        if place is None or place.type not in (DEVICE_TYPE, "cpu"):
            return reduce(tensor, protocol)
        return _reduced(gpu, tensor, place, original_of(type(tensor)))

    def reduce_parameter_ex(parameter: nn.Parameter, protocol: Any) -> Any:
        if fake_device_of(parameter) is None:
            return reduce_parameter(parameter, protocol)
        state, data = _state_of(parameter), (parameter.data, parameter.requires_grad, OrderedDict[Any, Any]())
        if not state:
            return torch._utils._rebuild_parameter, data
        return torch._utils._rebuild_parameter_with_state, (*data, state)

    def shared(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if is_without_data(tensor) else share(tensor)

    replacements.set(torch.Tensor, "__reduce_ex__", reduce_ex)
    replacements.set(nn.Parameter, "__reduce_ex__", reduce_parameter_ex)
    replacements.set(torch.Tensor, "share_memory_", shared)
    _follow_processes(replacements, {torch.Tensor: reduce_ex, nn.Parameter: reduce_parameter_ex})
    _follow_types(replacements)


def _follow_processes(replacements: Replacements, reduces: Mapping[type, Callable[[Any, Any], Any]]) -> None:
    """Have tensors without data be sent to other processes by their looks (torch.multiprocessing.reductions)."""
    reducers: dict[type, Callable[[Any], Any]] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    for kind, reduce in reduces.items():
        send = reducers.get(kind)
        if send is None:
            continue

        def sent(tensor: torch.Tensor, send: Callable[[Any], Any] = send, reduce: Any = reduce) -> Any:
            return send(tensor) if fake_device_of(tensor) is None else reduce(tensor, None)

        reducers[kind] = sent
        replacements.callback(reducers.__setitem__, kind, send)


def _follow_types(replacements: Replacements) -> None:
    """Have a class of tensors without data be pickled as the program's which it represents."""
    import copyreg

    kind: Any = type(torch.Tensor)

    def reduce_type(one: type[torch.Tensor]) -> Any:
        shown = original_of(one)
        if shown is one:
            return one.__qualname__
        return resolve_name, (f"{shown.__module__}:{shown.__qualname__}",)

    copyreg.pickle(kind, reduce_type)
    replacements.callback(copyreg.dispatch_table.pop, kind, None)


def _reduced(gpu: SimulatedGpu, tensor: torch.Tensor, device: torch.device, kind: type[torch.Tensor]) -> Any:
    storage = tensor.untyped_storage()
    place: Place = "cuda" if device.type == DEVICE_TYPE else "cpu"
    pickled: _Storage | None = getattr(storage, _MARK, None)
    if pickled is None or pickled.size_bytes != storage.nbytes():
        pickled = _Storage(storage.nbytes(), place)
        pickled.alive = weakref.ref(storage)
        setattr(storage, _MARK, pickled)
    known = gpu.mode.values.of(tensor.detach()) if place == "cuda" else None
    view = StorageView.of(tensor)
    looks = (view.dtype, view.shape, view.stride, view.offset)
    how = _rebuilt, (pickled, known.clone() if known is not None else None, looks, tensor.requires_grad)
    state = _state_of(tensor)
    if kind is torch.Tensor and not state:
        return how
    return torch._tensor._rebuild_from_type_v2, (how[0], kind, how[1], state)


def _state_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that a program has given to a tensor."""
    return {name: value for name, value in vars(tensor).items() if not is_of_fakes(name)}


def _storage(size_bytes: int, place: Place) -> _Storage:
    return _Storage(size_bytes, place if _loading is None else _loading.place(place))


def _rebuilt(storage: _Storage, known: torch.Tensor | None, view: tuple[Any, ...], requires_grad: bool) -> torch.Tensor:
    made = storage.tensor(StorageView(*view))
    if known is not None:
        made.copy_(known)
    return made.requires_grad_(requires_grad)
