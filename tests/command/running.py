"""Runs the real program on commands of users: scripts written into a folder, followed on the simulated GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import run_here
from tests.sharing import WarmPython

TIMEOUT_S = 300

BLOCK = """\
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            return x + self.down(F.gelu(self.up(x)))

"""
"""The head of scripts that import torch's `nn` and `functional` (as F) and set their WIDTH."""


def needs(*libraries: str) -> pytest.MarkDecorator:
    """Skip where one of them is not installed. None is imported: every test process collects, for seconds at a time."""
    missing = [library for library in libraries if importlib.util.find_spec(library) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed here: {', '.join(missing)}")


@dataclass(frozen=True)
class Finished:
    """How the program ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        assert self.code == 0, self.stderr[-2000:]
        body: dict[str, Any] = json.loads(self.stdout)
        return body

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The JSON lines on stdout."""
        return [json.loads(line) for line in self.stdout.splitlines()]

    @property
    def complaint(self) -> str:
        """The last line on stderr: the error that a user reads."""
        return self.stderr.splitlines()[-1] if self.stderr else ""


@dataclass(frozen=True)
class Project:
    """A user's folder with scripts in it. `python` is what that word represents in a command."""

    folder: Path
    python: str = field(default_factory=WarmPython.path)

    def write(self, name: str, text: str) -> Path:
        """Put a file into it."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def run(self, *arguments: str, environment: Mapping[str, str] | None = None, piped: str = "") -> Finished:
        """`gpumem-tui` with these arguments, in this folder; `piped` is its standard input.

        In this process, unless it has an `environment`, perhaps of no variables, or an input of its own: its
        interpreters serve the next run.
        """
        if environment is None and not piped:
            here = run_here(self.folder, arguments, {})
            return Finished(here.code, here.out, here.err)
        done = subprocess.run(
            [WarmPython.path(), "-m", "gpumem_tui", *arguments],
            executable=sys.executable,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **(environment or {})},
            input=piped,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    def predict(self, *words: str, gpu: str = "a100-80gb", options: tuple[str, ...] = ()) -> Finished:
        """`gpumem-tui predict --json` on a command; `python` represents this interpreter."""
        return self.run("predict", "--json", "--gpu", f"sim:{gpu}", *options, "--", *self._with_its_python(words))

    def search(self, *words: str, gpu: str = "a100-80gb", options: tuple[str, ...] = ()) -> Finished:
        """`gpumem-tui search --json` on a command; `python` represents this interpreter."""
        return self.run("search", "--json", "--gpu", f"sim:{gpu}", *options, "--", *self._with_its_python(words))

    def plan(self, *words: str, gpu: str = "a100-80gb", options: tuple[str, ...] = ()) -> Finished:
        """`gpumem-tui plan --json` on a command; `python` represents this interpreter."""
        return self.run("plan", "--json", "--gpu", f"sim:{gpu}", *options, "--", *self._with_its_python(words))

    def _with_its_python(self, words: tuple[str, ...]) -> list[str]:
        return [self.python if word == "python" else word for word in words]
