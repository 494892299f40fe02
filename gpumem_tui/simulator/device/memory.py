"""The memory of the simulated device: a block for every storage that is alive, and kernels' scratch."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from types import FrameType
from typing import Any

import torch

from gpumem_tui.memory import Bucket
from gpumem_tui.simulator.allocator.blocks import Block
from gpumem_tui.simulator.allocator.caching import OutOfMemory
from gpumem_tui.simulator.allocator.contexts import CUBLAS, LIBRARY_OF
from gpumem_tui.simulator.allocator.profile import CUBLAS_WORKSPACE, CUBLASLT_WORKSPACE, HIPBLAS_WORKSPACE
from gpumem_tui.simulator.allocator.rules import Buffer, Computed, GivenBack, Made, Taken, size_bytes_of
from gpumem_tui.simulator.device import host
from gpumem_tui.simulator.device.base import DEVICE_TYPE, DeviceParts
from gpumem_tui.simulator.device.convolution import NAMES as CONVOLUTIONS
from gpumem_tui.simulator.device.convolution import is_by_cudnn, passes
from gpumem_tui.simulator.device.deferred import Deferred
from gpumem_tui.simulator.device.kernels import MADE, Evaluation, evaluation
from gpumem_tui.simulator.device.kinds import fake_device_of, is_without_data
from gpumem_tui.simulator.device.scratch import MAKING, MATRIX_PRODUCTS, is_assumed, scratch, takes_cublaslt
from gpumem_tui.simulator.device.streams import SimulatedStream
from gpumem_tui.simulator.device.taken import Uniform
from gpumem_tui.simulator.device.values import Unwritten
from gpumem_tui.step import GATHERED
from gpumem_tui.step.phases import in_backward
from gpumem_tui.step.sites import callers
from gpumem_tui.step.walking import local


class StorageRef(weakref.ref[torch.UntypedStorage]):
    """A live storage, what was allocated for it, which backward formula made it, and its values where known."""

    __slots__ = ("block", "key", "made_in", "number", "size_bytes", "values")

    key: int
    number: int
    block: Block
    size_bytes: int
    made_in: Evaluation | None
    values: torch.UntypedStorage | Uniform | Deferred | Unwritten | None


class DeviceMemory:
    """The live storages of a device, their allocations, and the scratch and workspaces of its kernels.

    Attributes:
        live: what we know about each live storage, by its address.
        operator: the operator at work, under whose name new allocations are recorded.
        rows: of the last tensor that was made; 0 of one without.
        assumed: how often operators were met whose scratch is not known, by name.
        columns_bytes: the most that a convolution without cuDNN took for its columns; `columns_line`: where.
    """

    def __init__(self, gpu: DeviceParts) -> None:
        self._gpu = gpu
        self._full: OutOfMemory | None = None
        self._workspaces: dict[tuple[str, bool], tuple[int, Block | None]] = {}
        self._tried: set[tuple[Hashable, bool]] = set()
        self.live: dict[int, StorageRef] = {}
        self._weights: set[int] = set()
        self._from_nothing: set[int] = set()
        """Numbers of allocations: weights that came from the host, and what no tensor went into, as random numbers."""

        self.operator = ""
        self.rows = 0
        self.assumed: Counter[str] = Counter()
        self.columns_bytes, self.columns_line = 0, ""

    def raise_if_full(self) -> None:
        """Raise the out-of-memory that backward met.

        An exception that crosses the autograd engine's stream guard ends the process when the guard belongs to a
        Python backend (`PythonDeviceGuard::exchangeStream`, torch 2.13), so backward runs to its end, costing nothing,
        and the error is raised where `backward()` returns.
        """
        if self._full is not None:
            error, self._full = self._full, None
            raise self._gpu.out_of_memory(error) from None

    # Storages

    def allocation_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the allocation that holds this tensor, None for a tensor elsewhere, or a sparse one."""
        if not is_here(tensor) or tensor.layout is not torch.strided:
            return None
        ref = self.live.get(tensor.untyped_storage()._cdata)
        return ref.number if ref is not None else None

    def has_lost(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor should lie on the device, and has no memory there: it had run out in backward."""
        mine = local(tensor)
        return is_here(mine) and mine.layout is torch.strided and bool(mine.numel()) and not self.allocation_of(mine)

    def made_in(self, tensor: torch.Tensor) -> Evaluation | None:
        """Return the backward formula that made a tensor's storage; None if that was not in backward."""
        ref = self.live.get(tensor.untyped_storage()._cdata)
        return ref.made_in if ref is not None else None

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage is on the device."""
        return storage._cdata in self.live

    def record_made(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Allocate for what an operator gave, as its kernel does; those in `MAKING` do as their scratch is taken."""
        name = func._opname
        if name in CONVOLUTIONS:
            self._record_convolution(func, args, result)
        elif name not in MAKING:
            made = MADE.get(func)
            self.record(result if made is None else made(args, result))

    def record(self, result: Any) -> None:
        """Allocate for every storage of an operator's results that is new on the device."""
        if isinstance(result, torch.Tensor):
            if is_here(result):
                self._record_storage(result.untyped_storage(), result)
            elif not is_without_data(result):
                result.zero_()  # copied from where there are no values
        elif isinstance(result, (list, tuple)):
            for item in result:
                self.record(item)

    def _record_convolution(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Allocate for each result of a convolution, and after it take what cuDNN works it out with.

        Where its benchmark is on, it first tries what a thread has not met yet, after which torch empties the cache
        (aten/src/ATen/native/cudnn/Conv_v8.cpp, `run_single_conv`; Conv_v7.cpp before torch 2.0).
        """
        gpu = self._gpu
        results = result if isinstance(result, tuple) else (result,)
        tries = torch.backends.cudnn.benchmark and not gpu.gpu.arch
        for one in () if _is_of_host(args) else passes(func._opname, args, result, gpu.profile):
            self.record(results[one.position])
            key = one.key, in_backward()  # each thread knows its own
            if one.tried is not None and tries and key not in self._tried:
                self._tried.add(key)
                self._take_for_a_moment(one.tried)
                gpu.allocator.empty_cache()
                gpu.recorder.empty_cache()
            if one.workspace is not None:
                self._take_for_a_moment(one.workspace)
            if one.columns_bytes:
                self._take_columns(one.columns_bytes)
        self.record(result)

    def _take_columns(self, size_bytes: int) -> None:
        """Take the columns of a convolution that goes by im2col for as long as it runs."""
        if size_bytes > self.columns_bytes:
            self.columns_bytes, self.columns_line = size_bytes, self._gpu.sites.calling_line()
        self.free(*self._allocate(size_bytes, "im2col columns", Bucket.TEMPORARY))

    def _take_for_a_moment(self, size: Computed) -> None:
        """Take what a kernel works with and give it back; a trace has it also where it is of no bytes as expected."""
        if self._gpu.unlimited or size.size_bytes:
            self.free(*self._allocate(size if self._gpu.unlimited else size.size_bytes, bucket=Bucket.TEMPORARY))

    def note_copy_from_host(self, tensor: torch.Tensor) -> None:
        """Take a copy that no module makes for data; the model's own tensors also have names."""
        number = self.allocation_of(tensor)
        if number and not self._gpu.sites.in_module:
            self._gpu.recorder.came_from_host(number)
            if host.is_moving_model():
                self._weights.add(number)

    def follow_data(self, func: Any, args: Iterable[Any], result: Any) -> None:
        """Note what is made of the program's data alone, outside of modules: with random numbers too, as flips are.

        Another write into such a tensor later makes it none.
        """
        in_module = self._gpu.sites.in_module
        if in_backward() or (in_module and not func._schema.is_mutable):
            return
        recorder = self._gpu.recorder
        given = {number for tensor in _tensors_among(args) if (number := self.allocation_of(tensor)) is not None}
        made = {number for tensor in _tensors_among((result,)) if (number := self.allocation_of(tensor)) is not None}
        data = {number for number in given if recorder.is_data(number)} - self._weights
        is_pure = all(number in data or number in self._from_nothing for number in given)
        if in_module or not is_pure:
            if (written := made & given) and func._schema.is_mutable:
                recorder.made_of_data -= written
            return
        (recorder.made_of_data if data else self._from_nothing).update(made - given)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Follow `storage.resize_`, with which FSDP takes and gives back its buffers."""
        self._tag_buffer(storage)
        self._record_storage(storage)
        self._tag_buffer(storage)

    def record_stream(self, tensor: torch.Tensor, stream: SimulatedStream) -> None:
        """Follow `Tensor.record_stream`."""
        number = self.allocation_of(local(tensor))
        if number:
            self._gpu.streams.record_use(number, stream.stream_id)

    def release(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage as released, though something still holds it."""
        ref = self.live.get(tensor.untyped_storage()._cdata)
        if ref is not None:
            self._release(ref)

    # Allocations

    def new_storage(self, size_bytes: int, source: int) -> torch.UntypedStorage:
        """Make a storage on the device, recorded as the allocation `source` once more."""
        return self.hold(size_bytes, *self.allocate_again(source))

    def hold(self, size_bytes: int, number: int, block: Block | None) -> torch.UntypedStorage:
        """Make a storage on the device that an allocation serves."""
        storage = torch.UntypedStorage(size_bytes, device="meta")
        self._hold(storage, number, block)
        return storage

    def block_of(self, storage: torch.UntypedStorage) -> Block | None:
        """Return the block that serves a storage; None where it holds no bytes."""
        ref = self.live.get(storage._cdata)
        return None if ref is None else ref.block

    def allocate_again(self, source: int, size: Buffer | None = None) -> tuple[int, Block | None]:
        """Make an allocation like number `source`, perhaps of another size; return its number and block."""
        recorder = self._gpu.recorder
        size_bytes = recorder.size_bytes(source) if size is None else size_bytes_of(size)
        block = self._take(size_bytes, recorder.stream_of(source))
        return (0, None) if self._full is not None else (recorder.allocate_again(source, size), block)

    def free(self, number: int, block: Block | None) -> None:
        """Release an allocation that belongs to no storage."""
        if block is not None:
            self._gpu.allocator.free(block)
        if number:
            self._gpu.recorder.release(number)

    # Kernels

    def use_scratch(self, func: Any, args: tuple[Any, ...], more: Sequence[Taken], result: Any) -> None:
        """Take what the kernel of an operator takes, and `more`, and give it back at its end, when its results exist.

        Also counts operators whose scratch is not known, and takes the workspaces of a thread's first product. An
        operator on tensors of the host, which may be without data as well, takes nothing of the device.
        """
        if _is_of_host(args):
            return
        gpu = self._gpu
        if is_assumed(func, args, gpu.gpu.compute_capability, gpu.gpu.arch):
            self.assumed[func._opname] += 1
        taken: dict[int, tuple[int, Block | None]] = {}
        for position, buffer in enumerate((*scratch(func, args, gpu.profile), *more)):
            if isinstance(buffer, Made):
                self.record(result if isinstance(result, torch.Tensor) else result[buffer.position])
            elif isinstance(buffer, GivenBack):
                if buffer.position in taken:
                    self.free(*taken.pop(buffer.position))
            elif gpu.unlimited:
                taken[position] = self._allocate(buffer, bucket=Bucket.TEMPORARY)
            elif size := size_bytes_of(buffer):
                taken[position] = self._allocate(size, bucket=Bucket.TEMPORARY)
        is_product = func._opname in MATRIX_PRODUCTS or (func._opname in CONVOLUTIONS and not is_by_cudnn())
        if not is_product and (library := LIBRARY_OF.get(func._opname)):
            gpu.load(library)
        if is_product:
            gpu.load(CUBLAS)
            profile = gpu.profile
            name = HIPBLAS_WORKSPACE if gpu.gpu.arch else CUBLAS_WORKSPACE
            self._take_workspace(name, profile.cublas_workspace_bytes)
            if profile.cublaslt_workspace_bytes and takes_cublaslt(func, args):
                self._take_workspace(
                    CUBLASLT_WORKSPACE,
                    profile.cublaslt_workspace_bytes,
                    profile.keeps_cublaslt_workspace,
                )
        for allocation in reversed(taken.values()):  # as C++ ends the life of what a function holds
            self.free(*allocation)

    def _take_workspace(self, name: str, size_bytes: int, is_kept: bool = True) -> None:
        """Take one for the forward and one for the autograd thread, unless a product gives it back at its end."""
        key = name, in_backward()
        if key in self._workspaces or not size_bytes:
            return
        number, block = self._allocate(size_bytes, name, Bucket.TEMPORARY)
        if is_kept:
            self._workspaces[key] = number, block
        else:
            self.free(number, block)

    @contextmanager
    def workspaces_of_its_own(self) -> Iterator[None]:
        """Give the workspaces of both threads back before the context, and those taken within at its end.

        As the graphs of `torch.compile(mode="reduce-overhead")` do, which take one from their own pool
        (`clear_cublas_manager` in torch/_inductor/cudagraph_trees.py).
        """
        self._give_workspaces_back()
        try:
            yield
        finally:
            self._give_workspaces_back()

    def _give_workspaces_back(self) -> None:
        for held in self._workspaces.values():
            self.free(*held)
        self._workspaces.clear()

    def _tag_buffer(self, storage: torch.UntypedStorage) -> None:
        ref = self.live.get(storage._cdata)
        if ref is not None and ref.number:
            is_gathered = any(_is_sharding(frame) for frame in islice(callers(sys._getframe(1)), _FRAMES_OF_RESIZE))
            self._gpu.recorder.tag(ref.number, Bucket.TEMPORARY, GATHERED if is_gathered else "")

    def _record_storage(self, storage: torch.UntypedStorage, made: torch.Tensor | None = None) -> None:
        key, size_bytes = storage._cdata, storage.nbytes()
        known = self.live.get(key)
        if known is not None and known.size_bytes == size_bytes:
            return
        if size_bytes == 0:
            if known is not None:
                self._release(known)
            return
        self.rows = made.shape[0] if made is not None and made.dim() > 1 else 0
        number, block = self._allocate(size_bytes)
        if known is not None:
            self._release(known)
        self._hold(storage, number, block)

    def _hold(self, storage: torch.UntypedStorage, number: int, block: Block | None) -> None:
        """Release the allocation when the storage is gone."""
        if block is None:
            return
        ref = StorageRef(storage, self._release)
        ref.key, ref.number, ref.block = storage._cdata, number, block
        ref.size_bytes, ref.made_in, ref.values = storage.nbytes(), evaluation(), None
        self.live[ref.key] = ref

    def _allocate(self, size: Buffer, operator: str = "", bucket: Bucket | None = None) -> tuple[int, Block | None]:
        """Make an allocation, and return its number and block.

        No block for no bytes, and neither number nor block once the device was found full in backward.
        """
        gpu = self._gpu
        stream = gpu.streams.current
        block = self._take(size_bytes_of(size), stream)
        if self._full is not None:
            return 0, None
        recomputed = in_backward() and torch.is_grad_enabled()
        site = gpu.sites.site(operator or self.operator)
        return gpu.recorder.allocate(size, recomputed, site, bucket, stream), block

    def _take(self, size_bytes: int, stream: int) -> Block | None:
        """Take a block of the allocator's; None for no bytes, and once the device was found full in backward."""
        if not size_bytes or self._full is not None:
            return None
        self._gpu.streams.complete()
        try:
            return self._gpu.allocator.malloc(size_bytes, stream)
        except OutOfMemory as error:
            if self._gpu.goes_beyond():
                return self._gpu.allocator.malloc(size_bytes, stream)
            self._gpu.recorder.cut()
            self._full = error
            if not in_backward():
                self.raise_if_full()
            return None

    def _release(self, ref: StorageRef) -> None:
        if self.live.get(ref.key) is ref:
            del self.live[ref.key]
            self._gpu.streams.free(ref.number, ref.block)


_FRAMES_OF_RESIZE = 8
"""From a storage's resizing up to the engine that asks for it, through torch's kinds of storages."""


def _is_sharding(frame: FrameType) -> bool:
    """Return whether code of FSDP's runs in a frame."""
    return str(frame.f_globals.get("__name__")).startswith(("torch.distributed.fsdp", "torch.distributed.utils"))


def _tensors_among(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (one for one in value if isinstance(one, torch.Tensor))


def _is_of_host(args: Iterable[Any]) -> bool:
    """Return whether an operator's tensors all lie on the host; of a list the first one counts."""
    firsts = [value[0] if isinstance(value, (list, tuple)) and value else value for value in args]
    tensors = [value for value in firsts if isinstance(value, torch.Tensor)]
    return bool(tensors) and not any(map(is_here, tensors))


def is_here(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the simulated device."""
    device = fake_device_of(tensor) or tensor.device
    return device.type == DEVICE_TYPE
