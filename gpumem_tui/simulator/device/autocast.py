"""CUDA's autocast on the simulated device: the same cast lists, the same weight cache.

The ops that CUDA's autocast touches are read from the installed torch's own registrations, so the lists follow its
version; only their grouping is written here (aten/src/ATen/autocast_mode.h, AT_FORALL_*).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch._C import DispatchKeySet
from torch._ops import HigherOrderOperator

from gpumem_tui.causes import Cause
from gpumem_tui.simulator.device.base import DeviceParts, library
from gpumem_tui.simulator.device.memory import DeviceMemory
from gpumem_tui.simulator.torch_internals import original, replace
from gpumem_tui.step import CASTS
from gpumem_tui.step.phases import in_backward

_LOWER_PRECISION = {
    "_convolution", "_convolution.deprecated", "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell", "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv1d", "conv2d",
    "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution",
    "cudnn_convolution", "cudnn_convolution_transpose", "einsum", "gru_cell", "linalg_multi_dot", "linalg_vecdot",
    "linear", "lstm_cell", "matmul", "mm", "mv", "prelu", "rnn_relu_cell", "rnn_tanh_cell",
    "scaled_dot_product_attention",
}  # fmt: skip
_WIDEST_TYPE = {
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add", "tensordot",
    "vdot",
}  # fmt: skip
_FP32_RESULT = {
    "cumprod", "cumsum", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "linalg_vector_norm", "log_softmax.int",
    "prod", "prod.dim_int", "softmax.int", "sum", "sum.dim_IntList",
}  # fmt: skip
_OWN_RULES = {"_cudnn_rnn", "binary_cross_entropy", "norm.Scalar", "norm.ScalarOpt_dim"}

_HALF = (torch.float16, torch.bfloat16)
_weight_cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

left_alone: set[str] = set()
"""Operators that autocast did not touch in the torch that is followed, though the installed one's does."""


class CacheObserver(Protocol):
    """Called when the cached casts are dropped."""

    def clearing(self) -> None:
        """Note that they are about to be dropped."""

    def cleared(self) -> None:
        """Note that they are dropped."""


_running_in_fp32: list[str] = []

observers: list[CacheObserver] = []
copied: list[Callable[[torch.Tensor, torch.Tensor], None]] = []
"""Called with a tensor and the copy that a cast has made of it."""


def state() -> tuple[bool, torch.dtype, int]:
    """Return what decides how autocast treats an operator: whether it is on, its type, how many casts are cached."""
    kind = torch._C._get_privateuse1_backend_name()
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), len(_weight_cache)


def is_in_fp32() -> bool:
    """Return whether an operator runs that autocast runs in fp32, or gives an fp32 result of, by its own rules."""
    return bool(_running_in_fp32)


def register(device_type: str) -> None:
    """Give the PrivateUse1 device CUDA's autocast behaviour. Call once per process."""
    fallthrough = library("_")
    fallthrough.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = library("aten")
    for qualified in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
        namespace, _, name = qualified.partition("::")
        if namespace == "aten" and name not in _OWN_RULES:
            aten.impl(name, _kernel(name, device_type), "AutocastPrivateUse1")
    _follow_higher_order()
    _clear_with_autocast()


def _follow_higher_order() -> None:
    """Treat operators that call others, as flex_attention, as on CUDA: by its kernel for autocast, or as they are."""
    dispatch = original(HigherOrderOperator, "dispatch")
    key = torch._C._dispatch_key_parse("AutocastPrivateUse1")
    cuda, without_autocast = torch._C._dispatch_key_parse("AutocastCUDA"), DispatchKeySet(key)

    def dispatched(operator: Any, dispatch_key: Any, *args: Any, **kwargs: Any) -> Any:
        if dispatch_key != key:
            return dispatch(operator, dispatch_key, *args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(without_autocast):
            return operator.py_kernels.get(cuda, operator)(*args, **kwargs)

    replace(HigherOrderOperator, "dispatch", dispatched)


def _kernel(name: str, device_type: str) -> Callable[..., Any]:
    """Return what autocast makes of an operator, by the group that it is in."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    without_autocast = DispatchKeySet(torch._C._dispatch_key_parse("AutocastPrivateUse1"))
    below = torch._C._dispatch_keyset_full_after(torch._C._dispatch_key_parse("AutocastPrivateUse1"))
    names = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]
    dtype_position = names.index("dtype") if "dtype" in names else len(names)

    def target_dtype(args: tuple[Any, ...]) -> torch.dtype:
        if name in _LOWER_PRECISION or (
            name in _WIDEST_TYPE and torch.float32 not in {tensor.dtype for tensor in _tensors(args)}
        ):
            return torch.get_autocast_dtype(device_type)
        return torch.float32

    def cast(*args: Any, **kwargs: Any) -> Any:
        if name in left_alone:
            return op.redispatch(torch._C._dispatch_keys(args[0]) & below, *args, **kwargs)
        dtype = target_dtype(args)
        with torch._C._ExcludeDispatchKeyGuard(without_autocast):
            named = _cast_from_last(kwargs, dtype)
            given = _cast_from_last(dict(enumerate(args)), dtype)
            rules = [name] if dtype is torch.float32 else []
            _running_in_fp32.extend(rules)
            try:
                return op(*given.values(), **named)
            finally:
                _drop(given)
                del _running_in_fp32[len(_running_in_fp32) - len(rules) :]

    def fp32_result(*args: Any, **kwargs: Any) -> Any:
        gives_dtype = len(args) > dtype_position and args[dtype_position] is not None
        with torch._C._ExcludeDispatchKeyGuard(without_autocast):
            if args[0].dtype in _HALF and kwargs.get("dtype") is None and not gives_dtype:
                kwargs["dtype"] = torch.float32
                args = args[:dtype_position]
            _running_in_fp32.append(name)
            try:
                return op(*args, **kwargs)
            finally:
                _running_in_fp32.pop()

    return fp32_result if name in _FP32_RESULT else cast


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


def _cast_from_last(values: Mapping[Any, Any], dtype: torch.dtype) -> dict[Any, Any]:
    """Cast arguments, the last one first: a weight before what it is multiplied with.

    `WrapFunction_` (aten/src/ATen/autocast_mode.h) casts in the arguments of one call, which GCC, of which PyTorch's
    builds for Linux are, evaluates from the last, and destroys from the first (measured on an H200, torch 2.11).
    """
    made = {name: _cast(value, dtype) for name, value in reversed(list(values.items()))}
    return {name: made[name] for name in values}


def _drop(values: dict[Any, Any]) -> None:
    """Let go of cast arguments, the first one first."""
    for name in list(values):
        del values[name]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point (not double) device tensor in `value`, as cached_cast does."""
    if isinstance(value, torch.Tensor):
        return _cast_tensor(value, dtype)
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _cast_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64 and tensor.device.type != "cpu"
    if not eligible or tensor.dtype == dtype:
        return tensor
    cacheable = (
        torch.is_autocast_cache_enabled()
        and dtype in _HALF
        and tensor.dtype == torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not tensor._is_view()
    )
    if not cacheable:
        return _copied(tensor, dtype)
    found = _weight_cache.get(id(tensor))
    if found is None:
        found = _weight_cache[id(tensor)] = (tensor, _copied(tensor, dtype))
    return found[1]


def _copied(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    copy = tensor.to(dtype)
    for made in copied:
        made(tensor, copy)
    return copy


def _clear_with_autocast() -> None:
    """Drop the cached casts whenever torch drops its own: at the exit of the outermost autocast."""
    clear = original(torch, "clear_autocast_cache")

    def clear_both() -> None:
        for observer in observers:
            observer.clearing()
        _weight_cache.clear()
        clear()
        for observer in observers:
            observer.cleared()

    replace(torch, "clear_autocast_cache", clear_both)


# Copies that a program could do without

_LEAST_TIMES = 2
"""So many times as large as the memory that it is a view of is an expanded tensor at least that counts."""


class Casts:
    """The copies that autocast has made on one device."""

    def __init__(self, gpu: DeviceParts, memory: DeviceMemory) -> None:
        self._gpu, self._memory = gpu, memory
        self._expanded: tuple[int, int, str] = 0, 0, ""
        """The largest copy of an expanded tensor: bytes, how many times its memory, and ``file:line``."""

        self._seen: set[tuple[int, int]] = set()
        self._again = ""

    def made(self, source: torch.Tensor, copy: torch.Tensor) -> None:
        """Note that autocast has cast a tensor."""
        number = self._memory.allocation_of(copy)
        if number is None:
            return
        self._gpu.recorder.name(number, CASTS)
        whole_bytes, held_bytes = source.numel() * source.element_size(), source.untyped_storage().nbytes()
        times = whole_bytes // max(1, held_bytes)
        if times >= _LEAST_TIMES and whole_bytes > self._expanded[0]:
            self._expanded = whole_bytes, times, self._gpu.sites.calling_line()
        if source.is_leaf and source.requires_grad and not torch.is_autocast_cache_enabled() and not in_backward():
            weight = id(source), source._version  # which an optimizer's step counts up
            if weight in self._seen:
                self._again = self._again or self._gpu.sites.calling_line()
            self._seen.add(weight)

    def causes(self) -> Iterator[Cause]:
        """Yield the copies that are many for one tensor; their bytes go by the batch size."""
        _, times, line = self._expanded
        if times:
            words = f"{line} casts a tensor that is expanded to {times:,} times its memory; cast it before `expand`"
            yield Cause("casts", words, line=line)
        if self._again:
            words = f"{self._again} casts the same weights in every call; leave autocast's `cache_enabled` on"
            yield Cause("casts", words, line=self._again)
