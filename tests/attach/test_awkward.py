"""Processes that an attach might promise something that cannot come: each gets in, or gets one clear line."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gpumem_tui.attach.running import AttachFailed, StartsLater, attach
from gpumem_tui.attach.target import LIST_LIVING, AttachRefused, inspect
from gpumem_tui.watch import hosts
from tests.attach import loops
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="attaching works on x86-64 only")

JOINING = """
import threading
def train():
    while True: sum(range(1000))
thread = threading.Thread(target=train, daemon=True)
thread.start()
thread.join()
"""
NOTEBOOK = """
import select, sys
waiting = select.epoll()
waiting.register(0, select.EPOLLIN)
print('idle', flush=True)
while waiting.poll():
    exec(sys.stdin.readline())
"""
"""As `ipykernel` waits for a cell: in epoll_wait, for as long as nobody runs one."""

IMPORTING = """
import os, time
from importlib.machinery import ModuleSpec
print('importing', flush=True)
while not os.path.exists('GO'): time.sleep(0.01)
"""
LOADING = """
import os, torch, torch.utils.data
class Data(torch.utils.data.Dataset):
    def __len__(self): return 1000000
    def __getitem__(self, index):
        if index == 0: print(os.getpid(), flush=True)
        return 0.0
for batch in torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context='fork'): pass
"""
FORKED = """
import os, time
import gpumem_tui
gpumem_tui.attach()
child = os.fork()
if child: print(child, flush=True)
while True: time.sleep(0.001)
"""


def reason(pid: int, timeout_s: float = DEADLINE_S) -> AttachFailed | AttachRefused:
    """Why a process cannot be attached to."""
    with pytest.raises((AttachFailed, AttachRefused)) as caught:
        attach(inspect(pid), timeout_s)
    assert isinstance(caught.value, AttachFailed | AttachRefused)
    assert str(caught.value).isprintable()
    assert isinstance(caught.value, (AttachFailed, AttachRefused))
    return caught.value


@pytest.mark.parametrize("python", loops.interpreters())
def test_a_main_thread_in_join_while_another_trains(python: str, tmp_path: Path) -> None:
    """Its wait is interrupted, as a signal would interrupt it, and begun again by Python."""
    with loops.running(JOINING, tmp_path / "probes", python) as program:
        time.sleep(0.2)
        assert not attach(inspect(program.pid), DEADLINE_S).has_torch
        assert program.poll() is None


def test_an_idle_notebook_starts_the_probe_at_the_next_cell(tmp_path: Path) -> None:
    (tmp_path / "ipykernel_launcher.py").write_text(f"{loops.LET_US_TRACE}\n{NOTEBOOK}")
    with subprocess.Popen(
        [sys.executable, "-m", "ipykernel_launcher", "-f", "kernel.json"],
        cwd=tmp_path, env={**os.environ, "GPUMEM_TUI_DIR": str(tmp_path / "probes")},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as kernel:  # fmt: skip
        try:
            assert kernel.stdin is not None
            assert kernel.stdout is not None
            assert kernel.stdout.readline() == "idle\n"
            said = reason(kernel.pid)
            assert isinstance(said, StartsLater)
            assert str(said).endswith("the probe starts at the next cell; run a cell")
            kernel.stdin.write("import sys; print('gpumem_tui' in sys.modules, flush=True)\n")
            kernel.stdin.flush()
            assert kernel.stdout.readline() == "True\n"
        finally:
            kernel.kill()


def test_torch_that_is_just_being_imported_is_waited_for(tmp_path: Path) -> None:
    go = tmp_path / "go"
    (tmp_path / "torch.py").write_text(IMPORTING.replace("GO", str(go)))
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport torch\nprint('imported', flush=True)\n{loops.BUSY}"
    )
    with loops.running(code, tmp_path / "probes") as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "importing\n"
        said = reason(program.pid, 0.5)
        assert isinstance(said, StartsLater)
        assert str(said).endswith("the probe starts when that is done; `gpumem-tui watch` shows it then")
        threading.Timer(0.5, go.touch).start()
        said = reason(program.pid)  # this torch is too little for a probe, which shows that it waited for it
        assert "the probe could not start: ModuleNotFoundError" in str(said)


@pytest.mark.slow
def test_a_worker_that_loads_data(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with loops.running(LOADING, tmp_path / "probes") as program:
        assert program.stdout is not None
        worker = int(program.stdout.readline())
        said = reason(worker)
        assert f"PID {worker} (" in str(said)
        assert "is a DataLoader worker, which loads batches and trains nothing; attach to its parent" in str(said)
        assert [host.pid for host in said.instead] == [program.pid]


def test_a_forked_child_has_the_probe_of_its_parent(tmp_path: Path) -> None:
    with loops.running(FORKED, tmp_path / "probes") as program:
        assert program.stdout is not None
        child = int(program.stdout.readline())
        try:
            assert attach(inspect(child), DEADLINE_S).was_there
        finally:
            os.kill(child, 9)


def test_two_attaches_at_once(tmp_path: Path) -> None:
    """Both get in; only one of them brings the probe."""
    with loops.running(loops.BUSY, tmp_path / "probes") as program:
        attached = []
        threads = [
            threading.Thread(target=lambda: attached.append(attach(inspect(program.pid), DEADLINE_S))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(attached) == 4
        assert sum(one.was_there for one in attached) == 3
        assert program.poll() is None
    left = {path.suffix for path in (tmp_path / "probes").glob("*attach*")}
    assert left <= {".attached"}, "no answer, only that it was attached to"


def test_python_2() -> None:
    old = list((Path.home() / ".pyenv" / "versions").glob("2.7.*/bin/python2.7"))
    if not old:
        pytest.skip("no Python 2.7 is installed here")
    code = "import sys\nsys.stdout.write('ready\\n'); sys.stdout.flush()\nwhile True: sum(range(1000))"
    with subprocess.Popen([old[0], "-c", code], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        program.stdout.readline()
        assert str(reason(program.pid)).endswith(
            "runs Python 2.7; the probe needs 3.9 or later; train with a newer Python"
        )
        program.kill()


def test_a_thread_of_the_kernel() -> None:
    threads = [host for host in hosts.every() if host.is_kernel_thread]
    if not threads:
        pytest.skip("this container shows no threads of the kernel")
    assert str(reason(threads[0].pid)).endswith(f" is a thread of the kernel, no Python process; {LIST_LIVING}")


TRAINER = "import sys, time\nsys.path.insert(0, sys.argv[1])\nimport ctypes\nctypes.CDLL(sys.argv[1] + '/libtorch_cpu.so')\nprint('up', flush=True)\ntime.sleep(60)"  # noqa: E501
LAUNCHER = "import subprocess, sys\nsubprocess.run([sys.executable, 'train.py', sys.argv[2]])"


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "wrapper.sh"])
def test_a_launcher_names_those_that_train(launcher: str, tmp_path: Path) -> None:
    """So that the test need not start torch, the trainer has loaded a library of that name and nothing more."""
    (tmp_path / "empty.c").write_text("int nothing;")
    subprocess.run(["cc", "-shared", "-o", tmp_path / "libtorch_cpu.so", tmp_path / "empty.c"], check=True)
    (tmp_path / "train.py").write_text(TRAINER)
    command = [sys.executable, launcher, "launch", str(tmp_path)]
    (tmp_path / launcher).write_text(LAUNCHER)
    if launcher.endswith(".sh"):
        (tmp_path / launcher).write_text(f"{sys.executable} train.py {tmp_path}; true")
        command = ["bash", launcher]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "up\n"
        [child] = hosts.descendants(program.pid)
        try:
            said = reason(program.pid)
            assert [host.pid for host in said.instead] == [child.pid]
            assert f"attach to PID {child.pid} (" in str(said)
            why = "no Python process" if launcher.endswith(".sh") else "starts the processes that train"
            assert why in str(said)
        finally:
            os.kill(child.pid, 9)
            program.kill()


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("/usr/bin/python3 -u /usr/bin/torchrun --nproc 2 train.py", "torchrun"),
        ("python -m torch.distributed.run train.py", "torch.distributed.run"),
        ("python3.11 -X dev -W ignore train.py", "train"),
        ("python -Bc pass torchrun", ""),
        ("/opt/bin/accelerate launch train.py", "accelerate"),
        ("python -m ipykernel_launcher -f x.json", "ipykernel_launcher"),
        ("python", ""),
        ("", ""),
    ],
)
def test_what_a_python_runs(command: str, name: str) -> None:
    assert hosts.script(tuple(command.split())) == name
