"""The JSON of `look PID` and `watch` for a process besides its samples, as types."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from gpumem_tui.memory import Breakdown, format_bytes
from gpumem_tui.probe.wire import KeptPlace, LookAnswer, LookedDevice
from gpumem_tui.report.objects import SCHEMA, JsonObject
from gpumem_tui.report.shown import ledger_html, ledger_text, lines_html, places_html
from gpumem_tui.system import user_name
from gpumem_tui.watch.growth import Growth
from gpumem_tui.watch.records import ProbedProcess, device_name


def totals(sizes: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the bytes of each place, the largest first."""
    found: Counter[str] = Counter()
    for place, size_bytes in sizes:
        found[place] += size_bytes
    return found.most_common()


class _Module(JsonObject, frozen=True):
    module: str | None
    bytes: int


class _Source(JsonObject, frozen=True):
    source: str | None
    bytes: int


class _Looked(JsonObject, frozen=True):
    """A device in the looked step. `timeline`: seconds since it began, live bytes; `phases`: which begins then."""

    device: str
    device_uuid: str | None
    peak_bytes: int
    peak_s: float
    buckets: dict[str, int]
    highest: dict[str, int] | None
    by_module: tuple[_Module, ...]
    by_source: tuple[_Source, ...]
    timeline: tuple[tuple[float, int], ...]
    phases: tuple[tuple[float, str], ...]

    @classmethod
    def of(cls, device: LookedDevice) -> _Looked:
        """Return a device's peak, by bucket, module and line."""
        modules = totals((held.module, held.bytes) for held in device.held)
        sources = totals((held.source, held.bytes) for held in device.held)
        return cls(
            device=device_name(device.device),
            device_uuid=device.device_uuid or None,
            peak_bytes=device.peak_bytes,
            peak_s=device.peak_s,
            buckets=device.breakdown.as_json(),
            highest=Breakdown.from_json(device.highest).as_json() if device.highest else None,
            by_module=tuple(_Module(module=place or None, bytes=size_bytes) for place, size_bytes in modules),
            by_source=tuple(_Source(source=place or None, bytes=size_bytes) for place, size_bytes in sources),
            timeline=device.timeline,
            phases=device.phases,
        )


class _Kept(JsonObject, frozen=True):
    device: str
    operator: str | None
    module: str | None
    source: str | None
    bytes: int
    allocations: int

    @classmethod
    def of(cls, kept: KeptPlace) -> _Kept:
        """Return what every step leaves behind at a place."""
        return cls(
            device=device_name(kept.device),
            operator=kept.operator or None,
            module=kept.module or None,
            source=kept.source or None,
            bytes=kept.bytes,
            allocations=kept.allocations,
        )


class LookLine(JsonObject, frozen=True, tag_field="event", tag="look"):
    """A deep look, as the probe published it."""

    schema: Literal[1]
    pid: int | None
    rank: int | None
    step: int
    step_s: float
    method: str | None
    devices: tuple[_Looked, ...]
    kept: tuple[_Kept, ...] | None
    unavailable: dict[str, str]

    @classmethod
    def of(cls, process: ProbedProcess | None, look: LookAnswer) -> LookLine:
        """Return a look into a process; None for this one."""
        return cls(
            schema=SCHEMA,
            pid=os.getpid() if process is None else process.pid,
            rank=None if process is None else process.process.rank,
            step=look.step,
            step_s=look.step_s,
            method=look.method or None,
            devices=tuple(map(_Looked.of, look.devices)),
            kept=None if look.kept is None else tuple(map(_Kept.of, look.kept)),
            unavailable=look.unavailable,
        )

    def __str__(self) -> str:
        """Return the rows of each device at its peak, a line each."""
        return "\n".join(ledger_text(_title(one), one.buckets) for one in self.devices) or "; ".join(self._missing)

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        parts = [
            ledger_html(_title(one), one.buckets) + lines_html((row.source, row.bytes) for row in one.by_source)
            for one in self.devices
        ]
        return "".join(parts) + "".join(places_html((), line) for line in self._missing)

    @property
    def _missing(self) -> list[str]:
        return [f"{what} not known: {why}" for what, why in self.unavailable.items()]


def _title(device: _Looked) -> str:
    return f"{device.device}: {format_bytes(device.peak_bytes)} allocated at the peak"


class StageObject(JsonObject, frozen=True):
    """The most that a stage of the run has allocated; exact if both ends are equal.

    Attributes:
        buckets: parameters, gradients and optimizer state then.
        highest: whether this is the stage with the most.
    """

    stage: str
    step: int
    least_bytes: int
    most_bytes: int
    buckets: dict[str, int]
    highest: bool

    @classmethod
    def all_of(cls, process: ProbedProcess, device: int) -> tuple[StageObject, ...]:
        """Return the stages of a process on a device."""
        own = process.stages_on(device)
        top = max(own, key=lambda one: one.least_bytes, default=None)
        return tuple(
            cls(
                stage=one.stage,
                step=one.step,
                least_bytes=one.least_bytes,
                most_bytes=one.most_bytes,
                buckets=one.buckets,
                highest=one is top,
            )
            for one in own
        )


class GrowthLine(JsonObject, frozen=True, tag_field="event", tag="growth"):
    """A process whose memory after each step has begun to rise steadily."""

    schema: Literal[1]
    pid: int | None
    rank: int | None
    step: int | None
    device: str
    bytes_per_s: float
    over_s: float

    @classmethod
    def of(cls, process: ProbedProcess, growth: Growth) -> GrowthLine:
        """Return where and how fast memory grows."""
        return cls(
            schema=SCHEMA,
            pid=process.known_pid,
            rank=process.process.rank,
            step=process.step,
            device=device_name(growth.device),
            bytes_per_s=growth.bytes_per_s,
            over_s=growth.over_s,
        )


class EndedLine(JsonObject, frozen=True, tag_field="event", tag="ended"):
    """A process that has ended, and how; what was not seen of that is null."""

    schema: Literal[1]
    pid: int
    rank: int | None
    user: str | None
    step: int | None
    state: str
    how: str
    time_s: float | None
    exit_code: int | None
    signal: str | None
    resident_bytes: int | None
    limit_bytes: int | None
    limit_owner: str | None

    @classmethod
    def of(cls, process: ProbedProcess) -> EndedLine:
        """Return how a process has ended."""
        end = process.end
        return cls(
            schema=SCHEMA,
            pid=process.files.pid,
            rank=process.process.rank,
            user=user_name(process.uid),
            step=process.step,
            state=process.state.value,
            how=process.state_words,
            time_s=None if end is None else end.time_s,
            exit_code=None if end is None else end.exit_code,
            signal=None if end is None else end.signal or None,
            resident_bytes=None if end is None else end.resident_bytes,
            limit_bytes=None if end is None else end.limit_bytes,
            limit_owner=None if end is None else end.limit_owner or None,
        )
