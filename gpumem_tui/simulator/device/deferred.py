"""Values too many to be worked out for every operator, that can be once a program takes a shape or a branch from them.

The operators that make them are kept instead, with copies of the few values at their beginning. So a detector's mask of
every anchor in every known box costs nothing until it is asked how many are in one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gpumem_tui.simulator.device.kinds import is_without_data

MOST_ELEMENTS = 1 << 25
"""Elements of the largest tensor whose making is kept: as float32 128 MiB, on which one operator takes about 0.05 s."""

_MOST_BYTES = 2 << 30
"""Most bytes that are worked out at once."""

_MOST_REFERRED_BYTES = 1 << 29
"""Most bytes of host tensors that are kept for their values."""

_MOST_OPERATORS = 64
"""One after another, as a buffer that every step adds to would otherwise keep all of them."""


class NotDeferrable(Exception):
    """A value that it takes is not known, or there are too many."""


class Worked:
    """The contents that are being worked out at once, each a single time."""

    def __init__(self) -> None:
        self._found: dict[int, torch.UntypedStorage] = {}
        self._bytes = 0

    def out(self, content: Deferred) -> torch.UntypedStorage:
        """Return a content, not to be changed.

        Raises:
            NotDeferrable: it takes more than `_MOST_BYTES`.
        """
        found = self._found.get(id(content))
        if found is None:
            found = self._found[id(content)] = content.compute(self)
            self._bytes += found.nbytes()
            if self._bytes > _MOST_BYTES:
                raise NotDeferrable
        return found


@dataclass(frozen=True, slots=True)
class Deferred:
    """Contents of a storage that are worked out when they are wanted.

    Attributes:
        compute: makes them, in a storage of their own.
        operators: how many have to run for it, one after another.
    """

    compute: Callable[[Worked], torch.UntypedStorage]
    operators: int


Content = Callable[[torch.Tensor], object]
"""Tells what we know about the storage of a tensor on the device."""

Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""Runs an operator on host tensors."""


def deferred_result(content: Content, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> Deferred:
    """Return what an operator's result, `made`, will hold; `run` runs it on host tensors.

    Raises:
        NotDeferrable: see there.
    """
    if not isinstance(made, torch.Tensor) or made.numel() > MOST_ELEMENTS:
        raise NotDeferrable
    shape, stride, dtype = made.shape, made.stride(), made.dtype
    if made.storage_offset() or made.untyped_storage().nbytes() != span_bytes(made):
        raise NotDeferrable
    inputs, operators = _inputs(content, (args, kwargs))

    def compute(worked: Worked) -> torch.UntypedStorage:
        given, named = inputs(worked)
        held = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        return held.copy_(run(given, named)).untyped_storage()

    return Deferred(compute, operators)


def deferred_change(
    content: Content, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any], changed: torch.Tensor
) -> Deferred:
    """Return what the storage of an operator's first argument, `changed`, will hold once it has been changed there.

    Raises:
        NotDeferrable: see there.
    """
    if changed.untyped_storage().nbytes() > MOST_ELEMENTS * changed.element_size():
        raise NotDeferrable
    inputs, operators = _inputs(content, (args[1:], kwargs, [changed]))
    before, view = _of_storage(content, changed)[0], _viewed(changed)

    def compute(worked: Worked) -> torch.UntypedStorage:
        storage: torch.UntypedStorage = before(worked).clone()
        given, named, _ = inputs(worked)
        run((view(storage), *given), named)
        return storage

    return Deferred(compute, operators)


class Referred:
    """Host tensors that were copied to the device and are too large to be copied once more: kept as they are.

    One that the program changes afterwards is no longer known. Together they have `_MOST_REFERRED_BYTES`, as the host
    would give them back otherwise.
    """

    def __init__(self) -> None:
        self._bytes = 0

    def content(self, source: torch.Tensor, made: torch.Tensor) -> Deferred | None:
        """Return what a device tensor, `made`, will hold once `source` is copied to it; None where that is too much."""
        size_bytes = source.nbytes
        if made.numel() > MOST_ELEMENTS or self._bytes + size_bytes > _MOST_REFERRED_BYTES:
            return None
        shape, stride, dtype, version = made.shape, made.stride(), made.dtype, _version(source)

        def compute(_: Worked) -> torch.UntypedStorage:
            if _version(source) != version:
                raise NotDeferrable
            return torch.empty_strided(shape, stride, dtype=dtype, device="cpu").copy_(source).untyped_storage()

        self._bytes += size_bytes
        weakref.finalize(compute, self._release, size_bytes)
        return Deferred(compute, 0)

    def _release(self, size_bytes: int) -> None:
        self._bytes -= size_bytes


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def span_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element to behind the last one."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


_FromStorage = Callable[[Worked], torch.UntypedStorage]


def _inputs(content: Content, values: Any) -> tuple[Callable[[Worked], Any], int]:
    """Return what gives an operator's arguments on the host, and how many operators it takes, with this one."""
    leaves, spec = pytree.tree_flatten(values)
    operators = 0
    givers: dict[int, Callable[[Worked], torch.Tensor]] = {}
    for place, leaf in enumerate(leaves):
        if is_without_data(leaf):
            if leaf.requires_grad or leaf.numel() > MOST_ELEMENTS:
                raise NotDeferrable
            storage, before = _of_storage(content, leaf)
            givers[place] = _giver(storage, _viewed(leaf))
            leaves[place] = None  # else its memory on the device would not be given back
            operators = max(operators, before)
        elif isinstance(leaf, torch.Tensor):
            if leaf.requires_grad or leaf.is_meta or leaf.dim():
                raise NotDeferrable
            leaves[place] = leaf.clone()
    if operators >= _MOST_OPERATORS:
        raise NotDeferrable

    def given(worked: Worked) -> Any:
        found = [givers[place](worked) if place in givers else leaf for place, leaf in enumerate(leaves)]
        return pytree.tree_unflatten(found, spec)

    return given, operators + 1


def _of_storage(content: Content, tensor: torch.Tensor) -> tuple[_FromStorage, int]:
    held = content(tensor)
    if isinstance(held, Deferred):
        return lambda worked: worked.out(held), held.operators
    if not isinstance(held, torch.UntypedStorage):
        raise NotDeferrable
    copied: torch.UntypedStorage = held.clone()
    return lambda _: copied, 0


def _viewed(tensor: torch.Tensor) -> Callable[[torch.UntypedStorage], torch.Tensor]:
    dtype, offset, shape, stride = tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()

    def view(storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, stride)

    return view


def _giver(
    storage: _FromStorage, view: Callable[[torch.UntypedStorage], torch.Tensor]
) -> Callable[[Worked], torch.Tensor]:
    return lambda worked: view(storage(worked))
