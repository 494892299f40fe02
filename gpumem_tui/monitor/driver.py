"""The driver as a whole: started, checked, and started again when it was reloaded or loaded late."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor import vendors
from gpumem_tui.monitor.backend import Fault, Gone, GpuBackend, StartFault, Vendor
from gpumem_tui.monitor.readings import Reading


@dataclass(frozen=True)
class DriverStatus:
    """Return whether the driver runs, and if not, why.

    Attributes:
        driver_version, runtime_version: unknown with the remedy while it does not run.
        gpu_count: how many GPUs it lists, lost ones included; None while it does not run.
        problem: why no GPU can be watched, and how to fix it; empty otherwise.
        starts: how often it was started: handles are good for one start.
    """

    driver_version: Reading[str]
    runtime_version: Reading[str]
    gpu_count: int | None
    problem: str
    starts: int = 0


class Driver:
    """The driver and library of the vendor whose GPUs are here, for one thread.

    Args:
        first: the vendor that is asked first; those of plug-ins are where it has no driver.
        proc: the folder of the kernel's own files, ``/proc``.

    Attributes:
        vendor: the one that was started last, or tried first.
        backend: its library for this thread; None before the first `tend`.
    """

    def __init__(self, first: Vendor | None = None, proc: Path = Path("/proc")) -> None:
        self.vendor = self._first = first or vendors.vendor()
        self.backend: GpuBackend | None = None
        self.status = _not_running("not started yet", 0)
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
            self._start()

    def give_up(self) -> None:
        """Mark the driver as lost: the next `tend` starts it again."""
        self.status = _not_running(f"the {self.vendor.driver} is being started again", self.status.starts)

    @property
    def sees_other_gpus(self) -> bool:
        """Return whether the kernel has bound or let go of a GPU since the library was started."""
        return self.backend is not None and self.backend.bus() != self._on_the_bus

    def _start(self) -> None:
        """Start the first vendor that has a driver here; where none has, the problem is that of the first."""
        problems: list[str] = []
        for vendor, backend in self._backends():
            self.vendor, self.backend = vendor, backend
            self._on_the_bus = backend.bus()
            try:
                backend.start()
                count = backend.count()
            except StartFault as fault:
                problems.append(str(fault))
                if fault.no_driver:
                    continue
                problems = problems[-1:]
            except Fault as fault:
                problems = [str(fault)]
            else:
                vendors.choose(vendor)
                versions = backend.driver_version(), backend.runtime_version()
                self.status = DriverStatus(*versions, count, self._problem(count), self.status.starts + 1)
                return
            break
        else:
            if self.vendor is not self._first:
                self.vendor, self.backend = self._first, self._first.open(self._proc)
            problems = [problems[0], *vendors.plugged_in()[1]]
        self.status = _not_running("; ".join(problems), self.status.starts + 1)

    def _backends(self) -> Iterator[tuple[Vendor, GpuBackend]]:
        """Yield each vendor with its backend; of the one that was tried last it is open already."""
        assert self.backend is not None
        last = self.vendor, self.backend
        for vendor in vendors.candidates(self.vendor):
            yield last if vendor is last[0] else (vendor, vendor.open(self._proc))

    def _count_again(self, backend: GpuBackend) -> None:
        try:
            count = backend.count()
        except Gone:
            self.give_up()
        except Fault:
            return  # the GPUs that are known can still be read
        else:
            self.status = replace(self.status, gpu_count=count, problem=self._problem(count))

    def _problem(self, count: int) -> str:
        return "" if count else self.vendor.no_gpu


def _not_running(problem: str, starts: int) -> DriverStatus:
    return DriverStatus(Unknown(problem), Unknown(problem), None, problem, starts)
