"""From what was read of a GPU to what travels: processes merged, ledgers made, losses spelled out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpumem_tui.memory import Unknown, Value
from gpumem_tui.monitor.backend import Identity, ListedProcess
from gpumem_tui.monitor.ledger import HOLDERS, device_ledger
from gpumem_tui.monitor.poller import InstanceRead, RawReadings
from gpumem_tui.monitor.readings import NOT_IN_MIG, NOT_READ_YET, READINGS, Reading
from gpumem_tui.monitor.snapshot import (
    NOT_LOOKED_UP_YET,
    DeviceState,
    GpuProcess,
    GpuReading,
    HostProcess,
    HostReading,
    Instance,
    Memory,
    ProcessKind,
)

Hosts = Mapping[int, Reading[HostProcess]]
"""The processes behind the pids, or why they are not known."""


def pids_of(raws: Sequence[RawReadings]) -> frozenset[int]:
    """Every process that the GPUs have."""
    lists = [reading for raw in raws for reading in (raw.compute_processes, raw.graphics_processes)]
    lists += [instance.processes for raw in raws for instance in raw.instances]
    return frozenset(process.pid for reading in lists if not isinstance(reading, Unknown) for process in reading)


def gpu_reading(
    index: int, raw: RawReadings, *, state: DeviceState, reason: str, age_s: float, hosts: Hosts, host: HostReading
) -> GpuReading:
    """A GPU that answers, or did until `age_s` ago."""
    unified = raw.identity is not None and raw.identity.integrated and isinstance(raw.memory, Unknown)
    memory = _host_memory(host) if unified else raw.memory
    instances = tuple(_instance(read, hosts) for read in raw.instances) if raw.mig else ()
    processes = _of_instances(instances) if raw.mig else _processes(raw, hosts)
    return GpuReading(
        **_identified(index, raw.identity),
        state=state,
        state_reason=reason,
        age_s=age_s,
        memory=memory,
        ledger=device_ledger(memory, processes, holders=_holders(raw.identity, unified=unified)),
        processes=processes,
        unified=unified,
        mig=raw.mig,
        instances=instances,
        **raw.readings,
    )


def lost_reading(index: int, identity: Identity | None, reason: str, age_s: float) -> GpuReading:
    """A GPU that does not answer: nothing of it is known but its name."""
    unknown: dict[str, Any] = dict.fromkeys(("memory", "ledger", "processes", *READINGS), Unknown(reason))
    return GpuReading(
        **_identified(index, identity), state=DeviceState.LOST, state_reason=reason, age_s=age_s, **unknown
    )


def _identified(index: int, identity: Identity | None) -> dict[str, Any]:
    if identity is None:
        return {"index": index, "uuid": f"unknown-{index}", "name": "unknown GPU", "compute_capability": NOT_READ_YET}
    return {
        "index": index,
        "uuid": identity.uuid,
        "name": identity.name,
        "bus_id": identity.bus_id,
        "compute_capability": identity.compute_capability,
    }


def _host_memory(host: HostReading) -> Reading[Memory]:
    total, used = host.memory_total_bytes, host.memory_used_bytes
    if isinstance(total, Unknown):
        return total
    if isinstance(used, Unknown):
        return used
    return Memory(total, Unknown("part of the host's memory"), used, total - used)


def _holders(identity: Identity | None, *, unified: bool) -> str:
    if unified:
        return "what runs on the CPU, in the same memory"
    if identity is not None and identity.holds_virtual_machines:
        return "virtual machines on this host"
    return HOLDERS


def _processes(raw: RawReadings, hosts: Hosts) -> Reading[tuple[GpuProcess, ...]]:
    if isinstance(raw.compute_processes, Unknown):
        return raw.compute_processes
    drawing = () if isinstance(raw.graphics_processes, Unknown) else raw.graphics_processes
    compute = {process.pid: process for process in raw.compute_processes}
    graphics = {process.pid: process for process in drawing}
    return tuple(
        GpuProcess(
            pid=pid,
            kind=_kind(pid in compute, pid in graphics),
            used_bytes=_larger([lists[pid] for lists in (compute, graphics) if pid in lists]),
            sm_percent=raw.sm_percents if isinstance(raw.sm_percents, Unknown) else raw.sm_percents.get(pid, 0),
            host=hosts.get(pid, NOT_LOOKED_UP_YET),
        )
        for pid in compute | graphics
    )


def _kind(computes: bool, draws: bool) -> ProcessKind:
    if computes and draws:
        return ProcessKind.BOTH
    return ProcessKind.COMPUTE if computes else ProcessKind.GRAPHICS


def _larger(entries: list[ListedProcess]) -> Value:
    """Either list has the process's whole memory."""
    known = [entry.used_bytes for entry in entries if isinstance(entry.used_bytes, int)]
    return max(known) if known else entries[0].used_bytes


def _instance(read: InstanceRead, hosts: Hosts) -> Instance:
    processes: Reading[tuple[GpuProcess, ...]]
    if isinstance(read.processes, Unknown):
        processes = read.processes
    else:
        processes = tuple(
            GpuProcess(
                p.pid,
                ProcessKind.COMPUTE,
                p.used_bytes,
                NOT_IN_MIG,
                hosts.get(p.pid, NOT_LOOKED_UP_YET),
                read.instance.uuid,
            )
            for p in read.processes
        )
    return Instance(
        index=read.instance.index,
        uuid=read.instance.uuid,
        name=read.instance.name,
        memory=read.memory,
        processes=processes,
        ledger=device_ledger(read.memory, processes),
    )


def _of_instances(instances: Sequence[Instance]) -> Reading[tuple[GpuProcess, ...]]:
    found: list[GpuProcess] = []
    for instance in instances:
        if isinstance(instance.processes, Unknown):
            return instance.processes
        found += instance.processes
    return tuple(found)
