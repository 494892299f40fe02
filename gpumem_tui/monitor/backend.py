"""The interface of a vendor's library to the Monitor. A vendor is an implementation of `GpuBackend` and a `Vendor`.

A plug-in offers its `Vendor` as an entry point of the group ``gpumem_tui.vendors``; every backend passes the tests of
`tests/monitor/vendor_kit.py`. Each value is one, or an `Unknown` with the reason in a user's words. A `Fault` is for
what cannot be answered at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Literal, Protocol

from msgspec import Struct, structs

from gpumem_tui.memory import Unknown, Value
from gpumem_tui.monitor.readings import Reading, Telemetry
from gpumem_tui.monitor.snapshot import Memory
from gpumem_tui.text import without_escapes

NOT_CUDA = Unknown("not a CUDA device")


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
    """The library does not start: why in a few words, and how to fix it (empty where the reason has it).

    Attributes:
        no_driver: this machine has no driver of this vendor: another vendor's is looked for.
    """

    def __init__(self, reason: str, remedy: str = "", *, no_driver: bool = False) -> None:
        super().__init__(f"{reason}: {remedy}" if remedy else reason)
        self.reason = reason
        self.remedy = remedy
        self.no_driver = no_driver


class Identity(Struct, frozen=True):
    """The names of a GPU and its facts that never change.

    Attributes:
        compute_capability: (8, 0) for sm_80; only CUDA devices have one.
        integrated: its memory is the host's, as far as the vendor's tables tell.
        holds_virtual_machines: memory that no process accounts for may be theirs.
        partition: how the GPU is divided that this is a part of, and which part, as the vendor's tool calls it, where
            each part is a GPU of its own ("CPX/NPS4 3"); empty for a whole one.
        runtime_index: its number in the vendor's runtime, where that counts in another order than the driver.
    """

    uuid: str
    name: str
    bus_id: str = ""
    compute_capability: Reading[tuple[int, int]] = NOT_CUDA
    integrated: bool = False
    holds_virtual_machines: bool = False
    partition: str = ""
    runtime_index: Reading[int] | None = None

    def __post_init__(self) -> None:
        """Clean the names: a driver may say anything, and a terminal does what a name tells it."""
        for name in ("uuid", "name", "bus_id", "partition"):
            structs.force_setattr(self, name, without_escapes(getattr(self, name)))


class ListedProcess(Struct, frozen=True):
    """A process as the driver lists it."""

    pid: int
    used_bytes: Value


class MemoryHolder(Protocol):
    """A GPU, or a part that a GPU is divided into. Each method raises `Gone` where the GPU or the driver is lost."""

    def memory(self) -> Reading[Memory]:
        """Read its memory as the driver counts it."""

    def compute_processes(self) -> Reading[tuple[ListedProcess, ...]]:
        """List the processes that compute on it, clients of a sharing service included."""


class InstanceHandle(MemoryHolder, Protocol):
    """A part that a GPU is divided into (MIG). Handles of the same part are equal."""

    @property
    def index(self) -> int:
        """Return its number under the GPU, as the vendor's tool prints it."""

    @property
    def uuid(self) -> str:
        """Return its unique name, which never changes."""

    @property
    def name(self) -> str:
        """Return what the vendor calls it."""


class GpuHandle(MemoryHolder, Protocol):
    """A GPU, for the thread of the backend it comes from; good for one start of the driver."""

    @property
    def identity(self) -> Identity:
        """Return what was read of it once."""

    def graphics_processes(self) -> Reading[tuple[ListedProcess, ...]]:
        """List the processes that draw on it."""

    def process_percents(self) -> Reading[Mapping[int, int]]:
        """Read each process's share of the compute units since the last call; a pid that is missing computed nothing.

        A vendor that does not tell returns an `Unknown`.
        """

    def read(self, names: Collection[str]) -> Telemetry:
        """Read those of the table's readings whose names are asked for; what is left out counts as not supported."""

    def divided(self) -> Reading[bool]:
        """Read whether it is divided into instances (MIG) now."""

    def instances(self) -> tuple[InstanceHandle, ...]:
        """List the instances (MIG) that the GPU is divided into."""


class GpuBackend(Protocol):
    """A vendor's library for one thread. Other threads may read `calls` and `in_progress`."""

    @property
    def calls(self) -> Mapping[str, int]:
        """Count the calls made so far, by the library's function."""

    def in_progress(self) -> tuple[str, float] | None:
        """Return the call that has not returned, and for how many seconds."""

    def start(self) -> None:
        """Load the library and start it. Each success needs a `stop`.

        Raises:
            StartFault: it does not start.
        """

    def stop(self) -> None:
        """Let go of the library; nothing happens if it was not started."""

    def driver_version(self) -> Reading[str]:
        """Read the driver's version as the vendor's tool prints it."""

    def runtime_version(self) -> Reading[str]:
        """Read the newest version of the vendor's runtime (`Vendor.runtime`) that the driver runs, "12.4"."""

    def count(self) -> int:
        """Count the GPUs that the driver lists.

        Raises:
            Fault: it does not say.
        """

    def gpu(self, index: int) -> GpuHandle:
        """Return the GPU that the driver has at an index.

        Raises:
            NoSuchGpu: none exists.
            Fault: it does not answer.
        """

    def begin_pass(self) -> None:
        """Begin to collect what `check_answers` judges."""

    def check_answers(self) -> None:
        """Judge the calls since `begin_pass`.

        Raises:
            Gone: the driver answered nothing but errors.
        """

    def bus(self) -> frozenset[str]:
        """List the GPUs that the kernel has bound to the driver; the library may find new ones only when it starts."""


Market = Literal["consumer", "workstation", "datacenter"]


class Vendor(Struct, frozen=True, kw_only=True):
    """Whose GPUs, how to reach them, and the words for them on every screen.

    Attributes:
        brand: "NVIDIA"; `product_words` are what its products' names begin with, which short names leave out.
        driver: what a user calls the driver, "NVIDIA driver"; `library` its library, "NVML".
        runtime: what programs are compiled for, "CUDA"; `tool` what prints the driver's state, "nvidia-smi".
        visible: the variable that holds the indices of the GPUs that a program of this runtime sees.
        orders_by_speed: whether the runtime puts the fastest of different GPUs first, unlike the driver.
        torch_build: what is in the version of a torch built for this runtime ("+rocm"); empty for the usual build.
        open: makes a backend, for the thread that calls it; the argument is the folder of the kernel's own files,
            ``/proc``. It loads the vendor's library: not at a program's start.
        no_driver: how a snapshot's `problem` begins where this machine has no such driver, `not_loaded` where it is
            not loaded: there may be no GPU at all.
        no_gpu: what is wrong, and how to fix it, where the driver runs and lists no GPU.
        kernel_log: how to see what the driver wrote to the kernel's log, `faults_log` what it wrote about its GPUs.
        in_containers: how to give a container its GPUs.
        device_files: a pattern of the names in ``/dev`` that a program opens to use a GPU; `device_paths` what the
            paths of open files of such a program begin with, on every kind of machine.
        sharing_server: what the name of a process begins with that holds memory for others, and what is to be known
            of it.
        is_on_bus: whether a file system's ``sys`` and ``dev`` show a GPU of this vendor, driver or not.
        withheld: from a container's environment what it keeps back of the driver, and the remedy; empty for nothing.
        market: whom a product, by its name, is sold to.
    """

    brand: str
    product_words: tuple[str, ...]
    driver: str
    library: str
    runtime: str
    tool: str
    visible: str = "CUDA_VISIBLE_DEVICES"
    orders_by_speed: bool = False
    torch_build: str = ""
    open: Callable[[Path], GpuBackend]
    no_driver: str
    not_loaded: str
    no_gpu: str
    kernel_log: str = "`sudo dmesg`"
    faults_log: str = "`sudo dmesg`"
    in_containers: str = "start it with its GPUs"
    device_files: str
    device_paths: tuple[str, ...]
    sharing_server: tuple[str, str] = ("", "")
    is_on_bus: Callable[[Path], bool] = lambda _root: False
    withheld: Callable[[Mapping[str, str]], tuple[str, str]] = lambda _environ: ("", "")
    market: Callable[[str], Market] = lambda _name: "datacenter"
