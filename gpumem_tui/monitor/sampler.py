"""Snapshots of all GPUs, live, whatever the driver does.

One thread makes the snapshots and never calls the driver. Calls that may hang are made by workers, one for each GPU,
one for the driver as a whole and one for the host: at each interval they are asked to read, the healthy ones answer
within milliseconds, and those that do not are shown with what they read last and how old it is. (If a hung call holds a
lock inside the library, calls about other GPUs hang too, and all are marked stale; the snapshots go on.)
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.compose import pids_of
from gpumem_tui.monitor.driver import Driver
from gpumem_tui.monitor.host import HostReader, Look
from gpumem_tui.monitor.latest import LatestSnapshot
from gpumem_tui.monitor.poller import GpuPoller
from gpumem_tui.monitor.roster import Roster, WatchedDevice, have_moved, not_returned
from gpumem_tui.monitor.snapshot import HostReading, Snapshot
from gpumem_tui.monitor.vendors import VENDOR
from gpumem_tui.monitor.worker import Worker

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


class Sampler(LatestSnapshot):
    """The live `snapshot.Source`.

    Args:
        interval_s: between snapshots, and between readings of memory, processes, utilization and power.
        slow_interval_s: between readings of what changes slowly or is dear to ask.
        look: finds the processes of pids; by default `processes.HostProcesses().look`.
        clock: the time of snapshots, in seconds since the epoch.
        proc: the folder of the kernel's own files, ``/proc``.
    """

    def __init__(
        self,
        interval_s: float = 1.0,
        slow_interval_s: float = 5.0,
        look: Look | None = None,
        clock: Callable[[], float] = time.time,
        proc: Path = Path("/proc"),
    ) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._slow_every = max(1, round(slow_interval_s / interval_s))
        self._clock = clock
        self._proc = proc
        self._driver = Driver(VENDOR, proc)
        self._host = HostReader(look)
        self._roster = Roster()
        self._watched: dict[int, WatchedDevice] = {}
        self._former_calls: Counter[str] = Counter()
        self._adopted = (0, 0)
        self._retries = 0
        self._start_at = self._count_at = 0.0
        self._stopped = False
        self._progress = threading.Condition()

    # ---- what snapshot.Source promises

    notice = ""
    """What is wrong stands in the snapshots."""

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
            self._tend_driver()
            self._poll_gpus()
            self._look_up_processes()
            known = self._known()
            self._publish()
            if first and self._watched:
                self._follow_up(known)
            first = False
            next_at = max(next_at + self._interval_s, monotonic())
            self._wait_for(lambda: self._stopped, next_at - monotonic())
        for worker in (self._driver_worker, self._host_worker, *(w.worker for w in self._watched.values())):
            worker.end()

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
        healthy = any(not w.poller.raw.lost for w in self._watched.values())
        self._retries = 0 if healthy else self._retries
        count_due = now >= self._count_at
        anew = not self._driver.runs or not healthy or (count_due and self._driver.sees_other_gpus)
        if anew and now >= self._start_at and all(w.worker.is_idle for w in self._watched.values()):
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
        self._adopt(driver.starts, driver.gpu_count)
        for watched in self._watched.values():
            watched.worker.ask()
        patience_s = _PATIENCE_S if self.latest() else _FIRST_PATIENCE_S
        self._wait_for(lambda: all(w.is_fresh or w.is_stuck for w in self._watched.values()), patience_s)
        self._drop_absent()
        if have_moved(self._watched.values()):
            self._count_at = 0.0
            for watched in self._watched.values():
                watched.poller.look_again()

    def _adopt(self, starts: int, count: int) -> None:
        """One poller for each index that the driver has; those that are there find out whose index it is now."""
        if (starts, count) != self._adopted:
            self._adopted = (starts, count)
            for watched in self._watched.values():
                watched.poller.look_again()
        for index in range(count):
            if index not in self._watched:
                poller = GpuPoller(index, VENDOR.open(self._proc), self._slow_every, self._tell)
                self._watched[index] = WatchedDevice(poller, Worker(f"gpu-{index}", poller.read, self._tell))

    def _drop_absent(self) -> None:
        for index, watched in list(self._watched.items()):
            if watched.poller.absent and watched.worker.is_idle:
                watched.worker.end()
                self._former_calls.update(watched.poller.backend.calls)
                del self._watched[index]

    def _look_up_processes(self) -> None:
        if self._host_worker.is_idle:
            self._host.pids = self._pids()
            self._host_worker.ask()
            self._wait_for(lambda: self._host_worker.is_idle, _PATIENCE_S)

    def _pids(self) -> frozenset[int]:
        return pids_of([w.poller.raw for w in self._watched.values()])

    def _known(self) -> tuple[bool, bool, bool]:
        """What is known: each GPU's memory and processes; who these processes are; what is slow to read."""
        watched = self._watched.values()
        return (
            all(w.is_fresh for w in watched),
            self._host_worker.is_idle and self._host.looked_up == self._pids(),
            all(w.worker.is_idle for w in watched),
        )

    def _follow_up(self, known: tuple[bool, bool, bool]) -> None:
        """After the first snapshot, which came early, others as soon as more is known, until all is."""
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
        """Processes have been listed since the last ones were looked up."""
        return self._host_worker.is_idle and self._host.looked_up != self._pids()

    # ---- the snapshot

    def _publish(self) -> None:
        if self._stopped:
            return
        driver = self._driver.status
        backend = self._driver.backend
        hung = backend.in_progress() if backend and not self._driver.runs else None
        problem = f"the {VENDOR.driver} does not start: {not_returned(*hung)}" if hung else driver.problem
        host = self._host_reading()
        snapshot = Snapshot(
            time_s=self._clock(),
            driver_version=Unknown(problem) if hung else driver.driver_version,
            cuda_version=Unknown(problem) if hung else driver.cuda_version,
            gpus=self._roster.readings(
                self._watched.values(), self._host.processes, host, runs=driver.gpu_count is not None
            ),
            host=host,
            problem=problem,
            calls=self._calls(),
        )
        self._newest.put(snapshot)

    def _host_reading(self) -> HostReading:
        """Without figures that are old: the host's processes can hang too, in a file system that does not answer."""
        busy_s = self._host_worker.busy_s()
        if busy_s < _HOST_STUCK_AFTER_S:
            return self._host.reading
        stale = Unknown(f"stale {busy_s:.0f} s")
        return replace(self._host.reading, cpu_percent=stale, memory_used_bytes=stale)

    def _calls(self) -> dict[str, int]:
        backends = [w.poller.backend for w in self._watched.values()]
        if self._driver.backend:
            backends.append(self._driver.backend)
        total = Counter(self._former_calls)
        for backend in backends:
            total.update(backend.calls)
        return dict(total)
