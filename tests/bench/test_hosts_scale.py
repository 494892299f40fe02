"""The cost of many hosts for the one viewer that shows them: 64, 256, 1,000 hosts of 8 GPUs, 24 processes, 120×40, 1 s.

`pytest -m bench -s -n 0 tests/bench/test_hosts_scale.py` (`-k 256` for one of them)

Each host is a `cat` in ssh's place, fed by one process that replays what `monitor --wire` prints: all answer
at once, then each at its own time of the second, as real hosts do. Only the viewer is measured, neither they nor that
process.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from gpumem_tui.memory import MIB
from gpumem_tui.monitor.ledger import device_ledger
from gpumem_tui.monitor.snapshot import GpuProcess, GpuReading, HostProcess, Snapshot
from gpumem_tui.monitor.wire import HostReport, ReportWriter
from tests.bench.test_monitor_cost import Watched
from tests.monitor.snapshots import changed
from tests.scenes import monitor as scene
from tests.waiting import wait_until

pytestmark = pytest.mark.bench

_GPUS, _READINGS = 8, 5
_WARM_UP_S, _MEASURED_S = 4.0, 20.0
_KEYS = 21
_CONNECTING_S = 1.5
"""Until the first answer: for ssh to connect and the program there to start."""
_HEARD_S = 0.4
"""For how long what is written after a key is looked through."""

_SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
exec cat "{folder}/$2.fifo"
"""
_FEEDER = """
import os, sys, time
folder, hosts = sys.argv[1], int(sys.argv[2])
names = [f"{number:0{len(str(hosts))}}" for number in range(1, hosts + 1)]
lines = {name: open(f"{folder}/{name}.lines", "rb").read().splitlines(keepends=True) for name in names}
pipes = {name: os.open(f"{folder}/node{name}.fifo", os.O_WRONLY) for name in names}  # waits for who reads it
time.sleep(float(sys.argv[3]))
for name in names:
    written = memoryview(lines[name][0])
    while written:
        written = written[os.write(pipes[name], written) :]
began_s = time.perf_counter()
with open(f"{folder}/answered.new", "w") as file:
    file.write(repr(began_s))
os.rename(f"{folder}/answered.new", f"{folder}/answered")
second = 0
while True:
    second += 1
    for number, name in enumerate(names):
        time.sleep(max(0.0, began_s + second + number / hosts - time.perf_counter()))
        os.write(pipes[name], lines[name][1 + second % (len(lines[name]) - 1)])
"""


@dataclass(frozen=True)
class Scale:
    """The cost of watching so many hosts."""

    hosts: int
    cpu_percent: float
    resident_mib: float
    key_s: float | None
    complete_s: float | None


def _reading(host: int, second: int) -> Snapshot:
    """As training does it: each second the loads have moved, and the memory of a process here and there."""
    snapshot = scene.machine(_GPUS, time_s=scene.NOON_S + second)

    def moved(process: GpuProcess) -> GpuProcess:
        assert isinstance(process.host, HostProcess)
        assert isinstance(process.used_bytes, int)
        grown = process.used_bytes + (host * 7 + second * (process.pid % 3 == 0)) % 11 * MIB
        busy = replace(process.host, cpu_percent=90.0 + (host + second + process.pid) % 17)
        return replace(process, used_bytes=grown, sm_percent=(process.pid + second * 7) % 100, host=busy)

    def read(gpu: GpuReading) -> GpuReading:
        assert isinstance(gpu.processes, tuple)
        busy_percent = (host + gpu.index * 7 + second * 3) % 101
        processes = tuple(map(moved, gpu.processes))
        return changed(
            gpu,
            processes=processes,
            ledger=device_ledger(gpu.memory, processes),
            utilization_percent=busy_percent,
            power_w=300.0 + second,
        )

    return replace(snapshot, gpus=tuple(map(read, snapshot.gpus)))


@cache
def _lines(host: int) -> list[str]:
    """A whole reading, then what changes from each to the next, round and round; there the feeder begins again."""
    read, writer = [HostReport.of(_reading(host, second)) for second in range(_READINGS)], ReportWriter()
    whole, *changes, last = [writer.line(each) for each in (*read[1:], *read[:2])]
    return [whole, last, *changes]


@contextmanager
def _hosts(folder: Path, hosts: int) -> Iterator[Callable[[], float]]:
    """So many hosts; yields what shows when the last one answered."""
    (folder / "ssh").write_text(_SSH.format(folder=folder))
    (folder / "ssh").chmod(0o755)
    for host in range(1, hosts + 1):
        name = f"{host:0{len(str(hosts))}}"
        (folder / f"{name}.lines").write_text("".join(f"{line}\n" for line in _lines(host % 17)))
        os.mkfifo(folder / f"node{name}.fifo")
    feeder = subprocess.Popen([sys.executable, "-c", _FEEDER, str(folder), str(hosts), str(_CONNECTING_S)])
    answered = folder / "answered"
    try:
        yield lambda: float(answered.read_text()) if answered.exists() else 0.0
    finally:
        feeder.kill()
        feeder.wait()


def _complete(hosts: int, text: str) -> bool:
    return f"{hosts} live" in text and f"{hosts * _GPUS} GPUs" in text and f"{hosts * 24} processes" in text


@pytest.mark.parametrize("hosts", [64, 256, 1000])
def test_many_hosts_in_one_viewer(tmp_path: Path, hosts: int) -> None:
    command = [sys.executable, "-m", "gpumem_tui", "--host"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPYCACHEPREFIX": str(tmp_path / "compiled")}
    with _hosts(tmp_path, hosts) as answered:
        compiled = Watched([*command, "nobody"], environment)
        compiled.until(lambda text: "1 away" in text)
        compiled.close()
        watched = Watched([*command, f"node[{1:0{len(str(hosts))}}-{hosts}]"], environment)
        try:
            scale = _measure(watched, hosts, answered)
        finally:
            watched.close()
    _print(scale)
    assert scale.complete_s is not None, "no complete first frame"
    assert scale.resident_mib < 250


def _measure(watched: Watched, hosts: int, answered: Callable[[], float]) -> Scale:
    complete_s = _arrival_s(watched, partial(_complete, hosts), 90.0)
    wait_until(answered, "an answer of every host")
    after_s = None if complete_s is None else complete_s - answered()
    watched.drain(_WARM_UP_S, parse=True)
    cpu_s, began_s = _cpu_s(watched.process), time.perf_counter()
    watched.drain(_MEASURED_S, parse=False)
    share = (_cpu_s(watched.process) - cpu_s) / (time.perf_counter() - began_s)
    resident_mib = watched.process.memory_info().rss / MIB
    return Scale(hosts, share * 100, resident_mib, _key_s(watched), after_s)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _arrival_s(watched: Watched, there: Callable[[str], bool], limit_s: float) -> float | None:
    """When what made the screen so arrived; parsed afterwards, as parsing takes longer than drawing."""
    end_s = time.perf_counter() + limit_s
    while time.perf_counter() < end_s:
        for when_s, written in watched.heard(_HEARD_S):
            watched.parse(written)
            if there(watched.text):
                return when_s
    return None


def _key_s(watched: Watched) -> float | None:
    """Median seconds from a key that reverses the order of processes to the first picture with its mark turned."""
    taken = []
    watched.press("\t")
    for number in range(_KEYS):
        wanted = "▴GPU MEM" if number % 2 == 0 else "▾GPU MEM"
        time.sleep(number * 0.037 % 0.25)  # at any time between two pictures
        watched.drain(0.05, parse=True)
        pressed_s = time.perf_counter()
        watched.press("r")
        arrived_s = _arrival_s(watched, lambda text, wanted=wanted: wanted in text, 5.0)  # type: ignore[misc]
        taken += [arrived_s - pressed_s] if arrived_s is not None else []
    return statistics.median(taken) if taken else None


def _print(scale: Scale) -> None:
    key = "–" if scale.key_s is None else f"{scale.key_s * 1000:.0f} ms"
    complete = "–" if scale.complete_s is None else f"{scale.complete_s:.2f} s"
    print(
        f"\n{scale.hosts} hosts × {_GPUS} GPUs × 3 processes: {scale.cpu_percent:.1f} % of a core, "
        f"{scale.resident_mib:.0f} MiB, key to repaint {key}, complete {complete} after the last host answered"
    )
