"""`look FILE` as a user types it."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

from gpumem_tui.memory import MIB
from tests.cli.conftest import Program
from tests.sharing import WarmPython
from tests.snapshots import files
from tests.snapshots.files import written

SCRIPT = """
import torch
model = torch.nn.Linear(256, 512).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    loss = model(torch.randn({batch}, 256).to("cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_lines(program: Program, tmp_path: Path) -> None:
    done = program("look", str(written(tmp_path, files.fragmented())))
    assert (done.code, done.err) == (0, "")
    for said in ("out of memory at event 4", "enough, but not in one piece", "the peak by source line", "4 segments"):
        assert said in done.out


def test_json(program: Program, tmp_path: Path) -> None:
    done = program("look", str(written(tmp_path, files.training())), "--json")
    assert (done.code, done.err) == (0, "")
    (device,) = json.loads(done.out)["devices"]
    assert device["peak"]["allocated_bytes"] == 100 * MIB
    for by in ("by_category", "by_source", "by_stack"):
        assert sum(part["bytes"] for part in device["peak"][by]) == 100 * MIB
    assert device["segments"]["stranded_bytes"] == 72 * MIB
    assert device["out_of_memory"] == []


def test_needs_no_torch(program: Program, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('looked for')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = program("look", str(written(tmp_path, files.training())), env={"PYTHONPATH": path})
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize("content", [b"", b"text", pickle.dumps([1]), pickle.dumps({}), b"\x80\x04cos\nsystem\n."])
def test_what_is_no_snapshot_is_one_line_and_code_2(program: Program, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "some.pickle"
    path.write_bytes(content)
    done = program("look", str(path))
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1
    assert str(path) in done.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.pickle"], "missing.pickle: No such file"),
        (["999999999"], "there is no process 999999999"),
        (["x.pickle", "--model", "gpt2"], "--model: says what to trace; add --against"),
        (["x.pickle", "--", "python", "train.py"], "--: says what to trace; add --against"),
        (["x.pickle", "--json", "--plain"], "--json and --plain: give only one of them"),
        (["1", "--against"], "--against: is about a file"),
    ],
)
def test_bad_input(program: Program, arguments: list[str], said: str) -> None:
    done = program("look", *arguments)
    assert done.code == 2
    assert said in done.err


@pytest.mark.slow
def test_against_a_command(program: Program, tmp_path: Path) -> None:
    """The file is that of the command at batch size 64; at 96 every activation is larger."""
    for batch in (64, 96):
        (tmp_path / f"train{batch}.py").write_text(SCRIPT.replace("{batch}", str(batch)))
    path = tmp_path / "run.pickle"
    gpu = ("--gpu", "sim:t4-16gb")
    command = ("--", WarmPython.path(), str(tmp_path / "train64.py"))
    assert program("predict", *gpu, "--snapshot", str(path), "--quiet", *command).code == 0
    done = program("look", str(path), "--against", *gpu, *command)
    assert done.code == 0, done.err
    assert "first difference: none" in done.out
    assert "(+0 bytes)" in done.out
    other = ("--", WarmPython.path(), str(tmp_path / "train96.py"))
    done = program("look", str(path), "--against", "--json", *gpu, *other)
    assert done.code == 0, done.err
    against = json.loads(done.out)["against"]
    first = against["first_difference"]
    assert (first["file"]["bytes"], first["traced"]["bytes"]) == (64 * 256 * 4, 96 * 256 * 4)
    assert first["traced"]["source"].startswith("train96.py:6 <module>")
    assert against["only_in_file_bytes"] < against["only_in_trace_bytes"]


@pytest.mark.slow
def test_a_recording_of_a_real_gpu_against_the_program_it_was_made_of(program: Program, tmp_path: Path) -> None:
    """Three training steps, written anew in `tests/recordings/decoder.py`, as an ordinary script that names CUDA."""
    recordings = Path(__file__).parents[1] / "recordings"
    (recorded,) = (recordings / "data").glob("NiuHuangxiaozi*__forward_and_backward_memory_snapshot_100.*")
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(recordings)!r})\nimport torch, decoder\n"
        "kept = decoder.forward_and_backward(100, torch.device('cuda'))\n"
    )
    options = ("--against", "--json", "--gpu", "sim:rtx-4090-24gb", "--", WarmPython.path(), str(script))
    done = program("look", str(recorded), *options)
    assert done.code == 0, done.err
    against = json.loads(done.out)["against"]
    assert against["first_difference"] is None
    assert against["differences"] == []
    assert against["equal"] == against["file_events"] == 7542
