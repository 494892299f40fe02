"""Runs PyTorch programs on tensors without data and tells the allocator what the device would be asked for.

Every operator comes to `DeviceMode.__torch_dispatch__`, which looks its handler up, by operator, in the table of where
its tensors are: on the host, on the device, or within another operator that is worked out. Most have the handler
`_follow`: `results` shows what the operator gives, `memory` and `values` record it. The tables of the other operators
stand in the modules that know them.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._higher_order_ops import utils as higher_order
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from gpumem_tui.errors import in_one_line, named
from gpumem_tui.simulator.device import attention, host, kernels
from gpumem_tui.simulator.device.answers import MISS
from gpumem_tui.simulator.device.base import DEVICE_TYPE, Call, DeviceParts, Handler, StorageView
from gpumem_tui.simulator.device.kinds import (
    MAKES_SPARSE,
    HostConverter,
    as_before,
    as_fakes,
    fake_device_of,
    is_without_data,
    nested_length,
    show,
    shown_among,
)
from gpumem_tui.simulator.device.memory import DeviceMemory
from gpumem_tui.simulator.device.results import Results
from gpumem_tui.simulator.device.scratch import COLLECTIVES
from gpumem_tui.simulator.device.shapes import NONZERO, TAKEN_FROM_VALUES, AssumedRows, Untraceable, gives_numbers
from gpumem_tui.simulator.device.sparse import BAG_BACKWARD, SparseTensors, is_sparse_bag
from gpumem_tui.simulator.device.transfers import READ, Transfers
from gpumem_tui.simulator.device.upcasts import Upcasts
from gpumem_tui.simulator.device.values import Values
from gpumem_tui.step.phases import in_backward

_aten: Any = torch.ops.aten
_DEVICE: Any = torch.ops.prim.device.default
_NO_DISPATCH: Any = torch._C._disabled_torch_dispatch_impl
_IS_PINNED, _LIFT_FRESH = _aten.is_pinned.default, _aten.lift_fresh.default
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_META = torch.device("meta")
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
_ADD, _ADD_IN_PLACE = _aten.add.Tensor, _aten.add_.Tensor

_COMPOSED = frozenset(("to", "linear", "matmul"))
"""Operators made of others, which autograd takes apart, but not what a tensor of another kind, as a jagged one, asks of
the parts that it is made of."""

_WHOLE_SCORES = frozenset(("flex_attention", "flex_attention_backward"))
"""Attention that, where it is not compiled, makes the scores of all pairs of tokens (`math_attention` and
`sdpa_dense_backward` of torch/_higher_order_ops/flex_attention.py)."""

_SPLIT, _SLICE = _aten.split.Tensor, _aten.slice.Tensor
_CUTS = frozenset((_SPLIT, _SLICE))
_LEAST_ROWS, _MOST_ROWS = 4, 1024
"""Operators by which a step cuts its batch into parts, and rows of a part. Smaller parts are seen at the batch sizes
that are traced anyway; a larger one would take a batch of twice as many, out of a program's own data."""

_AT_ONCE: dict[Any, Callable[..., Any] | None] = {
    _LIFT_FRESH: lambda tensor: tensor,  # as it does, without the way there: data loaders ask it of every array
    READ: lambda value: READ(value) if isinstance(value, torch.Tensor) else value,  # of a number in a tensor
    **dict.fromkeys((*_CUTS, *host.MAKERS, _IS_PINNED)),
}
"""Functions that run operators on host tensors: most run themselves; None of those that are looked at."""


class DeviceMode(FakeTensorMode):
    """Fake tensors on the simulated device, real tensors on the CPU.

    Data loading and step counters keep their values; only what is on the device is without data. Every storage that
    an operator makes on the device is allocated, and released when the last tensor that holds it is gone, in the order
    in which eager PyTorch does it.

    Args:
        assumed_rows: how many rows operators give whose result's shape depends on what the GPU computes.

    Attributes:
        values: what we know about the values of tensors on the device.
        rows_asked_for: the largest part into which the program cuts what it trains on (see `_rows_asked_for`), 0 for
            none.
        results, transfers: what operators give, and what passes between the host and the device.
        sparse: what follows sparse tensors.
        upcasts: what is in fp32 as norms and embeddings are.
    """

    supports_higher_order_operators = True

    def __init__(self, gpu: DeviceParts, memory: DeviceMemory, assumed_rows: AssumedRows) -> None:
        super().__init__(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        self.fake_tensor_converter = HostConverter(copy_data=False, export=False)
        self._gpu = gpu
        self._memory = memory
        self.assumed = memory.assumed
        self.values = Values(memory.live, assumed_rows.end)
        self.rows_asked_for = 0
        self.results = Results(self, gpu, memory, self.values, assumed_rows)
        self.upcasts = Upcasts(gpu, memory)
        self.sparse = SparseTensors(self, memory, self.results)
        self.transfers = Transfers(gpu, memory, self.values, self.results, self.sparse, self._follow)
        everywhere: dict[Any, Handler] = {_IS_PINNED: lambda _: True}  # asked by C++, of what it has just had pinned
        self._on_host: dict[Any, Handler] = {**everywhere, _LIFT_FRESH: lambda call: call.args[0]}
        self._within = {
            **everywhere,
            **self.transfers.within,
            **dict.fromkeys(TAKEN_FROM_VALUES, self.results.by_values),
        }
        self._on_device = {
            **everywhere,
            **self.transfers.handlers,
            **dict.fromkeys(kernels.IN_PLACE, self._follow_in_place),
            _ADD: self._add,
            NONZERO: self._keep_rows,
            MAKES_SPARSE: self.sparse.follow,
            BAG_BACKWARD: self._follow_bags,
        }
        self._in_turn = 0
        self._thread = threading.local()
        self._turn = threading.RLock()
        os.register_at_fork(after_in_child=_fresh_turn(weakref.ref(self)))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and torch's wrapper for it takes time."""
        return False

    @property
    def avoid_device_init(self) -> bool:
        """There is no device to initialize."""
        return True

    def prepare_thread(self) -> None:
        """Have `torch.tensor(..., device=...)` begin on the host, as `FakeTensorMode` does in its thread."""
        if not getattr(self._thread, "is_prepared", False):
            torch._C._set_only_lift_cpu_tensors(True)
            self._thread.is_prepared = True

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not types and not kwargs and type(func) is OpOverload:  # on tensors of the host, as in data loaders
            at_once = _AT_ONCE.get(func, func)
            if at_once is not None:
                return at_once(*args)
        if func is _DEVICE and (device := fake_device_of(args[0])) is not None:  # most calls are this question
            self.prepare_thread()
            return device
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._run_higher_order(func, args, kwargs)
        if not all(map(_is_followed, types)):
            return NotImplemented  # a kind of its own, as DTensor: what it does with the tensors in it comes here again
        if func in _CUTS:
            self.rows_asked_for = max(self.rows_asked_for, _rows_asked_for(func, args))
        call = Call(func, types, args, _as_here(kwargs) if kwargs else kwargs, sys._getframe().f_back)
        if types or _concerns_device(call.kwargs):
            result = self._run_on_device(call)
        else:
            result = self._on_host.get(func, self._run_on_host)(call)
        return result if self.is_dispatching else show(result)

    def dispatched(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do as `FakeTensor.__torch_dispatch__` where no mode is on, as in C++ of `torch.tensor`.

        Every tensor without data has it as an attribute of its own, since its class has none.
        """
        if func is _DEVICE:
            return _META if self.in_kernel_invocation else fake_device_of(args[0])
        if self.is_dispatching:
            return FakeTensor.__torch_dispatch__(func, types, args, kwargs or {})
        if torch._C._get_dispatch_mode(_FAKE) is not None:  # it is on, and leaves what is asked to another class
            return NotImplemented
        with self:
            return func(*args, **(kwargs or {}))

    def _run_on_device(self, call: Call) -> Any:
        """Run an operator that concerns the device; one thread at a time."""
        func = call.func
        if not self.is_dispatching:
            device = call.kwargs.get("device")
            if device is not None and device.type == "meta":
                return func(*_on_meta(call.args), **call.kwargs)
            body = kernels.body_of(func) if kernels.may_have_body(func) else None
            if body is not None and (made := self._run_body(call, body)) is not MISS:
                return made
        with self._turn:
            self._in_turn = threading.get_ident()
            call.shown = shown_among((*call.args, *call.kwargs.values()) if call.kwargs else call.args)
            call.types = (*call.types, FakeTensor)
            kinds, shown = as_fakes(call.shown), call.shown
            try:
                return self._handler(func)(call)
            except Exception as error:
                is_final = isinstance(error, Untraceable) or self.is_dispatching
                if is_final or not (in_backward() or isinstance(error, NotImplementedError)):
                    raise
                raise self.results.failed(call, error) from error
            finally:
                as_before(shown, kinds)

    def _handler(self, func: Any) -> Handler:
        """Return what runs an operator on the device, of which this thread may now allocate."""
        self.prepare_thread()
        if not in_backward():
            self._memory.raise_if_full()
        if self.results.depth:
            return self._within.get(func, self.results.as_torch_does)
        return self._on_device.get(func) or self._first_met(func)

    def _first_met(self, func: Any) -> Handler:
        """Choose the handler of an operator that no table names, and keep it."""
        handler: Handler = self._follow
        if func._opname in _COMPOSED:
            handler = self._take_apart
        elif _is_composed(func):
            handler = self._follow_whole
        elif func.namespace in COLLECTIVES:
            handler = self._communicate
        elif gives_numbers(func):
            handler = self._keep_rows
        elif func._opname.startswith("_foreach_") and func._opname.endswith("_"):
            handler = self._follow_on_all
        self._on_device[func] = handler
        return handler

    # Handlers of operators on the device

    def _follow(self, call: Call) -> Any:
        """Follow an operator as most are: it gives its results, its kernel takes its scratch and gives it back."""
        if self.sparse.are_there and self.sparse.concern(call):
            return self.sparse.follow(call)
        if call.kwargs.get("generator") is not None:
            call.kwargs = {**call.kwargs, "generator": None}
        if in_backward():
            self._gpu.passes.note_operator()
        func, args = call.func, call.args
        self._memory.operator = f"aten.{func._opname}"
        result = self.results.of(call)
        self._memory.record_made(func, args, result)
        self._memory.follow_data(func, args, result)
        self.values.follow(func, args, call.kwargs, result)
        self._memory.use_scratch(func, args, self.results.index_bytes, result)
        if self.upcasts.are_there:
            self.upcasts.follow(func._opname, args, result)
        return result

    def _follow_in_place(self, call: Call) -> Any:
        """Follow an operator that backward runs in place where nothing else holds what it works on."""
        if in_backward():
            call.func = kernels.in_place(call, self._memory.made_in)
        return self._follow(call)

    def _follow_on_all(self, call: Call) -> Any:
        """Follow an operator that writes many tensors in place: its kernel counts their versions, autograd does not."""
        result = self._follow(call)
        for tensor in call.args[0]:
            torch.autograd.graph.increment_version(tensor)
        return result

    def _add(self, call: Call) -> Any:
        """Add two tensors: a mask to the scores of attention, or a bias, as a GPU does it, which is in place."""
        if not (attention.adds_in_place() or kernels.adds_bias(call.args, call.caller)):
            return self._follow_in_place(call)
        target = call.args[0]
        result = self.results.view_of(target.untyped_storage(), StorageView.of(target))
        self.values.follow(_ADD_IN_PLACE, call.args, call.kwargs, result)
        return result

    def _keep_rows(self, call: Call) -> Any:
        """Follow an operator that gives the places, or numbers, of what it keeps: known where they are assumed."""
        result = self._follow(call)
        if self.results.assumed is not None:
            self.values.learn(result, self.results.assumed)
        return result

    def _follow_bags(self, call: Call) -> Any:
        """Follow the backward of an `EmbeddingBag`, whose gradient may be sparse."""
        return self.sparse.follow(call) if is_sparse_bag(call.args) else self._follow(call)

    def _communicate(self, call: Call) -> Any:
        """Follow a collective."""
        self._gpu.communicate(call.args)
        return self._follow(call)

    def _take_apart(self, call: Call) -> Any:
        """Run the operators that one is made of, which come here one by one."""
        with self:
            return call.func.decompose(*call.args, **call.kwargs)

    def _follow_whole(self, call: Call) -> Any:
        """Follow an operator made of others, which torch takes apart before, but in inference mode."""
        return self._take_apart(call) if torch.is_inference_mode_enabled() else self._follow(call)

    # Handlers of other operators

    def _run_on_host(self, call: Call) -> Any:
        """Run an operator on tensors of the host alone, or one that makes such a tensor."""
        func, args, kwargs = call.func, call.args, call.kwargs
        device = kwargs.get("device")
        if self.is_dispatching and (device is not None or func in host.MAKERS):
            return self.results.as_torch_does(call)  # a part of an operator on tensors without data
        if func in host.ALL_MAKERS and host.ends_on_device(func, args, kwargs):
            with self._turn:
                return self.results.worked_out(Call(func, call.types, self._without_data(args), kwargs))
        return func(*args, **kwargs)

    def _without_data(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments, with fake tensors for those on the host."""

        def fake(value: Any) -> Any:
            return self.from_tensor(value) if isinstance(value, torch.Tensor) else value

        return tuple([fake(one) for one in value] if isinstance(value, list) else fake(value) for value in args)

    def _run_body(self, call: Call, body: Callable[..., Any]) -> Any:
        """Run what a program has made an operator of: its own come here one by one, whole; `MISS` where it fails."""
        results = self.results
        before, results.is_in_body = results.is_in_body, True
        try:
            with self, torch._C._SetExcludeDispatchKeyGuard(_AUTOGRAD, False), torch.no_grad():
                return body(*call.args, **call.kwargs)
        except torch.OutOfMemoryError:
            raise
        except kernels.Refused as refused:
            raise refused.error from None
        except Exception as error:  # noqa: BLE001 - the program's own, or what a library of a GPU's raises without one
            reason = f"{named(error)}: {in_one_line(error)}"
            results.note_assumed(f"what {call.func} takes within itself is not traced ({reason})")
            return MISS
        finally:
            results.is_in_body = before

    def _run_higher_order(self, func: HigherOrderOperator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator that calls others, which come here one by one."""
        table: Any = func.python_key_table
        fakes: Any = getattr(higher_order, "registered_hop_fake_fns", {})  # since torch 2.8
        uncompiled: Any = func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
        with self:
            if uncompiled is not None and func.name() in _WHOLE_SCORES and not self.is_dispatching:
                return uncompiled(*args, **kwargs)
            if func in fakes:
                return fakes[func](*args, **kwargs)
            if FakeTensorMode in table:
                return table[FakeTensorMode](self, *args, **kwargs)
        raise Untraceable(f"{func.name()} does not say what shape its result has ({self._gpu.sites.calling_line()})")

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Have operators within the context work on fake tensors without anything being allocated for them."""
        self.results.depth += 1
        self._in_turn = threading.get_ident()
        try:
            yield
        finally:
            self.results.depth -= 1

    @property
    def is_dispatching(self) -> bool:
        """Return whether torch is at work on fake tensors, and not the program, in this thread."""
        return self.results.depth > 0 and self._in_turn == threading.get_ident()

    def create_symbolic_nested_int(self, **_: object) -> torch.SymInt:
        """Make the length that differs between the rows of a jagged tensor, as tensors with data have it."""
        self.cache_enabled = False  # its keys take lengths of this kind for expressions
        return nested_length()

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMode:
        """Return the mode itself: the copy of a tensor is on the same device."""
        return self


@cache
def _is_followed(kind: type[torch.Tensor]) -> bool:
    """Return whether operators on tensors of a class are followed here, and not first by the class itself."""
    handled: Any = kind.__torch_dispatch__
    return issubclass(kind, FakeTensor) or handled is _NO_DISPATCH


def _as_here(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return arguments as this device takes them: CUDA is asked for by torch itself, where nothing renames it.

    Pinned memory is the host's alone, and there is no driver to pin it.
    """
    device = kwargs.get("device")
    if device is not None and device.type == "cuda":
        kwargs = {**kwargs, "device": torch.device(DEVICE_TYPE, 0)}
    return {**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs


def _on_meta(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments, with a tensor of the meta device for each that has no data."""

    def placed(value: Any) -> Any:
        if not is_without_data(value):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    return tuple(map(placed, args))


def _concerns_device(kwargs: Mapping[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == DEVICE_TYPE


@cache
def _is_composed(func: Any) -> bool:
    """Return whether an operator is made of others alone; in inference mode torch does not take it apart itself."""
    return func.namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )


def _rows_asked_for(func: Any, args: tuple[Any, ...]) -> int:
    """Return how many of a tensor's rows one of `_CUTS` asks for where there are fewer; 0 where there are as many.

    A step that cuts its batch (``for part in batch.split(64)``) makes the same allocations for every batch that is no
    larger than one part, so that traces at small sizes say nothing of larger ones.
    """
    tensor = args[0]
    if not tensor.dim() or (len(args) > (2 if func is _SPLIT else 1) and args[2 if func is _SPLIT else 1]):
        return 0
    if func is _SPLIT:
        wanted = args[1]
    else:
        start, end = (args[2] if len(args) > 2 else None) or 0, args[3] if len(args) > 3 else None
        wanted = 0 if start < 0 or end is None else end - start
    return wanted if type(wanted) is int and max(_LEAST_ROWS, tensor.shape[0] + 1) <= wanted <= _MOST_ROWS else 0


def _fresh_turn(mode: weakref.ref[DeviceMode]) -> Callable[[], None]:
    """Return what renews the lock of a forked child, in which the thread whose turn it was does not exist."""

    def renew() -> None:
        found = mode()
        if found is not None:
            found._turn = threading.RLock()

    return renew
