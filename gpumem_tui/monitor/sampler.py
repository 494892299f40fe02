"""Snapshots of all GPUs, live, regardless of the driver.

One thread makes the snapshots and never calls the driver. Calls that may hang are made by crews, one for each driver
and one for the host: at each interval they are asked to read all GPUs, the healthy ones answer within milliseconds, and
those that do not are shown with what they read last and how old it is, while another thread of the crew continues with
the others. (If a hung call holds a lock inside the library, calls about other GPUs hang too, and all are marked stale;
the snapshots continue.)
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from time import monotonic

from msgspec.structs import replace

from gpumem_tui.errors import own_error
from gpumem_tui.memory import Unknown
from gpumem_tui.monitor import vendors
from gpumem_tui.monitor.backend import Vendor
from gpumem_tui.monitor.gpu_reader import STUCK_AFTER_S, GpuReader
from gpumem_tui.monitor.readings import NOT_READ_YET, Reading
from gpumem_tui.monitor.snapshot import DriverReading, GpuReading, HostProcess, HostReading, Snapshot
from gpumem_tui.monitor.threads import Crew, LatestSnapshot, Worker
from gpumem_tui.monitor.vendor_gpus import VendorGpus
from gpumem_tui.system import host_name

_PATIENCE_S = 0.1
"""How long a snapshot waits for GPUs that have not answered yet: they come with the next one ..."""
_LONG_INTERVAL_S = 2.0
"""... unless that comes only after so long: then it waits for each whole GPU, or until this is stuck."""
_FIRST_PATIENCE_S = 0.3
"""The limit for the first one, which has no earlier readings to show."""
_SLOW_PATIENCE_S = 1.0
"""How long after the first one others follow, each as soon as there is more."""
_START_PATIENCE_S = 1.0
"""The limit for starting the driver."""
_TURN_S = 0.01
"""How long the GPUs that wait for a slow one do so: a healthy one takes a tenth of it."""
_HOST_STUCK_AFTER_S = 2.0

Look = Callable[[Iterable[int]], Mapping[int, Reading[HostProcess]]]


class HostReader:
    """Reads what the operating system reports of processes and load, for one thread.

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
        self.reading = HostReading(host_name(), NOT_READ_YET, NOT_READ_YET, NOT_READ_YET)
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
    """The `snapshot.Source` that reads this machine's GPUs.

    Args:
        interval_s: between snapshots, and between readings of memory, processes, utilization and power.
        slow_interval_s: between readings of what changes slowly or is dear to ask.
        look: finds the processes of pids; by default `processes.HostProcesses().look`.
        clock: the time of snapshots, in seconds since the epoch.
        proc: the folder of the kernel's own files, ``/proc``.
        vendor: whose GPUs alone are watched; by default those of every vendor.

    Attributes:
        notice: what else is to be said next to the snapshots, which say what is wrong with the GPUs.
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
        self._only = vendor
        self._waits_for_all = interval_s >= _LONG_INTERVAL_S
        self._patience_s = STUCK_AFTER_S + _PATIENCE_S if self._waits_for_all else _PATIENCE_S
        self._parts: list[VendorGpus] = []
        self._crews: list[Crew] = []
        self._host = HostReader(look)
        self._plug_ins_asked = False
        self._plug_ins: tuple[tuple[Vendor, ...], tuple[str, ...]] | None = None
        self._plug_in_faults: tuple[str, ...] = ()
        self._stopped = False
        self._progress = threading.Condition()
        self._awaited: Callable[[], bool] | None = None  # what the sampler's thread waits for now

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
        of_host = Crew("gpu-host")
        self._crews.append(of_host)
        self._plug_ins_worker = Worker(self._load_plug_ins, self._tell, of_host)
        self._host_worker = Worker(self._host.read, self._tell, of_host)
        self._add_vendors(vendors.BUILT_IN if self._only is None else [self._only])
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
        for crew in self._crews:
            crew.end()

    def _add_vendors(self, found: Iterable[Vendor]) -> None:
        for vendor in found:
            part = VendorGpus(vendor, self._proc, self._interval_s, self._slow_every, self._tell)
            self._parts.append(part)
            self._crews.append(part.crew)

    def _load_plug_ins(self) -> None:
        self._plug_ins = vendors.plugged_in()

    def _round(self, first: bool) -> None:
        """Have everything read that is due, and put it together."""
        self._tend_drivers()
        self._look_for_plug_ins(first)
        self._poll_gpus()
        if self._host_worker.is_idle:
            self._host.pids = self._pids()
            self._host_worker.ask()
            self._wait_for(lambda: self._host_worker.is_idle, self._patience_s)
        known = self._known()
        self._publish()
        if first and self._readers():
            self._follow_up(known)

    def _tell(self) -> None:
        """Wake the sampler's thread if it waits for what has just been done: eight GPUs tell 16 times a second."""
        with self._progress:
            if self._awaited is not None and self._awaited():
                self._progress.notify_all()

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until it holds or time is up; meanwhile crews whose jobs wait for slow ones get more threads."""
        end_s = monotonic() + timeout_s
        with self._progress:
            self._awaited = lambda: self._stopped or condition()
            while True:
                left_s, behind = max(0.0, end_s - monotonic()), [crew for crew in self._crews if crew.is_behind]
                wait_s = min(left_s, _TURN_S) if behind else left_s
                if self._progress.wait_for(self._awaited, wait_s) or wait_s == left_s:
                    break
                for crew in behind:
                    crew.reinforce()
            self._awaited = None

    def _tend_drivers(self) -> None:
        """Have each driver started, restarted, or its GPUs counted, if it is time for that."""
        asked = [part for part in self._parts if part.tend()]
        if asked:
            patience_s = _PATIENCE_S if all(part.driver.runs for part in asked) else _START_PATIENCE_S
            self._wait_for(lambda: all(part.worker.is_idle for part in asked), patience_s)

    def _look_for_plug_ins(self, first: bool) -> None:
        """Load the vendors of plug-ins once: at once where no other has a driver, else next to the second round."""
        if self._plug_ins_asked or self._only is not None:
            if self._plug_ins is not None:
                found, self._plug_ins = self._plug_ins, None
                self._add_vendors(found[0])
                self._plug_in_faults = found[1]
                self._tend_drivers()
            return
        missed = all(part.is_settled and part.driver.status.absent for part in self._parts)
        if first and not missed:
            return
        self._plug_ins_asked = True
        self._plug_ins_worker.ask()
        if missed:
            self._wait_for(lambda: self._plug_ins_worker.is_idle, _START_PATIENCE_S)
            self._look_for_plug_ins(first)

    def _readers(self) -> list[GpuReader]:
        return [reader for part in self._parts for reader in part.readers.values()]

    def _poll_gpus(self) -> None:
        """Have every GPU read that is not being read still."""
        for part in self._parts:
            part.ask()
        patience_s = self._patience_s if self.latest() else _FIRST_PATIENCE_S
        asked = [reader for part in self._parts if part.driver.runs for reader in part.readers.values()]
        in_full = self._waits_for_all and self.latest()

        def has_answered(reader: GpuReader) -> bool:
            return reader.worker.is_idle if in_full else reader.is_fresh

        self._wait_for(lambda: all(has_answered(each) or each.is_stuck for each in asked), patience_s)
        for part in self._parts:
            part.sort_out()

    def _pids(self) -> frozenset[int]:
        return frozenset().union(*(each.raw.pids for each in self._readers()))

    def _known(self) -> tuple[bool, bool, bool]:
        """Return the present state: each GPU's memory and processes; who these processes are; what is slow to read."""
        readers = self._readers()
        return (
            all(each.is_fresh for each in readers),
            self._host_worker.is_idle and self._host.looked_up == self._pids(),
            all(each.worker.is_idle for each in readers),
        )

    def _follow_up(self, known: tuple[bool, bool, bool]) -> None:
        """Publish more snapshots after the first, which came early, as soon as there is more, until all is."""
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
        host = self._host_reading()
        gpus: list[GpuReading] = []
        for part in self._parts:
            gpus += part.readings(max((gpu.index + 1 for gpu in gpus), default=0), self._host.processes, host)
        present = [part for part in self._parts if not part.driver.status.absent] or self._parts[:1]
        drivers = [part.driver_reading() for part in present]
        running = [(each, part) for each, part in zip(drivers, present, strict=True) if part.driver.runs]
        leading, chosen = (running or list(zip(drivers, present, strict=True)))[0]
        vendors.choose(chosen.vendor)
        self._newest.put(
            Snapshot(
                time_s=self._clock(),
                driver_version=leading.driver_version,
                cuda_version=leading.runtime_version,
                gpus=tuple(gpus),
                host=host,
                problem="" if any(part.driver.status.gpu_count for part in present) else self._problem(drivers),
                calls=sum((Counter(each.calls) for each in drivers), Counter[str]()),
                runtime=leading.runtime,
                drivers=tuple(drivers),
            )
        )

    def _problem(self, drivers: Sequence[DriverReading]) -> str:
        """Return why no GPU can be watched."""
        faults = self._plug_in_faults if all(part.driver.status.absent for part in self._parts) else ()
        return "; ".join([*(each.problem for each in drivers), *faults])

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
