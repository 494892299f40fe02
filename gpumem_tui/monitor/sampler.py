"""Snapshots of all GPUs, live, whatever the driver does.

One thread makes the snapshots and never calls the driver. Calls that may hang are made by workers, one for each GPU,
one for the driver as a whole and one for the host: at each interval they are asked to read, the healthy ones answer
within milliseconds, and those that do not are shown with what they read last and how old it is. (If a hung call holds a
lock inside the library, calls about other GPUs hang too, and all are marked stale; the snapshots go on.)
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from time import monotonic

from gpumem_tui.errors import own_error
from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.backend import Vendor
from gpumem_tui.monitor.driver import Driver
from gpumem_tui.monitor.gpu_reader import GpuReader, Roster, have_moved, not_returned
from gpumem_tui.monitor.readings import NOT_READ_YET, Reading
from gpumem_tui.monitor.snapshot import HostProcess, HostReading, Snapshot
from gpumem_tui.monitor.threads import LatestSnapshot, Worker

_PATIENCE_S = 0.1
"""How long a snapshot waits for GPUs that have not answered yet: they come with the next one."""
_FIRST_PATIENCE_S = 0.3
"""The same for the first one, which has no earlier readings to show."""
_SLOW_PATIENCE_S = 1.0
"""How long after the first one others follow, each as soon as more is known."""
_START_PATIENCE_S = 1.0
"""The same for starting the driver."""
_HOST_STUCK_AFTER_S = 2.0
_LONGEST_BACK_OFF_S = 10.0

Look = Callable[[Iterable[int]], Mapping[int, Reading[HostProcess]]]


class HostReader:
    """Reads what the operating system says of processes and load, for one thread.

    Args:
        look: finds the processes of pids; by default `processes.HostProcesses`.

    Attributes:
        pids: whom to look up at the next `read`.
        processes, reading: of the last one.
        looked_up: whom it looked for; None before the first.
    """

    def __init__(self, look: Look | None = None) -> None:
        self.pids: frozenset[int] = frozenset()
        self.processes: Mapping[int, Reading[HostProcess]] = {}
        self.looked_up: frozenset[int] | None = None
        self.reading = HostReading(socket.gethostname(), NOT_READ_YET, NOT_READ_YET, NOT_READ_YET)
        self._look = look
        self._reads = 0

    def read(self) -> None:
        """Look up the processes and read the machine's load."""
        import psutil  # only here: a fifth of the time until the first frame

        if self._look is None:
            from gpumem_tui.monitor.processes import HostProcesses

            self._look = HostProcesses().look
        pids = self.pids
        self.processes = self._look(pids)
        self.looked_up = pids
        cpu_percent = psutil.cpu_percent()  # since the last call; the first one has nothing to compare with
        memory = psutil.virtual_memory()
        self._reads += 1
        self.reading = HostReading(
            name=self.reading.name,
            cpu_percent=cpu_percent if self._reads > 1 else Unknown("not measured yet"),
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
        )


class Sampler(LatestSnapshot):
    """The live `snapshot.Source`.

    Args:
        interval_s: between snapshots, and between readings of memory, processes, utilization and power.
        slow_interval_s: between readings of what changes slowly or is dear to ask.
        look: finds the processes of pids; by default `processes.HostProcesses().look`.
        clock: the time of snapshots, in seconds since the epoch.
        proc: the folder of the kernel's own files, ``/proc``.
        vendor: whose driver is asked first; by default the built-in one.

    Attributes:
        notice: what else is to be said beside the snapshots, which say what is wrong with the GPUs.
    """

    def __init__(
        self,
        interval_s: float = 1.0,
        slow_interval_s: float = 5.0,
        look: Look | None = None,
        clock: Callable[[], float] = time.time,
        proc: Path = Path("/proc"),
        vendor: Vendor | None = None,
    ) -> None:
        super().__init__()
        self.notice = ""
        self._interval_s = interval_s
        self._slow_every = max(1, round(slow_interval_s / interval_s))
        self._clock = clock
        self._proc = proc
        self._driver = Driver(vendor, proc)
        self._host = HostReader(look)
        self._roster = Roster()
        self._readers: dict[int, GpuReader] = {}
        self._former_calls: Counter[str] = Counter()
        self._adopted: tuple[Vendor, int, int] | None = None
        self._retries = 0
        self._start_at = self._count_at = 0.0
        self._stopped = False
        self._progress = threading.Condition()

    # ---- what snapshot.Source promises

    def start(self) -> None:
        """Begin; returns at once."""
        threading.Thread(target=self._run, name="gpu-sampler", daemon=True).start()

    def stop(self) -> None:
        """End; returns at once. The driver's library stays started: to shut it down could hang."""
        self._stopped = True
        self._newest.end()
        self._tell()

    # ---- the thread that makes snapshots

    def _run(self) -> None:
        self._driver_worker = Worker("gpu-driver", self._driver.tend, self._tell)
        self._host_worker = Worker("gpu-host", self._host.read, self._tell)
        self._host_worker.ask()  # imports what it needs while the driver starts
        next_at = monotonic()
        first = True
        while not self._stopped:
            try:
                self._round(first)
            except Exception as error:  # noqa: BLE001  named on the screen; the next round may go well
                self._publish_error(own_error(error))
            first = False
            next_at = max(next_at + self._interval_s, monotonic())
            self._wait_for(lambda: self._stopped, next_at - monotonic())
        for worker in (self._driver_worker, self._host_worker, *(each.worker for each in self._readers.values())):
            worker.end()

    def _round(self, first: bool) -> None:
        """Have everything read that is due, and put it together."""
        self._tend_driver()
        self._poll_gpus()
        if self._host_worker.is_idle:
            self._host.pids = self._pids()
            self._host_worker.ask()
            self._wait_for(lambda: self._host_worker.is_idle, _PATIENCE_S)
        known = self._known()
        self._publish()
        if first and self._readers:
            self._follow_up(known)

    def _tell(self) -> None:
        with self._progress:
            self._progress.notify_all()

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float) -> None:
        with self._progress:
            self._progress.wait_for(lambda: self._stopped or condition(), max(0.0, timeout_s))

    def _tend_driver(self) -> None:
        """Have the driver started, restarted, or its GPUs counted, if it is time for that."""
        if not self._driver_worker.is_idle:
            return
        now = monotonic()
        healthy = any(not each.raw.lost for each in self._readers.values())
        self._retries = 0 if healthy else self._retries
        count_due = now >= self._count_at
        anew = not self._driver.runs or not healthy or (count_due and self._driver.sees_other_gpus)
        if anew and now >= self._start_at and all(each.worker.is_idle for each in self._readers.values()):
            self._start_at = now + min(_LONGEST_BACK_OFF_S, self._interval_s * 2**self._retries)
            self._retries += 1
            self._driver.give_up()
        elif not (self._driver.runs and count_due):
            return
        self._count_at = now + self._interval_s * self._slow_every
        self._driver_worker.ask()
        self._wait_for(lambda: self._driver_worker.is_idle, _PATIENCE_S if self._driver.runs else _START_PATIENCE_S)

    def _poll_gpus(self) -> None:
        """Have every GPU read that is not being read still."""
        driver = self._driver.status
        if driver.gpu_count is None:
            return
        self._adopt(self._driver.vendor, driver.starts, driver.gpu_count)
        for reader in self._readers.values():
            reader.worker.ask()
        patience_s = _PATIENCE_S if self.latest() else _FIRST_PATIENCE_S
        self._wait_for(lambda: all(each.is_fresh or each.is_stuck for each in self._readers.values()), patience_s)
        self._drop_absent()
        if have_moved(self._readers.values()):
            self._count_at = 0.0
            for reader in self._readers.values():
                reader.look_again()

    def _adopt(self, vendor: Vendor, starts: int, count: int) -> None:
        """Keep one reader for each index that the driver has; those that are there find out whose index it is now."""
        if (vendor, starts, count) != self._adopted:
            if self._adopted is not None and self._adopted[0] is not vendor:
                self._drop(tuple(self._readers))
            self._adopted = (vendor, starts, count)
            for reader in self._readers.values():
                reader.look_again()
        for index in range(count):
            if index not in self._readers:
                self._readers[index] = GpuReader(index, vendor.open(self._proc), self._slow_every, self._tell)

    def _drop_absent(self) -> None:
        self._drop([index for index, each in self._readers.items() if each.absent and each.worker.is_idle])

    def _drop(self, indices: Iterable[int]) -> None:
        for index in indices:
            reader = self._readers.pop(index)
            reader.worker.end()
            self._former_calls.update(reader.backend.calls)

    def _pids(self) -> frozenset[int]:
        return frozenset().union(*(each.raw.pids for each in self._readers.values()))

    def _known(self) -> tuple[bool, bool, bool]:
        """Return what is known: each GPU's memory and processes; who these processes are; what is slow to read."""
        readers = self._readers.values()
        return (
            all(each.is_fresh for each in readers),
            self._host_worker.is_idle and self._host.looked_up == self._pids(),
            all(each.worker.is_idle for each in readers),
        )

    def _follow_up(self, known: tuple[bool, bool, bool]) -> None:
        """Publish more snapshots after the first, which came early, as soon as more is known, until all is."""
        end_s = monotonic() + min(self._interval_s / 2, _SLOW_PATIENCE_S)
        while not all(known) and not self._stopped and monotonic() < end_s:
            if self._strangers_wait():
                self._host.pids = self._pids()
                self._host_worker.ask()
            before = known
            self._wait_for(lambda: self._strangers_wait() or self._known() != before, end_s - monotonic())  # noqa: B023
            known = self._known()
            if known != before:
                self._publish()
        if not all(known):
            self._publish()  # with what has not answered for so long

    def _strangers_wait(self) -> bool:
        """Return whether processes have been listed since the last ones were looked up."""
        return self._host_worker.is_idle and self._host.looked_up != self._pids()

    # ---- the snapshot

    def _publish(self) -> None:
        if self._stopped:
            return
        driver, vendor = self._driver.status, self._driver.vendor
        backend = self._driver.backend
        hung = backend.in_progress() if backend and not self._driver.runs else None
        error = self._driver_worker.error
        unread = f"the {vendor.driver} does not start: {not_returned(*hung)}" if hung else error
        host = self._host_reading()
        self._newest.put(
            Snapshot(
                time_s=self._clock(),
                driver_version=Unknown(unread) if unread else driver.driver_version,
                cuda_version=Unknown(unread) if unread else driver.runtime_version,
                gpus=self._roster.readings(
                    self._readers.values(), self._host.processes, host, runs=driver.gpu_count is not None
                ),
                host=host,
                problem=unread or driver.problem,
                calls=self._calls(),
                runtime=vendor.runtime,
            )
        )

    def _publish_error(self, error: str) -> None:
        """Publish the last snapshot again with an error of the program as its problem."""
        if self._stopped:
            return
        last = self.latest() or Snapshot(0.0, Unknown(error), Unknown(error), (), self._host.reading)
        self._newest.put(replace(last, time_s=self._clock(), problem=error))

    def _host_reading(self) -> HostReading:
        """Return the host without figures that are old.

        Its processes can hang too, in a file system that does not answer.
        """
        busy_s, error = self._host_worker.busy_s(), self._host_worker.error
        if busy_s < _HOST_STUCK_AFTER_S and not error:
            return self._host.reading
        stale = Unknown(error or f"stale {busy_s:.0f} s")
        return replace(self._host.reading, cpu_percent=stale, memory_used_bytes=stale)

    def _calls(self) -> dict[str, int]:
        total = Counter(self._former_calls)
        for backend in (*(each.backend for each in self._readers.values()), self._driver.backend):
            if backend is not None:
                total.update(backend.calls)
        return dict(total)
