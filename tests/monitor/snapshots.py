"""Snapshots made by hand: a machine whose every reading a test may set, and any machine at all for property tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from types import NoneType
from typing import Any, cast, get_args, get_origin

from hypothesis import strategies as st
from msgspec import Struct, structs
from msgspec.structs import replace

from gpumem_tui.ledger import Ledger, LedgerRow
from gpumem_tui.memory import GIB, MIB, Bucket, Unknown, Value
from gpumem_tui.monitor.ledger import device_ledger
from gpumem_tui.monitor.readings import READINGS, Telemetry
from gpumem_tui.monitor.snapshot import (
    DeviceState,
    GpuProcess,
    GpuReading,
    HostProcess,
    HostReading,
    Memory,
    ProcessKind,
    Snapshot,
)
from gpumem_tui.report.objects import encoded

START_S = 1_700_000_000.0
RESERVED_BYTES = 606 * MIB


def process(pid: int, used_bytes: Value, **changes: Any) -> GpuProcess:
    """A training process."""
    host = HostProcess(
        pid=pid,
        parent_pid=1,
        user="alice",
        name="python",
        command="python train.py --batch-size 32",
        start_time_s=START_S - 600,
        cpu_percent=100.0,
        resident_bytes=4 * GIB,
    )
    return GpuProcess(
        **{"pid": pid, "kind": ProcessKind.COMPUTE, "used_bytes": used_bytes, "sm_percent": 90, "host": host, **changes}
    )


def memory(used_bytes: int, total_bytes: int = 80 * GIB) -> Memory:
    """The answer of a driver since 510 for a GPU that uses this much."""
    return Memory(total_bytes, RESERVED_BYTES, used_bytes, total_bytes - RESERVED_BYTES - used_bytes)


def ledger(held: Memory, processes: Sequence[GpuProcess], unaccounted_bytes: int, note: str) -> Ledger[GpuProcess]:
    """Parts that add up: the driver's reserve, the processes in their order, unaccounted memory, and free memory."""
    rows = (
        LedgerRow(Bucket.DRIVER_RESERVED, RESERVED_BYTES),
        *(LedgerRow(Bucket.PROCESS, process.used_bytes, process) for process in processes),
        LedgerRow(Bucket.UNACCOUNTED, unaccounted_bytes, note=note),
        LedgerRow(Bucket.FREE, held.free_bytes),
    )
    return Ledger(held.total_bytes, rows)


def gpu(index: int = 0, used_bytes: int = 10 * GIB, **changes: Any) -> GpuReading:
    """An A100 with everything supported; one process holds all but 256 MiB of what is used."""
    held = memory(used_bytes)
    unaccounted_bytes = min(256 * MIB, used_bytes)
    owner = process(4000 + index, used_bytes - unaccounted_bytes)
    values: dict[str, Any] = {
        **dict.fromkeys(READINGS, 0),
        "index": index,
        "uuid": f"GPU-{index:08d}",
        "name": "NVIDIA A100-SXM4-80GB",
        "state": DeviceState.OK,
        "state_reason": "",
        "age_s": 0.0,
        "memory": held,
        "ledger": device_ledger(held, (owner,), holders="kernel"),
        "processes": (owner,),
        "holders": "kernel",
        "compute_capability": (8, 0),
        "utilization_percent": 97,
        "memory_utilization_percent": 60,
        "power_w": 312.5,
        "power_limit_w": 400.0,
        "temperature_c": 65,
        "temperature_limit_c": 89,
        "fan_percent": Unknown("not supported"),
        "sm_clock_mhz": 1410,
        "memory_clock_mhz": 1593,
        "pcie_generation": 4,
        "pcie_width": 16,
        "pcie_rx_bytes_per_s": 1024,
        "pcie_tx_bytes_per_s": 2048,
        "ecc_corrected": 0,
        "ecc_uncorrected": 0,
        "performance_state": 0,
        "throttle": (),
        "bus_id": f"00000000:{index + 1:02X}:00.0",
    }
    values |= changes
    readings = Telemetry(**{name: values.pop(name) for name in READINGS})
    return GpuReading(**{"telemetry": readings, **values})


def changed(one: GpuReading, **changes: Any) -> GpuReading:
    """A GPU's reading with other values, be they of its telemetry or its own."""
    telemetry = replace(one.telemetry, **{name: changes.pop(name) for name in READINGS if name in changes})
    return replace(one, telemetry=telemetry, **changes)


def printed(body: object) -> Any:
    """The form in which a program reads an object printed as JSON."""
    return json.loads(encoded(body))


def machine(gpus: Sequence[GpuReading] = (), *, after_s: float = 0.0, **changes: Any) -> Snapshot:
    """A snapshot `after_s` seconds after the first."""
    values: dict[str, Any] = {
        "time_s": START_S + after_s,
        "driver_version": "550.54.14",
        "cuda_version": "12.4",
        "gpus": tuple(gpus),
        "host": HostReading("node-7", 12.5, 64 * GIB, 512 * GIB),
    }
    return Snapshot(**{**values, **changes})


def anything(wanted: Any) -> st.SearchStrategy[Any]:
    """Any value of a type of `snapshot.py`."""
    origin, arguments = get_origin(wanted), get_args(wanted)
    if origin is Ledger:
        return _ledgers()
    if isinstance(wanted, type) and issubclass(wanted, Struct):
        return st.builds(cast("Any", wanted), **{each.name: anything(each.type) for each in structs.fields(wanted)})
    if origin is tuple and arguments[-1] is ...:
        return st.lists(anything(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(anything, arguments))
    if origin is Mapping:
        return st.dictionaries(st.text(max_size=5), st.integers(), max_size=3)
    if arguments:
        return st.one_of(*map(anything, arguments))
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        return st.sampled_from(wanted)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(min_value=0, max_value=2**63 - 1),
        float: st.floats(min_value=0, max_value=4e9),
        bool: st.booleans(),
        str: st.text(max_size=8),
        NoneType: st.none(),
        Unknown: st.builds(Unknown, st.text(max_size=8)),
    }
    return simple[wanted]


def _ledgers() -> st.SearchStrategy[Ledger[GpuProcess]]:
    sizes = st.lists(st.integers(min_value=0, max_value=2**40), min_size=3, max_size=3)
    owners = anything(GpuProcess)
    return st.builds(_ledger, sizes, owners, st.text(max_size=8), st.booleans())


def _ledger(sizes: list[int], owner: GpuProcess, note: str, folded: bool) -> Ledger[GpuProcess]:
    reserve, held, free = sizes
    rows: tuple[LedgerRow[GpuProcess], ...] = (
        LedgerRow(Bucket.DRIVER_RESERVED, Unknown(note) if folded else reserve),
        LedgerRow(Bucket.PROCESS, held, owner, note),
        LedgerRow(Bucket.FREE, free),
    )
    return Ledger(sum(sizes), rows)
