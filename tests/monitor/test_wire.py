"""A report as lines is the report that they were made of, and no line harms who reads it."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.monitor import wire
from gpumem_tui.monitor.alerts import Alert, Alerts
from gpumem_tui.monitor.ledger import device_ledger
from gpumem_tui.monitor.snapshot import DeviceState, GpuReading, HostProcess, Instance, Snapshot
from gpumem_tui.monitor.wire import (
    HostReport,
    LineError,
    LineReader,
    LineWriter,
    NoReport,
    OtherVersion,
    ReportReader,
    ReportWriter,
    encoded,
    parsed,
    read,
)
from gpumem_tui.text import cleaned
from gpumem_tui.watch.report import probe_report
from tests.monitor.snapshots import anything, changed, gpu, machine, memory, process
from tests.remote.standins import line_of, lines_of, reading
from tests.scenes.watch import published, record, watched

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=12,
)
SLOW = settings(suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow], deadline=None)


def read_all(*lines: bytes) -> list[HostReport]:
    reader = ReportReader()
    return [reader.read(line) for line in lines]


def plain(report: object) -> object:
    """Its report, with every text printable."""
    return cleaned(json.loads(encoded(report)))


@SLOW
@given(snapshot=anything(Snapshot))
def test_any_snapshot_comes_back(snapshot: Snapshot) -> None:
    (back,) = read_all(line_of(snapshot))
    is_same = plain(back) == plain(HostReport.of(snapshot))
    assert is_same  # else pytest explains all of it, for minutes


@settings(SLOW, max_examples=15)
@given(snapshot=anything(Snapshot), other=anything(Snapshot), shared=st.booleans())
def test_a_report_and_what_has_changed_since_make_the_next_report(
    snapshot: Snapshot, other: Snapshot, shared: bool
) -> None:
    if shared:  # the same GPUs, of which some readings are others
        pairs = zip(snapshot.gpus, other.gpus)  # noqa: B905
        gpus = tuple(changed(one, power_w=two.telemetry.power_w, mig=two.mig) for one, two in pairs)
        other = replace(other, gpus=(*gpus, *snapshot.gpus[len(gpus) :]))
    _, back = read_all(*lines_of(snapshot, other))
    is_same = plain(back) == plain(HostReport.of(other))
    assert is_same


@given(old=_JSON, new=_JSON)
def test_what_a_probe_says_may_be_any_json(old: object, new: object) -> None:
    said = [HostReport.of(machine(), (), {("GPU-0", 7): {"it": each}}) for each in (old, new)]
    writer, reader = LineWriter(HostReport), LineReader(HostReport)
    *_, last = (reader.read(parsed(writer.line(each, {}))) for each in said)
    assert plain(last) == plain(said[1])


def test_what_changes_is_told_alone() -> None:
    before, after = reading(2), reading(2, after_s=1.0)
    busy = tuple(changed(each, power_w=77.0) if each.index else each for each in after.gpus)
    _, changes = lines_of(before, replace(after, gpus=busy))
    assert json.loads(changes) == {
        "patch": {"snapshot": {"time_s": [after.time_s], "gpus": {"1": {"telemetry": {"power_w": [77.0]}}}}}
    }


def test_what_a_probe_says_is_told_by_its_members_and_found_by_gpu_and_pid() -> None:
    writer = ReportWriter()
    said = [probe_report(published(watched(4000, (record(step=step), gpu(0).uuid)))).said for step in (7, 8)]
    lines = [writer.line(HostReport.of(reading(), (), each)).encode() for each in said]
    assert len(lines[1]) < 120
    assert [each.said for each in read_all(*lines)] == said
    assert list(said[1]) == [(gpu(0).uuid, 4000)]


def _patch(**changes: Any) -> bytes:
    return json.dumps({"patch": {"snapshot": changes}}).encode()


@pytest.mark.parametrize(
    "line",
    [
        _patch(time_s=[1e300]),
        _patch(time_s=[None]),
        _patch(time_s=5.0),
        _patch(gpus={"7": {"power_w": [1.0]}}),
        _patch(gpus={"-1": {"power_w": [1.0]}}),
        _patch(gpus={"9" * 5000: {"power_w": [1.0]}}),
        _patch(gpus={"0": {"power_w": ["much"]}}),
        _patch(gpus={"0": {"power_w": {"a": [1]}}}),
        _patch(gpus={"0": {"power_w": []}}),
        _patch(gpus={"0": {"fan_percent": {"reason": ["x"]}}}),
        _patch(gpus={"0": {"state": ["fine"]}}),
        _patch(gpus={"0": {"processes": {"0": {"host": {"user": [None]}}}}}),
        _patch(host={"name": [None]}),
        _patch(gpus=[7]),
        b'{"patch": 7}',
        b'{"patch": [{}]}',
        b'{"patch": {"alerts": [[{}]]}}',
        b'{"patch": {"probes": {"0": [1]}}}',
        b'{"patch": {"probes": [[["a", 1]]]}}',
    ],
)
def test_changes_that_make_no_report_are_refused(line: bytes) -> None:
    reader = ReportReader()
    reader.read(line_of(reading()))
    with pytest.raises(LineError):
        reader.read(line)
    assert reader.read(_patch(time_s=[5.0], weather=["fair"])).snapshot.time_s == 5.0


def test_what_a_probe_says_is_refused_where_it_is_too_deep_to_be_written() -> None:
    def nested(depth: int, value: object) -> object:
        return value if depth == 0 else {"it": nested(depth - 1, value)}

    def said(*values: object) -> list[bytes]:
        whole, changes = nonsense(probes=[["GPU-0", 7, values[0]]]), [{"probes": {"0": {"2": v}}} for v in values[1:]]
        return [whole, *(json.dumps({"patch": each}).encode() for each in changes)]

    deep = read_all(*said(nested(60, 1), nested(60, [2])))[-1]
    assert deep.probes == (("GPU-0", 7, nested(60, 2)),)
    for lines in (
        said(nested(300, 1)),
        said({"it": 1}, [nested(300, 1)]),
        said(nested(60, 1), nested(60, [nested(60, 1)])),
    ):
        with pytest.raises(LineError, match="brackets within brackets"):
            read_all(*lines)


def test_changes_of_what_has_not_come_are_refused() -> None:
    with pytest.raises(LineError, match="neither a value nor a change of one"):
        read_all(_patch(time_s=[5.0]))


def with_ledgers(one: GpuReading) -> GpuReading:
    instances = tuple(replace(each, ledger=device_ledger(each.memory, each.processes)) for each in one.instances)
    return replace(one, ledger=device_ledger(one.memory, one.processes, holders=one.holders), instances=instances)


def test_ledgers_alerts_and_states_come_back() -> None:
    lost = Unknown("GPU is lost")
    part = Instance(1, "MIG-1", "1g.10gb", memory(GIB, 10 * GIB), (process(7, GIB, instance="MIG-1"),), lost)
    gpus = [
        with_ledgers(gpu(0, used_bytes=79 * GIB, holders="virtual machines on this host")),
        with_ledgers(gpu(1, mig=True, instances=(part,))),
        gpu(2, state=DeviceState.LOST, state_reason="gone", memory=lost, ledger=lost, processes=lost),
        with_ledgers(gpu(3, processes=(process(9, Unknown("no"), host=Unknown("no such process here")),))),
    ]
    snapshot = machine(gpus, problem="")
    alerts = Alerts().update(snapshot)
    (report,) = read_all(ReportWriter().line(HostReport.of(snapshot, alerts)).encode())
    assert report.with_ledgers == snapshot
    assert alerts
    assert report.alerts == alerts


def test_a_host_that_gives_ever_new_reasons_takes_no_more_memory() -> None:
    reader = ReportReader()
    reader.read(line_of(reading()))
    first = reader.read(_patch(gpus={"0": {"processes": [{"reason": "reason 0"}]}})).snapshot.gpus[0].processes
    seen = weakref.ref(first)
    del first
    for count in range(1, 10_000):
        reader.read(_patch(gpus={"0": {"processes": [{"reason": f"reason {count}"}]}}))
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("line", [b"", b"Welcome!", b"[1]", b'{"a": 1}', b'{"full": {}}', b"[" * 100_000, b"\xff{}"])
def test_what_is_no_report_is_refused(line: bytes) -> None:
    with pytest.raises(NoReport):
        read_all(line)


def nonsense(**changes: Any) -> bytes:
    body = json.loads(line_of(reading()))
    return json.dumps({**body, "full": {**body["full"], **changes}}).encode()


@pytest.mark.parametrize(
    "line",
    [
        nonsense(snapshot=None),
        nonsense(snapshot=3),
        nonsense(alerts=[{}]),
        nonsense(probes=[[1, 2, 3]]),
        nonsense(probes=[["GPU-0", 7, 3]]),
        nonsense(probes=[["GPU-0", 7, [3]]]),
        nonsense(probes=[["GPU-0", 7, None]]),
        nonsense(snapshot=json.loads(line_of(reading()))["full"]["snapshot"] | {"gpus": [{}]}),
        nonsense(snapshot=json.loads(line_of(reading()))["full"]["snapshot"] | {"time_s": 1e300}),
        line_of(reading()).replace(b'"total_bytes":85899345920', b'"total_bytes":' + b"9" * 400),
        line_of(reading()).replace(b'"power_w":312.5', b'"power_w":"a lot"'),
    ],
)
def test_nonsense_is_named_as_such(line: bytes) -> None:
    with pytest.raises(LineError) as caught:
        read_all(line)
    assert not isinstance(caught.value, NoReport)


def test_the_field_that_does_not_fit_is_named() -> None:
    line = line_of(reading()).replace(b'"total_bytes":85899345920', b'"total_bytes":18446744073709551616')
    with pytest.raises(LineError, match=r"total_bytes: Expected `int` <= 9223372036854775807"):
        read_all(line)


def test_another_version_is_named_with_both() -> None:
    body = {**json.loads(line_of(reading())), wire.KEY: 2, "program": "9.1"}
    with pytest.raises(OtherVersion, match=rf"9\.1 there writes schema 2, .* here reads schema {wire.VERSION}"):
        read_all(json.dumps(body).encode())


@pytest.mark.parametrize("number", [b"1e999", b"NaN", b"-Infinity", b"null"])
def test_a_number_that_is_not_finite_is_unknown(number: bytes) -> None:
    (report,) = read_all(line_of(reading()).replace(b'"power_w":312.5', b'"power_w":' + number))
    assert report.snapshot.gpus[0].telemetry.power_w == Unknown("not a number")


def test_what_patches_make_larger_and_larger_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LONGEST_LINE", 20_000)
    fields = ("name", "bus_id", "state_reason", "vendor", "partition", "holders")
    larger = [_patch(gpus={place: {field: ["x" * 5000]}}) for place in "01" for field in fields]
    with pytest.raises(LineError, match="a report of more than"):
        read_all(line_of(reading(2)), *larger)
    assert read_all(line_of(reading(2)), *larger[:1] * 12)[-1].snapshot.gpus[0].name == "x" * 5000


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("a\x1b[2Jb", "a [2Jb"),
        ("a\nb\x7f", "a b "),
        ("a\u202eb", "a b"),
        ('--config {"a": "\\\\"}', '--config {"a": "\\\\"}'),
        ("60 °C – ok", "60 °C – ok"),
    ],
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_no_text_moves_the_cursor(written: str, shown: str, ascii_only: bool) -> None:
    host = process(1, GIB).host
    assert isinstance(host, HostProcess)
    snapshot = machine([gpu(0, processes=(process(1, GIB, host=replace(host, command=written)),))])
    assert _command(json.dumps(json.loads(line_of(snapshot)), ensure_ascii=ascii_only).encode()) == shown


def test_half_a_character_is_no_reason_to_lose_the_report() -> None:
    assert _command(line_of(reading()).replace(b"python train.py", b"\\udc80 train.py")) == "  train.py --batch-size 32"


def _command(line: bytes) -> str:
    (report,) = read_all(line)
    (found,) = report.snapshot.gpus
    assert isinstance(found.processes, tuple)
    return getattr(found.processes[0].host, "command", "")


@pytest.mark.parametrize("body", [None, [], {}, {"time_s": "now"}, 7])
def test_what_is_no_snapshot_is_refused(body: Any) -> None:
    with pytest.raises(LineError):
        read(Snapshot, body)


def test_a_ledger_of_an_older_recording_must_add_up() -> None:
    body = json.loads(encoded(with_ledgers(gpu(0))))
    assert read(GpuReading, body) == with_ledgers(gpu(0))
    rows = body["ledger"]["rows"]
    for first, last in ((rows[0]["size_bytes"] + 1, rows[-1]["size_bytes"]), (-GIB, rows[0]["size_bytes"] + GIB)):
        other = [{**rows[0], "size_bytes": first}, *rows[1:-1], {**rows[-1], "size_bytes": last}]
        with pytest.raises(LineError):
            read(GpuReading, {**body, "ledger": {**body["ledger"], "rows": other}})


def test_a_field_that_is_lacking_is_named() -> None:
    with pytest.raises(LineError, match="Alert without kind, since_s"):
        read(Alert, {"severity": "note", "gpu_uuid": "", "message": "x"})
