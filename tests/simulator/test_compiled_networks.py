"""Networks and workloads that torch.compile works on, by their options and in code: the lines about them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gpumem_tui.memory import format_bytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="Inductor writes kernels for triton, which is not here"),
]

_SMALL_BERT = ("--model", "bert-base", "--layers", "2", "--precision", "amp-bf16")


def predicted(*options: str, network: Sequence[str] = _SMALL_BERT, by: str = "predict") -> dict[str, Any]:
    """The prediction, or the plan, of a small network."""
    command = [sys.executable, "-m", "gpumem_tui", by, "--json", "--gpu", "sim:a100-80gb", "--batch-size", "8"]
    done = subprocess.run([*command, *network, *options], capture_output=True, text=True, check=True)
    body: dict[str, Any] = json.loads(done.stdout)
    return body


def test_a_network_of_the_catalog_is_compiled() -> None:
    compiled, eager = predicted("--compile"), predicted()
    assert (compiled["workload"]["compile"], eager["workload"]["compile"]) == (True, False)
    assert any("1 graph compiled" in note for note in compiled["traced"]["notes"])
    assert compiled["traced"]["peak_allocated_bytes"] < eager["traced"]["peak_allocated_bytes"]


@pytest.mark.parametrize("option", ["--compile", "without --compile"])
def test_a_plan_of_the_catalog_says_what_the_other_way_takes(option: str) -> None:
    compiled, eager = (predicted(*given)["traced"]["peak_allocated_bytes"] for given in (["--compile"], []))
    body = predicted(*([] if option == "--compile" else ["--compile"]), by="plan")
    if option == "--compile":
        (row,) = (one for one in body["techniques"] if one["is_traced"])
        assert (row["option"], row["fits"], row["max_batch_size"]) == ("--compile", True, None)
        assert (row["peak_bytes"], row["saved_bytes"]) == (compiled, eager - compiled)
    else:
        (reason,) = (one["reason"] for one in body["not_applicable"] if one["reason"].startswith(option))
        assert reason == f"{option} takes {format_bytes(eager - compiled)} more here, traced"


def test_the_largest_batch_of_a_compiled_network_is_predicted() -> None:
    command = [sys.executable, "-m", "gpumem_tui", "search", "--json", "--gpu", "sim:t4-16gb", "--compile"]
    done = subprocess.run([*command, "--model", "gpt2", "--layers", "2"], capture_output=True, text=True, check=True)
    *trials, result = map(json.loads, done.stdout.splitlines())
    assert [trial["outcome"] for trial in trials] == ["fit", "oom"]
    assert result["max_batch_size"] == trials[0]["batch_size"]
    assert result["traced"]["peak_allocated_bytes"] == trials[0]["peak_allocated_bytes"]
    assert any("1 graph compiled" in note for note in result["traced"]["notes"])


def test_blocks_that_fsdp_shards_are_compiled_once() -> None:
    traced = predicted("--compile", "--sharding", "fsdp2", "--gpus", "2")["traced"]
    assert (
        "torch.compile: 1 graph compiled, traced by the compiler's own buffers; no frame ran eager" in traced["notes"]
    )


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_a_network_of_transformers_is_compiled(tmp_path: Path) -> None:
    """Its code asks whether a tensor is a fake one, and is guarded by the answer."""
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 128,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    notes = predicted("--compile", network=("--config", str(tmp_path)))["traced"]["notes"]
    assert "torch.compile: 1 graph compiled, traced by the compiler's own buffers; no frame ran eager" in notes


_FOR_NOTHING = """
import sys
import torch

weight = torch.ones(64, 64, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight])


@torch.compile
def product(x):
    for _ in range(2):
        torch._dynamo.graph_break()
        x = x @ weight
    return x


for _ in range(3):
    (product if sys.argv[1] == "called" else torch.sin)(weight).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("left", "torch.compile: nothing was compiled: what the program gave it was not called"),
        ("called", "torch.compile: nothing was compiled; 1 frame ran eager (product, train.py:9: "),
    ],
)
def test_a_compile_that_compiles_nothing_is_said(way: str, said: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_FOR_NOTHING)
    command = [sys.executable, "-m", "gpumem_tui", "predict", "--gpu", "sim:a100-80gb", "--json", "--"]
    read = subprocess.run([*command, sys.executable, str(script), way], capture_output=True, text=True, check=True)
    assert next(note for note in json.loads(read.stdout)["traced"]["notes"] if "nothing was" in note).startswith(said)


_WORKLOAD = """
import torch


def build(device):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).to(device)
    return torch.compile(model), torch.optim.SGD(model.parameters())


def make_batch(batch_size, device):
    return torch.ones(batch_size, 64, device=device)


@torch.compile
def loss_of(values):
    torch._dynamo.graph_break()
    return values.sum()


def train_step(model, optimizer, batch):
    for _ in range(2):
        loss_of(model(batch)).backward()
    optimizer.step()
"""


def test_what_is_compiled_of_a_workload_file_is_that_of_one_batch_size(tmp_path: Path) -> None:
    """It is traced at several, for each of which it compiles."""
    file = tmp_path / "workload.py"
    file.write_text(_WORKLOAD)
    command = [sys.executable, "-m", "gpumem_tui", "predict", "--gpu", "sim:a100-80gb", "--json", "--batch-size", "7"]
    read = subprocess.run([*command, "--workload", str(file)], capture_output=True, text=True, check=True)
    said = next(note for note in json.loads(read.stdout)["traced"]["notes"] if "compiled," in note)
    assert said.startswith("torch.compile: 2 graphs compiled, ")
    assert said.endswith("1 graph break; no frame ran eager")
