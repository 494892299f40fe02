"""The monitor's JSON: its schema, its numbers, and that what is unknown is null with a reason."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings

from gpumem_tui.memory import GIB, MIB, Unknown
from gpumem_tui.monitor.alerts import Alerts
from gpumem_tui.monitor.gpu_reader import not_returned
from gpumem_tui.monitor.report import complete, log_lines, snapshot_json, table
from gpumem_tui.monitor.snapshot import DeviceState, Instance, Snapshot
from gpumem_tui.monitor.threads import LatestSnapshot
from gpumem_tui.watch.report import probe_report
from tests.monitor.schema import MONITOR
from tests.monitor.snapshots import RESERVED_BYTES, anything, gpu, machine, memory, printed, process
from tests.scenes.watch import on_cpu, published, record, watched

_SCHEMA = jsonschema.Draft202012Validator(MONITOR)


def _plain(snapshot: Snapshot) -> dict[str, Any]:
    """As a reader of the JSON sees it: NaN would raise."""
    body: dict[str, Any] = json.loads(json.dumps(snapshot_json(snapshot, Alerts().update(snapshot)), allow_nan=False))
    return body


def _unexplained(body: Any, path: str = "") -> list[str]:
    """Nulls without a reason, and reasons without a null."""
    if isinstance(body, list):
        return [each for n, inner in enumerate(body) for each in _unexplained(inner, f"{path}[{n}]")]
    if not isinstance(body, dict):
        return []
    flat = {**body, **{f"ledger.{key}": value for key, value in (body.get("ledger") or {}).items()}}
    nulls = {key for key, value in flat.items() if value is None}
    if "unavailable" in body and nulls != set(body["unavailable"]):
        return [f"{path}: {nulls ^ set(body['unavailable'])}"]
    inner = {key: value for key, value in body.items() if key not in ("unavailable", "ledger")}
    return [each for key, value in inner.items() for each in _unexplained(value, f"{path}.{key}")]


def test_the_numbers_are_the_snapshots() -> None:
    body = _plain(machine([gpu(1, used_bytes=10 * GIB)]))
    _SCHEMA.validate(body)
    (only,) = body["gpus"]
    assert body["schema"] == 1
    assert (only["index"], only["total_bytes"], only["used_bytes"]) == (1, 80 * GIB, 10 * GIB)
    assert only["ledger"] == {
        "driver_reserved": RESERVED_BYTES,
        "process": 10 * GIB - 256 * MIB,
        "unaccounted": 256 * MIB,
        "free": 70 * GIB - RESERVED_BYTES,
    }
    assert sum(only["ledger"].values()) == only["total_bytes"]
    assert only["ledger_notes"] == {"unaccounted": "kernel"}
    assert (only["utilization_percent"], only["temperature_c"], only["power_w"]) == (97, 65, 312.5)
    assert only["fan_percent"] is None
    assert only["unavailable"] == {"fan_percent": "not supported"}
    (process,) = only["processes"]
    assert (process["pid"], process["used_bytes"], process["user"]) == (4001, 10 * GIB - 256 * MIB, "alice")


@settings(suppress_health_check=[HealthCheck.data_too_large])
@given(snapshot=anything(Snapshot))
def test_any_snapshot_makes_valid_json(snapshot: Snapshot) -> None:
    body = _plain(snapshot)
    _SCHEMA.validate(body)
    assert _unexplained(body) == []


def test_what_probes_say_stands_under_their_processes() -> None:
    snapshot = machine([gpu(0), gpu(1)])
    on_gpu = watched(4000, (record(), gpu(0).uuid))
    hidden = watched(7, (record(), gpu(1).uuid))
    in_host_memory = watched(4200, (on_cpu(), ""))
    probes = probe_report(published(on_gpu, hidden, in_host_memory))
    body: dict[str, Any] = json.loads(json.dumps(snapshot_json(snapshot, (), probes), allow_nan=False))
    _SCHEMA.validate(body)
    (watched_process,), (unwatched,) = (each["processes"] for each in body["gpus"])
    assert "probe" not in unwatched
    probe = watched_process["probe"]
    assert (probe["step"], probe["phase"], probe["peak_allocated_bytes"]) == (12_340, "optimizer", 14 * GIB)
    assert sum(size for size in probe["buckets"].values() if size) == probe["allocated_bytes"]
    assert sum(size for size in probe["peak_buckets"].values() if size) == probe["peak_allocated_bytes"]
    assert [each["pid"] for each in body["unlisted_probes"]] == [7, 4200]
    cpu = body["unlisted_probes"][1]
    assert (cpu["device"], cpu["allocated_bytes"]) == ("cpu", None)
    assert cpu["unavailable"]["allocated_bytes"] == "host memory has no caching allocator"


def test_a_probe_in_a_mig_instance_stands_there_and_nowhere_else() -> None:
    inside = process(7, GIB, instance="MIG-1")
    instance = Instance(0, "MIG-1", "1g.10gb", memory(GIB, total_bytes=10 * GIB), (inside,), Unknown("x"))
    snapshot = machine([gpu(0, mig=True, processes=(inside,), instances=(instance,))])
    body = printed(snapshot_json(snapshot, (), probe_report(published(watched(7, (record(), "MIG-1"))))))
    (divided,) = body["gpus"]
    assert "probe" in divided["instances"][0]["processes"][0]
    assert body["unlisted_probes"] == []


def test_what_is_not_a_number_is_unknown() -> None:
    (only,) = _plain(machine([gpu(power_w=float("nan"), power_limit_w=float("inf"))]))["gpus"]
    assert only["power_w"] is None
    assert only["unavailable"]["power_w"] == only["unavailable"]["power_limit_w"] == "not a number"


def test_a_list_that_could_not_be_read_is_not_empty() -> None:
    (only,) = _plain(machine([gpu(processes=Unknown("no permission"))]))["gpus"]
    assert only["processes"] is None
    assert only["ledger"]["process"] is None
    assert only["unavailable"]["processes"] == only["unavailable"]["ledger.process"] == "no permission"


class TestTable:
    def test_it_fits_80_columns_and_says_what_is_missing(self) -> None:
        blind = gpu(1, processes=Unknown("no permission"), power_w=Unknown("not supported"))
        silent = gpu(2, state=DeviceState.STALE, state_reason="nvmlDeviceGetPowerUsage has not returned for 4 s")
        snapshot = machine([gpu(0), blind, silent])
        lines = list(table(snapshot, Alerts().update(snapshot)))
        assert max(map(len, lines)) <= 80
        text = "\n".join(lines)
        assert "  0  NVIDIA A100-SXM4-80GB     10.00 / 80.00 GiB    97 %   65 °C  312 / 400 W" in lines
        assert "driver 0.59 GiB, processes 9.75 GiB, unaccounted 0.25 GiB, free 69.41 GiB" in text
        assert "processes –, unaccounted" in text
        assert "processes: no permission; power: not supported" in text
        assert "warning: GPU 2: stale: nvmlDeviceGetPowerUsage has not returned for 4 s" in lines
        (row,) = (line for line in lines if line.startswith("  0     4000  alice"))
        assert row == "  0     4000  alice     C       9.75 GiB   90 %    4.00 GiB  python train.py --…"
        assert len(row) == 80

    def test_a_list_that_could_not_be_read_is_not_no_processes(self) -> None:
        assert "No processes on these GPUs." in list(table(machine([gpu(processes=())]), ()))
        blind = list(table(machine([gpu(processes=Unknown("no permission"))]), ()))
        assert "No process list could be read." in blind

    @settings(suppress_health_check=[HealthCheck.data_too_large])
    @given(snapshot=anything(Snapshot))
    def test_any_snapshot_can_be_printed(self, snapshot: Snapshot) -> None:
        assert all(len(line) <= 60 for line in table(snapshot, Alerts().update(snapshot), width=60))
        assert len(list(log_lines(snapshot))) >= len(snapshot.gpus)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "GPU 0: 10.00 / 80.00 GiB, util 97 %, 65 °C, 312 W, 1 process"),
        ({"processes": Unknown("no permission")}, "312 W, processes unknown"),
        ({"state": DeviceState.LOST, "state_reason": "GPU is lost"}, "1 process, lost: GPU is lost"),
    ],
)
def test_a_line_a_gpu(changes: dict[str, Any], said: str) -> None:
    (line,) = log_lines(machine([gpu(0, **changes)]))
    assert line.endswith(said)


class Scripted(LatestSnapshot):
    """A source that has these snapshots, one after the other."""

    notice = ""

    def __init__(self, *snapshots: Snapshot) -> None:
        super().__init__()
        self._left = iter(snapshots)

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def wait(self, after: Snapshot | None, timeout_s: float) -> Snapshot | None:
        return next(self._left)


def test_a_driver_that_takes_seconds_to_start_is_waited_for() -> None:
    """As it does on a machine with many GPUs that no program keeps awake."""
    starting = machine([], problem=f"the NVIDIA driver does not start: {not_returned('nvmlInit', 1.0)}")
    ready, absent = machine([gpu()]), machine([], problem="no driver on this machine: install it")
    assert complete(Scripted(starting, starting, machine([]), ready)) is ready
    assert complete(Scripted(absent, ready)) is absent
