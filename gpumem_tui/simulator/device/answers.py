"""A cache of operators' answers, so that fake tensors need not work out again what thirty equal layers ask alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from gpumem_tui.simulator.device.base import DEVICE_TYPE, StorageView
from gpumem_tui.simulator.device.kinds import is_dense, is_plain

_VALUES = (bool, int, float, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device)
_SEEN_ONLY = (torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""Tags of operators whose answer is not told by what their arguments look like, or that change how these look."""

TO_COPY: Any = torch.ops.aten._to_copy.default
COPY: Any = torch.ops.aten.copy_.default
COPIES = (TO_COPY, COPY)
"""Operators that bring tensors to the device, and back."""

_make_subclass: Any = torch.Tensor._make_subclass
_refuse_address: Any = torch._C._set_throw_on_mutable_data_ptr
_warn_of_address: Any = torch._C._set_warn_deprecated_on_mutable_data_ptr

Key = tuple[Any, ...]

MISS: Any = object()
"""Marks the place of a call's answer, which does not follow from its key, or is not known yet."""


_Answer = int | tuple[int, StorageView]
"""The position of an argument that is returned itself, as in-place operators do; or the result's layout in
the storage of the argument at a position, -1 for a storage of its own."""


class Answers:
    """Remembers what PyTorch's own operators make of tensors on one device of one fake mode.

    Only what follows from shapes, strides, types and plain values is remembered; `key` is None for any other call.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Key, tuple[type, tuple[_Answer, ...]] | None] = {}
        self._attributes: dict[str, Any] = {}
        """The dictionary of a fresh fake tensor of this mode."""

    @cached_property
    def _device(self) -> torch.device:
        """The device, made once its type is registered with torch."""
        return torch.device(DEVICE_TYPE, 0)

    def key(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Key | None:
        """Return the cache key of a call; None where its answer depends on more than what a key holds."""
        parts: list[Any] = [func, torch.is_inference_mode_enabled()]
        if not self._describe(args, parts, from_host=func in COPIES):
            return None
        if kwargs:
            parts.extend(kwargs)
            if not self._describe(kwargs.values(), parts):
                return None
        return tuple(parts)

    def recall(self, key: Key, args: tuple[Any, ...]) -> Any:
        """Return the answer of a call with this key, or `MISS`."""
        known = self._known.get(key)
        if known is None:
            return MISS
        kind, answers = known
        if kind is torch.Tensor:
            return self._make(answers[0], args)
        return None if kind is type(None) else kind([self._make(answer, args) for answer in answers])

    def learn(self, key: Key, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Remember what a call answered, if another one with this key will be answered alike."""
        if key in self._known:
            return
        self._known[key] = None
        if func.namespace != "aten" or any(tag in func.tags for tag in _SEEN_ONLY):
            return
        kind = type(result)
        if is_dense(result):
            kind, results = torch.Tensor, (result,)
        elif kind is list or kind is tuple or result is None:
            results = tuple(result or ())
        else:
            return
        answers = [self._answer(func, args, one) for one in results]
        told = tuple(answer for answer in answers if answer is not None)
        if len(told) == len(answers):
            self._known[key] = (kind, told)

    def _describe(self, values: Iterable[Any], parts: list[Any], *, from_host: bool = False) -> bool:
        """Add what tells `values` apart; False where that is more than how they look, which is all that copies ask."""
        for value in values:
            kind = type(value)
            if is_dense(value):
                if not self._is_plain(value):
                    return False
                parts += (value.dtype, value.shape, value.stride(), value.storage_offset())
            elif kind is list or kind is tuple:
                parts += (kind, len(value))
                if not self._describe(value, parts):
                    return False
            elif from_host and isinstance(value, torch.Tensor) and is_plain(value):
                parts += ("host", value.dtype, value.shape, value.stride())
            elif isinstance(value, _VALUES):
                parts += (kind, value)  # 1, 1.0 and True are equal, but an operator treats them differently
            else:
                return False
        return True

    def _is_plain(self, tensor: FakeTensor) -> bool:
        return (
            tensor.fake_device.type == DEVICE_TYPE
            and tensor.fake_mode is self._mode
            and tensor.constant is None
            and tensor.layout is torch.strided
            and not tensor.is_neg()
            and not tensor.is_complex()
        )

    def _answer(self, func: Any, args: tuple[Any, ...], result: Any) -> _Answer | None:
        for position, given in enumerate(args):
            if given is result:
                return position
        if type(result) is not FakeTensor or not self._is_plain(result) or result.requires_grad:
            return None
        view, storage = StorageView.of(result), result.untyped_storage()
        for position, given in enumerate(args):
            if isinstance(given, torch.Tensor) and _is_in(given, storage):
                return position, view
            if isinstance(given, (list, tuple)) and any(
                _is_in(one, storage) for one in given if isinstance(one, torch.Tensor)
            ):
                return None
        if func.is_view or func._schema.is_mutable or view.offset:
            return None
        return (-1, view) if _elem(view).untyped_storage().nbytes() == storage.nbytes() else None

    def _make(self, answer: _Answer, args: tuple[Any, ...]) -> torch.Tensor:
        if isinstance(answer, int):
            given: torch.Tensor = args[answer]
            return given
        with torch._C.DisableTorchFunction():
            return self._made(*answer, args)

    def _made(self, position: int, view: StorageView, args: tuple[Any, ...]) -> torch.Tensor:
        if position < 0:
            return self.on_device(_elem(view))
        base = args[position]
        # A view is an inference tensor if its base is one, in any mode.
        is_inference = base.is_inference()
        is_mode = is_inference is torch.is_inference_mode_enabled()
        with nullcontext() if is_mode else torch.inference_mode(is_inference):
            elem = _elem(view)
            elem.set_(base.untyped_storage(), view.offset, view.shape, view.stride)
            return self.on_device(elem)

    def on_device(self, elem: torch.Tensor) -> torch.Tensor:
        """Make a tensor on the device of one without data, as `FakeTensor` does, which looks at both each time."""
        if not self._attributes:
            template = FakeTensor(self._mode, elem, self._device)
            self._attributes.update(vars(template))
            return template
        made: torch.Tensor = _make_subclass(
            FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=self._device
        )
        (_warn_of_address if self._mode._allow_unsafe_data_ptr_access else _refuse_address)(made)
        vars(made).update(self._attributes)
        return made


def _is_in(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    return bool(tensor.untyped_storage()._cdata == storage._cdata)


def _elem(view: StorageView) -> torch.Tensor:
    return torch.empty_strided(view.shape, view.stride, dtype=view.dtype, device="meta")
