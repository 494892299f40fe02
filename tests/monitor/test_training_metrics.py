"""Probes' reports as metrics: by rank and bucket, bounded, and as OpenMetrics has it."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from gpumem_tui.memory import ALLOCATED_BUCKETS, GIB, Unknown
from gpumem_tui.monitor.metrics import MOST_PROCESSES, Machine, Server, metrics
from gpumem_tui.monitor.metrics import MOST_TRAINING_PROCESSES as MOST_TRAINING
from gpumem_tui.monitor.probes import ProbeReport
from tests.monitor.snapshots import gpu, machine, process
from tests.monitor.training import machine_that_trains, sample

RANK_0 = {"host": "node-1", "gpu": "0", "pid": "4000", "training_job": "slurm 4711", "rank": "0", "device": "cuda:0"}


def _samples(*machines: Machine) -> list[Sample]:
    return [sample for family in metrics(machines) for sample in family.samples]


def _of(samples: list[Sample], name: str, **labels: str) -> list[float]:
    return [found.value for found in samples if found.name == name and labels.items() <= found.labels.items()]


@contextmanager
def _open_metrics(*machines: Machine) -> Iterator[str]:
    """The answer to Prometheus, which asks for OpenMetrics."""
    server = Server(lambda: machines, "127.0.0.1", 0)
    asked = {"Accept": "application/openmetrics-text;version=1.0.0"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{server.port}/metrics", headers=asked), timeout=60
        ) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            yield answer.read().decode()
    finally:
        server.stop()


def test_openmetrics_own_parser_reads_all_of_it() -> None:
    machines = (machine_that_trains(), machine_that_trains("node-2"), Machine("node-3", None))
    with _open_metrics(*machines) as text:
        families = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]  # as the library has it
        read = [found for family in families for found in family.samples]
    expected = _samples(*machines)
    assert [(found.name, found.labels, found.value) for found in read] == [
        (found.name, found.labels, found.value) for found in expected
    ]
    series = [(found.name, *sorted(found.labels.items())) for found in read]
    assert len(series) == len(set(series)), "no series twice"


def test_the_ranks_of_a_job_have_their_buckets() -> None:
    found = _samples(machine_that_trains())
    for name, size_bytes in (("memory", GIB), ("peak_memory", 2 * GIB)):
        for bucket in ALLOCATED_BUCKETS:
            assert _of(found, f"gpumem_training_{name}_bytes", **RANK_0, bucket=bucket.value) == [size_bytes]
    assert _of(found, "gpumem_training_peak_allocated_bytes", **RANK_0) == [8 * GIB]
    assert _of(found, "gpumem_training_steps_total", rank="1") == [98]
    assert _of(found, "gpumem_training_step_age_seconds", **RANK_0) == [0.05]
    assert _of(found, "gpumem_training_allocator_retries_total", **RANK_0) == [1]
    assert _of(found, "gpumem_training_step_seconds", **RANK_0) == [0.25]
    assert _of(found, "gpumem_training_world_size") == [2, 2]
    assert _of(found, "gpumem_training_processes") == [2]


def test_what_a_probe_does_not_know_is_no_series() -> None:
    blind = sample(buckets={"parameters": GIB, "gradients": None}, peak_buckets={}, rank=None, job=None, step_s=None)
    found = _samples(machine_that_trains("node-1", blind))
    assert _of(found, "gpumem_training_memory_bytes", rank="", training_job="pid 4000") == [GIB]
    assert _of(found, "gpumem_training_peak_memory_bytes") == []
    assert _of(found, "gpumem_training_step_seconds") == []


def test_a_process_that_trains_in_host_memory_is_on_no_gpu() -> None:
    found = _samples(Machine("node-1", machine([gpu(0)]), ProbeReport(said={("cpu", 4000): sample(device="cpu")})))
    assert _of(found, "gpumem_training_allocated_bytes", gpu="", uuid="", device="cpu") == [4 * GIB]


def test_what_another_host_makes_up_is_left_out() -> None:
    made_up = sample(buckets=[1], allocated_bytes="many", retries=True, job={"a": 1}, peak_buckets={"x": 1})
    found = _samples(machine_that_trains("node-1", made_up))
    assert _of(found, "gpumem_training_memory_bytes") == []
    assert _of(found, "gpumem_training_peak_memory_bytes") == []
    assert _of(found, "gpumem_training_allocated_bytes") == []
    assert _of(found, "gpumem_training_allocator_retries_total") == []
    assert _of(found, "gpumem_training_reserved_bytes") == [5 * GIB]


def test_the_series_of_a_machine_are_bounded_and_what_is_left_out_is_counted() -> None:
    training = [sample(pid, 0, reserved_bytes=pid * GIB) for pid in range(1, MOST_TRAINING + 11)]
    found = _samples(machine_that_trains("node-1", *training))
    assert len(_of(found, "gpumem_training_reserved_bytes")) == MOST_TRAINING
    assert min(_of(found, "gpumem_training_reserved_bytes")) == 11 * GIB, "those that hold most"
    assert _of(found, "gpumem_training_processes_left_out") == [10]
    per_process = [one for one in found if one.name.startswith("gpumem_training_") and "pid" in one.labels]
    assert len(per_process) <= MOST_TRAINING * (2 * len(ALLOCATED_BUCKETS) + 13)

    processes = tuple(process(pid, pid * GIB) for pid in range(1, MOST_PROCESSES + 6))
    found = _samples(Machine("node-1", machine([gpu(0, processes=processes)])))
    assert len(_of(found, "gpumem_process_memory_bytes")) == MOST_PROCESSES
    assert min(_of(found, "gpumem_process_memory_bytes")) == 6 * GIB
    assert _of(found, "gpumem_processes_left_out") == [5]


def test_a_label_that_is_endless_is_cut() -> None:
    found = _samples(machine_that_trains("node-1", sample(job="x" * 10_000)))
    assert max(len(value) for one in found for value in one.labels.values()) == 200


def test_of_a_host_that_is_away_only_that_and_since_when() -> None:
    away = Machine("node-2", machine([gpu(0)], time_s=1000.0), is_up=False)
    found = _samples(machine_that_trains(), away)
    assert _of(found, "gpumem_host_up", host="node-1") == [1]
    assert {(one.name, one.value) for one in found if one.labels["host"] == "node-2"} == {
        ("gpumem_host_up", 0),
        ("gpumem_snapshot_timestamp_seconds", 1000.0),
    }


def test_an_unknown_process_list_leaves_none_out() -> None:
    found = _samples(Machine("node-1", machine([gpu(0, processes=Unknown("no permission"))])))
    assert _of(found, "gpumem_processes_left_out") == [0]
