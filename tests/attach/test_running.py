"""Attaching to Python programs that run. x86-64 Linux that lets us trace our children."""

from __future__ import annotations

import os
import platform
import signal
import tempfile
from pathlib import Path

import pytest

from gpumem_tui.attach import ptrace, running
from gpumem_tui.attach.launch import why_silent
from gpumem_tui.attach.running import AttachFailed, attach
from gpumem_tui.attach.target import AttachRefused, Target, inspect
from gpumem_tui.memory import Unknown
from gpumem_tui.watch import hosts
from tests.attach import loops
from tests.waiting import DEADLINE_S, wait_for_file, wait_until

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="attaching works on x86-64 only")


@pytest.mark.parametrize("code", [loops.BUSY, loops.ALLOCATING])
def test_the_probe_gets_into_a_running_program(code: str, tmp_path: Path) -> None:
    with loops.running(code, tmp_path / "probes") as program:
        attached = attach(inspect(program.pid), DEADLINE_S)
        assert isinstance(attached.pause_s, float)
        assert 0 < attached.pause_s < attached.seconds
        assert not attached.has_torch
        assert program.poll() is None
        host = hosts.find(program.pid)
        assert host is not None
        assert why_silent(host) == "the probe is in it, but torch is not imported"


def test_a_program_computes_and_ends_as_if_nobody_had_attached(tmp_path: Path) -> None:
    """Its floating point registers, the sleep that was interrupted and its exit code are its own."""
    go = tmp_path / "go"
    with loops.running(loops.COMPUTING.replace("GO", str(go)), tmp_path / "probes") as program:
        target = inspect(program.pid)
        for _ in range(20):
            running._inject(target, "pass")
        go.touch()
        printed, complained = program.communicate(timeout=DEADLINE_S)
    assert (printed, complained, program.returncode) == ("0 wrong\n", "", 0)


def test_what_goes_wrong_inside_stays_there_and_binds_no_name(tmp_path: Path) -> None:
    code = """
import os, time
before = set(globals()) | {'before', 'after'}
while not os.path.exists('PATH'): time.sleep(0.01)
after = set(globals())
print(after - before)
""".replace("PATH", str(tmp_path / "go"))
    folder = tmp_path / "probes"
    folder.mkdir(mode=0o755)  # a folder that is open to others
    with loops.running(code, folder) as program:
        with pytest.raises(AttachRefused, match=r"could not publish: .* is open to other users"):
            attach(inspect(program.pid), DEADLINE_S)
        folder.chmod(0o700)
        attach(inspect(program.pid), DEADLINE_S)
        (tmp_path / "go").touch()
        printed, complained = program.communicate(timeout=DEADLINE_S)
    assert (printed, complained, program.returncode) == ("set()\n", "", 0)


def test_a_probe_that_cannot_start_says_why(tmp_path: Path) -> None:
    code = "import sys, types; sys.modules['gpumem_tui'] = types.ModuleType('gpumem_tui')\n" + loops.BUSY
    with (
        loops.running(code, tmp_path / "probes") as program,
        pytest.raises(AttachFailed, match="the probe could not start: ModuleNotFoundError"),
    ):
        attach(inspect(program.pid), DEADLINE_S)


def test_a_main_thread_in_c_code_is_left_alone_and_the_wait_ends(tmp_path: Path) -> None:
    with loops.running("import time; time.sleep(60)", tmp_path / "probes") as program:
        with pytest.raises(
            AttachFailed, match="its main thread sleeps, and the probe starts when it is next in Python"
        ):
            attach(inspect(program.pid), 0.5)
        assert program.poll() is None
        assert inspect(program.pid).host.tracer_pid == 0


def test_an_interrupt_meant_for_the_program_reaches_it(tmp_path: Path) -> None:
    code = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
try:
    while True: time.sleep(0.001)
except KeyboardInterrupt:
    print('interrupted')
"""
    with loops.running(code, tmp_path / "probes") as program:
        running._inject(inspect(program.pid), running._statement("raise KeyboardInterrupt"))
        printed, _ = program.communicate(timeout=DEADLINE_S)
    assert printed == "interrupted\n"
    assert program.returncode == 0


def test_signals_that_come_meanwhile_are_not_lost(tmp_path: Path) -> None:
    """A timer fires a thousand times a second: none of its signals kills the program or is swallowed for good."""
    code = f"""
import signal
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
{loops.BUSY}
"""
    with loops.running(code, tmp_path / "probes") as program:
        target = inspect(program.pid)
        for number in range(20):
            running._inject(target, f"open({str(tmp_path / str(number))!r}, 'w').write('x')")
            wait_for_file(tmp_path / str(number))
        program.send_signal(signal.SIGTERM)
        assert program.wait(DEADLINE_S) == -signal.SIGTERM


def test_a_call_that_does_not_return_is_taken_back(tmp_path: Path) -> None:
    """As if the interpreter had been stopped while it holds the lock that the call wants."""
    go = tmp_path / "go"
    with loops.running(loops.COMPUTING.replace("GO", str(go)), tmp_path / "probes") as program:
        target = inspect(program.pid)
        libc = _function(target, "libc.so", "pause")
        answer = running._helper(
            ptrace.PtraceRequest(
                pid=program.pid,
                map_memory=target.map_memory,
                signal_return=target.signal_return,
                ready=target.is_ready,
                function=libc,
                callback=0,
                argument="",
            )
        )
        assert "did not stop in time" in answer["error"]
        go.touch()
        printed, complained = program.communicate(timeout=DEADLINE_S)
    assert (printed, complained, program.returncode) == ("0 wrong\n", "", 0)


def test_another_file_system_gets_the_probe_as_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a container: the program imports the probe from what was sent, not from our files."""
    folder = tmp_path / "probes"
    code = f"""
import os, sys, time
sys.meta_path[:] = [finder for finder in sys.meta_path if 'editable' not in str(finder)]  # as if we were not installed
sys.path[:] = [entry for entry in sys.path if not os.path.isdir(os.path.join(entry, 'gpumem_tui'))]
while 'gpumem_tui' not in sys.modules: time.sleep(0.01)
import gpumem_tui.probe.look, gpumem_tui.probe.probe  # all of it: a look imports more when it is asked for
print(gpumem_tui.__file__, flush=True)
{loops.BUSY}
"""
    with loops.running(code, folder) as program:
        target = inspect(program.pid)
        monkeypatch.setattr(type(target.host), "shares_files", property(lambda _: False))
        attach(target, DEADLINE_S)
        assert program.stdout is not None
        assert program.stdout.readline().startswith(f"{folder}/{program.pid}-")


def test_a_program_in_a_container(tmp_path: Path) -> None:
    with loops.contained(loops.BUSY, tmp_path / "private") as pid:
        target = inspect(pid)
        assert not target.host.shares_files
        assert target.host.inner_pid == 1
        attach(target, DEADLINE_S)
        assert not (tmp_path / "private" / "probes").exists()
        assert list(target.host.files.directory.glob("*.probe-*.zip"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a program of another user")
def test_a_program_of_another_user_runs_the_probe_with_its_own_rights() -> None:
    """It cannot see our files, and what it writes is its own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as home:  # pytest's own folders are closed to others
        os.chown(home, loops.NOBODY, loops.NOBODY)
        folder = Path(home) / "probes"
        with loops.running(loops.BUSY, folder, "/usr/bin/python3", user=loops.NOBODY) as program:
            attach(inspect(program.pid), DEADLINE_S)
            [archive] = folder.glob("*.probe-*.zip")
            assert archive.stat().st_uid == loops.NOBODY


@pytest.mark.parametrize("problem", [None, RuntimeError("remote debugging is disabled")])
def test_python_3_14_is_asked_itself(
    problem: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `sys.remote_exec`, which runs a file's code at a safe point; here that is done by the other way in."""
    monkeypatch.setattr(running, "can_remote_exec", lambda _: True)
    with loops.running(loops.BUSY, tmp_path / "probes") as program:
        target = inspect(program.pid)

        def remote_exec(_pid: int, script: str) -> None:
            if problem is not None:
                raise problem
            running._inject(target, f"exec(open({script!r}).read(), {{}})")

        if problem is not None:
            with pytest.raises(Exception, match="does not take it: remote debugging is disabled"):
                attach(target, DEADLINE_S, remote_exec)
        else:
            assert isinstance(attach(target, DEADLINE_S, remote_exec).pause_s, Unknown)


def test_a_probe_that_starts_after_the_timeout_finds_its_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter reads the script when it is next in Python, which may be long after we gave up; then it goes."""
    monkeypatch.setattr(running, "can_remote_exec", lambda _: True)
    scripts: list[Path] = []
    with loops.running(loops.BUSY, tmp_path / "probes") as program:
        target = inspect(program.pid)
        with pytest.raises(running.AttachFailed, match=r"has not answered within 0\.1 s"):
            attach(target, 0.1, lambda _, script: scripts.append(Path(script)))
        (script,) = scripts
        assert script.exists()
        running._inject(target, f"exec(open({str(script)!r}).read(), {{}})")
        wait_until(lambda: not script.exists())


@pytest.mark.parametrize(
    ("code", "said"), [("print('broken \\x1b[2J')", "broken"), ("pass", "without output")], ids=["words", "silence"]
)
def test_a_helper_that_dies_is_one_line(code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = tmp_path / "helper.py"
    helper.write_text(f"import sys\n{code}\nsys.exit(3)\n")
    with loops.running(loops.BUSY, tmp_path / "probes") as program:
        target = inspect(program.pid)
        monkeypatch.setattr(ptrace, "__file__", str(helper))
        with pytest.raises(running.AttachFailed) as raised:
            attach(target, DEADLINE_S, None)
    assert str(raised.value).startswith(f"the program that attaches ended (code 3): {said}")
    assert str(raised.value).isprintable()


@pytest.mark.bench
@pytest.mark.parametrize("code", [loops.BUSY, loops.ALLOCATING], ids=["one thread", "allocating threads"])
@pytest.mark.parametrize("python", loops.interpreters())
def test_twenty_of_twenty(python: str, code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`pytest -m bench -s -n 0 tests/attach`: twenty programs each, attached to once."""
    pauses_s = []
    for attempt in range(20):
        with loops.running(code, tmp_path / str(attempt), python) as program:
            attached = attach(inspect(program.pid), DEADLINE_S)
            assert isinstance(attached.pause_s, float)
            pauses_s.append(attached.pause_s)
            assert program.poll() is None
    pauses_s.sort()
    with capsys.disabled():
        print(f"\n{python}: 20 of 20, pause {pauses_s[10] * 1e3:.1f} ms median, {pauses_s[-1] * 1e3:.1f} ms worst")


def _function(target: Target, library: str, name: str) -> int:
    from gpumem_tui.attach.target import mappings, symbols

    first = {mapping.path: mapping for mapping in reversed(mappings(target.host.proc))}
    path = next(path for path in first if library in path)
    return symbols(target.host.proc, first[path], (name,))[name].address
