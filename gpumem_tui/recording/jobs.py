"""The GPU memory and use of one batch job, added up from readings, next to what it asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpumem_tui.catalog.loader import gpus as catalog_gpus
from gpumem_tui.formula.predict import DEFAULT_HEADROOM, usable_bytes
from gpumem_tui.memory import GIB, Unknown, format_bytes
from gpumem_tui.monitor import vendors
from gpumem_tui.monitor.snapshot import GpuProcess, GpuReading, Memory, Snapshot
from gpumem_tui.remote.slurm import SlurmJob
from gpumem_tui.report.objects import SCHEMA, JsonObject
from gpumem_tui.report.tables import TextColumn, TextTable, counted

Said = Mapping[tuple[str, int], Mapping[str, object]]
"""JSON that probes publish, by the GPU's or MIG instance's UUID and the pid."""

_ROOM = 0.25
"""Share of a GPU that was never used from which the report calls it room for a larger batch."""
_SMALLER = 0.95
"""A GPU counts as smaller below this share of the job's: sizes of one product differ by less (ECC, the driver)."""
_ALIKE = 0.9
"""GPUs sold with one size differ by less: an A10 of 24 GB has 22.5 GiB, an RTX 4090 of 24 GB 24.0 (gpus.toml)."""
_MOST_NAMES = 3
_COVERED = 0.9


class JobGpu(JsonObject, frozen=True):
    """A GPU or MIG instance while processes of the job were on it.

    Attributes:
        index: the GPU's number on its host.
        peak_bytes: the most that the job held: by the allocator's own peak where a probe has it, else at a reading.
        mean_bytes: over the readings, as `mean_use_percent`.
        mean_use_percent, peak_use_percent: the GPU's utilization, everybody's; None where it is not known, as of MIG.
        readings: how many there were; `shared`: other processes were on it at one of them.
        by_probe: the peak is the allocator's own.
        by_device: the driver did not give every process's memory: the sizes are of all that the device held at most.
    """

    host: str
    index: int
    uuid: str
    name: str
    vendor: str
    total_bytes: int
    reserved_bytes: int
    peak_bytes: int
    mean_bytes: int
    mean_use_percent: float | None
    peak_use_percent: int | None
    readings: int
    shared: bool
    by_probe: bool
    by_device: bool = False

    @property
    def unused_bytes(self) -> int:
        """Return what the job never held of what programs can have."""
        return max(0, self.total_bytes - self.reserved_bytes - self.peak_bytes)


class JobObject(JsonObject, frozen=True):
    """The object that `report --slurm` prints.

    Attributes:
        job: its number; `asked`: as Slurm has it, None where that is unknown, with the reason in `asked_unknown`.
        recorded_s: seconds between the first and the last reading with a process of it.
        smaller_gpus: the smallest GPUs of the catalog that hold the highest peak and keep the usual headroom free.
        unused_bytes: what was never used of the fullest GPU.
    """

    schema: int
    job: str
    asked: SlurmJob | None
    asked_unknown: str | None
    recorded_s: float
    gpus: tuple[JobGpu, ...]
    smaller_gpus: tuple[str, ...]
    unused_bytes: int


@dataclass
class _Sum:
    """The readings of one GPU so far."""

    host: str
    gpu: GpuReading
    name: str
    memory: Memory
    held_bytes: int = 0
    peak_bytes: int = 0
    use_percent: int = 0
    peak_use_percent: int = 0
    used_readings: int = 0
    readings: int = 0
    shared: bool = False
    by_probe: bool = False
    by_device: bool = False

    def take(
        self, held_bytes: int, peak_bytes: int, gpu: GpuReading, *, shared: bool, by_probe: bool, by_device: bool
    ) -> None:
        """Add one reading."""
        self.readings += 1
        self.by_device = self.by_device or by_device
        self.held_bytes += held_bytes
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        self.shared, self.by_probe = self.shared or shared, self.by_probe or by_probe
        busy = gpu.telemetry.utilization_percent
        if not isinstance(busy, Unknown):
            self.used_readings += 1
            self.use_percent += busy
            self.peak_use_percent = max(self.peak_use_percent, busy)

    def done(self, uuid: str) -> JobGpu:
        """Return the sums and means."""
        reserved = self.memory.reserved_bytes
        return JobGpu(
            host=self.host,
            index=self.gpu.index,
            uuid=uuid,
            name=self.name,
            vendor=self.gpu.vendor,
            total_bytes=self.memory.total_bytes,
            reserved_bytes=0 if isinstance(reserved, Unknown) else reserved,
            peak_bytes=self.peak_bytes,
            mean_bytes=self.held_bytes // self.readings,
            mean_use_percent=self.use_percent / self.used_readings if self.used_readings else None,
            peak_use_percent=self.peak_use_percent if self.used_readings else None,
            readings=self.readings,
            shared=self.shared,
            by_probe=self.by_probe,
            by_device=self.by_device,
        )


@dataclass
class JobUse:
    """The memory that a job's processes held, added up reading by reading.

    Args:
        belongs: whether a process is one of the job's.

    Attributes:
        others: jobs whose processes were seen, but for this one.
    """

    belongs: Callable[[GpuProcess], bool]
    others: set[str] = field(default_factory=set)
    first_s: float = math.inf
    last_s: float = -math.inf
    _sums: dict[tuple[str, str], _Sum] = field(default_factory=dict)
    _times: dict[str, float] = field(default_factory=dict)

    def add(self, host: str, snapshot: Snapshot, said: Said) -> None:
        """Take a reading of a host in, once: of one that is away the last reading is met again and again."""
        if snapshot.time_s <= self._times.get(host, -math.inf):
            return
        self._times[host] = snapshot.time_s
        for gpu in snapshot.gpus:
            processes: dict[str, list[GpuProcess]] = {}
            for process in gpu.all_processes:
                processes.setdefault(process.instance or gpu.uuid, []).append(process)
            for uuid, listed in processes.items():
                self._take(host, gpu, uuid, listed, said, snapshot.time_s)

    @property
    def gpus(self) -> tuple[JobGpu, ...]:
        """Return the GPUs that the job was on, by host and number."""
        found = [each.done(uuid) for (_, uuid), each in self._sums.items()]
        return tuple(sorted(found, key=lambda gpu: (gpu.host, gpu.index, gpu.uuid)))

    def _take(self, host: str, gpu: GpuReading, uuid: str, listed: list[GpuProcess], said: Said, time_s: float) -> None:
        own = [process for process in listed if self.belongs(process)]
        self.others |= {job for process in listed if process not in own and (job := slurm_number(process))}
        parts = {each.uuid: each for each in gpu.instances}
        memory = parts[uuid].memory if uuid in parts else gpu.memory
        if not own or isinstance(memory, Unknown):
            return
        known_bytes = sum(process.used_bytes for process in listed if isinstance(process.used_bytes, int))
        held_bytes = sum(process.used_bytes for process in own if isinstance(process.used_bytes, int))
        by_device = any(isinstance(process.used_bytes, Unknown) for process in own)
        if by_device:  # they have at most the rest
            held_bytes += max(0, memory.used_bytes - known_bytes)
        above = [_above_now(said.get((uuid, process.pid), {})) for process in own]
        name = parts[uuid].name if uuid in parts else gpu.name
        each = self._sums.setdefault((host, uuid), _Sum(host, gpu, name, memory))
        known = [one for one in above if one is not None]
        peak_bytes = min(memory.total_bytes, held_bytes + sum(known))
        shared, by_probe = len(own) < len(listed), len(known) == len(own)
        each.take(held_bytes, peak_bytes, gpu, shared=shared, by_probe=by_probe, by_device=by_device)
        self.first_s, self.last_s = min(self.first_s, time_s), max(self.last_s, time_s)


def slurm_number(process: GpuProcess) -> str:
    """Return the Slurm job of a process, by its control group; empty outside any."""
    return "" if isinstance(process.host, Unknown) else process.host.slurm_job


def _above_now(said: Mapping[str, object]) -> int | None:
    """Return how much more than now the allocator of a process has once reserved; None without a probe."""
    peak, now = said.get("peak_reserved_bytes"), said.get("reserved_bytes")
    return max(0, peak - now) if isinstance(peak, int) and isinstance(now, int) else None


def _fullest(gpus: Sequence[JobGpu]) -> JobGpu:
    return max(gpus, key=lambda gpu: gpu.peak_bytes / gpu.total_bytes)


def smaller_gpus(gpus: Sequence[JobGpu]) -> tuple[str, ...]:
    """Return the smallest GPUs of the catalog with room for the highest peak and the usual headroom.

    They are of the vendor of the GPU that was fullest, and smaller than that.
    """
    fullest, peak_bytes = _fullest(gpus), max(gpu.peak_bytes for gpu in gpus)
    brand = vendors.of_brand(fullest.vendor).brand
    fitting = [
        gpu
        for gpu in catalog_gpus().values()
        if gpu.title.startswith(f"{brand} ")
        and not gpu.unified
        and gpu.total_bytes < _SMALLER * fullest.total_bytes
        and usable_bytes(gpu.total_bytes, DEFAULT_HEADROOM) >= peak_bytes
    ]
    least = min((gpu.total_bytes for gpu in fitting), default=0)
    return tuple(gpu.name for gpu in fitting if gpu.total_bytes <= least / _ALIKE)


def job_object(job: str, asked: SlurmJob | Unknown, use: JobUse) -> JobObject:
    """Return the report of a job that was on a GPU."""
    fullest = _fullest(use.gpus)
    return JobObject(
        schema=SCHEMA,
        job=job,
        asked=None if isinstance(asked, Unknown) else asked,
        asked_unknown=asked.reason if isinstance(asked, Unknown) else None,
        recorded_s=use.last_s - use.first_s,
        gpus=use.gpus,
        smaller_gpus=smaller_gpus(use.gpus),
        unused_bytes=fullest.unused_bytes,
    )


_TABLE = TextTable(
    TextColumn("Host", 12), TextColumn("GPU", 3, ">"), TextColumn("Name", 28, cut=True), TextColumn("Peak GiB", 8, ">"),
    TextColumn("Mean GiB", 8, ">"), TextColumn("of GiB", 6, ">"), TextColumn("Use mean", 8, ">"),
    TextColumn("peak", 5, ">"), TextColumn(""),
)  # fmt: skip


def job_lines(report: JobObject) -> Iterator[str]:
    """Yield the report as text, its figure first."""
    yield f"{job_line(report)}."
    asked = report.asked
    if asked is None:
        yield f"Asked for: unknown: {report.asked_unknown}."
    else:
        ran = "" if asked.elapsed_s is None else f" after {_duration(asked.elapsed_s)}"
        name = f" ({asked.name})" if asked.name else ""
        yield f"Job {report.job}{name}: {asked.state}{ran} on {asked.node_list}; asked for {asked.asked}."
    yield ""
    yield from _TABLE.lines(_cells(gpu) for gpu in report.gpus)
    yield ""
    yield from _judged(report)


def _cells(gpu: JobGpu) -> list[str]:
    use = ["–", "–"] if gpu.mean_use_percent is None else [f"{gpu.mean_use_percent:.0f} %", f"{gpu.peak_use_percent} %"]
    sizes = [f"{size / GIB:.2f}" for size in (gpu.peak_bytes, gpu.mean_bytes)]
    return [gpu.host, str(gpu.index), gpu.name, *sizes, f"{gpu.total_bytes / GIB:.1f}", *use, "shared" * gpu.shared]


def _judged(report: JobObject) -> Iterator[str]:
    """Yield whether less would have done, and what the figures leave out."""
    fullest = _fullest(report.gpus)
    if report.smaller_gpus:
        names, rest = report.smaller_gpus[:_MOST_NAMES], len(report.smaller_gpus) - _MOST_NAMES
        more = f" and {rest} more" if rest > 0 else ""
        yield f"A smaller GPU would have done, with 10 % left free: {', '.join(names)}{more}."
    else:
        yield "No smaller GPU of the catalog would have done with 10 % left free."
    if report.unused_bytes >= _ROOM * fullest.total_bytes:
        unused = format_bytes(report.unused_bytes)
        yield f"Room for a larger batch: {unused} of the fullest GPU were never used. Find it:"
        yield "  gpumem-tui search -- python train.py --batch-size {batch}"
    else:
        yield f"Little room for a larger batch: {format_bytes(report.unused_bytes)} of the fullest GPU were never used."
    asked = report.asked
    hosts = len({gpu.host for gpu in report.gpus})
    if asked is not None and hosts < asked.nodes:
        yield f"Recorded on {hosts} of {counted(asked.nodes, 'node')} ({asked.node_list}): give the others' files too."
    elif asked is not None and len(report.gpus) < asked.gpus:
        yield f"{counted(asked.gpus - len(report.gpus), 'GPU')} of {asked.gpus} had no process of the job."
    if asked is not None and asked.elapsed_s and report.recorded_s < _COVERED * asked.elapsed_s:
        yield f"Seen on GPUs for {_duration(report.recorded_s)} of {_duration(asked.elapsed_s)}."
    if any(gpu.by_device for gpu in report.gpus):
        yield "The driver did not give each process's memory: sizes are the most that the job can have held."
    if not all(gpu.by_probe for gpu in report.gpus):
        yield "Peaks are those of the readings. `gpumem-tui run` in the job prints the allocator's own at its end."


def job_line(report: JobObject) -> str:
    """Return the job's figures in one line."""
    fullest = _fullest(report.gpus)
    used = [gpu.mean_use_percent for gpu in report.gpus if gpu.mean_use_percent is not None]
    use = f"; use {sum(used) / len(used):.0f} % on average" if used else ""
    where = f"fullest of {len(report.gpus)} GPUs" if len(report.gpus) > 1 else "GPU"
    peak, mean, total = (size / GIB for size in (fullest.peak_bytes, fullest.mean_bytes, fullest.total_bytes))
    return f"Slurm job {report.job}: peak {peak:.1f} of {total:.1f} GiB on the {where}, mean {mean:.1f}{use}"


def _duration(seconds: float) -> str:
    """Return hours, minutes and seconds as Slurm writes them.

    >>> _duration(206)
    '0:03:26'
    """
    minutes, left = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{left:02d}"
