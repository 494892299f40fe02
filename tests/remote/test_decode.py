"""A line of `monitor --json` is the snapshot that it was made of."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.monitor.alerts import Alerts
from gpumem_tui.monitor.ledger import device_ledger
from gpumem_tui.monitor.report import changes_json, snapshot_json
from gpumem_tui.monitor.snapshot import DeviceState, GpuReading, Instance, Snapshot
from gpumem_tui.recording.codec import Plain, to_plain
from gpumem_tui.remote.decode import NoReading, OtherSchema, ReadingDecoder, decoded
from gpumem_tui.text import cleaned
from gpumem_tui.watch.report import probe_report
from tests.monitor.snapshots import anything, changed, gpu, machine, memory, process
from tests.remote.standins import line_of, reading
from tests.scenes.watch import published, record, watched


def _compared(plain: Plain) -> Plain:
    """Without what the JSON does not carry (ledgers row by row, calls), rounds (ages) or has once (a process's pid)."""
    if isinstance(plain, dict):
        left_out = {"ledger", "calls", "age_s"} | ({"pid"} if "parent_pid" in plain else set())
        return {key: _compared(value) for key, value in plain.items() if key not in left_out}
    return [_compared(value) for value in plain] if isinstance(plain, list) else plain


@settings(suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow], deadline=None)
@given(snapshot=anything(Snapshot))
def test_any_snapshot_comes_back(snapshot: Snapshot) -> None:
    back = decoded(line_of(snapshot)).snapshot
    assert _compared(to_plain(back)) == _compared(cleaned(to_plain(snapshot)))


@settings(suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow], deadline=None, max_examples=15)
@given(snapshot=anything(Snapshot), other=anything(Snapshot), shared=st.booleans())
def test_a_reading_and_what_has_changed_since_make_the_next_reading(
    snapshot: Snapshot, other: Snapshot, shared: bool
) -> None:
    if shared:  # the same GPUs, of which some readings are others
        pairs = zip(snapshot.gpus, other.gpus)  # noqa: B905
        gpus = tuple(changed(one, power_w=two.telemetry.power_w, mig=two.mig) for one, two in pairs)
        other = replace(other, gpus=(*gpus, *snapshot.gpus[len(gpus) :]))
    decoder = ReadingDecoder()
    decoder.decoded(line_of(snapshot))
    changes = changes_json(snapshot_json(snapshot), snapshot_json(other))
    back = decoder.decoded(json.dumps(changes).encode())
    assert to_plain(back.snapshot) == to_plain(decoded(line_of(other)).snapshot)


def test_what_changes_is_told_alone() -> None:
    before, after = reading(2), reading(2, after_s=1.0)
    busy = tuple(changed(each, power_w=77.0) if each.index else each for each in after.gpus)
    changes = changes_json(snapshot_json(before), snapshot_json(replace(after, gpus=busy)))
    expected = {"time_s": after.time_s, "gpus": {"1": {"power_w": 77.0}}}
    assert changes == {"schema": 1, "since": before.time_s, "changes": expected}


def test_what_a_probe_says_is_told_by_its_members() -> None:
    said = [probe_report(published(watched(4000, (record(step=step), gpu(0).uuid)))) for step in (7, 8)]
    before, after = (snapshot_json(reading(), (), each) for each in said)
    changes = changes_json(before, after)
    assert len(json.dumps(changes)) < 200
    decoder = ReadingDecoder()
    decoder.decoded(json.dumps(before).encode())
    now = decoder.decoded(json.dumps({**changes, "changes": {**changes["changes"], "time_s": 9.0}}).encode())
    assert now.probes == decoded(json.dumps(after).encode()).probes


def _change(**changes: Any) -> bytes:
    return json.dumps({"schema": 1, "since": reading().time_s, "changes": changes}).encode()


@pytest.mark.parametrize(
    "line",
    [
        _change(time_s=1e300),
        _change(gpus={"7": {"power_w": 1.0}}),
        _change(gpus={"-1": {"power_w": 1.0}}),
        _change(gpus={"0": {"power_w": "much"}}),
        _change(gpus={"0": {"power_w": None}}),
        _change(gpus={"0": {"processes": {"0": {"user": None}}}}),
        _change(host={"name": None}),
        _change(gpus={"0": {"unavailable": {}, "power_w": None}}),
        _change().replace(b"since", b"since_"),
        _change().replace(b'"since": ', b'"since": 1'),
    ],
)
def test_changes_that_make_no_reading_are_refused(line: bytes) -> None:
    decoder = ReadingDecoder()
    decoder.decoded(line_of(reading()))
    with pytest.raises(NoReading):
        decoder.decoded(line)
    assert decoder.decoded(_change(time_s=5.0)).snapshot.time_s == 5.0


def with_ledgers(one: GpuReading) -> GpuReading:
    instances = tuple(replace(each, ledger=device_ledger(each.memory, each.processes)) for each in one.instances)
    return replace(one, ledger=device_ledger(one.memory, one.processes), instances=instances)


def test_ledgers_alerts_and_states_come_back() -> None:
    lost = Unknown("GPU is lost")
    part = Instance(1, "MIG-1", "1g.10gb", memory(GIB, 10 * GIB), (process(7, GIB, instance="MIG-1"),), lost)
    gpus = [
        with_ledgers(gpu(0, used_bytes=79 * GIB)),
        with_ledgers(gpu(1, mig=True, instances=(part,))),
        gpu(2, state=DeviceState.LOST, state_reason="gone", memory=lost, ledger=lost, processes=lost),
        with_ledgers(gpu(3, processes=(process(9, Unknown("no"), host=Unknown("no such process here")),))),
    ]
    snapshot = machine(gpus, problem="")
    alerts = Alerts().update(snapshot)
    report = decoded(json.dumps(snapshot_json(snapshot, alerts)).encode())
    assert report.snapshot == snapshot
    assert alerts
    assert report.alerts == alerts


def test_what_a_probe_says_is_found_by_gpu_and_pid() -> None:
    probes = probe_report(published(watched(4000, (record(), gpu(0).uuid))))
    body = snapshot_json(reading(), (), probes)
    (said,) = decoded(json.dumps(body).encode()).probes.items()
    assert said[0] == (gpu(0).uuid, 4000)
    assert said[1]["step"] == record().step


@pytest.mark.parametrize("line", [b"", b"Welcome!", b"[1]", b'{"a": 1}', b'{"schema": 1, "x": NaN}', b"[" * 100_000])
def test_what_is_no_reading_is_refused(line: bytes) -> None:
    with pytest.raises(NoReading):
        decoded(line)


@pytest.mark.parametrize(
    "changes",
    [{"schema": 2}, {"gpus": 3}, {"host": None}, {"time_s": 1e300}, {"alerts": [{}]}, {"gpus": [{}]}, {"problem": 1}],
)
def test_what_another_version_or_nonsense_says_is_named_as_such(changes: dict[str, Any]) -> None:
    with pytest.raises(OtherSchema):
        decoded(line_of(reading(), **changes))


def test_a_number_that_nothing_could_show_is_refused() -> None:
    line = line_of(reading()).replace(b'"total_bytes": 85899345920', b'"total_bytes": ' + b"9" * 400)
    with pytest.raises(NoReading):
        decoded(line)


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
    snapshot = machine([gpu(0, processes=(process(1, GIB, host=replace(_host(), command=written)),))])
    assert _command(json.dumps(snapshot_json(snapshot), ensure_ascii=ascii_only).encode()) == shown


def test_half_a_character_is_no_reason_to_lose_the_reading() -> None:
    assert _command(line_of(reading()).replace(b"python train.py", b"\\udc80 train.py")) == "  train.py --batch-size 32"


def _command(line: bytes) -> str:
    (read,) = decoded(line).snapshot.gpus
    assert isinstance(read.processes, tuple)
    return getattr(read.processes[0].host, "command", "")


def _host() -> Any:
    return process(1, GIB).host
