"""The driver as a whole: started, looked after, and started again when it was reloaded or came late."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.snapshot import Reading

if TYPE_CHECKING:
    from gpumem_tui.monitor.nvml import Caller


@dataclass(frozen=True)
class DriverStatus:
    """How the driver stands.

    Attributes:
        driver_version, cuda_version: unknown with the remedy while it does not run.
        gpu_count: how many GPUs it lists, lost ones included; None while it does not run.
        problem: why no GPU can be watched, and how to fix it; empty otherwise.
        starts: how often it was started: handles are good for one start.
    """

    driver_version: Reading[str]
    cuda_version: Reading[str]
    gpu_count: int | None
    problem: str
    starts: int = 0


class Driver:
    """NVML, for one thread.

    Args:
        proc: the folder of the kernel's own files, ``/proc``.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self.call: Caller | None = None
        self.status = _not_running("not started yet", 0)
        self._proc = proc
        self._on_the_bus: frozenset[str] = frozenset()

    @property
    def runs(self) -> bool:
        """NVML is started and answers."""
        return self.status.gpu_count is not None

    def tend(self) -> None:
        """Start it if it does not run, else count the GPUs again."""
        from gpumem_tui.monitor import nvml  # only here: it loads pynvml

        self.call = call = self.call or nvml.Caller()
        if self.runs:
            self._count(call)
        else:
            nvml.stop(call)
            self._start(call)

    def give_up(self) -> None:
        """Mark the driver as lost: the next `tend` starts NVML again."""
        self.status = _not_running("the NVIDIA driver is being started again", self.status.starts)

    @property
    def sees_other_gpus(self) -> bool:
        """The kernel has bound or let go of a GPU since NVML was started, which NVML itself finds only at its start."""
        return self._bus() != self._on_the_bus

    def _start(self, call: Caller) -> None:
        from gpumem_tui.monitor import fields, nvml

        self._on_the_bus = self._bus()
        starts = self.status.starts + 1
        try:
            nvml.start(call, self._proc)
            count = _count(call)
        except (nvml.StartFault, nvml.Fault) as fault:
            self.status = _not_running(str(fault), starts)
        else:
            driver_version, cuda_version = fields.driver_version(call), fields.cuda_version(call)
            self.status = DriverStatus(driver_version, cuda_version, count, _problem(count), starts)

    def _count(self, call: Caller) -> None:
        from gpumem_tui.monitor import nvml

        try:
            count = _count(call)
        except nvml.Gone:
            self.give_up()
        except nvml.Fault:
            return  # the GPUs that are known can still be read
        else:
            self.status = replace(self.status, gpu_count=count, problem=_problem(count))

    def _bus(self) -> frozenset[str]:
        folder = self._proc / "driver" / "nvidia" / "gpus"
        return frozenset(entry.name for entry in folder.iterdir()) if folder.is_dir() else frozenset()


def _count(call: Caller) -> int:
    return int(call("nvmlDeviceGetCount"))


def _problem(count: int) -> str:
    if count:
        return ""
    return "the NVIDIA driver runs, but lists no GPU: see `lspci | grep -i nvidia`; a container must be given its GPUs"


def _not_running(problem: str, starts: int) -> DriverStatus:
    return DriverStatus(Unknown(problem), Unknown(problem), None, problem, starts)
