"""The monitor without a screen: one reading, or a stream of them, as lines or as JSON, whose keys are a contract."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import astuple

from gpumem_tui.memory import GIB, Bucket, Unknown, Value, format_bytes
from gpumem_tui.monitor.alerts import Alert, AlertKind, Alerts
from gpumem_tui.monitor.gpu_reader import NOT_RETURNED
from gpumem_tui.monitor.ledger import DEVICE_BUCKETS
from gpumem_tui.monitor.probes import NOTHING_SAID, Ask, ProbeReport, no_probes, with_unlisted
from gpumem_tui.monitor.readings import NOT_READ_YET, READINGS, Reading
from gpumem_tui.monitor.snapshot import (
    NOT_LOOKED_UP_YET,
    STARTING,
    USUAL_RUNTIME,
    WHOSE,
    DeviceState,
    DriverReading,
    GpuProcess,
    GpuReading,
    HostProcess,
    Instance,
    Memory,
    Snapshot,
    Source,
    UnlistedProcess,
)
from gpumem_tui.monitor.users import UserTotal, only_of, user_totals, users_lines
from gpumem_tui.monitor.vendors import vendor
from gpumem_tui.report.objects import SCHEMA, Body, picked
from gpumem_tui.report.output import Complaints, Printer, columns, sleep_until
from gpumem_tui.report.tables import TextColumn, TextTable, counted, cut_to

if TYPE_CHECKING:
    from gpumem_tui.monitor.notify import Notifier
    from gpumem_tui.monitor.wire import ReportWriter

_MEMORY = Memory.__struct_fields__
_HOST_PROCESS = tuple(name for name in HostProcess.__struct_fields__ if name != "pid")
_UNKNOWN = "–"
DRIVER_ANSWER_S = 30.0
"""Seconds after which a driver counts as one that does not answer."""
COMPLETE_S = 3.0
"""Seconds in which the values that are read slowly come, unless a call hangs."""
_POLL_S = 0.5

_GPUS = TextTable(
    TextColumn("GPU", 3, ">"),
    TextColumn("Name", 24, cut=True),
    TextColumn("Memory used", 18),
    TextColumn("Util", 5, ">"),
    TextColumn("Temp", 6, ">"),
    TextColumn("Power"),
)
_PROCESSES = TextTable(
    TextColumn("GPU", 3, ">"),
    TextColumn("PID", 7, ">"),
    TextColumn("User", 8, cut=True),
    TextColumn("Type", 4),
    TextColumn("Memory", 10, ">"),
    TextColumn("SM", 5, ">"),
    TextColumn("Host", 10, ">"),
    TextColumn("Command"),
)
_LEDGER_TITLES = {
    Bucket.DRIVER_RESERVED: "driver",
    Bucket.PROCESS: "processes",
    Bucket.UNACCOUNTED: "unaccounted",
    Bucket.FREE: "free",
}


# Reading


class SnapshotKeeper(Protocol):
    """An object that keeps every snapshot, such as a recording."""

    def add(self, snapshot: Snapshot, alerts: tuple[Alert, ...], probes: ProbeReport) -> None:
        """Append one snapshot.

        Raises:
            RecordingError: it cannot be kept.
        """


class NoDriverAnswer(Exception):
    """The driver does not answer at all; one line."""


def first(source: Source) -> Snapshot:
    """Return the first snapshot of a source.

    Raises:
        NoDriverAnswer: none comes in time.
    """
    snapshot = source.wait(None, DRIVER_ANSWER_S)
    if snapshot is None:
        raise NoDriverAnswer(f"no GPU driver has answered for {DRIVER_ANSWER_S:.0f} s; see {vendor().kernel_log}")
    return snapshot


def complete(source: Source) -> Snapshot:
    """Return the first snapshot of a source that has every value, or after a few seconds of a driver's work the newest.

    Raises:
        NoDriverAnswer: none comes in time.
    """
    started = _until(source, first(source), lambda snapshot: not waits(snapshot.problem), DRIVER_ANSWER_S)
    return _until(source, started, is_complete, COMPLETE_S)


def waits(problem: str) -> bool:
    """Return whether a machine's problem is that its driver starts, or has not returned yet."""
    return STARTING in problem or NOT_RETURNED in problem


def _until(source: Source, snapshot: Snapshot, holds: Callable[[Snapshot], bool], patience_s: float) -> Snapshot:
    """Return the first snapshot from this one on of which something holds, or after that time the newest."""
    deadline_s = time.monotonic() + patience_s
    while not holds(snapshot) and (left_s := deadline_s - time.monotonic()) > 0:
        snapshot = source.wait(snapshot, left_s) or snapshot
    return snapshot


def live(source: Source, interval_s: float, held: Sequence[int] = (), *, early: bool = False) -> Iterator[Snapshot]:
    """Yield snapshots of a source without end, at most one each `interval_s` seconds.

    Args:
        early: the first may lack values; otherwise it has all that come within a few seconds.
        held: as `sleep_until` has it.

    Raises:
        NoDriverAnswer: none comes in time.
    """
    last = first(source)
    if not early:
        last = _until(source, last, is_complete, COMPLETE_S)
    due_s = time.monotonic()
    while True:
        yield last
        due_s = max(due_s + interval_s, time.monotonic())
        sleep_until(due_s, held)
        newer = None
        while newer is None:
            newer = source.wait(last, _POLL_S)
        last = newer


def is_complete(snapshot: Snapshot) -> bool:
    """Return whether no value of a snapshot is still to come; without GPUs and a problem, the GPUs are."""
    return bool(snapshot.gpus or snapshot.problem) and not any(_is_unread(gpu) for gpu in snapshot.gpus)


def _is_unread(gpu: GpuReading) -> bool:
    """Return whether a value is still to come."""
    hosts = [] if isinstance(gpu.processes, Unknown) else [process.host for process in gpu.processes]
    readings = [*hosts, *astuple(gpu), *astuple(gpu.telemetry)]
    return any(reading in (NOT_READ_YET, NOT_LOOKED_UP_YET) for reading in readings)


# Printing


def print_once(snapshot: Snapshot, alerts: Alerts, *, as_json: bool, only: str = "", ask: Ask = no_probes) -> None:
    """Print one reading: a JSON object, or a table, cut where a terminal ends.

    Args:
        only: the user whose processes are printed; empty for everybody's.
    """
    probes = ask(snapshot)
    current = alerts.update(snapshot, probes)
    snapshot, probes = only_of(only, snapshot, probes) if only else (with_unlisted(snapshot, probes), probes)
    Printer(as_json=as_json).show(
        body=lambda: snapshot_json(snapshot, current, probes), lines=lambda: table(snapshot, current, columns())
    )


def stream(  # noqa: PLR0913 - named only, each with its default
    snapshots: Iterable[Snapshot],
    alerts: Alerts,
    *,
    as_json: bool,
    wire: ReportWriter | None = None,
    only: str = "",
    recorder: SnapshotKeeper | None = None,
    ask: Ask = no_probes,
    notifier: Notifier | None = None,
    quiet: bool = False,
) -> None:
    """Print every reading as it comes, and put it into the recording.

    As JSON it is an object a line, otherwise a line a GPU and one for each alert that begins.

    Args:
        only: the user whose processes are printed; empty for everybody's. All are recorded.
        wire: print what it makes of the readings, for a viewer on another machine.
        quiet: print none; on stderr why no GPU can be watched.

    Raises:
        RecordingError: the recording cannot continue.
    """
    output, say_once, say_problem = Printer(as_json=as_json), Complaints().say, Complaints().say
    known: set[tuple[str, str, AlertKind]] = set()
    for snapshot in snapshots:
        probes = ask(snapshot)
        current = alerts.update(snapshot, probes)
        if notifier is not None:
            notifier.update(snapshot.host.name, current)
            say_once(notifier.problem)
        if recorder is not None:
            recorder.add(snapshot, current, probes)
        if quiet:
            say_problem(snapshot.problem)
            continue
        snapshot, probes = only_of(only, snapshot, probes) if only else (snapshot, probes)
        if wire is not None:
            from gpumem_tui.monitor.wire import HostReport

            line = wire.line(HostReport.of(with_unlisted(snapshot, probes), current, probes.said))
            sys.stdout.buffer.write(f"{line}\n".encode())  # UTF-8, as the viewer reads it, in any locale here
            sys.stdout.flush()
            continue
        begun = [alert for alert in current if alert.key not in known]
        output.show(body=partial(snapshot_json, snapshot, current, probes), lines=partial(log_lines, snapshot, begun))
        known = {alert.key for alert in current}


# JSON


def ledger_sizes(device: GpuReading | Instance) -> dict[Bucket, Value]:
    """Return the ledger's bytes by kind, empty if it is unknown.

    Processes whose list could not be read are unknown, not 0 bytes.
    """
    if isinstance(device.ledger, Unknown):
        return {}
    sizes = {kind: device.ledger.size_bytes(kind) for kind in DEVICE_BUCKETS}
    if isinstance(device.processes, Unknown):
        sizes[Bucket.PROCESS] = device.processes
    return sizes


def snapshot_json(
    snapshot: Snapshot, alerts: Sequence[Alert] = (), probes: ProbeReport = NOTHING_SAID
) -> dict[str, object]:
    """Return one object. A value that could not be read is null, with its reason under the nearest "unavailable".

    Args:
        probes: a process with a probe gets what that states under "probe"; one that no GPU lists, as on the CPU or in a
            container with pids of its own, is among "unlisted_probes".
    """
    snapshot = with_unlisted(snapshot, probes)
    host = Body()
    host.put_all(snapshot.host.__struct_fields__, snapshot.host)
    other: dict[str, object] = {} if snapshot.runtime == USUAL_RUNTIME else {"runtime": snapshot.runtime}
    if len(snapshot.drivers) > 1 or other:
        other["drivers"] = [_driver_json(each) for each in snapshot.drivers]
    top = Body(schema=SCHEMA, time_s=snapshot.time_s, problem=snapshot.problem, **other)
    top.put_all(("driver_version", "cuda_version"), snapshot)
    return top.done(
        host=host.done(),
        gpus=[_gpu_json(gpu, probes) for gpu in snapshot.gpus],
        unlisted_probes=[_unlisted_json(each, probes.said.get(each.place, {})) for each in snapshot.unlisted],
        users=[_user_json(each) for each in user_totals({snapshot.host.name: snapshot})],
        alerts=[alert.as_json() for alert in alerts],
    )


def _driver_json(driver: DriverReading) -> dict[str, object]:
    body = Body(**picked(driver, "vendor", "runtime", "problem"))
    body.put_all(("driver_version", "runtime_version"), driver)
    return body.done()


def _unlisted_json(each: UnlistedProcess, said: Mapping[str, object]) -> dict[str, object]:
    """Return what a probe reports of a process that no GPU lists, and under "process" which one it is."""
    body = Body()
    body.put_all(_HOST_PROCESS, each.host)
    known = {"pid": each.pid, "device": each.device, "gpu_uuid": each.gpu_uuid or None}
    return {**said, **known, "process": body.done()}


def _user_json(each: UserTotal) -> dict[str, object]:
    return {**picked(each, "user", "used_bytes", "unread"), "gpus": [index for _, index in each.gpus],
            **picked(each, "processes", "cpu_percent", "resident_bytes")}  # fmt: skip


def _gpu_json(gpu: GpuReading, probes: ProbeReport) -> dict[str, object]:
    body = Body(
        **picked(gpu, "index", "uuid", "name", "bus_id"),
        **{name: value for name, value in picked(gpu, *WHOSE).items() if value not in (None, "")},
        state=gpu.state.value,
        state_reason=gpu.state_reason,
        age_s=round(gpu.age_s, 3),
        **picked(gpu, "unified", "mig"),
    )
    _put_memory(body, gpu)
    body.put_all(READINGS, gpu.telemetry)
    body.put("compute_capability", gpu.compute_capability)
    body.put("processes", _processes_json(gpu.processes, gpu.uuid, probes))
    return body.done(instances=[_instance_json(instance, probes) for instance in gpu.instances])


def _instance_json(instance: Instance, probes: ProbeReport) -> dict[str, object]:
    body = Body(**picked(instance, "index", "uuid", "name"))
    _put_memory(body, instance)
    body.put("processes", _processes_json(instance.processes, instance.uuid, probes))
    return body.done()


def _put_memory(body: Body, device: GpuReading | Instance) -> None:
    """Add a device's memory and its ledger: bytes by kind, which sum to the total, and notes on the rows."""
    body.put_all(_MEMORY, device.memory)
    if isinstance(device.ledger, Unknown):
        body.put("ledger_notes", {})
        body.put("ledger", device.ledger)
        return
    body.put_each("ledger", {kind.value: size_bytes for kind, size_bytes in ledger_sizes(device).items()})
    body.put("ledger_notes", {row.kind.value: row.note for row in device.ledger.rows if row.note})


def _processes_json(
    processes: Reading[tuple[GpuProcess, ...]], uuid: str, probes: ProbeReport
) -> Reading[list[dict[str, object]]]:
    if isinstance(processes, Unknown):
        return processes
    listed = []
    for process in processes:
        body = Body(pid=process.pid, kind=process.kind.value, instance=process.instance)
        body.put_all(("used_bytes", "sm_percent"), process)
        body.put_all(_HOST_PROCESS, process.host)
        probe = probes.said.get((process.instance or uuid, process.pid))
        listed.append(body.done() if probe is None else body.done(probe=probe))
    return listed


# Lines


def table(snapshot: Snapshot, alerts: Sequence[Alert], width: int = 80, name: str = "") -> Iterator[str]:
    """Return a snapshot as aligned lines, none wider than `width`.

    Args:
        name: what the user calls the host; its own name is next to it.
    """
    return cut_to(_table(snapshot, alerts, name), width)


def _table(snapshot: Snapshot, alerts: Sequence[Alert], name: str) -> Iterator[str]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(snapshot.time_s))
    own = snapshot.host.name
    yield "  ".join([own if name in ("", own) else f"{name} ({own})", when, *snapshot.versions])
    for alert in alerts:
        yield f"{alert.severity.value}: {alert.message}"
    if not snapshot.gpus and not snapshot.unlisted:
        return
    yield ""
    if snapshot.gpus:
        yield _GPUS.header
    for gpu in snapshot.gpus:
        yield _gpu_row(gpu)
        yield f"     {_ledger_line(gpu)}"
        for instance in gpu.instances:
            yield f"     MIG {instance.index}  {instance.name:<24.24}  {_used(instance.memory)}"
            yield f"            {_ledger_line(instance)}"
        missing = _missing(gpu)
        if missing:
            yield f"     {missing}"
    if snapshot.gpus:
        yield ""
    yield from _process_table(snapshot)
    totals = user_totals({snapshot.host.name: snapshot})
    if len(totals) > 1:
        yield ""
        yield from users_lines(totals, several=False)


def _gpu_row(gpu: GpuReading) -> str:
    row = _GPUS.row(
        str(gpu.index),
        gpu.full_name,
        _used(gpu.memory),
        _number(gpu.telemetry.utilization_percent, " %"),
        _number(gpu.telemetry.temperature_c, " °C"),
        f"{_number(gpu.telemetry.power_w, '', 0)} / {_number(gpu.telemetry.power_limit_w, ' W', 0)}",
    )
    return row if gpu.state is DeviceState.OK else f"{row}  {gpu.state.value}"


def _devices(snapshot: Snapshot) -> Iterator[tuple[str, GpuReading | Instance]]:
    for gpu in snapshot.gpus:
        yield f"{gpu.index}", gpu
        yield from ((f"{gpu.index}:{part.index}", part) for part in gpu.instances)


def _process_table(snapshot: Snapshot) -> Iterator[str]:
    devices = list(_devices(snapshot))
    rows = [
        (place, process)
        for place, part in devices
        if not isinstance(part.processes, Unknown)
        for process in part.processes
        if isinstance(part, Instance) or not process.instance
    ]
    places = {part.uuid: place for place, part in devices}
    rows += [(places.get(each.gpu_uuid, each.device), each.process) for each in snapshot.unlisted]
    if not rows:
        unread = any(isinstance(gpu.processes, Unknown) for gpu in snapshot.gpus)
        yield "No process list could be read." if unread else "No processes on these GPUs."
        return
    yield from _PROCESSES.lines(_process_row(place, process) for place, process in rows)


def _process_row(place: str, process: GpuProcess) -> tuple[str, ...]:
    if isinstance(process.host, Unknown):
        user, resident, command = _UNKNOWN, _UNKNOWN, f"({process.host.reason})"
    else:
        user, resident = process.host.user, _size(process.host.resident_bytes)
        command = process.host.command
    size, share = _size(process.used_bytes), _number(process.sm_percent, " %")
    return place, str(process.pid), user, process.kind.value, size, share, resident, command


def log_lines(snapshot: Snapshot, begun: Iterable[Alert] = ()) -> Iterator[str]:
    """Yield a line for each GPU and each alert that has begun, for a log."""
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.time_s))
    if snapshot.problem:
        yield f"{clock} {snapshot.problem}"
    for gpu in snapshot.gpus:
        state = "" if gpu.state is DeviceState.OK else f", {gpu.state.value}: {gpu.state_reason}"
        processes = gpu.processes
        count = (
            "processes unknown" if isinstance(processes, Unknown) else counted(len(processes), "process", "processes")
        )
        yield (
            f"{clock} GPU {gpu.index}: {_used(gpu.memory)}, util {_number(gpu.telemetry.utilization_percent, ' %')}, "
            f"{_number(gpu.telemetry.temperature_c, ' °C')}, {_number(gpu.telemetry.power_w, ' W', 0)}, {count}{state}"
        )
    for alert in begun:
        clock = time.strftime("%H:%M:%S", time.localtime(alert.since_s))
        yield f"{clock} {alert.severity.value}: {alert.message}"


def _ledger_line(device: GpuReading | Instance) -> str:
    if isinstance(device.ledger, Unknown):
        return f"memory unknown: {device.ledger.reason}"
    return ", ".join(f"{_LEDGER_TITLES[kind]} {_size(size)}" for kind, size in ledger_sizes(device).items())


def _missing(gpu: GpuReading) -> str:
    """Return why what the table leaves blank is blank."""
    shown = {
        "state": Unknown(gpu.state_reason) if gpu.state_reason else None,
        "processes": gpu.processes,
        "utilization": gpu.telemetry.utilization_percent,
        "temperature": gpu.telemetry.temperature_c,
        "power": gpu.telemetry.power_w,
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
