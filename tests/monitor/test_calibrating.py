"""The doctor measures a GPU: a child does one thing after the other, the fake NVML says what is used by then."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpumem_tui.catalog.calibration import calibrated, load, save
from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.cli.commands import run
from gpumem_tui.doctor.calibrating import NotCalibrated, calibrate, learned
from gpumem_tui.errors import EXIT_FAILED
from gpumem_tui.memory import GIB, MIB, Unknown
from gpumem_tui.monitor.devices import RealGpu, list_gpus
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.watch.collector import Collector
from gpumem_tui.watch.reader import Watcher
from tests.monitor.snapshots import gpu as gpu_reading
from tests.monitor.snapshots import process
from tests.nvml_stub.machine import FakeMachine
from tests.nvml_stub.scenario import FakeGpu, FakeProcess, Scenario
from tests.watch.rings import RECORD, RingFile, this_process

RESERVED = 20 * MIB
USED = {"context": 400 * MIB, "cuBLAS": 470 * MIB, "cuDNN": 530 * MIB, "NCCL": 690 * MIB, "eager": 910 * MIB}
"""What the process is to take beside its allocator at each stage."""

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
    assert said[0] == "context: 400 MiB beside the allocator"
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
    [found] = learned([one], published, "550.1")
    assert (found.gpu, found.driver, found.stages) == (one.name, "550.1", {"least": 480 * MIB, "training": 480 * MIB})
    save(found, tmp_path / "calibration.toml")
    assert load(tmp_path / "calibration.toml") == (found,)
    profile = profile_for("2.13.0", calibrated(find_gpu("a100-80gb"), [found]))
    assert profile.context_range.is_exact
    assert profile.context_source.startswith("seen of training processes on this NVIDIA A100")
    less = replace(one, processes=(process(os.getpid(), RECORD.reserved_bytes),))
    assert learned([less], published, "550.1") == []


def test_without_a_training_process_there_is_nothing_to_learn(
    fake_nvml: FakeMachine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_nvml.show(Scenario(gpus=[FakeGpu()]))
    monkeypatch.setattr(sys, "argv", ["gpumem-tui", "doctor", "--calibrate", "--running"])
    assert run() == EXIT_FAILED
    assert "start it with `gpumem-tui run`" in capsys.readouterr().err
