"""The inputs of a model's call: its arguments, and the caches and counters that it or its modules may change."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from gpumem_tui.simulator.device.kinds import is_dense
from gpumem_tui.simulator.device.memory import DeviceMemory

_MOST_NUMBERS = 20_000

PLAIN = (bool, float, str, bytes, type(None), complex, torch.dtype, torch.device, torch.Size, enum.Enum, range)
_NOT_LOOKED_INTO = (nn.Module, type, FunctionType, MethodType, BuiltinFunctionType, torch.Generator)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a tensor or a whole number that a call finds; `container` is None where it cannot be changed."""

    container: Any
    key: Any
    allocation: int | None
    numbers: tuple[int, int]
    is_number: bool


class FoundByCall:
    """The inputs of a call: its arguments, and the state in them and in its modules that it may change.

    Attributes:
        structure: all that must be equal for calls to be alike. `numbers`: sizes and whole numbers, which may grow.
        slots: where the tensors and whole numbers are.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._met: dict[int, int] = {}
        self.structure: list[Any] = []
        self.numbers: list[int] = []
        self.slots: list[Slot] = []

    def take(self, value: Any, container: Any = None, key: Any = None) -> bool:
        """Add a value; False where it holds something of which we know nothing."""
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self._take_tensor(value, container, key)
        if kind is int:
            self.structure.append(int)
            self._add((value,), None, container, key, is_number=True)
            return len(self.numbers) < _MOST_NUMBERS
        if isinstance(value, PLAIN):
            self.structure.append(value)
            return True
        if isinstance(value, (list, tuple)):
            self.structure += (kind, len(value))
            row = value if isinstance(value, list) else None
            return all(self.take(one, row, position) for position, one in enumerate(value))
        if isinstance(value, Mapping):
            self.structure += (kind, len(value), *value)
            changed = value if isinstance(value, dict) else None
            return all(self.take(one, changed, name) for name, one in value.items())
        if isinstance(value, _NOT_LOOKED_INTO):
            self.structure.append(id(value))
            return True
        return self._take_object(value)

    def take_state(self, module: nn.Module) -> bool:
        """Add the tensors and whole numbers that modules keep next to their parameters."""
        for one in module.modules():
            fields = vars(one)
            for name, value in fields.items():
                is_state = type(value) is int or isinstance(value, torch.Tensor) or _holds_tensors(value)
                if name not in _OF_EVERY_MODULE and is_state and not self.take(value, fields, name):
                    return False
            buffers = fields["_buffers"]
            if not all(self.take(value, buffers, name) for name, value in buffers.items()):
                return False
        return True

    def _take_tensor(self, tensor: torch.Tensor, container: Any, key: Any) -> bool:
        if tensor.layout is not torch.strided:
            return False
        allocation = self._memory.allocation_of(tensor) if is_dense(tensor) else None
        shape = tensor.shape
        self.structure += (torch.Tensor, tensor.dtype, len(shape), allocation is None)
        self._add((*shape, *tensor.stride()), allocation, container, key)
        return True

    def _take_object(self, value: Any) -> bool:
        fields = getattr(value, "__dict__", None)
        if not isinstance(fields, dict):
            return False
        if id(value) in self._met:
            self.structure.append(("met", self._met[id(value)]))
            return True
        self._met[id(value)] = len(self._met)
        self.structure += (type(value), len(fields), *fields)
        return all(self.take(one, fields, name) for name, one in fields.items())

    def _add(
        self, numbers: tuple[int, ...], allocation: int | None, container: Any, key: Any, *, is_number: bool = False
    ) -> None:
        start = len(self.numbers)
        self.numbers += numbers
        self.slots.append(Slot(container, key, allocation, (start, len(self.numbers)), is_number))


def _holds_tensors(value: Any, depth: int = 2) -> bool:
    """Return whether a list, a tuple or a dictionary begins with a tensor, perhaps one within such a one."""
    if not depth or not isinstance(value, (list, tuple, dict)) or not value:
        return False
    first = next(iter(value.values() if isinstance(value, dict) else value))
    return isinstance(first, torch.Tensor) or _holds_tensors(first, depth - 1)
