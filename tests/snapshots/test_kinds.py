"""Files that are no memory snapshot: each kind by the program that writes it, or as its documentation describes it."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpumem_tui.snapshots.kinds import kinds, what_to_type
from gpumem_tui.snapshots.model import SnapshotError
from gpumem_tui.snapshots.read import read_snapshot
from tests.snapshots import files

_SMI = "timestamp, name, utilization.gpu [%], memory.used [MiB]\n2026/01/01 00:00:00.000, NVIDIA H100, 50 %, 100 MiB\n"
_LONG_LOG = "step 1 loss 0.5\n" * 20_000 + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
WRITTEN: dict[str, tuple[str, str | bytes]] = {
    "zip": ("a.zip", b"PK\x03\x04" + bytes(26) + b"a.txt"),
    "numpy": ("a.npy", b"\x93NUMPY\x01\x00v\x00{'descr': '<f8'}"),
    "numpy-archive": ("a.npz", b"PK\x03\x04" + bytes(26) + b"a.npy"),
    "printed": ("out.json", '{"schema": 1, "event": "prediction"}'),
    "recording": ("night.rec", gzip.compress(b'{"gpumem_tui_recording":{"version":3}}\n')),
    "zstd": ("s.pickle.zst", b"\x28\xb5\x2f\xfd\x04\x00"),
    "tar": ("s.tar", b"s.pickle".ljust(257, b"\0") + b"ustar\x0000"),
    "sqlite": ("report.sqlite", b"SQLite format 3\0" + bytes(84)),
    "nsight-systems": ("report.nsys-rep", b"\x1f\x01\x02"),
    "nsight-compute": ("report.ncu-rep", b"NVR\0\x01"),
    "core-dump": ("core.123", b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x04\x00\x3e\x00"),
    "executable": ("train", b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00\x3e\x00"),
    "safetensors": ("model.safetensors", struct.pack("<Q", 0x80) + b'{"__metadata__":{"format":"pt"}}'.ljust(0x80)),
    "gguf": ("model.gguf", b"GGUF\x03\0\0\0"),
    "tensorboard": (
        "events.out.tfevents.1.host",
        bytes(12) + b"\t" + bytes(8) + b"\x1a\rbrain.Event:2",
    ),
    "timeline-html": (
        "timeline.html",
        '<html>\n<head><meta charset="utf-8" /><title>GPU Memory Timeline HTML</title></head>\n<body></body></html>',
    ),
    "notebook": ("train.ipynb", '{"cells": [], "nbformat": 4}'),
    "deepspeed": ("ds.json", '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}'),
    "model-configuration": ("config.json", '{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}'),
    "json": ("some.json", '{"a": 1}'),
    "nvidia-smi-csv": ("gpus.csv", _SMI),
    "nvidia-smi": ("smi.txt", "Sat Nov 29\n+-----+\n| NVIDIA-SMI 550.54.14   Driver Version: 550.54.14 |\n"),
    "script": ("train.py", "import torch\n"),
    "shell-script": ("train.sbatch", "#!/bin/bash\n#SBATCH --gpus 1\n"),
    "accelerate": ("fsdp.yaml", "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n"),
    "llama-factory": ("sft.yaml", "### model\nmodel_name_or_path: m\nstage: sft\nfinetuning_type: lora\n"),
    "axolotl": ("qlora.yml", "base_model: m\nload_in_4bit: true\n"),
    "yaml": ("train.yaml", "trainer:\n  max_epochs: 1\n"),
    "toml": ("config.toml", "a = 1\n"),
    "torchtune": ("full.yaml", "model:\n  _component_: torchtune.models.llama3_2.llama3_2_1b\n"),
    "trl": ("sft.yml", "model_name_or_path: m\nlearning_rate: 1.0e-4\n"),
    "memory-stats": ("stats.json", '{"active.all.current": 1, "allocated_bytes.all.peak": 512}'),
    "out-of-memory-log": ("train.log", _LONG_LOG),
    "log": ("notes.txt", "hello\n"),
}
"""A file of each kind that others write: its name and its content, as the kind's own documentation has it."""
PRODUCED = {
    "checkpoint", "checkpoint-old", "timeline", "timeline-raw", "chrome-trace", "memory-viz", "snapshot",
    "snapshot-pickle",
}  # fmt: skip
"""Written below by torch itself, or read elsewhere."""


def _said(path: Path) -> str:
    with pytest.raises(SnapshotError) as raised:
        read_snapshot(path)
    message = str(raised.value)
    assert message.isprintable()
    return message


def test_every_kind_of_the_table_has_its_file() -> None:
    assert set(WRITTEN) | PRODUCED == set(kinds())


@pytest.mark.parametrize("key", WRITTEN)
def test_a_file_gets_its_kind_and_what_to_type(tmp_path: Path, key: str) -> None:
    name, content = WRITTEN[key]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    expected = what_to_type(kinds()[key], path)
    assert "{" not in expected
    assert "`" in expected or "open it" in expected
    assert _said(path) == f"{path} {expected}"


_PRODUCER = """
import sys, warnings, torch
from torch.cuda import _memory_viz
from tests.snapshots import files

warnings.simplefilter("ignore")
network = torch.nn.Linear(8, 8)
with torch.profiler.profile(record_shapes=True, profile_memory=True, with_stack=True) as profile:
    network(torch.randn(2, 8)).sum().backward()
for name in ("timeline.json", "timeline.json.gz", "timeline.raw.json.gz"):
    profile.export_memory_timeline(name, device="cpu")
profile.export_chrome_trace("trace.json")
torch.save(network.state_dict(), "model.pt")
torch.save(network.state_dict(), "old.pt", _use_new_zipfile_serialization=False)
open("viz.html", "w").write(_memory_viz.trace_plot(files.training(), device=0))
"""


@pytest.mark.parametrize(
    ("name", "content", "key"),
    [
        ("a.csv", "2026/01/01 00:00:00.000, NVIDIA H100 80GB HBM3, 50, 1000\n", "nvidia-smi-csv"),
        ("a.csv", "0, NVIDIA A100-SXM4-40GB, 31, 40960\n", "nvidia-smi-csv"),
        ("a.csv", "1000 MiB, 81559 MiB\n1000 MiB, 81559 MiB\n", "nvidia-smi-csv"),
        ("a.csv", _SMI.encode("utf-16"), "nvidia-smi-csv"),
        ("a.csv", _SMI.replace("\n", "\r\n").encode("utf-8-sig"), "nvidia-smi-csv"),
        ("a.csv", "pid, process_name, used_gpu_memory [MiB]\n1, python, 2 MiB\n", "nvidia-smi-csv"),
        ("dmon", "# gpu    pwr  gtemp  mtemp\n# Idx      W      C      C\n", "nvidia-smi"),
        ("t.json", '[{"name": "a", "ph": "X", "ts": 1}]', "chrome-trace"),
        ("t.json", "[[], []]", "timeline"),
        ("t.json", f"[[{', '.join(map(str, range(10**6, 10**6 + 30_000)))}], [[0, 1]]]", "timeline"),
        ("t.raw.json", "[[-1, 0, 512, null], [17, 1, 8, 2]]", "timeline-raw"),
        ("ds.json", '{\n  "train_batch_size": "auto",\n  "fp16": {"enabled": true}\n}', "deepspeed"),
        ("summary.txt", "|=====|\n| PyTorch CUDA memory summary, device ID 0 |\n", "memory-stats"),
        ("log.txt", "RuntimeError: CUDA out of memory. Tried\n".encode("utf-16"), "out-of-memory-log"),
    ],
)
def test_other_forms_of_a_kind(tmp_path: Path, name: str, content: str | bytes, key: str) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert _said(path) == f"{path} {what_to_type(kinds()[key], path)}"


@pytest.mark.parametrize("body", [files.training()["segments"], {"segments": files.training()["segments"]}])
def test_segments_alone_are_a_snapshot_without_a_history(tmp_path: Path, body: object) -> None:
    """The value of `torch.cuda.memory_snapshot()`, pickled or as JSON."""
    for name, data in (("s.json", json.dumps(body).encode()), ("s.pickle", pickle.dumps(body))):
        (tmp_path / name).write_bytes(data)
        found = read_snapshot(tmp_path / name)
        assert (found.devices, len(found.segments), len(found.history(0))) == ([0], 2, 0)


@pytest.fixture(scope="module")
def produced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that torch's own functions write."""
    folder = tmp_path_factory.mktemp("produced")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", _PRODUCER], cwd=folder, env=env, check=True, capture_output=True)
    (folder / "trace.json.gz").write_bytes(gzip.compress((folder / "trace.json").read_bytes()))
    return folder


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("timeline.json", "timeline"), ("timeline.json.gz", "timeline"), ("timeline.raw.json.gz", "timeline-raw"),
        ("trace.json", "chrome-trace"), ("trace.json.gz", "chrome-trace"), ("model.pt", "checkpoint"),
        ("old.pt", "checkpoint-old"), ("viz.html", "memory-viz"),
    ],
)  # fmt: skip
def test_what_torch_itself_writes(produced: Path, name: str, key: str) -> None:
    path = produced / name
    assert _said(path) == f"{path} {what_to_type(kinds()[key], path)}"


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bz2.compress], ids=["gz", "xz", "bz2"])
def test_a_packed_snapshot_is_read_and_a_broken_one_is_not(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    data = pickle.dumps(files.training())
    path = tmp_path / "s.pickle.packed"
    path.write_bytes(pack(data))
    assert len(read_snapshot(path).history(0)) == 8
    path.write_bytes(pack(data)[:-40])
    assert "is a broken packed file" in _said(path) or "ends in the middle" in _said(path)
    path.write_bytes(pack(b""))
    assert "unpacks to an empty file" in _said(path)


def test_a_snapshot_with_its_keys_in_another_order(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"model_type": "x", **files.training()}))
    assert "is a model's configuration" in _said(path)
    path.write_text(json.dumps({"more": 1, **files.training()}))
    assert len(read_snapshot(path).history(0)) == 8


def test_folders_pipes_and_what_is_not_there(tmp_path: Path) -> None:
    assert "is a folder without a .pickle" in _said(tmp_path)
    files.written(tmp_path, files.training(), "a b.pickle")
    assert f"`gpumem-tui look '{tmp_path}/a b.pickle'`" in _said(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe or a device: write its content to a file first" in _said(tmp_path / "pipe")
    (tmp_path / "empty.pickle").write_bytes(b"")
    assert "is empty: write one with torch.cuda.memory._dump_snapshot" in _said(tmp_path / "empty.pickle")


def test_a_name_cannot_reach_the_terminal_or_the_shell(tmp_path: Path) -> None:
    path = tmp_path / "a'; rm -rf \x1b[31m$(id).yaml"
    path.write_text("a: 1\n")
    said = _said(path)
    assert said.count("'\"'\"'") == 1
    assert said.isprintable()
