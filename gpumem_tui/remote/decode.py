"""A line of ``gpumem-tui monitor --json`` back into the snapshot that it was made of.

What a host writes is checked before it is used: types, sums, and that no text can move the cursor of the terminal that
shows it. Most lines are plain and are read at once; the others are taken apart first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from gpumem_tui.memory import Bucket, Ledger, Unknown
from gpumem_tui.monitor.alerts import Alert
from gpumem_tui.monitor.ledger import device_ledger
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.report import SCHEMA
from gpumem_tui.monitor.snapshot import GpuProcess, GpuReading, HostProcess, HostReading, Instance, Memory, Snapshot
from gpumem_tui.remote.line import (
    ALERT,
    HOST,
    HOST_PROCESS,
    MEMORY,
    READ,
    AlertLine,
    GpuLine,
    InstanceLine,
    ProcessLine,
    ReadingLine,
    reason,
)
from gpumem_tui.text import cleaned

_ESCAPE = re.compile(rb'\\(?:u([0-9a-fA-F]{4})|["\\/])|\\')
_LATEST_S = 253_402_300_799.0
"""The end of the year 9999: later times have no date."""


class NoReading(ValueError):
    """A line that holds no reading; one line says what it is instead."""


class OtherSchema(NoReading):
    """A reading of another version of the program."""


@dataclass(frozen=True)
class HostReport:
    """What one line says.

    Attributes:
        alerts: as the host judges, by its own settings and with what its probes say.
        probes: what the probe inside a process says, as JSON (`watch.report`), by GPU uuid and pid.
    """

    snapshot: Snapshot
    alerts: tuple[Alert, ...] = ()
    probes: Mapping[tuple[str, int], Mapping[str, Any]] = field(default_factory=dict)


_DECODER = msgspec.json.Decoder(ReadingLine)


def decoded(line: bytes) -> HostReport:
    """The reading of a line.

    Raises:
        OtherSchema: it is of a program with another schema, or lacks what this one needs.
        NoReading: it is no reading at all.
    """
    body = _read_at_once(line) or _taken_apart(line)
    try:
        return HostReport(_snapshot(body), tuple(map(_alert, body.alerts)), dict(_probes(body)))
    except ValueError as error:
        raise OtherSchema(str(error)) from error


def _read_at_once(line: bytes) -> ReadingLine | None:
    """None where a text has to be cleaned, or to say what is wrong."""
    if not line.isascii() or b"\x7f" in line or not all(map(_shows, _escapes(line))):
        return None
    try:
        body = _DECODER.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    return body if body.schema == SCHEMA else None


def _escapes(line: bytes) -> Iterator[re.Match[bytes]]:
    return _ESCAPE.finditer(line) if b"\\" in line else iter(())


def _shows(escape: re.Match[bytes]) -> bool:
    """Whether what is written as an escape is printable."""
    return chr(int(escape[1], 16)).isprintable() if escape[1] else len(escape[0]) > 1


def _taken_apart(line: bytes) -> ReadingLine:
    try:
        body = json.loads(line, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise NoReading("no JSON") from error
    if not isinstance(body, dict) or "schema" not in body:
        raise NoReading("no reading")
    if body["schema"] != SCHEMA:
        raise OtherSchema(f"schema {body['schema']!r}, not {SCHEMA}")
    try:
        return msgspec.convert(cleaned(body), ReadingLine)
    except (msgspec.ValidationError, RecursionError) as error:
        raise OtherSchema(str(error)) from error


def _refused(word: str) -> None:
    raise ValueError(f"{word} is no number")


def _snapshot(body: ReadingLine) -> Snapshot:
    _check_time(body.time_s)
    return Snapshot(
        time_s=body.time_s,
        driver_version=reason(body, "driver_version") if body.driver_version is None else body.driver_version,
        cuda_version=reason(body, "cuda_version") if body.cuda_version is None else body.cuda_version,
        gpus=tuple(map(_gpu, body.gpus)),
        host=HostReading(*HOST.of(body.host)),
        problem=body.problem,
    )


def _check_time(time_s: float) -> None:
    if not 0 <= time_s <= _LATEST_S:
        raise ValueError(f"{time_s} is no time")


def _gpu(body: GpuLine) -> GpuReading:
    memory, processes = _memory(body), _processes(body)
    return GpuReading(
        index=body.index,
        uuid=body.uuid,
        name=body.name,
        state=body.state,
        state_reason=body.state_reason,
        age_s=body.age_s,
        memory=memory,
        ledger=_ledger(body, memory, processes),
        processes=processes,
        compute_capability=(
            reason(body, "compute_capability") if body.compute_capability is None else body.compute_capability
        ),
        bus_id=body.bus_id,
        unified=body.unified,
        mig=body.mig,
        instances=tuple(map(_instance, body.instances)),
        **dict(zip(READ.names, READ.of(body), strict=True)),
    )


def _instance(body: InstanceLine) -> Instance:
    memory, processes = _memory(body), _processes(body)
    return Instance(body.index, body.uuid, body.name, memory, processes, _ledger(body, memory, processes))


def _memory(body: GpuLine | InstanceLine) -> Reading[Memory]:
    """Its parts; where the whole is unknown, so is its total."""
    return reason(body, "total_bytes") if body.total_bytes is None else Memory(*MEMORY.of(body))


def _processes(body: GpuLine | InstanceLine) -> Reading[tuple[GpuProcess, ...]]:
    return reason(body, "processes") if body.processes is None else tuple(map(_process, body.processes))


def _process(body: ProcessLine) -> GpuProcess:
    host: Reading[HostProcess]
    host = reason(body, "user") if body.user is None else HostProcess(body.pid, *HOST_PROCESS.of(body))
    return GpuProcess(
        body.pid,
        body.kind,
        reason(body, "used_bytes") if body.used_bytes is None else body.used_bytes,
        reason(body, "sm_percent") if body.sm_percent is None else body.sm_percent,
        host,
        body.instance,
    )


def _ledger(
    body: GpuLine | InstanceLine, memory: Reading[Memory], processes: Reading[tuple[GpuProcess, ...]]
) -> Reading[Ledger[GpuProcess]]:
    """Made of its memory and its processes, with what the host says of who holds the rest."""
    if body.ledger is None:
        return reason(body, "ledger")
    made = device_ledger(memory, processes)
    note = body.ledger_notes.get(Bucket.UNACCOUNTED.value)
    if isinstance(made, Unknown) or note is None or any(row.note == note for row in made.rows):
        return made
    rows = (replace(row, note=note) if row.kind is Bucket.UNACCOUNTED else row for row in made.rows)
    return replace(made, rows=tuple(rows))


def _alert(body: AlertLine) -> Alert:
    alert = Alert(*ALERT.of(body))
    _check_time(alert.since_s)
    return alert


def _probes(body: ReadingLine) -> Iterator[tuple[tuple[str, int], Mapping[str, Any]]]:
    """What probes say of the processes on a GPU's list."""
    for gpu in body.gpus:
        devices: list[GpuLine | InstanceLine] = [gpu, *gpu.instances]
        for device in devices:
            for process in device.processes or ():
                if isinstance(process.probe, dict):
                    yield (gpu.uuid, process.pid), process.probe
