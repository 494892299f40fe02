"""What the Monitor asks of a vendor's library, whichever it is. A vendor is an implementation of `GpuBackend`.

Every value is one, or an `Unknown` with the reason in a user's words. What cannot be answered at all is a `Fault`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gpumem_tui.memory import Value
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.snapshot import Memory


class Fault(Exception):
    """A call failed. `reason`: what a user can make of it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Gone(Fault):
    """The GPU, or the driver under it, does not answer at all."""


class NoSuchGpu(Fault):
    """The driver has no GPU at this index any more."""


class StartFault(Exception):
    """The library does not start: why in a few words, and how to fix it (empty where the reason says so)."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(f"{reason}: {remedy}" if remedy else reason)
        self.reason = reason
        self.remedy = remedy


@dataclass(frozen=True)
class Identity:
    """What names a GPU, and what never changes of it.

    Attributes:
        compute_capability: (8, 0) for sm_80.
        integrated: its memory is the host's, as far as the vendor's tables tell.
        holds_virtual_machines: memory that no process accounts for may be theirs.
    """

    uuid: str
    name: str
    bus_id: str
    compute_capability: Reading[tuple[int, int]]
    integrated: bool
    holds_virtual_machines: bool


@dataclass(frozen=True)
class ListedProcess:
    """A process as the driver lists it."""

    pid: int
    used_bytes: Value


class MemoryHolder(Protocol):
    """A GPU, or a part that a GPU is divided into. Each method raises `Gone` where the GPU or the driver is lost."""

    def memory(self) -> Reading[Memory]:
        """Its memory as the driver counts it."""

    def compute_processes(self) -> Reading[tuple[ListedProcess, ...]]:
        """Those that compute on it, clients of a sharing service included."""


class InstanceHandle(MemoryHolder, Protocol):
    """A part that a GPU is divided into (MIG). Handles of the same part are equal."""

    @property
    def index(self) -> int:
        """Its number under the GPU, as the vendor's tool prints it."""

    @property
    def uuid(self) -> str:
        """Its unique name, which never changes."""

    @property
    def name(self) -> str:
        """As the vendor calls it."""


class GpuHandle(MemoryHolder, Protocol):
    """One GPU, for the thread of the backend it comes from; good for one start of the driver."""

    @property
    def identity(self) -> Identity:
        """Read once."""

    def graphics_processes(self) -> Reading[tuple[ListedProcess, ...]]:
        """Those that draw on it."""

    def sm_percents(self) -> Reading[Mapping[int, int]]:
        """Share of the multiprocessors by pid, since the last call; a pid that is missing computed nothing."""

    def read(self, names: Collection[str]) -> Mapping[str, Reading[Any]]:
        """Those of the table's readings that are asked for, by name. What the vendor has not may be left out."""

    def divided(self) -> Reading[bool]:
        """Whether it is divided into instances (MIG) now."""

    def instances(self) -> tuple[InstanceHandle, ...]:
        """Its instances."""


class GpuBackend(Protocol):
    """A vendor's library for one thread. Other threads may read `calls` and `in_progress`."""

    @property
    def calls(self) -> Mapping[str, int]:
        """Calls made so far, by the library's function."""

    def in_progress(self) -> tuple[str, float] | None:
        """The call that has not returned, and for how many seconds."""

    def start(self) -> None:
        """Load the library and start it. Each success needs a `stop`.

        Raises:
            StartFault: it does not start.
        """

    def stop(self) -> None:
        """Let go of the library; nothing happens if it was not started."""

    def driver_version(self) -> Reading[str]:
        """As the vendor's tool prints it."""

    def cuda_version(self) -> Reading[str]:
        """The newest CUDA version that the driver runs, "12.4"."""

    def count(self) -> int:
        """How many GPUs the driver lists.

        Raises:
            Fault: it does not say.
        """

    def gpu(self, index: int) -> GpuHandle:
        """The GPU that the driver has at an index.

        Raises:
            NoSuchGpu: there is none.
            Fault: it does not answer.
        """

    def begin_pass(self) -> None:
        """From here on `check_answers` counts."""

    def check_answers(self) -> None:
        """Look at the calls since `begin_pass`.

        Raises:
            Gone: the driver answered nothing but errors.
        """

    def bus(self) -> frozenset[str]:
        """The GPUs that the kernel has bound to the driver; the library may find new ones only when it starts."""


@dataclass(frozen=True)
class Vendor:
    """Whose GPUs, and how to reach them.

    Attributes:
        driver: what a user calls the driver: "NVIDIA driver".
        library: and its library: "NVML".
        no_gpu: what is wrong, and how to fix it, where the driver runs and lists no GPU.
        open: a backend, for the thread that calls it; the argument is the folder of the kernel's own files, ``/proc``.
            It loads the vendor's library: not at a program's start.
    """

    driver: str
    library: str
    no_gpu: str
    open: Callable[[Path], GpuBackend]
