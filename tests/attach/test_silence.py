"""Where nothing is published, why: of real processes, as far as it can be told from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpumem_tui.attach.launch import SilenceNote, environment, silent_anywhere, silent_below, why_silent
from gpumem_tui.watch import hosts
from tests.waiting import wait_until

LOADS = "import ctypes, os, sys, time\nctypes.CDLL(os.environ['LIBRARY'])\n"
WAITS = "print(os.getpid(), flush=True)\ntime.sleep(60)\n"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So that no test need start torch: a library of its name, which is what tells from outside."""
    folder = tmp_path_factory.mktemp("torch")
    (folder / "empty.c").write_text("int nothing;")
    subprocess.run(["cc", "-shared", "-o", folder / "libtorch_cpu.so", folder / "empty.c"], check=True)
    return folder / "libtorch_cpu.so"


@contextmanager
def command(library: Path, *words: str) -> Iterator[tuple[int, hosts.Host]]:
    """A command as `gpumem-tui run` starts it; its pid, and the process that said its own."""
    variables = environment({**os.environ, "LIBRARY": str(library)})
    with subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            host = hosts.find(int(process.stdout.readline()))
            assert host is not None
            yield process.pid, host
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def reason(library: Path, *words: str) -> str:
    """The only line about a command."""
    with command(library, *words) as (pid, host):
        [line] = [line for line in silent_below(pid, ()) if line.startswith(host.title)]
        assert line.isprintable()
        return line.removeprefix(f"{host.title}: ").replace(str(host.pid), "PID")


def test_no_torch(library: Path) -> None:
    assert reason(library, sys.executable, "-c", f"import os, time\n{WAITS}") == "it has not imported torch"


def test_no_step_yet(library: Path) -> None:
    said = reason(library, sys.executable, "-c", LOADS + WAITS)
    assert said == "no optimizer has stepped in it yet: it loads or evaluates, or it is a script that never trains"


def test_the_probe_is_in_it_before_its_first_step(library: Path, tmp_path: Path) -> None:
    with command(library, "env", f"GPUMEM_TUI_DIR={tmp_path}", sys.executable, "-c", LOADS + WAITS) as (_, host):
        tmp_path.chmod(0o700)
        assert "the probe is in it" not in why_silent(host)
        host.files.attached.touch(0o600)
        assert why_silent(host) == "the probe is in it, but no optimizer has stepped since it came"


def test_a_wrapper_that_resets_the_environment(library: Path) -> None:
    code = f'exec env -u PYTHONPATH {sys.executable} -c "$0"'
    said = reason(library, "bash", "-c", code, LOADS + WAITS)
    assert said == "its environment was reset, PYTHONPATH is lost: `gpumem-tui attach PID`"


def test_a_child_of_such_a_wrapper_is_known_by_its_ancestors(library: Path) -> None:
    code = f'env -u PYTHONPATH {sys.executable} -c "$0"; true'
    with command(library, "bash", "-c", code, LOADS + WAITS) as (pid, host):
        assert host.pid != pid
        assert "its environment was reset" in why_silent(host)
        assert [found.pid for found in hosts.trainers(pid)] == [host.pid]
        others = {other.pid for other in hosts.every()} - {host.pid, host.parent_pid}
        assert silent_anywhere(others) == [f"{host.title}: {why_silent(host)}"]
        assert silent_anywhere({*others, host.pid}) == []
        assert silent_below(pid, {host.pid}) == []


def test_an_isolated_python(library: Path) -> None:
    said = reason(library, sys.executable, "-I", "-c", LOADS + WAITS)
    assert said == "`python -I` (isolated mode) keeps the probe out: `gpumem-tui attach PID`"


def test_a_fork(library: Path) -> None:
    code = f"{LOADS}\nif os.fork(): os.wait()\n{WAITS}"
    with command(library, sys.executable, "-c", code) as (pid, child):
        said = why_silent(child)
    assert said.startswith(f"it was forked from PID {pid} and has not stepped an optimizer")


def test_a_daemon_that_left_its_parent(library: Path) -> None:
    code = f"{LOADS}\nif os.fork(): time.sleep(60)\nos.setsid()\nif os.fork(): os._exit(0)\n{WAITS}"
    with command(library, sys.executable, "-c", code) as (pid, daemon):
        try:
            assert daemon.pid not in {host.pid for host in hosts.descendants(pid)} or daemon.parent_pid != 1
            assert any(line.startswith(daemon.title) for line in silent_below(pid, ()))
        finally:
            os.kill(daemon.pid, signal.SIGKILL)


def test_no_python_at_all() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        title = f"PID {process.pid} (sleep 60)"
        wait_until(lambda: Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")[:2] == [b"sleep", b"60"])
        assert silent_below(process.pid, ()) == [f"{title}: no Python process runs below it"]
        process.kill()


def test_it_is_said_once_and_not_before_its_time() -> None:
    now_s = [0.0]
    said: list[str] = []
    note = SilenceNote(60.0, lambda: ["one", "other"], said.append, clock=lambda: now_s[0])
    for second in (0.0, 59.0, 60.0, 61.0, 200.0):
        now_s[0] = second
        note.tick()
        assert said == ([] if second < 60 else ["one", "other"])
