"""Memory that the kernels of a simulated device take for themselves: scratch while they run, and workspaces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpumem_tui.memory import Bucket
from gpumem_tui.simulator.blocks import Block
from gpumem_tui.simulator.profile import CUBLAS_WORKSPACE, CUBLASLT_WORKSPACE
from gpumem_tui.simulator.rules import GivenBack, Taken
from gpumem_tui.simulator.scratch import MATRIX_PRODUCTS, is_assumed, scratch, takes_cublaslt
from gpumem_tui.simulator.storages import Storages, size_bytes_of
from gpumem_tui.step.phases import in_backward

if TYPE_CHECKING:
    from gpumem_tui.simulator.device import SimulatedGpu


class KernelMemory(Storages):
    """The part of `DeviceMode` that takes what kernels take.

    Attributes:
        assumed: how often operators were met whose scratch is not known, by name.
    """

    def __init__(self, device_type: str, gpu: SimulatedGpu) -> None:
        Storages.__init__(self, device_type, gpu)
        self.assumed: Counter[str] = Counter()
        self._workspaces: set[tuple[str, bool]] = set()

    def _use_scratch(self, func: Any, args: tuple[Any, ...], more: Sequence[Taken]) -> None:
        """What the kernel takes and gives back while it runs, and `more`; at its end, when its results exist too."""
        if is_assumed(func, args, self._gpu.gpu.compute_capability):
            self.assumed[func._opname] += 1
        taken: dict[int, tuple[int, Block | None]] = {}
        for position, buffer in enumerate((*scratch(func, args, self._gpu.profile), *more)):
            if isinstance(buffer, GivenBack):
                if buffer.position in taken:
                    self.free(*taken.pop(buffer.position))
            elif self._gpu.unlimited:
                taken[position] = self._allocate(buffer, bucket=Bucket.TEMPORARY)
            elif size := size_bytes_of(buffer):
                taken[position] = self._allocate(size, bucket=Bucket.TEMPORARY)
        if func._opname in MATRIX_PRODUCTS:
            self._take_workspaces(func, args)
        for allocation in reversed(taken.values()):  # as C++ ends the life of what a function holds
            self.free(*allocation)

    def _take_workspaces(self, func: Any, args: tuple[Any, ...]) -> None:
        """A thread's cuBLAS handle gets its workspace at the first product, once the result has its memory."""
        profile = self._gpu.profile
        self._take_workspace(CUBLAS_WORKSPACE, profile.cublas_workspace_bytes)
        if profile.cublaslt_workspace_bytes and takes_cublaslt(func, args):
            self._take_workspace(CUBLASLT_WORKSPACE, profile.cublaslt_workspace_bytes, profile.keeps_cublaslt_workspace)

    def _take_workspace(self, name: str, size_bytes: int, is_kept: bool = True) -> None:
        """One for the forward and one for the autograd thread, unless a product gives it back at its end."""
        key = name, in_backward()
        if key in self._workspaces or not size_bytes:
            return
        number, block = self._allocate(size_bytes, name, Bucket.TEMPORARY)
        if is_kept:
            self._workspaces.add(key)
        else:
            self.free(number, block)
