"""Every kind of alert: that the program emits it, that the JSON's contract knows it, and where it is among others.

A new kind needs a line here (what makes it begin) and one in `tests/monitor/schema.py`; without either a test fails.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema
import pytest
from msgspec.structs import replace

from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.monitor.alerts import Alert, AlertKind, AlertMark, Alerts, NewAlerts, Severity
from gpumem_tui.monitor.probes import Growing, ProbeReport, RanOutOfMemory, Stopped
from gpumem_tui.monitor.readings import READINGS
from gpumem_tui.monitor.report import snapshot_json, table
from gpumem_tui.monitor.snapshot import DeviceState, Snapshot
from gpumem_tui.monitor.wire import HostReport, ReportReader, ReportWriter, encoded, parsed, read
from tests.monitor.schema import MONITOR
from tests.monitor.snapshots import START_S, gpu, machine, process


@dataclass(frozen=True)
class Cause:
    """Causes of each kind: snapshots a second apart, and probes' reports."""

    snapshots: Sequence[Snapshot]
    ended: Sequence[RanOutOfMemory] = ()
    growing: Sequence[Growing] = ()
    stopped: Sequence[Stopped] = ()

    def alerts(self) -> tuple[Alert, ...]:
        """The alerts after the last of them."""
        judge, said = Alerts(), ProbeReport({}, tuple(self.ended), tuple(self.growing), tuple(self.stopped))
        found: tuple[Alert, ...] = ()
        for snapshot in self.snapshots:
            found = judge.update(snapshot, said)
        return found


UUID = gpu().uuid
_RANKS = [gpu(0, processes=(process(1, 9 * GIB), process(2, GIB))), gpu(1, processes=(process(2, 9 * GIB),))]
CAUSES = {
    AlertKind.NO_DRIVER: Cause([machine([], problem="no driver on this machine: install it")]),
    AlertKind.OOM: Cause([machine()], ended=[RanOutOfMemory(UUID, START_S, "rank 3 ran out of memory")]),
    AlertKind.LOST: Cause([machine([gpu(state=DeviceState.LOST, state_reason="GPU is lost")])]),
    AlertKind.ECC: Cause([machine([gpu(ecc_uncorrected=1)])]),
    AlertKind.STALE: Cause([machine([gpu(state=DeviceState.STALE, state_reason="a call hangs", age_s=4.0)])]),
    AlertKind.NEAR_FULL: Cause([machine([gpu(used_bytes=79 * GIB)])]),
    AlertKind.GROWTH: Cause([machine()], growing=[Growing(UUID, "PID 7: cuda:0 after each step grows", 7200.0)]),
    AlertKind.STOPPED: Cause([machine()], stopped=[Stopped(UUID, "PID 7: rank 1 stopped first", 61.0)]),
    AlertKind.SECOND_GPU: Cause([machine(_RANKS)]),
    AlertKind.HOT: Cause([machine([gpu(temperature_c=89)])]),
    AlertKind.THROTTLED: Cause([machine([gpu(throttle=("too hot",))], after_s=second) for second in range(7)]),
}


def test_ranks_that_wait_for_less_than_a_minute_are_no_alert() -> None:
    brief = Stopped(UUID, "PID 7: rank 1 stopped first", 59.0)
    assert Cause([machine()], stopped=[brief]).alerts() == ()


def test_every_kind_has_a_cause() -> None:
    assert CAUSES.keys() == set(AlertKind), "an alert that no test makes begin"


def test_the_contract_of_the_json_has_every_kind_and_no_other() -> None:
    listed = MONITOR["properties"]["alerts"]["items"]["properties"]["kind"]["enum"]
    assert sorted(listed) == sorted(kind.value for kind in AlertKind)


@pytest.mark.parametrize("kind", AlertKind, ids=[kind.value for kind in AlertKind])
def test_it_begins_and_travels(kind: AlertKind) -> None:
    cause = CAUSES[kind]
    alerts = cause.alerts()
    (alert,) = [each for each in alerts if each.kind is kind]
    assert alert.message
    assert alert.message.isprintable()
    assert f"{alert.severity.value}: {alert.message}" in table(cause.snapshots[-1], alerts, 10**6)
    line = json.dumps(snapshot_json(cause.snapshots[-1], alerts))
    jsonschema.validate(json.loads(line), MONITOR)
    line = ReportWriter().line(HostReport.of(cause.snapshots[-1], alerts))
    assert ReportReader().read(line.encode()).alerts == alerts, "from another host"
    (mark, *_) = NewAlerts().begun(START_S, alerts, {})
    assert read(AlertMark, parsed(encoded(mark))) == mark, "in a recording"
    calm = replace(cause.snapshots[0], problem="", gpus=(gpu(),))
    assert kind not in [each.kind for each in Cause([calm]).alerts()], "only by its cause"


@pytest.mark.parametrize("kind", AlertKind, ids=[kind.value for kind in AlertKind])
def test_it_stays_while_what_it_is_judged_by_cannot_be_read(kind: AlertKind) -> None:
    cause = CAUSES[kind]
    last = cause.snapshots[-1]
    of_probes = cause.ended or cause.growing or cause.stopped
    if last.problem or of_probes or any(one.state is not DeviceState.OK for one in last.gpus):
        return  # no reading is its cause
    unread: dict[str, Any] = dict.fromkeys(("memory", "processes", *READINGS), Unknown("timed out"))
    later = replace(last, time_s=last.time_s + 20, gpus=(gpu(**unread),))
    assert kind in [each.kind for each in Cause([*cause.snapshots, later]).alerts()], "its reading belongs in `_unread`"


def test_the_worst_come_first_and_of_those_in_the_order_of_their_kinds() -> None:
    alerts = [alert for cause in CAUSES.values() for alert in cause.alerts()]
    assert {alert.severity for alert in alerts} == {Severity.CRITICAL, Severity.WARNING}
    kinds = list(AlertKind)
    bad = machine([gpu(temperature_c=89, ecc_uncorrected=1, used_bytes=79 * GIB)], problem="no driver")
    found = Cause([bad]).alerts()
    assert list(found) == sorted(
        found, key=lambda alert: (alert.severity is not Severity.CRITICAL, kinds.index(alert.kind))
    )
    assert len(found) == 4
