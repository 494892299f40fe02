"""Where a session runs: the GPU, the interpreter with its packages, and the folder for what is written on the way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gpumem_tui.catalog.loader import find_gpu, gpus, is_same_product
from gpumem_tui.memory import GIB
from tests.gpu.processes import Ended, Started, run
from tests.gpu.rows import ROOT, Interpreter
from tests.nvml_stub.machine import FakeMachine, compile_stub
from tests.nvml_stub.scenario import FakeGpu, FakeProcess, Scenario

REHEARSED_GPU = "h200-141gb"
_LONG_TRAIN = ROOT / "tests" / "gpu" / "programs" / "long_train.py"

_ASK = """
import importlib.metadata, json, platform, sys
import torch
packages = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try: packages[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError: pass
said = {"packages": packages, "cuda": torch.version.cuda or "", "cudnn": str(torch.backends.cudnn.version() or "")}
if torch.cuda.is_available():
    of = torch.cuda.get_device_properties(0)
    said.update(gpu=of.name, total_bytes=of.total_memory, capability=[of.major, of.minor])
print(json.dumps(said))
"""
_PACKAGES = (
    "torch", "torchvision", "transformers", "timm", "accelerate", "diffusers", "torch-geometric", "liger-kernel",
    "peft", "lightning", "bitsandbytes", "torchao", "triton",
)  # fmt: skip


class NoGpu(Exception):
    """There is nothing to measure on; one line gives the reason and what to do."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine of a session.

    Attributes:
        total_bytes: as CUDA counts it.
        simulated: the catalog's name of that GPU; empty if it is not in there.
    """

    gpu: str = ""
    total_bytes: int = 0
    capability: tuple[int, int] = (0, 0)
    driver: str = ""
    cuda: str = ""
    cudnn: str = ""
    simulated: str = ""
    packages: dict[str, str] = {}
    rehearsal: bool = False

    @property
    def title(self) -> str:
        """In a line."""
        torch = self.packages.get("torch", "unknown")
        kind = "REHEARSAL, nothing is measured: " if self.rehearsal else ""
        return f"{kind}{self.gpu}, driver {self.driver or 'unknown'}, CUDA {self.cuda or 'unknown'}, torch {torch}"

    def toml(self) -> str:
        """As tests.gpu.measured reads it next to measured figures."""
        words = {
            "gpu": self.gpu, "simulated": self.simulated, "driver": self.driver, "cuda": self.cuda,
            "cudnn": self.cudnn, "measured": time.strftime("%Y-%m-%d"),
        }  # fmt: skip
        lines = [f"{name} = {json.dumps(word)}" for name, word in words.items()]
        packages = [f'"{name}" = {json.dumps(version)}' for name, version in self.packages.items()]
        return "\n".join([*lines, "", "[packages]", *packages]) + "\n"

    def is_same(self, other: Machine) -> bool:
        """Whether figures of both may stand in one table."""
        return (self.gpu, self.driver, self.packages.get("torch"), self.rehearsal) == (
            other.gpu, other.driver, other.packages.get("torch"), other.rehearsal,
        )  # fmt: skip


def describe(python: str, *, rehearse: bool) -> Machine:
    """Ask an interpreter, in a process of its own, what it runs on.

    Raises:
        NoGpu: it has no torch, or torch finds no GPU.
    """
    try:
        asked = subprocess.run([python, "-c", _ASK, *_PACKAGES], capture_output=True, text=True, timeout=120)
        said = msgspec.json.decode(asked.stdout)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        why = error if isinstance(error, OSError) else "torch does not import"
        raise NoGpu(f"{python}: {why}; --python PATH names one that has torch") from error
    if rehearse:
        gpu = find_gpu(REHEARSED_GPU)
        said.update(gpu=f"simulated {gpu.title}", total_bytes=gpu.cuda_total_bytes, capability=gpu.compute_capability)
        return msgspec.convert({**said, "simulated": REHEARSED_GPU, "rehearsal": True}, Machine)
    if "gpu" not in said:
        torch = said["packages"].get("torch", "")
        raise NoGpu(f"torch {torch} finds no CUDA device; run this next to an NVIDIA GPU, or try it with --rehearse")
    machine = msgspec.convert({**said, "driver": _driver()}, Machine)
    names = [name for name, gpu in gpus().items() if is_same_product(machine.gpu, machine.total_bytes, gpu)]
    return msgspec.structs.replace(machine, simulated=names[0] if names else "")


def _driver() -> str:
    asked = [sys.executable, "-c", "from tests.gpu.nvml import driver_version; print(driver_version())"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout.strip()


class Place:
    """The needs of an activity.

    Attributes:
        work: a folder for what it leaves behind, without folders in it.
        scratch: a folder for the rest, which nobody reads afterwards.
    """

    def __init__(self, machine: Machine, python: Interpreter, work: Path, scratch: Path, clones: Path | None) -> None:
        self.machine = machine
        self.python = python
        self.work = work
        self.scratch = scratch
        self.clones = clones
        self._driver = _fake_driver(scratch) if machine.rehearsal else {}

    @property
    def gpu(self) -> str:
        """For --gpu of what runs on it."""
        return f"sim:{REHEARSED_GPU}" if self.machine.rehearsal else "0"

    @property
    def predicted_gpu(self) -> str:
        """For --gpu of predictions: the catalog's where it has it, as it is never in use."""
        return f"sim:{self.machine.simulated}" if self.machine.simulated else "0"

    def folder(self, name: str) -> Path:
        """An empty folder for one activity."""
        path = self.scratch / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def environment(self, name: str) -> dict[str, str]:
        """The environment of the program: its probes and settings are the activity's own."""
        folder = self.folder(name)
        own = {"GPUMEM_TUI_DIR": str(folder / "probes"), "XDG_CONFIG_HOME": str(folder / "config")}
        return {**os.environ, **self._driver, **own, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}

    def truth(self, name: str) -> Path:
        """Where `training` shows what it holds."""
        return self.folder(name) / "truth.json"

    def training(self, name: str, limit_s: float) -> list[str]:
        """A command that trains for so long, under the activity's name."""
        self.truth(name).unlink(missing_ok=True)
        small = ["--small"] if self.machine.rehearsal else []
        return [self.python.path, str(_LONG_TRAIN), f"{limit_s:.0f}", str(self.truth(name)), *small]

    def program(self, name: str, *arguments: str, limit_s: float, log: str = "") -> Ended:
        """Run `gpumem-tui ARGUMENTS` to its end; what it writes is kept.

        Raises:
            TimeIsUp: it takes longer.
        """
        words = [sys.executable, "-m", "gpumem_tui", *arguments]
        return run(words, self.work / (log or name), limit_s, self.environment(name), self.folder(name))

    def start(self, name: str, words: Sequence[str], log: str) -> Started:
        """Start a second program in the same environment."""
        return Started(words, self.work / log, self.environment(name), self.folder(name))


def _fake_driver(folder: Path) -> dict[str, str]:
    """The environment with tests' NVML, on which this process is; none where there is no C compiler."""
    if shutil.which("cc") is None:
        return {}
    path = folder / "driver"
    path.mkdir()
    machine = FakeMachine(compile_stub(path), path)
    machine.show(Scenario(gpus=[FakeGpu(used_bytes=5 * GIB, processes=[FakeProcess(os.getpid(), 4 * GIB)])]))
    return {name: value for name, value in machine.environment.items() if name != "PATH"}
