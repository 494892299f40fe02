"""The doctor measures a GPU: a child does one thing after the other, the fake NVML shows what is used by then."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from msgspec import structs

from gpumem_tui.catalog.calibration import calibrated, load, save
from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.cli.commands import run
from gpumem_tui.doctor.beside import BesideWatch, held, learned
from gpumem_tui.doctor.calibrating import NotCalibrated, calibrate
from gpumem_tui.errors import EXIT_FAILED
from gpumem_tui.memory import GIB, MIB, Unknown
from gpumem_tui.monitor.devices import RealGpu, list_gpus
from gpumem_tui.monitor.snapshot import Snapshot
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.watch.collector import Collector
from gpumem_tui.watch.reader import Watcher
from tests.monitor.snapshots import gpu as gpu_reading
from tests.monitor.snapshots import machine, process
from tests.nvml_stub.machine import FakeMachine
from tests.nvml_stub.scenario import FakeGpu, FakeProcess, Scenario
from tests.terminal.terminal import terminal
from tests.watch.rings import RECORD, RingFile, this_process

RESERVED = 20 * MIB
USED = {"context": 400 * MIB, "cuBLAS": 470 * MIB, "cuDNN": 530 * MIB, "NCCL": 690 * MIB, "eager": 910 * MIB}
"""The memory that the process takes outside its allocator at each stage."""

_TORCH = """
import os, shutil
from unittest.mock import MagicMock

__version__ = "2.13.0+cu128"
_folder = os.path.dirname(__file__)

def _reaches(stage):
    name = "eager" if os.environ["CUDA_MODULE_LOADING"] == "EAGER" else stage
    shutil.copy(f"{_folder}/{name}.txt", os.environ["NVML_STUB_SCENARIO"])

def zeros(*sizes, device):
    _reaches("context")

def ones(*sizes, **options):
    return MagicMock()

float16 = "float16"
nn, cuda = MagicMock(), MagicMock()
nn.functional.linear.side_effect = lambda *_: _reaches("cuBLAS")
nn.Conv2d.side_effect = lambda *_, **__: _reaches("cuDNN") or MagicMock()
cuda.memory_reserved.return_value = RESERVED
"""
_DISTRIBUTED = """
from torch import _reaches

def init_process_group(*_, **__):
    NCCL

def all_reduce(tensor):
    _reaches("NCCL")

def destroy_process_group():
    pass
"""


def torch_that_takes(folder: Path, nccl: str = "pass") -> None:
    """Write a package `torch` whose calls make the fake GPU as full as a real one gets."""
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(_TORCH.replace("RESERVED", str(RESERVED)))
    (package / "distributed.py").write_text(_DISTRIBUTED.replace("NCCL\n", f"{nccl}\n", 1))
    for stage, size_bytes in USED.items():
        scenario = Scenario(gpus=[FakeGpu(used_bytes=100 * MIB + size_bytes + RESERVED)])
        (package / f"{stage}.txt").write_text(scenario.text())


@pytest.fixture
def gpu(fake_nvml: FakeMachine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RealGpu:
    """A GPU that nobody uses, with 100 MiB taken for the screen."""
    fake_nvml.show(Scenario(gpus=[FakeGpu(used_bytes=100 * MIB)]))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    listed = list_gpus()
    assert not isinstance(listed, Unknown)
    return listed[0]


def test_each_stage_is_what_the_driver_says_less_the_others_and_the_allocator(gpu: RealGpu, tmp_path: Path) -> None:
    torch_that_takes(tmp_path)
    said: list[str] = []
    found = calibrate(gpu, "550.54.14", sys.executable, said.append)
    assert found.stages == {stage: USED[stage] for stage in ("context", "cuBLAS", "cuDNN", "NCCL")}
    assert found.eager_bytes == USED["eager"]
    assert (found.gpu, found.driver, found.torch) == (gpu.name, "550.54.14", "2.13.0+cu128")
    assert said[0] == "context: 400 MiB outside the allocator"
    assert (found.context.low_bytes, found.context.high_bytes) == (USED["context"], USED["cuDNN"])


def test_the_command_keeps_it_and_predictions_for_that_gpu_use_it(
    gpu: RealGpu,
    fake_nvml: FakeMachine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch_that_takes(tmp_path, 'raise RuntimeError("no NCCL here")')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(sys, "argv", ["gpumem-tui", "doctor", "--calibrate"])
    assert run() == 0
    printed = capsys.readouterr()
    assert "NCCL not measured: RuntimeError: no NCCL here" in printed.err
    assert "calibration.toml" in printed.out
    (kept,) = load()
    assert "NCCL" not in kept.stages
    for name in ("a100-80gb", "h100-80gb"):
        there = calibrated(find_gpu(name), load())
        profile = profile_for("2.13.0", there)
        assert (profile.context_bytes == USED["cuDNN"]) is (name == "a100-80gb")
    profile = profile_for("2.13.0", calibrated(find_gpu("a100-80gb"), load()))
    assert (profile.context_range.low_bytes, profile.context_range.high_bytes) == (USED["context"], USED["cuDNN"])
    assert "driver 550.54.14" in profile.context_source
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    assert calibrated(find_gpu("a100-80gb"), load()).context == kept.context
    assert kept.context.high_bytes == USED["eager"]


def test_a_gpu_that_others_use_is_not_measured(fake_nvml: FakeMachine) -> None:
    fake_nvml.show(Scenario(gpus=[FakeGpu(used_bytes=10 * GIB, processes=[FakeProcess(4711, 10 * GIB)])]))
    listed = list_gpus()
    assert not isinstance(listed, Unknown)
    with pytest.raises(NotCalibrated, match="GPU 0 is in use"):
        calibrate(listed[0], "1", sys.executable, print)


def test_a_gpu_to_which_another_process_comes_is_not_measured_either(
    gpu: RealGpu, fake_nvml: FakeMachine, tmp_path: Path
) -> None:
    torch_that_takes(tmp_path)
    both = [FakeProcess(4711, GIB), FakeProcess(4712, GIB)]
    (tmp_path / "torch" / "cuBLAS.txt").write_text(Scenario(gpus=[FakeGpu(used_bytes=GIB, processes=both)]).text())
    with pytest.raises(NotCalibrated, match="in use by another process since"):
        calibrate(gpu, "1", sys.executable, print)


def test_a_python_that_cannot_reach_the_gpu_says_why(gpu: RealGpu, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text('raise ImportError("libcudart.so.12: cannot open shared object file")')
    with pytest.raises(NotCalibrated, match="did not reach CUDA: ImportError: libcudart"):
        calibrate(gpu, "1", sys.executable, print)
    with pytest.raises(NotCalibrated, match="cannot be run"):
        calibrate(gpu, "1", str(tmp_path / "nowhere"), print)


def test_what_trains_here_says_what_it_takes_beside_its_allocator(tmp_path: Path) -> None:
    RingFile(tmp_path / "probes", this_process()).sample(RECORD)
    took = RECORD.reserved_bytes + 480 * MIB
    one = gpu_reading(uuid=RECORD.device_uuid, processes=(process(os.getpid(), took), process(1, 3 * GIB)))
    published = Collector(Watcher([tmp_path / "probes"])).collect([one])
    [found] = learned(held([one], published), "550.1")
    assert (found.gpu, found.driver, found.stages) == (one.name, "550.1", {"least": 480 * MIB, "training": 480 * MIB})
    save(found, tmp_path / "calibration.toml")
    assert load(tmp_path / "calibration.toml") == (found,)
    profile = profile_for("2.13.0", calibrated(find_gpu("a100-80gb"), [found]))
    assert profile.context_range.is_exact
    assert profile.context_source.startswith("seen of training processes on this NVIDIA A100")
    less = structs.replace(one, processes=(process(os.getpid(), RECORD.reserved_bytes),))
    assert list(held([less], published)) == []


def test_without_a_training_process_there_is_nothing_to_learn(
    fake_nvml: FakeMachine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_nvml.show(Scenario(gpus=[FakeGpu()]))
    monkeypatch.setattr(sys, "argv", ["gpumem-tui", "doctor", "--calibrate", "--running"])
    assert run() == EXIT_FAILED
    assert "start it with `gpumem-tui run`" in capsys.readouterr().err


class Training:
    """This process as one that trains under the probe, and what the driver reports of it whenever it is read.

    Attributes:
        beside_bytes: what it holds outside its allocator.
        reserved_bytes: what its allocator holds.
        said: what was offered.
    """

    def __init__(self, folder: Path, reserved_bytes: int = 4 * GIB) -> None:
        self.beside_bytes, self.reserved_bytes = 480 * MIB, reserved_bytes
        self.said: list[str] = []
        self._ring = RingFile(folder, this_process())
        self.watch = BesideWatch(Watcher([folder]), None, self.said.append, self._read)

    def step(self, reserved_bytes: int = 0) -> None:
        """End a step; from it on so much is reserved."""
        self.reserved_bytes = reserved_bytes or self.reserved_bytes
        self._ring.sample(replace(RECORD, reserved_bytes=self.reserved_bytes))

    def _read(self) -> Snapshot:
        used_bytes = self.reserved_bytes + self.beside_bytes
        return machine([gpu_reading(uuid=RECORD.device_uuid, processes=(process(os.getpid(), used_bytes),))])


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return Training(tmp_path / "probes")


def test_what_training_holds_is_offered_once_two_readings_between_equal_samples_agree(training: Training) -> None:
    assert not training.watch.look(), "it has not trained yet"
    training.step()
    assert [training.watch.look() for _ in range(3)] == [False] * 3, "no sample came after the driver was read"
    training.step()
    assert not training.watch.look()
    assert training.said == [], "one reading may have met a passing moment"
    training.step()
    assert training.watch.look()
    [line] = training.said
    assert "NVIDIA A100" in line
    assert "held 0.47 GiB outside what PyTorch reserved" in line


def test_a_reading_while_the_allocator_grows_does_not_count(training: Training) -> None:
    training.step()
    for size_bytes in (5 * GIB, 6 * GIB, 7 * GIB):
        assert not training.watch.look()
        training.step(size_bytes)
    for beside_bytes in (500 * MIB, 510 * MIB, 520 * MIB):
        training.beside_bytes = beside_bytes
        assert not training.watch.look()
        training.step()
    assert training.said == []
    assert not training.watch.look()
    training.step()
    assert training.watch.look()
    assert "0.51 GiB" in training.said[0]


def test_a_driver_that_lists_others_is_given_up(training: Training) -> None:
    training.step()
    training.beside_bytes = 0
    looks = 0
    while not training.watch.look():
        looks += 1
        assert looks < 100
    assert training.said == []


def offered(folder: Path, beside_bytes: int) -> list[str]:
    """Return what is offered to somebody whose training holds so much outside its allocator, all the time."""
    training = Training(folder)
    training.beside_bytes = beside_bytes
    training.step()
    while not training.watch.look():
        training.step()
    return training.said


def test_the_offered_command_keeps_exactly_that_and_then_as_much_is_not_offered(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [line] = offered(tmp_path / "first", 480 * MIB)
    monkeypatch.setattr(sys, "argv", shlex.split(line.split("`")[1]))
    assert run() == 0
    (kept,) = load()
    assert (kept.stages, kept.torch, kept.is_learned) == ({"least": 480 * MIB, "training": 480 * MIB}, "2.13.0", True)
    assert "takes 0.47 GiB outside PyTorch's allocator" in capsys.readouterr().out
    profile = profile_for("2.13.0", calibrated(find_gpu("a100-80gb"), load()))
    assert profile.context_bytes == 480 * MIB
    assert profile.context_source.startswith("seen of training processes")
    assert offered(tmp_path / "alike", 488 * MIB) == []
    assert len(offered(tmp_path / "more", 580 * MIB)) == 1
    save(replace(kept, is_learned=False))
    assert offered(tmp_path / "measured", 580 * MIB) == [], "what was measured for the purpose is better"


@pytest.mark.parametrize(
    "words", ["x", "A100,100,550.1,2.13.0,0,5", "A100,100,550.1,2.13.0,5,4", 'A"B,100,550.1,2.13.0,4,5']
)
def test_other_words_are_refused(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calibration.toml"
    arguments = ["doctor", "--calibrate", "--seen", words, "--output", str(path)]
    monkeypatch.setattr(sys, "argv", ["gpumem-tui", *arguments])
    assert run() == EXIT_FAILED
    assert "write GPU, its bytes, driver, torch, least and most bytes" in capsys.readouterr().err
    assert not path.exists()


_TRAIN = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
import torch

reserved = {name: {"all": {"current": 300 << 20, "peak": 300 << 20}} for name in ("allocated_bytes", "reserved_bytes")}
torch.cuda.is_initialized = lambda: True
torch.cuda.current_device = lambda: 0
torch.cuda.memory_stats_as_nested_dict = lambda device: reserved
kind = SimpleNamespace(uuid="UUID", name="A100", major=8, minor=0, total_memory=80 << 30)
torch.cuda.get_device_properties = lambda device: kind
scenario = Path(os.environ["NVML_STUB_SCENARIO"])
scenario.write_text(scenario.read_text().replace("process 4711 ", f"process {os.getpid()} "))
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
calls = Path(os.environ["NVML_STUB_CALLS"])
readings, steps = 0, 0
while readings < 2 or steps < 60:
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
    readings = int(calls.read_text().split("nvmlInitWithFlags")[1].split()[0]) if calls.exists() else 0
    steps = steps + 1 if readings >= 2 else 0
"""
"""Trains on the CPU, where torch states that its allocator holds 300 MiB of a GPU; until the driver was read twice."""


def _environment(fake_nvml: FakeMachine, tmp_path: Path) -> dict[str, str]:
    """Write the script that trains, and return where it does, on a machine whose driver lists it."""
    uuid = "01234567-89ab-cdef-0123-456789abcdef"
    listed = FakeGpu(uuid=f"GPU-{uuid}", used_bytes=780 * MIB, processes=[FakeProcess(4711, 780 * MIB)])
    fake_nvml.show(Scenario(gpus=[listed]))
    (tmp_path / "train.py").write_text(_TRAIN.replace("UUID", uuid))
    return {
        **os.environ, **fake_nvml.environment, "PATH": os.environ["PATH"],
        "GPUMEM_TUI_DIR": str(tmp_path / "probes"), "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }  # fmt: skip


@pytest.mark.slow
def test_run_offers_at_its_end_what_the_training_held(fake_nvml: FakeMachine, tmp_path: Path) -> None:
    environment = _environment(fake_nvml, tmp_path)
    words = [sys.executable, "-m", "gpumem_tui", "run", "--", sys.executable, str(tmp_path / "train.py")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    [line] = done.stderr.splitlines()
    assert "held 0.47 GiB outside what PyTorch reserved" in line
    assert f"NVIDIA A100-SXM4-80GB,{80 * GIB},550.54.14,{version('torch')},{480 * MIB},{480 * MIB}" in line


@pytest.mark.slow
def test_run_on_a_screen_offers_it_too_once_the_screen_is_left(fake_nvml: FakeMachine, tmp_path: Path) -> None:
    words = "run", "--tui", "--", sys.executable, str(tmp_path / "train.py")
    with terminal(*words, columns=120, lines=40, env=_environment(fake_nvml, tmp_path)) as screen:
        screen.wait_for("held 0.47 GiB outside what PyTorch reserved", deadline_s=60)
        assert screen.exit_code(30) == 0
