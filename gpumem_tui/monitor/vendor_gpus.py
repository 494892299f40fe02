"""The GPUs of one vendor: its driver and a reader for each GPU that the driver lists, tended by one crew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.backend import Vendor
from gpumem_tui.monitor.driver import Driver
from gpumem_tui.monitor.gpu_reader import GpuReader, Hosts, Roster, have_moved, not_returned
from gpumem_tui.monitor.snapshot import STARTING, DriverReading, GpuReading, HostReading
from gpumem_tui.monitor.threads import Crew, Worker

_LONGEST_BACK_OFF_S = 10.0
STARTS_WITHIN_S = 30.0
"""A driver that takes longer does not start; until then it is starting, which alarms nobody."""


class VendorGpus:
    """The GPUs of one vendor that a sampler watches; all but the workers' jobs is for the sampler's thread.

    Args:
        proc: the folder of the kernel's own files, ``/proc``.
        slow_every: in how many passes the slow values are read once.
        tell: called when a worker is done.

    Attributes:
        readers: by the driver's index.
        crew: makes all calls of the driver.
    """

    def __init__(
        self, vendor: Vendor, proc: Path, interval_s: float, slow_every: int, tell: Callable[[], None]
    ) -> None:
        self.vendor = vendor
        self.driver = Driver(vendor, proc)
        self.readers: dict[int, GpuReader] = {}
        self.crew = Crew("gpu-driver")
        self.worker = Worker(self.driver.tend, tell, self.crew)
        self._proc = proc
        self._interval_s = interval_s
        self._slow_every = slow_every
        self._tell = tell
        self._roster = Roster(vendor.brand)
        self._former_calls: Counter[str] = Counter()
        self._adopted: tuple[int, int] | None = None
        self._retries = 0
        self._start_at = self._count_at = 0.0

    @property
    def is_settled(self) -> bool:
        """Return whether the search for a driver has ended."""
        return self.worker.is_idle and self.driver.status.starts > 0

    def tend(self) -> bool:
        """Have the driver started, restarted, or its GPUs counted, if it is time for that; return whether it is."""
        if not self.worker.is_idle:
            return False
        now = monotonic()
        healthy = any(not each.raw.lost for each in self.readers.values()) or self._has_just_started
        self._retries = 0 if healthy else self._retries
        count_due = now >= self._count_at
        anew = not self.driver.runs or not healthy or (count_due and self.driver.sees_other_gpus)
        if anew and now >= self._start_at and all(each.worker.is_idle for each in self.readers.values()):
            self._start_at = now + min(_LONGEST_BACK_OFF_S, self._interval_s * 2**self._retries)
            self._retries += 1
            self.driver.give_up()
        elif not (self.driver.runs and count_due):
            return False
        self._count_at = now + self._interval_s * self._slow_every
        self.worker.ask()
        return True

    @property
    def _has_just_started(self) -> bool:
        """Return whether the driver lists GPUs that nobody has been asked to read yet."""
        return not self.readers and bool(self.driver.status.gpu_count)

    def ask(self) -> None:
        """Have every GPU read that is not being read still; of a driver that does not run, none."""
        driver = self.driver.status
        if driver.gpu_count is None:
            return
        self._adopt(driver.starts, driver.gpu_count)
        for reader in self.readers.values():
            reader.ask()

    def sort_out(self) -> None:
        """Let go of readers whose GPU is not listed any more, and notice where GPUs have new indices."""
        if not self.driver.runs:
            return
        self._drop([index for index, each in self.readers.items() if each.absent and each.worker.is_idle])
        if have_moved(self.readers.values()):
            self._count_at = 0.0
            for reader in self.readers.values():
                reader.look_again()

    def _adopt(self, starts: int, count: int) -> None:
        """Keep one reader for each index that the driver has; those that are there find out whose index it is now."""
        if (starts, count) != self._adopted:
            self._adopted = (starts, count)
            for reader in self.readers.values():
                reader.look_again()
        for index in range(count):
            if index not in self.readers:
                backend = self.vendor.open(self._proc)
                self.readers[index] = GpuReader(index, backend, self._slow_every, self._tell, self.crew)

    def _drop(self, indices: Iterable[int]) -> None:
        for index in indices:
            reader = self.readers.pop(index)
            self._former_calls.update(reader.backend.calls)

    # ---- what it puts into a snapshot

    def readings(self, base: int, hosts: Hosts, host: HostReading) -> tuple[GpuReading, ...]:
        """Return every GPU, numbered from `base` on."""
        return self._roster.readings(self.readers.values(), hosts, host, base=base, runs=self.driver.runs)

    def driver_reading(self) -> DriverReading:
        """Return the state of the driver."""
        status, backend, vendor = self.driver.status, self.driver.backend, self.vendor
        waited = backend.in_progress() if backend and not self.driver.runs else None
        unread = self.worker.error
        if waited:
            function, seconds = waited
            is_slow = (
                seconds < STARTS_WITHIN_S
            )  # initializing eight GPUs takes a driver without persistence mode seconds
            unread = (
                f"the {vendor.driver} {STARTING} ({seconds:.0f} s)"
                if is_slow
                else f"the {vendor.driver} does not start: {not_returned(function, seconds)}"
            )
        return DriverReading(
            vendor=vendor.brand,
            driver_version=Unknown(unread) if unread else status.driver_version,
            runtime=vendor.runtime,
            runtime_version=Unknown(unread) if unread else status.runtime_version,
            problem=unread or status.problem,
            calls=self._calls(),
        )

    def _calls(self) -> Counter[str]:
        """Count the calls of its library so far."""
        total = Counter(self._former_calls)
        for backend in (*(each.backend for each in self.readers.values()), self.driver.backend):
            if backend is not None:
                total.update(backend.calls)
        return total
