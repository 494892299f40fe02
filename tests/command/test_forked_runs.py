"""Runs that an interpreter which has torch imported forks are as fresh ones; what could not be, is fresh."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.run import interpreters
from gpumem_tui.run.control import Control, Terms, converse
from gpumem_tui.run.events import ChildEvent, Failed, Output, TraceDone, TraceRequest
from gpumem_tui.workload.command import Command
from gpumem_tui.workload.spec import WorkloadSpec
from tests.conftest import START_COLD
from tests.waiting import wait_for_file, wait_until

ROOT = str(Path(__file__).parents[2])

_AS_IT_FINDS_ITSELF = """
import atexit, importlib.util, json, os, signal, sys

def descriptors():
    names = {int(number): os.readlink("/proc/self/fd/" + number).split(":")[0] for number in os.listdir("/proc/self/fd")
             if os.path.exists("/proc/self/fd/" + number)}
    return {number: name for number, name in names.items() if os.get_inheritable(number)}

found = {
    "words": [sys.argv, sys.orig_argv, sys.executable, sys.path, os.getcwd(), repr(sys.flags)],
    "main": {
        name: type(value).__name__ if name == "__loader__" else str(value)
        for name, value in vars(sys.modules["__main__"]).items() if name.startswith("__")
    },
    "streams": [
        (one.name, one.mode, one.encoding, one.errors, one.line_buffering, one.isatty(), one.seekable())
        for one in (sys.stdin, sys.stdout, sys.stderr)
    ],
    "write through": [sys.stdout.write_through, sys.stderr.write_through],
    "input": sys.stdin.readline(),
    "signals": {number: str(signal.getsignal(number)) for number in sorted(signal.valid_signals())},
    "group": [os.getpgrp() == os.getppid(), os.getsid(0) == os.getppid()],
    "descriptors": sorted(descriptors()),
    "environment": {name: value for name, value in os.environ.items() if name not in ("PATH", "GPUMEM_TUI_TRIAL")},
    "imported": [name for name in ("torch", "torch.nn", "numpy", "sympy") if name in sys.modules],
    "found": [importlib.util.find_spec(name).origin for name in ("torch", "numpy")],
    "hook": sys.excepthook.__qualname__,
    "hash": hash("seed"),
}
import torch.nn as nn
import torch
import numpy
found["torch"] = [sys.modules["torch.nn"] is nn is torch.nn, type(torch.__spec__).__name__, torch.__spec__.origin,
                  torch.__spec__.has_location, type(torch.__loader__).__name__, type(torch.__spec__.loader).__name__,
                  torch.get_num_threads(), numpy.__version__]
atexit.register(print, "at exit")
with open("found.json", "w") as file:
    json.dump(found, file, default=str)
net = nn.Linear(1024, 1024, device="cuda")
adam = torch.optim.Adam(net.parameters())
for _ in range(3):
    net(torch.ones(16, 1024, device="cuda")).sum().backward()
    adam.step()
    adam.zero_grad()
"""

_WHO = "\nprint('RUN BY', open('/proc/self/cmdline').read().split(chr(0))[1])\n"
"""Tells a fresh interpreter, whose first word is the script, from a forked one."""


@dataclass(frozen=True)
class Folder:
    """Where scripts are run: one interpreter serves all that run here."""

    path: Path

    def run(self, script: str, *words: str, python: str = sys.executable, name: str = "train.py") -> list[ChildEvent]:
        """Trace a command that runs a script, and return all that is reported."""
        (self.path / name).write_text(textwrap.dedent(script))
        command = Command((python, name, *words), str(self.path))
        request = TraceRequest(WorkloadSpec(Recipe(), command=command), find_gpu("a100-80gb"), steps=3, batch_size=1)
        return list(converse(request, Terms(python), Control()))


def printed(events: Sequence[ChildEvent]) -> list[str]:
    return [event.text for event in events if isinstance(event, Output)]


@pytest.fixture(autouse=True)
def _cold_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the start itself that is tested."""
    monkeypatch.setattr(interpreters.CommandServer, "__init__", START_COLD)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    yield Folder(tmp_path_factory.mktemp("runs"))
    interpreters.close_idle()


def both(folder: Folder, script: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ChildEvent]]:
    """Yield what a forked and then what a fresh run of a script reports."""
    yield folder.run(script, "--lr", "a b")
    with monkeypatch.context() as patched:
        patched.setattr(interpreters, "for_command", lambda *_: None)
        yield folder.run(script, "--lr", "a b")


def test_a_forked_run_finds_itself_as_a_fresh_one(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    found, timelines = [], []
    for events in both(folder, _AS_IT_FINDS_ITSELF, monkeypatch):
        assert printed(events)[-1:] == ["at exit"], events
        found.append(json.loads((folder.path / "found.json").read_text()))
        (done,) = (event for event in events if isinstance(event, TraceDone))
        timelines.append(replace(done, seconds=0.0))
    assert found[0] == found[1]
    assert found[0]["imported"] == []
    assert timelines[0] == timelines[1]


@pytest.mark.parametrize(
    "script",
    [
        "def train():\n    raise ValueError('bad news')\n\ntrain()\n",
        "def f(:\n",
        "import sys\nsys.exit('no data')\n",
        "import sys\nsys.excepthook = lambda kind, error, trace: print(kind, trace.tb_lineno, trace.tb_next)\n1 / 0\n",
        "import threading, atexit\natexit.register(print, 'last')\nthreading.Timer(0.01, print, ('thread',)).start()\n",
        "import os\nos.kill(os.getpid(), 9)\n",
        "import sys\nsys.exit(3)\n",
    ],
    ids=["error", "syntax", "exit", "hook", "thread", "killed", "code"],
)
def test_a_forked_run_ends_as_a_fresh_one(folder: Folder, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forked, fresh = both(folder, script, monkeypatch)
    assert forked == fresh
    assert isinstance(forked[-1], Failed)


def test_simulated_runs_draw_alike(folder: Folder) -> None:
    """Traces are compared, so lengths that a program draws must not differ between them."""
    script = """
    import random, torch, numpy
    print(random.random(), torch.initial_seed(), torch.rand(1).item(), numpy.random.rand())
    """
    one, other = (printed(folder.run(script))[-1].split() for _ in range(2))
    assert len(one) == 4
    assert one == other


def test_runs_are_forked(folder: Folder) -> None:
    (line,) = printed(folder.run(_WHO))
    assert line.endswith("command_server.py")


@pytest.mark.parametrize(
    ("script", "files"),
    [
        ("", ("tempfile.py",)),
        ("", ("numpy/__init__.py",)),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '3'\nimport torch\n", ()),
        ("import sys\nsys.path.insert(0, 'mine')\nimport torch\n", ("mine/torch/__init__.py",)),
        pytest.param(
            "import sys\nsys.path.insert(0, 'mine')\nimport numpy\n",
            ("mine/numpy/__init__.py",),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["name of Python's", "name of a library's", "variable", "another torch", "another numpy"],
)
def test_what_importing_torch_late_could_change_has_a_fresh_run(
    folder: Folder, script: str, files: tuple[str, ...]
) -> None:
    for name in files:
        path = folder.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_WHO + "raise SystemExit\n")
    try:
        events = folder.run(script + _WHO)
    finally:
        for name in files:
            (folder.path / name).unlink()
            if os.sep in name:  # a package without a file is one still
                shutil.rmtree(folder.path / Path(name).parts[0])
    assert printed(events)[-1] == "RUN BY train.py", events


def test_an_interpreter_without_torch_runs_as_ever(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(os.path.realpath(sys.executable))
    (tmp_path / "pyvenv.cfg").write_text(f"home = {Path(os.path.realpath(sys.executable)).parent}\n")
    events = Folder(tmp_path).run(_WHO, python=str(python))
    assert printed(events) == ["RUN BY train.py"]
    assert isinstance(events[-1], Failed)


@pytest.mark.parametrize(
    "words",
    [
        ("env", sys.executable, "train.py"),
        (sys.executable, "-O", "train.py"),
        (sys.executable, "-m", "train"),
        (sys.executable, "-c", "pass"),
        (sys.executable, "missing.py"),
        (sys.executable,),
        ("./python", "train.py"),
        ("./missing/python", "train.py"),
        ("torchrun", "train.py"),
    ],
)
def test_what_is_no_python_with_a_script_starts_by_itself(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o700)
    assert interpreters.for_command(words, str(tmp_path)) is None


def test_a_variable_that_keeps_the_script_s_folder_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert interpreters.for_command((sys.executable, "train.py"), str(tmp_path)) is None


def test_what_killed_processes_left_is_removed_by_the_next_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="t") as folders, socket.socket(socket.AF_UNIX) as living:
        monkeypatch.setattr(tempfile, "tempdir", folders)
        left, used, begun = (Path(folders, f"gpumem-tui.trial-{name}") for name in ("left", "used", "begun"))
        for folder in (left, used, begun):
            folder.mkdir()
        living.bind(str(used / "events.sock"))
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(left / "events.sock"))
        Folder(tmp_path).run("", python="no-such-python")
        assert sorted(Path(folders).iterdir()) == [begun, used]


@pytest.mark.parametrize("word", [sys.executable, "./python"], ids=["forked", "fresh"])
@pytest.mark.parametrize("is_over", [False, True], ids=["while it runs", "when it is over"])
def test_a_viewer_that_is_killed_leaves_no_folder(word: str, is_over: bool, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="t") as folders:  # the path of a socket in it has to be short
        run = _kill_viewer(word, tmp_path, Path(folders), is_over=is_over)
        wait_until(lambda: not list(Path(folders).glob("gpumem-tui.trial-*")), "the end of the folder")
        wait_until(lambda: not run.is_running(), "the end of the command")
        assert list(Path(folders).glob("gpumem-tui.trial-*")) == []
        assert not run.is_running()


def _kill_viewer(word: str, tmp_path: Path, folders: Path, *, is_over: bool) -> psutil.Process:
    """Kill a viewer whose command runs, or is over without its knowing; return the command's process."""
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o700)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "train.py").write_text("import os\nopen('pid', 'w').write(str(os.getpid()))\nopen('pipe').close()\n")
    program = subprocess.Popen(
        [sys.executable, "-m", "gpumem_tui", "predict", "--gpu", "sim:t4-16gb", "--", word, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ROOT, "TMPDIR": str(folders)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for_file(tmp_path / "pid")
    run = psutil.Process(int((tmp_path / "pid").read_text()))
    assert list(folders.glob("gpumem-tui.trial-*"))
    if is_over:
        program.send_signal(signal.SIGSTOP)  # it hears of nothing
        with open(tmp_path / "pipe", "w"):
            pass
        wait_until(lambda: not run.is_running(), "the end of the command")
    program.kill()
    program.wait()
    return run
