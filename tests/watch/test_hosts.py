"""Processes as /proc shows them, with any names and in any place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpumem_tui.probe.files import start_ticks
from gpumem_tui.text import shortened
from gpumem_tui.watch import hosts


def fake(proc: Path, pid: int, *, uid: int = 1000, inner_pid: int | None = None, name: str = "python") -> Path:
    """A process in a folder that represents /proc."""
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    spaces = f"{pid}" if inner_pid is None else f"{pid}\t{inner_pid}"
    (folder / "status").write_text(
        f"Name:\t{name}\nState:\tS (sleeping)\nTracerPid:\t7\nUid:\t0\t{uid}\t0\t0\nNSpid:\t{spaces}\n"
    )
    (folder / "stat").write_text(f"{pid} ({name}) S " + " ".join(["0"] * 18) + " 4242 0 0")
    (folder / "cmdline").write_bytes(b"python\0train.py\0--lr\0" + b"1e-3\0")
    return folder


def test_this_process() -> None:
    host = hosts.find(os.getpid())
    assert host is not None
    assert (host.pid, host.inner_pid, host.start_ticks) == (os.getpid(), os.getpid(), start_ticks())
    assert (host.uid, host.inner_uid, host.shares_files) == (os.geteuid(), os.geteuid(), True)
    assert os.getpid() in {other.pid for other in hosts.every()}


def test_no_such_process(tmp_path: Path) -> None:
    assert hosts.find(5, tmp_path) is None


def test_a_name_with_spaces_and_brackets(tmp_path: Path) -> None:
    fake(tmp_path, 5, name="a) b (c")
    host = hosts.find(5, tmp_path)
    assert host is not None
    assert (host.name, host.start_ticks, host.state, host.tracer_pid, host.uid) == ("a) b (c", 4242, "S", 7, 1000)
    assert host.command == ("python", "train.py", "--lr", "1e-3")


def test_a_process_of_a_container_with_its_own_users(tmp_path: Path) -> None:
    """User 100,005 here is user 5 there; its folder is named after the number that it knows."""
    folder = fake(tmp_path, 5, uid=100_005, inner_pid=1)
    (folder / "uid_map").write_text("         0     100000      65536\n")
    (folder / "ns").mkdir()
    (folder / "ns" / "mnt").symlink_to("mnt:[1]")
    (folder / "root").symlink_to("/")
    host = hosts.find(5, tmp_path)
    assert host is not None
    assert (host.inner_pid, host.inner_uid, host.shares_files) == (1, 5, False)
    assert host.inner_directory == Path("/tmp/gpumem-tui-5")
    assert host.files.ring == folder / "root/tmp/gpumem-tui-5/1-4242.ring"


def test_its_own_choice_of_a_folder(tmp_path: Path) -> None:
    folder = fake(tmp_path, 5)
    (folder / "environ").write_bytes(b"A=b=c\0GPUMEM_TUI_DIR=/scratch/probes\0odd\0")
    host = hosts.find(5, tmp_path)
    assert host is not None
    assert host.environ() == {"A": "b=c", "GPUMEM_TUI_DIR": "/scratch/probes"}
    assert host.files.ring == Path("/scratch/probes/5-4242.ring")


def test_what_a_process_calls_itself_stays_one_plain_line() -> None:
    assert shortened("\x1b[2J\nx" + "y" * 100, 10) == " [2J xyyy…"


def test_a_name_that_is_no_text_hides_no_process() -> None:
    """The kernel cuts names after 15 bytes, in the middle of a character if need be."""
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b'train\\xe8\\xae'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            found = hosts.find(process.pid)
            assert found is not None
            assert found.name.startswith("train")
            assert process.pid in {host.pid for host in hosts.every()}
        finally:
            process.kill()
