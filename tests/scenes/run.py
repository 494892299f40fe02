"""The screen of `run --tui` with a command that prints what a test tells it to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from gpumem_tui.monitor.snapshot import Snapshot
from gpumem_tui.probe.wire import Exit
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.run.screen import RunScreen
from gpumem_tui.watch.published import Published
from tests.monitor.scripted import Scripted
from tests.scenes import monitor as scene
from tests.scenes import watch as watch_scene

PROGRESS = "\r\x1b[32mepoch 3:  42%|████▏     | 420/1000 [02:05<02:52,  3.36it/s]\x1b[0m"


class Command:
    """Stand-in for `TerminalCommand`: it runs until the test, or what it is sent, ends it."""

    def __init__(self, pids: frozenset[int] = frozenset({4100})) -> None:
        self.pid = 4100
        self.pids = pids
        self.ended: Exit | None = None
        self.sent = b""
        self.sizes: list[tuple[int, int]] = []
        self.killed = False
        self.obeys = True
        self._over = threading.Event()
        self._said: list[bytes] = []

    def say(self, text: str) -> None:
        self._said.append(text.encode())

    def end(self, exit_code: int | None = 0, signal: int | None = None) -> None:
        self.ended = Exit(time.time_ns(), exit_code, signal, False, None, None, "")
        self._over.set()

    def follow(self, output: Callable[[bytes], None]) -> Exit:
        while not self._over.wait(0.01):
            while self._said:
                output(self._said.pop(0))
        assert self.ended is not None
        return self.ended

    def send(self, typed: bytes) -> None:
        self.sent += typed

    def resize(self, columns: int, rows: int) -> None:
        self.sizes.append((columns, rows))

    def terminate(self) -> None:
        if self.ended is None and self.obeys:
            self.end(None, 15)

    def kill(self) -> None:
        self.killed = True
        self.end(None, 9)

    def wait(self, timeout_s: float) -> bool:
        return self._over.wait(0.1)


def app(command: Command, shown: tuple[Snapshot, Published] | None = None) -> GpuMemApp:
    """The program, next to a GPU on which the command trains, or as `shown`."""
    snapshot, published = shown or watch_scene.training()
    command.say("loading the corpus\n" + "".join(f"epoch {n}: loss {3 / (n + 1):.3f}\n" for n in range(3)) + PROGRESS)

    def make() -> RunScreen:
        screen = RunScreen(
            Scripted(snapshot),
            clock=scene.clock,
            past_s=600.0,
            probes=watch_scene.Said(published),
            history=scene.history(600, 1, probed=True),
        )
        return screen.of(command, "python train.py --epochs 10")  # type: ignore[arg-type]

    return GpuMemApp({"monitor": make}, "monitor")
