"""`plan` without a terminal: the contract, the round trip, bad input."""

from __future__ import annotations

import json
import os
import pty
import shlex
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.cli.parameters import configured
from gpumem_tui.cli.plan import _accumulated, _Asked, _goals, _planned, plan
from gpumem_tui.formula.techniques import CHANGES, EVERY_CHANGE, why_not
from gpumem_tui.memory import Unknown
from gpumem_tui.options.configuration import Options, command_plan_line, configure, options_of
from gpumem_tui.options.workload import WorkloadOptions
from gpumem_tui.plan.answers import answer
from gpumem_tui.plan.control import Choice, Control
from gpumem_tui.plan.controls import _WORDS, controls
from gpumem_tui.plan.export import command_line
from gpumem_tui.plan.goals import Goals
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.state import PlanState, chosen, nudged, opened
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.workload.spec import WorkloadSpec
from tests.cli.conftest import Program
from tests.plan.plans import plans
from tests.sharing import WarmPython

SMALL = ("--layers", "1", "--hidden", "64", "--heads", "2", "--vocab", "512", "--seq-len", "64")

_OF_PLAN_ALONE = ("as_json", "markdown", "no_trace", "trace_limit", "solve", "accumulation")


def parsed(line: str) -> Plan:
    """The plan that a command line describes, through the real parser."""
    program, command, *arguments = shlex.split(line)
    assert (program, command) == ("gpumem-tui", "plan")
    values = plan.make_context("plan", arguments).params
    for name in (*_OF_PLAN_ALONE, "what_ifs", "no_what_if", "quiet"):
        values.pop(name)
    size, extras = values.pop("batch_size"), frozenset(values.pop("extras"))
    goals = _goals(values)
    options, config = configured(values, share=True)
    return _planned(options, config, size or 1, extras, goals)


@given(plans())
def test_a_plan_survives_its_own_command_line(plan: Plan) -> None:
    line = command_line(plan)
    assert isinstance(line, str)
    assert parsed(line) == plan


BASES = {
    "dense": "--model gpt2",
    "adapters": "--model llama-3.2-1b --adapter lora --precision bf16",
    "experts": "--model mixtral-8x7b --gpus 8 --sharding zero3",
    "pipeline": "--model llama-3-8b --gpus 16 --tensor-parallel 2 --pipeline-parallel 4 --schedule interleaved"
    " --virtual-stages 2 --micro-batches 8",
    "images": "--model vit-b-16 --target-batch 64",
    "convolutions": "--model resnet-50 --channels-last",
}


def settings_of(state: PlanState, control: Control) -> list[PlanState]:
    """The plans that one control can make: every value of a choice, the next ones of a number."""
    if isinstance(control, Choice):
        return [chosen(state, control.key, option.value) for option in control.options(state.draft)]
    return [nudged(state, control.key, way, jump=jump) for way in (-1, 1) for jump in (False, True)]


def opens_it_again(wanted: Plan) -> bool:
    """Whether a plan's line opens it; without extras that such a network has no use for, which change no byte.

    Sharding on one GPU, which no line can have, notes this.
    """
    line, recipe = command_line(wanted), wanted.recipe
    if isinstance(line, Unknown):
        return recipe.sharding != "none" and recipe.gpus == 1 and "GPUs to 2 or more" in line.reason
    useful = frozenset(extra for extra in wanted.extras if why_not(extra, wanted.shape, recipe) is None)
    again = parsed(line)
    return again == replace(wanted, extras=useful) and answer(again).peak_bytes == answer(wanted).peak_bytes


@pytest.mark.parametrize("base", BASES)
def test_what_each_control_makes_survives_its_command_line(base: str) -> None:
    state = opened(parsed(f"gpumem-tui plan --gpu sim:h100-80gb {BASES[base]}"))
    made = {one.plan: control.key for control in controls(state.draft) for one in settings_of(state, control)}
    for wanted, key in made.items():
        assert opens_it_again(wanted), key


def test_these_have_every_control() -> None:
    states = [opened(parsed(f"gpumem-tui plan --gpu sim:h100-80gb {base}")) for base in BASES.values()]
    assert {control.key for state in states for control in controls(state.draft)} == set(_WORDS)


@given(st.data())
def test_what_several_controls_make_survives_too(data: st.DataObject) -> None:
    state = opened(parsed(f"gpumem-tui plan --gpu sim:h100-80gb {BASES[data.draw(st.sampled_from(sorted(BASES)))]}"))
    for _ in range(data.draw(st.integers(2, 8))):
        control = data.draw(st.sampled_from(controls(state.draft)))
        state = data.draw(st.sampled_from(settings_of(state, control)))
    assert opens_it_again(state.plan)


@pytest.mark.parametrize("changes", [{"hidden": 384}, {"heads": 6}, {"hidden": 1536, "ffn": 1000}, {"seq_len": 512}])
def test_a_changed_model_survives_too(changes: dict[str, int]) -> None:
    plan = parsed("gpumem-tui plan --model gpt2 --gpu sim:a100-80gb")
    changed = replace(plan, shape=plan.shape.overridden(**changes))
    line = command_line(changed)
    assert isinstance(line, str)
    assert parsed(line) == changed


def test_a_model_of_a_file_survives_too_and_is_searched(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100, "n_positions": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = parsed(f"gpumem-tui plan --config {tmp_path} --layers 3 --dequantize --precision bf16 --gpu sim:a100-80gb")
    for wanted in (plan, replace(plan, shape=plan.shape.overridden(seq_len=16), batch_size=4)):
        line = command_line(wanted)
        assert isinstance(line, str)
        assert line.startswith(f"gpumem-tui plan --config {tmp_path / 'config.json'} --dequantize --layers 3 ")
        assert parsed(line) == wanted
        options = options_of(wanted)
        plain = WorkloadSpec(wanted.recipe, shape=wanted.shape, model_file=wanted.model_file)
        assert configure(options).workload == replace(plain, why_plain="the shape is not the file's")
        assert WorkloadSpec.from_wire(json.loads(json.dumps(asdict(options.trained.spec())))) == options.trained.spec()
    another = chosen(opened(plan), "model", "gpt2")
    assert command_line(another.plan) == (
        "gpumem-tui plan --model gpt2 --precision bf16 --batch-size 1 --gpu sim:a100-80gb"
    )


def test_a_context_that_was_typed_survives_too_and_is_searched() -> None:
    plan = parsed("gpumem-tui plan --model gpt2 --gpu sim:a100-80gb --context-bytes 2GiB")
    line = command_line(plan)
    assert isinstance(line, str)
    assert parsed(line).gpu.context == plan.gpu.context
    assert configure(options_of(plan)).device.gpu.context == plan.gpu.context


def test_goals_survive_too() -> None:
    plan = parsed("gpumem-tui plan --model gpt2 --gpu sim:a100-80gb")
    wanted = replace(plan, goals=Goals(3 * 10**11, 1.99, 16, 4))
    line = command_line(wanted)
    assert isinstance(line, str)
    assert parsed(line) == wanted
    assert parsed("gpumem-tui plan --gpu sim:a100-80gb --tokens 1.5B").goals.tokens == 1_500_000_000


def test_how_it_is_traced_survives_too(tmp_path: Path) -> None:
    measured = tmp_path / "measured here.toml"
    measured.write_text("")
    typed = shlex.join(["--python", sys.executable, "--calibration", str(measured), "--timeout", "60", "--steps", "4"])
    line = command_line(parsed(f"gpumem-tui plan --model gpt2 --gpu sim:a100-80gb {typed}"))
    assert isinstance(line, str)
    assert f"--calibration '{measured}' --python {sys.executable} --timeout 60.0 --steps 4" in line
    assert parsed(line) == parsed(f"gpumem-tui plan --gpu sim:a100-80gb {typed}")
    assert "--calibration" not in str(command_line(parsed("gpumem-tui plan --gpu sim:a100-80gb")))


Asked = tuple[Options, SearchConfig, int | None, tuple[str, ...], bool]
"""A command's plan as it was asked for: options, what is planned, the batch, the changes, and whether any are run."""


def asked_for(arguments: list[str]) -> Asked:
    """The request of a command line for a command's plan, through the real parser."""
    with plan.make_context("plan", arguments) as context:
        values = dict(context.params)
        asked = _Asked(**{field.name: values.pop(field.name) for field in fields(_Asked)})
        _goals(values)
        options, config = configured(values, share=True)
    config = _accumulated(config, asked, asked.batch_size or 1)
    return options, config, asked.batch_size, asked.what_ifs, asked.no_what_if


def typed_for_a_command() -> st.SearchStrategy[list[str]]:
    """Options that a command's plan takes, each of them perhaps."""
    share = st.floats(0, 1, allow_nan=False).map(repr)
    rows = share | share.map(lambda text: f"train.py:12={text}")
    bytes_ = st.integers(1 << 20, 1 << 36).map(str) | st.just("1.5MiB") | st.just("0.7KiB")
    values = {
        "--gpus": st.integers(1, 64).map(str),
        "--accumulation": st.integers(1, 64).map(str),
        "--context-bytes": bytes_,
        "--headroom": st.floats(0, 0.99, allow_nan=False).map(repr),
        "--timeout": st.floats(1, 1e5).map(repr),
        "--steps": st.integers(1, 99).map(str),
        "--longest": st.integers(1, 9999).map(str),
        "--through": st.just("eval"),
        "--assume-rows": rows,
        "--torch-version": st.just("2.1"),
    }
    each: list[st.SearchStrategy[list[str]]] = [
        st.just([]) | value.map(partial(lambda name, text: [name, text], name)) for name, value in values.items()
    ]
    changes = st.lists(st.sampled_from([*CHANGES, EVERY_CHANGE]), max_size=3)
    runs = changes.map(lambda names: [word for name in names for word in ("--what-if", name)])
    return st.tuples(*each, runs | st.just(["--no-what-if"])).map(
        lambda parts: [word for part in parts for word in part]
    )


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


@given(typed_for_a_command(), st.lists(WORDS, max_size=3), st.integers(1, 512))
def test_a_command_s_plan_survives_its_own_command_line(typed: list[str], words: list[str], batch: int) -> None:
    command = ["python", "train.py", "--batch-size", "{batch}", *words]
    arguments = [*typed, "--gpu", "sim:a100-80gb", "--batch-size", str(batch), "--", *command]
    asked = asked_for(arguments)
    options, config, _, what_ifs, no_what_if = asked
    line = command_plan_line(options, config, batch, config.device.gpu, what_ifs=what_ifs, run_all=not no_what_if)
    assert isinstance(line, str)
    program, verb, *again = shlex.split(line)
    assert (program, verb) == ("gpumem-tui", "plan")
    assert again[again.index("--") + 1 :] == command
    assert asked_for(again)[1:] == asked[1:]
    assert asked_for(again)[1].device.gpu.context == config.device.gpu.context


def test_a_command_s_plan_on_another_gpu_is_opened_there_without_the_context_of_the_first() -> None:
    words = ["--gpu", "sim:a100-80gb", "--context-bytes", "2GiB", "--", "python", "train.py"]
    options, config, *_ = asked_for(words)
    line = command_plan_line(options, config, 1, find_gpu("h100-80gb"), what_ifs=(), run_all=True)
    assert line == "gpumem-tui plan --gpu sim:h100-80gb -- python train.py"


def test_a_model_that_transformers_builds_is_opened_again_too(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "t5", "d_model": 64}))
    options = Options(WorkloadOptions(config=str(file), precision="bf16"), gpu="sim:a100-80gb")
    config = configure(options)
    line = command_plan_line(options, config, 4, config.device.gpu, what_ifs=(), run_all=True)
    assert line == f"gpumem-tui plan --config {file} --precision bf16 --gpu sim:a100-80gb --batch-size 4"


def test_speed_and_cost_in_json(program: Program) -> None:
    arguments = (
        "--precision",
        "bf16",
        "--gpu",
        "sim:h100-80gb",
        "--tokens",
        "2B",
        "--price",
        "2",
        "--no-trace",
        "--json",
    )
    found = json.loads(program("plan", *arguments).out)
    least, most = found["speed"]["tokens_per_s"]
    assert 0 < least < most
    assert found["run"]["hours"] == pytest.approx([2e9 / most / 3600, 2e9 / least / 3600])
    assert found["run"]["cost"] == pytest.approx([2 * hours for hours in found["run"]["hours"]])
    emulated = json.loads(program("plan", "--precision", "bf16", "--gpu", "sim:t4-16gb", "--no-trace", "--json").out)
    assert emulated["speed"]["samples_per_s"] is None
    assert "emulation" in emulated["speed"]["unavailable"]


def test_json_has_the_same_numbers_as_predict(program: Program) -> None:
    arguments = ("--model", "mlp", "--hidden", "64", "--batch-size", "4", "--target-batch", "64", "--json")
    planned, predicted = program("plan", *arguments), program("predict", *arguments)
    assert (planned.code, predicted.code) == (0, 0)
    ours, theirs = json.loads(planned.out), json.loads(predicted.out)
    for key in ("schema", "device", "formula", "traced"):
        assert ours[key] == theirs[key]
    assert ours["workload"] == {**theirs["workload"], "extras": []}
    assert ours["accumulation"].items() >= theirs["accumulation"].items()


@pytest.mark.slow
def test_whoever_watches_is_told_that_a_trace_takes_its_time(program: Program) -> None:
    ours, theirs = pty.openpty()
    command = [WarmPython.path(), "-m", "gpumem_tui", "plan", *SMALL, "--json"]
    printed, said = program.folder / "plan.json", b""
    with os.fdopen(ours, "rb") as terminal, printed.open("wb") as out:
        process = subprocess.Popen(command, executable=sys.executable, cwd=program.folder, stdout=out, stderr=theirs)
        os.close(theirs)
        with suppress(OSError):  # the terminal ends with the last who has it open
            while part := terminal.read1():
                said += part
        assert process.wait(timeout=240) == 0
    assert json.loads(printed.read_bytes())["traced"]["peak_allocated_bytes"]
    assert said.startswith(b"tracing one step of gpt2 without a GPU")
    assert said.endswith(b"\r\x1b[K"), "the line is gone when it is no longer true"


def test_without_a_terminal_it_prints_markdown(program: Program) -> None:
    done = program("plan", "--no-trace", "--model", "llama-3-8b", "--gpus", "4", "--gpu", "sim:rtx-4090-24gb")
    assert done.code == 0
    answer, _, title = done.out.splitlines()[:3]
    needs = "needs 159.32 of 20.72 GiB, 138.60 GiB missing"
    assert answer.startswith(f"Batch 1 does not fit by formula on 4 × NVIDIA GeForce RTX 4090: {needs}; ")
    assert "To change: " in answer
    assert title.startswith("# Plan: llama-3-8b")
    assert "No trace: not asked for (--no-trace)." in done.out


@pytest.mark.slow
def test_an_optimizer_that_pytorch_lacks_is_traced_all_the_same(program: Program) -> None:
    done = program("plan", *SMALL, "--optimizer", "adamw-8bit", "--json")
    assert done.code == 0
    found = json.loads(done.out)["traced"]
    assert found["max_batch_size"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--json", "--markdown"), "give only one of them"),
        (("--json", "--plain"), "give only one of them"),
        (("--model", "resnet-50", "--extra", "chunked-loss"), "--extra chunked-loss: a classifier's head"),
        (("--gpus", "0"), "--gpus"),
        (("--batch-size", "0"), "--batch-size"),
        (("--batch-size", "4", "--target-batch", "2"), "--target-batch: 2 is less than one pass of 4"),
        (("--heads", "7"), "--heads: 7 heads do not divide"),
        (("--model", "gpt2", "--seq-len", "2048"), "--seq-len"),
        (("--limit", "3GiB"), "--limit"),
        (("--workload", "train.py"), "--workload"),
    ],
)
def test_bad_input_is_one_line(program: Program, arguments: tuple[str, ...], said: str) -> None:
    (program.folder / "train.py").touch()
    done = program("plan", "--no-trace", *arguments)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert done.err.count("\n") == 1


def test_how_far_a_number_can_go_without_torch(program: Program) -> None:
    arguments = ("--model", "gpt2", "--precision", "bf16", "--gpu", "sim:t4-16gb", "--solve", "seq-len", "--no-trace")
    done = program("plan", *arguments)
    assert done.out.startswith("Longest sequence of gpt2 on NVIDIA T4: ≈1,024 tokens, by formula: an estimate.")
    said = json.loads(program("plan", *arguments, "--json").out)
    assert (said["solve"], said["value"], said["how"], said["formula"]) == ("seq-len", 1024, "formula", 1024)
    assert "\n# Longest sequence: gpt2 on NVIDIA T4\n" in program("plan", *arguments, "--markdown").out


def test_nothing_to_solve_for_is_said_in_one_line(program: Program) -> None:
    both = program("plan", "--accumulation", "4", "--target-batch", "64", "--no-trace", "--plain")
    assert (both.code, "--accumulation and --target-batch" in both.err) == (2, True)
    of_command = program("plan", "--solve", "seq-len", "--", "python", "train.py")
    assert (of_command.code, "--solve" in of_command.err) == (2, True)
    too_large = program("plan", "--model", "llama-3-70b", "--gpu", "sim:t4-16gb", "--solve", "seq-len", "--no-trace")
    first = too_large.out.splitlines()[0]
    assert too_large.code == 3
    assert first.startswith(
        "Longest sequence of llama-3-70b on NVIDIA T4: none; even 128 tokens cannot fit: parameters"
    )
