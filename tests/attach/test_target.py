"""Which processes can be attached to; every refusal gives the reason and what would help."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec import structs

from gpumem_tui.attach import running, target
from gpumem_tui.attach.target import LIST_LIVING, AttachRefused, Mapping, inspect, symbols, why_not_allowed
from gpumem_tui.watch import hosts
from tests.attach import loops
from tests.waiting import wait_until

on_x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="attaching works on x86-64 only")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def refusal(pid: int) -> str:
    with pytest.raises(AttachRefused) as caught:
        inspect(pid)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def this_host() -> hosts.Host:
    host = hosts.find(os.getpid())
    assert host is not None
    return host


@contextmanager
def child(*command: str, user: int | None = None) -> Iterator[int]:
    """Another program, until the block ends."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, user=user, cwd="/")
    started = shutil.which(command[0])
    assert started is not None
    there, program = Path(f"/proc/{process.pid}"), os.path.realpath(started)
    # It is on its way there: its line comes after its pages.
    wait_until(lambda: program in (there / "maps").read_text() and bool((there / "cmdline").read_bytes()))
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("python", loops.interpreters())
def test_the_version_and_the_functions_are_found(python: str, tmp_path: Path) -> None:
    with loops.running(loops.BUSY, tmp_path, python) as program:
        target = inspect(program.pid)
    assert target.python is not None
    assert Path(python).resolve().name == f"python{target.python[0]}.{target.python[1]}"
    assert len({target.is_ready, target.add_pending, target.run_string}) == 3


def test_no_such_process() -> None:
    assert refusal(2**22 - 1) == f"there is no process {2**22 - 1}; {LIST_LIVING}"


def test_no_python() -> None:
    with child("sleep", "60") as pid:
        assert refusal(pid) == f"PID {pid} (sleep 60) is no Python process; {LIST_LIVING}"


def test_a_python_that_is_too_old(tmp_path: Path) -> None:
    old = list((Path.home() / ".pyenv" / "versions").glob("3.[678].*/bin/python3"))
    if not old:
        pytest.skip("no Python before 3.9 is installed here")
    with loops.running(loops.BUSY, tmp_path, str(old[0])) as program:
        assert "the probe needs 3.9 or later" in refusal(program.pid)


def test_a_static_build(tmp_path: Path) -> None:
    """A program that is called Python and exports nothing."""
    source = tmp_path / "main.c"
    source.write_text("#include <unistd.h>\nint main(void) { return pause(); }\n")
    program = tmp_path / "python3.11"
    subprocess.run(["cc", "-o", program, source], check=True)
    with child(str(program)) as pid:
        assert "exports no functions (a static build); start it with `gpumem-tui run" in refusal(pid)


def test_an_interpreter_that_was_replaced_on_disk(tmp_path: Path) -> None:
    source = tmp_path / "main.c"
    source.write_text("#include <unistd.h>\nint main(void) { return pause(); }\n")
    program = tmp_path / "python3.11"
    subprocess.run(["cc", "-o", program, source], check=True)
    with child(str(program)) as pid:
        program.unlink()
        assert "was replaced since it started" in refusal(pid)


def test_a_stopped_process(tmp_path: Path) -> None:
    with loops.running(loops.BUSY, tmp_path) as program:
        program.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, program.pid, os.WSTOPPED | os.WNOWAIT)
        assert refusal(program.pid).endswith(f"is stopped; let it continue first: `kill -CONT {program.pid}`")


def test_a_process_that_has_ended() -> None:
    program = subprocess.Popen(["true"])
    os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert "has ended" in refusal(program.pid)
    program.wait()


SEIZE = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
assert libc.ptrace(0x4206, int(sys.argv[1]), None, None) == 0
print('ready', flush=True)
sys.stdin.read()
"""


@contextmanager
def debugged(pid: int, script: Path) -> Iterator[int]:
    """Another program, called like `script`, that debugs a process until the block ends."""
    script.parent.mkdir(exist_ok=True)
    script.write_text(SEIZE)
    command = [sys.executable, str(script), str(pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as debugger:
        assert debugger.stdout is not None
        assert debugger.stdout.readline() == "ready\n"
        yield debugger.pid
        assert debugger.stdin is not None
        debugger.stdin.close()


class Clock:
    """The clock of a module that passes only as that sleeps, and not for ever."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        assert self.now_s < 60, "it waits for ever"


@on_x86_64
def test_a_process_that_is_being_debugged(tmp_path: Path) -> None:
    with loops.running(loops.BUSY, tmp_path) as program, debugged(program.pid, tmp_path / "gdb.py") as debugger:
        assert f"is being debugged by PID {debugger}" in refusal(program.pid)


@on_x86_64
def test_another_attach_that_never_ends_is_waited_for_ten_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    for module in (target, running):
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "_POLL_S", 3.0)
    with loops.running(loops.BUSY, tmp_path) as program:
        found = inspect(program.pid)
        with debugged(program.pid, tmp_path / "attach" / "ptrace.py") as debugger:
            assert f"is being debugged by PID {debugger}" in refusal(program.pid)
            assert clock.now_s == 12.0
            with pytest.raises(AttachRefused, match="the kernel does not let us attach"):
                running._inject(found, "pass")
            assert clock.now_s == 12.0 + 21.0, "three attempts after the deadline"


@as_root
def test_another_user(tmp_path: Path) -> None:
    with loops.running(loops.BUSY, tmp_path) as program:
        answer = loops.as_nobody(lambda: refusal(program.pid))
    remedy = f"run `sudo gpumem-tui attach {program.pid}`"
    assert f"belongs to user root, and only that user or root may attach; {remedy}" in answer


@as_root
def test_a_process_that_is_not_dumpable() -> None:
    """The kernel then gives its folder in /proc to root; as after set-uid."""
    code = "import ctypes, time; ctypes.CDLL(None).prctl(4, 0); print(flush=True); time.sleep(60)"
    with subprocess.Popen(
        ["/usr/bin/python3", "-c", code], stdout=subprocess.PIPE, user=loops.NOBODY, cwd="/"
    ) as program:
        assert program.stdout is not None
        program.stdout.readline()
        answer = loops.as_nobody(lambda: refusal(program.pid))
        program.kill()
    assert "is protected against debuggers (not dumpable)" in answer


@pytest.mark.parametrize(
    ("our_uid", "ptrace_scope", "protected", "expected"),
    [
        (1000, 1, False, "only a parent may attach to a process here (kernel.yama.ptrace_scope = 1); run `sudo"),
        (1000, 2, False, "only root may attach here (kernel.yama.ptrace_scope = 2); run `sudo"),
        (0, 3, False, "the kernel forbids attaching until the next boot (kernel.yama.ptrace_scope = 3); start it with"),
        (1000, 0, True, "is protected against debuggers (not dumpable); run `sudo"),
        (1000, 0, False, "in a container, give it `--cap-add SYS_PTRACE`"),
        (0, 1, False, "in a container, give it `--cap-add SYS_PTRACE`"),
        (1001, 1, False, "and only that user or root may attach"),
    ],
)
def test_why_the_kernel_refuses(our_uid: int, ptrace_scope: int, protected: bool, expected: str) -> None:
    host = structs.replace(this_host(), uid=1000)
    assert expected in str(why_not_allowed(host, our_uid, ptrace_scope, protected))


def test_a_process_that_cannot_be_looked_into_is_known_by_its_name(tmp_path: Path) -> None:
    """The folder has no exe and no maps, as where the kernel hides them."""
    host = structs.replace(this_host(), proc=tmp_path)
    named: list[tuple[str, tuple[str, ...], bool]] = [
        ("init", ("/sbin/init",), False),
        ("sshd", (), False),
        ("python3.11", (), True),
        ("pt_main_thread", ("/usr/bin/python3", "train.py"), True),
    ]
    for name, command, may_be in named:
        refused = str(why_not_allowed(structs.replace(host, name=name, command=command), 0, 0, False))
        assert ("is no Python process by its name" in refused) is not may_be
        assert ("SYS_PTRACE" in refused) is may_be


def test_a_process_s_own_words_cannot_break_the_line() -> None:
    with child("sleep", "60") as pid:
        host = hosts.find(pid)
        assert host is not None
        assert structs.replace(host, command=("a\n\x1b[31mb",)).title == f"PID {pid} (a  [31mb)"


def test_registers_of_the_saved_state_have_the_kernels_size() -> None:
    """`sizeof(struct user_regs_struct)` of x86-64."""
    from gpumem_tui.attach.ptrace import _Registers

    assert ctypes.sizeof(_Registers) == 27 * 8


def test_memory_that_cannot_be_read_is_a_refusal(tmp_path: Path) -> None:
    """The kernel answers EIO where a page goes away meanwhile: here the addresses are looked up in another process."""
    with loops.running(loops.BUSY, tmp_path / "probes") as program, child("sleep", "60") as other:
        proc = tmp_path / "proc"
        folder = proc / str(program.pid)
        folder.mkdir(parents=True)
        for name in os.listdir(f"/proc/{program.pid}"):
            whose = other if name == "mem" else program.pid
            (folder / name).symlink_to(f"/proc/{whose}/{name}")
        with pytest.raises(AttachRefused, match=r"the memory of PID .* cannot be read: Input/output error"):
            inspect(program.pid, proc)


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """Whoever waits at the other end of a pipe continues waiting."""
    pipe = tmp_path / "python"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.open("wb").close(), daemon=True)
    writer.start()
    wait_until(lambda: " S " in Path(f"/proc/self/task/{writer.native_id}/stat").read_text())
    assert symbols(Path("/proc/self"), Mapping(0, 4096, 0, str(pipe)), ("Py_IsInitialized",)) == {}
    writer.join(0.2)
    assert writer.is_alive()
    pipe.open("rb").close()
    writer.join()
