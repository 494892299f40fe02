"""The newest snapshots as Prometheus metrics over HTTP. A value that could not be read is no series.

Imports prometheus_client: import this module where it is needed, not at a program's start.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpumem_tui.addresses import in_url, is_address, is_loopback
from gpumem_tui.connections import FIRST_BYTE_S, REQUEST_S, Admission, Admitted
from gpumem_tui.errors import OptionError
from gpumem_tui.host_memory import resident_bytes
from gpumem_tui.memory import Bucket, Unknown
from gpumem_tui.monitor.probes import NOTHING_SAID, Ask, ProbeReport, no_probes, with_unlisted
from gpumem_tui.monitor.ranks import other_ranks
from gpumem_tui.monitor.readings import READINGS, Reading, ReadingMetric
from gpumem_tui.monitor.report import ledger_sizes
from gpumem_tui.monitor.snapshot import (
    STARTING,
    DeviceState,
    GpuProcess,
    GpuReading,
    HostProcess,
    Instance,
    Snapshot,
    Source,
)
from gpumem_tui.monitor.users import user_totals
from gpumem_tui.monitor.vendors import of_brand, vendor
from gpumem_tui.system import host_name
from gpumem_tui.text import printable

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_LONGEST_LABEL = 200
_OF_THE_PORT = errno.EADDRINUSE, errno.EACCES
"""Errors that another port helps against."""


@dataclass(frozen=True)
class Family:
    """A metric: every series of it has these labels, and ``host`` before them.

    Attributes:
        name: without ``gpumem_`` before it; a counter's without ``_total`` after it.
        counter: it only grows.
    """

    name: str
    words: str
    labels: tuple[str, ...] = ()
    counter: bool = False


class Sheet:
    """The series of all machines, by family."""

    def __init__(self) -> None:
        self._families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}

    def has(self, family: Family) -> None:
        """Declare a family, even if no series of it follows."""
        if family.name not in self._families:
            kind = CounterMetricFamily if family.counter else GaugeMetricFamily
            self._families[family.name] = kind(f"gpumem_{family.name}", family.words, labels=("host", *family.labels))

    def add(
        self,
        family: Family,
        host: str,
        labels: Sequence[str],
        reading: Reading[int] | Reading[float],
        factor: float = 1,
    ) -> None:
        """Add one series, unless the value is unknown."""
        self.has(family)
        if not isinstance(reading, Unknown):
            self._families[family.name].add_metric(
                [host, *(label[:_LONGEST_LABEL] for label in labels)], reading * factor
            )

    def metrics(self) -> Iterator[Metric]:
        """Yield all families, in the order in which they were named."""
        yield from self._families.values()


_PATH = "/metrics"
_MOST_CONNECTIONS, _MOST_OF_AN_ADDRESS = 32, 24
MOST_PROCESSES = 256
"""At most so many processes of a machine have series: those that hold most."""

_GPU = ("gpu", "uuid", "name", "mig_instance")
_PROCESS = ("gpu", "uuid", "mig_instance", "pid", "user", "process", "container_id", "pod_uid", "slurm_job")
"""Labels. Prometheus gives every series an ``instance``, whom it asked, so a MIG instance is not called that; in
Kubernetes a ``pod`` and a ``container``, of whom it asked, too."""
_USER = ("user",)

_HOST_UP = Family("host_up", "1 if the host's readings are its newest, 0 if it is away")
_TIME = Family("snapshot_timestamp_seconds", "When the newest readings were put together")
_DRIVER = Family("driver", "1 if the driver answers", ("driver", "cuda"))
_DRIVERS = Family(
    "vendor_driver",
    "1 if the driver of a vendor answers, of several",
    ("vendor", "driver", "runtime", "runtime_version"),
)
_UP = Family("gpu_up", "1 if the GPU answers, 0 if it is stale or lost", _GPU)
_AGE = Family("gpu_age_seconds", "How old its readings are", _GPU)
_TOTAL = Family("gpu_memory_total_bytes", "Memory of the device", _GPU)
_USED = Family("gpu_memory_used_bytes", "In use, without the driver's reserve", _GPU)
_ROWS = Family(
    "gpu_memory_bytes", "The device's memory by row of its ledger; the rows sum to the total", (*_GPU, "row")
)
_OTHER_RANKS = Family(
    "gpu_other_ranks", "How many ranks of a job hold memory here though their main GPU is another", _GPU
)
_PROCESS_MEMORY = Family("process_memory_bytes", "Memory a process holds on the device", _PROCESS)
_PROCESS_SHARE = Family("process_sm_ratio", "Its share of the multiprocessors", _PROCESS)
_OPEN = Family("self_open_descriptors", "Descriptors that gpumem-tui itself has open")
_MOST_OPEN = Family("self_most_descriptors", "As many as it may have open")
_RESIDENT = Family("self_resident_bytes", "Host memory that it holds")
_HOST_CPU = Family("host_cpu_ratio", "Share of the machine's processors that is busy")
_HOST_USED = Family("host_memory_used_bytes", "Host memory that is not available to new programs")
_HOST_TOTAL = Family("host_memory_total_bytes", "Host memory")
_USER_MEMORY = Family("user_memory_bytes", "Memory of GPUs that a user's processes hold, as far as known", _USER)
_USER_GPUS = Family("user_gpus", "On how many GPUs a user has processes", _USER)
_USER_PROCESSES = Family("user_processes", "How many processes of a user use GPUs or train under a probe", _USER)
_LEFT_OUT = Family("processes_left_out", f"More than {MOST_PROCESSES}: those that hold least have no series")


@dataclass(frozen=True)
class Machine:
    """A machine at one moment: its name, its snapshot and what its probes say.

    Attributes:
        host: its name.
        snapshot: the newest; None before the first.
        is_up: whether that is what it states now.
    """

    host: str
    snapshot: Snapshot | None
    probes: ProbeReport = NOTHING_SAID
    is_up: bool = True


Machines = Callable[[], Iterable[Machine]]


def this_machine(source: Source, ask: Ask = no_probes) -> Machines:
    """Make a reader of a source's machine; its probes are asked at each scrape, one scrape after another."""
    host, one_at_a_time = host_name(), threading.Lock()

    def read() -> Iterable[Machine]:
        snapshot = source.latest()
        with one_at_a_time:
            probes = NOTHING_SAID if snapshot is None else ask(snapshot)
        return [Machine(host, snapshot, probes)]

    return read


class Server:
    """Serves what machines say until it is stopped; each scrape reads what is there and asks no driver.

    Args:
        counts_itself: serve what this very process takes too.

    Raises:
        OptionError: the address is in use, not of this machine, or not permitted.
    """

    def __init__(self, machines: Machines, host: str, port: int, *, counts_itself: bool = False) -> None:
        registry = CollectorRegistry()
        registry.register(_MachinesCollector(machines))
        if counts_itself:
            registry.register(_Ourselves())
        try:
            self._server = _Connections(host, port)
            self._server.set_app(_at_one_path(make_wsgi_app(registry), host))
        except (OSError, OverflowError, UnicodeError) as error:  # the last: what no name of a host can be
            reason = error.strerror if isinstance(error, OSError) else error
            remedy = "another port" if getattr(error, "errno", 0) in _OF_THE_PORT else "an address of this machine"
            raise OptionError(f"--metrics: {in_url(host, port)} cannot be served: {reason}; give {remedy}") from error
        self.address = in_url(host, self.port)
        """Host and port, as they stand in a URL."""
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Return the port it listens on; the one that was free if 0 was asked for."""
        return int(self._server.server_port)

    def stop(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Silent(WSGIRequestHandler):
    """A handler of requests that logs nothing, and waits for no other end that gives nothing."""

    timeout = FIRST_BYTE_S
    server: _Connections

    def parse_request(self) -> bool:
        """Take what has come for a request: from now on the connection is at work."""
        is_one = super().parse_request()
        self.server.begin(self.connection)
        return is_one

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name there
        """Say nothing of a request."""


class _Connections(ThreadingMixIn, WSGIServer):
    """A limit on connections at once; none stays longer than `REQUEST_S`, even if its other end is silent."""

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, *_, address = found[0]
        self._gate = Admission(_MOST_CONNECTIONS, _MOST_OF_AN_ADDRESS)
        self._admitted: dict[object, Admitted] = {}
        super().__init__((str(address[0]), port), _Silent)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """Answer in a thread of its own; one too many is closed."""
        address = str(client_address[0]) if isinstance(client_address, tuple) else ""
        if (admitted := self._gate.admit(address, partial(self._cut, request))) is None:
            self.shutdown_request(request)
            return
        self._admitted[request] = admitted
        super().process_request(request, client_address)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        """Answer, and cut it off if that takes too long."""
        ended = threading.Timer(REQUEST_S, self._cut, (request,))
        ended.daemon = True
        ended.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            ended.cancel()
            self._gate.leave(self._admitted.pop(request))

    def begin(self, request: object) -> None:
        """Take note that a connection has said what it wants."""
        self._admitted[request].is_idle = False

    def handle_error(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """Say nothing of a connection that broke."""

    def _cut(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        assert isinstance(request, socket.socket)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


def _is_ours(asked: str, bound: str) -> bool:
    """Return whether a ``Host`` header means this machine.

    A web page whose own name is pointed here (DNS rebinding) has a name with a dot: of those only the address
    it listens on, and the machine's own, are taken.
    """
    try:
        name = (urlsplit(f"//{asked}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if not asked or is_loopback(name):
        return True
    if is_loopback(bound):
        return False
    return "." not in name or ":" in name or is_address(name) or name in (bound.lower(), socket.getfqdn().lower())


def _at_one_path(metrics: WSGIApplication, bound: str) -> WSGIApplication:
    """Answer at one path alone, and to who means this machine: prometheus_client's application answers anybody."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("HTTP_HOST") == "":
            start_response("400 Bad Request", [("Content-Type", "text/plain; charset=utf-8")])
            return [b"The header Host is empty.\n"]
        if not _is_ours(asked := environ.get("HTTP_HOST", ""), bound):
            start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{printable(asked)[:200]} is not this server: start it with --metrics NAME:PORT.\n".encode()]
        if environ["PATH_INFO"] in (_PATH, "/favicon.ico"):
            return metrics(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"There is only {_PATH} here.\n".encode()]

    return answer


class _MachinesCollector(Collector):
    def __init__(self, machines: Machines) -> None:
        self._machines = machines

    def collect(self) -> Iterable[Metric]:
        return metrics(self._machines())

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering does not collect."""
        return []


class _Ourselves(Collector):
    """The open files and the resident memory of the Monitor's own process."""

    def collect(self) -> Iterable[Metric]:
        sheet, host = Sheet(), host_name()
        sheet.add(_OPEN, host, (), len(os.listdir("/proc/self/fd")))
        sheet.add(_MOST_OPEN, host, (), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        sheet.add(_RESIDENT, host, (), resident_bytes() or Unknown("not reported"))
        return sheet.metrics()


def metrics(machines: Iterable[Machine]) -> Iterator[Metric]:
    """Yield machines' metrics in base units (bytes, seconds, ratios): ``gpumem_`` and a name, labelled ``host``."""
    sheet = Sheet()
    for machine in machines:
        sheet.add(_HOST_UP, machine.host, (), machine.is_up and machine.snapshot is not None)
        if machine.snapshot is not None:
            _add_machine(sheet, machine.host, machine.snapshot, machine.probes, is_up=machine.is_up)
    return sheet.metrics()


def _add_machine(sheet: Sheet, host: str, snapshot: Snapshot, probes: ProbeReport, *, is_up: bool) -> None:
    """Add one machine's series; stale GPUs and hosts that are away get none, as old values would look current."""
    sheet.add(_TIME, host, (), snapshot.time_s)
    if not is_up:
        return
    versions = [_label(snapshot.driver_version), _label(snapshot.cuda_version)]
    if STARTING not in snapshot.problem:
        sheet.add(_DRIVER, host, versions, 0 if snapshot.problem else 1)
    for driver in snapshot.drivers if len(snapshot.drivers) > 1 else ():
        known = [driver.vendor, _label(driver.driver_version), driver.runtime, _label(driver.runtime_version)]
        sheet.add(_DRIVERS, host, known, 0 if driver.problem else 1)
    counted = [(of_brand(each.vendor), each.calls) for each in snapshot.drivers] or [(vendor(), snapshot.calls)]
    for whose, calls in counted:
        name = f"{whose.library.lower().replace(' ', '_')}_calls"
        family = Family(name, f"Calls of the {whose.library} library", ("function",), counter=True)
        for function, count in calls.items():
            sheet.add(family, host, [function], count)
    sheet.add(_HOST_CPU, host, (), snapshot.host.cpu_percent, 0.01)
    sheet.add(_HOST_USED, host, (), snapshot.host.memory_used_bytes)
    sheet.add(_HOST_TOTAL, host, (), snapshot.host.memory_total_bytes)
    for gpu in snapshot.gpus:
        sheet.add(_UP, host, _labels(gpu), gpu.state is DeviceState.OK)
        sheet.add(_AGE, host, _labels(gpu), gpu.age_s)
    answering = [gpu for gpu in snapshot.gpus if gpu.state is DeviceState.OK]
    _add_readings(sheet, host, answering)
    _add_memory(sheet, host, answering)
    _add_processes(sheet, host, answering)
    _add_users(sheet, host, replace(with_unlisted(snapshot, probes), gpus=tuple(answering)))
    _add_training(sheet, host, snapshot.gpus, probes)


def _add_readings(sheet: Sheet, host: str, gpus: Sequence[GpuReading]) -> None:
    for name, entry in READINGS.items():
        metric = entry.metric
        if metric is None:
            continue
        labels = _GPU if metric.label is None else (*_GPU, metric.label[0])
        family = Family(f"gpu_{metric.name}", metric.words or entry.words, labels, metric.counter)
        sheet.has(family)
        for gpu in gpus:
            for further, value in _series(metric, getattr(gpu.telemetry, name)):
                sheet.add(family, host, [*_labels(gpu), *further], value, metric.factor)


def _series(
    metric: ReadingMetric, reading: Reading[float | tuple[str, ...]]
) -> Iterator[tuple[list[str], Reading[float]]]:
    """Yield a reading's values, each with its further labels."""
    if isinstance(reading, tuple):
        yield from (([entry], 1) for entry in reading)
    elif metric.label is None:
        yield [], reading
    elif metric.label[1]:
        yield [metric.label[1]], reading


def _add_memory(sheet: Sheet, host: str, gpus: Sequence[GpuReading]) -> None:
    for gpu in gpus:
        devices: tuple[GpuReading | Instance, ...] = (gpu, *gpu.instances)
        for device in devices:
            labels = _labels(gpu, device if isinstance(device, Instance) else None)
            if not isinstance(device.memory, Unknown):
                sheet.add(_TOTAL, host, labels, device.memory.total_bytes)
                sheet.add(_USED, host, labels, device.memory.used_bytes)
            for kind, size_bytes in ledger_sizes(device).items():
                sheet.add(_ROWS, host, [*labels, kind.value], size_bytes)


def _add_processes(sheet: Sheet, host: str, gpus: Sequence[GpuReading]) -> None:
    found = [(gpu, process) for gpu in gpus for process in gpu.all_processes]
    found.sort(key=lambda each: (-_held(each[1]), each[0].index, each[1].instance, each[1].pid))
    for gpu, process in found[:MOST_PROCESSES]:
        labels = [str(gpu.index), gpu.uuid, process.instance, str(process.pid), *_who(process.host)]
        sheet.add(_PROCESS_MEMORY, host, labels, process.used_bytes)
        sheet.add(_PROCESS_SHARE, host, labels, process.sm_percent, 0.01)
    sheet.add(_LEFT_OUT, host, (), len(found[MOST_PROCESSES:]))
    strays = [each for job in other_ranks(gpus) for each in job]
    for gpu in gpus:
        count = sum(len(each.processes) for each in strays if each.gpu.uuid == gpu.uuid)
        sheet.add(_OTHER_RANKS, host, _labels(gpu), count)


def _who(known: Reading[HostProcess]) -> list[str]:
    """Return the labels that say whose a process is, what it is, and in which container, pod and job it runs."""
    if isinstance(known, Unknown):
        return [""] * 5
    return [known.user, known.name, known.container_id, known.pod_uid, known.slurm_job]


def _add_users(sheet: Sheet, host: str, snapshot: Snapshot) -> None:
    for family in (_USER_MEMORY, _USER_GPUS, _USER_PROCESSES):
        sheet.has(family)
    for each in user_totals({host: snapshot}):
        labels = (each.user or "",)
        sheet.add(_USER_MEMORY, host, labels, each.used_bytes)
        sheet.add(_USER_GPUS, host, labels, len(each.gpus))
        sheet.add(_USER_PROCESSES, host, labels, each.processes)


def _held(process: GpuProcess) -> int:
    return 0 if isinstance(process.used_bytes, Unknown) else process.used_bytes


def _labels(gpu: GpuReading, instance: Instance | None = None) -> list[str]:
    return [str(gpu.index), gpu.uuid, gpu.name, "" if instance is None else instance.uuid]


def _label(reading: Reading[str]) -> str:
    return "" if isinstance(reading, Unknown) else reading


# ---- what the probes of watched training processes say, by rank and by bucket


MOST_TRAINING_PROCESSES = 64
"""As many devices of a machine's training processes have series: those that hold most. With 2 divisions into buckets a
machine has at most this × (2 × 7 buckets + 13) series of them."""

_RANK = ("gpu", "uuid", "device", "pid", "training_job", "rank")
"""``device`` is the process's own name of it; ``gpu`` and ``uuid`` are empty for host memory, or where it is not known
which GPU that is. ``training_job``: Prometheus has a label ``job`` of its own, for what it scrapes; of a process whose
job has no name its pid, so that no two runs are compared."""
_NAMED = ("device", "pid", "job", "rank")

_BUCKETS = {
    "buckets": Family(
        "training_memory_bytes", "Memory of a training process between two steps, by bucket", (*_RANK, "bucket")
    ),
    "peak_buckets": Family(
        "training_peak_memory_bytes", "Its memory at the peak, by bucket: the sum is what was allocated then",
        (*_RANK, "bucket"),
    ),
}  # fmt: skip
_FIGURES = {
    "allocated_bytes": Family("training_allocated_bytes", "Bytes that its caching allocator has given out", _RANK),
    "reserved_bytes": Family("training_reserved_bytes", "Bytes of the device that its caching allocator holds", _RANK),
    "peak_allocated_bytes": Family("training_peak_allocated_bytes", "The most that was ever given out at once", _RANK),
    "peak_reserved_bytes": Family("training_peak_reserved_bytes", "The most that was ever held of the device", _RANK),
    "inactive_split_bytes": Family(
        "training_fragmented_bytes", "Free parts of segments that are in use elsewhere", _RANK
    ),
    "step_s": Family("training_step_seconds", "Mean time of a step since the sample before", _RANK),
    "age_s": Family("training_sample_age_seconds", "Since its probe last wrote a sample", _RANK),
    "newest_step_age_s": Family("training_step_age_seconds", "Seconds since the last step seen ended", _RANK),
    "world_size": Family("training_world_size", "How many ranks its job has", _RANK),
    "newest_step": Family("training_steps", "Optimizer steps since the probe was loaded", _RANK, counter=True),
    "retries": Family(
        "training_allocator_retries", "Times its allocator gave its cache back to satisfy a request", _RANK,
        counter=True,
    ),
    "ooms": Family("training_allocator_failures", "Requests for memory that failed", _RANK, counter=True),
}  # fmt: skip
_WATCHED = Family("training_processes", "Devices of processes with a probe: the series of training metrics")
_TRAINING_LEFT_OUT = Family(
    "training_processes_left_out", f"More than {MOST_TRAINING_PROCESSES}: those that hold least have no series"
)


def _add_training(sheet: Sheet, host: str, gpus: tuple[GpuReading, ...], probes: ProbeReport) -> None:
    """Add the series of one machine's training processes."""
    for family in (*_BUCKETS.values(), *_FIGURES.values()):
        sheet.has(family)
    found = dict(_samples(gpus, probes))
    chosen = sorted(found.items(), key=lambda item: (-_training_held(item[1]), item[0]))[:MOST_TRAINING_PROCESSES]
    sheet.add(_WATCHED, host, (), len(chosen))
    sheet.add(_TRAINING_LEFT_OUT, host, (), len(found) - len(chosen))
    for labels, said in chosen:
        for name, family in _BUCKETS.items():
            for bucket in Bucket:
                if (size_bytes := _number(_buckets(said, name).get(bucket.value))) is not None:
                    sheet.add(family, host, (*labels, bucket.value), size_bytes)
        for name, family in _FIGURES.items():
            if (value := _number(said.get(name))) is not None:
                sheet.add(family, host, labels, value)


def _samples(
    gpus: tuple[GpuReading, ...], probes: ProbeReport
) -> Iterator[tuple[tuple[str, ...], Mapping[str, object]]]:
    """Yield each sample (as `watch.report` writes it) with its labels."""
    places = {gpu.uuid: str(gpu.index) for gpu in gpus}
    places |= {instance.uuid: str(gpu.index) for gpu in gpus for instance in gpu.instances}
    for (where, _), said in probes.said.items():
        uuid = "" if where == said.get("device") else where
        newest = {"newest_step": said.get("step"), "newest_step_age_s": said.get("age_s")}  # of older probes
        yield _training_labels(places.get(uuid, ""), uuid, said), {**newest, **said}


def _training_labels(gpu: str, uuid: str, said: Mapping[str, object]) -> tuple[str, ...]:
    device, pid, job, rank = ("" if said.get(name) is None else str(said[name]) for name in _NAMED)
    return gpu, uuid, device, pid, job or f"pid {pid}", rank


def _buckets(said: Mapping[str, object], name: str) -> Mapping[str, object]:
    """Return a division into buckets of a sample; empty where it has none."""
    found = said.get(name)
    return found if isinstance(found, dict) else {}


def _training_held(said: Mapping[str, object]) -> float:
    """Return what a process holds: what its allocator has reserved, or all that was found without one."""
    reserved_bytes = _number(said.get("reserved_bytes"))
    found = (_number(size) for size in _buckets(said, "buckets").values())
    return sum(size for size in found if size is not None) if reserved_bytes is None else reserved_bytes


def _number(value: object) -> float | None:
    """Return a figure; None where it is unknown, as what another host reports may be anything."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
