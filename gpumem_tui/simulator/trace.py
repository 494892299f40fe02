"""Runs PyTorch programs on tensors without data and tells the allocator what the device would be asked for."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from gpumem_tui.memory import Bucket
from gpumem_tui.simulator import host
from gpumem_tui.simulator.allocator import OutOfMemory
from gpumem_tui.simulator.answers import COPIES, COPY, TO_COPY, UNTOLD, Answers
from gpumem_tui.simulator.blocks import Block
from gpumem_tui.simulator.conversion import HostConverter
from gpumem_tui.simulator.profile import CUBLAS_WORKSPACE
from gpumem_tui.simulator.rules import Computed
from gpumem_tui.simulator.scratch import MATRIX_PRODUCTS, Buffer, is_assumed, scratch
from gpumem_tui.simulator.shaped import PACK, TAKEN_FROM_VALUES, Shapes
from gpumem_tui.simulator.values import Uniform, Unknown, Values

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

_NONZERO: Any = torch.ops.aten.nonzero.default


class Untraceable(RuntimeError):
    """The step does something that cannot be followed without values; one line naming the operator."""


_fake_dispatch: Any = FakeTensorMode.__torch_dispatch__
_fake_dispatch = getattr(_fake_dispatch, "__wrapped__", _fake_dispatch)
"""Without the wrapper that keeps torch.compile out of it, which costs each operator more than remembered answers do."""


class _StorageRef(weakref.ref[torch.UntypedStorage]):
    """A live storage, what was allocated for it, and the values in it where they are known."""

    __slots__ = ("block", "key", "number", "size_bytes", "values")

    key: int
    number: int
    block: Block
    size_bytes: int
    values: torch.UntypedStorage | Uniform | None


class DeviceMode(FakeTensorMode):
    """Fake tensors on the simulated device, real tensors on the CPU.

    Data loading and step counters keep their values; only what lives on the device is without data. Every storage an
    operator makes on the device is allocated, and released when the last tensor that holds it is gone, in the order in
    which eager PyTorch does it.
    """

    def __init__(self, device_type: str, gpu: SimulatedGpu) -> None:
        super().__init__(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        self.fake_tensor_converter = HostConverter(copy_data=False, export=False)
        self._device_type = device_type
        self._gpu = gpu
        self._live: dict[int, _StorageRef] = {}
        self._depth = 0
        self._full: OutOfMemory | None = None
        self._operator = ""
        self.assumed: Counter[str] = Counter()
        self._has_workspace = {False: False, True: False}
        self._answers = Answers(self, device_type)
        self._thread = threading.local()
        self._turn = threading.RLock()
        self._in_turn = 0
        os.register_at_fork(after_in_child=_fresh_turn(weakref.ref(self)))
        self.values = Values(self._live)
        self._shapes = Shapes(self.values)
        self._index_bytes: list[int] = []

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
            return self._follow(func, types, args, kwargs)

    def _follow(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """An operator that concerns the device; one thread at a time."""
        self.prepare_thread()
        if func is _DEVICE:
            return args[0].fake_device
        if not _in_backward():
            self.raise_if_full()
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.values.read(args[0])
        if func is COPY and not isinstance(args[0], FakeTensor):
            return args[0].copy_(self.values.copied_to_host(args[1]))
        if self._depth:
            if func in TAKEN_FROM_VALUES:
                return self._shaped_by_values(func, types, args, kwargs)
            return _fake_dispatch(self, func, types, args, kwargs)
        if func is TO_COPY and _is_to_host(args[0], kwargs):
            return self.values.copied_to_host(args[0], kwargs.get("dtype"))
        if kwargs.get("generator") is not None:
            kwargs = {**kwargs, "generator": None}
        self._operator = f"aten.{func._opname}"
        if func._opname in MATRIX_PRODUCTS:
            self._take_workspace()
        key = self._answers.key(func, args, kwargs)
        result = self._answers.recall(key, args) if key is not None else UNTOLD
        if result is UNTOLD:
            result = self._work_out(func, types, args, kwargs)
            if key is not None:
                self._answers.learn(key, func, args, result)
        self._record(result if func is not PACK else result[:1])
        self.values.follow(func, args, kwargs, result)
        if func in COPIES and _holds_values(args):
            self._note_copy_from_host(args[0] if func is COPY else result)
        self._use_scratch(func, args)
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
            return _fake_dispatch(self, func, types, args, kwargs)
        except Exception as error:
            failure = self._in_words(func, args, error)
            if _in_backward():
                self._gpu.on_backward_error(failure)
            raise failure from error
        finally:
            self._depth = 0
            # Left there, its weak references would keep `Module.half()` and the like from swapping parameters.
            self.fake_tensor_converter.meta_converter.tensor_memo.clear()

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
        except Unknown:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func is _NONZERO and self._operator != "aten.nonzero":
            self._index_bytes.append(known.nbytes)
        return (self._shaped_as(known[0]), known[1]) if func is PACK else self._shaped_as(known)

    def _shaped_as(self, known: Any) -> Any:
        if isinstance(known, torch.Tensor):
            elem = torch.empty_strided(known.shape, known.stride(), dtype=known.dtype, device="meta")
            return FakeTensor(self, elem, torch.device(self._device_type, 0))
        return tuple(self._shaped_as(one) for one in known) if isinstance(known, tuple) else known

    @property
    def is_dispatching(self) -> bool:
        """Whether torch is at work on fake tensors, and not the program, in this thread."""
        return self._depth > 0 and self._in_turn == threading.get_ident()

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMode:
        """The copy of a tensor lies on the same device."""
        return self

    def raise_if_full(self) -> None:
        """Raise the out-of-memory that backward met.

        An exception that crosses the autograd engine's stream guard ends the process when the guard belongs to a
        Python backend (`PythonDeviceGuard::exchangeStream`, torch 2.13), so backward runs to its end, costing nothing,
        and the error is raised where `backward()` returns.
        """
        if self._full is not None:
            error, self._full = self._full, None
            raise self._gpu.out_of_memory(error) from None

    def allocation_of(self, tensor: torch.Tensor) -> int | None:
        """The number of the allocation that holds this tensor, None for a tensor elsewhere."""
        if not self._is_here(tensor):
            return None
        ref = self._live.get(tensor.untyped_storage()._cdata)
        return ref.number if ref is not None else None

    def new_storage(self, size_bytes: int, source: int) -> torch.UntypedStorage:
        """A storage on the device, recorded as the allocation `source` once more."""
        storage = torch.UntypedStorage(size_bytes, device="meta")
        number, block = self.allocate_again(source)
        self._hold(storage, number, block)
        return storage

    def allocate_again(self, source: int) -> tuple[int, Block | None]:
        """An allocation as number `source` was: its number and block (see `_allocate`)."""
        recorder = self._gpu.recorder
        block = self._take(recorder.size_bytes(source))
        return (0, None) if self._full is not None else (recorder.allocate_again(source), block)

    def free(self, number: int, block: Block | None) -> None:
        """Release an allocation that no storage stands for."""
        if block is not None:
            self._gpu.allocator.free(block)
        if number:
            self._gpu.recorder.release(number)

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

    def release(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage as released, though something still holds it."""
        ref = self._live.get(tensor.untyped_storage()._cdata)
        if ref is not None:
            self._release(ref)

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage lies on the device."""
        return storage._cdata in self._live

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Follow `storage.resize_`, with which FSDP takes and gives back its buffers."""
        self._tag_buffer(storage)
        self._record_storage(storage)
        self._tag_buffer(storage)

    def _tag_buffer(self, storage: torch.UntypedStorage) -> None:
        ref = self._live.get(storage._cdata)
        if ref is not None and ref.number:
            self._gpu.recorder.tag(ref.number, Bucket.TEMPORARY)

    def _in_words(self, func: Any, args: tuple[Any, ...], error: Exception) -> Exception:
        """What the fake tensors could not follow, naming the operator and the line; any other error as it is."""
        if isinstance(error, NotImplementedError | UnsupportedOperatorException) and _has_sparse(args):
            problem = "works on a sparse tensor, which cannot be followed: make it dense, or run on a real GPU"
        elif isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
            problem = (
                "gives a result whose shape depends on what the GPU computes, and nothing is computed here: take it "
                "from data of the CPU, keep the shape fixed (torch.where, a mask as factor), or run on a real GPU"
            )
        elif isinstance(error, NotImplementedError | UnsupportedOperatorException):
            problem = "does not say what shape its result has (it has no meta kernel)"
        else:
            return error
        return Untraceable(f"{func} {problem} ({self._gpu.sites.calling_line() or 'at an unknown place'})")

    def _concerns_device(self, types: Any, kwargs: Mapping[str, Any]) -> bool:
        if any(issubclass(kind, FakeTensor) for kind in types):
            return True
        device = kwargs.get("device")
        return device is not None and torch.device(device).type == self._device_type

    def _is_here(self, tensor: torch.Tensor) -> bool:
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        return device.type == self._device_type

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

    def _record_storage(self, storage: torch.UntypedStorage) -> None:
        key, size_bytes = storage._cdata, storage.nbytes()
        known = self._live.get(key)
        if known is not None and known.size_bytes == size_bytes:
            return
        if size_bytes == 0:
            if known is not None:
                self._release(known)
            return
        number, block = self._allocate(size_bytes)
        if known is not None:
            self._release(known)
        self._hold(storage, number, block)

    def _hold(self, storage: torch.UntypedStorage, number: int, block: Block | None) -> None:
        """Release the allocation when the storage is gone."""
        if block is None:
            return
        ref = _StorageRef(storage, self._release)
        ref.key, ref.number, ref.block = storage._cdata, number, block
        ref.size_bytes, ref.values = storage.nbytes(), None
        self._live[ref.key] = ref

    def _allocate(self, size: Buffer, operator: str = "", bucket: Bucket | None = None) -> tuple[int, Block | None]:
        """The number and the block of a new allocation.

        No block for no bytes, and neither number nor block once the device was found full in backward.
        """
        block = self._take(_size_bytes(size))
        if self._full is not None:
            return 0, None
        recomputed = _in_backward() and torch.is_grad_enabled()
        site = self._gpu.sites.site(operator or self._operator)
        return self._gpu.recorder.allocate(size, recomputed, site, bucket), block

    def _take(self, size_bytes: int) -> Block | None:
        """A block of the allocator's; None for no bytes, and once the device was found full in backward."""
        if not size_bytes or self._full is not None:
            return None
        try:
            return self._gpu.allocator.malloc(size_bytes)
        except OutOfMemory as error:
            self._gpu.recorder.cut()
            self._full = error
            if not _in_backward():
                self.raise_if_full()
            return None

    def _release(self, ref: _StorageRef) -> None:
        if self._live.get(ref.key) is ref:
            del self._live[ref.key]
            self._gpu.allocator.free(ref.block)
            self._gpu.recorder.release(ref.number)

    def _use_scratch(self, func: Any, args: tuple[Any, ...]) -> None:
        """What the kernel takes and gives back while it runs; at its end, when its results exist too."""
        if is_assumed(func, self._gpu.gpu.compute_capability):
            self.assumed[func._opname] += 1
        buffers = scratch(func, args, self._gpu.profile)
        if self._index_bytes:
            buffers, self._index_bytes = [*buffers, *self._index_bytes], []
        if not self._gpu.unlimited:
            buffers = [size for buffer in buffers if (size := _size_bytes(buffer))]
        taken = [self._allocate(buffer, bucket=Bucket.TEMPORARY) for buffer in buffers]
        for number, block in taken:
            self.free(number, block)

    def _take_workspace(self) -> None:
        """The first matrix product of the forward and of the autograd thread makes that thread's workspace."""
        in_backward = _in_backward()
        if not self._has_workspace[in_backward]:
            self._has_workspace[in_backward] = True
            self._allocate(self._gpu.profile.cublas_workspace_bytes, CUBLAS_WORKSPACE, Bucket.TEMPORARY)


def _fresh_turn(mode: weakref.ref[DeviceMode]) -> Callable[[], None]:
    """For a forked child, in which the thread whose turn it was does not exist."""

    def renew() -> None:
        found = mode()
        if found is not None:
            found._turn = threading.RLock()

    return renew


def _is_to_host(tensor: FakeTensor, kwargs: Mapping[str, Any]) -> bool:
    """Whether a copy brings a tensor of the device to the host, where tensors have values."""
    device = kwargs.get("device")
    return device is not None and device.type == "cpu" and tensor.fake_device.type != "cpu"


def _holds_values(args: tuple[Any, ...]) -> bool:
    """Whether what is copied, the last of a copy's tensors, lies on the host."""
    source = [argument for argument in args[:2] if isinstance(argument, torch.Tensor)][-1]
    return not isinstance(source, FakeTensor)


def _has_sparse(args: tuple[Any, ...]) -> bool:
    return any(isinstance(argument, torch.Tensor) and argument.layout is not torch.strided for argument in args)


def _size_bytes(buffer: Buffer) -> int:
    return buffer.size_bytes if isinstance(buffer, Computed) else buffer


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
