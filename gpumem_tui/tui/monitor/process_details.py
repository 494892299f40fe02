"""Everything known of one process on one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from gpumem_tui.memory import Unknown, Value, format_bytes
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.snapshot import Memory, ProcessKind
from gpumem_tui.tui.kit.figures import MUTED, Row, age
from gpumem_tui.tui.monitor.entries import Entry
from gpumem_tui.tui.monitor.state import MonitorState, device_key
from gpumem_tui.tui.process.probed import DRIVER_ONLY, fact, probed_rows

T = TypeVar("T")

_KINDS = {ProcessKind.COMPUTE: "compute", ProcessKind.GRAPHICS: "graphics", ProcessKind.BOTH: "compute and graphics"}
_NO_GPU = {"cpu": "host memory: it trains on the CPU", "–": "not known before its first step"}


def details_rows(state: MonitorState, entry: Entry) -> list[Row]:
    """A line a fact; what is unknown stands as its reason."""
    now_s = state.snapshot.time_s if state.snapshot is not None else 0.0
    rows = [fact("pid", f"{entry.process.pid}, {_KINDS[entry.process.kind]}"), *_device_rows(state, entry), []]
    if entry.watched is not None:
        rows += [*probed_rows(entry.watched, entry.sample), []]
    else:
        rows += [fact("probe", DRIVER_ONLY), []]
    return [*rows, *_host_rows(entry, now_s)]


def _device_rows(state: MonitorState, entry: Entry) -> Iterator[Row]:
    """Where it is, and how much of that it holds; with a probe, as which parts."""
    process, gpu = entry.process, entry.gpu
    if gpu is None:
        yield fact("device", _NO_GPU.get(entry.place, f"{entry.place}, which GPU that is cannot be told"))
        return
    yield fact("GPU", f"{gpu.index}  {gpu.name}")
    yield fact("", gpu.uuid, MUTED)
    instance = next((each for each in gpu.instances if each.uuid == process.instance), None)
    if process.instance:
        yield fact("MIG instance", process.instance if instance is None else f"{instance.index}  {instance.name}")
    if instance is None:
        yield fact("GPU memory", _of_total(process.used_bytes, gpu.memory, "device"))
    else:
        yield fact("", instance.uuid, MUTED)
        yield fact("GPU memory", _of_total(process.used_bytes, instance.memory, "instance"))
    parts = state.parts.get((process.instance or device_key(gpu), process.pid))
    if parts is not None and isinstance(process.used_bytes, int) and parts.reserved_bytes <= process.used_bytes:
        context_bytes = process.used_bytes - parts.reserved_bytes
        reserved, context = format_bytes(parts.reserved_bytes), format_bytes(context_bytes)
        yield fact("", f"{reserved} reserved by the allocator, {context} CUDA context", MUTED)
    yield fact("SM share", _said(process.sm_percent, "%"))


def _host_rows(entry: Entry, now_s: float) -> Iterator[Row]:
    host = entry.host
    if host is None:
        yield fact("process", entry.process.host.reason if isinstance(entry.process.host, Unknown) else "")
        yield fact("", "It can be neither named nor ended from here.", MUTED)
        return
    yield fact("user", host.user)
    yield fact("parent", str(host.parent_pid))
    yield fact("running for", age(now_s - host.start_time_s))
    yield fact("CPU", _said(host.cpu_percent, "% of one core"))
    yield fact("host memory", format_bytes(host.resident_bytes))
    if host.container:
        yield fact("container", host.container)
    yield []
    yield [(host.command or host.name, "")]


def _said(reading: Reading[T], unit: str) -> str:
    if isinstance(reading, Unknown):
        return reading.reason
    return f"{reading:.0f}{unit}" if isinstance(reading, float) else f"{reading}{unit}"


def _of_total(used_bytes: Value, memory: Reading[Memory], whole: str) -> str:
    if isinstance(used_bytes, Unknown) or isinstance(memory, Unknown):
        return format_bytes(used_bytes)
    return f"{format_bytes(used_bytes)}, {used_bytes / memory.total_bytes:.1%} of the {whole}"
