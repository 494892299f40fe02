"""Where a program is whose steps have stopped: by a thread of the probe's, and from there to whoever watches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from gpumem_tui.probe import stall as module
from gpumem_tui.probe.files import SITE_DIRECTORY
from gpumem_tui.probe.stall import Watchdog
from gpumem_tui.probe.steps import StepCount
from gpumem_tui.probe.wire import Stall
from tests.probe.watched import SCRIPTS, TORCHRUN
from tests.sharing import WarmPython
from tests.waiting import wait_until

HERE = os.path.basename(__file__)


class Gate:
    """Something that a program stops at, until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def stop(self) -> None:
        self.reached.set()
        self.opened.wait()


@contextmanager
def stopped(trains: Callable[[Gate], object], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Stall]]:
    """A thread that trains and has stopped; yields what looks once more and returns what was published then."""
    monkeypatch.setattr(module, "STOPPED_S", 0.0)
    monkeypatch.setattr(module, "_TOLD_AGAIN_S", 0.0)
    gate, turn, looked, told = Gate(), threading.Semaphore(0), threading.Semaphore(0), list[Stall]()

    def sleep(_seconds: float) -> None:
        looked.release()
        turn.acquire()

    watchdog = Watchdog(StepCount(), told.append, sleep)

    def train() -> None:
        watchdog.follow()
        trains(gate)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    gate.reached.wait()

    def look() -> Stall:
        told.clear()
        for _ in range(2):
            looked.acquire()
            turn.release()
        looked.acquire()
        looked.release()
        return told[-1]

    try:
        yield look
    finally:
        watchdog.end()
        turn.release()
        gate.opened.set()
        thread.join()


class Held(nn.Module):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate, self.weight = gate, nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gate.stop()  # in forward
        return x * self.weight


class HeldBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: Gate) -> torch.Tensor:
        ctx.gate = gate
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.gate.stop()  # in backward
        return grads[0], None


class Samples(Dataset[torch.Tensor]):
    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def __len__(self) -> int:
        return 2

    def __getitem__(self, _: int) -> torch.Tensor:
        self.gate.stop()  # in batch
        return torch.ones(2)


def in_backward(gate: Gate) -> None:
    HeldBackward.apply(torch.ones(2, requires_grad=True), gate).sum().backward()  # type: ignore[no-untyped-call]


def in_optimizer(gate: Gate) -> None:
    def closure() -> float:
        gate.stop()  # in optimizer
        return 0.0

    torch.optim.SGD(Held(gate).parameters(), lr=0.1).step(closure)


PLACES: dict[str, Callable[[Gate], object]] = {
    "forward": lambda gate: Held(gate)(torch.ones(2)),
    "backward": in_backward,
    "batch": lambda gate: next(iter(DataLoader(Samples(gate)))),
    "optimizer": in_optimizer,
}


@pytest.mark.parametrize("phase", PLACES)
def test_it_says_the_phase_and_the_programs_own_line(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Path(__file__).read_text().splitlines()
    line = next(number for number, said in enumerate(text, 1) if said.endswith(f"()  # in {phase}"))
    with stopped(PLACES[phase], monkeypatch) as look:
        stall = look()
    assert stall.phase == phase
    assert stall.collective == ""
    assert not stall.busy
    own = [said for said in stall.stack if HERE in said]
    assert any(said.split()[0].endswith(f"{HERE}:{line}") for said in own)
    assert stall.source.startswith(f"{HERE}:")
    assert stall.monotonic_ns


def test_while_steps_end_nothing_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOPPED_S", 0.0)
    steps, told, turns = StepCount(), list[Stall](), iter(range(20))
    over = threading.Event()

    def sleep(_seconds: float) -> None:
        if next(turns, None) is None:
            over.set()
            watchdog.end()
        steps.run += 1

    watchdog = Watchdog(steps, told.append, sleep)
    watchdog.follow()
    over.wait()
    assert told == []


def test_a_program_that_stops_after_steps_is_told_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOPPED_S", 0.0)
    steps, told, turns = StepCount(), list[Stall](), iter(range(9))
    over = threading.Event()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    steps.register(optimizer)

    def sleep(_seconds: float) -> None:
        turn = next(turns, None)
        steps.run += turn is not None and turn < 4
        if turn is None:
            watchdog.end()
            over.set()

    watchdog = Watchdog(steps, told.append, sleep)
    watchdog.follow()
    over.wait()
    assert {stall.step for stall in told} == {5}
    assert steps.steps == 5, "nothing was counted by looking"


def test_a_program_that_counts_its_threads_does_not_see_it() -> None:
    before, waits = threading.active_count(), threading.Event()

    def sleep(_seconds: float) -> None:
        waits.wait()

    watchdog = Watchdog(StepCount(), lambda _: None, sleep)
    watchdog.follow()
    assert threading.active_count() == before
    watchdog.end()
    waits.set()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "wrapped"), [("sleep", "plain"), ("loop", "plain"), ("lock", "ddp")])
def test_of_ranks_that_wait_the_one_that_stopped_first_is_named(tmp_path: Path, how: str, wrapped: str) -> None:
    script = SCRIPTS / "stops.py"
    words = {"sleep": "# asleep", "loop": "# in a loop", "lock": "# at a lock"}
    line = next(number for number, said in enumerate(script.read_text().splitlines(), 1) if words[how] in said)
    environment = {**os.environ, "GPUMEM_TUI_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    job = [WarmPython.path(), *TORCHRUN, str(script), how, "1", wrapped]
    ranks: subprocess.Popen[str] = subprocess.Popen(
        job,
        executable=sys.executable,  # of which only the ranks start warm: it ends them as it is ended
        env={**environment, "PYTHONPATH": str(SITE_DIRECTORY)},
        start_new_session=True,
        text=True,
    )
    watch = [sys.executable, "-m", "gpumem_tui", "watch", "--json"]
    started = [ranks]
    try:
        wait_until(lambda: len(list(tmp_path.glob("*.ring"))) == 2, "both ranks")
        viewer = subprocess.Popen(watch, env=environment, stdout=subprocess.PIPE, text=True)
        started.append(viewer)
        assert viewer.stdout is not None
        events = map(json.loads, viewer.stdout)
        said = next(each for each in events if each["event"] == "stopped" and len(each["stopped"]) == 2)
    finally:
        for process in started:
            process.terminate()
            process.wait()
    assert said["first"]["rank"] == 1
    assert said["first"]["step"] == 19
    assert said["first"]["stopped_at"]["source"] in (f"stops.py:{line}", f"stops.py:{line - (how == 'loop')}")
    assert said["first"]["stopped_at"]["phase"] == "forward"
    assert said["first"]["stopped_at"]["busy"] == (how == "loop")
    (other,) = [each["stopped_at"] for each in said["stopped"] if each["rank"] == 0]
    assert (other["collective"], other["phase"]) == ((None, "backward") if wrapped == "ddp" else ("all_reduce", None))
    assert other["waits"]
