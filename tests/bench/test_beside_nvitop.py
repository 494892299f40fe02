"""The Monitor and nvitop in one run, in turn: how soon it opens, answers a key and closes, what it takes, ratios.

`pytest -m bench -s -n 0 tests/bench/test_beside_nvitop.py`; GPUMEM_TUI_PEERS: where nvitop is, or it is installed
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from gpumem_tui.memory import MIB
from tests.bench.test_monitor_cost import (
    Watched,
    busy_machine,
    complete,
    environment_of,
    peers,
    processor_s,
)
from tests.nvml_stub.machine import FakeMachine

__all__ = ["peers"]

pytestmark = pytest.mark.bench

_RUNS = 9
_SETTLED_S = 0.5
_OURS, _THEIRS = "gpumem-tui", "nvitop"
_BARE = """
from textual.app import App
from textual.widgets import Static
class Bare(App):
    BINDINGS = [("q", "quit", "")]
    def compose(self):
        yield Static("/ 80.00")
Bare().run()
"""
"""The least that a program made with Textual takes."""

_WARM_UP_S, _STAYED_S = 8.0, 30.0
_KEYS = 15
_KEY_LIMIT_S = 2.0
_QUIET_S = 0.15
"""A key is pressed when nothing was written for so long: what comes next is the answer."""

Row = dict[str, float]


def _opened(command: list[str], machine: FakeMachine, pids: list[int]) -> Row:
    """Open a program, wait until it has shown everything, press q."""
    watched = Watched(command, environment_of(machine))
    arrived: list[
        tuple[float, float, bytes]
    ] = []  # parsed afterwards: parsing takes longer than some programs take to start
    while heard := watched.next(_SETTLED_S if arrived else 10.0):
        arrived.append((time.perf_counter() - watched.began_s, processor_s(watched.process.pid), heard))
    row: Row = {}
    is_ours = "gpumem_tui" in command

    def whole(text: str) -> bool:  # of ours the first picture has all figures, but no keys yet
        return complete(pids)(text) and ("palette" in text or not is_ours)

    for when_s, cpu_s, heard in arrived:
        watched.parse(heard)
        if "picture" not in row and "80.00" in watched.text.replace("81920", "80.00"):
            row["picture"], row["picture cpu"] = when_s, cpu_s
        if whole(watched.text):
            row["frame"], row["frame cpu"] = when_s, cpu_s
            break
    row["quit"], row["whole cpu"] = watched.quit("q")
    return row


def _stayed(command: list[str], machine: FakeMachine, key: str, seconds: float = _STAYED_S) -> Row:
    """Leave a program open for so long once it has warmed up, then press a key again and again."""
    watched = Watched(command, environment_of(machine))
    try:
        watched.drain(_WARM_UP_S, parse=True)
        cpu_s, began_s = processor_s(watched.process.pid), time.perf_counter()
        watched.drain(seconds, parse=False)
        minutes = (time.perf_counter() - began_s) / 60
        row = {
            "cpu a minute": (processor_s(watched.process.pid) - cpu_s) / minutes,
            "MiB": watched.process.memory_info().rss / MIB,
        }
        return {**row, "key": statistics.median(_answer_s(watched, key) for _ in range(_KEYS))}
    finally:
        watched.close()


def _answer_s(watched: Watched, key: str) -> float:
    """Seconds from a key to the first byte of what it changes."""
    while watched.next(_QUIET_S):
        pass
    pressed_s = time.perf_counter()
    watched.press(key)
    watched.next(_KEY_LIMIT_S)
    return time.perf_counter() - pressed_s


def _ran(command: list[str], machine: FakeMachine) -> Row:
    """Run a program to its end."""
    began_s = time.perf_counter()
    environment = {**os.environ, **environment_of(machine)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    return {"wall": time.perf_counter() - began_s, "cpu": usage.ru_utime + usage.ru_stime}


def _in_turn(programs: dict[str, Callable[[], Row]]) -> dict[str, Row]:
    """Medians; the first round, which compiles and warms up, is left out."""
    rounds = [{name: run() for name, run in programs.items()} for _ in range(_RUNS + 1)][1:]
    columns = {name: dict.fromkeys(key for each in rounds for key in each[name]) for name in programs}
    return {
        name: {key: statistics.median(each[name][key] for each in rounds if key in each[name]) for key in keys}
        for name, keys in columns.items()
    }


def _print(title: str, rows: dict[str, Row]) -> None:
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    print(f"\n{title:<28}" + "".join(f"{column:>13}" for column in columns))
    for name, row in rows.items():
        print(f"{name:<28}" + "".join(f"{row[key]:>13.3f}" if key in row else f"{'–':>13}" for key in columns))
    if _THEIRS in rows:
        for name, row in rows.items():
            if name.startswith(_OURS):
                ratios = (f"{row[key] / rows[_THEIRS][key]:>13.2f}" if key in row else "" for key in columns)
                print(f"{f'{name} / {_THEIRS}':<28.28}" + "".join(ratios))


def _nvitop(peers: Path | None, *options: str) -> dict[str, list[str]]:
    return {} if peers is None else {_THEIRS: [str(peers / "python"), "-m", "nvitop", *options]}


def test_opening_and_leaving(fake_machine: FakeMachine, peers: Path | None) -> None:
    commands = {
        _OURS: [sys.executable, "-m", "gpumem_tui"],
        f"{_OURS} monitor": [sys.executable, "-m", "gpumem_tui", "monitor"],
        **_nvitop(peers),
        "bare Textual": [sys.executable, "-c", _BARE],
    }
    with busy_machine(fake_machine) as pids:
        rows = _in_turn({name: partial(_opened, line, fake_machine, pids) for name, line in commands.items()})
    assert "frame" in rows[_OURS], "no complete first frame"
    _print("opening and leaving", rows)


def test_staying_open(fake_machine: FakeMachine, peers: Path | None) -> None:
    commands = {_OURS: ([sys.executable, "-m", "gpumem_tui"], "r")}
    commands |= {name: (line, ".") for name, line in _nvitop(peers).items()}  # each key sorts in another order
    with busy_machine(fake_machine):
        for line, key in commands.values():
            _stayed(line, fake_machine, key, seconds=0.1)  # this compiles all, which an installed program is
        rows = {name: _stayed(line, fake_machine, key) for name, (line, key) in commands.items()}
    assert rows[_OURS]["key"] < _KEY_LIMIT_S, "no answer"
    _print("staying open", rows)


def test_one_reading(fake_machine: FakeMachine, peers: Path | None) -> None:
    ours = [sys.executable, "-m", "gpumem_tui", "monitor", "--once"]
    commands = {
        f"{_OURS} --once": ours,
        f"{_OURS} --once --json": [*ours, "--json"],
        f"{_OURS} --version": [sys.executable, "-m", "gpumem_tui", "--version"],
        f"{_OURS} --help": [sys.executable, "-m", "gpumem_tui", "--help"],
        **_nvitop(peers, "-1"),
        "python -c pass": [sys.executable, "-c", "pass"],
    }
    with busy_machine(fake_machine):
        rows = _in_turn({name: partial(_ran, line, fake_machine) for name, line in commands.items()})
    _print("one reading", rows)
