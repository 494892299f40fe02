"""What lies on the simulated device: a block of the allocator for every storage that is alive."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gpumem_tui.memory import Bucket
from gpumem_tui.simulator.allocator import OutOfMemory
from gpumem_tui.simulator.blocks import Block
from gpumem_tui.simulator.engine import Evaluation, evaluation
from gpumem_tui.simulator.rules import Buffer, Computed
from gpumem_tui.simulator.streams import SimulatedStream
from gpumem_tui.simulator.values import Uniform
from gpumem_tui.step.phases import in_backward
from gpumem_tui.step.walking import local

if TYPE_CHECKING:
    from gpumem_tui.simulator.device import SimulatedGpu


class StorageRef(weakref.ref[torch.UntypedStorage]):
    """A live storage, what was allocated for it, which backward formula made it, and its values where known."""

    __slots__ = ("block", "key", "made_in", "number", "size_bytes", "values")

    key: int
    number: int
    block: Block
    size_bytes: int
    made_in: Evaluation | None
    values: torch.UntypedStorage | Uniform | None


class Storages:
    """The live storages of a device and their allocations; the part of `DeviceMode` that speaks to the allocator."""

    def __init__(self, device_type: str, gpu: SimulatedGpu) -> None:
        self._device_type = device_type
        self._gpu = gpu
        self._live: dict[int, StorageRef] = {}
        self._full: OutOfMemory | None = None
        self._operator = ""

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
        """The number of the allocation that holds this tensor, None for a tensor elsewhere, or a sparse one."""
        if not self._is_here(tensor) or tensor.layout is not torch.strided:
            return None
        ref = self._live.get(tensor.untyped_storage()._cdata)
        return ref.number if ref is not None else None

    def made_in(self, tensor: torch.Tensor) -> Evaluation | None:
        """The backward formula that made a tensor's storage; None if that was not in backward."""
        ref = self._live.get(tensor.untyped_storage()._cdata)
        return ref.made_in if ref is not None else None

    def new_storage(self, size_bytes: int, source: int) -> torch.UntypedStorage:
        """A storage on the device, recorded as the allocation `source` once more."""
        storage = torch.UntypedStorage(size_bytes, device="meta")
        number, block = self.allocate_again(source)
        self._hold(storage, number, block)
        return storage

    def allocate_again(self, source: int) -> tuple[int, Block | None]:
        """An allocation as number `source` was: its number and block (see `_allocate`)."""
        recorder = self._gpu.recorder
        block = self._take(recorder.size_bytes(source), recorder.stream_of(source))
        return (0, None) if self._full is not None else (recorder.allocate_again(source), block)

    def free(self, number: int, block: Block | None) -> None:
        """Release an allocation that belongs to no storage."""
        if block is not None:
            self._gpu.allocator.free(block)
        if number:
            self._gpu.recorder.release(number)

    def release(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage as released, though something still holds it."""
        ref = self._live.get(tensor.untyped_storage()._cdata)
        if ref is not None:
            self._release(ref)

    def record_stream(self, tensor: torch.Tensor, stream: SimulatedStream) -> None:
        """`Tensor.record_stream`."""
        number = self.allocation_of(local(tensor))
        if number:
            self._gpu.streams.record_use(number, stream.stream_id)

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

    def _is_here(self, tensor: torch.Tensor) -> bool:
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        return device.type == self._device_type

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
        ref = StorageRef(storage, self._release)
        ref.key, ref.number, ref.block = storage._cdata, number, block
        ref.size_bytes, ref.made_in, ref.values = storage.nbytes(), evaluation(), None
        self._live[ref.key] = ref

    def _allocate(self, size: Buffer, operator: str = "", bucket: Bucket | None = None) -> tuple[int, Block | None]:
        """The number and the block of a new allocation.

        No block for no bytes, and neither number nor block once the device was found full in backward.
        """
        stream = self._gpu.streams.current
        block = self._take(size_bytes_of(size), stream)
        if self._full is not None:
            return 0, None
        recomputed = in_backward() and torch.is_grad_enabled()
        site = self._gpu.sites.site(operator or self._operator)
        return self._gpu.recorder.allocate(size, recomputed, site, bucket, stream), block

    def _take(self, size_bytes: int, stream: int) -> Block | None:
        """A block of the allocator's; None for no bytes, and once the device was found full in backward."""
        if not size_bytes or self._full is not None:
            return None
        self._gpu.streams.complete()
        try:
            return self._gpu.allocator.malloc(size_bytes, stream)
        except OutOfMemory as error:
            self._gpu.recorder.cut()
            self._full = error
            if not in_backward():
                self.raise_if_full()
            return None

    def _release(self, ref: StorageRef) -> None:
        if self._live.get(ref.key) is ref:
            del self._live[ref.key]
            self._gpu.streams.free(ref.number, ref.block)


def size_bytes_of(buffer: Buffer) -> int:
    return buffer.size_bytes if isinstance(buffer, Computed) else buffer
