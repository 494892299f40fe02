"""Tensors without data that are also of a class of a library's own, as quantized parameters are."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


@functools.cache
def without_data(kind: type[torch.Tensor]) -> type[FakeTensor]:
    """The class of fake tensors that are instances of `kind` too."""
    if issubclass(kind, FakeTensor):
        return kind
    if kind in _PLAIN:
        return FakeTensor
    metaclass: Any = type(kind)
    made: type[FakeTensor] = metaclass(kind.__name__, (kind, FakeTensor), {"__module__": kind.__module__})
    return made


def make_subclass(make: Callable[..., Any], kind: type[torch.Tensor], data: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.Tensor._make_subclass`, which refuses fake tensors."""
    if not isinstance(data, FakeTensor):
        return make(kind, data, *args, **kwargs)
    requires_grad = args[0] if args else kwargs.get("require_grad", False)
    made: Any = data.detach().requires_grad_(requires_grad)
    made.__class__ = without_data(kind)
    made._is_param = issubclass(kind, nn.Parameter)
    return made


def become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Give a tensor another one's content while it stays the same object, of its class and with its attributes.

    As `torch.utils.swap_tensors` does, for tensors that others refer to as well.
    """
    made: Any = other.detach().requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        made._is_param = True
    if isinstance(made, FakeTensor):
        made.__class__ = without_data(type(tensor))
    made.__dict__.update({name: value for name, value in vars(tensor).items() if name not in vars(made)})
    tensor.grad = None
    tensor.__class__, made.__class__ = made.__class__, tensor.__class__
    tensor.__dict__, made.__dict__ = made.__dict__, tensor.__dict__
    for slot in set(copyreg._slotnames(type(tensor))):  # type: ignore[attr-defined]  # as DTensor has
        here, there = getattr(tensor, slot), getattr(made, slot)
        setattr(tensor, slot, there)
        setattr(made, slot, here)
    torch._C._swap_tensor_impl(tensor, made)


def known_length(tensor: torch.Tensor) -> torch.SymInt | None:
    """What torch asks of a jagged tensor's offsets as it copies them to a device; on the host a table has it."""
    from torch.nested._internal import nested_tensor

    found: torch.SymInt | None = nested_tensor._tensor_symint_registry.get(tensor)
    return found


def nested_length() -> torch.SymInt:
    """A new length of rows that differ, equal to no other (`get_tensor_symint` of torch.nested._internal)."""
    from torch.nested._internal import nested_tensor
    from torch.nested._internal.nested_int import NestedIntNode

    number = nested_tensor._tensor_id_counter
    nested_tensor._tensor_id_counter += 1
    return torch.SymInt(NestedIntNode(number, 1))
