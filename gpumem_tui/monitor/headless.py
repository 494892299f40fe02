"""The monitor without a screen: one reading, or a stream of them, as text or as JSON lines on stdout."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import fields

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor import report
from gpumem_tui.monitor.alerts import AlertKind, Alerts
from gpumem_tui.monitor.probes import Ask, no_probes
from gpumem_tui.monitor.readings import NOT_READ_YET
from gpumem_tui.monitor.recording import SnapshotRecorder
from gpumem_tui.monitor.snapshot import NOT_LOOKED_UP_YET, GpuReading, Snapshot, Source

_ANSWER_S = 30.0
"""A driver that has not answered by then does not answer."""
_COMPLETE_S = 3.0
"""The values that are read slowly are there by then, unless a call hangs."""
_POLL_S = 0.5
_NO_TERMINAL = (10**6, 24)
"""Columns and lines: a pipe or a file has room for everything."""


class NoDriverAnswer(Exception):
    """The driver says nothing at all; one line."""


def first(source: Source) -> Snapshot:
    """The first snapshot of a source.

    Raises:
        NoAnswer: there is none in time.
    """
    snapshot = source.wait(None, _ANSWER_S)
    if snapshot is None:
        raise NoDriverAnswer(
            f"the NVIDIA driver has not answered for {_ANSWER_S:.0f} s; see `sudo dmesg | grep -i nvrm`"
        )
    return snapshot


def complete(source: Source) -> Snapshot:
    """The first snapshot of a source that has everything, or after a few seconds the newest.

    Raises:
        NoAnswer: there is none in time.
    """
    snapshot = first(source)
    deadline_s = time.monotonic() + _COMPLETE_S
    while any(_is_unread(gpu) for gpu in snapshot.gpus) and time.monotonic() < deadline_s:
        snapshot = source.wait(snapshot, deadline_s - time.monotonic()) or snapshot
    return snapshot


def live(source: Source, interval_s: float) -> Iterator[Snapshot]:
    """Snapshots of a source without end, at most one each `interval_s` seconds.

    Raises:
        NoAnswer: there is none in time.
    """
    last = first(source)
    due_s = time.monotonic()
    while True:
        yield last
        due_s = max(due_s + interval_s, time.monotonic())
        time.sleep(max(0.0, due_s - time.monotonic()))
        newer = None
        while newer is None:
            newer = source.wait(last, _POLL_S)
        last = newer


def print_once(snapshot: Snapshot, alerts: Alerts, *, as_json: bool, ask: Ask = no_probes) -> None:
    """One reading: a JSON object, or a table, cut where a terminal ends."""
    probes = ask(snapshot)
    current = alerts.update(snapshot, probes.figures, probes.ended, probes.growing)
    if as_json:
        _print_json(report.snapshot_json(snapshot, current, probes))
        return
    for line in report.table(snapshot, current, shutil.get_terminal_size(_NO_TERMINAL).columns):
        print(line)


def stream(
    snapshots: Iterable[Snapshot],
    alerts: Alerts,
    *,
    as_json: bool,
    recorder: SnapshotRecorder | None = None,
    ask: Ask = no_probes,
) -> None:
    """Every reading as it comes, into the recording and onto stdout.

    As JSON it is an object a line, otherwise a line a GPU and one for each alert that begins.

    Raises:
        RecordingError: the recording cannot go on.
    """
    known: set[tuple[str, str, AlertKind]] = set()
    for snapshot in snapshots:
        probes = ask(snapshot)
        current = alerts.update(snapshot, probes.figures, probes.ended, probes.growing)
        if recorder is not None:
            recorder.add(snapshot, current, probes)
        if as_json:
            _print_json(report.snapshot_json(snapshot, current, probes))
        else:
            lines = [*report.gpu_lines(snapshot), *(report.alert_line(new) for new in current if new.key not in known)]
            print("\n".join(lines), flush=True)
        known = {alert.key for alert in current}


def _is_unread(gpu: GpuReading) -> bool:
    """Whether a value is still to come."""
    hosts = [] if isinstance(gpu.processes, Unknown) else [process.host for process in gpu.processes]
    readings = [*hosts, *(getattr(gpu, field.name) for field in fields(gpu))]
    return any(reading in (NOT_READ_YET, NOT_LOOKED_UP_YET) for reading in readings)


def _print_json(body: dict[str, object]) -> None:
    print(json.dumps(body, allow_nan=False), flush=True)
