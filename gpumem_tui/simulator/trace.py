"""Runs PyTorch programs on tensors without data and tells the allocator what the device would be asked for."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._mode_utils import no_dispatch

from gpumem_tui.errors import in_one_line, named
from gpumem_tui.simulator import attention, host, kernels, recurrent
from gpumem_tui.simulator.answers import COPIES, COPY, MISS, TO_COPY, Answers
from gpumem_tui.simulator.conversion import HostConverter
from gpumem_tui.simulator.engine import in_place
from gpumem_tui.simulator.example import NoExample, result_by_example
from gpumem_tui.simulator.kernel_memory import KernelMemory
from gpumem_tui.simulator.parts import CUTS, rows_asked_for
from gpumem_tui.simulator.shaped import PACK, TAKEN_FROM_VALUES, Shapes, by_assumption, can_be_assumed
from gpumem_tui.simulator.sparse import SPARSE_PRODUCT, SparseTensors
from gpumem_tui.simulator.subclasses import nested_length
from gpumem_tui.simulator.untraceable import Untraceable, in_words
from gpumem_tui.simulator.values import UnknownValue, Values
from gpumem_tui.step.phases import in_backward

if TYPE_CHECKING:
    from gpumem_tui.simulator.device import SimulatedGpu

_DEVICE: Any = torch.ops.prim.device.default
_NO_DISPATCH: Any = torch._C._disabled_torch_dispatch_impl
_IS_PINNED: Any = torch.ops.aten.is_pinned.default
_FILLS = frozenset(
    {
        torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default, torch.ops.aten.zero_.default,
        torch.ops.aten.fill_.Scalar, torch.ops.aten.exponential_.default, torch.ops.aten.bernoulli_.float,
    }
)  # fmt: skip
"""What initializes weights: gives back its argument, and torch's own way to say so loads much else."""

_SHAPES = {**recurrent.SHAPES, **kernels.GIVEN}

_COMPOSED = frozenset(("to", "linear", "matmul"))
"""Operators made of others, which autograd takes apart, but not what a tensor of another kind, as a jagged one, asks of
the parts that it is made of."""

_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
_NONZERO: Any = torch.ops.aten.nonzero.default


_fake_dispatch: Any = FakeTensorMode.__torch_dispatch__
_fake_dispatch = getattr(_fake_dispatch, "__wrapped__", _fake_dispatch)
"""Without the wrapper that keeps torch.compile out of it, which costs each operator more than remembered answers do."""


class DeviceMode(KernelMemory, FakeTensorMode):
    """Fake tensors on the simulated device, real tensors on the CPU.

    Data loading and step counters keep their values; only what lives on the device is without data. Every storage an
    operator makes on the device is allocated, and released when the last tensor that holds it is gone, in the order in
    which eager PyTorch does it.
    """

    def __init__(self, device_type: str, gpu: SimulatedGpu) -> None:
        FakeTensorMode.__init__(self, allow_fallback_kernels=False, allow_non_fake_inputs=True)
        self.fake_tensor_converter = HostConverter(copy_data=False, export=False)
        KernelMemory.__init__(self, device_type, gpu)
        self._depth = 0
        self._answers = Answers(self, device_type)
        self._thread = threading.local()
        self._turn = threading.RLock()
        self._in_turn = 0
        os.register_at_fork(after_in_child=_fresh_turn(weakref.ref(self)))
        self.values = Values(self._live)
        self._shapes = Shapes(self.values)
        self._index_bytes: list[int] = []
        self._sparse = SparseTensors()
        self.rows_asked_for = 0
        """The largest part into which the program cuts what it trains on, see `parts`; 0 for none."""
        self._assumed: Any = None
        """What the operator that is being followed is assumed to give, where that depends on unknown values."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and the wrapper that would skip it takes its time."""
        return False

    def prepare_thread(self) -> None:
        """Have `torch.tensor(..., device=...)` begin on the host, as `FakeTensorMode` does in its thread."""
        if not getattr(self._thread, "is_prepared", False):
            torch._C._set_only_lift_cpu_tensors(True)
            self._thread.is_prepared = True

    @property
    def avoid_device_init(self) -> bool:
        """There is no device to initialize."""
        return True

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._run_higher_order(func, args, kwargs)
        if any(not issubclass(kind, FakeTensor) and kind.__torch_dispatch__ is not _NO_DISPATCH for kind in types):
            return NotImplemented  # a kind of its own, as DTensor: what it does with the tensors in it comes here again
        if func in CUTS:
            self.rows_asked_for = max(self.rows_asked_for, rows_asked_for(func, args))
        device = kwargs.get("device")
        if device is not None and device.type == "cuda":  # asked for by torch itself, where nothing renames it
            kwargs = {**kwargs, "device": torch.device(self._device_type, 0)}
        if kwargs.get("pin_memory"):  # host memory alone, and there is no driver to pin it
            kwargs = {**kwargs, "pin_memory": False}
        elif func is _IS_PINNED:  # asked by torch's own C++, of what it has just had pinned
            return True
        if not self._concerns_device(types, kwargs):
            is_factory = device is not None or func in host.MAKERS
            if self.is_dispatching and is_factory:  # a part of an operator on tensors without data
                return _fake_dispatch(self, func, types, args, kwargs)
            if func in host.MAKERS and host.ends_on_device(func, args, kwargs):
                with self._turn:
                    return self._work_out(func, types, self._without_data(args), kwargs)
            return func(*args, **kwargs)
        with self._turn:
            self._in_turn = threading.get_ident()
            return self._follow(func, types, args, kwargs, sys._getframe().f_back)

    def _follow(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], caller: FrameType | None
    ) -> Any:
        """An operator that concerns the device; one thread at a time."""
        self.prepare_thread()
        if func is _DEVICE:
            return args[0].fake_device
        if not in_backward():
            self.raise_if_full()
        if func is torch.ops.aten._local_scalar_dense.default:
            self._gpu.streams.synchronize()
            return self.values.read(args[0])
        if func is COPY and not isinstance(args[0], FakeTensor):
            self._wait_for_copy(args, kwargs)
            return args[0].copy_(self.values.copied_to_host(args[1]))
        if self._depth:
            if func in TAKEN_FROM_VALUES:
                return self._shaped_by_values(func, types, args, kwargs)
            return _fake_dispatch(self, func, types, args, kwargs)
        if func._opname in _COMPOSED:
            with self:
                return func.decompose(*args, **kwargs)
        if self._sparse.concern(func, args):
            return self._follow_sparse(func, types, args, kwargs)
        if func is TO_COPY and host.is_to_host(args[0], kwargs):
            self._wait_for_copy(args, kwargs)
            return self.values.copied_to_host(args[0], kwargs.get("dtype"))
        if func is _ADD and attention.adds_in_place():
            return self._added_in_place(args, kwargs)
        if kwargs.get("generator") is not None:
            kwargs = {**kwargs, "generator": None}
        if in_backward():
            func = in_place(func, args, self.made_in, caller)
        self._operator = f"aten.{func._opname}"
        key = self._answers.key(func, args, kwargs)
        result = self._answers.recall(key, args) if key is not None else MISS
        if result is MISS:
            result = self._work_out(func, types, args, kwargs)
            if key is not None:
                self._answers.learn(key, func, args, result)
        self._record(result if func is not PACK else result[:1])
        self.values.follow(func, args, kwargs, result)
        if self._assumed is not None:
            if func is _NONZERO:
                self.values.learn(result, self._assumed)
            self._assumed = None
        if func in COPIES and host.holds_values(args):
            self._note_copy_from_host(args[0] if func is COPY else result)
            self._wait_for_copy(args, kwargs)
        self._use_scratch(func, args, self._index_bytes)
        self._index_bytes = []
        return result

    def _added_in_place(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """The mask added to the scores of attention, where a GPU adds it to them."""
        scores = args[0]
        result = self.view_of(
            scores.untyped_storage(), scores.dtype, scores.shape, scores.stride(), scores.storage_offset()
        )
        self.values.follow(_ADD_IN_PLACE, args, kwargs, result)
        return result

    def _follow_sparse(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """An operator on sparse tensors, or one that makes one."""
        with self:
            made = self._sparse.made_of_dense(func, args, kwargs)
        if made is not None:
            return made
        self._operator = f"aten.{func._opname}"
        if not self._sparse.is_followed(func, in_backward()):
            raise self._failed(func, args, UnsupportedOperatorException(func))
        if func not in self._sparse.PRODUCTS:
            return self._work_out(func, types, args, kwargs)
        with no_dispatch():
            result = self._shaped_as(self._sparse.product(args))
        self._record(result)
        self.assumed[SPARSE_PRODUCT] += 1
        return result

    def _without_data(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments, with fake tensors for those on the host."""

        def fake(value: Any) -> Any:
            return self.from_tensor(value) if isinstance(value, torch.Tensor) else value

        return tuple([fake(one) for one in value] if isinstance(value, list) else fake(value) for value in args)

    def _run_higher_order(self, func: HigherOrderOperator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """An operator that calls others, which come here one by one."""
        table: Any = func.python_key_table
        fakes: Any = registered_hop_fake_fns
        with self:
            if func in fakes:
                return fakes[func](*args, **kwargs)
            if FakeTensorMode in table:
                return table[FakeTensorMode](self, *args, **kwargs)
        raise Untraceable(f"{func.name()} does not say what shape its result has ({self._gpu.sites.calling_line()})")

    def _work_out(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the operator makes of fake tensors."""
        self._depth = 1
        try:
            if func in _FILLS:
                return args[0]
            if func in TAKEN_FROM_VALUES:
                return self._shaped_by_values(func, types, args, kwargs)
            if func in _SHAPES:
                with no_dispatch():
                    return self._shaped_as(_SHAPES[func](args, self._gpu.profile))
            return self._shaped_by_torch(func, types, args, kwargs)
        except Exception as error:
            raise self._failed(func, args, error) from error
        finally:
            self._depth = 0
            # Left there, its weak references would keep `Module.half()` and the like from swapping parameters.
            self.fake_tensor_converter.meta_converter.tensor_memo.clear()

    def _failed(self, func: Any, args: tuple[Any, ...], error: Exception) -> Exception:
        """The error as it is raised; in backward the program ends here, as it would not reach the program."""
        line = self._gpu.sites.place()
        if not line:
            forward = self._gpu.sites.forward_line()
            line = (
                f"in the backward of {forward}"
                if forward
                else "in backward"
                if in_backward()
                else "at an unknown place"
            )
        failure = in_words(func, args, error, line)
        if in_backward():
            if failure is error and not self._gpu.sites.calling_line():
                failure = Untraceable(f"{func} cannot be followed: {named(error)}: {in_one_line(error)} ({line})")
            self._gpu.on_backward_error(failure)
        return failure

    def _shaped_by_torch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A result by torch's shape function, or where there is none by an example."""
        try:
            return _fake_dispatch(self, func, types, args, kwargs)
        except DynamicOutputShapeException:
            share = self._gpu.assumed_rows.at(self._gpu.sites.calling_line(), func) if can_be_assumed(func) else None
            if share is None:
                raise
            with no_dispatch():
                return self._shaped_as(by_assumption(func, args, share))
        except (NotImplementedError, UnsupportedOperatorException):
            with suppress(NoExample), no_dispatch():
                return self._shaped_as(result_by_example(func, args, kwargs))
            raise

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Within the context operators work on fake tensors without anything being allocated for them."""
        self._depth += 1
        self._in_turn = threading.get_ident()
        try:
            yield
        finally:
            self._depth -= 1

    def _shaped_by_values(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A result whose shape depends on values, where these are known; how index operators use masks, too."""
        try:
            known = self._shapes.of_result(func, args, kwargs)
        except UnknownValue:
            share = self._gpu.assumed_rows.at(self._gpu.sites.calling_line(), func) if can_be_assumed(func) else None
            if share is None:
                return super().__torch_dispatch__(func, types, args, kwargs)
            with no_dispatch():
                known = self._assumed = by_assumption(func, args, share)
        if func is _NONZERO and self._operator != "aten.nonzero":
            self._index_bytes.append(known.nbytes)
        return (self._shaped_as(known[0]), known[1]) if func is PACK else self._shaped_as(known)

    def _shaped_as(self, known: Any) -> Any:
        """Tensors without data that have the shapes of `known`; parts of one storage if those are, without data."""
        if isinstance(known, torch.Tensor) and not isinstance(known, FakeTensor):
            elem = known
            if not known.is_meta:
                elem = torch.empty_strided(known.shape, known.stride(), dtype=known.dtype, device="meta")
            return FakeTensor(self, elem, torch.device(self._device_type, 0))
        return type(known)(self._shaped_as(one) for one in known) if isinstance(known, (tuple, list)) else known

    @property
    def is_dispatching(self) -> bool:
        """Whether torch is at work on fake tensors, and not the program, in this thread."""
        return self._depth > 0 and self._in_turn == threading.get_ident()

    def create_symbolic_nested_int(self, *, nt_tensor_id: int | None = None) -> torch.SymInt:
        """The length that differs between the rows of a jagged tensor, as tensors with data have it."""
        self.cache_enabled = False  # its keys take lengths of this kind for expressions
        return nested_length()

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMode:
        """The copy of a tensor lies on the same device."""
        return self

    def view_of(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int,
    ) -> torch.Tensor:
        """A tensor on the device in a storage of it."""
        elem = torch.empty(0, dtype=dtype, device="meta")
        elem.set_(storage, offset, shape, stride)
        return FakeTensor(self, elem, torch.device(self._device_type, 0))

    def _concerns_device(self, types: Any, kwargs: Mapping[str, Any]) -> bool:
        if any(issubclass(kind, FakeTensor) for kind in types):
            return True
        device = kwargs.get("device")
        return device is not None and torch.device(device).type == self._device_type

    def _wait_for_copy(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A copy between host and device waits for it to end, unless asked not to (`copy_kernel_cuda` in Copy.cu)."""
        if not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):  # copy_(self, src, non_blocking)
            self._gpu.streams.synchronize()

    def _note_copy_from_host(self, tensor: torch.Tensor) -> None:
        """A copy that no module makes brings data; the model's own tensors are known by name as well."""
        number = self.allocation_of(tensor)
        if number and not self._gpu.sites.in_module:
            self._gpu.recorder.came_from_host(number)

    def _record(self, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            if self._is_here(result):
                self._record_storage(result.untyped_storage())
            elif not isinstance(result, FakeTensor):
                result.zero_()  # copied from where there are no values
        elif isinstance(result, (list, tuple)):
            for item in result:
                self._record(item)


def _fresh_turn(mode: weakref.ref[DeviceMode]) -> Callable[[], None]:
    """For a forked child, in which the thread whose turn it was does not exist."""

    def renew() -> None:
        found = mode()
        if found is not None:
            found._turn = threading.RLock()

    return renew
