"""A long watch of a machine on which everything comes and goes: no false alert, descriptors and memory flat.

`GPUMEM_TUI_SOAK_S=3600 pytest -m bench -s -n 0 tests/bench/test_soak.py` (two minutes without the variable)

The Monitor and the hosts screen in terminals whose keys are pressed, `monitor --json`, `--metrics`, recordings one
after the other and `serve` with visitors run on the fake NVML for as long. Meanwhile publishing folders of users are
made and removed (as root, those of other users too), training processes begin and end, a search ends, hosts freeze,
resume, die and come back. Every 30 s a line of each: descriptors, threads, MiB, seconds of processor.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from gpumem_tui.memory import GIB, MIB
from tests.bench.test_monitor_cost import Watched, environment_of, processor_s
from tests.nvml_stub.machine import FakeMachine
from tests.nvml_stub.scenario import FakeGpu, FakeProcess, Scenario
from tests.remote.standins import DENIED, STAYS, Ssh
from tests.serve.serving import Served, serving, visiting

pytestmark = pytest.mark.bench

_SOAK_S = float(os.environ.get("GPUMEM_TUI_SOAK_S", "120"))
_LOG_S = min(30.0, _SOAK_S / 12)
_GPUS = 4
_KEYS: tuple[tuple[str, ...], ...] = (
    ("?", "\x1b"),
    ("s",),
    ("\x1b[B", "\r", "\x1b"),
    ("k", "\x1b"),
    ("\x10", "\x1b"),
    ("\x0f", "\x1b"),
    ("o", "\x1b"),
    ("/", "x", "\x1b", "\x1b"),
    ("\x1b[B",),
    ("\x1b[A",),
    ("\t",),
    ("v",),
    ("2", "1"),
)
"""Help, order, a process, its end (refused), palette, jump, sort, filter, up, down, other list, history, Search."""
_CHURN = """
import os, stat, sys, time
uid, seconds = int(sys.argv[1]), float(sys.argv[2])
if uid != os.getuid():
    os.setgid(uid); os.setuid(uid)
os.nice(10)
folder, end, turn = f"/tmp/gpumem-tui-{uid}", time.time() + seconds, 0
others = [f"/tmp/gpumem-tui-{uid}{number}" for number in range(7)]
while time.time() < end:
    turn += 1
    for each in (folder, *others):
        try:
            os.mkdir(each, (0o700, 0o755, 0o000)[turn % 3])
        except OSError:
            pass
    if turn % 3 == 1:
        for number in range(300 if turn % 30 == 1 else 3):
            try:
                with open(f"{folder}/{1000 + number}-{turn}{number}.ring", "wb") as file:
                    file.write(os.urandom(1 << (number % 13)))
            except OSError:
                pass
        for make in (lambda path: os.mkfifo(path), lambda path: os.symlink("/etc/shadow", path), os.mkdir):
            try:
                make(f"{folder}/{4000 + turn}-{turn}.ring")
            except OSError:
                pass
    time.sleep(0.2)
    for each in (folder, *others):
        try:
            os.chmod(each, 0o700)
            for name in os.listdir(each):
                path = f"{each}/{name}"
                (os.rmdir if stat.S_ISDIR(os.lstat(path).st_mode) else os.remove)(path)
            os.rmdir(each)
        except OSError:
            pass
    time.sleep(0.05)
"""
_TRAIN = """
import sys, time, torch
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.AdamW(model.parameters())
end = time.time() + float(sys.argv[1])
while time.time() < end:
    model(torch.randn(8, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.2)
"""


@dataclass
class Figures:
    """One program at one moment."""

    after_s: float
    descriptors: int
    threads: int
    resident_mib: float
    cpu_s: float

    def line(self, name: str) -> str:
        """As it is printed."""
        return (
            f"{self.after_s:7.0f} s {name:<10} fds {self.descriptors:>4}  threads {self.threads:>3}  "
            f"MiB {self.resident_mib:6.1f}  cpu {self.cpu_s:7.2f} s"
        )


@dataclass
class Soak:
    """The programs that are watched, and how each did.

    Attributes:
        alerts: the text of each alert, and when it was first raised.
        deaths: programs that ended before their time, with the reason.
    """

    log: Path
    began_s: float = field(default_factory=time.monotonic)
    programs: dict[str, psutil.Process] = field(default_factory=dict)
    screens: dict[str, Watched] = field(default_factory=dict)
    figures: dict[str, list[Figures]] = field(default_factory=dict)
    alerts: dict[str, float] = field(default_factory=dict)
    readings: int = 0
    deaths: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def after_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began_s

    def note(self, line: str) -> None:
        """Print a line, and keep it."""
        print(line, flush=True)
        with self.log.open("a") as file:
            print(line, file=file)

    def look(self) -> None:
        """Take the figures of every program."""
        for name, process in list(self.programs.items()):
            try:
                if process.status() == psutil.STATUS_ZOMBIE:
                    raise psutil.NoSuchProcess(process.pid)
                with process.oneshot():
                    figures = Figures(
                        self.after_s,
                        process.num_fds(),
                        process.num_threads(),
                        process.memory_info().rss / MIB,
                        processor_s(process.pid),
                    )
            except (psutil.Error, OSError) as error:
                self.deaths.append(f"{name} after {self.after_s:.0f} s: {error}")
                last = self.screens[name].text if name in self.screens else ""
                self.note(f"died: {self.deaths[-1]}\n{last}")
                del self.programs[name]
                continue
            self.figures.setdefault(name, []).append(figures)
            self.note(figures.line(name))

    def growth(self, name: str) -> tuple[float, int]:
        """MiB and descriptors (medians) more in the last quarter than in the second; the first warms up."""
        figures = self.figures[name]
        quarter = len(figures) // 4
        early, late = figures[quarter : 2 * quarter], figures[-quarter:]

        def middle(values: list[float]) -> float:
            return sorted(values)[len(values) // 2]

        resident = middle([each.resident_mib for each in late]) - middle([each.resident_mib for each in early])
        descriptors = middle([each.descriptors for each in late]) - middle([each.descriptors for each in early])
        return resident, round(descriptors)  # of one that happened to read a file there may be more at a moment


def _scenario(pids: list[int], turn: int, numbers: random.Random) -> Scenario:
    """Return training as it goes: loads move, the caches of processes breathe; the last GPU is free."""
    gpus = []
    for index in range(_GPUS - 1):
        mine = [pid for place, pid in enumerate(pids) if place % (_GPUS - 1) == index]
        processes = [
            FakeProcess(pid, (12 + index) * GIB + (turn + pid) % 5 * 256 * MIB, sm_percent=numbers.randrange(20, 60))
            for pid in mine
        ]
        held_bytes = sum(process.used_bytes or 0 for process in processes)
        gpus.append(
            FakeGpu(
                used_bytes=held_bytes + 300 * MIB,
                processes=processes,
                utilization_percent=numbers.randrange(70, 100),
                power_w=numbers.uniform(250, 390),
                temperature_c=numbers.randrange(50, 60),
            )
        )
    return Scenario(gpus=[*gpus, FakeGpu()])


def _hosts(folder: Path, environment: dict[str, str]) -> Ssh:
    """Hosts that answer, one with a talkative shell, one that never answers and one that lets nobody in."""
    ssh = Ssh(folder)
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
    here = f'set -- $1; shift; exec env {words} {shlex.quote(sys.executable)} -m gpumem_tui "$@"'
    for name in ("calm", "freezing", "dying"):
        ssh.host(name, here)
    ssh.host("talking", r"printf '\033]0;title\007'", here)
    ssh.host("silent", STAYS)
    ssh.host("closed", f"echo '{DENIED}' >&2; exit 255")
    return ssh


class Hosts:
    """The programs on the hosts, which freeze and resume, die and come back."""

    def __init__(self, viewer: Watched, soak: Soak) -> None:
        self._viewer, self._soak = viewer, soak
        self._frozen: psutil.Process | None = None
        self.froze, self.frozen_seen = 0, set[int]()
        self.died, self.resumed_seen = 0, set[int]()

    def _remote(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            children = self._viewer.process.children(recursive=True)
            return [child for child in children if "--wire" in child.cmdline()]
        return []

    def look(self) -> None:
        """Keep whether the screen shows what happened: a dialog may hide it at any one moment."""
        text = self._viewer.text
        if self._frozen is not None and "no answer for" in text.replace("no answer for 5", ""):
            self.frozen_seen.add(self.froze)
        if self._frozen is None and "4 live" in text:
            self.resumed_seen.add(self.froze)

    def act(self, turn: int) -> None:
        """Each turn of five seconds something happens to one of them."""
        match turn % 24:
            case 2 if remote := self._remote():
                self._frozen = remote[turn // 24 % len(remote)]
                self._frozen.suspend()
                self.froze += 1
            case 9 if self._frozen is not None:
                with suppress(psutil.Error):
                    self._frozen.resume()
                self._frozen = None
            case 15 if remote := self._remote():
                remote[turn // 24 % len(remote)].kill()
                self.died += 1
            case 6 | 20 if turn % 120 in (6, 20):
                self._soak.note(f"hosts after {self._soak.after_s:.0f} s:\n{self._viewer.text}")


def _listen(soak: Soak, printed: subprocess.Popen[str]) -> None:
    """Keep each alert that `monitor --json` has."""
    assert printed.stdout is not None
    for line in printed.stdout:
        soak.readings += 1
        for alert in json.loads(line)["alerts"]:
            text = f"{alert['severity']}: {alert['kind']}: {alert['message']}"
            if text not in soak.alerts:
                soak.alerts[text] = soak.after_s
                soak.note(f"{soak.after_s:7.0f} s alert {text}")


async def _visit(served: Served) -> None:
    async with visiting(served) as visitor:
        await visitor.see("GPU")
        for key in ("?", "\x1b", "o", "\x1b"):
            await visitor.press(key)
            await asyncio.sleep(1.0)


def _visits(soak: Soak, served: Served) -> None:
    """Somebody comes in, looks and leaves, over and over; others connect and state nothing."""
    while not soak.over.wait(20.0):
        try:
            asyncio.run(_visit(served))
        except (AssertionError, OSError) as error:
            soak.note(f"{soak.after_s:7.0f} s a visitor: {error}"[:2000])


def _jobs(soak: Soak, folder: Path, environment: dict[str, str], trained: list[int]) -> None:
    """Training under the probe begins and ends, recordings are begun and ended, a search runs to its end."""
    script = folder / "train.py"
    script.write_text(_TRAIN)
    ours = [sys.executable, "-m", "gpumem_tui"]
    turn = 0
    while not soak.over.wait(15.0):
        turn += 1
        file = folder / f"recording-{turn}.json.gz"
        recorder = subprocess.Popen([*ours, "monitor", "--record", str(file), "--quiet"], env=environment, text=True)
        training = subprocess.Popen(
            [*ours, "run", "--", sys.executable, str(script), "45"],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        soak.over.wait(8.0)
        with suppress(psutil.Error):
            trained[:] = [child.pid for child in psutil.Process(training.pid).children(recursive=True)]
        if turn % 4 == 2:
            search = [*ours, "search", "--model", "mlp", "--gpu", "sim:t4-16gb", "--plain"]
            subprocess.run(search, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        soak.over.wait(20.0)
        if turn % 3 == 0:
            training.kill() if turn % 2 else training.terminate()
        training.wait()
        trained.clear()
        soak.over.wait(30.0)
        recorder.terminate()
        if recorder.wait():
            soak.deaths.append(f"recording {turn}: exit code {recorder.returncode}")
        if turn > 3:
            (folder / f"recording-{turn - 3}.json.gz").unlink(missing_ok=True)


def _scrape(port: int) -> None:
    with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        page.read()


@contextmanager
def _in_threads(*functions: Callable[[], None]) -> Iterator[None]:
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    yield


@contextmanager
def _churn(seconds: float) -> Iterator[None]:
    """Folders of other users for root, else of ours."""
    users = (65534, 54321) if os.getuid() == 0 else (os.getuid(),)
    churning = [subprocess.Popen([sys.executable, "-c", _CHURN, str(user), str(seconds)]) for user in users]
    try:
        yield
    finally:
        for process in churning:
            process.kill()
            process.wait()
        for user in users:
            for number in ("", *range(7)):
                shutil.rmtree(f"/tmp/gpumem-tui-{user}{number}", ignore_errors=True)


def _drive(soak: Soak, terminals: dict[str, Watched], hosts: Hosts, show: Callable[[int], None], port: int) -> None:
    numbers = random.Random(11)
    next_key_s = next_log_s = next_turn_s = next_scene_s = 0.0
    pressed: list[str] = []
    turn = scene = 0
    while soak.after_s < _SOAK_S:
        for screen in terminals.values():
            with suppress(OSError):
                screen.read(0.05)
        now_s = soak.after_s
        if now_s > next_scene_s:
            next_scene_s, scene = now_s + 1.0, scene + 1
            show(scene)
            hosts.look()
        if now_s > next_key_s:
            next_key_s = now_s + 0.7
            pressed = pressed or list(numbers.choice(_KEYS))
            key = pressed.pop(0)
            for screen in terminals.values():
                with suppress(OSError):
                    screen.press(key)
        if now_s > next_turn_s:
            next_turn_s, turn = now_s + 5.0, turn + 1
            hosts.act(turn)
            if turn % 3 == 0:
                _scrape(port)
        if now_s > next_log_s:
            next_log_s = now_s + _LOG_S
            soak.look()


def test_an_hour_of_everything(fake_machine: FakeMachine, tmp_path: Path) -> None:
    folder = Path(os.environ.get("GPUMEM_TUI_SOAK_DIR", tmp_path))
    soak = Soak(folder / "soak.log")
    sleepers = [subprocess.Popen(["sleep", str(_SOAK_S * 2 + 60)]) for _ in range(6)]
    pids, trained, numbers = [sleeper.pid for sleeper in sleepers], list[int](), random.Random(5)

    def show(turn: int) -> None:
        fake_machine.show(_scenario([*pids, *trained], turn, numbers))

    show(0)
    own = {"GPUMEM_TUI_DIR": str(folder / "publishing"), "XDG_CONFIG_HOME": str(folder / "config")}
    own |= {
        name: value for name, value in environment_of(fake_machine).items() if name not in ("NVML_STUB_CALLS", "PATH")
    }
    environment = {**os.environ, **own}  # without the counts of calls, whose file is for one process
    (folder / "config").mkdir(exist_ok=True)
    in_terminal = {**own, "PATH": f"{folder}:{os.environ['PATH']}"}
    _hosts(folder, {**own, "PATH": os.environ["PATH"]})
    ours = [sys.executable, "-m", "gpumem_tui"]
    hosts_line = [*ours, "--host", "calm", "--host", "talking", "--host", "freezing", "--host", "dying"]
    hosts_line += ["--host", "silent", "--host", "closed", "--remote-command", "gpumem-tui"]
    port = 19820 + os.getpid() % 1000
    with _churn(_SOAK_S + 60), serving(environment) as served:
        terminals = {"monitor": Watched(ours, in_terminal), "hosts": Watched(hosts_line, in_terminal)}
        errors = (folder / "errors.txt").open("w")
        printed = subprocess.Popen(
            [*ours, "monitor", "--json"], env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        metrics = subprocess.Popen(
            [*ours, "monitor", "--quiet", "--metrics", f"127.0.0.1:{port}"],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        soak.screens = terminals
        soak.programs = {name: screen.process for name, screen in terminals.items()}
        soak.programs |= {"json": psutil.Process(printed.pid), "metrics": psutil.Process(metrics.pid)}
        soak.programs["serve"] = psutil.Process(served.process.pid)
        hosts = Hosts(terminals["hosts"], soak)
        jobs = (lambda: _listen(soak, printed), lambda: _visits(soak, served))
        with _in_threads(*jobs, lambda: _jobs(soak, folder, environment, trained)):
            try:
                _drive(soak, terminals, hosts, show, port)
            finally:
                soak.over.set()
                for name, screen in terminals.items():
                    soak.note(f"{name} at the end:\n{screen.text}")
                    screen.close()
                for pid in (printed.pid, metrics.pid, *pids):
                    os.kill(pid, signal.SIGTERM)
                    os.waitpid(pid, 0)
    _judge(soak, hosts)


def _judge(soak: Soak, hosts: Hosts) -> None:
    soak.note(f"{soak.readings} readings; alerts {soak.alerts}; deaths {soak.deaths}")
    shown = f"{len(hosts.frozen_seen)} of {hosts.froze} that froze were shown so, {len(hosts.resumed_seen)} live again"
    soak.note(f"hosts: {shown}; {hosts.died} died")
    for name in soak.figures:
        resident_mib, descriptors = soak.growth(name)
        soak.note(f"{name:<10} {resident_mib:+.1f} MiB, {descriptors:+d} descriptors")
    assert not soak.alerts
    assert not soak.deaths
    assert all(soak.growth(name)[1] <= 0 for name in soak.figures)
    assert all(soak.growth(name)[0] < 2 for name in soak.figures)
