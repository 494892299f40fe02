"""A line of ``gpumem-tui monitor --json`` back into the snapshot that it was made of.

What a host writes is checked before it is used: types, sums, and that no text can move the cursor of the terminal that
shows it. Most lines are plain and are read at once; the others are taken apart first. The types of a line are those of
`monitor.snapshot`, with null where a reading is unknown: the contract of `monitor.report`. A key that is missing or of
another type is an error; one that is not known here is passed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from operator import attrgetter
from types import NoneType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType

from gpumem_tui.memory import Bucket, Ledger, Unknown
from gpumem_tui.monitor.alerts import Alert
from gpumem_tui.monitor.ledger import device_ledger
from gpumem_tui.monitor.readings import Reading, Telemetry
from gpumem_tui.monitor.snapshot import (
    USUAL_RUNTIME,
    WHOSE,
    DriverReading,
    GpuProcess,
    GpuReading,
    HostProcess,
    HostReading,
    Instance,
    Memory,
    Snapshot,
    UnlistedProcess,
)
from gpumem_tui.report.objects import SCHEMA
from gpumem_tui.text import cleaned

_ESCAPE = re.compile(rb'\\(?:u([0-9a-fA-F]{4})|["\\/])|\\')
_LATEST_S = 253_402_300_799.0
"""The end of the year 9999: later times have no date."""


class NoReading(ValueError):
    """A line that holds no reading; one line says what it is instead."""


class OtherSchema(NoReading):
    """A reading of another version of the program."""


# ---- what a line is made of

Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""A whole number of any reading. Longer ones would be read too, and could take very long to write."""


class LineParts:
    """The attributes of an object of the line that make up one value.

    Args:
        kind: the value's dataclass.
        without: fields of it that stand elsewhere.
        lacks_all: any of them may be null in the line, as of a process that is not known.
    """

    def __init__(self, kind: type, *without: str, lacks_all: bool = False) -> None:
        hints = get_type_hints(kind)
        self.names = tuple(field.name for field in fields(kind) if field.name not in without)
        self._can_lack = frozenset(name for name in self.names if Unknown in get_args(hints[name]))
        nullable = self.names if lacks_all else self._can_lack
        self.types = [(name, _line_type(hints[name], or_null=name in nullable)) for name in self.names]
        self._get = attrgetter(*self.names)

    def of(self, body: Any) -> tuple[Any, ...]:
        """Return the values in the order of the fields, an `Unknown` with its reason for null.

        Raises:
            ValueError: one is null that must be known, or without a reason.
        """
        values: tuple[Any, ...] = self._get(body)
        if None not in values:
            return values
        pairs = zip(self.names, values, strict=True)
        return tuple(self._unknown(body, name) if value is None else value for name, value in pairs)

    def named(self, body: Any) -> dict[str, Any]:
        """Return the values by the names of the fields; raises as `of`."""
        return dict(zip(self.names, self.of(body), strict=True))

    def _unknown(self, body: Any, name: str) -> Unknown:
        if name not in self._can_lack:
            raise ValueError(f"{name} is null")
        return reason(body, name)


def reason(body: Any, name: str) -> Unknown:
    """Return why a value of an object is null.

    Raises:
        ValueError: it does not say.
    """
    if name not in body.unavailable:
        raise ValueError(f"{name} is null without a reason")
    return Unknown(body.unavailable[name])


def _line_type(hint: Any, *, or_null: bool) -> Any:
    """Return the type of a reading's value, or of None."""
    members = get_args(hint) if Unknown in get_args(hint) else (hint,)
    wanted = (*(_whole(member) for member in members if member is not Unknown), *([NoneType] if or_null else []))
    return Union[wanted]  # noqa: UP007  its members are known only now


def _whole(hint: Any) -> Any:
    """Return a type whose whole numbers are `Whole`."""
    if get_origin(hint) is tuple:
        return tuple[tuple(map(_whole, get_args(hint)))]  # type: ignore[misc]  # its members are known only now
    return Whole if hint is int else hint


_OWN_PLACE = ("memory", "processes", "ledger")
"""Of a device: what is made of several values of the line."""
MEMORY = LineParts(Memory)
GPU = LineParts(GpuReading, *_OWN_PLACE, "telemetry", "instances", *WHOSE)
TELEMETRY = LineParts(Telemetry)
INSTANCE = LineParts(Instance, *_OWN_PLACE)
PROCESS = LineParts(GpuProcess, "host")
SNAPSHOT = LineParts(Snapshot, "gpus", "host", "calls", "runtime", "drivers", "unlisted")
DRIVER = LineParts(DriverReading, "calls")
HOST = LineParts(HostReading, lacks_all=True)
HOST_PROCESS = LineParts(HostProcess, "pid", lacks_all=True)
ALERT = LineParts(Alert, lacks_all=True)


class _Memory(msgspec.Struct, gc=False):
    """The part that GPUs and MIG instances have in common."""

    total_bytes: Whole | None
    reserved_bytes: Whole | None
    used_bytes: Whole | None
    free_bytes: Whole | None
    ledger: dict[str, Whole | None] | None
    ledger_notes: dict[str, str]
    unavailable: dict[str, str]


_Process: Any = msgspec.defstruct("_Process", [*PROCESS.types, *HOST_PROCESS.types], gc=False)
_NamedProcess: Any = msgspec.defstruct("_NamedProcess", HOST_PROCESS.types)
_Instance: Any = msgspec.defstruct("_Instance", INSTANCE.types, bases=(_Memory,), gc=False)
_Gpu: Any = msgspec.defstruct("_Gpu", [*TELEMETRY.types, *GPU.types], bases=(_Memory,), gc=False)
_Host: Any = msgspec.defstruct("_Host", HOST.types)
_Snapshot: Any = msgspec.defstruct("_Snapshot", SNAPSHOT.types)
AlertLine: Any = msgspec.defstruct("AlertLine", ALERT.types)
"""None of these holds itself, so that those of which there are many need no garbage collector (`gc`)."""


class ProcessLine(_Process):  # type: ignore[misc]
    """A process on a GPU."""

    unavailable: dict[str, str]
    probe: Any = None


class NamedProcessLine(_NamedProcess):  # type: ignore[misc]
    """A process as the operating system knows it."""

    unavailable: dict[str, str]


class UnlistedLine(msgspec.Struct):
    """The place of a process on no GPU's list, as its probe says it: which process, on which device."""

    pid: Whole
    device: str
    process: NamedProcessLine
    gpu_uuid: str | None = None


class InstanceLine(_Instance):  # type: ignore[misc]
    """A MIG instance in the line of a host."""

    processes: list[ProcessLine] | None


class GpuLine(_Gpu):  # type: ignore[misc]
    """A GPU in the line of a host."""

    processes: list[ProcessLine] | None
    instances: list[InstanceLine]
    vendor: str = ""
    vendor_index: Whole | None = None
    runtime_index: Whole | None = None
    partition: str = ""


class HostLine(_Host):  # type: ignore[misc]
    """The machine around the GPUs."""

    unavailable: dict[str, str]


DriverLine: Any = msgspec.defstruct("DriverLine", [*DRIVER.types, ("unavailable", dict[str, str])])


class ReadingLine(_Snapshot):  # type: ignore[misc]
    """The line of a host: one whole reading, as its `monitor --json` prints it."""

    schema: Whole
    host: HostLine
    gpus: list[GpuLine]
    alerts: list[AlertLine]
    unavailable: dict[str, str]
    runtime: str = USUAL_RUNTIME
    drivers: list[DriverLine] = msgspec.field(default_factory=list)
    unlisted_probes: list[dict[str, Any]] = msgspec.field(default_factory=list)


# ---- what changes are made of


def _change_of(kind: Any, **others: Any) -> Any:
    """Return a struct with the fields of another, each of which may be left out.

    Args:
        others: fields with other types than there, or that it has not.
    """
    found = {each.name: each.type for each in msgspec.structs.fields(kind)} | others
    optional: list[tuple[str, Any, Any]] = [
        (name, Union[hint, UnsetType], UNSET)  # noqa: UP007  its members are known only now
        for name, hint in found.items()
    ]
    return msgspec.defstruct(f"{kind.__name__.removesuffix('Line')}Change", optional, gc=False)


_LISTS = ("gpus", "processes", "instances")
"""The lists of objects, in which changes stand by place; one that is longer or shorter comes whole."""
_ProcessChange = _change_of(ProcessLine, probe_changes=dict[str, Any])
_Processes = list[ProcessLine] | dict[int, _ProcessChange] | None  # type: ignore[valid-type]
_InstanceChange = _change_of(InstanceLine, processes=_Processes)
_GpuChange = _change_of(
    GpuLine,
    processes=_Processes,
    instances=list[InstanceLine] | dict[int, _InstanceChange],  # type: ignore[valid-type]
)
_ReadingChange = _change_of(
    ReadingLine,
    host=_change_of(HostLine),
    gpus=list[GpuLine] | dict[int, _GpuChange],  # type: ignore[valid-type]
)


class ChangesLine(msgspec.Struct):
    """A line that says what has changed since the reading of a time (`monitor.report.changes_json`)."""

    schema: Whole
    since: float
    changes: _ReadingChange  # type: ignore[valid-type]


Line = TypeVar("Line", ReadingLine, ChangesLine)


# ---- from a line to a snapshot

_DECODER = msgspec.json.Decoder(ReadingLine)
_CHANGES_DECODER = msgspec.json.Decoder(ChangesLine)
_CHANGES_START = re.compile(rb'\{"schema": ?\d+, ?"since":')


class HostReport:
    """The content of one line from a host; most of it is decoded only when it is asked for.

    Args:
        reading: a snapshot, or the checked line that one can be made of.
        alerts: as the host judges, by its own settings and with what its probes say; of a line its own.
        probes: what the probe inside a process says, as JSON (`watch.report`), by where it trains and its pid
            (`monitor.probes.ProbeReport.said`); of a line its own.

    Attributes:
        devices: the GPUs as snapshots or as lines have them, and `line`, the line, if there is one.
    """

    def __init__(
        self,
        reading: Snapshot | ReadingLine,
        alerts: tuple[Alert, ...] = (),
        probes: Mapping[tuple[str, int], Mapping[str, Any]] | None = None,
    ) -> None:
        self._reading = reading
        self.line = reading if isinstance(reading, ReadingLine) else None
        self.alerts = alerts if self.line is None else tuple(map(_alert, self.line.alerts))
        self._probes = probes or {}
        self.devices: Sequence[GpuReading | GpuLine] = reading.gpus

    def __eq__(self, other: object) -> bool:
        """Return whether both say the same."""
        if not isinstance(other, HostReport):
            return NotImplemented
        return (self.snapshot, self.alerts, self.probes) == (other.snapshot, other.alerts, other.probes)

    __hash__ = None  # type: ignore[assignment]  # as it holds dictionaries

    @property
    def time_s(self) -> float:
        """Return when it was made, seconds since the epoch."""
        return float(self._reading.time_s)

    @cached_property
    def snapshot(self) -> Snapshot:
        """Return the snapshot."""
        return self._reading if isinstance(self._reading, Snapshot) else _snapshot(self._reading)

    @cached_property
    def probes(self) -> Mapping[tuple[str, int], Mapping[str, Any]]:
        """Return what probes say."""
        return self._probes if self.line is None else dict(_probes(self.line, self.unlisted))

    @cached_property
    def unlisted(self) -> tuple[UnlistedProcess, ...]:
        """Return what trains there and is on no GPU's list."""
        return self.snapshot.unlisted if self.line is None else _unlisted_of(self.line)


class ReadingDecoder:
    """The lines of one host back into reports: a whole reading, then each a whole one or what has changed."""

    def __init__(self) -> None:
        self._last: ReadingLine | None = None

    def decoded(self, line: bytes) -> HostReport:
        """Return the reading of a line.

        Raises:
            OtherSchema: it is of a program with another schema, or lacks what this one needs.
            NoReading: it is no reading at all.
        """
        try:
            if _CHANGES_START.match(line):
                body = _changed_reading(self._last, _read(line, _CHANGES_DECODER, ChangesLine))
            else:
                body = _read(line, _DECODER, ReadingLine)
                _check(body)
            report = HostReport(body)
        except ValueError as error:
            raise error if isinstance(error, NoReading) else OtherSchema(str(error)) from error
        self._last = body
        return report


def decoded(line: bytes) -> HostReport:
    """Return the reading of a line that is whole; raises as `ReadingDecoder.decoded`."""
    return ReadingDecoder().decoded(line)


def _read(line: bytes, decoder: msgspec.json.Decoder[Line], kind: type[Line]) -> Line:
    return _read_at_once(line, decoder) or _taken_apart(line, kind)


def _read_at_once(line: bytes, decoder: msgspec.json.Decoder[Line]) -> Line | None:
    """Read a plain line; None where a text has to be cleaned, or to say what is wrong."""
    escapes = _ESCAPE.finditer(line) if b"\\" in line else ()
    if not line.isascii() or b"\x7f" in line or not all(map(_shows, escapes)):
        return None
    try:
        body = decoder.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    return body if body.schema == SCHEMA else None


def _shows(escape: re.Match[bytes]) -> bool:
    """Return whether what is written as an escape is printable."""
    return chr(int(escape[1], 16)).isprintable() if escape[1] else len(escape[0]) > 1


def _taken_apart(line: bytes, kind: type[Line]) -> Line:
    try:
        body = json.loads(line, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise NoReading("no JSON") from error
    if not isinstance(body, dict) or "schema" not in body:
        raise NoReading("no reading")
    if body["schema"] != SCHEMA:
        raise OtherSchema(f"schema {body['schema']!r}, not {SCHEMA}")
    try:
        return msgspec.convert(cleaned(body), kind, str_keys=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise OtherSchema(str(error)) from error


def _refused(word: str) -> None:
    raise ValueError(f"{word} is no number")


def _check(body: ReadingLine) -> None:
    """Check that whatever is null may be and has a reason, so that a snapshot can be made of it.

    Raises:
        ValueError: it cannot.
    """
    _check_time(body.time_s)
    SNAPSHOT.of(body)
    HOST.of(body.host)
    _unlisted_of(body)
    for gpu in body.gpus:
        _check_device(gpu, GPU)


def _check_device(body: GpuLine | InstanceLine, parts: LineParts) -> None:
    parts.of(body)
    if isinstance(body, GpuLine):
        TELEMETRY.of(body)
    _memory(body)
    if body.ledger is None:
        reason(body, "ledger")
    if body.processes is None:
        reason(body, "processes")
    for process in body.processes or ():
        _check_process(process)
    if isinstance(body, GpuLine):
        for instance in body.instances:
            _check_device(instance, INSTANCE)


def _check_process(body: ProcessLine) -> None:
    PROCESS.of(body)
    if body.user is None:
        reason(body, "user")
    else:
        HOST_PROCESS.of(body)


# ---- what has changed


def _changed_reading(last: ReadingLine | None, line: ChangesLine) -> ReadingLine:
    """Return a new reading of the last one and what has changed since; what has not is shared by both.

    Raises:
        ValueError: the changes are of another reading, or make one that cannot be.
    """
    if last is None or last.time_s != line.since:
        raise ValueError("changes of a reading that has not come")
    body: ReadingLine = _with(last, line.changes)
    _check_time(body.time_s)
    if body.unavailable or body.host is not last.host:
        SNAPSHOT.of(body)
        HOST.of(body.host)
    if body.unlisted_probes is not last.unlisted_probes:
        _unlisted_of(body)
    return body


def _with(last: Any, change: Any) -> Any:
    """Return the last object with what has changed, checked where something is null."""
    values = {}
    for name in change.__struct_fields__:
        value = getattr(change, name)
        if value is UNSET:
            continue
        if name == "host":
            value = _with(last.host, value)
        elif isinstance(value, dict) and name in _LISTS:
            value = _list_with(getattr(last, name), value)
        elif name == "probe_changes":
            name, value = "probe", {**(last.probe or {}), **value}
        values[name] = value
    made = msgspec.structs.replace(last, **values)
    if None in values.values() or "unavailable" in values:
        if isinstance(made, ProcessLine):
            _check_process(made)
        elif isinstance(made, (GpuLine, InstanceLine)):
            _check_device(made, GPU if isinstance(made, GpuLine) else INSTANCE)
    return made


def _list_with(last: list[Any] | None, changes: dict[int, Any]) -> list[Any]:
    made = list(last or ())
    for place, change in changes.items():
        if not 0 <= place < len(made):
            raise ValueError(f"a change at {place} of {len(made)}")
        made[place] = _with(made[place], change)
    return made


# ---- a snapshot of it


def gpu_of(device: GpuReading | GpuLine) -> GpuReading:
    """Return a GPU of a report as snapshots have it."""
    return device if isinstance(device, GpuReading) else _gpu(device)


def process_of(process: GpuProcess | ProcessLine) -> GpuProcess:
    """Return a process of a report as snapshots have it."""
    return process if isinstance(process, GpuProcess) else _process(process)


def _snapshot(body: ReadingLine) -> Snapshot:
    return Snapshot(
        gpus=tuple(map(_gpu, body.gpus)),
        host=HostReading(*HOST.of(body.host)),
        runtime=body.runtime,
        drivers=tuple(DriverReading(*DRIVER.of(each)) for each in body.drivers),
        unlisted=_unlisted_of(body),
        **SNAPSHOT.named(body),
    )


def _check_time(time_s: float) -> None:
    if not 0 <= time_s <= _LATEST_S:
        raise ValueError(f"{time_s} is no time")


def _gpu(body: GpuLine) -> GpuReading:
    memory, processes = _memory(body), _processes(body)
    return GpuReading(
        memory=memory,
        ledger=_ledger(body, memory, processes),
        processes=processes,
        instances=tuple(map(_instance, body.instances)),
        telemetry=Telemetry(**TELEMETRY.named(body)),
        **{name: getattr(body, name) for name in WHOSE},
        **GPU.named(body),
    )


def _instance(body: InstanceLine) -> Instance:
    memory, processes = _memory(body), _processes(body)
    ledger = _ledger(body, memory, processes)
    return Instance(memory=memory, processes=processes, ledger=ledger, **INSTANCE.named(body))


def _memory(body: GpuLine | InstanceLine) -> Reading[Memory]:
    """Make memory of its parts; where the whole is unknown, so is its total."""
    return reason(body, "total_bytes") if body.total_bytes is None else Memory(*MEMORY.of(body))


def _processes(body: GpuLine | InstanceLine) -> Reading[tuple[GpuProcess, ...]]:
    return reason(body, "processes") if body.processes is None else tuple(map(_process, body.processes))


def _process(body: ProcessLine) -> GpuProcess:
    return GpuProcess(host=_host_process(body.pid, body), **PROCESS.named(body))


def _host_process(pid: int, body: Any) -> Reading[HostProcess]:
    return reason(body, "user") if body.user is None else HostProcess(pid, *HOST_PROCESS.of(body))


def _ledger(
    body: GpuLine | InstanceLine, memory: Reading[Memory], processes: Reading[tuple[GpuProcess, ...]]
) -> Reading[Ledger[GpuProcess]]:
    """Make a ledger of memory and processes, with what the host says of who holds the rest."""
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


def _unlisted_of(body: ReadingLine) -> tuple[UnlistedProcess, ...]:
    return tuple(map(_unlisted, body.unlisted_probes))


def _unlisted(body: dict[str, Any]) -> UnlistedProcess:
    try:
        line = msgspec.convert(body, UnlistedLine)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    return UnlistedProcess(line.pid, line.device, _host_process(line.pid, line.process), line.gpu_uuid or "")


def _probes(
    body: ReadingLine, others: Iterable[UnlistedProcess]
) -> Iterator[tuple[tuple[str, int], Mapping[str, Any]]]:
    """Yield what probes say of the processes on a GPU's list, and of `others`."""
    for gpu in body.gpus:
        devices: list[GpuLine | InstanceLine] = [gpu, *gpu.instances]
        for device in devices:
            for process in device.processes or ():
                if isinstance(process.probe, dict):
                    yield (process.instance or gpu.uuid, process.pid), process.probe
    yield from zip((each.place for each in others), body.unlisted_probes, strict=True)
