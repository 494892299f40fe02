"""The program that attaches is killed in the middle of its work: the process lives on as if nobody had come."""

from __future__ import annotations

import json
import platform
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpumem_tui.attach import ptrace, running
from gpumem_tui.attach.target import Target, inspect
from tests.attach import loops
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="attaching works on x86-64 only")

KILLED = """
import importlib.util, os, pathlib, signal, types
spec = importlib.util.spec_from_file_location('helper', {helper!r})
helper = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helper)
ptrace, calls = helper._libc.ptrace, []
def counted(*arguments):
    calls.append(arguments)
    if {when!r} == 'before' and len(calls) == {call}:
        os.kill(os.getpid(), signal.SIGKILL)
    result = ptrace(*arguments)
    if {when!r} == 'after' and len(calls) == {call}:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
helper._libc = types.SimpleNamespace(ptrace=counted)
helper.main()
pathlib.Path({count!r}).write_text(' '.join(str(call[0]) for call in calls))
"""
"""The helper, which kills itself at the given call of ptrace(2), and else shows which there were."""

VECTORS = """
#include <immintrin.h>
int lost(void) {
    __m256d held = {1, 2, 3, 4};
    for (long turn = 0; turn < 10000000; turn++) __asm__ volatile("" : "+x"(held));
    return held[0] != 1 || held[1] != 2 || held[2] != 3 || held[3] != 4;
}
"""
"""Whether a vector register (AVX) that is in use for a while loses what is in it."""

WAITING = {
    "computing and sleeping": "time.sleep(0.001); wrong += lost()",
    "waiting for a lock": "lock.acquire(timeout=0.05)",
}
RESUMING = {7, 24, 0x4207, 17}
"""PTRACE_CONT, PTRACE_SYSCALL, PTRACE_INTERRUPT, PTRACE_DETACH: after these, it matters when the helper dies."""


def vectors(folder: Path) -> str:
    """Python that defines `lost`; where the processor has no such registers, they cannot be lost."""
    if " avx " not in Path("/proc/cpuinfo").read_text():
        return "lost = int"
    library = folder / "vectors.so"
    (folder / "vectors.c").write_text(VECTORS)
    subprocess.run(["cc", "-O2", "-mavx", "-shared", "-fPIC", "-o", library, folder / "vectors.c"], check=True)
    return f"import ctypes; lost = ctypes.CDLL({str(library)!r}).lost"


def program_that(waits: str, folder: Path) -> str:
    """It computes until there is a file `go`, and then shows what it got wrong and which signals are blocked."""
    told = loops.COMPUTING.replace("GO", str(folder / "go")).replace("time.sleep(0.001)", WAITING[waits])
    told = told.replace("print(wrong, 'wrong')", "print(wrong, 'wrong', signal.pthread_sigmask(signal.SIG_BLOCK, []))")
    return f"import signal, threading\n{vectors(folder)}\nlock = threading.Lock()\nlock.acquire()\n{told}"


def attach_with(target: Target, helper: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Have something queued by that helper program; whether it lived to say that it did."""
    with monkeypatch.context() as patched:
        patched.setattr(ptrace, "__file__", str(helper))
        try:
            running._inject(target, "pass")
        except running.AttachFailed as failed:
            return "the program that attaches ended (code -9)" not in str(failed)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("waits", WAITING)
def test_it_is_killed_at_every_single_step(waits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper, count = tmp_path / "helper.py", tmp_path / "count"
    with loops.running(program_that(waits, tmp_path), tmp_path / "probes") as program:
        target = inspect(program.pid)

        def attached(when: str, call: int) -> bool:
            told = KILLED.format(helper=ptrace.__file__, when=when, call=call, count=str(count))
            helper.write_text(told)
            lived = attach_with(target, helper, monkeypatch)
            time.sleep(0.01)
            assert program.poll() is None, f"the program died of a helper killed {when} call {call}"
            return lived

        assert attached("never", 0)
        calls = [int(request) for request in count.read_text().split()]
        assert len(calls) > 20
        moments = [("before", call) for call in range(1, len(calls) + 1)]
        moments += [("after", call) for call, request in enumerate(calls, 1) if request in RESUMING]
        assert sum(attached(when, call) for when, call in moments) <= 6, "some attempts need a few calls less"
        (tmp_path / "go").touch()
        printed, complained = program.communicate(timeout=DEADLINE_S)
    assert (printed, complained, program.returncode) == ("0 wrong set()\n", "", 0)


@pytest.mark.slow
def test_it_is_killed_at_any_moment(tmp_path: Path) -> None:
    """From outside, next to seven threads that allocate; after that, it can be attached to as ever."""
    with loops.running(loops.ALLOCATING, tmp_path / "probes") as program:
        target = inspect(program.pid)
        request = json.dumps(running.request(target, "pass")).encode()
        moments = random.Random(12)
        for _ in range(30):
            helper = subprocess.Popen(
                [sys.executable, "-I", "-S", ptrace.__file__], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
            )
            assert helper.stdin is not None
            helper.stdin.write(request)
            helper.stdin.close()
            deadline = time.monotonic() + 0.2
            while tracer_of(program.pid) == 0 and helper.poll() is None and time.monotonic() < deadline:
                pass
            time.sleep(moments.uniform(0, 0.004))
            helper.send_signal(signal.SIGKILL)
            helper.wait()
            assert program.poll() is None
        assert running.attach(inspect(program.pid), DEADLINE_S)
        program.send_signal(signal.SIGTERM)
        assert program.wait(DEADLINE_S) == -signal.SIGTERM


def tracer_of(pid: int) -> int:
    """Who traces a process now; 0 for nobody."""
    with open(f"/proc/{pid}/status") as status:
        return int(next(line for line in status if line.startswith("TracerPid")).split()[1])
