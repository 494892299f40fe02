"""The readings of hosts without a screen: tables, JSON lines or comma-separated values."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.probes import ProbeReport
from gpumem_tui.monitor.report import log_lines, snapshot_json, table
from gpumem_tui.monitor.snapshot import Snapshot
from gpumem_tui.monitor.users import only_of
from gpumem_tui.monitor.wire import HostReport, rows_of
from gpumem_tui.remote.status import HostStatus, user_on
from gpumem_tui.report.objects import SCHEMA, known
from gpumem_tui.report.output import Printer, columns

_VALUES = ("utilization_percent", "temperature_c", "power_w")
_SIZES = ("total_bytes", "used_bytes", "free_bytes")
_CSV = ("time_s", "host", "gpu", "uuid", "name", *_SIZES, *_VALUES)


class HostPrinter:
    """Prints what is new of each host.

    Args:
        mine: only the processes of the user who watches.
    """

    def __init__(self, *, as_json: bool, as_csv: bool, mine: bool = False) -> None:
        self._mine = mine
        self._printer = Printer(as_json=as_json)
        self._as_csv, self._is_first = as_csv, True
        self._shown: dict[str, tuple[float, str]] = {}
        if as_csv:
            self._printer.show(lines=lambda: [",".join(_CSV)])

    def show(self, statuses: Iterable[HostStatus], *, once: bool) -> None:
        """Print each host's reading if it is new, or that it is away.

        Args:
            once: as a table; else a line a GPU.
        """
        for status in statuses:
            report = status.report
            now = (0.0 if report is None else report.snapshot.time_s, status.problem)
            if now == self._shown.get(status.host.name, (0.0, "")):
                continue
            self._shown[status.host.name] = now
            status = only_mine(status) if self._mine else status
            lines = partial(self._lines, status, once=once)
            self._printer.show(body=partial(status_json, status), lines=lines)

    def _lines(self, status: HostStatus, *, once: bool) -> Iterator[str]:
        report, name = status.report, status.host.name
        if report is None or status.problem:
            return
        if self._as_csv:
            yield from _csv_lines(name, report.snapshot)
        elif once:
            yield from () if self._is_first else ("",)
            self._is_first = False
            yield from table(report.with_ledgers, report.alerts, columns(), name)
        else:
            yield from (f"{name} {line}" for line in log_lines(report.snapshot))


def status_json(status: HostStatus) -> dict[str, object]:
    """Return a host's reading as `monitor --json` has it, with ``host_name``; of one that is away only why."""
    report = status.report
    if report is None or status.problem:
        return {"schema": SCHEMA, "host_name": status.host.name, "problem": status.problem, "gpus": None}
    return {"host_name": status.host.name, **_reading(report)}


def only_mine(status: HostStatus) -> HostStatus:
    """Return a host with the processes alone of the user that the viewer is there."""
    report = status.report
    if report is None:
        return status
    snapshot, probes = only_of(user_on(status.host), report.with_ledgers, ProbeReport(said=report.said))
    return replace(status, report=HostReport(snapshot, report.alerts, rows_of(probes.said)))


def _reading(report: HostReport) -> dict[str, object]:
    return snapshot_json(report.with_ledgers, report.alerts, ProbeReport(said=report.said))


def _csv_lines(name: str, snapshot: Snapshot) -> Iterator[str]:
    """Yield a line a GPU; what is unknown is empty."""
    for gpu in snapshot.gpus:
        memory = gpu.memory
        sizes = (
            ("", "", "") if isinstance(memory, Unknown) else (memory.total_bytes, memory.used_bytes, memory.free_bytes)
        )
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow(
            (round(snapshot.time_s, 3), name, gpu.index, gpu.uuid, gpu.name, *sizes,
             *(known(getattr(gpu.telemetry, value)) for value in _VALUES))
        )  # fmt: skip
        yield line.getvalue()
