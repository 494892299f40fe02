"""A night's recording: twelve hours of 8 GPUs and 24 processes at one reading a second, opened, sought and searched.

`pytest -m bench -s -n 0 tests/bench/test_night_recording.py`
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpumem_tui.memory import GIB, MIB
from gpumem_tui.monitor.alerts import Alerts
from gpumem_tui.monitor.snapshot import Snapshot
from gpumem_tui.recording.player import Player
from gpumem_tui.recording.recording import GpuRecorder, GpuRecording
from tests.monitor.snapshots import START_S, changed, gpu, machine, process
from tests.waiting import wait_until

pytestmark = pytest.mark.bench

_HOURS = 12
_RECORDED_S = 1200
"""So much is recorded; the night is that over and over, each with its own times, as to record it all takes minutes."""
_GPUS, _PROCESSES = 8, 3
_FULL_FROM = 600
_OPENS_S, _SEEKS_S = 1.0, 1.0
_GROWS_MIB = 64


def _readings() -> Iterator[Snapshot]:
    """Loads move all the time, memory now and then; one GPU fills up in the middle."""
    numbers = random.Random(5)
    held = {(index, place): numbers.randrange(4, 20) * GIB for index in range(_GPUS) for place in range(_PROCESSES)}
    for second in range(_RECORDED_S):
        gpus = []
        for index in range(_GPUS):
            for place in range(_PROCESSES):
                if numbers.random() < 0.05:
                    held[index, place] += numbers.choice((-256, 256)) * MIB
            sizes = [held[index, place] for place in range(_PROCESSES)]
            if index == 3 and second >= _FULL_FROM:
                sizes[0] += 78 * GIB - sum(sizes)
            processes = tuple(
                replace(process(1000 * index + place, size), sm_percent=numbers.randrange(20, 60))
                for place, size in enumerate(sizes)
            )
            reading = gpu(index, used_bytes=sum(sizes) + 300 * MIB, processes=processes)
            gpus.append(
                changed(
                    reading,
                    utilization_percent=numbers.randrange(70, 100),
                    power_w=round(numbers.uniform(250, 390), 1),
                    temperature_c=numbers.randrange(50, 60),
                )
            )
        yield machine(gpus, after_s=second)


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("night")
    part, path = folder / "part", folder / "night"
    recorder, alerts = GpuRecorder(part), Alerts()
    for snapshot in _readings():
        recorder.add(snapshot, alerts.update(snapshot))
    recorder.close()
    began_s = time.perf_counter()
    members = [member.lines for member in GpuRecording(part).file.members(0)]
    with path.open("wb") as file:
        file.write(_member(line + b"\n" for line in members[0]))
        for again in range(_HOURS * 3600 // _RECORDED_S):
            for lines in members[1:]:
                file.write(_member(_later(line, again * _RECORDED_S) for line in lines))
    print(f"\nwritten in {time.perf_counter() - began_s:.0f} s")
    return path


def _member(lines: Iterable[bytes]) -> bytes:
    """As the recorder writes them: each line is flushed."""
    packer = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    return b"".join(packer.compress(line) + packer.flush(zlib.Z_SYNC_FLUSH) for line in lines) + packer.flush()


def _later(line: bytes, by_s: float) -> bytes:
    """The same reading at another time."""
    body = json.loads(line)
    if "full" in body:
        body["full"]["time_s"] += by_s
    else:
        body["patch"]["time_s"] = [body["patch"]["time_s"][0] + by_s]
    for mark in body.get("began", ()):
        mark["time_s"] += by_s
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


def test_a_night_opens_and_is_sought_within_a_second(night: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import play; play({str(night)!r})"],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    taken = json.loads(done.stdout)
    size = f"{night.stat().st_size / 1e6:.1f} MB, {_HOURS * 3600:,} readings"
    print(f"\n{size} of {_GPUS} GPUs, {_GPUS * _PROCESSES} processes")
    for name, value in taken.items():
        print(f"{name:<28}{value:>8.2f}")
    assert taken["first picture, s"] <= _OPENS_S
    assert max(value for name, value in taken.items() if name.startswith("seek")) <= _SEEKS_S
    assert taken["grows, MiB"] <= _GROWS_MIB


def play(path: str) -> None:
    """Print how long each thing takes, seconds of this process's CPU time, and what memory it needs."""

    def most_mib() -> float:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    before_mib, taken = most_mib(), {}
    began_s = time.process_time()
    replay = Player(GpuRecording(Path(path)))
    replay.hold(True)
    replay.start()
    wait_until(lambda: replay.picture is not None, "the first picture")
    taken["first picture, s"] = time.process_time() - began_s
    for name, hours in (("seek to its end at once, s", 11.9), ("seek to 0.2 h, s", 0.2), ("seek to 6 h, s", 6.0)):
        wanted_s = START_S + hours * 3600
        began_s = time.process_time()
        replay.seek(wanted_s)
        wait_until(lambda wanted_s=wanted_s: abs(replay.now_s - wanted_s) < 1.5, name)  # type: ignore[misc]
        taken[name] = time.process_time() - began_s
    replay.index.wait()
    taken["alerts that began"] = len(replay.marks)
    replay.stop()
    taken["grows, MiB"] = most_mib() - before_mib
    print(json.dumps(taken))
