"""`search` and `predict` without a terminal: the JSON contract, the plain log, the exit codes."""

from __future__ import annotations

import json
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpumem_tui.catalog.loader import find_gpu
from tests.cli.conftest import Finished, Program
from tests.search.trials import workload
from tests.sharing import made_once

_BYTES = {"type": "integer", "minimum": 0}
_BUCKET_NAMES = ("parameters", "gradients", "optimizer", "activations", "batch_data")
_FORMULA_BUCKETS = {"type": "object", "required": list(_BUCKET_NAMES), "additionalProperties": _BYTES}
_ALL_BUCKETS = {
    "type": "object",
    "required": [*_BUCKET_NAMES, "temporary", "other"],
    "additionalProperties": _BYTES,
}
_DEVICE = {
    "type": "object",
    "required": ["name", "total_bytes", "simulated"],
    "properties": {"name": {"type": "string"}, "total_bytes": _BYTES, "simulated": {"type": "boolean"}},
}
_TRACED = {
    "type": "object",
    "required": [
        "buckets",
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "device_used_bytes",
        "max_batch_size",
        "profile",
    ],
    "properties": {
        "buckets": _ALL_BUCKETS,
        "peak_allocated_bytes": _BYTES,
        "peak_reserved_bytes": _BYTES,
        "device_used_bytes": _BYTES,
        "max_batch_size": _BYTES,
        "profile": {"type": "string"},
    },
}
_FORMULA = {
    "type": "object",
    "required": ["buckets", "peak_bytes", "max_batch_size"],
    "properties": {"buckets": _FORMULA_BUCKETS, "peak_bytes": _BYTES, "max_batch_size": _BYTES},
}
_PREDICT = {
    "type": "object",
    "required": ["schema", "workload", "device", "formula", "traced"],
    "properties": {
        "schema": {"const": 1},
        "workload": {"type": "object", "required": ["model", "batch_size"]},
        "device": _DEVICE,
        "formula": _FORMULA,
        "traced": _TRACED,
    },
}
_TRIAL = {
    "type": "object",
    "required": [
        "event",
        "batch_size",
        "outcome",
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "buckets",
        "seconds",
    ],
    "properties": {
        "event": {"const": "trial"},
        "batch_size": {"type": "integer", "minimum": 1},
        "outcome": {"enum": ["fit", "oom", "error"]},
        "peak_allocated_bytes": _BYTES,
        "peak_reserved_bytes": _BYTES,
        "buckets": _ALL_BUCKETS,
        "seconds": {"type": "number", "minimum": 0},
    },
}
_RESULT = {
    "type": "object",
    "required": ["event", "max_batch_size", "trials", "ooms", "verified", "with_headroom"],
    "properties": {
        "event": {"const": "result"},
        "max_batch_size": _BYTES,
        "trials": _BYTES,
        "ooms": _BYTES,
        "verified": {"type": "boolean"},
        "with_headroom": {
            "type": "object",
            "required": ["headroom", "max_batch_size", "free_bytes", "known_by"],
            "properties": {"max_batch_size": _BYTES, "free_bytes": _BYTES, "known_by": {"enum": ["trial", "trace"]}},
        },
        "device": _DEVICE,
        "formula": _FORMULA,
        "traced": _TRACED,
    },
}


def _lines(done: Finished) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.out.splitlines()]


SMALL = ("--layers", "1")
"""Half of gpt2's work: 46,473,216 parameters."""
TINY = (*SMALL, "--hidden", "64", "--heads", "2", "--vocab", "512", "--seq-len", "64")


@pytest.fixture(scope="module")
def gpt2(program: Program, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return made_once(tmp_path_factory, "searched", lambda: program("search", "--json", *SMALL))


@pytest.fixture(scope="module")
def predicted(program: Program, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    arguments = ("predict", "--batch-size", "8", "--target-batch", "256", "--json", *SMALL)
    return made_once(tmp_path_factory, "predicted", lambda: program(*arguments))


def test_search_finds_and_verifies_gpt2_on_a_simulated_a100(gpt2: Finished) -> None:
    *trials, result = _lines(gpt2)
    assert gpt2.code == 0
    assert gpt2.err == ""
    for trial in trials:
        jsonschema.validate(trial, _TRIAL)
        assert sum(trial["buckets"].values()) == trial["peak_allocated_bytes"]
    jsonschema.validate(result, _RESULT)
    assert result["verified"] is True
    assert result["device"]["simulated"] is True
    outcomes = {trial["batch_size"]: trial["outcome"] for trial in trials}
    assert outcomes[result["max_batch_size"]] == "fit"
    assert outcomes[result["max_batch_size"] + 1] == "oom"
    assert result["trials"] == len(trials)
    assert result["ooms"] == list(outcomes.values()).count("oom")


def test_the_trace_predicts_what_the_trial_finds_to_the_byte(gpt2: Finished) -> None:
    *trials, result = _lines(gpt2)
    fit = next(trial for trial in trials if trial["batch_size"] == result["max_batch_size"])
    assert result["traced"]["buckets"] == fit["buckets"]
    assert result["traced"]["peak_reserved_bytes"] == fit["peak_reserved_bytes"]
    assert result["traced"]["max_batch_size"] == result["max_batch_size"]


def test_the_batch_that_leaves_the_headroom_leaves_it_when_it_is_run(gpt2: Finished, program: Program) -> None:
    found = _lines(gpt2)[-1]
    roomy = found["with_headroom"]
    assert roomy["max_batch_size"] < found["max_batch_size"]
    assert roomy["free_bytes"] >= 0.1 * found["device"]["total_bytes"]
    (alone,) = _lines(program("predict", "--json", "--batch-size", str(roomy["max_batch_size"]), *SMALL))
    assert find_gpu("a100-80gb").cuda_total_bytes - alone["traced"]["device_used_bytes"] == roomy["free_bytes"]


@pytest.mark.slow
def test_the_plain_log_compares_the_formula_and_says_what_was_missing(program: Program) -> None:
    done = program("search", "--plain", "--model", "llama-3.2-1b", "--layers", "4", "--precision", "amp-bf16")
    answer = done.out.partition("\n")[0]
    assert answer.startswith("Safe batch ")
    assert re.search(r"; batch 12 keeps 10 % \([\d.]+ GiB\) free; batch 15 at no cost: export \S+\.$", answer)
    assert "formula error" in done.out
    temporary = next(line for line in done.out.splitlines() if line.startswith("temporary "))
    assert re.search(r" -1\d\.\d MiB$", temporary)
    missing = re.search(r"out of memory .* wanted ([\d.]+) GiB, ([\d.]+) GiB free\n", done.out)
    assert missing is not None
    assert float(missing[1]) > float(missing[2])
    assert re.search(r"\nCUDA context [\d.]+ GiB \([\d.–]+ GiB\): measured on ", done.out)


def test_a_workload_file_on_a_simulated_gpu_shows_no_error_that_proves_nothing(
    program: Program, tmp_path: Path
) -> None:
    spec = workload(tmp_path)
    assert spec.file is not None
    done = program("search", "--plain", "--workload", spec.file, "--gpu", "sim:t4-16gb", "--limit", "1GiB")
    assert done.code == 0
    assert "error" not in done.out
    table = done.out[done.out.index("\nat batch ") :]
    assert re.match(r"\nat batch \d+ +Simulated\n", table)


def test_nothing_fits(program: Program) -> None:
    done = program("search", "--plain", "--model", "llama-3-8b", "--layers", "12", "--gpu", "sim:rtx-4090-24gb")
    assert re.match(r"Nothing fits: one sample is out of memory on .*RTX 4090\. To change: --.*\.\n", done.out)
    assert done.code == 3
    assert "optimizer state alone needs 27.33 GiB of the card's 23.99 GiB" in done.out
    assert re.search(r"--adapter lora --base-quantization nf4-dq: saves [\d.]+ GiB, batch 1 fits; ", done.out)
    assert re.search(r"--adapter lora: saves [\d.]+ GiB, not enough alone; ", done.out)
    assert "needs more GPUs than the one that is searched" in done.out


@pytest.mark.slow
def test_the_ramp_shows_its_trials_in_plain_lines(program: Program) -> None:
    small = ["--layers", "1", "--hidden", "64", "--heads", "2", "--vocab", "1024", "--seq-len", "256"]
    done = program("search", "--plain", "--strategy", "ramp", "--limit", "64MiB", *small)
    trials = [line.split() for line in done.out.splitlines() if line.startswith("trial ")]
    assert done.code == 0
    assert [int(words[3]) for words in trials] == list(range(1, len(trials) + 1))
    assert [words[4] for words in trials] == ["fits"] * (len(trials) - 1) + ["out"]
    assert len(trials) >= 5
    begun, ended = (
        re.findall(rf"^ *\d+ s  trial (\d+): batch (\d+) {how}", done.err, re.M) for how in ("…", "\\w.*, took ")
    )
    assert begun == ended == [(words[1], words[3]) for words in trials], "each is shown as it runs"
    assert "SIMULATED" in done.out
    measured = [line for line in done.out.splitlines() if "measured" in line.lower()]
    assert [line.startswith("CUDA context ") for line in measured] == [True], "of what ran nothing was"
    assert "verified" in done.out


def test_predict_prints_the_contract(predicted: Finished) -> None:
    assert predicted.code == 0
    (body,) = _lines(predicted)
    jsonschema.validate(body, _PREDICT)
    assert body["workload"]["parameters"] == 46_473_216
    assert body["formula"]["buckets"]["parameters"] == 4 * 46_473_216
    assert sum(body["traced"]["buckets"].values()) == body["traced"]["peak_allocated_bytes"]
    assert body["accumulation"] == {"steps": 32, "global_batch_size": 256, "target_batch": 256}


def test_predict_has_the_most_of_each_bucket_beside_what_it_holds_at_the_peak(predicted: Finished) -> None:
    (body,) = _lines(predicted)
    parameters, highest = body["workload"]["parameters"], body["traced"]["highest"]
    assert body["formula"]["highest"]["gradients"] == 4 * parameters
    assert highest["gradients"]["phase"] == "backward"
    assert 4 * parameters <= highest["gradients"]["bytes"] < 4.01 * parameters
    assert all(
        highest[bucket]["bytes"] >= held
        for bucket, held in body["traced"]["buckets"].items()
        if held and bucket != "other"
    )


def test_predict_has_the_ends_of_what_is_not_known_beside_what_is_expected(predicted: Finished) -> None:
    (body,) = _lines(predicted)
    traced = body["traced"]
    used, context = traced["device_used_range"], traced["unknowns"][0]
    assert used["low_bytes"] < traced["device_used_bytes"] < used["high_bytes"]
    assert context["name"] == "CUDA context"
    assert used["high_bytes"] - used["low_bytes"] == context["high_bytes"] - context["low_bytes"]
    assert (traced["fit"], traced["fits"]) == ("fits", True)
    assert 0 < traced["max_batch_size"] <= traced["expected_batch_size"] <= traced["may_fit_batch_size"]


@pytest.mark.slow
def test_predict_says_when_the_peak_is_and_of_what_it_is_not_sure(program: Program, predicted: Finished) -> None:
    plain = program("predict", "--explain", "--batch-size", "2", "--model", "resnet-18", "--limit", "20GiB").out
    assert "limited to 20.00 GiB" in plain
    assert "traced peak: in " in plain
    assert re.search(r"\n\d+ convolutions whose workspace is not known but for what .* MiB for the largest", plain)
    assert "CUDA context " in plain
    assert re.search(r"\ndevice used [\d.]+–[\d.]+ GiB: CUDA context [\d.]+–[\d.]+ GiB", plain)
    (body,) = _lines(predicted)
    assert body["traced"]["peak"]["phase"] == "backward"
    assert body["traced"]["peak"]["operator"] == "aten._log_softmax_backward_data"
    assert body["traced"]["assumed"] == []
    assert body["traced"]["context_source"]


def test_predict_says_nothing_of_a_gap_where_the_formula_is_the_more_careful(program: Program) -> None:
    short = program("predict", "--batch-size", "8", *SMALL).out
    more = re.search(r"\n(\d+) more lines? \(range of device used, CUDA context.*\): `gpumem-tui (.*)`\n", short)
    assert more is not None
    plain = program(*shlex.split(more[2])).out
    told, explained = (set(text.splitlines()) for text in (short, plain))
    assert len(told - explained) == 1  # the line that points there
    assert len(explained - told) == int(more[1])
    assert sum("CUDA context 0." in line and "GiB: measured" in line for line in explained) <= 1
    said = re.search(r"  10 % left free +(\d+) +(\d+)", plain)
    assert said is not None
    assert int(said[1]) <= int(said[2])
    assert "formula counts" not in plain


def test_predict_traces_the_size_asked_for_where_memory_grows_unevenly(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "square.py"
    path.write_text(
        "import torch\n"
        "def build(device):\n"
        "    model = torch.nn.Linear(8, 8, device=device)\n"
        "    return model, None\n"
        "def make_batch(batch_size, device):\n"
        "    return torch.ones(batch_size * batch_size, 1024, 8, device=device)\n"
        "def train_step(model, optimizer, batch):\n"
        "    model(batch).sum().backward()\n"
    )
    (body,) = _lines(program("predict", "--workload", str(path), "--batch-size", "7", "--json"))
    assert body["traced"]["buckets"]["batch_data"] == 49 * 1024 * 8 * 4
    assert body["traced"]["fits"] is True
    assert body["traced"]["max_batch_size"] is None
    assert "is not what smaller ones predict" in body["traced"]["unavailable"]
    plain = program("predict", "--workload", str(path), "--batch-size", "7").out
    assert "the largest batch is not known" in plain


@pytest.mark.slow
def test_a_search_says_how_its_batch_reaches_the_wanted_one(program: Program) -> None:
    search = ["search", "--model", "mlp", "--limit", "2GiB", "--target-batch", "100000"]
    result = _lines(program(*search, "--json"))[-1]
    steps = -(-100_000 // result["max_batch_size"])
    made = steps * result["max_batch_size"]
    assert result["accumulation"] == {"steps": steps, "global_batch_size": made, "target_batch": 100_000}
    said = program(*search, "--plain").out.splitlines()[-1]
    assert said.startswith(f"{steps:,} accumulation step")
    assert f" a global batch of {made:,}" in said


@pytest.mark.slow
def test_a_search_names_its_cap_and_that_the_proof_is_a_simulation(program: Program) -> None:
    done = program("search", "--plain", "--model", "resnet-18", "--limit", "2GiB")
    assert done.code == 0
    assert "limited to 2.00 GiB, strategy guided" in done.out
    assert "on simulated NVIDIA A100 80 GB limited to 2.00 GiB" in done.out
    assert "verified on the simulated GPU, " in done.out
    assert "convolutions whose workspace is not known but for what others" in done.out


def test_an_interrupted_search_still_prints_its_result(program: Program) -> None:
    search = program.start("search", "--json", "--strategy", "ramp", "--step", "1", *TINY)
    try:
        assert search.stdout is not None
        assert json.loads(search.stdout.readline())["event"] == "trial"
        search.send_signal(signal.SIGINT)
        *_, last = search.stdout.read().splitlines()
        assert search.wait(timeout=60) == 130
    finally:
        search.kill()
        search.wait()
    result = json.loads(last)
    assert (result["event"], result["outcome"], result["verified"]) == ("result", "cancelled", False)
    assert result["max_batch_size"] >= 1


@pytest.mark.parametrize(
    "arguments",
    [["gpus"], pytest.param(["predict", "--batch-size", "1", "--model", "mlp"], marks=pytest.mark.slow)],
)
def test_a_reader_that_has_enough_is_no_error(program: Program, arguments: list[str]) -> None:
    printing = program.start(*arguments)
    assert printing.stdout is not None
    assert printing.stderr is not None
    printing.stdout.close()
    assert printing.wait(timeout=120) == 0
    assert printing.stderr.read() == ""


def test_the_catalog_is_listed(program: Program) -> None:
    assert ["gpt2", "gpt2", "124,439,808", "parameters"] in [
        line.split()[:4] for line in program("models").out.splitlines()
    ]
    (gpus,) = _lines(program("gpus", "--json"))
    (models,) = _lines(program("models", "--json"))
    assert {"name": "gpt2", "parameters": 124_439_808}.items() <= models["models"][1].items()
    names = [gpu["name"] for gpu in gpus["gpus"]]
    assert "a100-80gb" in names
    assert [line.split()[0] for line in program("gpus").out.splitlines()] == [f"sim:{name}" for name in names]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "note"), [("zero1", "hands out whole parameters"), ("zero2", "without resharding")]
)
def test_sharding_says_how_the_engine_differs_from_the_textbook(program: Program, sharding: str, note: str) -> None:
    small = ["--layers", "1", "--hidden", "64", "--heads", "2", "--vocab", "512", "--seq-len", "64"]
    assert (
        note in program("predict", "--explain", "--batch-size", "1", "--sharding", sharding, "--gpus", "2", *small).out
    )


def test_predict_answers_by_formula_where_the_step_cannot_be_traced(program: Program) -> None:
    done = program("predict", "--batch-size", "4", "--pipeline-parallel", "2", "--gpus", "2", "--json")
    (body,) = _lines(done)
    assert done.code == 0
    assert body["formula"]["buckets"]["parameters"] < 4 * 124_439_808
    assert body["traced"]["peak_allocated_bytes"] is None
    assert "--pipeline-parallel" in body["traced"]["unavailable"]


def test_the_formula_alone_says_whether_it_fits(program: Program) -> None:
    common = ("predict", "--model", "gpt2", "--gpu", "sim:t4-16gb")
    cut = ("--context-parallel", "2", "--gpus", "2")
    for size, verdict in (("1", "fits"), ("400", "does not fit")):
        done = program(*common, *cut, "--batch-size", size)
        assert f"by formula, not traced, batch {size} {verdict}: with the allocator's cache it takes" in done.out
        formula = json.loads(program(*common, *cut, "--batch-size", size, "--json").out)["formula"]
        assert formula["fits"] == (formula["spare_bytes"] >= 0) == (verdict == "fits")
    spread = program("predict", "--model", "mixtral-8x7b", "--expert-parallel", "8", "--batch-size", "1")
    assert spread.code == 0, spread.err


@pytest.mark.slow
def test_a_network_cut_over_gpus_is_predicted_by_both(program: Program) -> None:
    done = program("predict", "--batch-size", "4", "--tensor-parallel", "2", "--json", *SMALL)
    (body,) = _lines(done)
    assert done.code == 0
    counted, held = (body[by]["buckets"]["parameters"] for by in ("formula", "traced"))
    assert held == pytest.approx(counted, rel=0.01)
    assert counted < 0.6 * 4 * body["workload"]["parameters"]


@pytest.mark.slow
def test_sharding_is_predicted_by_both(program: Program) -> None:
    done = program("predict", "--batch-size", "4", "--sharding", "zero3", "--gpus", "8", "--json", *SMALL)
    (body,) = _lines(done)
    assert done.code == 0
    assert body["formula"]["buckets"]["parameters"] == 4 * 46_473_216 // 8
    assert body["traced"]["buckets"]["parameters"] == pytest.approx(4 * 46_473_216 / 8, rel=0.01)


@pytest.mark.slow
def test_what_pytorch_is_told_is_simulated(program: Program) -> None:
    small = ("predict", "--batch-size", "4", "--json", *SMALL)
    plain, expandable = program(*small), program(*small, env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    before, after = _lines(plain)[0]["traced"], _lines(expandable)[0]["traced"]
    assert after["peak_reserved_bytes"] != before["peak_reserved_bytes"]


@pytest.mark.parametrize("multiple", [2, 8])
def test_a_step_that_takes_only_multiples_is_traced_at_those(program: Program, tmp_path: Path, multiple: int) -> None:
    spec = workload(
        tmp_path,
        f"""
        def make_batch(batch_size, device):
            assert batch_size % {multiple} == 0, "pairs only"
            return torch.randn(batch_size, 1024, 8, device=device)
        """,
    )
    options = ("--workload", str(spec.file), "--gpu", "sim:t4-16gb", "--json")
    done = program("predict", "--batch-size", "64", *options)
    assert done.code == 0, done.err
    traced = json.loads(done.out)["traced"]
    assert traced["buckets"]["batch_data"] == 64 * 1024 * 8 * 4
    assert traced["max_batch_size"] > 1000


def test_a_step_that_fails_at_every_size_says_so_once(program: Program, tmp_path: Path) -> None:
    spec = workload(
        tmp_path,
        """
        def make_batch(batch_size, device):
            raise ValueError(f"no data for {batch_size}")
        """,
    )
    done = program("predict", "--batch-size", "4", "--workload", str(spec.file), "--gpu", "sim:t4-16gb")
    assert done.code == 2
    assert "no data for 2" in done.err
    assert len(done.err.splitlines()) == 1
