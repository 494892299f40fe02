"""The state of the machine's GPUs at one moment: immutable values that the sampler makes and everyone else reads.

Each reading is a value or an `Unknown` with its reason. Nothing here reads a driver, a clock or the file system.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Protocol

from msgspec import Struct

from gpumem_tui.ledger import Ledger
from gpumem_tui.memory import Unknown, Value
from gpumem_tui.monitor.readings import Reading, Telemetry

NOT_LOOKED_UP_YET = Unknown("not looked up yet")
"""Still to come, of the operating system."""

ON_CPU = "cpu"
"""A probe's name of host memory."""

USUAL_RUNTIME = "CUDA"
"""The runtime of a snapshot's `cuda_version` unless it names another."""


HOLDERS = "processes of other containers or users, a display, or the driver"
"""Who holds memory that no listed process accounts for, without further facts."""

NO_LEDGER = Unknown("not made yet")
"""The ledger of a device before it is made of its memory and processes."""


WHOSE = ("vendor", "vendor_index", "runtime_index", "partition")
"""Fields of a GPU that its JSON leaves out when empty; an older version never writes them."""


class DeviceState(Enum):
    """Whether a device answers. The value is the key used in JSON."""

    OK = "ok"
    STALE = "stale"
    """A call has not returned: the last readings are shown with their age."""
    LOST = "lost"
    """It was there, or the driver counts it, but it does not answer."""


class ProcessKind(Enum):
    """The kind of work a process does on a GPU, as the driver lists it. The value is what the screen shows."""

    COMPUTE = "C"
    GRAPHICS = "G"
    BOTH = "C+G"


class HostProcess(Struct, frozen=True):
    """A process as the operating system knows it.

    Attributes:
        start_time_s: seconds since the epoch; with the pid it names one process for ever.
        cpu_percent: of one core, since the last look.
        container: a short hint ("docker 3f2a91", "pod x", "slurm 1234"), empty outside any.
        container_id: the first 12 digits of its container's id, as ``docker ps`` prints them; empty outside any.
        pod_uid: Kubernetes' ``metadata.uid`` of its pod; empty outside any.
        slurm_job: the number of its Slurm job; empty outside any.
    """

    pid: int
    parent_pid: int
    user: str
    name: str
    command: str
    start_time_s: float
    cpu_percent: Reading[float]
    resident_bytes: Value
    container: str = ""
    container_id: str = ""
    pod_uid: str = ""
    slurm_job: str = ""


class GpuProcess(Struct, frozen=True):
    """One process's share of one GPU (or of one MIG instance).

    Attributes:
        pid: as the driver reports it.
        host: the process of that pid here, or why it cannot be told which one it is.
        used_bytes: the memory it holds on the device.
        sm_percent: share of the streaming multiprocessors over the last sample period.
        instance: the MIG instance it runs in, by its UUID; empty without MIG.
    """

    pid: int
    kind: ProcessKind
    used_bytes: Value
    sm_percent: Reading[int]
    host: Reading[HostProcess]
    instance: str = ""


class Memory(Struct, frozen=True):
    """A device's memory as the driver counts it.

    Attributes:
        reserved_bytes: the driver's own; unknown before driver 510, which counts it as used.
        used_bytes: without the driver's reserve if known.
    """

    total_bytes: int
    reserved_bytes: Value
    used_bytes: int
    free_bytes: int

    @property
    def used_percent(self) -> float:
        """Return what is in use of what programs can have, which the driver's reserve is no part of."""
        size_bytes = self.used_bytes + self.free_bytes
        return 100 * self.used_bytes / size_bytes if size_bytes else 0.0

    @property
    def shown_percent(self) -> int:
        """Return it as it is written everywhere: 100 only where nothing is free."""
        return min(round(self.used_percent), 99) if self.free_bytes else round(self.used_percent)

    @classmethod
    def together(cls, parts: Sequence[Memory]) -> Memory:
        """Return the sum of several; the reserve is unknown where one is."""
        reserved = [part.reserved_bytes for part in parts]
        unread = next((each for each in reserved if isinstance(each, Unknown)), None)
        return cls(
            total_bytes=sum(part.total_bytes for part in parts),
            reserved_bytes=unread or sum(each for each in reserved if isinstance(each, int)),
            used_bytes=sum(part.used_bytes for part in parts),
            free_bytes=sum(part.free_bytes for part in parts),
        )


class Instance(Struct, frozen=True):
    """One MIG instance, read through its own handle."""

    index: int
    uuid: str
    name: str
    memory: Reading[Memory]
    processes: Reading[tuple[GpuProcess, ...]]
    ledger: Reading[Ledger[GpuProcess]] = NO_LEDGER


class GpuReading(Struct, frozen=True, kw_only=True):
    """One GPU at one moment: what it holds, and each entry of the table of readings.

    Attributes:
        index: the driver's, where GPUs of a second vendor are counted on from the first's; a lost GPU keeps it, even if
            another has it by now.
        vendor: whose it is ("NVIDIA"); empty where a machine with an older version of the program does not say.
        vendor_index: the number that its vendor's tool gives it, where that is not `index`.
        runtime_index: the number that its runtime gives it, where that is not the vendor's tool's.
        partition: how the GPU is divided that it is a part of, and which part ("CPX/NPS4 3"); empty for a whole one.
        uuid: names the GPU for ever; "unknown-1" for the one at index 1 that has not answered once.
        state, state_reason: the state of the device, and why ("DeviceGetPowerUsage has not returned for 4 s").
        age_s: how old the readings are when the snapshot is made.
        unified: an integrated GPU whose memory is the host's.
        processes: unknown where the list could not be read: never an empty list then. In MIG mode, those of all
            instances.
        ledger: driver reserved, each process (largest first), unaccounted, free; unknown where the memory is.
        holders: by whom what no process accounts for may be held.
        instances: MIG; empty where it is off or not supported.
    """

    telemetry: Telemetry = Telemetry()
    index: int
    uuid: str
    name: str
    state: DeviceState
    state_reason: str
    age_s: float
    memory: Reading[Memory]
    processes: Reading[tuple[GpuProcess, ...]]
    compute_capability: Reading[tuple[int, int]]
    ledger: Reading[Ledger[GpuProcess]] = NO_LEDGER
    holders: str = HOLDERS
    bus_id: str = ""
    vendor: str = ""
    vendor_index: int | None = None
    runtime_index: int | None = None
    partition: str = ""
    unified: bool = False
    mig: bool = False
    instances: tuple[Instance, ...] = ()

    @property
    def full_name(self) -> str:
        """Return its name, with how it is divided where it is a part ("AMD Instinct MI300X CPX/NPS4 3")."""
        return f"{self.name} {self.partition}".rstrip()

    @property
    def number(self) -> int:
        """Return the number by which its runtime's variable names it, such as CUDA_VISIBLE_DEVICES."""
        numbers = (self.runtime_index, self.vendor_index, self.index)
        return next(number for number in numbers if number is not None)

    @property
    def all_processes(self) -> tuple[GpuProcess, ...]:
        """Return its processes and those of its instances, as far as their lists could be read, each once."""
        if not self.instances:
            return () if isinstance(self.processes, Unknown) else self.processes
        lists = [self.processes, *(instance.processes for instance in self.instances)]
        known = (process for listed in lists if not isinstance(listed, Unknown) for process in listed)
        return tuple({(process.pid, process.instance): process for process in known}.values())

    @property
    def visible_memory(self) -> Reading[Memory]:
        """Return its memory; of a divided GPU that this user may not read as a whole, its instances' together."""
        parts = [each.memory for each in self.instances if not isinstance(each.memory, Unknown)]
        if not isinstance(self.memory, Unknown) or not parts or len(parts) < len(self.instances):
            return self.memory
        return Memory.together(parts)


class UnlistedProcess(Struct, frozen=True):
    """A process that trains, by its probe, and that the driver lists on no GPU.

    Attributes:
        device: its own name of where it trains: "cpu", "cuda:1".
        gpu_uuid: the GPU or MIG instance that this is; empty for host memory, or where it cannot be told.
    """

    pid: int
    device: str
    host: Reading[HostProcess]
    gpu_uuid: str = ""

    @property
    def place(self) -> tuple[str, int]:
        """Return what names it among all that probes say: where it trains, and its pid."""
        return self.gpu_uuid or self.device, self.pid

    @property
    def process(self) -> GpuProcess:
        """Return it as one of a GPU's list, of which the driver tells nothing."""
        why = Unknown("it trains on the CPU" if self.device == ON_CPU else "the driver does not list it")
        return GpuProcess(self.pid, ProcessKind.COMPUTE, why, why, self.host)


class HostReading(Struct, frozen=True):
    """The machine around the GPUs."""

    name: str
    cpu_percent: Reading[float]
    memory_used_bytes: Value
    memory_total_bytes: Value


STARTING = "is starting"
"""Is in the problem of a driver that has not started yet, and may still: nothing is wrong."""


class DriverReading(Struct, frozen=True):
    """The name and version of a vendor's driver, as it gives them.

    Attributes:
        vendor: whose ("NVIDIA").
        driver_version, runtime_version: as the driver reports; unknown with the remedy while it does not run.
        runtime: what `runtime_version` is a version of ("CUDA").
        problem: why none of its GPUs can be watched, and how to fix it; empty otherwise.
        calls: calls of its library made so far, by function; none of another machine's.
    """

    vendor: str
    driver_version: Reading[str]
    runtime: str
    runtime_version: Reading[str]
    problem: str
    calls: Mapping[str, int] = {}


class Snapshot(Struct, frozen=True):
    """Every GPU of the machine.

    Attributes:
        time_s: seconds since the epoch.
        driver_version, cuda_version: as the first driver that runs states; unknown with the remedy while none runs.
        problem: one line when no GPU can be watched (no driver, library mismatch, ...) or the program itself failed,
            with how to fix it; empty otherwise.
        calls: calls of the vendors' libraries made so far, by function: what watching costs.
        runtime: what `cuda_version` is a version of: what the vendor calls what programs are compiled for.
        drivers: those of this machine, in the order of their GPUs; empty where an older version of the program, or one
            on a machine with the usual one alone, does not say.
        unlisted: what trains here and is on no GPU's list, as far as probes were asked (`probes.with_unlisted`).
    """

    time_s: float
    driver_version: Reading[str]
    cuda_version: Reading[str]
    gpus: tuple[GpuReading, ...]
    host: HostReading
    problem: str = ""
    calls: Mapping[str, int] = {}
    runtime: str = USUAL_RUNTIME
    unlisted: tuple[UnlistedProcess, ...] = ()
    drivers: tuple[DriverReading, ...] = ()

    @property
    def versions(self) -> tuple[str, ...]:
        """Return the versions of each driver that runs and of its runtime, in words: "driver 550.54", "CUDA 12.4"."""
        running = [each for each in self.drivers if isinstance(each.driver_version, str)]
        named: list[tuple[str, Reading[str]]] = [("driver", self.driver_version), (self.runtime, self.cuda_version)]
        if len(running) > 1:
            pairs = (((f"{d.vendor} driver", d.driver_version), (d.runtime, d.runtime_version)) for d in running)
            named = [each for pair in pairs for each in pair]
        return tuple(f"{name} {version}" for name, version in named if isinstance(version, str))


class Source(Protocol):
    """A source of snapshots: the live sampler, or a recording that is played back."""

    @property
    def notice(self) -> str:
        """Return a few words on the source's state, to be shown; empty while there is nothing to say."""

    def start(self) -> None:
        """Begin; returns at once."""

    def latest(self) -> Snapshot | None:
        """Return the newest snapshot, None before the first; a new object each time something was read. Never waits."""

    def wait(self, after: Snapshot | None, timeout_s: float) -> Snapshot | None:
        """Return the first snapshot that is not `after`; None if none comes in time, or none ever again."""

    def subscribe(self, tell: Callable[[], None]) -> None:
        """Call `tell` after each new snapshot and at the end, from another thread; it must not wait."""

    def stop(self) -> None:
        """End; returns at once even if a driver call never comes back."""
