"""The driver as a whole: started, checked, and started again when it was reloaded or loaded late."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct, structs

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.backend import Fault, Gone, GpuBackend, StartFault, Vendor
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.text import without_escapes


class DriverStatus(Struct, frozen=True):
    """Return whether the driver runs, and if not, why.

    Attributes:
        driver_version, runtime_version: unknown with the remedy while it does not run.
        gpu_count: how many GPUs it lists, lost ones included; None while it does not run.
        problem: why no GPU can be watched, and how to fix it; empty otherwise.
        starts: how often it was started: handles are good for one start.
        absent: this machine has no driver of the vendor.
    """

    driver_version: Reading[str]
    runtime_version: Reading[str]
    gpu_count: int | None
    problem: str
    starts: int = 0
    absent: bool = False


class Driver:
    """The driver and library of a vendor, for one thread.

    Args:
        proc: the folder of the kernel's own files, ``/proc``.

    Attributes:
        backend: its library for this thread; None before the first `tend`.
    """

    def __init__(self, vendor: Vendor, proc: Path = Path("/proc")) -> None:
        self.vendor = vendor
        self.backend: GpuBackend | None = None
        self.status = _not_running(f"the {vendor.driver} is starting", 0)
        self._proc = proc
        self._on_the_bus: frozenset[str] = frozenset()

    @property
    def runs(self) -> bool:
        """Return whether the library is started and answers."""
        return self.status.gpu_count is not None

    def tend(self) -> None:
        """Start it if it does not run, else count the GPUs again."""
        if self.backend is None:
            self.backend = self.vendor.open(self._proc)
        if self.runs:
            self._count_again(self.backend)
        else:
            self.backend.stop()
            self._start(self.backend)

    def give_up(self) -> None:
        """Mark the driver as lost: the next `tend` starts it again."""
        if self.runs:
            self.status = _not_running(f"the {self.vendor.driver} is being started again", self.status.starts)

    @property
    def sees_other_gpus(self) -> bool:
        """Return whether the kernel has bound or let go of a GPU since the library was started."""
        return self.backend is not None and self.backend.bus() != self._on_the_bus

    def _start(self, backend: GpuBackend) -> None:
        starts = self.status.starts + 1
        self._on_the_bus = backend.bus()
        try:
            backend.start()
            count = backend.count()
        except StartFault as fault:
            self.status = _not_running(str(fault), starts, absent=fault.no_driver)
        except Fault as fault:
            self.status = _not_running(str(fault), starts)
        else:
            self.status = DriverStatus(
                driver_version=_cleaned(backend.driver_version()),
                runtime_version=_cleaned(backend.runtime_version()),
                gpu_count=count,
                problem=self._problem(count),
                starts=starts,
            )

    def _count_again(self, backend: GpuBackend) -> None:
        try:
            count = backend.count()
        except Gone:
            self.give_up()
        except Fault:
            return  # the GPUs known can still be read
        else:
            self.status = structs.replace(self.status, gpu_count=count, problem=self._problem(count))

    def _problem(self, count: int) -> str:
        return "" if count else self.vendor.no_gpu


def _cleaned(version: Reading[str]) -> Reading[str]:
    return version if isinstance(version, Unknown) else without_escapes(version)


def _not_running(problem: str, starts: int, *, absent: bool = False) -> DriverStatus:
    return DriverStatus(
        driver_version=Unknown(problem),
        runtime_version=Unknown(problem),
        gpu_count=None,
        problem=problem,
        starts=starts,
        absent=absent,
    )
