"""The newest snapshot as Prometheus metrics over HTTP. A value that could not be read is no series.

Imports prometheus_client: import this module where it is needed, not at a program's start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from http.server import HTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpumem_tui.addresses import in_url
from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.readings import READINGS, Reading, ReadingMetric
from gpumem_tui.monitor.report import ledger_sizes
from gpumem_tui.monitor.snapshot import (
    DeviceState,
    GpuProcess,
    GpuReading,
    Instance,
    Snapshot,
    Source,
)

_GPU = ("gpu", "uuid", "name", "mig_instance")
_PROCESS = ("gpu", "uuid", "mig_instance", "pid", "user", "process")
"""Labels. Prometheus gives every series an ``instance``, whom it asked, so a MIG instance is not called that."""


class CannotServe(Exception):
    """The address cannot be had; one line."""


class Server:
    """Serves a source's newest snapshot until it is stopped; each scrape reads what is there and asks no driver.

    Raises:
        CannotServe: the address is in use, not of this machine, or not permitted.
    """

    def __init__(self, source: Source, host: str, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(_SourceCollector(source))
        try:
            self._server: HTTPServer
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError, UnicodeError) as error:  # the last: what no name of a host can be
            reason = error.strerror if isinstance(error, OSError) else error
            raise CannotServe(f"{in_url(host, port)} cannot be served: {reason}") from error
        self.address = in_url(host, self.port)
        """As it stands in a URL."""

    @property
    def port(self) -> int:
        """The port it listens on; the one that was free if 0 was asked for."""
        return int(self._server.server_port)

    def stop(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _SourceCollector(Collector):
    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterable[Metric]:
        snapshot = self._source.latest()
        return [] if snapshot is None else metrics(snapshot)

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not collect."""
        return []


def metrics(snapshot: Snapshot) -> Iterator[Metric]:
    """A snapshot's metrics, in base units (bytes, seconds, ratios), all beginning with ``gpumem_``."""
    time = GaugeMetricFamily("gpumem_snapshot_timestamp_seconds", "When the newest readings were put together")
    time.add_metric([], snapshot.time_s)
    yield time
    info = GaugeMetricFamily("gpumem_driver", "1 if the driver answers", labels=["driver", "cuda"])
    versions = [_label(snapshot.driver_version), _label(snapshot.cuda_version)]
    info.add_metric(versions, 0 if snapshot.problem else 1)
    yield info
    calls = CounterMetricFamily("gpumem_nvml_calls", "Calls of the NVML library", labels=["function"])
    for function, count in snapshot.calls.items():
        calls.add_metric([function], count)
    yield calls
    yield from _state_metrics(snapshot.gpus)
    answering = [
        gpu for gpu in snapshot.gpus if gpu.state is DeviceState.OK
    ]  # what a silent one last said is not what is
    yield from _gpu_metrics(answering)
    yield from _memory_metrics(answering)
    yield from _process_metrics(answering)


def _state_metrics(gpus: Sequence[GpuReading]) -> Iterator[Metric]:
    up = GaugeMetricFamily("gpumem_gpu_up", "1 if the GPU answers, 0 if it is stale or lost", labels=_GPU)
    age = GaugeMetricFamily("gpumem_gpu_age_seconds", "How old its readings are", labels=_GPU)
    for gpu in gpus:
        up.add_metric(_labels(gpu), gpu.state is DeviceState.OK)
        age.add_metric(_labels(gpu), gpu.age_s)
    yield from (up, age)


def _gpu_metrics(gpus: Sequence[GpuReading]) -> Iterator[Metric]:
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for name, entry in READINGS.items():
        metric = entry.metric
        if metric is None:
            continue
        if metric.name not in families:
            kind = CounterMetricFamily if metric.counter else GaugeMetricFamily
            labels = _GPU if metric.label is None else (*_GPU, metric.label[0])
            families[metric.name] = kind(f"gpumem_gpu_{metric.name}", metric.words or entry.words, labels=labels)
        for gpu in gpus:
            for further, value in _series(metric, getattr(gpu, name)):
                _add(families[metric.name], [*_labels(gpu), *further], value, metric.factor)
    yield from families.values()


def _series(metric: ReadingMetric, reading: Reading[Any]) -> Iterator[tuple[list[str], Reading[Any]]]:
    """A reading's values, each with what it is further labelled by."""
    if metric.label is None:
        yield [], reading
    elif metric.label[1]:
        yield [metric.label[1]], reading
    else:
        yield from (([entry], 1) for entry in (() if isinstance(reading, Unknown) else reading))


def _memory_metrics(gpus: Sequence[GpuReading]) -> Iterator[Metric]:
    total = GaugeMetricFamily("gpumem_gpu_memory_total_bytes", "Memory of the device", labels=_GPU)
    used = GaugeMetricFamily("gpumem_gpu_memory_used_bytes", "In use, without the driver's reserve", labels=_GPU)
    rows = GaugeMetricFamily(
        "gpumem_gpu_memory_bytes", "The device's memory by row of its ledger; the rows sum to the total",
        labels=[*_GPU, "row"],
    )  # fmt: skip
    for gpu in gpus:
        devices: tuple[GpuReading | Instance, ...] = (gpu, *gpu.instances)
        for device in devices:
            labels = _labels(gpu, device if isinstance(device, Instance) else None)
            if not isinstance(device.memory, Unknown):
                total.add_metric(labels, device.memory.total_bytes)
                used.add_metric(labels, device.memory.used_bytes)
            for kind, size_bytes in ledger_sizes(device).items():
                _add(rows, [*labels, kind.value], size_bytes)
    yield from (total, used, rows)


def _process_metrics(gpus: Sequence[GpuReading]) -> Iterator[Metric]:
    memory = GaugeMetricFamily("gpumem_process_memory_bytes", "Memory a process holds on the device", labels=_PROCESS)
    share = GaugeMetricFamily("gpumem_process_sm_ratio", "Its share of the multiprocessors", labels=_PROCESS)
    for gpu in gpus:
        for uuid, process in _processes(gpu):
            host = process.host
            who = ["", ""] if isinstance(host, Unknown) else [host.user, host.name]
            labels = [str(gpu.index), gpu.uuid, uuid, str(process.pid), *who]
            _add(memory, labels, process.used_bytes)
            _add(share, labels, process.sm_percent, 0.01)
    yield from (memory, share)


def _processes(gpu: GpuReading) -> Iterator[tuple[str, GpuProcess]]:
    """Each process once, with the MIG instance it runs in."""
    for instance in gpu.instances:
        for process in () if isinstance(instance.processes, Unknown) else instance.processes:
            yield instance.uuid, process
    for process in () if isinstance(gpu.processes, Unknown) else gpu.processes:
        if not process.instance:
            yield "", process


def _labels(gpu: GpuReading, instance: Instance | None = None) -> list[str]:
    return [str(gpu.index), gpu.uuid, gpu.name, "" if instance is None else instance.uuid]


def _label(reading: Reading[str]) -> str:
    return "" if isinstance(reading, Unknown) else reading


def _add(
    family: GaugeMetricFamily | CounterMetricFamily,
    labels: Sequence[str],
    reading: Reading[int] | Reading[float],
    unit: float = 1,
) -> None:
    """One series, if the value is known."""
    if not isinstance(reading, Unknown):
        family.add_metric(labels, reading * unit)
