"""Tensors of other kinds: of a library's class, jagged, sparse, and those of the host that operators take."""

from __future__ import annotations

import copyreg
import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode

from gpumem_tui.simulator.torch_internals import Replacements

_PLAIN = (torch.Tensor, nn.Buffer)


class _FakeParameter(FakeTensor, nn.Parameter, metaclass=type(nn.Parameter)):  # type: ignore[metaclass]
    """A parameter without data, while an operator works on it and only then (see `as_fakes`)."""


_SHOWN = frozenset((torch.Tensor, nn.Parameter))
"""The class of a tensor without data for the program: ``type(x) is torch.Tensor``, which libraries ask, and call to
make another one. Its dispatch keys bring its operators to the mode anyway."""


_OF_FAKES = "fake_mode"
"""An attribute that every fake tensor has, and no other one."""

_DISPATCH = "__torch_dispatch__"
_STATE_OF_FAKES = frozenset(
    ("_fake_device", "fake_device", _OF_FAKES, "constant", "pytype", "dispatch_keys", "real_tensor", _DISPATCH)
)


def is_without_data(tensor: object) -> bool:
    """Return whether a tensor has no data, while an operator works on it or as the program has it."""
    return isinstance(tensor, FakeTensor) or _is_shown(tensor)


def _is_shown(value: Any) -> bool:
    return type(value) in _SHOWN and _OF_FAKES in value.__dict__


def is_of_fakes(name: str) -> bool:
    """Return whether an attribute is one of those that `FakeTensor.__new__` sets."""
    return name in _STATE_OF_FAKES or name.startswith(("_nonzero_memo", "_item_memo", "_unique_", "_nested_int_memo"))


def fake_device_of(tensor: torch.Tensor) -> torch.device | None:
    """Return the device that a tensor without data is on; None for a tensor with data."""
    state = tensor.__dict__
    device: torch.device | None = state.get("_fake_device") or state.get("fake_device")
    return device


def shown_among(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors without data among an operator's arguments that are not fake tensors, as the program has them.

    Kernels of a GPU call no method of a program's class; torch's shape functions would, as `new_empty`, which MONAI's
    tensors have.
    """
    found: list[torch.Tensor] = []
    for value in values:
        kind = type(value)
        if kind is list or kind is tuple:
            found += shown_among(value)
        elif kind in _SHOWN:
            if _OF_FAKES in value.__dict__:
                found.append(value)
        elif issubclass(kind, _Asked):
            found.append(value)
    return found


def as_fakes(tensors: Sequence[torch.Tensor]) -> list[type[torch.Tensor]]:
    """Have tensors without data be fake tensors, to torch's shape functions and to ours; return what they were."""
    kinds = list(map(type, tensors))
    for tensor, kind in zip(tensors, kinds, strict=True):
        tensor.__class__ = _FakeParameter if kind is nn.Parameter else FakeTensor
    return kinds


def as_before(tensors: Sequence[torch.Tensor], kinds: Sequence[type[torch.Tensor]]) -> None:
    """Have tensors be again what they were before `as_fakes`."""
    for tensor, kind in zip(tensors, kinds, strict=True):
        tensor.__class__ = kind


def show(result: Any) -> Any:
    """Return what an operator gives, with its tensors as the program is to have them; those of its own modes stay."""
    kind = type(result)
    if kind is FakeTensor:
        dispatch = getattr(result.fake_mode, "dispatched", None)
        if dispatch is not None:
            result.__dict__[_DISPATCH] = dispatch
            if _tracked is not None:
                _keep_track(result)
            if _as_fakes_now is None:
                result.__class__ = torch.Tensor
    elif isinstance(result, (list, tuple)):  # torch's own functions give named ones
        for one in result:
            show(one)
    return result


_Tracked = weakref.WeakValueDictionary[int, torch.Tensor]
_tracked: _Tracked | None = None
"""The living tensors without data, by their identity, from the first compiled code on."""

_as_fakes_now: dict[int, type[torch.Tensor]] | None = None
"""Within `all_as_fakes`, what tensors are to the program, by their identity."""


@contextmanager
def all_as_fakes() -> Iterator[None]:
    """Have every tensor without data be a fake tensor within the context: Dynamo knows tensors by these classes.

    This includes objects made within it, as FSDP2 makes a block's whole parameters before it is first called.
    """
    global _as_fakes_now, _tracked
    if _as_fakes_now is not None:
        yield
        return
    if _tracked is None:
        _tracked = weakref.WeakValueDictionary((id(one), one) for one in gc.get_objects() if _is_shown(one))
    _as_fakes_now = {}
    for one in list(_tracked.values()):
        _keep_track(one)
    try:
        yield
    finally:
        shown, _as_fakes_now = _as_fakes_now, None
        for one in list(_tracked.values()):
            if type(one) is FakeTensor:
                one.__class__ = shown.get(id(one), torch.Tensor)  # type: ignore[assignment]


def _keep_track(tensor: torch.Tensor) -> None:
    if _tracked is None or not (_is_shown(tensor) or type(tensor) is FakeTensor):
        return
    _tracked[id(tensor)] = tensor
    if _as_fakes_now is not None:
        if type(tensor) is nn.Parameter:
            _as_fakes_now[id(tensor)] = nn.Parameter
        else:
            _as_fakes_now.pop(id(tensor), None)  # of one that is gone
        tensor.__class__ = FakeTensor


class _Asked:
    """Has a class of a program's asked about torch's functions as ever, which fake tensors never are."""

    @classmethod
    def __torch_function__(cls, *args: Any) -> Any:
        return torch.Tensor.__torch_function__.__func__(cls, *args)  # type: ignore[attr-defined]


def is_dense(value: Any) -> bool:
    """Return whether a value is a tensor without data, of torch's own class."""
    kind = type(value)
    return kind is FakeTensor or kind is _FakeParameter or (kind is torch.Tensor and _OF_FAKES in value.__dict__)


@functools.cache
def without_data(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    """Return the class of tensors without data that are instances of `kind` too, as quantized parameters are."""
    if issubclass(kind, FakeTensor) or kind is nn.Parameter:
        return kind
    if kind in _PLAIN:
        return torch.Tensor
    metaclass: Any = type(kind)
    told = {"__module__": kind.__module__, "__dict__": property(_ATTRIBUTES.__get__, _set_attributes)}
    made: type[torch.Tensor] = metaclass(kind.__name__, (kind, _Asked, FakeTensor), told)
    return made


def original_of(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    """Return the class that one of tensors without data represents."""
    if not issubclass(kind, FakeTensor):
        return kind
    shown: Any = next(one for one in kind.__mro__[1:] if not issubclass(one, FakeTensor | _Asked))
    found: type[torch.Tensor] = shown
    return found


_ATTRIBUTES: Any = torch.Tensor.__dict__["__dict__"]


def _set_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    """Give a tensor all attributes of another one, as MONAI copies an image's metadata; it stays without data."""
    own = {name: value for name, value in _ATTRIBUTES.__get__(tensor).items() if is_of_fakes(name)}
    theirs = {name: value for name, value in attributes.items() if not is_of_fakes(name)}
    _ATTRIBUTES.__set__(tensor, theirs | own)


def make_subclass(make: Callable[..., Any], kind: type[torch.Tensor], data: Any, *args: Any, **kwargs: Any) -> Any:
    """Do as `torch.Tensor._make_subclass`, which refuses fake tensors."""
    if not is_without_data(data):
        return make(kind, data, *args, **kwargs)
    requires_grad = args[0] if args else kwargs.get("require_grad", False)
    made: Any = data.detach().requires_grad_(requires_grad)
    made.__class__ = without_data(kind)
    made._is_param = issubclass(kind, nn.Parameter)
    _keep_track(made)
    return made


_as_subclass: Any = torch.Tensor.as_subclass


def as_subclass(tensor: torch.Tensor, kind: type[torch.Tensor]) -> Any:
    """Do as `torch.Tensor.as_subclass`, by which torchvision and fastai make images, and which refuses fake tensors."""
    if not is_without_data(tensor):
        return _as_subclass(tensor, kind.__mro__[1] if issubclass(kind, FakeTensor) else kind)
    with torch._C.DisableTorchFunctionSubclass():
        made = torch.ops.aten.alias(tensor)
    made.__class__ = without_data(kind)
    _keep_track(made)
    return made


def follow_classes(replacements: Replacements) -> None:
    """Have torch's functions that go by a tensor's class take those without data."""
    to_list: Any = torch.Tensor.tolist
    to_list_of_fake: Any = FakeTensor.tolist

    def listed(tensor: torch.Tensor) -> Any:
        device = fake_device_of(tensor)
        if device is None:
            return to_list(tensor)
        return to_list_of_fake(tensor) if device.type == "cpu" else tensor.detach().cpu().tolist()

    replacements.set(torch.Tensor, "tolist", listed)
    replacements.set(FakeTensor, "tolist", listed)
    make: Any = torch.Tensor._make_subclass
    replacements.set(torch.Tensor, "_make_subclass", staticmethod(functools.partial(make_subclass, make)))
    replacements.set(torch.Tensor, "as_subclass", as_subclass)
    replacements.set(nn.Parameter, "__new__", staticmethod(functools.partial(make_parameter, nn.Parameter.__new__)))


def plain(value: Any) -> Any:
    """Return a tensor of the host as `torch.Tensor` where it is of a program's class, which no shape function knows."""
    if not isinstance(value, torch.Tensor) or type(value) in _SHOWN or isinstance(value, FakeTensor):
        return value
    return _as_subclass(value, torch.Tensor)


def make_parameter(
    make: Callable[..., Any], kind: type[nn.Parameter], data: Any = None, requires_grad: bool = True, **_: Any
) -> Any:
    """Do as `nn.Parameter.__new__`, which leaves a fake tensor of the class that it has.

    Programs give all attributes of another one with it, as `accelerate.init_empty_weights` does, among them those of
    fake tensors.
    """
    if is_without_data(data):
        return make_subclass(torch.Tensor._make_subclass, kind, data, requires_grad)
    return make(kind, data, requires_grad)


def become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Give a tensor another one's content while it stays the same object, of its class and with its attributes.

    As `torch.utils.swap_tensors` does, for tensors that others refer to as well.
    """
    made: Any = other.detach().requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        made._is_param = True
    if is_without_data(made) or type(tensor) is nn.Parameter:
        made.__class__ = without_data(type(tensor))
    known = vars(made)
    kept = {name: value for name, value in vars(tensor).items() if name not in known and not is_of_fakes(name)}
    known.update(kept)
    tensor.grad = None
    tensor.__class__, made.__class__ = made.__class__, tensor.__class__
    mine, theirs = map(_ATTRIBUTES.__get__, (tensor, made))  # whole: what `_set_attributes` keeps goes over too
    _ATTRIBUTES.__set__(tensor, theirs)
    _ATTRIBUTES.__set__(made, mine)
    for slot in set(copyreg._slotnames(type(tensor))):  # type: ignore[attr-defined]  # as DTensor has
        here, there = getattr(tensor, slot), getattr(made, slot)
        setattr(tensor, slot, there)
        setattr(made, slot, here)
    torch._C._swap_tensor_impl(tensor, made)
    _keep_track(tensor)


def known_length(tensor: torch.Tensor) -> torch.SymInt | None:
    """Return the length of a jagged tensor's offsets, which torch asks for as it copies them; a table has it."""
    from torch.nested._internal import nested_tensor

    found: torch.SymInt | None = nested_tensor._tensor_symint_registry.get(tensor)
    return found


def nested_length() -> torch.SymInt:
    """Make a length of rows that differ, equal to no other (`get_tensor_symint` of torch.nested._internal)."""
    from torch.nested._internal import nested_tensor
    from torch.nested._internal.nested_int import NestedIntNode

    number = nested_tensor._tensor_id_counter
    nested_tensor._tensor_id_counter += 1
    return torch.SymInt(NestedIntNode(number, 1))


_aten: Any = torch.ops.aten
MAKES_SPARSE: Any = _aten._sparse_coo_tensor_with_dims_and_tensors.default


def is_sparse(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operator makes a sparse tensor, or is given one."""
    return func is MAKES_SPARSE or any(
        isinstance(one, torch.Tensor) and one.layout is not torch.strided for one in args
    )


class HostConverter(FakeTensorConverter):
    """Converts plain tensors of the host at once.

    Torch's own way serves tracers too, loads the compiler, and takes a hundred times as long.
    """

    def from_real_tensor(
        self, fake_mode: FakeTensorMode, t: torch.Tensor, make_constant: bool = False, *args: Any, **kwargs: Any
    ) -> FakeTensor:
        """Return `t` without its data."""
        if make_constant or args or not is_plain(t):
            return super().from_real_tensor(fake_mode, t, make_constant, *args, **kwargs)
        with torch._C._DisableTorchDispatch():
            elem = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
            return FakeTensor(fake_mode, elem, t.device)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether all that operators below autograd ask of a host tensor is its shape, strides, type and values."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_neg() or tensor.is_complex())
    )
