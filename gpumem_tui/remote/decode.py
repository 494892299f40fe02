"""A line of ``gpumem-tui monitor --json`` back into the snapshot that it was made of.

The keys are the contract of `monitor.report`. What a host writes is checked before it is used: types, sums, and that no
text can move the cursor of the terminal that shows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from gpumem_tui.memory import Bucket, Ledger, Unknown
from gpumem_tui.monitor.alerts import Alert
from gpumem_tui.monitor.codec import CodecError, Plain, from_plain
from gpumem_tui.monitor.ledger import device_ledger
from gpumem_tui.monitor.readings import READINGS, Reading
from gpumem_tui.monitor.report import SCHEMA
from gpumem_tui.monitor.snapshot import GpuProcess, GpuReading, HostProcess, HostReading, Instance, Memory, Snapshot
from gpumem_tui.text import cleaned

_LATER: Plain = {"unknown": "made of memory and processes"}
"""In the place of a ledger until it is made, as on the host, of memory and processes."""
_LONGEST_NUMBER = 20
_LATEST_S = 253_402_300_799.0
"""The end of the year 9999: later times have no date."""
_MEMORY = tuple(field.name for field in fields(Memory))
_HOST_PROCESS = tuple(field.name for field in fields(HostProcess) if field.name != "pid")
_GPU = ("index", "uuid", "name", "bus_id", "state", "state_reason", "age_s", "unified", "mig")
_ALERT = tuple(field.name for field in fields(Alert))


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


def decoded(line: bytes) -> HostReport:
    """The reading of a line.

    Raises:
        OtherSchema: it is of a program with another schema, or lacks what this one needs.
        NoReading: it is no reading at all.
    """
    try:
        body = json.loads(line, parse_constant=_refused, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise NoReading("no JSON") from error
    if not isinstance(body, dict) or "schema" not in body:
        raise NoReading("no reading")
    if body["schema"] != SCHEMA:
        raise OtherSchema(f"schema {body['schema']!r}, not {SCHEMA}")
    try:
        body = cleaned(body)
        snapshot = _snapshot(body)
        return HostReport(snapshot, tuple(map(_alert, body["alerts"])), dict(_probes(body)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise OtherSchema(f"{type(error).__name__}: {error}") from error


def _refused(word: str) -> None:
    raise ValueError(f"{word} is no number")


def _integer(digits: str) -> int:
    if len(digits) > _LONGEST_NUMBER:
        raise ValueError("a number that no reading has")
    return int(digits)


def _snapshot(body: Plain) -> Snapshot:
    plain = {
        **{key: body[key] for key in ("time_s", "problem")},
        **{key: _reading(body, key) for key in ("driver_version", "cuda_version")},
        "host": {each.name: _reading(body["host"], each.name) for each in fields(HostReading)},
        "gpus": [_gpu(gpu) for gpu in body["gpus"]],
    }
    snapshot = from_plain(Snapshot, plain)
    if not 0 <= snapshot.time_s <= _LATEST_S:
        raise CodecError(f"{snapshot.time_s} is no time")
    pairs = zip(snapshot.gpus, body["gpus"], strict=True)
    return replace(snapshot, gpus=tuple(_with_ledgers(gpu, said) for gpu, said in pairs))


def _gpu(body: Plain) -> Plain:
    readings = ("compute_capability", *READINGS)
    return {
        **{key: body[key] for key in _GPU},
        **{key: _reading(body, key) for key in readings},
        "memory": _memory(body),
        "processes": _processes(body),
        "ledger": _LATER,
        "instances": [_instance(instance) for instance in body["instances"]],
    }


def _instance(body: Plain) -> Plain:
    named = {key: body[key] for key in ("index", "uuid", "name")}
    return {**named, "memory": _memory(body), "processes": _processes(body), "ledger": _LATER}


def _memory(body: Plain) -> Plain:
    """Its parts; where the whole is unknown, so is its total."""
    total = _reading(body, "total_bytes")
    return total if isinstance(total, dict) else {key: _reading(body, key) for key in _MEMORY}


def _processes(body: Plain) -> Plain:
    listed = _reading(body, "processes")
    return listed if isinstance(listed, dict) else [_process(process) for process in listed]


def _process(body: Plain) -> Plain:
    user = _reading(body, "user")
    known = {key: _reading(body, key) for key in _HOST_PROCESS}
    return {
        **{key: body[key] for key in ("pid", "kind", "instance")},
        **{key: _reading(body, key) for key in ("used_bytes", "sm_percent")},
        "host": user if isinstance(user, dict) else {"pid": body["pid"], **known},
    }


def _reading(body: Plain, key: str) -> Plain:
    """A value, or why it is unknown."""
    return {"unknown": body["unavailable"][key]} if body[key] is None else body[key]


def _with_ledgers(gpu: GpuReading, body: Plain) -> GpuReading:
    pairs = zip(gpu.instances, body["instances"], strict=True)
    instances = tuple(replace(each, ledger=_ledger(each, said)) for each, said in pairs)
    return replace(gpu, ledger=_ledger(gpu, body), instances=instances)


def _ledger(device: GpuReading | Instance, body: Plain) -> Reading[Ledger[GpuProcess]]:
    """The ledger of its memory and its processes, with what the host says of who holds the rest."""
    if body["ledger"] is None:
        return from_plain(Unknown, {"reason": body["unavailable"]["ledger"]})
    made = device_ledger(device.memory, device.processes)
    note = body["ledger_notes"].get(Bucket.UNACCOUNTED.value)
    if isinstance(made, Unknown) or not isinstance(note, str):
        return made
    rows = (replace(row, note=note) if row.kind is Bucket.UNACCOUNTED else row for row in made.rows)
    return replace(made, rows=tuple(rows))


def _alert(body: Plain) -> Alert:
    alert = from_plain(Alert, {key: body[key] for key in _ALERT})
    if not 0 <= alert.since_s <= _LATEST_S:
        raise CodecError(f"{alert.since_s} is no time")
    return alert


def _probes(body: Plain) -> Iterator[tuple[tuple[str, int], Mapping[str, Any]]]:
    """What probes say, of the processes that stand in a GPU's list."""
    for gpu in body["gpus"]:
        for device in (gpu, *gpu["instances"]):
            for process in device["processes"] or ():
                if isinstance(process.get("probe"), dict):
                    yield (gpu["uuid"], process["pid"]), process["probe"]
