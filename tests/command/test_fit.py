"""`fit`: from a command to its training, on a GPU that is played below torch, and on simulated ones."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpumem_tui.memory import GIB
from tests.cli.test_schema import faults
from tests.command.running import BLOCK, Finished, Project, needs
from tests.cuda_standin import ENVIRONMENT, Card, Machine
from tests.nvml_stub.machine import FakeMachine
from tests.sharing import WarmPython

ROOT = Path(__file__).parents[2]
SCRIPT = """
    import argparse, os, signal, sys
    import torch
    from torch import nn

    parser = argparse.ArgumentParser()
    parser.add_argument("--bs", type=int, default=4)
    parser.add_argument("--name", default="")
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--then", default="")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trains = device == "cpu"
    rows = 1 if trains else 4096
    if options.then == "grows" and trains:  # on a GPU that is played while it trains, too
        from tests.cuda_standin import install_from_environment
        install_from_environment()
        device, rows = "cuda", 4096
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(8 if trains else 4):
        if options.then == "grows" and step == 6:
            rows *= 2
        for _ in range(options.accum):
            inputs = torch.zeros(options.bs, rows, 512, device=device)
            model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if trains:
        print("trained", options.bs, options.accum, os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
        print("a warning of its own", file=sys.stderr)
    if trains and options.then == "fails":
        sys.exit(7)
    if trains and options.then == "waits":
        caught = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: caught.append(number))
        print("ready", flush=True)
        while len(caught) < 2:
            signal.pause()
            print("caught", caught[-1].__int__(), flush=True)
        sys.exit(7)
"""
_LINE = re.compile(r"gpumem-tui: batch ([\d,]+)(?: × ([\d,]+) passes)?(.*); ([\d.]+) of ([\d.]+) GiB")


@dataclass(frozen=True)
class Gpu:
    """A user's folder on a machine with a GPU, which is played while a trial runs; training itself is on the CPU."""

    project: Project
    environment: dict[str, str]

    def fit(self, *words: str, piped: str = "") -> Finished:
        """Run it to its end."""
        own = [self.project.python if word == "python" else word for word in words]
        return self.project.run("fit", *own, environment=self.environment, piped=piped)


@pytest.fixture
def gpu(project: Project, fake_machine: FakeMachine) -> Callable[[Card], Gpu]:
    def made(card: Card) -> Gpu:
        machine = Machine([card])
        fake_machine.show(machine.driver())
        project.write("train.py", SCRIPT)
        played = {name: value for name, value in fake_machine.environment.items() if name != "PATH"}
        path = os.pathsep.join((str(ROOT / "tests" / "standin_site"), str(ROOT)))
        own = {"GPUMEM_TUI_DIR": str(project.folder / "probes")}
        return Gpu(project, {ENVIRONMENT: machine.text(), "PYTHONPATH": path, **played, **own})

    return made


def test_a_command_trains_with_what_a_trial_confirmed(gpu: Callable[[Card], Gpu]) -> None:
    """Its output and its exit code are its own; `{batch}` may be there twice."""
    words = ("python", "train.py", "--bs", "{batch}", "--name", "run-{batch}", "--accum", "{accumulation}")
    done = gpu(Card()).fit("--target-batch", "64", "--", *words, "--then", "fails")
    ours, own = done.stderr.splitlines()[:-1], done.stderr.splitlines()[-1]
    assert (done.code, own) == (7, "a warning of its own"), done.stderr
    line = _LINE.match(ours[-1])
    assert line is not None, done.stderr
    size, passes = int(line[1]), int(line[2])
    assert size * passes == 64
    assert f"× {passes} passes = 64 samples a step;" in ours[-1]
    assert "predicted" not in ours[-1]
    assert float(line[4]) <= float(line[5])
    assert ours[-1].endswith("expandable segments on")
    assert done.stdout == f"trained {size} {passes} {Card().uuid}\n"


@pytest.mark.slow
def test_signals_are_its_own(gpu: Callable[[Card], Gpu]) -> None:
    there = gpu(Card())
    command = [sys.executable, "train.py", "--bs", "{batch}", "--then", "waits"]  # a child of the program
    program = subprocess.Popen(
        [WarmPython.path(), "-m", "gpumem_tui", "fit", "--target-batch", "8", "--", *command],
        executable=sys.executable,
        cwd=there.project.folder,
        env={**os.environ, **there.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with program:
        assert program.stdout is not None
        assert program.stderr is not None
        printed = [program.stdout.readline(), program.stdout.readline()]
        for number in (signal.SIGINT, signal.SIGTERM):
            program.send_signal(number)
            printed.append(program.stdout.readline())
        assert program.stdout.read() == ""
        assert program.wait(60) == 7, program.stderr.read()
    assert printed[1:] == ["ready\n", f"caught {signal.SIGINT:d}\n", f"caught {signal.SIGTERM:d}\n"]


@pytest.mark.slow
def test_a_program_that_is_piped_in_is_there_for_the_training_too(gpu: Callable[[Card], Gpu]) -> None:
    done = gpu(Card()).fit("--target-batch", "8", "--", "python", "-", "--bs", "{batch}", piped=textwrap.dedent(SCRIPT))
    assert (done.code, done.stdout) == (0, f"trained 8 1 {Card().uuid}\n"), done.stderr


@pytest.mark.slow
def test_a_trial_that_runs_out_is_followed_by_a_smaller_one(gpu: Callable[[Card], Gpu]) -> None:
    """A neighbour came that took a twelfth of the GPU."""
    there = gpu(Card(others_later_bytes=GIB * 2 // 3))
    done = there.fit("--", "python", "train.py", "--bs", "{batch}")
    assert done.code == 0, done.stderr
    out, line = done.stderr.splitlines()[-3:-1]
    failed = re.match(r"gpumem-tui: batch (\d+) was out of memory on .* \(wanted .* free\): (\d+) is next$", out)
    assert failed is not None, done.stderr
    assert int(failed[2]) < int(failed[1])
    assert line.startswith(f"gpumem-tui: batch {failed[2]} a step; ")
    assert done.stdout.startswith(f"trained {failed[2]} 1 ")


@pytest.mark.slow
def test_memory_that_runs_out_all_the_same_says_what_grew(gpu: Callable[[Card], Gpu]) -> None:
    words = (sys.executable, "train.py", "--bs", "{batch}", "--then", "grows")  # a child of the program
    done = gpu(Card()).fit("--", *words)
    assert (done.code, done.stdout) == (1, ""), done.stderr
    own, ours = done.stderr.split("Traceback", 1)
    assert own.splitlines()[-1].startswith("gpumem-tui: batch ")
    died, grew, more = ours.splitlines()[-3:]
    assert "out of memory" in died
    figures = re.match(
        r"gpumem-tui: since the trial these grew: activations, batch data and the rest ([\d.]+) → ([\d.]+) GiB, "
        r".* of it asked for$",
        grew,
    )
    assert figures is not None, done.stderr
    assert float(figures[2]) > float(figures[1])
    offered = re.match(r"gpumem-tui: to leave more free: `gpumem-tui (fit --headroom 0\.1 -- .*)`$", more)
    assert offered is not None, done.stderr
    assert shlex.split(offered[1])[5:] == ["train.py", "--bs", "{batch}", "--then", "grows"]


@pytest.mark.slow
def test_the_line_of_a_dry_run_is_typed(project: Project) -> None:
    project.write("train.py", SCRIPT)
    options = ("--dry-run", "--gpu", "sim:t4-16gb", "--target-batch", "1000", "--allow", "checkpointing")
    words = (project.python, "train.py", "--bs", "{batch}", "--accum", "{accumulation}")
    done = project.run("fit", *options, "--", *words)
    assert done.code == 0, done.stderr
    *_, allowed, line = done.stderr.splitlines()
    assert re.match(r"gpumem-tui: --allow checkpointing: not needed, as batch \d+ fits$", allowed)
    assert line.endswith("; expandable segments on; predicted for simulated NVIDIA T4")
    typed = done.stdout.strip()
    assert typed.startswith("PYTORCH_")
    ran = subprocess.run(["sh", "-c", typed], cwd=project.folder, capture_output=True, text=True, check=True)
    size, passes = map(int, ran.stdout.split()[1:3])
    assert size * passes >= 1000
    assert f"batch {size} × {passes} passes = {size * passes:,} samples a step" in line


def test_a_step_that_has_fewer_samples_says_what_to_write(project: Project) -> None:
    project.write("train.py", SCRIPT)
    project.write("bs.yaml", "batch_size: {batch}\n")
    options = ("--dry-run", "--json", "--gpu", "sim:t4-16gb", "--target-batch", "5000", "--allow", "checkpointing,lora")
    done = project.run("fit", *options, "--", project.python, "train.py", "--bs", "{batch}", "--name", "bs.yaml")
    found = done.json
    assert faults(found, "fit") == []
    size = found["batch_size"]
    assert found["accumulation"] == {"steps": 1, "global_batch_size": size, "target_batch": 5000}
    assert (found["confirmed"], found["ranks"], found["changes"]) == (False, 1, [])
    assert found["device_used_bytes"] <= found["device"]["total_bytes"]
    assert [one["change"] for one in found["not_made"]] == ["checkpointing", "lora"]
    assert found["not_made"][0]["reason"].startswith("no repeated blocks: its 2 Linear are single layers")
    line = f"{project.python} train.py --bs {{batch}} --name bs.yaml --accum {{accumulation}}"
    assert (
        f"a step has {size} samples, not 5,000, as the command has no {{accumulation}}: write `{line}`" in done.stderr
    )
    subprocess.run(["sh", "-c", found["command"]], cwd=project.folder, capture_output=True, check=True)
    assert (project.folder / f"bs-{size}.yaml").read_text() == f"batch_size: {size}\n"


CHECKPOINTED = f"""
    import argparse
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--gradient-checkpointing", action="store_true", help="recompute activations")
    options = parser.parse_args()
    WIDTH = 2048

{BLOCK}
    blocks = nn.ModuleList(Block() for _ in range(8)).cuda()
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
    for _ in range(4):
        x = torch.zeros(options.batch_size, 32768, WIDTH, device="cuda")
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False) if options.gradient_checkpointing else block(x)
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_what_no_change_is_known_for_is_told_the_plan_of_its_gpu_and_batch(project: Project) -> None:
    project.write(
        "train.py",
        f"""\
        import argparse, torch
        parser = argparse.ArgumentParser()
        parser.add_argument("--batch-size", type=int)
        batch = parser.parse_args().batch_size
        model = torch.nn.Linear(8, 8).cuda()
        table = torch.zeros({32 << 30}, dtype=torch.uint8, device="cuda")
        model(torch.randn(batch, 8, device="cuda")).sum().backward()
        torch.optim.SGD(model.parameters()).step()
        """,
    )
    words = ("--", project.python, "train.py", "--batch-size", "{batch}")
    refused = project.run("fit", "--dry-run", "--gpu", "sim:t4-16gb", *words)
    assert (refused.code, refused.stdout) == (3, "")
    assert "; `gpumem-tui plan --gpu sim:t4-16gb --batch-size 1 -- " in refused.complaint


@pytest.mark.slow
def test_what_does_not_fit_is_told_what_to_allow_and_then_does(project: Project) -> None:
    project.write("train.py", CHECKPOINTED)
    words = ("--", project.python, "train.py", "--batch-size", "{batch}")
    refused = project.run("fit", "--dry-run", "--gpu", "sim:t4-16gb", *words)
    assert (refused.code, refused.stdout) == (3, "")
    assert re.search(r"nothing fits: batch 1 is out of memory on simulated NVIDIA T4: [\d.]+ GiB missing; "
                     r"--allow checkpointing may make it fit$", refused.complaint)  # fmt: skip
    done = project.run("fit", "--dry-run", "--gpu", "sim:t4-16gb", "--allow", "checkpointing", *words)
    assert done.code == 0, done.stderr
    assert re.search(r" train\.py --batch-size \d+ --gradient-checkpointing$", done.stdout.strip())
    assert "; checkpointed blocks (--gradient-checkpointing); " in done.complaint


@pytest.mark.slow
@needs("transformers")
def test_changes_are_in_the_frameworks_own_words(project: Project) -> None:
    project.write(
        "train.py",
        """
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

        (options,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
        model = GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=256, n_head=4, n_positions=4096, vocab_size=500))
        data = [{"input_ids": torch.ones(4096, dtype=torch.long), "labels": torch.ones(4096, dtype=torch.long)}] * 64
        Trainer(model, options, train_dataset=data).train()
        """,
    )
    words = ("train.py", "--output_dir", "out", "--report_to", "none", "--per_device_train_batch_size", "{batch}")
    options = ("--gpu", "sim:custom", "--memory", "2GiB", "--allow", "checkpointing,lora")
    done = project.run("fit", "--dry-run", *options, "--", project.python, *words)
    assert done.code == 0, done.stderr
    assert done.stdout.strip().endswith(" --gradient_checkpointing True")
    assert "--allow lora: the command's line cannot say it; to have it, write peft.get_peft_model(" in done.stderr


@pytest.mark.slow
def test_each_rank_has_the_batch(project: Project) -> None:
    """And passes that are divided among the ranks are those of all, as nanoGPT's."""
    script = SCRIPT.replace(
        "options = parser.parse_args()",
        """options = parser.parse_args()
    assert options.accum % int(os.environ["WORLD_SIZE"]) == 0  # configurator.py
    options.accum //= int(os.environ["WORLD_SIZE"])""",
    )
    project.write("train.py", script)
    launcher = (project.python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    options = ("--dry-run", "--json", "--gpu", "sim:t4-16gb", "--target-batch", "2000")
    done = project.run("fit", *options, "--", *launcher, "--bs", "{batch}", "--accum", "{accumulation}")
    found = done.json
    assert found["ranks"] == 2
    size, step = found["batch_size"], found["accumulation"]
    assert step["global_batch_size"] == 2 * size * step["steps"] >= 2000
    assert f"--bs {size} --accum {2 * step['steps']}" in found["command"]
    assert f"batch {size} on each of 2 GPUs × {step['steps']} passes = " in done.stderr


def test_what_cannot_be_fitted_is_refused_in_one_line(project: Project) -> None:
    project.write("train.py", SCRIPT)
    words = ("--", project.python, "train.py", "--bs")
    typed, t4 = shlex.join([*words, "{batch}"]), ("--gpu", "sim:t4-16gb")
    own = ("--allow", "lora")
    for given, said in (
        ((*t4, *words, "{batch}"), f"`gpumem-tui fit --dry-run --gpu sim:t4-16gb {typed}` prints the command"),
        ((*words, "{batch}"), f"`gpumem-tui fit --dry-run --gpu sim:rtx-4090 {typed}` prints the command"),
        ((*t4, *own, *words, "{batch}"), f"`gpumem-tui fit --dry-run --gpu sim:t4-16gb --allow lora {typed}` prints"),
        ((*t4, *words, "8"), f"`gpumem-tui fit --gpu sim:t4-16gb {shlex.join(words)} {{batch}}`"),
        (
            ("--dry-run", *t4, *own, *words, "8"),
            f"`gpumem-tui fit --gpu sim:t4-16gb --dry-run --allow lora {shlex.join(words)} {{batch}}`",
        ),
        (("--json", *words, "{batch}"), "add --dry-run"),
        (("--allow", "more-ram", *words, "{batch}"), "'more-ram' is none of checkpointing, adamw-8bit"),
        ((), "write it as `-- python train.py --batch-size {batch}`"),
    ):  # fmt: skip
        done = project.run("fit", *given)
        assert (done.code, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert said in done.stderr
