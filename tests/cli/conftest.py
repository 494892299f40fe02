"""The installed program, run as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Finished:
    """One finished run of the program."""

    code: int
    out: str
    err: str


class Program:
    """`gpumem-tui` with no terminal and no NVIDIA driver."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Run it without waiting for its end."""
        command = [sys.executable, "-m", "gpumem_tui", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)

    def __call__(self, *arguments: str, env: dict[str, str] | None = None) -> Finished:
        command = [sys.executable, "-m", "gpumem_tui", *arguments]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        return Finished(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The program in an empty folder of its own."""
    return Program(tmp_path_factory.mktemp("cwd"))
