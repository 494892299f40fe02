"""Attached in the middle of training, the probe keeps out of its way: its share of the time, its lock, forks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpumem_tui.watch.reader import Watcher
from tests.probe.watched import Run, run
from tests.sharing import made_once

PROGRAM = """
import ctypes, json, os, threading, time
import torch
from gpumem_tui.probe import probe

class Clock:
    "A clock that stops but for what is added to it: nothing here depends on how fast the machine is."
    now = computed = 1000.0

    def monotonic(self):
        return self.now

    def monotonic_ns(self):
        return round(self.now * 1e9)

    def thread_time(self):
        return self.computed

    def pass_time(self, seconds, computing=1.0):
        self.now += seconds
        self.computed += computing * seconds

    def __getattr__(self, name):
        return getattr(time, name)

clock = probe.time = Clock()
optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(4))], lr=0.1) for _ in range(2)]

def train(optimizer, steps):
    for _ in range(steps):
        optimizer.param_groups[0]["params"][0].sum().backward()
        optimizer.step()

looks, during, trained = [], [], probe.Finder.trained

def slowly(finder):
    looks.append(clock.now)
    clock.pass_time(0.05)
    for what in during:
        what()
    return trained(finder)

probe.Finder.trained = slowly
train(optimizers[0], 3)
from gpumem_tui.probe.entry import attach
attach("attach")
attach("call")

for _ in range(90):  # a step a second, of which a look would take a twentieth
    train(optimizers[0], 1)
    clock.now += 1.0
found = {"looks": [round(at - 1000) for at in looks]}

train(optimizers[1], 1)  # known from here on
clock.now += 100.0
looks.clear()

def step_elsewhere():
    during.clear()
    other = threading.Thread(target=train, args=(optimizers[1], 1), daemon=True)
    other.start()
    other.join(20)
    found["waited"] = other.is_alive()

during.append(step_elsewhere)
train(optimizers[0], 1)
found["at_once"] = len(looks)
print(json.dumps(found), flush=True)

clock.now += 100.0
train(optimizers[0], 1)
child = ctypes.PyDLL(None).fork()  # by a library in C, of which Python is not told
if child == 0:
    for _ in range(5):
        clock.now += 100.0
        train(optimizers[0], 1)
    os._exit(0)
os.waitpid(child, 0)
"""

AWAY = (
    PROGRAM[: PROGRAM.index("train(optimizers[0], 3)")]
    + """
from pathlib import Path
from gpumem_tui.probe.entry import attach
from gpumem_tui.watch.reader import Watcher
watcher = Watcher([Path(os.environ["GPUMEM_TUI_DIR"])], clock_ns=clock.monotonic_ns)
attach("attach")
said = lambda one: [one.step, one.age_s, one.heard_s, one.rarer, one.problem]

def waiting(finder):
    looks.append(clock.now)
    clock.pass_time(0.05, computing=0.01)
    return trained(finder)

probe.Finder.trained = waiting
found = {}
for _ in range(30):
    train(optimizers[0], 1)
    clock.now += 1.0
found["looks"] = [round(at - 1000) for at in looks]
found["busy"] = said(*watcher.processes())
clock.now += 16.0
found["hangs"] = said(*watcher.processes())
probe.Finder.trained = lambda finder: 1 / 0
clock.now += 100.0
for _ in range(5):
    train(optimizers[0], 1)
    clock.now += 6.0
found["off"] = said(*watcher.processes())
train(optimizers[0], 1)
clock.now += 61.0
train(optimizers[0], 1)
found["still off"] = said(*watcher.processes())
probe.Finder.trained = trained
clock.now += 30.0
train(optimizers[0], 1)
found["not yet"] = said(*watcher.processes())
clock.now += 31.0
train(optimizers[0], 1)
found["back"] = said(*watcher.processes())
print(json.dumps(found), flush=True)
import sys
sys.exit("no more data\\x1b")
"""
)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("guarded")
    done = made_once(tmp_path_factory, "guarded", lambda: run(["-c", PROGRAM], directory, watched=False))
    assert (done.code, done.errors) == (0, "")
    return done


@pytest.fixture(scope="module")
def found(guarded: Run) -> Any:
    return json.loads(guarded.output)


def test_attaching_in_the_middle_of_training(guarded: Run) -> None:
    [published] = guarded.published
    assert published.header.process.entry == "attach"
    assert published.records[0].step == 1
    assert published.records[0].parameters_bytes == 2 * 16  # of both optimizers, though one has not stepped yet
    assert {record.phase for record in published.records[:-1]} == {"optimizer"}
    assert published.last.phase == ""


def test_looks_take_a_four_hundredth_of_the_time(found: Any) -> None:
    """One of 50 ms comes every 20 s, though one every half a second is wanted."""
    assert found["looks"] == [0, 20, 40, 60, 80]


@pytest.fixture(scope="module")
def away(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def made() -> Any:
        directory = tmp_path_factory.mktemp("away")
        done = run(["-c", AWAY], directory, watched=False)
        assert done.code == 1, done.errors
        [ended] = Watcher([directory]).processes()
        assert ended.end is not None
        return {**json.loads(done.output), "end": (ended.state.value, ended.end.phrase, done.errors)}

    return made_once(tmp_path_factory, "away", made)


def test_a_text_that_a_program_leaves_with_is_told(away: Any) -> None:
    state, phrase, errors = away["end"]
    assert (state, phrase) == ("ended", "ended: no more data ")
    assert errors.endswith("no more data\x1b\n")


def test_on_a_busy_machine_samples_are_rarer_and_steps_are_counted(away: Any) -> None:
    """One of 50 ms of which a hundredth is computing comes every 5 s; each step is a second."""
    assert away["looks"] == [0, 5, 10, 15, 20, 25]
    step, age_s, heard_s, rarer, problem = away["busy"]
    assert (step, heard_s, rarer, problem) == (30, 1.0, "sampling slowed, machine busy", "")
    assert age_s == pytest.approx(4.95, abs=0.3)


def test_a_hang_is_named(away: Any) -> None:
    assert away["hangs"][4] == "no step has finished for 17 s"


def test_a_probe_that_switched_itself_off_tries_again_each_minute(away: Any) -> None:
    off = "the probe switched itself off: ZeroDivisionError: division by zero"
    assert [away[when][4] for when in ("off", "still off", "not yet")] == [off] * 3
    step, _, heard_s, _, problem = away["back"]
    assert (step, heard_s, problem) == (39, 0.0, "the probe met 6 errors")


def test_two_threads_never_look_at_once_and_the_second_does_not_wait(found: Any) -> None:
    assert found["at_once"] == 1
    assert found["waited"] is False


def test_a_fork_that_python_is_not_told_of_publishes_nothing(guarded: Run) -> None:
    [published] = guarded.published
    steps = [record.step for record in published.records]
    assert steps == sorted(steps)
    assert published.last.step == steps[-2] == 92
