"""Prometheus metrics, scraped over HTTP as Prometheus does it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partialmethod
from http.client import HTTPConnection
from urllib.error import HTTPError

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from gpumem_tui.addresses import is_loopback
from gpumem_tui.connections import FIRST_BYTE_S, REQUEST_S
from gpumem_tui.errors import OptionError
from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.monitor import metrics as served
from gpumem_tui.monitor.metrics import Machine, Server, this_machine
from gpumem_tui.monitor.snapshot import DeviceState, Instance, Snapshot
from tests.monitor.scripted import Scripted
from tests.monitor.snapshots import RESERVED_BYTES, START_S, gpu, machine, memory, process

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]
Scrape = Callable[[Snapshot | None], Series]


@pytest.fixture(autouse=True)
def quick_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server looks every half second whether it was stopped."""
    each = served._Connections
    monkeypatch.setattr(each, "serve_forever", partialmethod(each.serve_forever, 0.01))


@pytest.fixture
def scrape() -> Iterator[Scrape]:
    """Serves a snapshot and reads every series back, by name and labels."""
    source = Scripted()
    server = Server(this_machine(source), "127.0.0.1", 0)

    def read(snapshot: Snapshot | None) -> Series:
        if snapshot is not None:
            source.show(snapshot)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    yield read
    server.stop()


def test_there_is_one_path() -> None:
    server = Server(this_machine(Scripted()), "127.0.0.1", 0)
    try:
        for path in ("/", "/nope", "/metrics/x"):
            with pytest.raises(HTTPError) as refused:
                urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=30)
            assert refused.value.code == 404
            assert refused.value.read() == b"There is only /metrics here.\n"
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("bound", "asked", "code"),
    [
        ("127.0.0.1", "evil.example", 403),
        ("127.0.0.1", "node-7", 403),
        ("127.0.0.1", "localhost:1234", 200),
        ("0.0.0.0", "evil.example:9820", 403),
        ("0.0.0.0", "node-7:9820", 200),
        ("0.0.0.0", "192.0.2.7:9820", 200),
        ("0.0.0.0", "[2001:db8::1]:9820", 200),
        ("0.0.0.0", "[", 403),
    ],
)
def test_who_means_another_machine_is_refused(bound: str, asked: str, code: int) -> None:
    """A page whose own name points here asks with that name."""
    server = Server(this_machine(Scripted()), bound, 0)
    try:
        asking = HTTPConnection("127.0.0.1", server.port, timeout=30)
        asking.request("GET", "/metrics", headers={"Host": asked})
        assert asking.getresponse().status == code
    finally:
        server.stop()


def _connected(stack: ExitStack, server: Server) -> socket.socket:
    return stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30))


@pytest.mark.parametrize(("most", "of_an_address"), [(4, 24), (32, 4)])
def test_who_says_nothing_shuts_nobody_out(most: int, of_an_address: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "_MOST_CONNECTIONS", most)
    monkeypatch.setattr(served, "_MOST_OF_AN_ADDRESS", of_an_address)
    monkeypatch.setattr(served._Silent, "timeout", None)  # so that nothing else closes them
    monkeypatch.setattr(served, "REQUEST_S", 300.0)
    server = Server(this_machine(Scripted()), "127.0.0.1", 0)
    try:
        with ExitStack() as stack:
            silent = [_connected(stack, server) for _ in range(12)]
            silent[-1].sendall(b"GET /metrics HTTP/1.1\r\n")  # which is no whole request
            for _ in range(3):
                address = f"http://127.0.0.1:{server.port}/metrics"
                with urllib.request.urlopen(address, timeout=30) as answer:
                    assert answer.status == 200
            assert [one.recv(1) for one in silent[:8]] == [b""] * 8, "the oldest went"
    finally:
        server.stop()


def test_who_has_asked_gets_the_answer_however_many_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "_MOST_CONNECTIONS", 2)
    asked, answered = threading.Event(), threading.Event()

    def machines() -> Iterator[Machine]:
        asked.set()
        answered.wait(30)
        yield Machine("node", None)

    server = Server(machines, "127.0.0.1", 0)
    try:
        with ExitStack() as stack:
            asking = _connected(stack, server)
            asking.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert asked.wait(30)
            first, *_ = [_connected(stack, server) for _ in range(3)]
            assert first.recv(1) == b""
            answered.set()
            assert b" 200 " in asking.recv(100)
    finally:
        server.stop()


def test_connections_have_5_s_for_a_byte_and_10_for_all() -> None:
    assert (served._Silent.timeout, FIRST_BYTE_S, REQUEST_S) == (5, 5, 10)


def test_no_connection_waits_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served._Silent, "timeout", 0.4)
    monkeypatch.setattr(served, "REQUEST_S", 1.0)
    server = Server(this_machine(Scripted()), "127.0.0.1", 0)
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as silent:
            assert silent.recv(1) == b""
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
            begun_s = time.monotonic()
            with contextlib.suppress(OSError):
                while time.monotonic() - begun_s < 30:
                    slow.sendall(b"GET ")
                    time.sleep(0.1)
            assert time.monotonic() - begun_s < 20
    finally:
        server.stop()


def test_an_empty_host_is_a_bad_request() -> None:
    server = Server(this_machine(Scripted()), "127.0.0.1", 0)
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as asking:
            asking.sendall(b"GET /metrics HTTP/1.1\r\nHost:\r\n\r\n")
            assert b" 400 " in asking.recv(100)
    finally:
        server.stop()


def _of(series: Series, name: str, **labels: str) -> list[float]:
    return [
        value for (found, having), value in series.items() if found == name and labels.items() <= dict(having).items()
    ]


def test_a_process_says_in_which_container_pod_and_job_it_runs_and_users_have_totals(scrape: Scrape) -> None:
    known = process(7, GIB).host
    assert not isinstance(known, Unknown)
    pod = replace(known, container_id="0123456789ab", pod_uid="2f1b0c11-22aa-33bb-44cc-0123456789ab")
    job = replace(known, user="bob", slurm_job="4711")
    listed = (process(7, GIB, host=pod), process(8, 2 * GIB, host=job), process(9, GIB, host=Unknown("hidden")))
    series = scrape(machine([gpu(0, processes=listed), gpu(1, processes=(process(8, GIB, host=job),))]))
    assert _of(series, "gpumem_process_memory_bytes", container_id="0123456789ab", pod_uid=pod.pod_uid) == [GIB]
    assert _of(series, "gpumem_process_memory_bytes", slurm_job="4711", user="bob", gpu="0") == [2 * GIB]
    assert _of(series, "gpumem_process_memory_bytes", user="", slurm_job="") == [GIB]
    assert _of(series, "gpumem_user_memory_bytes", user="bob") == [3 * GIB]
    assert _of(series, "gpumem_user_gpus", user="bob") == [2]
    assert _of(series, "gpumem_user_processes", user="bob") == [1]
    assert _of(series, "gpumem_user_memory_bytes", user="") == [GIB], "of whom is not known"


def test_the_numbers_are_the_snapshots_in_base_units(scrape: Scrape) -> None:
    series = scrape(machine([gpu(0, used_bytes=10 * GIB), gpu(1)], calls={"nvmlInit": 3}))
    first = {"gpu": "0", "uuid": "GPU-00000000"}
    assert _of(series, "gpumem_gpu_memory_total_bytes", **first) == [80 * GIB]
    assert _of(series, "gpumem_gpu_memory_used_bytes", **first) == [10 * GIB]
    assert _of(series, "gpumem_gpu_memory_bytes", **first, row="driver_reserved") == [RESERVED_BYTES]
    assert sum(_of(series, "gpumem_gpu_memory_bytes", **first)) == 80 * GIB
    assert _of(series, "gpumem_gpu_utilization_ratio", **first) == [0.97]
    assert _of(series, "gpumem_gpu_sm_clock_hertz", **first) == [1.41e9]
    assert _of(series, "gpumem_gpu_power_watts") == [312.5, 312.5]
    assert _of(series, "gpumem_gpu_up") == [1, 1]
    assert _of(series, "gpumem_host_cpu_ratio") == [0.125]
    assert _of(series, "gpumem_host_memory_used_bytes") == [64 * GIB]
    assert _of(series, "gpumem_host_memory_total_bytes") == [512 * GIB]
    assert _of(series, "gpumem_gpu_ecc_errors_total", **first, type="uncorrected") == [0]
    assert _of(series, "gpumem_process_memory_bytes", pid="4000", user="alice", process="python") == [9.75 * GIB]
    assert _of(series, "gpumem_process_sm_ratio", pid="4001") == [0.9]
    assert _of(series, "gpumem_nvml_calls_total", function="nvmlInit") == [3]
    assert _of(series, "gpumem_snapshot_timestamp_seconds") == [START_S]
    assert _of(series, "gpumem_driver", driver="550.54.14", cuda="12.4") == [1]


def test_our_own_descriptors_are_counted() -> None:
    server = Server(this_machine(Scripted()), "127.0.0.1", 0, counts_itself=True)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        found = {sample.name: sample.value for family in families for sample in family.samples}
        assert 0 < found["gpumem_self_open_descriptors"] < found["gpumem_self_most_descriptors"]
        assert found["gpumem_self_resident_bytes"] > 1 << 20
    finally:
        server.stop()


def test_what_is_unknown_is_no_series(scrape: Scrape) -> None:
    blind = gpu(0, power_w=Unknown("x"), processes=Unknown("x"), memory=Unknown("x"), throttle=Unknown("x"))
    series = scrape(machine([blind]))
    for name in ("fan_ratio", "power_watts", "memory_total_bytes", "memory_used_bytes", "throttled"):
        assert _of(series, f"gpumem_gpu_{name}") == []
    assert _of(series, "gpumem_gpu_memory_bytes", row="process") == []
    assert _of(series, "gpumem_process_memory_bytes") == []
    assert _of(series, "gpumem_gpu_temperature_celsius") == [65]


def test_a_silent_gpu_says_nothing_but_that(scrape: Scrape) -> None:
    series = scrape(machine([gpu(0, state=DeviceState.STALE, age_s=4.5)]))
    assert {name for name, _ in series if name.startswith("gpumem_gpu_")} == {"gpumem_gpu_up", "gpumem_gpu_age_seconds"}
    assert _of(series, "gpumem_gpu_up") == [0]
    assert _of(series, "gpumem_gpu_age_seconds") == [4.5]


def test_mig_instances_stand_beside_their_gpu(scrape: Scrape) -> None:
    inside = process(7, GIB, instance="MIG-1")
    instance = Instance(0, "MIG-1", "1g.10gb", memory(GIB, total_bytes=10 * GIB), (inside,), Unknown("x"))
    series = scrape(machine([gpu(0, mig=True, processes=(inside,), instances=(instance,), throttle=("hot",))]))
    assert _of(series, "gpumem_gpu_memory_total_bytes", mig_instance="MIG-1") == [10 * GIB]
    assert _of(series, "gpumem_gpu_memory_total_bytes", mig_instance="") == [80 * GIB]
    assert _of(series, "gpumem_process_memory_bytes") == [GIB]  # once, though both lists have it
    assert _of(series, "gpumem_gpu_throttled", reason="hot") == [1]


def test_before_the_first_snapshot_and_without_a_driver(scrape: Scrape) -> None:
    assert [(name, value) for (name, _), value in scrape(None).items()] == [("gpumem_host_up", 0)]
    unknown = Unknown("no NVIDIA driver")
    series = scrape(machine(problem="no NVIDIA driver", driver_version=unknown, cuda_version=unknown))
    assert _of(series, "gpumem_driver", driver="", cuda="") == [0]
    starting = machine(problem="the NVIDIA driver is starting (4 s)", driver_version=unknown, cuda_version=unknown)
    assert [name for name, _ in scrape(starting) if name == "gpumem_driver"] == [], "neither 0 nor 1"


def test_an_address_that_cannot_be_had_is_one_line() -> None:
    server = Server(this_machine(Scripted()), "127.0.0.1", 0)
    try:
        with pytest.raises(OptionError, match=r"Address already in use; give another port"):
            Server(this_machine(Scripted()), "127.0.0.1", server.port)
    finally:
        server.stop()
    with pytest.raises(OptionError, match=r"192\.0\.2\.1:0 cannot be served: .*; give an address of this machine"):
        Server(this_machine(Scripted()), "192.0.2.1", 0)
    with pytest.raises(OptionError, match=r"127\.0\.\.1:0 cannot be served"):
        Server(this_machine(Scripted()), "127.0..1", 0)


def test_an_address_of_ipv6_stands_in_brackets() -> None:
    with contextlib.closing(socket.socket(socket.AF_INET6)) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
    server = Server(this_machine(Scripted()), "::1", 0)
    try:
        assert server.address == f"[::1]:{server.port}"
        with pytest.raises(OptionError, match=rf"\[::1\]:{server.port} cannot be served: Address already in use"):
            Server(this_machine(Scripted()), "::1", server.port)
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False), ("node-7", False)],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
