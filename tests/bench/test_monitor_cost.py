"""The cost of watching, next to nvitop and gpustat: one run on the fake NVML, 8 GPUs, 24 processes, 120×40, 1 s.

`pytest -m bench -s -n 0 tests/bench/test_monitor_cost.py`

The peers are installed from the package index into an environment of their own; without an index only this program
is measured. All run one after the other, so that they do not compete; figures of one run compare, those of two do not.
"""

from __future__ import annotations

import fcntl
import os
import pty
import random
import re
import select
import signal
import statistics
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pyte
import pytest

from gpumem_tui.memory import GIB, MIB
from tests.nvml_stub.machine import FakeMachine
from tests.nvml_stub.scenario import Calls, FakeGpu, FakeProcess, Scenario

pytestmark = pytest.mark.bench

_PEERS = ("nvitop==1.7.*", "gpustat")
_COLUMNS, _LINES = 120, 40
_GPUS, _PROCESSES, _MANY = 8, 24, 512
_WARM_UP_S, _MEASURED_S = 6.0, 30.0
_STARTS = 9
_SETTLED_S = 0.4
"""A program that has not written anything for so long has drawn what it knows until its next reading."""

_KEYS = 15
_CALLS_PER_S = 49
"""Half of what nvitop 1.7 makes once it shows all GPUs and processes."""
_OURS = "gpumem-tui"
_SCHEDULED = 2
"""Which clock of another process: what it was scheduled for (Linux' posix-timers.h, CPUCLOCK_SCHED)."""


class _AnsweringScreen(pyte.Screen):
    """Some programs ask the terminal where its cursor is, and wait for the answer."""

    answer: Callable[[str], None]

    def write_process_input(self, data: str) -> None:
        self.answer(data)


class Watched:
    """A program in a terminal of 120×40, and what it writes."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._screen = _AnsweringScreen(_COLUMNS, _LINES)
        self._stream = pyte.ByteStream(self._screen)
        self.written = 0
        self.began_s = time.perf_counter()
        pid, self._fd = pty.fork()
        if pid == 0:
            os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed program is compiled
            os.environ.update({**environment, "TERM": "tmux-256color", "COLORTERM": "truecolor"})
            os.environ.update({"COLUMNS": str(_COLUMNS), "LINES": str(_LINES)})
            os.execv(command[0], command)
        self._screen.answer = self.press
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", _LINES, _COLUMNS, 0, 0))
        self.process = psutil.Process(pid)

    @property
    def text(self) -> str:
        return "\n".join(self._screen.display)

    def read(self, timeout_s: float, *, parse: bool = True) -> None:
        if select.select([self._fd], [], [], timeout_s)[0]:
            written = os.read(self._fd, 1 << 16)
            self.written += len(written)
            if parse:
                self._stream.feed(written)

    def next(self, limit_s: float) -> bytes:
        """Return what is written next, not parsed; empty if nothing is for so long, or the program has ended."""
        if not select.select([self._fd], [], [], limit_s)[0]:
            return b""
        with suppress(OSError):
            return os.read(self._fd, 1 << 16)
        return b""

    def until(self, there: Callable[[str], bool], limit_s: float = 30.0) -> float | None:
        """Seconds from now until the screen is so; None if it does not come to that."""
        began_s = time.perf_counter()
        while not there(self.text):
            if time.perf_counter() - began_s > limit_s:
                return None
            self.read(0.5)
        return time.perf_counter() - began_s

    def first_s(self, there: Callable[[str], bool], limit_s: float) -> float | None:
        """Seconds from the start until the screen is so; None if it does not come to that.

        The output is parsed afterwards: parsing takes longer than some programs take to start.
        """
        arrived: list[tuple[float, bytes]] = []
        while time.perf_counter() - self.began_s < limit_s:
            if select.select([self._fd], [], [], _SETTLED_S if arrived else limit_s)[0]:
                arrived.append((time.perf_counter(), os.read(self._fd, 1 << 16)))
                continue
            for when_s, written in arrived:
                self._stream.feed(written)
                if there(self.text):
                    return when_s - self.began_s
            arrived.clear()
        return None

    def heard(self, seconds: float) -> list[tuple[float, bytes]]:
        """The output within so many seconds, and its times (`time.perf_counter`); not parsed."""
        arrived = []
        end_s = time.perf_counter() + seconds
        while (left_s := end_s - time.perf_counter()) > 0:
            if select.select([self._fd], [], [], left_s)[0]:
                arrived.append((time.perf_counter(), os.read(self._fd, 1 << 16)))
        return arrived

    def parse(self, written: bytes) -> None:
        """Put on the screen what was heard."""
        self._stream.feed(written)

    def press(self, key: str) -> None:
        os.write(self._fd, key.encode())

    def drain(self, seconds: float, *, parse: bool) -> None:
        """Read for a while; without parsing, so that the measured program does not wait for this one."""
        end_s = time.perf_counter() + seconds
        while (left_s := end_s - time.perf_counter()) > 0:
            self.read(left_s, parse=parse)

    def quit(self, key: str) -> tuple[float, float]:
        """Press a key that ends the program; returns the seconds until then, and of processor in all."""
        began_s = time.perf_counter()
        self.press(key)
        while self.next(10.0):
            pass
        _, _, usage = os.wait4(self.process.pid, 0)
        os.close(self._fd)
        return time.perf_counter() - began_s, usage.ru_utime + usage.ru_stime

    def close(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        os.waitpid(self.process.pid, 0)
        os.close(self._fd)


@dataclass(frozen=True)
class Cost:
    """The cost of one program.

    Attributes:
        first_frame_s: median until all GPUs and the first processes are shown.
        key_s: median from a key to the first cell that changes; None where it was not tried.
    """

    first_frame_s: float | None
    cpu_s_per_minute: float
    calls_per_s: float
    written_kb_per_s: float
    resident_mib: float
    key_s: float | None = None


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """A bin folder with nvitop and gpustat, or None where they cannot be had."""
    if "GPUMEM_TUI_PEERS" in os.environ:
        return Path(os.environ["GPUMEM_TUI_PEERS"])
    folder = tmp_path_factory.mktemp("peers")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    done = subprocess.run([folder / "bin/pip", "install", "-q", *_PEERS], capture_output=True, text=True, timeout=300)
    if done.returncode:
        print(f"\nthe peers cannot be installed: {done.stderr.strip().splitlines()[-1]}")
        return None
    return folder / "bin"


@contextmanager
def busy_machine(
    machine: FakeMachine,
    calls: Calls = Calls(),  # noqa: B008  immutable
    processes: int = _PROCESSES,
) -> Iterator[list[int]]:
    """8 GPUs whose readings change all the time, and real processes on them; yields their pids."""
    sleepers = [subprocess.Popen(["sleep", "3600"]) for _ in range(processes)]
    pids = [sleeper.pid for sleeper in sleepers]
    over = threading.Event()

    def change() -> None:
        numbers = random.Random(7)
        held = [numbers.randrange(2, 20) * GIB for _ in pids]
        while not over.wait(0.5):
            machine.show(replace(_scenario(numbers, pids, held), calls=calls))

    machine.show(replace(_scenario(random.Random(7), pids, [8 * GIB] * processes), calls=calls))
    changing = threading.Thread(target=change)
    changing.start()
    try:
        yield pids
    finally:
        over.set()
        changing.join()
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


def _scenario(numbers: random.Random, pids: list[int], held: list[int]) -> Scenario:
    """As training does it: loads move all the time, the memory of a process now and then."""
    gpus = []
    for index in range(_GPUS):
        processes = []
        for place in range(index, len(pids), _GPUS):
            if numbers.random() < 0.05:
                held[place] = max(GIB, min(24 * GIB, held[place] + numbers.choice((-256, 256)) * MIB))
            processes.append(FakeProcess(pids[place], held[place], sm_percent=numbers.randrange(20, 60)))
        gpus.append(
            FakeGpu(
                used_bytes=sum(process.used_bytes or 0 for process in processes) + 300 * MIB,
                processes=processes,
                utilization_percent=numbers.randrange(70, 100),
                power_w=numbers.uniform(250, 390),
                temperature_c=numbers.randrange(50, 60),
            )
        )
    return Scenario(gpus=gpus)


def environment_of(machine: FakeMachine) -> dict[str, str]:
    """The environment of the programs: compiled code is kept next to the scenario, not in this tree."""
    return {**machine.environment, "PYTHONPYCACHEPREFIX": str(machine.folder / "compiled")}


def complete(pids: list[int]) -> Callable[[str], bool]:
    """All GPUs and some of the processes are on the screen."""
    names = [str(pid) for pid in pids]
    totals = re.compile(r"/ ?80\.00|/ 81920")

    def there(text: str) -> bool:
        return len(totals.findall(text)) >= _GPUS and sum(name in text for name in names) >= 5

    return there


def _first_frames(commands: dict[str, list[str]], machine: FakeMachine, pids: list[int]) -> dict[str, float | None]:
    """Medians, the programs in turn, so that the machine's drift meets all of them; the first round warms up."""
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(_STARTS + 1):
        for name, command in commands.items():
            watched = Watched(command, environment_of(machine))
            seconds_s = watched.first_s(complete(pids), 5.0)
            taken[name] += [] if seconds_s is None else [seconds_s]
            watched.close()
    return {name: statistics.median(seconds[1:]) if len(seconds) > 1 else None for name, seconds in taken.items()}


def _measure(command: list[str], machine: FakeMachine, first_frame_s: float | None, key: str | None) -> Cost:
    machine.calls_path.unlink(missing_ok=True)
    watched = Watched(command, environment_of(machine))
    try:
        watched.drain(_WARM_UP_S, parse=True)
        calls, written, cpu_s = sum(machine.calls().values()), watched.written, processor_s(watched.process.pid)
        watched.drain(_MEASURED_S, parse=False)
        cost = Cost(
            first_frame_s,
            (processor_s(watched.process.pid) - cpu_s) / _MEASURED_S * 60,
            (sum(machine.calls().values()) - calls) / _MEASURED_S,
            (watched.written - written) / _MEASURED_S / 1000,
            watched.process.memory_info().rss / MIB,
        )
        return cost if key is None else Cost(**{**vars(cost), "key_s": _key_s(watched, key)})
    finally:
        watched.close()


def processor_s(pid: int) -> float:
    """Seconds of processor of a process so far, to the microsecond: of /proc they are to the hundredth."""
    return time.clock_gettime(~pid << 3 | _SCHEDULED)


def _key_s(watched: Watched, key: str) -> float | None:
    """Median seconds from a key that reverses the order to the first picture with the mark turned round."""
    taken = []
    for number in range(_KEYS):
        wanted = "▴" if number % 2 == 0 else "▾"
        watched.press(key)
        seconds = watched.until(lambda text, wanted=wanted: f"{wanted}GPU MEM" in text, 5.0)  # type: ignore[misc]
        taken += [seconds] if seconds is not None else []
    return statistics.median(taken) if taken else None


def test_first_frame_with_slow_calls(fake_machine: FakeMachine) -> None:
    """Each function of the driver takes 1 to 20 ms, as on a busy machine; compared with calls that take none."""
    command = [sys.executable, "-m", "gpumem_tui"]
    with busy_machine(fake_machine) as pids:
        fast_s = _first_frames({_OURS: command}, fake_machine, pids)[_OURS]
        functions = sorted(fake_machine.calls())
    numbers = random.Random(3)
    slow = Calls(latency_ms={function: numbers.uniform(1, 20) for function in functions})
    with busy_machine(fake_machine, slow) as pids:
        slow_s = _first_frames({_OURS: command}, fake_machine, pids)[_OURS]
    assert fast_s is not None, "no complete first frame"
    assert slow_s is not None, "no complete first frame"
    print(f"\ncomplete first frame: {fast_s:.3f} s with fast calls, {slow_s:.3f} s with slow ones")


def test_cost_beside_its_peers(fake_machine: FakeMachine, peers: Path | None) -> None:
    commands = {_OURS: [sys.executable, "-m", "gpumem_tui"]}
    if peers is not None:
        commands |= {
            "nvitop": [str(peers / "python"), "-m", "nvitop"],
            "gpustat": [str(peers / "gpustat"), "-i", "1", "-cup"],
        }
    with busy_machine(fake_machine) as pids:
        frames = _first_frames(commands, fake_machine, pids)
        costs = {
            name: _measure(command, fake_machine, frames[name], "r" if name == _OURS else None)
            for name, command in commands.items()
        }
    _print(costs)
    ours = costs[_OURS]
    assert ours.first_frame_s is not None, "no complete first frame"
    assert ours.written_kb_per_s < 10
    assert ours.resident_mib < 60
    assert ours.calls_per_s < _CALLS_PER_S


def test_many_processes_beside_nvitop(fake_machine: FakeMachine, peers: Path | None) -> None:
    """8 GPUs with 64 processes each."""
    commands = {_OURS: [sys.executable, "-m", "gpumem_tui"]}
    if peers is not None:
        commands["nvitop"] = [str(peers / "python"), "-m", "nvitop"]
    with busy_machine(fake_machine, processes=_MANY):
        costs = {name: _measure(command, fake_machine, None, None) for name, command in commands.items()}
    _print(costs)


def _print(costs: dict[str, Cost]) -> None:
    print(f"\n{'':<12}{'first frame':>13}{'CPU s/min':>11}{'NVML/s':>8}{'KB/s':>7}{'MiB':>7}{'key':>9}")
    for name, cost in costs.items():
        frame = "–" if cost.first_frame_s is None else f"{cost.first_frame_s:.3f} s"
        key = "" if cost.key_s is None else f"{cost.key_s * 1000:.0f} ms"
        print(
            f"{name:<12}{frame:>13}{cost.cpu_s_per_minute:>11.2f}{cost.calls_per_s:>8.1f}"
            f"{cost.written_kb_per_s:>7.2f}{cost.resident_mib:>7.1f}{key:>9}"
        )
    ours, nvitop = costs[_OURS], costs.get("nvitop")
    if nvitop is not None:
        cpu, calls = ours.cpu_s_per_minute / nvitop.cpu_s_per_minute, ours.calls_per_s / nvitop.calls_per_s
        print(f"{_OURS} / nvitop: CPU {cpu:.2f}, NVML calls {calls:.2f}", end="")
        if ours.first_frame_s is not None and nvitop.first_frame_s is not None:
            print(f", first frame {ours.first_frame_s / nvitop.first_frame_s:.2f}", end="")
        print()


_HALF_AN_HOUR = """
import asyncio, resource
import psutil
from tests.scenes import monitor as scene

async def main():
    app = scene.app(scene.at(0, 8))
    async with app.run_test(size=(120, 40)) as pilot:
        source = scene.screen_of(app).feed.source
        for second in range(1, 1801):
            source.show(scene.at(second, 8))
            scene.screen_of(app).look()
            if second % 10 == 0:
                await pilot.pause()
            if second in (300, 1800):
                print(psutil.Process().memory_info().rss)

asyncio.run(main())
"""


def test_memory_stays_flat_for_half_an_hour() -> None:
    done = subprocess.run([sys.executable, "-c", _HALF_AN_HOUR], capture_output=True, text=True, check=True)
    early, late = (int(line) / MIB for line in done.stdout.split())
    print(f"\nresident after 5 simulated minutes {early:.1f} MiB, after 30 {late:.1f} MiB")
    assert late - early < 2
