"""`run`, `attach`, `watch` and `look` on a real training process, as a user types them."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpumem_tui.attach.target import LIST_LIVING
from gpumem_tui.watch import hosts
from tests.attach.loops import LET_US_TRACE, running
from tests.cli.conftest import Program
from tests.sharing import WarmPython
from tests.waiting import DEADLINE_S, wait_until
from tests.warm import TRAINING
from tests.watch.rings import RECORD, RingFile, gone, this_process

TRAIN = """
import os, sys, time
import torch
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters())
def step():
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
def held(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
step()
parameters = list(model.parameters())
state = [value for values in optimizer.state.values() for value in values.values()]
gradients = [parameter.grad for parameter in parameters]
print(os.getpid(), held(parameters), held(gradients), held(state), flush=True)
del gradients
while True:
    step()
    time.sleep(0.01)
"""
"""An ordinary script, which prints its pid, and the bytes of parameters, gradients and optimizer state as it counts."""

RUN_OUT = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB")
"""

KILLED = """
import os, signal, time
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
for step in range(30):
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.1)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""Long enough for `run` to see that it publishes."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "probes"


@contextmanager
def training(folder: Path, *prefix: str) -> Iterator[tuple[int, list[int]]]:
    """The script, started by itself or under a command; its pid and the bytes that it counted."""
    with subprocess.Popen(
        [*prefix, WarmPython.path(TRAINING), "-c", f"{LET_US_TRACE}\n{TRAIN}"],
        env={**os.environ, "GPUMEM_TUI_DIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            pid, *counted = (int(word) for word in process.stdout.readline().split())
            yield pid, counted
        finally:
            process.kill()


def watched(folder: Path, pid: int, lines: int) -> list[dict[str, Any]]:
    """The first lines of `gpumem-tui watch PID --json`; it is interrupted then, and ends well."""
    command = [sys.executable, "-m", "gpumem_tui", "watch", str(pid), "--json", "--interval", "0.1"]
    environment = {**os.environ, "GPUMEM_TUI_DIR": str(folder)}
    wait_until(lambda: list(folder.glob("*.ring")), "the ring")
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = [json.loads(process.stdout.readline()) for _ in range(lines)]
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) in (130, -signal.SIGINT)
    return found


def test_run_watch_and_look(program: Program, folder: Path) -> None:
    """The bytes are those that the script counts, to the byte."""
    env = {"GPUMEM_TUI_DIR": str(folder)}
    with training(folder, sys.executable, "-m", "gpumem_tui", "run", "--") as (pid, counted):
        first, second = watched(folder, pid, lines=2)
        assert [first["buckets"][name] for name in ("parameters", "gradients", "optimizer")] == counted
        assert (first["pid"], first["device"], first["entry"], first["state"]) == (pid, "cpu", "run", "running")
        assert first["allocated_bytes"] is None
        assert first["unavailable"]["allocated_bytes"] == "host memory has no caching allocator"
        assert second["step"] > first["step"]
        done = program("look", str(pid), "--json", env=env, alone=False)
        assert (done.code, done.err) == (0, "")
        look = json.loads(done.out)
        assert look["pid"] == pid
        assert sum(look["devices"][0]["buckets"].values()) == look["devices"][0]["peak_bytes"] > sum(counted)
        done = program("attach", str(pid), "--yes", env=env, alone=False)
        assert (done.code, done.err) == (0, "")
        assert "publishes already, by run" in done.out
    done = program("watch", str(pid), env=env, alone=False)
    assert done.code == 0
    assert f"PID {pid} (" in done.out
    assert ": killed (SIGKILL); the last step seen was " in done.out or ": killed or crashed" in done.out
    done = program("watch", str(pid), "--post-mortem", env=env, alone=False)
    assert (done.code, done.out) == (0, "")
    assert ") has not run out of memory: killed " in done.err
    done = program("look", str(pid), env=env, alone=False)
    assert (done.code, done.out) == (4, "")
    assert done.err.endswith(f") has ended: `gpumem-tui watch {pid}` shows its last sample\n")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="attaching works on x86-64 only")
def test_attach_and_watch(program: Program, folder: Path) -> None:
    """A script that was started with no thought of watching."""
    env = {"GPUMEM_TUI_DIR": str(folder)}
    with training(folder) as (pid, counted):
        done = program("watch", str(pid), env=env, alone=False)
        assert done.code == 4
        assert "has no probe yet" in done.err
        assert f"it was not started by `gpumem-tui run`: `gpumem-tui attach {pid}`" in done.err
        asked = program("attach", str(pid), env=env, alone=False)
        hint = f"there is no terminal to ask on: `gpumem-tui attach {pid} --yes`"
        assert (asked.code, asked.err) == (2, f"gpumem-tui: {hint}\n")
        assert not folder.exists()
        done = program("attach", str(pid), "--yes", env=env, alone=False)
        assert (done.code, done.err) == (0, "")
        assert "its main thread stood still for" in done.out
        [sample] = watched(folder, pid, lines=1)
        assert [sample["buckets"][name] for name in ("parameters", "gradients", "optimizer")] == counted
        assert sample["entry"] == "attach"


def test_a_process_that_was_attached_to_is_waited_for(program: Program, folder: Path) -> None:
    """Until it steps, or ends; `attach` names `watch` for what comes next."""
    folder.mkdir(mode=0o700)
    with running("import time; time.sleep(600)", folder) as process:
        host = hosts.find(process.pid)
        assert host is not None
        host.files.attached.touch(0o600)
        env = {**os.environ, "GPUMEM_TUI_DIR": str(folder)}
        command = [sys.executable, "-m", "gpumem_tui", "watch", str(process.pid), "--interval", "0.1"]
        with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as watching:
            assert watching.stderr is not None
            said = watching.stderr.readline()
            assert said.endswith("the probe is in it, but torch is not imported; waiting for its next step, ctrl+c "
                                 "ends it\n")  # fmt: skip
            RingFile(folder, this_process(pid=host.pid, start_ticks=host.start_ticks)).sample(RECORD)
            assert watching.poll() is None
            process.kill()
            process.wait()
            assert watching.wait(DEADLINE_S) == 0


@pytest.mark.slow
def test_run_says_how_one_ended_that_could_not_say_it(program: Program, folder: Path) -> None:
    """Here a shell continues as if nothing had been."""
    script = folder.parent / "killed.py"
    script.write_text(KILLED)
    command = f"{sys.executable} {script}; true"
    done = program("run", "sh", "-c", command, env={"GPUMEM_TUI_DIR": str(folder)})
    assert done.code == 0
    [line] = [line for line in done.err.splitlines() if line.startswith("gpumem-tui: ")]
    assert ": killed" in line


@pytest.mark.slow
def test_after_memory_ran_out(program: Program, folder: Path) -> None:
    env = {"GPUMEM_TUI_DIR": str(folder)}
    done = program("run", sys.executable, "-c", RUN_OUT, env=env)
    assert done.code == 1
    assert "torch.OutOfMemoryError" in done.err
    assert ": out of memory; `gpumem-tui watch " in done.err.splitlines()[-1]
    [ring] = folder.glob("*.ring")
    pid = ring.name.partition("-")[0]
    done = program("watch", pid, env=env, alone=False)
    assert done.code == 0
    assert ": out of memory; the last step seen was 3" in done.out
    assert "the failed request: about 2.00 GiB" in done.out
    body = json.loads(program("watch", "--post-mortem", "--json", env=env, alone=False).out)
    assert (body["pid"], body["fatal"], body["requested_bytes"], body["device"]) == (int(pid), True, 2 << 30, 0)


def test_the_next_run_clears_away_what_is_old(program: Program, folder: Path) -> None:
    env = {"GPUMEM_TUI_DIR": str(folder)}
    old = RingFile(folder, gone(started_ns=0))
    old.sample(replace(RECORD, wall_ns=0))
    assert program("run", "true", env=env).code == 0
    assert not old.path.exists()


def test_nothing_to_show(program: Program, folder: Path) -> None:
    env = {"GPUMEM_TUI_DIR": str(folder)}
    gone = str(2**22 - 1)
    done = program("watch", gone, env=env, alone=False)
    assert (done.code, done.err) == (
        2,
        f"gpumem-tui: there is no process {gone}, and none that ended has left anything; {LIST_LIVING}\n",
    )
    done = program("look", str(os.getpid()), env=env, alone=False)
    assert done.code == 4
    assert "has no probe yet" in done.err
    done = program("attach", gone, "--yes", env=env, alone=False)
    assert (done.code, done.err) == (4, f"gpumem-tui: there is no process {gone}; {LIST_LIVING}\n")
    done = program("watch", "--post-mortem", env=env, alone=False)
    assert (done.code, done.err) == (0, "gpumem-tui: no process that was watched has run out of memory\n")
    assert not folder.exists()
