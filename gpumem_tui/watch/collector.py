"""Collects what probes publish, and further facts about those processes.

Imports the formula and what else a process needs when there is one: `monitor --once` waits for this.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpumem_tui.memory import Bucket, Unknown
from gpumem_tui.monitor.backend import Vendor
from gpumem_tui.monitor.probes import ProbeFigures, Probes
from gpumem_tui.monitor.processes import HostProcesses
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.snapshot import GpuReading
from gpumem_tui.monitor.vendors import known, of_brand
from gpumem_tui.probe.files import WireError
from gpumem_tui.probe.wire import CPU, Trained
from gpumem_tui.watch import hosts
from gpumem_tui.watch.documents import read_document
from gpumem_tui.watch.folders import clean
from gpumem_tui.watch.published import NOT_DERIVED_YET, Key, Placed, Published, WatchedProcess
from gpumem_tui.watch.reader import Watcher
from gpumem_tui.watch.records import FOR_MEMORY, ProbedProcess, ProbeSample

if TYPE_CHECKING:
    from gpumem_tui.monitor.devices import Candidate
    from gpumem_tui.watch.expected import Expected
    from gpumem_tui.watch.growth import Growth
    from gpumem_tui.watch.postmortem import Case

_GROWTH_EVERY_S = 5.0


class Collector:
    """Everything that is published, on the GPUs where it belongs. For one thread at a time.

    Args:
        watcher: finds the processes.
        proc: where they are looked up.
        derives: also work out what the formula expects of each, which a screen shows and no report prints.
    """

    def __init__(self, watcher: Watcher | None = None, proc: Path = Path("/proc"), *, derives: bool = True) -> None:
        self._derives = derives
        self._watcher = watcher or Watcher()
        self._hosts = HostProcesses(proc, known_here=True)
        self._derived: dict[Key, tuple[object, Reading[Expected]]] = {}  # with the file and bytes it was derived from
        self._cases: dict[Key, Case] = {}
        self._growth: dict[Key, tuple[float, tuple[Growth, ...]]] = {}
        self._is_clean = False

    def collect(self, gpus: Sequence[GpuReading], followed: Key | None = None) -> Published:
        """Look again. Processes that ended long ago are forgotten at the first look."""
        processes = self._watcher.processes()
        if not self._is_clean:
            self._is_clean = True
            clean(processes)
        candidates = [_candidate(gpu) for gpu in gpus] if processes else []
        hosts = self._hosts.look(process.pid for process in processes if process.pid is not None)
        watched = []
        for process in processes:
            placed = tuple(Placed(sample, gpu_uuid(process, sample, candidates)) for sample in process.samples)
            watched.append(
                WatchedProcess(
                    process=process,
                    placed=placed,
                    host=hosts[process.pid] if process.pid is not None else Unknown(process.state_words),
                    expected=self._expected(process) if self._derives else NOT_DERIVED_YET,
                    case=self._case(process),
                    history=self._watcher.history(process) if process.key == followed else (),
                    growth=self._growing(process, placed, gpus),
                )
            )
        keys = {process.key for process in processes}
        self._derived = {key: derived for key, derived in self._derived.items() if key in keys}
        self._cases = {key: case for key, case in self._cases.items() if key in keys}
        self._growth = {key: growth for key, growth in self._growth.items() if key in keys}
        return Published(tuple(watched), self._watcher.refused, probe_figures(processes, candidates))

    def _expected(self, process: ProbedProcess) -> Reading[Expected]:
        """Return what the formula expects, derived again only if the document or the bytes change, which is seldom."""
        if not process.is_running:
            return Unknown(process.state_words)
        found = fixed_bytes(process)
        try:
            version = (process.files.model.stat().st_mtime_ns, found)
        except OSError:
            return Unknown("the probe has not listed the parameters yet")
        if self._derived.get(process.key, (None,))[0] != version:
            self._derived[process.key] = version, _derive(process, found)
        return self._derived[process.key][1]

    def _growing(
        self, process: ProbedProcess, placed: Sequence[Placed], gpus: Sequence[GpuReading]
    ) -> tuple[Growth, ...]:
        """Return the growth that is worth an alert, computed every few seconds only: a process's history is long."""
        if not process.is_running:
            return ()
        looked_s, found = self._growth.get(process.key, (-math.inf, ()))
        if time.monotonic() - looked_s >= _GROWTH_EVERY_S:
            from gpumem_tui.watch.growth import growth_of, is_worth_an_alert

            rising = growth_of(self._watcher.history(process))
            found = tuple(one for one in (_with_room(each, process, placed, gpus) for each in rising)
                          if is_worth_an_alert(one))  # fmt: skip
            self._growth[process.key] = time.monotonic(), found
        return found

    def _case(self, process: ProbedProcess) -> Case | None:
        if process.state not in FOR_MEMORY:
            return None
        if process.key not in self._cases:
            from gpumem_tui.watch.postmortem import open_case

            try:
                case = open_case(process)
            except WireError:  # the process's `problem` has it
                return None
            if case is None:
                return None
            self._cases[process.key] = case
        return self._cases[process.key]


def fixed_bytes(process: ProbedProcess) -> dict[Bucket, int]:
    """Sum parameters, gradients and optimizer state over all devices, as far as known."""
    from gpumem_tui.watch.expected import FIXED

    found: dict[Bucket, int] = {}
    for sample in process.samples:
        for bucket in FIXED:
            size_bytes = sample.buckets[bucket]
            if isinstance(size_bytes, int):
                found[bucket] = found.get(bucket, 0) + size_bytes
    return found


def _derive(process: ProbedProcess, found: Mapping[Bucket, int]) -> Reading[Expected]:
    try:
        trained = read_document(Trained, process.files, process.uid)
    except WireError as error:
        return Unknown(str(error))
    if trained is None:
        return Unknown("the probe has not listed the parameters yet")
    devices = {sample.record.device for sample in process.samples if sample.is_on_gpu} or {CPU}
    from gpumem_tui.watch.expected import expect

    return expect(trained, found, process.process.world_size, devices)


def _with_room(growth: Growth, process: ProbedProcess, placed: Sequence[Placed], gpus: Sequence[GpuReading]) -> Growth:
    """Add the time until it has filled what is left of its device, the cache of its allocator included."""
    from gpumem_tui import host_memory
    from gpumem_tui.watch.growth import fill_s

    if growth.device == CPU:
        left_bytes = None if process.pid is None else host_memory.left_bytes(process.pid)
    else:
        uuids = {one.sample.record.device: (one.gpu_uuid, one.sample) for one in placed}
        uuid, sample = uuids.get(growth.device, ("", None))
        gpu = next((gpu for gpu in gpus if gpu.uuid == uuid), None)
        left_bytes = None
        if sample is not None and gpu is not None and not isinstance(gpu.memory, Unknown):
            record = sample.record
            limited, free_bytes = sample.left_bytes, gpu.memory.free_bytes
            free_bytes = min(free_bytes, limited) if isinstance(limited, int) else free_bytes
            left_bytes = free_bytes + max(0, record.reserved_bytes - record.allocated_bytes)
    return growth if left_bytes is None else replace(growth, left_s=fill_s(growth, left_bytes))


def _candidate(gpu: GpuReading) -> Candidate:
    from gpumem_tui.monitor.devices import Candidate

    parts = tuple(instance.uuid for instance in gpu.instances)
    return Candidate(gpu.number, gpu.uuid, gpu.name, parts, gpu.vendor)


# Which GPU of the machine a process means by cuda:0


def gpu_uuid(process: ProbedProcess, sample: ProbeSample, gpus: Sequence[Candidate]) -> Reading[str]:
    """Return the UUID, as NVML writes it, of the device of a sample.

    By the UUID that the process itself reports; where its torch is too old to tell, or is built for a runtime that has
    other UUIDs than the driver, by the device's number and the environment that it was started with.
    """
    record = sample.record
    if record.device == CPU:
        return Unknown("host memory")
    whose = next((each for each in known() if each.torch_build and each.torch_build in process.process.torch), None)
    if record.device_uuid and whose is None:
        return _listed(record.device_uuid, gpus)
    environ = hosts.environ(hosts.PROC / str(process.pid)) if process.pid is not None else {}
    if process.process.visible_devices is not None:
        environ = {**environ, "CUDA_VISIBLE_DEVICES": process.process.visible_devices}
    gpus = sorted((gpu for gpu in gpus if _is_of(gpu, whose)), key=lambda gpu: gpu.index)
    if whose is not None:
        visible = {"CUDA_VISIBLE_DEVICES": environ[whose.visible]} if whose.visible in environ else {}
        environ = {**visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    from gpumem_tui.monitor.devices import visible_devices

    seen = visible_devices(gpus, environ)
    if isinstance(seen, Unknown):
        return seen
    if record.device >= len(seen):
        return Unknown(f"{sample.device} is none of the {len(seen)} GPUs that its environment lets it see")
    return seen[record.device]


def _is_of(gpu: Candidate, whose: Vendor | None) -> bool:
    """Return whether a build of torch for a vendor's runtime, or for the usual one, runs on a GPU."""
    return gpu.vendor == whose.brand if whose is not None else not of_brand(gpu.vendor).torch_build


def _listed(uuid: str, gpus: Sequence[Candidate]) -> str:
    """Return a UUID as NVML has it: torch's has no beginning, by which a MIG instance's differs from a whole GPU's."""
    instances = [instance for gpu in gpus for instance in gpu.instances]
    return next((instance for instance in instances if _digits(instance) == _digits(uuid)), uuid)


def _digits(uuid: str) -> str:
    return uuid.partition("-")[2]


def probe_figures(processes: Iterable[ProbedProcess], gpus: Sequence[Candidate]) -> Probes:
    """Return the allocators' figures of all running processes, by GPU and pid, as alerts and histories take them."""
    found = {}
    for process in processes:
        for sample in process.samples if process.pid is not None else ():
            uuid = gpu_uuid(process, sample, gpus)
            figures = (sample.allocated_bytes, sample.reserved_bytes, sample.retries, sample.ooms)
            if not isinstance(uuid, Unknown) and process.pid is not None:
                known = [figure for figure in figures if isinstance(figure, int)]
                if len(known) == len(figures):
                    found[uuid, process.pid] = ProbeFigures(*known)
    return found
