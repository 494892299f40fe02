"""What the probes of watched training processes say, as metrics: by rank and by bucket.

At most `MOST_PROCESSES` devices of processes of a machine have series, those that hold most; how many more there are is
a metric too. So a machine has at most `MOST_PROCESSES` × (2 × 7 buckets + 13) series of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpumem_tui.memory import Bucket
from gpumem_tui.monitor.families import Family, Sheet
from gpumem_tui.monitor.probes import ProbeReport
from gpumem_tui.monitor.snapshot import GpuReading

MOST_PROCESSES = 64

_RANK = ("gpu", "uuid", "device", "pid", "training_job", "rank")
"""``device`` is the process's own name of it; ``gpu`` and ``uuid`` are empty for host memory, or where it is not known
which GPU that is. ``training_job``: Prometheus has a label ``job`` of its own, for what it scrapes."""

_BUCKETS = {
    "buckets": Family(
        "training_memory_bytes", "Memory of a training process between two steps, by bucket", (*_RANK, "bucket")
    ),
    "peak_buckets": Family(
        "training_peak_memory_bytes", "Its memory at the peak, by bucket: the sum is what was allocated then",
        (*_RANK, "bucket"),
    ),
}  # fmt: skip
_FIGURES = {
    "allocated_bytes": Family("training_allocated_bytes", "What its caching allocator has given out", _RANK),
    "reserved_bytes": Family("training_reserved_bytes", "What its caching allocator holds of the device", _RANK),
    "peak_allocated_bytes": Family("training_peak_allocated_bytes", "The most that was ever given out at once", _RANK),
    "peak_reserved_bytes": Family("training_peak_reserved_bytes", "The most that was ever held of the device", _RANK),
    "inactive_split_bytes": Family(
        "training_fragmented_bytes", "Free parts of segments that are in use elsewhere", _RANK
    ),
    "step_s": Family("training_step_seconds", "Mean time of a step since the sample before", _RANK),
    "age_s": Family("training_sample_age_seconds", "Since its probe last wrote a sample", _RANK),
    "world_size": Family("training_world_size", "How many ranks its job has", _RANK),
    "step": Family("training_steps", "Optimizer steps since the probe was loaded", _RANK, counter=True),
    "retries": Family(
        "training_allocator_retries", "Times its allocator gave its cache back to satisfy a request", _RANK,
        counter=True,
    ),
    "ooms": Family("training_allocator_failures", "Requests for memory that failed", _RANK, counter=True),
}  # fmt: skip
_WATCHED = Family("training_processes", "Devices of processes with a probe: the series of training metrics")
_LEFT_OUT = Family("training_processes_left_out", f"More than {MOST_PROCESSES}: those that hold least have no series")


def add_training(sheet: Sheet, host: str, gpus: tuple[GpuReading, ...], probes: ProbeReport) -> None:
    """The series of one machine."""
    for family in (*_BUCKETS.values(), *_FIGURES.values()):
        sheet.has(family)
    found = dict(_samples(gpus, probes))
    chosen = sorted(found.items(), key=lambda item: (-_held(item[1]), item[0]))[:MOST_PROCESSES]
    sheet.add(_WATCHED, host, (), len(chosen))
    sheet.add(_LEFT_OUT, host, (), len(found) - len(chosen))
    for labels, said in chosen:
        for name, family in _BUCKETS.items():
            for bucket in Bucket:
                if (size_bytes := _number(said[name].get(bucket.value))) is not None:
                    sheet.add(family, host, (*labels, bucket.value), size_bytes)
        for name, family in _FIGURES.items():
            if (value := _number(said.get(name))) is not None:
                sheet.add(family, host, labels, value)


def _samples(gpus: tuple[GpuReading, ...], probes: ProbeReport) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Each sample (as `watch.report` writes it) by its labels."""
    places = {gpu.uuid: str(gpu.index) for gpu in gpus}
    places |= {instance.uuid: str(gpu.index) for gpu in gpus for instance in gpu.instances}
    for (uuid, _), said in probes.listed.items():
        yield _labels(places.get(uuid, ""), uuid, said), _with_buckets(said)
    for said in probes.unlisted:
        yield _labels("", "", said), _with_buckets(said)


def _labels(gpu: str, uuid: str, said: Mapping[str, Any]) -> tuple[str, ...]:
    named = ("" if said.get(name) is None else str(said[name]) for name in ("device", "pid", "job", "rank"))
    return gpu, uuid, *named


def _with_buckets(said: Mapping[str, Any]) -> Mapping[str, Any]:
    """With both divisions, empty where it has none."""
    return {**said, **{name: said[name] if isinstance(said.get(name), dict) else {} for name in _BUCKETS}}


def _held(said: Mapping[str, Any]) -> float:
    """What it holds: with an allocator what that has reserved, else all that was found."""
    reserved_bytes = _number(said.get("reserved_bytes"))
    return sum(_number(size) or 0 for size in said["buckets"].values()) if reserved_bytes is None else reserved_bytes


def _number(value: object) -> float | None:
    """A figure; None where it is unknown. What another host says may be anything."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
