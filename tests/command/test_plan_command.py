"""`plan` on a command: run once for each traced batch size, then answered for every GPU and batch."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpumem_tui.catalog.loader import gpus
from gpumem_tui.errors import EXIT_INTERRUPTED
from tests.command.running import TIMEOUT_S, Finished, Project

pytestmark = pytest.mark.scripts

SCRIPT = """
    import argparse
    import torch
    from torch import nn

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--optimizer", default="AdamW")
    arguments = parser.parse_args()

    class Mine(torch.optim.AdamW):
        pass

    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to("cuda")
    kind = {"AdamW": torch.optim.AdamW, "Mine": Mine, "SGD": torch.optim.SGD}[arguments.optimizer]
    optimizer = kind(model.parameters(), lr=1e-3)
    print("made a", type(optimizer).__name__)
    if isinstance(optimizer, torch.optim.Adafactor):
        raise RuntimeError("no Adafactor, please")
    while True:
        x = torch.randn(arguments.batch_size, 1024, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
WEIGHTS = 4 * (2 * 1024 * 4096 + 4096 + 1024)


def _reasons(done: Finished) -> dict[str, str]:
    return {row["key"]: row["reason"] for row in done.json["not_applicable"]}


def test_a_command_that_takes_a_batch_is_answered_for_all_of_them(project: Project) -> None:
    project.write("train.py", SCRIPT)
    done = project.plan(
        "python", "train.py", "--batch-size", "{batch}",
        options=("--batch-size", "64", "--target-batch", "1000", "--what-if", "sgd"),
    )  # fmt: skip
    body = done.json
    assert [line for line in done.stderr.splitlines() if line.startswith("tracing")] == [
        "tracing batch 2", "tracing batch 3", "tracing batch 64",
    ]  # fmt: skip
    told = [line for line in done.stderr.splitlines() if "what would help is run" in line or line.startswith("what-if")]
    assert told[0].startswith("Batch 64 fits on NVIDIA A100 80 GB: "), "the answer comes before what else is run"
    assert len(told) == 2
    assert body["traced"]["buckets"]["parameters"] == WEIGHTS
    here = next(row for row in body["batch_sizes"] if row["batch_size"] == 64)
    assert here["peak_allocated_bytes"] == body["traced"]["peak_allocated_bytes"]
    assert {row["name"] for row in body["gpus"]} == set(gpus())
    largest = {row["name"]: row["max_batch_size"] for row in body["gpus"]}
    assert largest["a100-80gb"] == body["traced"]["max_batch_size"]
    assert largest["t4-16gb"] < largest["a100-40gb"] < largest["a100-80gb"]
    assert body["accumulation"] == {"steps": 16, "global_batch_size": 1024, "target_batch": 1000}
    sgd = next(row for row in body["techniques"] if row["key"] == "sgd")
    assert sgd["max_batch_size"] > body["traced"]["max_batch_size"]
    assert sgd["buckets"]["optimizer"] == 0


def test_what_cannot_be_changed_is_not_run_and_a_run_that_fails_does_not_end_the_plan(project: Project) -> None:
    project.write("train.py", SCRIPT)
    options = (
        "--what-if",
        "adafactor",
        "--what-if",
        "autocast",
        "--what-if",
        "checkpointing",
        "--what-if",
        "chunked-loss",
    )
    done = project.plan("python", "train.py", "--batch-size", "8", options=options)
    reasons = _reasons(done)
    assert reasons["adafactor"] == "its run failed: train.py:19: RuntimeError: no Adafactor, please"
    assert reasons["autocast"] == "the command uses autocast already"
    assert reasons["checkpointing"].startswith("no repeated blocks")
    assert reasons["chunked-loss"].startswith("no cross-entropy")
    assert done.stderr.count("what-if ") == 1


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ("Mine", "the command's optimizer is not torch's: __main__'s Mine"),
        ("SGD", "the command's optimizer is SGD without momentum"),
    ],
)
def test_an_optimizer_that_is_kept(project: Project, optimizer: str, said: str) -> None:
    project.write("train.py", SCRIPT)
    done = project.plan("python", "train.py", "--optimizer", optimizer, options=("--what-if", "sgd", "--quiet"))
    assert done.stderr == ""
    assert _reasons(done) == {"sgd": said}


def test_a_batch_size_that_is_not_given_is_the_usual_one(project: Project) -> None:
    project.write("train.py", SCRIPT)
    options = ("--no-what-if", "--accumulation", "4")
    done = project.plan("python", "train.py", "--batch-size", "{batch}", options=options)
    assert done.code == 0, done.stderr
    assert "planning for batch 8; --batch-size takes another" in done.stderr
    assert done.json["workload"]["batch_size"] == 8
    assert done.json["accumulation"] == {"steps": 4, "global_batch_size": 32, "target_batch": 32}


def test_without_what_ifs_the_command_runs_once(project: Project) -> None:
    project.write("train.py", SCRIPT)
    arguments = ("--gpu", "sim:h100-80gb", "--no-what-if", "--", project.python, "train.py", "--batch-size", "8")
    done = project.run("plan", *arguments)
    assert done.code == 0
    assert done.stderr.count("made a AdamW") == 1
    assert "| = allocated |" in done.stdout
    assert re.search(r"\n\d\d more GPUs: `gpumem-tui plan --json --gpu sim:h100-80gb -- ", done.stdout)
    typed = f"--gpu sim:h100-80gb -- {project.python} train.py --batch-size {{batch}}`"
    assert f"ther batch sizes: `gpumem-tui plan --batch-size 8 {typed}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--no-trace", "--", "python", "train.py"),
            "--no-trace: a command has no closed form, only a trace; --no-wha",
        ),
        (("--extra", "chunked-loss", "--", "python", "train.py"), "only a trace; --what-if chunked-loss runs it with"),
        (
            ("--tokens", "2B", "--", "python", "train.py"),
            "only a trace; `gpumem-tui plan --model NAME --tokens …` prints",
        ),
        (
            ("--solve", "seq-len", "--", "python", "train.py"),
            "only a trace; `gpumem-tui search` finds its largest batch",
        ),
        (
            ("--what-if", "sgd"),
            "--what-if: is about a command, which is written after `--`; leave it out: every change",
        ),
        (
            ("--no-what-if",),
            "--no-what-if: is about a command, which is written after `--`; leave it out: every change",
        ),
        (("--what-if", "sgd", "--no-what-if", "--", "python", "train.py"), "give only one of them"),
        (("--batch-size", "8", "--", "python", "train.py"), "--batch-size: the command has no {batch} to put it in"),
        (("--", "python", "train.py"), "No such file or directory"),
    ],
)
def test_what_is_wrong_is_one_line(project: Project, arguments: tuple[str, ...], said: str) -> None:
    done = project.run("plan", "--json", *arguments)
    assert done.code == 2
    assert said in done.complaint
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_ctrl_c_ends_the_runs_and_what_is_known_is_printed(project: Project) -> None:
    project.write(
        "train.py", SCRIPT.replace("    while True:", "    import time\n    while True:\n        time.sleep(3)", 1)
    )
    words = ("plan", "--json", "--gpu", "sim:a100-80gb", "--what-if", "sgd", "--", project.python, "train.py")
    with subprocess.Popen(
        [sys.executable, "-m", "gpumem_tui", *words],
        cwd=project.folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stderr is not None
        while not (said := program.stderr.read(1)).startswith("…"):
            assert said, "it ended before its what-if"
        program.send_signal(signal.SIGINT)
        out, _ = program.communicate(timeout=TIMEOUT_S)
    assert program.returncode == EXIT_INTERRUPTED
    assert json.loads(out)["traced"]["buckets"]["parameters"] == WEIGHTS
    assert json.loads(out)["not_applicable"][0]["reason"] == "not run: the plan was interrupted"


SHARDED = """
    import torch
    {more}
    from transformers import GPT2Config, GPT2LMHeadModel

    def network():
        return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=512, n_head=8, vocab_size=4096))
"""
TRAINER = """
    class Random(torch.utils.data.Dataset):
        def __len__(self):
            return 1000

        def __getitem__(self, _):
            tokens = torch.randint(0, 4096, (128,))
            return {"input_ids": tokens, "labels": tokens}

    arguments, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    Trainer(network(), arguments, train_dataset=Random()).train()
"""
LOOP = """
    accelerator = Accelerator()
    data = torch.utils.data.DataLoader(torch.randint(0, 4096, (1000, 128)), batch_size=4)
    model = network()
    model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)
    for tokens in data:
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("more", "program", "options"),
    [
        (
            "from transformers import HfArgumentParser, Trainer, TrainingArguments",
            TRAINER,
            ("--output_dir", "results", "--per_device_train_batch_size", "4", "--report_to", "none"),
        ),
        ("from accelerate import Accelerator", LOOP, ()),
    ],
    ids=["Trainer", "accelerate"],
)
def test_ranks_that_hold_parts_are_run_and_the_command_to_copy_takes_the_same(
    project: Project, more: str, program: str, options: tuple[str, ...]
) -> None:
    pytest.importorskip("accelerate")
    project.write("train.py", SHARDED.format(more=more) + program)
    keys = ("sharded", *(("deepspeed-zero2", "deepspeed-zero3") if importlib.util.find_spec("deepspeed") else ()))
    wanted = [word for key in keys for word in ("--what-if", key)]
    done = project.plan("python", "train.py", *options, options=(*wanted, "--quiet", "--gpus", "4"))
    rows = {row["key"]: row for row in done.json["techniques"] if row["source"] == "traced"}
    assert rows.keys() == {*keys}
    row = rows["sharded"]
    assert not any(row["key"].startswith("zero") for row in done.json["techniques"]), "no formula next to the run"
    held = done.json["traced"]["buckets"]
    for bucket in ("parameters", "optimizer"):
        assert 4 * row["buckets"][bucket] == pytest.approx(held[bucket], rel=0.01)
    for row in rows.values():
        assert row["command"] == row["how"]
        copied = project.predict(*shlex.split(row["command"]), options=("--quiet",)).json
        assert copied["workload"]["gpus"] == 4
        assert copied["traced"]["peak_allocated_bytes"] == row["peak_bytes"]
        assert copied["traced"]["buckets"] == row["buckets"]


def test_a_program_that_cannot_be_sharded_says_why_beside_what_is_worked_out(project: Project) -> None:
    by_hand = """
    while True:
        model(torch.randn(8, 1024, device="cuda")).sum().backward()
        for parameter in model.parameters():
            parameter.data -= 1e-3 * parameter.grad
            parameter.grad = None
"""
    project.write("train.py", SCRIPT.split("    optimizer = kind")[0] + by_hand)
    done = project.plan("python", "train.py", options=("--what-if", "sharded", "--quiet"))
    assert _reasons(done)["sharded"] == "no optimizer of torch's stepped"
    zero = [row["source"] for row in done.json["techniques"] if row["key"].startswith("zero")]
    assert zero == ["formula"] * 3
