"""A snapshot as JSON and as lines of text. The JSON's keys are a public contract."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from gpumem_tui.memory import GIB, Bucket, Unknown, Value, format_bytes
from gpumem_tui.monitor.alerts import Alert
from gpumem_tui.monitor.ledger import DEVICE_BUCKETS
from gpumem_tui.monitor.probes import ProbeReport
from gpumem_tui.monitor.readings import READINGS, Reading
from gpumem_tui.monitor.snapshot import (
    DeviceState,
    GpuProcess,
    GpuReading,
    HostProcess,
    Instance,
    Memory,
    Snapshot,
)

SCHEMA = 1

_MEMORY = tuple(field.name for field in fields(Memory))
_HOST_PROCESS = tuple(field.name for field in fields(HostProcess) if field.name != "pid")
_UNKNOWN = "–"


class _Object:
    """A JSON object whose unknown values are null, with their reasons under "unavailable"."""

    def __init__(self, **values: Any) -> None:
        self._values = values
        self._unavailable: dict[str, str] = {}

    def put(self, key: str, reading: Reading[Any]) -> None:
        if isinstance(reading, float) and not math.isfinite(reading):
            reading = Unknown("not a number")
        if isinstance(reading, Unknown):
            self._values[key] = None
            self._unavailable[key] = reading.reason
        else:
            self._values[key] = list(reading) if isinstance(reading, tuple) else reading

    def put_parts(self, keys: Sequence[str], whole: Reading[Any]) -> None:
        """The attributes `keys` of a value, or its reason for each of them."""
        for key in keys:
            self.put(key, whole if isinstance(whole, Unknown) else getattr(whole, key))

    def put_ledger(self, device: GpuReading | Instance) -> None:
        """The bytes by kind of row, which sum to the device's total, and what there is to say about a row."""
        ledger = device.ledger
        if isinstance(ledger, Unknown):
            self._values["ledger_notes"] = {}
            self.put("ledger", ledger)
            return
        rows: dict[str, int | None] = {}
        for kind, size_bytes in ledger_sizes(device).items():
            rows[kind.value] = None if isinstance(size_bytes, Unknown) else size_bytes
            if isinstance(size_bytes, Unknown):
                self._unavailable[f"ledger.{kind.value}"] = size_bytes.reason
        self._values["ledger"] = rows
        self._values["ledger_notes"] = {row.kind.value: row.note for row in ledger.rows if row.note}

    def as_json(self) -> dict[str, Any]:
        return {**self._values, "unavailable": self._unavailable}


def ledger_sizes(device: GpuReading | Instance) -> dict[Bucket, Value]:
    """The ledger's bytes by kind, empty if it is unknown. A list that could not be read is not a list of 0 bytes."""
    if isinstance(device.ledger, Unknown):
        return {}
    sizes = {kind: device.ledger.size_bytes(kind) for kind in DEVICE_BUCKETS}
    if isinstance(device.processes, Unknown):
        sizes[Bucket.PROCESS] = device.processes
    return sizes


def snapshot_json(
    snapshot: Snapshot, alerts: Sequence[Alert] = (), probes: ProbeReport | None = None
) -> dict[str, Any]:
    """One object. What could not be read is null, with its reason under the nearest "unavailable".

    Args:
        probes: a process with a probe gets what that says under "probe"; one that no GPU lists, among
            "unlisted_probes".
    """
    probes = probes or ProbeReport()
    host = _Object()
    host.put_parts([field.name for field in fields(snapshot.host)], snapshot.host)
    top = _Object(schema=SCHEMA, time_s=snapshot.time_s, problem=snapshot.problem)
    top.put("driver_version", snapshot.driver_version)
    top.put("cuda_version", snapshot.cuda_version)
    return {
        **top.as_json(),
        "host": host.as_json(),
        "gpus": [_gpu_json(gpu, probes) for gpu in snapshot.gpus],
        "unlisted_probes": [*_not_listed(snapshot, probes), *probes.unlisted],
        "alerts": [_alert_json(alert) for alert in alerts],
    }


def _not_listed(snapshot: Snapshot, probes: ProbeReport) -> Iterator[dict[str, Any]]:
    """Of processes on a GPU whose list they are not on, as in a container with pids of its own."""
    shown = {
        (process.instance or gpu.uuid, process.pid)
        for gpu in snapshot.gpus
        if not isinstance(gpu.processes, Unknown)
        for process in gpu.processes
    }
    return (body for place, body in probes.listed.items() if place not in shown)


def _gpu_json(gpu: GpuReading, probes: ProbeReport) -> dict[str, Any]:
    body = _Object(
        index=gpu.index,
        uuid=gpu.uuid,
        name=gpu.name,
        bus_id=gpu.bus_id,
        state=gpu.state.value,
        state_reason=gpu.state_reason,
        age_s=round(gpu.age_s, 3),
        unified=gpu.unified,
        mig=gpu.mig,
    )
    body.put_parts(_MEMORY, gpu.memory)
    body.put_ledger(gpu)
    body.put_parts((*READINGS, "compute_capability"), gpu)
    body.put("processes", _processes_json(gpu.processes, gpu.uuid, probes))
    return {**body.as_json(), "instances": [_instance_json(instance, probes) for instance in gpu.instances]}


def _instance_json(instance: Instance, probes: ProbeReport) -> dict[str, Any]:
    body = _Object(index=instance.index, uuid=instance.uuid, name=instance.name)
    body.put_parts(_MEMORY, instance.memory)
    body.put_ledger(instance)
    body.put("processes", _processes_json(instance.processes, instance.uuid, probes))
    return body.as_json()


def _processes_json(
    processes: Reading[tuple[GpuProcess, ...]], uuid: str, probes: ProbeReport
) -> Reading[list[dict[str, Any]]]:
    if isinstance(processes, Unknown):
        return processes
    listed = []
    for process in processes:
        body = _Object(pid=process.pid, kind=process.kind.value, instance=process.instance)
        body.put("used_bytes", process.used_bytes)
        body.put("sm_percent", process.sm_percent)
        body.put_parts(_HOST_PROCESS, process.host)
        probe = probes.listed.get((uuid, process.pid))
        listed.append(body.as_json() if probe is None else {**body.as_json(), "probe": probe})
    return listed


def _alert_json(alert: Alert) -> dict[str, Any]:
    return {
        "severity": alert.severity.value,
        "kind": alert.kind.value,
        "gpu_uuid": alert.gpu_uuid,
        "instance": alert.instance,
        "message": alert.message,
        "since_s": alert.since_s,
    }


def table(snapshot: Snapshot, alerts: Sequence[Alert], width: int = 80) -> Iterator[str]:
    """A snapshot as aligned lines, none wider than `width`."""
    for line in _table(snapshot, alerts):
        yield line if len(line) <= width else line[: width - 1].rstrip() + "…"


def _table(snapshot: Snapshot, alerts: Sequence[Alert]) -> Iterator[str]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(snapshot.time_s))
    driver, cuda = _known(snapshot.driver_version), _known(snapshot.cuda_version)
    yield f"{snapshot.host.name}  {when}  driver {driver}  CUDA {cuda}"
    for alert in alerts:
        yield f"{alert.severity.value}: {alert.message}"
    if not snapshot.gpus:
        return
    yield ""
    yield f"{'GPU':>3}  {'Name':<24}  {'Memory used':<18}  {'Util':>5}  {'Temp':>6}  Power"
    for gpu in snapshot.gpus:
        yield _gpu_row(gpu)
        yield f"     {_ledger_line(gpu)}"
        for instance in gpu.instances:
            yield f"     MIG {instance.index}  {instance.name:<24.24}  {_used(instance.memory)}"
            yield f"            {_ledger_line(instance)}"
        missing = _missing(gpu)
        if missing:
            yield f"     {missing}"
    yield ""
    yield from _process_table(snapshot)


def _gpu_row(gpu: GpuReading) -> str:
    power = f"{_number(gpu.power_w, '', 0)} / {_number(gpu.power_limit_w, ' W', 0)}"
    row = (
        f"{gpu.index:>3}  {gpu.name:<24.24}  {_used(gpu.memory):<18}  {_number(gpu.utilization_percent, ' %'):>5}  "
        f"{_number(gpu.temperature_c, ' °C'):>6}  {power:<13}"
    )
    return row.rstrip() if gpu.state is DeviceState.OK else f"{row.rstrip()}  {gpu.state.value}"


def _process_table(snapshot: Snapshot) -> Iterator[str]:
    rows = [
        (f"{gpu.index}" if instance is None else f"{gpu.index}:{instance.index}", process)
        for gpu in snapshot.gpus
        for instance, processes in [(None, gpu.processes), *((each, each.processes) for each in gpu.instances)]
        if not isinstance(processes, Unknown)
        for process in processes
        if instance is not None or not process.instance
    ]
    if not rows:
        unread = any(isinstance(gpu.processes, Unknown) for gpu in snapshot.gpus)
        yield "No process list could be read." if unread else "No processes on these GPUs."
        return
    yield f"{'GPU':>3}  {'PID':>7}  {'User':<8}  {'Type':<4}  {'Memory':>10}  {'SM':>5}  {'Host':>10}  Command"
    for place, process in rows:
        size, share = _size(process.used_bytes), _number(process.sm_percent, " %")
        start = f"{place:>3}  {process.pid:>7}"
        if isinstance(process.host, Unknown):
            host = f"{_UNKNOWN:>10}  ({process.host.reason})"
            yield f"{start}  {_UNKNOWN:<8}  {process.kind.value:<4}  {size:>10}  {share:>5}  {host}"
        else:
            host = f"{_size(process.host.resident_bytes):>10}  {process.host.command}"
            yield f"{start}  {process.host.user:<8.8}  {process.kind.value:<4}  {size:>10}  {share:>5}  {host}"


def gpu_lines(snapshot: Snapshot) -> Iterator[str]:
    """A line a GPU, for a log."""
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.time_s))
    if snapshot.problem:
        yield f"{clock} {snapshot.problem}"
    for gpu in snapshot.gpus:
        state = "" if gpu.state is DeviceState.OK else f", {gpu.state.value}: {gpu.state_reason}"
        count = "processes unknown" if isinstance(gpu.processes, Unknown) else _count(len(gpu.processes), "process")
        yield (
            f"{clock} GPU {gpu.index}: {_used(gpu.memory)}, util {_number(gpu.utilization_percent, ' %')}, "
            f"{_number(gpu.temperature_c, ' °C')}, {_number(gpu.power_w, ' W', 0)}, {count}{state}"
        )


def alert_line(alert: Alert) -> str:
    """One alert, for a log."""
    clock = time.strftime("%H:%M:%S", time.localtime(alert.since_s))
    return f"{clock} {alert.severity.value}: {alert.message}"


def _ledger_line(device: GpuReading | Instance) -> str:
    if isinstance(device.ledger, Unknown):
        return f"memory unknown: {device.ledger.reason}"
    titles = {
        Bucket.DRIVER_RESERVED: "driver",
        Bucket.PROCESS: "processes",
        Bucket.UNACCOUNTED: "unaccounted",
        Bucket.FREE: "free",
    }
    return ", ".join(f"{titles[kind]} {_size(size_bytes)}" for kind, size_bytes in ledger_sizes(device).items())


def _missing(gpu: GpuReading) -> str:
    """Why what the table leaves blank is blank."""
    shown = {
        "state": Unknown(gpu.state_reason) if gpu.state_reason else None,
        "processes": gpu.processes,
        "utilization": gpu.utilization_percent,
        "temperature": gpu.temperature_c,
        "power": gpu.power_w,
    }
    blank: dict[str, list[str]] = {}
    for title, reading in shown.items():
        if isinstance(reading, Unknown):
            blank.setdefault(reading.reason, []).append(title)
    return "; ".join(f"{', '.join(titles)}: {reason}" for reason, titles in blank.items())


def _used(memory: Reading[Memory]) -> str:
    if isinstance(memory, Unknown):
        return _UNKNOWN
    return f"{memory.used_bytes / GIB:.2f} / {memory.total_bytes / GIB:.2f} GiB"


def _size(size_bytes: Reading[int]) -> str:
    return _UNKNOWN if isinstance(size_bytes, Unknown) else format_bytes(size_bytes)


def _number(reading: Reading[int] | Reading[float], unit: str, digits: int = 0) -> str:
    return _UNKNOWN if isinstance(reading, Unknown) else f"{reading:.{digits}f}{unit}"


def _known(reading: Reading[str]) -> str:
    return _UNKNOWN if isinstance(reading, Unknown) else reading


def _count(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number} {noun}es"
