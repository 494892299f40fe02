"""The cost that eight watched processes add to the Monitor: 8 GPUs, 24 processes, 120×40, 1 s.

`pytest -m bench -s -n 0 tests/bench/test_watch_cost.py`
"""

from __future__ import annotations

import statistics
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from gpumem_tui.memory import GIB, MIB
from gpumem_tui.probe.files import start_ticks
from tests.bench.test_monitor_cost import Watched, busy_machine
from tests.nvml_stub.machine import FakeMachine
from tests.watch.rings import RECORD, RingFile, this_process
from tests.watch.test_postmortem import model_document

pytestmark = pytest.mark.bench

_RANKS = 8
_WARM_UP_S, _MEASURED_S = 6.0, 20.0
_BLOCKS = 3
_TRAINING = replace(
    RECORD,
    device_uuid="",
    parameters_bytes=GIB // 2,
    gradients_bytes=GIB // 2,
    optimizer_bytes=GIB,
    reserved_bytes=3 * GIB,
    peak_allocated_bytes=5 * GIB // 2,
)


@dataclass(frozen=True)
class Cost:
    """The time of one block."""

    cpu_s_per_minute: float
    written_kb_per_s: float
    resident_mib: float


@contextmanager
def publishing(folder: Path, pids: list[int]) -> Iterator[None]:
    """One rank a GPU, at the pace of a probe: a sample every half second."""
    rings = []
    for rank, pid in enumerate(pids[:_RANKS]):
        who = this_process(
            pid=pid, start_ticks=start_ticks(pid), rank=rank, world_size=_RANKS, visible_devices=str(rank)
        )
        rings.append(RingFile(folder, who))
        rings[-1].document(rings[-1].files.model, model_document())
    over = threading.Event()

    def publish() -> None:
        step = 0
        while not over.wait(0.5):
            step += 2
            for ring in rings:
                ring.sample(replace(_TRAINING, step=step, allocated_bytes=2 * GIB + step % 7 * 32 * MIB))

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _measure(machine: FakeMachine, folder: Path) -> Cost:
    environment = {**machine.environment, "GPUMEM_TUI_DIR": str(folder)}
    program = Watched([sys.executable, "-m", "gpumem_tui", "monitor"], environment)
    try:
        program.drain(_WARM_UP_S, parse=False)
        written, cpu_s = program.written, _cpu_s(program.process)
        program.drain(_MEASURED_S, parse=False)
        return Cost(
            (_cpu_s(program.process) - cpu_s) / _MEASURED_S * 60,
            (program.written - written) / _MEASURED_S / 1000,
            program.process.memory_info().rss / MIB,
        )
    finally:
        program.close()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def test_eight_watched_ranks_beside_none(fake_machine: FakeMachine, tmp_path: Path) -> None:
    costs: dict[str, list[Cost]] = {"none": [], "eight": []}
    with busy_machine(fake_machine) as pids, publishing(tmp_path / "eight", pids):
        for _ in range(_BLOCKS):
            for name, blocks in costs.items():
                blocks.append(_measure(fake_machine, tmp_path / name))
    print(f"\n{'watched':<9}{'CPU s/min':>11}{'KB/s':>8}{'MiB':>8}")
    for name, blocks in costs.items():
        print(
            f"{name:<9}{statistics.median(block.cpu_s_per_minute for block in blocks):>11.2f}"
            f"{statistics.median(block.written_kb_per_s for block in blocks):>8.2f}"
            f"{statistics.median(block.resident_mib for block in blocks):>8.1f}"
        )
    assert statistics.median(block.written_kb_per_s for block in costs["eight"]) < 10
