"""Every command of the README and of the manual, run as a reader would; and the manual's own command."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpumem_tui.manual import TOPICS, text
from tests.cli.conftest import Program
from tests.cli.test_snippets import guide_commands

_SCRIPT = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", "--bs", type=int, default=4)
batch = parser.parse_args().batch_size
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    loss = model(torch.randn(batch, 64, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
"""
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_NEEDS_MORE = (
    "--gpu 0", "free", "doctor --calibrate", "--host", "--slurm", "--tui", "attach", "--replay", "look 1",
    "look run.pickle", "--once", "--try",
)  # fmt: skip
"""Commands without an answer on this machine: they need a GPU, another host, a terminal, a process or a file that the
text only names."""
_GOES_ON = (
    "monitor --json",
    "monitor --metrics",
    "monitor --read-only",
    "monitor --record",
    "monitor --wire",
    "watch --json",
    "serve",
    "mcp",
)
"""Commands that end when interrupted."""
_ENDS_WITHIN_S = 1200
"""Seconds for every other command, on a machine that may be busy with others."""


def _calls() -> list[str]:
    return sorted({shlex.join(arguments) for arguments in guide_commands()})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a training script, a model's configuration and a memory snapshot of that script."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "train.py").write_text(_SCRIPT)
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    snapshot = ["predict", "--gpu", "sim:h100-80gb", "--snapshot", "snapshot.pickle", "--", "python", "train.py"]
    subprocess.run([sys.executable, "-m", "gpumem_tui", *snapshot], cwd=folder, check=True, capture_output=True)
    for name in ("before.pickle", "after.pickle"):
        shutil.copy(folder / "snapshot.pickle", folder / name)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy of it for each command, which finds nothing that another one has written."""
    return shutil.copytree(written, tmp_path / "reader")


@pytest.mark.guide
@pytest.mark.parametrize("call", _calls())
def test_a_command_of_the_guide_answers(call: str, folder: Path) -> None:
    """A command that needs what this machine has not notes this in one line; every other one prints its answer."""
    if call == "mcp":
        pytest.importorskip("mcp")
    environment = {**os.environ, "GPUMEM_TUI_DIR": str(folder / "published"), "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        [sys.executable, "-m", "gpumem_tui", *shlex.split(call)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=8 if call.startswith(_GOES_ON) else _ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        assert call.startswith(_GOES_ON), f"{call} does not end"
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert "Traceback" not in errors, errors
    if not call or any(f" {need} " in f" {call} " for need in _NEEDS_MORE):
        assert process.returncode != 0
        assert errors.startswith("gpumem-tui: ") or "gpumem-tui: " in errors.splitlines()[-1], errors
    else:
        assert process.returncode in (0, 3, 130), errors
        assert output or call.startswith(_GOES_ON)


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_is_printed_where_there_is_no_terminal(topic: str, program: Program) -> None:
    done = program("manual", topic)
    assert (done.code, done.out, done.err) == (0, text(topic), "")


def test_without_a_topic_the_topics_are_listed(program: Program) -> None:
    listed = program("manual").out
    assert all(f"**{topic}**" in listed for topic in TOPICS)


def test_a_topic_that_there_is_not_is_one_line_with_those_that_there_are(program: Program) -> None:
    done = program("manual", "plans")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "'plan'" in done.err
