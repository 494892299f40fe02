"""Tensors of other kinds: of a library's class, jagged, sparse, and those of the host that operators take."""

from __future__ import annotations

import copyreg
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode

_PLAIN = (torch.Tensor, nn.Buffer)


class _FakeParameter(FakeTensor, nn.Parameter, metaclass=type(nn.Parameter)):  # type: ignore[metaclass]
    """A parameter without data, while an operator works on it and only then.

    To the program it is an `nn.Parameter` and nothing else: ``type(p) is nn.Parameter``, which libraries ask, and call
    to make another one. Its dispatch keys bring its operators to the mode anyway.
    """


_OF_FAKES = "fake_mode"
"""An attribute that every fake tensor has, and no other one."""

_STATE_OF_FAKES = frozenset(
    ("_fake_device", "fake_device", _OF_FAKES, "constant", "pytype", "dispatch_keys", "real_tensor")
)


def is_without_data(tensor: object) -> bool:
    """Return whether a tensor has no data, a parameter that a program holds included."""
    return isinstance(tensor, FakeTensor) or (type(tensor) is nn.Parameter and _OF_FAKES in tensor.__dict__)


def is_of_fakes(name: str) -> bool:
    """Return whether an attribute is one of those that `FakeTensor.__new__` sets."""
    return name in _STATE_OF_FAKES or name.startswith(("_nonzero_memo", "_item_memo", "_unique_", "_nested_int_memo"))


def fake_device_of(tensor: torch.Tensor) -> torch.device | None:
    """Return the device that a tensor without data is on; None for a tensor with data."""
    state = tensor.__dict__
    device: torch.device | None = state.get("_fake_device") or state.get("fake_device")
    return device


def parameters_among(values: Iterable[Any]) -> list[nn.Parameter]:
    """Return the parameters without data among an operator's arguments, which are not yet fake tensors."""
    found = []
    for value in values:
        kind = type(value)
        if kind is nn.Parameter:
            if _OF_FAKES in value.__dict__:
                found.append(value)
        elif kind is list or kind is tuple:
            found += [one for one in value if type(one) is nn.Parameter and _OF_FAKES in one.__dict__]
    return found


def of_classes_among(types: Iterable[type], values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors without data of a program's classes among an operator's arguments.

    Kernels of a GPU call no method of these; torch's shape functions would, as `new_empty`, which MONAI's tensors have.

    Args:
        types: the classes that torch found among the arguments, which say at once if missing.
    """
    if not any(issubclass(kind, _Asked) for kind in types):
        return []
    listed: list[Any] = [one for value in values for one in (value if type(value) in (list, tuple) else (value,))]
    found: dict[int, torch.Tensor] = {id(one): one for one in listed if issubclass(type(one), _Asked)}
    return list(found.values())


@contextmanager
def as_fakes(tensors: Sequence[torch.Tensor], kind: type[FakeTensor] = _FakeParameter) -> Iterator[None]:
    """Have parameters without data be fake tensors within the context, to torch's shape functions and to ours.

    Tensors of a program's classes are plain ones within it. Parameters may be added to the list within it.
    """
    before = {id(tensor): type(tensor) for tensor in tensors}
    for tensor in tensors:
        tensor.__class__ = kind if type(tensor) is nn.Parameter else FakeTensor
    try:
        yield
    finally:
        for tensor in tensors:
            tensor.__class__ = before.get(id(tensor), nn.Parameter)


_live: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
"""The parameters without data that there are, by their identity."""


_as_fakes_now: list[nn.Parameter] | None = None


@contextmanager
def all_as_fakes() -> Iterator[None]:
    """Have every parameter without data be a fake tensor within the context: Dynamo knows tensors by these classes.

    This includes objects made within it, as FSDP2 makes a block's whole parameters before it is first called.
    """
    global _as_fakes_now
    before, _as_fakes_now = _as_fakes_now, parameters_among(list(_live.values()))
    try:
        with as_fakes(_as_fakes_now, FakeTensor):
            yield
    finally:
        _as_fakes_now = before


def _keep_track(parameter: nn.Parameter) -> None:
    _live[id(parameter)] = parameter
    if _as_fakes_now is not None:
        parameter.__class__ = FakeTensor  # type: ignore[assignment]
        _as_fakes_now.append(parameter)


class _Asked:
    """Has a class of a program's asked about torch's functions as ever, which fake tensors never are."""

    @classmethod
    def __torch_function__(cls, *args: Any) -> Any:
        return torch.Tensor.__torch_function__.__func__(cls, *args)  # type: ignore[attr-defined]


def is_dense(kind: type) -> bool:
    """Return whether instances of a class are fake tensors or parameters of which there is no more to know."""
    return kind is FakeTensor or kind is _FakeParameter


@functools.cache
def without_data(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    """Return the class of tensors without data that are instances of `kind` too, as quantized parameters are."""
    if issubclass(kind, FakeTensor) or kind is nn.Parameter:
        return kind
    if kind in _PLAIN:
        return FakeTensor
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
    if kind is nn.Parameter:
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
    return made


def plain(value: Any) -> Any:
    """Return a tensor of the host as `torch.Tensor` where it is of a program's class, which no shape function knows."""
    if not isinstance(value, torch.Tensor) or type(value) in (*_PLAIN, nn.Parameter) or isinstance(value, FakeTensor):
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
    if isinstance(made, FakeTensor) or type(tensor) is nn.Parameter:
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
    if type(tensor) is nn.Parameter:
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
