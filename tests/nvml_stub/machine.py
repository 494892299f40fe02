"""A machine whose NVIDIA driver is the fake one: compile it, show it scenarios, run programs on it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.nvml_stub.scenario import Scenario

_SOURCE = Path(__file__).with_name("nvml.c")


def compile_stub(folder: Path, *options: str) -> Path:
    """Make `libnvidia-ml.so.1` in `folder`, for LD_LIBRARY_PATH; returns the library's path."""
    library = folder / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run(["cc", *flags, *options, "-o", library, _SOURCE], check=True)
    return library


@dataclass(frozen=True)
class FakeMachine:
    """The fake library, the scenario that it reads and the calls that it counts.

    Attributes:
        library: from `compile_stub`.
        folder: where the scenario and the counts are kept.
    """

    library: Path
    folder: Path

    @property
    def scenario_path(self) -> Path:
        """The scenario file, as NVML_STUB_SCENARIO names it."""
        return self.folder / "scenario.txt"

    @property
    def calls_path(self) -> Path:
        """Where the library counts calls, as NVML_STUB_CALLS names it."""
        return self.folder / "calls.txt"

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which a process meets this machine; add it to os.environ, or use it alone."""
        return {
            "LD_LIBRARY_PATH": str(self.library.parent),
            "NVML_STUB_SCENARIO": str(self.scenario_path),
            "NVML_STUB_CALLS": str(self.calls_path),
            "PATH": "/usr/bin:/bin",
        }

    def show(self, scenario: Scenario) -> None:
        """From the next NVML call on, this is what the machine looks like."""
        scenario.write(self.scenario_path)

    def run(self, code: str) -> str:
        """Run Python code on this machine in a fresh process; returns what it printed."""
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        return done.stdout

    def calls(self) -> dict[str, int]:
        """NVML calls by C function since the library was loaded."""
        if not self.calls_path.exists():
            return {}
        lines = (line.split() for line in self.calls_path.read_text(errors="replace").splitlines())
        return {words[0]: int(words[1]) for words in lines if len(words) == 2}
