"""Machines for the screens: many processes of several users, on GPUs whose figures differ, and their history."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace
from textual.app import App
from textual.pilot import Pilot

from gpumem_tui.memory import GIB, MIB, Breakdown, Bucket, Unknown
from gpumem_tui.monitor.history import History
from gpumem_tui.monitor.probes import ProbeFigures
from gpumem_tui.monitor.snapshot import (
    DeviceState,
    GpuProcess,
    GpuReading,
    HostProcess,
    HostReading,
    ProcessKind,
    Snapshot,
)
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.kit.lines import Lines
from gpumem_tui.tui.monitor.screen import MonitorScreen
from gpumem_tui.tui.monitor.state import ProcessParts
from tests.monitor import snapshots
from tests.monitor.scripted import Scripted
from tests.scenes.reading import text_of

NOON_S = 1_772_452_800.0
TOTAL_BYTES = 80 * GIB
COMMANDS = (
    "python train.py --model llama-3-8b --batch-size 16 --precision amp-bf16",
    "/opt/conda/bin/python -m torch.distributed.run --nproc-per-node 8 finetune.py",
    "python serve.py --port 8000",
    "jupyter-lab --no-browser",
)
USERS = ("ada", "grace", "katherine", "linus")


def clock(time_s: float) -> str:
    """A time of day that is the same everywhere."""
    return time.strftime("%H:%M:%S", time.gmtime(time_s))


def host_process(pid: int, *, parent_pid: int = 4000, started_s: float = NOON_S - 8000) -> HostProcess:
    """An ordinary process."""
    command = COMMANDS[pid % len(COMMANDS)]
    return HostProcess(
        pid=pid,
        parent_pid=parent_pid,
        user=USERS[pid % len(USERS)],
        name=command.split()[0].rsplit("/", 1)[-1],
        command=command,
        start_time_s=started_s - pid % 50 * 977,
        cpu_percent=float(pid % 130),
        resident_bytes=(pid % 23 + 1) * 700 * MIB,
        container="docker 3f2a91" if pid % 4 == 2 else "",
    )


def process(pid: int, used_bytes: int) -> GpuProcess:
    """A process that computes."""
    return GpuProcess(pid, ProcessKind.COMPUTE, used_bytes, pid * 7 % 100, host_process(pid))


def gpu(index: int, processes: Sequence[GpuProcess], *, unaccounted_bytes: int = 310 * MIB) -> GpuReading:
    """A GPU that these processes use."""
    sizes = [each.used_bytes for each in processes]
    used_bytes = sum(size for size in sizes if isinstance(size, int)) + unaccounted_bytes
    held = snapshots.memory(used_bytes, TOTAL_BYTES)
    ledger = snapshots.ledger(
        held, processes, unaccounted_bytes, "kernel or display use, or processes of other namespaces"
    )
    return snapshots.gpu(
        index,
        uuid=f"GPU-{index:08d}-1111-2222-3333-444444444444",
        memory=held,
        ledger=ledger,
        processes=tuple(processes),
        utilization_percent=(index * 37 + 51) % 101,
        memory_utilization_percent=(index * 17 + 30) % 101,
        power_w=120.0 + index * 31,
        temperature_c=48 + index * 4,
        pcie_rx_bytes_per_s=420 * MIB,
        pcie_tx_bytes_per_s=130 * MIB,
    )


def machine(gpus: int, processes: int = 3, *, time_s: float = NOON_S) -> Snapshot:
    """A machine of GPUs with so many processes each."""
    made = []
    for index in range(gpus):
        held = [(8 + (index * 5) % 16) * GIB // (number + 1) ** 2 * 2 for number in range(processes)]
        made.append(gpu(index, [process(4100 + index * 16 + n, size) for n, size in enumerate(held)]))
    return of(made, time_s=time_s)


def of(gpus: Sequence[GpuReading], *, time_s: float = NOON_S, problem: str = "") -> Snapshot:
    """A machine of these GPUs; with a `problem`, one whose driver does not run."""
    changes: dict[str, Any] = {"time_s": time_s, "problem": problem}
    if problem:
        changes |= {"driver_version": Unknown(problem), "cuda_version": Unknown(problem)}
    host = HostReading("gpubox", 34.0, 210 * GIB, 512 * GIB)
    return snapshots.machine(gpus, host=host, **changes)


def stale(reading: GpuReading, age_s: float = 4.0) -> GpuReading:
    """A call about it has not returned."""
    reason = f"nvmlDeviceGetPowerUsage has not returned for {age_s:.0f} s"
    return replace(reading, state=DeviceState.STALE, state_reason=reason, age_s=age_s)


def lost(reading: GpuReading) -> GpuReading:
    """It fell off the bus."""
    gone = Unknown("the GPU is lost")
    return snapshots.changed(
        reading,
        state=DeviceState.LOST,
        state_reason="it does not answer any more (GPU is lost); a reboot may bring it back",
        memory=gone, ledger=gone, processes=gone, utilization_percent=gone, power_w=gone, temperature_c=gone,
        sm_clock_mhz=gone, memory_clock_mhz=gone, pcie_rx_bytes_per_s=gone, pcie_tx_bytes_per_s=gone,
    )  # fmt: skip


def parts() -> ProcessParts:
    """A probe's report of a process of 16 GiB."""
    buckets = {
        Bucket.PARAMETERS: 2 * GIB,
        Bucket.GRADIENTS: 2 * GIB,
        Bucket.OPTIMIZER: 4 * GIB,
        Bucket.ACTIVATIONS: 5 * GIB,
        Bucket.TEMPORARY: GIB // 2,
    }
    return ProcessParts(Breakdown(buckets), GIB)


def at(second: int, gpus: int) -> Snapshot:
    """The machine so many seconds after noon: what its first GPU holds rises, falls and rises again."""
    share = abs((second * 7) % 400 - 200) / 200
    whole = machine(gpus, time_s=NOON_S + second)
    first = gpu(0, [process(4100, int((10 + 50 * share) * GIB)), process(4101, 6 * GIB)])
    loaded = snapshots.changed(first, utilization_percent=int(20 + 75 * share))
    return replace(whole, gpus=(loaded, *whole.gpus[1:]))


def history(seconds: int, gpus: int, *, probed: bool = False) -> History:
    """The snapshots of the seconds before noon and at noon."""
    seen = History()
    for second in range(-seconds, 1):
        snapshot = at(second, gpus)
        probes = {}
        if probed:
            used_bytes = [each.used_bytes for each in _processes(snapshot.gpus[0])]
            reserved_bytes = sum(size for size in used_bytes if isinstance(size, int)) - GIB
            probes[(snapshot.gpus[0].uuid, 4100)] = ProbeFigures(reserved_bytes * 3 // 4, reserved_bytes, 0, 0)
        seen.add(snapshot, probes)
    return seen


def _processes(reading: GpuReading) -> Sequence[GpuProcess]:
    assert not isinstance(reading.processes, Unknown)
    return reading.processes


def app(snapshot: Snapshot | None, *, ascii_only: bool = False, theme: str = "", **options: object) -> GpuMemApp:
    """The program on its Monitor, with one snapshot that is stopped."""
    source = Scripted(snapshot)
    options.setdefault("past_s", 600.0)
    make = partial(MonitorScreen, source, clock=clock, **options)  # type: ignore[arg-type]
    return GpuMemApp({"monitor": make}, "monitor", ascii_only=ascii_only, theme=theme)


def screen_of(program: App[int]) -> MonitorScreen:
    """The program's Monitor."""
    assert isinstance(program, GpuMemApp)
    screen = program.main_screen("monitor")
    assert isinstance(screen, MonitorScreen)
    return screen


def shown(pilot: Pilot[int], kind: type[Lines]) -> str:
    """The text of the Monitor's only widget of a kind."""
    return text_of(screen_of(pilot.app).query_one(kind))
