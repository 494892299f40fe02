"""Python programs that run until they are ended, to attach to."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534

BUSY = "while True: sum(range(1000))"
"""A main thread that never leaves Python."""

ALLOCATING = """
import threading
def allocate():
    while True:
        blocks = [bytes(1000 + size) for size in range(100)]
for _ in range(7):
    threading.Thread(target=allocate, daemon=True).start()
while True:
    sum(range(1000))
"""
"""Seven threads that keep the allocator's locks busy next to it."""

COMPUTING = """
import math, os, time
def compute():
    return sum(math.sin(step) ** 2 / (step + 0.1) for step in range(100))
first, wrong = compute(), 0
while not os.path.exists('GO'):
    wrong += compute() != first
    time.sleep(0.001)
print(wrong, 'wrong')
"""
"""Computes with floats and sleeps in system calls until there is a file GO; shows how often the result differed."""


LET_US_TRACE = "import ctypes; ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(2**64 - 1), 0, 0, 0)"
"""PR_SET_PTRACER: where only a parent may attach (kernel.yama.ptrace_scope = 1), this program lets anyone."""


def interpreters() -> list[str]:
    """The Pythons from 3.9 on that are installed here: this one, the system's, and those of pyenv."""
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob("3.*/bin/python3"))
    found = [sys.executable, "/usr/bin/python3", *map(str, pyenv)]
    return [path for path in dict.fromkeys(found) if _minor(path) >= 9]


def _minor(path: str) -> int:
    """From the name of the program behind the link; 0 if missing."""
    match = re.fullmatch(r"python3\.(\d+)", Path(path).resolve().name)
    return int(match[1]) if match is not None else 0


@contextmanager
def running(
    code: str, folder: Path, python: str = sys.executable, user: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A program that runs; what it prints can be read from it. Its probe publishes in `folder`."""
    process = subprocess.Popen(
        [python, "-c", f"{LET_US_TRACE}\nprint('ready', flush=True)\n{code}"],
        env={**os.environ, "GPUMEM_TUI_DIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        user=user,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def contained(code: str, folder: Path) -> Iterator[int]:
    """As `running`, with process numbers and a `folder` of its own, as in a container; gives the pid that it has here.

    Skips the test where this user cannot make a container.
    """
    folder.mkdir()
    isolate = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*isolate, "true"], capture_output=True).returncode != 0:
        pytest.skip("no container can be made here")
    mount = 'mount -t tmpfs private "$0" && exec "$@"'
    program = [sys.executable, "-c", f"{LET_US_TRACE}\nprint('ready', flush=True)\n{code}"]
    with subprocess.Popen(
        [*isolate, "sh", "-c", mount, str(folder), *program],
        env={**os.environ, "GPUMEM_TUI_DIR": str(folder / "probes")},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        finally:
            process.kill()


def as_nobody(ask: Callable[[], str]) -> str:
    """A function's answer when another user asks; in a process of that user."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writer, ask().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        answer = file.read()
    os.waitpid(pid, 0)
    return answer
