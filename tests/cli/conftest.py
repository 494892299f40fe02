"""The program, run as a user runs it; its outputs and its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO, TextIOWrapper
from pathlib import Path
from unittest.mock import patch

import pytest

from gpumem_tui.cli import main
from tests.sharing import WarmPython


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
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [WarmPython.path(), "-m", "gpumem_tui", *arguments],
            executable=sys.executable,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )

    def __call__(self, *arguments: str, env: dict[str, str] | None = None, alone: bool = True) -> Finished:
        """Run it to its end, in this process: its interpreter with torch serves the next run.

        With an `env`, part of which may be read as a process starts, in a process of its own, unless not `alone`.
        """
        if env is not None and alone:
            return self._alone(arguments, env)
        return run_here(self.folder, arguments, env or {})

    def _alone(self, arguments: tuple[str, ...], env: dict[str, str]) -> Finished:
        done = subprocess.run(
            [WarmPython.path(), "-m", "gpumem_tui", *arguments],
            executable=sys.executable,
            cwd=self.folder,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        return Finished(done.returncode, done.stdout, done.stderr)


def run_here(folder: Path, arguments: Sequence[str], env: Mapping[str, str]) -> Finished:
    """Run it to its end in this process, in a folder and with further variables."""
    out, err = (TextIOWrapper(BytesIO(), "utf-8", write_through=True) for _ in range(2))
    before = os.getcwd()
    os.chdir(folder)
    try:
        with (
            open(os.devnull) as nothing,
            patch.dict(os.environ, env),
            patch.multiple(sys, argv=["gpumem-tui", *arguments], stdin=nothing, stdout=out, stderr=err),
            pytest.raises(SystemExit) as ended,
        ):
            main()
    finally:
        os.chdir(before)
    assert isinstance(ended.value.code, int)
    return Finished(ended.value.code, _written(out), _written(err))


def _written(stream: TextIOWrapper) -> str:
    stream.flush()
    buffer = stream.buffer
    assert isinstance(buffer, BytesIO)
    return buffer.getvalue().decode()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The program in an empty folder of its own."""
    return Program(tmp_path_factory.mktemp("cwd"))
