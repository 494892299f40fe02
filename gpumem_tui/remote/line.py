"""What a line of ``gpumem-tui monitor --json`` is made of, as msgspec's types: the contract of `monitor.report`.

The types are those of `monitor.snapshot`, with null where a reading is unknown. A key that is missing or of another
type is an error; one that is not known here is passed over.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from types import NoneType
from typing import Annotated, Any, Union, get_args, get_type_hints

import msgspec

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.alerts import Alert
from gpumem_tui.monitor.readings import Telemetry
from gpumem_tui.monitor.snapshot import DeviceState, HostProcess, HostReading, Memory, ProcessKind

Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""A whole number of any reading. Longer ones would be read too, and could take very long to write."""


class LineParts:
    """The attributes of an object of the line that make up one value.

    Args:
        kind: the value's dataclass.
        without: fields of it that stand elsewhere.
    """

    def __init__(self, kind: type, *without: str) -> None:
        hints = get_type_hints(kind)
        self.names = tuple(field.name for field in fields(kind) if field.name not in without)
        self.types = {name: _or_null(hints[name]) for name in self.names}
        self._can_lack = frozenset(name for name in self.names if Unknown in get_args(hints[name]))
        self._get = attrgetter(*self.names)

    def of(self, body: Any) -> tuple[Any, ...]:
        """The values in the order of the fields, an `Unknown` with its reason for null.

        Raises:
            ValueError: one is null that must be known, or without a reason.
        """
        values: tuple[Any, ...] = self._get(body)
        if None not in values:
            return values
        pairs = zip(self.names, values, strict=True)
        return tuple(self._unknown(body, name) if value is None else value for name, value in pairs)

    def _unknown(self, body: Any, name: str) -> Unknown:
        if name not in self._can_lack:
            raise ValueError(f"{name} is null")
        return reason(body, name)


def reason(body: Any, name: str) -> Unknown:
    """Why a value of an object is null.

    Raises:
        ValueError: it does not say.
    """
    if name not in body.unavailable:
        raise ValueError(f"{name} is null without a reason")
    return Unknown(body.unavailable[name])


def _or_null(hint: Any) -> Any:
    """Of a reading the type of its value, or None."""
    members = get_args(hint) if Unknown in get_args(hint) else (hint,)
    kinds = [Whole if member is int else member for member in members if member is not Unknown]
    wanted = (*kinds, NoneType)
    return Union[wanted]  # noqa: UP007  its members are known only now


MEMORY = LineParts(Memory)
READ = LineParts(Telemetry)
HOST = LineParts(HostReading)
HOST_PROCESS = LineParts(HostProcess, "pid")
ALERT = LineParts(Alert)


class _Memory(msgspec.Struct):
    """The part that GPUs and MIG instances have in common."""

    total_bytes: Whole | None
    reserved_bytes: Whole | None
    used_bytes: Whole | None
    free_bytes: Whole | None
    ledger: dict[str, Whole | None] | None
    ledger_notes: dict[str, str]
    unavailable: dict[str, str]


_HostProcess: Any = msgspec.defstruct("_HostProcess", list(HOST_PROCESS.types.items()))


class ProcessLine(_HostProcess):  # type: ignore[misc]
    """A process on a GPU."""

    pid: Whole
    kind: ProcessKind
    instance: str
    used_bytes: Whole | None
    sm_percent: Whole | None
    unavailable: dict[str, str]
    probe: Any = None


class InstanceLine(_Memory):
    """A MIG instance."""

    index: Whole
    uuid: str
    name: str
    processes: list[ProcessLine] | None


_Telemetry: Any = msgspec.defstruct("_Telemetry", list(READ.types.items()), bases=(_Memory,))


class GpuLine(_Telemetry):  # type: ignore[misc]
    """A GPU."""

    index: Whole
    uuid: str
    name: str
    bus_id: str
    state: DeviceState
    state_reason: str
    age_s: float
    unified: bool
    mig: bool
    compute_capability: tuple[Whole, Whole] | None
    processes: list[ProcessLine] | None
    instances: list[InstanceLine]


_HostReading: Any = msgspec.defstruct("_HostReading", list(HOST.types.items()))


class HostLine(_HostReading):  # type: ignore[misc]
    """The machine around the GPUs."""

    unavailable: dict[str, str]


_Alert: Any = msgspec.defstruct("_Alert", list(ALERT.types.items()))


class AlertLine(_Alert):  # type: ignore[misc]
    """What is the matter."""


class ReadingLine(msgspec.Struct):
    """All of it."""

    schema: Whole
    time_s: float
    problem: str
    driver_version: str | None
    cuda_version: str | None
    host: HostLine
    gpus: list[GpuLine]
    alerts: list[AlertLine]
    unavailable: dict[str, str]
