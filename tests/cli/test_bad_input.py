"""Everything a user can get wrong: one clear line on stderr, exit code 2, no traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Program

_NO_FUNCTIONS = "def build(device): ...\n"
_RAISES = "raise RuntimeError('no data here')\n"
_BUILD_RAISES = """
def build(device):
    raise FileNotFoundError("weights.pt")
def make_batch(batch_size, device): ...
def train_step(model, optimizer, batch): ...
"""
_ON_THE_CPU = """
import torch
def build(device):
    model = torch.nn.Linear(8, 8).cpu()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
def make_batch(batch_size, device):
    return torch.ones(batch_size * 1, 8)
def train_step(model, optimizer, batch):
    model(batch).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["search", "--model", "gpt-3"], "unknown model 'gpt-3': did you mean gpt2"),
        (["search", "--seq-len", "-4"], "'--seq-len': -4 is not in the range"),
        (["search", "--heads", "7"], "--heads: 7 heads do not divide a hidden size of 768"),
        (["search", "--workload", "missing.py"], "--workload: there is no file missing.py"),
        (["search", "--gpu", "9"], "--gpu: '9' is not available: no NVIDIA driver on this machine"),
        (["search", "--gpu", "sim:a10000"], "--gpu: unknown GPU 'a10000'"),
        (["search", "--config", "broken.json"], "--config: "),
        (["search", "--limit", "999GiB"], "--limit: the device has only 80.00 GiB"),
        (["search", "--limit", "20"], "'--limit': 20 would be bytes: write the unit, as in 20GiB"),
        (["search", "--limit", "lots"], "'--limit': 'lots' is not a size such as 20GiB"),
        (["search", "--python", "/no/python"], "--python: /no/python is not a program"),
        (["search", "--headroom", "nan"], "'--headroom': nan is not a finite number"),
        (["search", "--timeout", "inf"], "'--timeout': inf is not a finite number"),
        (["look", "1", "--timeout", "nan"], "'--timeout': nan is not a finite number"),
        (["search", "--model", ""], "--model: unknown model ''"),
        (["search", "--layers", "9" * 20], "--layers: must be at most 10,000"),
        (["predict", "--batch-size", "1", "--vocab", "9" * 20], "--vocab: must be at most 10,000,000"),
        (["plan", "--kv-heads", "9" * 20], "--kv-heads: must be at most 10,000"),
        (["plan", "--sharding", "zero3", "--gpus", "9" * 20], "--gpus: must be at most 100,000"),
        (["search", "--steps", "9" * 20], "is not in the range 1<=x<=10000"),
        (["search", "--workload", "w" * 300], "File name too long"),
        (["predict", "--batch-size", "1", "--config", "c" * 300], "File name too long"),
        (["plan", "--workload", ""], "--workload: give the path of a file"),
        (["search", "--config", ""], "--config: give the path of a file"),
        (["search", "--gpu", ""], "--gpu: '' is not available"),
        (["search", "--python", ""], "--python: nothing is not a program"),
        (["search", "--json", "--plain"], "--json and --plain: give only one"),
        (["search", "--sharding", "deepspeed-zero3", "--gpus", "8"], "--sharding deepspeed-zero3: formula only"),
        (["search", "--pipeline-parallel", "2"], "--pipeline-parallel 2: formula only"),
        (["search", "--model", "bert-base", "--tensor-parallel", "2"], "--tensor-parallel 2: formula only"),
        (["search", "--freeze", "13"], "--freeze: takes none, all-but-head or how many of the 12 blocks of gpt2"),
        (["predict", "--tensor-parallel", "5", "--batch-size", "1"], "--tensor-parallel: 5 does not divide"),
        (["predict", "--pipeline-parallel", "2", "--gpus", "3", "--batch-size", "1"], "--gpus: 3 is no multiple of 2"),
        (["search", "--sharding", "zero3"], "--sharding zero3: needs more than one GPU to shard over; add --gpus 2"),
        (
            ["predict", "--tensor-parallel", "8", "--sharding", "zero3", "--gpus", "4"],
            "--sharding zero3: needs more than one GPU to shard over; add --gpus 16",
        ),
        (["search", "--gpus", "8"], "--gpus 8: is how many to shard over; add --sharding"),
        (["predict", "--gpus", "8", "--batch-size", "1"], "--gpus 8: is how many to shard over; add --sharding"),
        (["search", "--presicion", "fp32"], "--presicion"),
        (
            ["predict"],
            "--batch-size is missing: `gpumem-tui predict --batch-size 8`; your own script: `gpumem-tui predict",
        ),
        (
            ["predict", "--", "train.py", "--bs", "4"],
            "train.py: is not a program, but a script: `gpumem-tui predict -- py",
        ),
        (
            ["predict", "--gpu", "4090", "--", "BATCH=8", "python", "train.py"],
            "BATCH=8: is a variable, not a program; write env before it: "
            "`gpumem-tui predict --gpu 4090 -- env BATCH=8 python train.py`",
        ),
        (
            ["plan", "--", "python train.py --bs 4"],
            "is quoted as one word; leave the quotes out: `gpumem-tui plan -- python train.py --bs 4`",
        ),
        (
            ["search", "--", "pyhton", "train.py"],
            "pyhton: is no program here; did you mean python: `gpumem-tui search -- python train.py`",
        ),
        (
            ["plan", "--python", "/e/bin/python", "--gpu", "4090", "--", "python", "train.py"],
            "a command names its own Python: `gpumem-tui plan --gpu 4090 -- /e/bin/python train.py`",
        ),
        (
            ["predict", "--python", "/e/bin/python", "--", "torchrun", "train.py"],
            "a command names its own Python: `gpumem-tui predict -- /e/bin/torchrun train.py`",
        ),
        (
            ["predict", "--python=/e/bin/python", "--", "torchrun", "train.py"],
            "a command names its own Python: `gpumem-tui predict -- /e/bin/torchrun train.py`",
        ),
        (["python", "train.py", "--bs", "4"], "your own script: `gpumem-tui predict -- python train.py --bs 4`"),
        (["train.py", "--bs", "4"], "your own script: `gpumem-tui predict -- python train.py --bs 4`"),
        (["plan", "train.py"], "write -- before your command: `gpumem-tui plan -- python train.py`"),
        (["--once"], "No such option '--once': write `gpumem-tui monitor --once`"),
        (["run"], "`gpumem-tui run -- python train.py`"),
        (["look"], "give the PID that `gpumem-tui monitor --once` lists, or a snapshot's file"),
        (["free", "--gps", "2"], "Did you mean '--gpus'"),
        (["free", "-x"], "`gpumem-tui free --help` lists them"),
        (["pedict"], "No such command 'pedict': did you mean `gpumem-tui predict`?"),
        (["nonsense"], "`gpumem-tui --help` lists the commands"),
        (["predict", "--batch-size", "0"], "'--batch-size': 0 is not in the range"),
        (["predict", "--batch-size", "99999999"], "'--batch-size': 99999999 is not in the range 1<=x<=16777216"),
        (["serch"], "No such command 'serch'"),
        ([], "no terminal to draw on"),
        (["watch", "abc"], "'abc' is not a valid integer"),
    ],
)
def test_one_clear_line(program: Program, arguments: list[str], said: str) -> None:
    (program.folder / "broken.json").write_text("{")
    done = program(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert said in done.err
    assert done.err.startswith("gpumem-tui: ")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (_NO_FUNCTIONS, "make_batch"),
        pytest.param(_RAISES, "no data here", marks=pytest.mark.slow),
        ("def build(:\n", "step.py:1"),
    ],
)
def test_a_broken_workload_file(program: Program, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "step.py"
    path.write_text(text)
    done = program("search", "--workload", str(path), "--plain")
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err
    assert done.err.count("\n") == 1


def test_a_workload_that_raises_while_building_says_where(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "step.py"
    path.write_text(_BUILD_RAISES)
    done = program("search", "--workload", str(path), "--plain")
    assert done.code in (2, 4)
    assert "weights.pt" in done.out + done.err
    assert "step.py:3" in done.out + done.err
    assert "Traceback" not in done.out + done.err


def test_an_interpreter_that_is_none(program: Program) -> None:
    done = program("search", "--json", "--python", "/bin/ls")
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("gpumem-tui: /bin/ls: is no Python with torch (exit code 2: ")
    assert done.err.endswith("); give --python the interpreter that you train in\n")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (_ON_THE_CPU, "leaves the GPU empty (the model is on the CPU): build and make_batch must put model and batch"),
        (_ON_THE_CPU.replace(".cpu()", ".cuda()"), "RuntimeError: Expected all tensors to be on the same device"),
        (_ON_THE_CPU.replace("1, 8)", "1, 8, device=device)"), "put model and batch on the `device` that is given"),
    ],
    ids=["all on the CPU", "batch on the CPU", "model on the CPU"],
)
def test_a_workload_that_does_not_use_its_device(program: Program, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "step.py"
    path.write_text(text)
    done = program("search", "--workload", str(path), "--plain")
    assert done.code == 2
    assert said in done.err
    assert done.err.count("\n") == 1


def test_allocator_settings_that_pytorch_would_refuse(program: Program) -> None:
    done = program("predict", "--batch-size", "1", env={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:8"}, alone=False)
    assert done.code == 2
    assert "max_split_size_mb must be at least 20" in done.err


def _python_with_torch(folder: Path, text: str) -> str:
    """An interpreter whose module torch is `text`."""
    (folder / "torch.py").write_text(text)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder}:$PYTHONPATH exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize("version", ["2.4.1", "2.5.1+cu124"])
def test_a_torch_that_is_too_old_is_said(program: Program, tmp_path: Path, version: str) -> None:
    python = _python_with_torch(tmp_path, f"__version__ = {version!r}\n")
    done = program("search", "--plain", "--gpu", "sim:t4-16gb", "--python", python)
    assert done.code == 2
    old = f"torch {version} of {sys.executable} is too old to simulate a GPU: 2.6 or newer is needed; in an "
    assert done.err.startswith(f"gpumem-tui: {old}")
    asked = version.partition("+")[0]
    assert f" that has one, --torch-version {asked} traces as this one would; with this one `run`, " in done.err
    assert "; by formula the largest batch is " in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise ImportError('no torch here')", "cannot import torch (no torch here)"),
        ("__version__ = '2.4.1'", "is too old to simulate a GPU"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [("predict", "--batch-size", "1"), ("predict", "--batch-size", "1", "--json"), ("plan",), ("plan", "--json")],
)
def test_without_a_torch_that_traces_the_formula_answers(
    program: Program, tmp_path: Path, text: str, why: str, command: tuple[str, ...]
) -> None:
    python = _python_with_torch(tmp_path, text)
    done = program(*command, "--gpu", "sim:t4-16gb", "--python", python)
    assert (done.code, done.err) == (0, "")
    assert why in done.out
    if "--json" in command:
        body = json.loads(done.out)
        assert body["formula"]["max_batch_size"] > 0
        assert why in body["traced"]["unavailable"]
    else:
        assert "GiB" in done.out


@pytest.mark.parametrize("command", [("predict", "--batch-size", "1"), ("search", "--plain"), ("plan", "--json")])
def test_without_torch_a_model_that_has_no_formula_says_both(
    program: Program, tmp_path: Path, command: tuple[str, ...]
) -> None:
    python = _python_with_torch(tmp_path, "raise ImportError('no torch here')")
    (tmp_path / "config.json").write_text('{"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}')
    done = program(*command, "--model", str(tmp_path), "--gpu", "sim:t4-16gb", "--python", python)
    assert done.code == 2
    assert "no formula for gemma2 models, so transformers has to build it, and " in done.err
    assert "cannot import torch (no torch here)" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.slow
def test_a_torch_that_came_out_later_is_said(program: Program, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import torch\ntorch.__version__ = '2.99.1'\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH=$PYTHONPATH:{tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    options = ("--model", "mlp", "--layers", "1", "--batch-size", "4", "--gpu", "sim:t4-16gb")
    done = program("predict", *options, "--python", str(python))
    assert done.code == 0
    assert "torch 2.99.1 is newer than 2.13, the last one that the simulated GPU was checked with" in done.out


def test_a_configuration_beyond_all_bounds_is_refused_at_once(program: Program, tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 10**12, "hidden_size": 64, "num_attention_heads": 4}
    config |= {"intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 128}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    done = program("predict", "--config", str(path), "--batch-size", "1")
    assert done.code == 2
    assert "'num_hidden_layers' = 1000000000000: Expected `int` <= 10000" in done.err


@pytest.mark.slow
def test_a_terminal_that_lacks_characters_gets_others(program: Program) -> None:
    options = ("--model", "mlp", "--batch-size", "4", "--gpu", "sim:t4-16gb")
    done = program("predict", *options, env={"PYTHONIOENCODING": "ascii"})
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[1].startswith("mlp ? ")


_SHAPED_BY_VALUES = """
import torch
def build(device):
    model = torch.nn.Linear(8, 8, device=device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
def make_batch(batch_size, device):
    return torch.ones(batch_size, 8, device=device)
def train_step(model, optimizer, batch):
    made = model(batch)
    torch.repeat_interleave(made, (9 * made.exp()).long().sum(1), dim=0).sum().backward()
"""


@pytest.mark.parametrize("json", [(), ("--json",)])
def test_a_prediction_of_nothing_is_an_error(program: Program, tmp_path: Path, json: tuple[str, ...]) -> None:
    path = tmp_path / "step.py"
    path.write_text(_SHAPED_BY_VALUES)
    done = program("predict", "--workload", str(path), "--batch-size", "8", *json)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("gpumem-tui: aten.repeat_interleave.Tensor repeats rows by numbers that only the GPU")
    assert done.err.endswith("at step.py:10 (--assume-rows step.py:10=NUMBER gives it)\n")
