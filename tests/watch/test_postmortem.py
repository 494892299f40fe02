"""After memory ran out: the ledger of that moment, and what the formula states of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpumem_tui.catalog.loader import find_model
from gpumem_tui.formula.predict import predict
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import GIB, Breakdown, Bucket, Unknown
from gpumem_tui.probe.wire import CPU, PostMortem, Trained, TrainedModel, TrainedOptimizer, TrainedParameter, Untrained
from gpumem_tui.watch.documents import read_document
from gpumem_tui.watch.expected import Expected, expect
from gpumem_tui.watch.postmortem import Case, Confirmed, case_json, case_lines, grown_words, open_case
from gpumem_tui.watch.reader import Watcher
from tests.watch.rings import RECORD, RingFile, gone, out_of_memory
from tests.watch.test_shape import gpt2

GPT2_VALUES = 124_439_808


def model_document(
    dtype: str = "float32", optimizer: str = "torch.optim.adamw.AdamW", **options: Any
) -> dict[str, Any]:
    """GPT-2 small under an optimizer, as a probe describes it."""
    parameters = [
        {"name": name, "shape": list(shape), "dtype": dtype, "trained": True} for name, shape in gpt2().items()
    ]
    return {
        "step": 1,
        "wall_ns": 1,
        "models": [{"name": "transformers.GPT2LMHeadModel", "parameters": parameters, "truncated": False}],
        "optimizers": [{"name": optimizer, "parameters": len(parameters), "options": {"lr": 0.1, **options}}],
    }


def trained(dtype: str = "float32", optimizer: str = "torch.optim.adamw.AdamW", **options: Any) -> Trained:
    document = model_document(dtype, optimizer, **options)
    [model] = document["models"]
    parameters = tuple(
        TrainedParameter(one["name"], tuple(one["shape"]), one["dtype"], one["trained"]) for one in model["parameters"]
    )
    [used] = document["optimizers"]
    return Trained((TrainedModel(model["name"], parameters, False),), (TrainedOptimizer(**used),))


def case_of(folder: Path, model: dict[str, Any] | None, **changes: Any) -> Case:
    ring = RingFile(folder, gone())
    ring.sample(RECORD)
    ring.document(ring.files.oom, out_of_memory(**changes))
    if model is not None:
        ring.document(ring.files.model, model)
    [process] = Watcher([folder]).processes()
    case = open_case(process)
    assert case is not None
    return case


def fixed(batch_free: Recipe) -> dict[Bucket, int]:
    breakdown = predict(find_model("gpt2"), batch_free, 0).breakdown
    return {bucket: breakdown[bucket] for bucket in (Bucket.PARAMETERS, Bucket.GRADIENTS, Bucket.OPTIMIZER)}


def test_the_rows_sum_to_the_device(tmp_path: Path) -> None:
    lines = case_lines(case_of(tmp_path / "probes", None))
    assert lines[0].startswith("PID 4000000 (python train.py) ran out of memory in step 12, 0 s ago, and ended")
    assert lines[1] == "the failed request: 4.00 GiB on cuda:0 at train.py:34, 1.00 GiB was free"
    rows = [line for line in lines if "GiB  " in line]
    sizes = [float(row.split()[0]) for row in rows]
    assert rows[-1].split(maxsplit=2)[2] == "= device"
    assert math.isclose(sum(sizes[:-1]), sizes[-1])
    assert sizes == [4.0, 4.0, 8.0, 54.0, 7.0, 2.0, 1.0, 80.0]
    assert any("expandable_segments:True may help" in line for line in lines)
    assert lines[-1] == "no prediction to compare with: the probe had not listed the parameters yet"


HELD = {Bucket.PARAMETERS: 4 * GIB, Bucket.GRADIENTS: 4 * GIB, Bucket.OPTIMIZER: 8 * GIB}


@pytest.mark.parametrize(
    ("rest", "reserved", "used", "said"),
    [
        (
            30, 50, 51,
            "since the trial these grew: activations, batch data and the rest 30.00 → 58.00 GiB, 4.00 GiB of it "
            "asked for; allocator cache 4.00 → 7.00 GiB; other processes, CUDA contexts, driver 1.00 → 2.00 GiB",
        ),
        (58, 80, 82, "since the trial these grew: allocator cache 6.00 → 7.00 GiB"),
        (60, 90, 92, "no bucket had more than the trial confirmed"),
    ],
)  # fmt: skip
def test_what_grew_since_a_trial(rest: int, reserved: int, used: int, said: str, tmp_path: Path) -> None:
    case = case_of(tmp_path / "probes", None)
    before = Confirmed(Breakdown({**HELD, Bucket.ACTIVATIONS: rest * GIB}), reserved * GIB, used * GIB)
    assert grown_words(case, before) == said


def test_nothing_is_said_to_have_grown_of_host_memory(tmp_path: Path) -> None:
    case = case_of(tmp_path / "probes", None, device=CPU)
    assert grown_words(case, Confirmed(Breakdown(HELD), 16 * GIB, 17 * GIB)) == ""


def test_the_prediction_stands_beside_what_was_found(tmp_path: Path) -> None:
    state = 4 * GPT2_VALUES
    buckets = {"parameters": state, "gradients": state, "optimizer": 2 * state}
    case = case_of(tmp_path / "probes", model_document(), buckets=buckets)
    lines = case_lines(case)
    assert "  parameters:      0.46 GiB, found 0.46 GiB (+0.0%)" in lines
    assert "the formula for gpt2, fp32, adamw:" in lines
    assert any(line.startswith("  assumed: 12 heads") for line in lines)
    assert any("samples of a batch hold" in line for line in lines)
    best = case.remedies[0]
    assert any(f"{best.max_batch_size:,}  {best.technique.name} ({best.technique.option})" in line for line in lines)
    body = json.loads(json.dumps(case_json(case)))
    assert body["expected"]["buckets"]["parameters"] == state
    assert body["remedies"][0]["option"] == best.technique.option


def rising(*sizes: int) -> list[dict[str, Any]]:
    """Samples five steps apart, each of which holds so much next to what is trained."""
    fixed = RECORD.parameters_bytes + RECORD.gradients_bytes + RECORD.optimizer_bytes
    records = [replace(RECORD, step=1 + 5 * place, allocated_bytes=fixed + size) for place, size in enumerate(sizes)]
    return [record.as_json() for record in records]


KEPT = {"device": 0, "operator": "", "module": "", "source": "train.py:11", "bytes": GIB // 4, "allocations": 1}


def test_what_grew_in_each_step_comes_first(tmp_path: Path) -> None:
    samples = rising(*(GIB + place * 5 * GIB // 4 for place in range(4)))
    other = {**KEPT, "source": "train.py:90", "bytes": 4096}
    case = case_of(tmp_path / "probes", model_document(), samples=samples, kept=[KEPT, other])
    lines = case_lines(case)
    assert lines[1] == "memory grew 0.25 GiB a step, made at train.py:11 and never released: fix that first"
    assert lines[2].startswith("the failed request")
    assert "      2.50 GiB  kept by the last 10 steps" in lines
    assert "     51.50 GiB  activations, batch data and the rest" in lines
    assert "what would only have put it off, with the largest batch that then fits:" in lines
    assert not any("samples of a batch hold" in line for line in lines)
    body = json.loads(json.dumps(case_json(case)))
    assert (body["grew_bytes_a_step"], body["kept"][0]) == (GIB // 4, KEPT)


def test_growth_without_a_line_says_how_to_get_one(tmp_path: Path) -> None:
    samples = rising(0, 3 * GIB, 3 * GIB, *(3 * GIB + place * GIB for place in range(1, 5)))  # what stays comes first
    lines = case_lines(case_of(tmp_path / "probes", None, samples=samples))
    assert lines[1].startswith("memory grew 0.20 GiB a step and was never released: fix that first; `gpumem-tui look")
    few = case_of(tmp_path / "few", None, kept=[KEPT])
    assert few.grew.bytes == GIB // 4, "too few samples, and its steps were recorded"
    varied = rising(GIB, 4 * GIB, 3 * GIB, 6 * GIB)
    assert case_of(tmp_path / "varied", None, samples=varied, kept=[KEPT]).grew.bytes == GIB // 4
    past = case_of(tmp_path / "past", None, samples=rising(GIB, GIB, GIB), kept=[KEPT])
    assert past.grew.bytes == 0, "its steps were recorded long before, and memory grows no more"


@pytest.mark.parametrize(
    "sizes",
    [(GIB, GIB, GIB, GIB), (GIB, 2 * GIB), (GIB, 2 * GIB, 2 * GIB, 2 * GIB), (GIB, 3 * GIB, 2 * GIB, 4 * GIB),
     (GIB, GIB + 9, GIB + 18)],
    ids=["constant", "too few", "one jump", "up and down", "little"],
)  # fmt: skip
def test_a_process_that_keeps_nothing_is_not_said_to(sizes: tuple[int, ...], tmp_path: Path) -> None:
    case = case_of(tmp_path / "probes", model_document(), samples=rising(*sizes))
    assert case.grew.bytes == 0
    assert case_lines(case)[1].startswith("the failed request")
    assert any("what would have helped" in line for line in case_lines(case))


@pytest.mark.parametrize(("broken", "value"), [("step", "1"), ("allocated_bytes", None), ("device", [])])
def test_samples_that_make_no_sense_are_passed_over(broken: str, value: object, tmp_path: Path) -> None:
    samples = rising(*(place * GIB for place in range(4)))
    samples[1][broken] = value
    assert case_of(tmp_path / "probes", None, samples=samples).grew.bytes == round(GIB / 5)


def test_free_is_what_the_processs_own_limit_leaves(tmp_path: Path) -> None:
    changes = {"device_total_bytes": 140 * GIB, "device_free_bytes": 60 * GIB, "device_limit_bytes": 78 * GIB}
    case = case_of(tmp_path / "probes", model_document(), **changes)
    lines = case_lines(case)
    assert lines[1] == "the failed request: 4.00 GiB on cuda:0 at train.py:34, 1.00 GiB was free"
    assert lines[2].startswith("the process limits itself to 78.00 GiB (torch.")
    assert lines[2].endswith("; the device had 60.00 GiB free")
    sizes = [float(line.split()[0]) for line in lines if "GiB  " in line and line.startswith("  ")]
    assert sum(sizes[:7]) == 2 * 78, "the rows and their sum"
    assert "     78.00 GiB  = the process's own limit" in lines
    assert not any("other processes" in line for line in lines)
    body = case_json(case)
    assert (body["free_bytes"], body["device_free_bytes"], body["device_limit_bytes"]) == (GIB, 60 * GIB, 78 * GIB)
    device = case_of(tmp_path / "device", None, device_limit_bytes=79 * GIB)
    assert (device.free_bytes, device.total_bytes) == (GIB, 80 * GIB), "on the device there was less than by the limit"


def test_how_many_samples_filled_the_device() -> None:
    """The formula's own activations for 7 samples are found to be those of 7 samples."""
    expected = expect(trained(), {}, None, {0})
    assert isinstance(expected, Expected)
    growing = sum(row.size_bytes for row in expected.at(7).rows if row.grows_with_batch)
    assert expected.samples_held(growing) == 7


def test_what_the_device_did_not_say_is_a_dash(tmp_path: Path) -> None:
    """A failure in host memory, or one that was only seen as it left."""
    names = ("device", "requested_bytes", "device_total_bytes", "device_free_bytes", "allocated_bytes")
    nothing = dict.fromkeys((*names, "reserved_bytes", "inactive_split_bytes"))
    case = case_of(tmp_path / "probes", model_document(), **nothing, message="no memory\nat all", fatal=False)
    lines = case_lines(case)
    assert "and went on; later: killed or crashed" in lines[0]
    assert lines[1] == "the error: no memory at train.py:34"
    assert "             –  activations, batch data and the rest" in lines
    assert case.remedies == []


def test_host_memory_is_not_said_to_be_shared_with_cuda(tmp_path: Path) -> None:
    names = ("device_total_bytes", "device_free_bytes", "allocated_bytes", "reserved_bytes", "inactive_split_bytes")
    changes = {**dict.fromkeys(names), "device": CPU, "requested_bytes": 3 * GIB}
    lines = case_lines(case_of(tmp_path / "probes", model_document(), **changes))
    assert lines[1].startswith("the failed request: 3.00 GiB on cpu")
    assert not any("CUDA" in line for line in lines)


def test_a_frozen_teacher_is_part_of_what_is_expected() -> None:
    teacher = Untrained("my.Teacher", 0, 7 * GIB)
    elsewhere = Untrained("my.Average", 1, GIB)
    alone, together = (
        expect(replace(trained(), untrained=untrained), {}, None, {0})
        for untrained in ((elsewhere,), (teacher, elsewhere))
    )
    assert isinstance(alone, Expected)
    assert isinstance(together, Expected)
    assert together.at(4).needed_bytes == alone.at(4).needed_bytes + 7 * GIB
    assert together.at(0).breakdown[Bucket.PARAMETERS] == 4 * GPT2_VALUES + 7 * GIB
    assert together.assumed == (*alone.assumed, "7.00 GiB of modules that nothing trains (Teacher), as found")
    largest = together.max_batch_size(80 * GIB)
    assert together.at(largest).needed_bytes <= 72 * GIB < together.at(largest + 1).needed_bytes
    assert alone.max_batch_size(80 * GIB) > largest
    assert together.remedies(80 * GIB, None)[0].max_batch_size < alone.remedies(80 * GIB, None)[0].max_batch_size


@pytest.mark.parametrize("sharding", ["none", "zero2", "zero3"])
def test_a_teacher_does_not_hide_how_the_state_is_sharded(sharding: Any) -> None:
    found = fixed(Recipe(sharding=sharding, gpus=4))
    found[Bucket.PARAMETERS] += 8 * GIB
    expected = expect(replace(trained(), untrained=(Untrained("my.Teacher", 0, 8 * GIB),)), found, 4, {0})
    assert isinstance(expected, Expected)
    assert expected.recipe.sharding == sharding


def test_remedies_are_for_the_gpu_that_it_ran_on(tmp_path: Path) -> None:
    """A T4 has no bfloat16 arithmetic."""
    old = case_of(tmp_path / "old", model_document(), device_name="Tesla T4", compute_capability=[7, 5])
    new = case_of(tmp_path / "new", model_document(), device_name="NVIDIA L4", compute_capability=[8, 9])
    assert any("on cuda:0 (Tesla T4) at train.py:34" in line for line in case_lines(old))
    offered = {"old": "\n".join(case_lines(old)), "new": "\n".join(case_lines(new))}
    assert "--precision amp-fp16" in offered["old"]
    assert "bf16" not in offered["old"]
    assert "--precision amp-bf16" in offered["new"]


@pytest.mark.parametrize("sharding", ["none", "zero1", "zero2", "zero3"])
def test_sharding_is_told_by_the_size_of_the_state(sharding: Any) -> None:
    expected = expect(trained(), fixed(Recipe(sharding=sharding, gpus=4)), 4, {0})
    assert isinstance(expected, Expected)
    assert expected.recipe == Recipe(sharding=sharding, gpus=4)
    assert expected.assumed[-1] == f"sharding {sharding} over 4 GPUs, by the size of the state"


@pytest.mark.parametrize(
    ("optimizer", "options", "name"),
    [
        ("torch.optim.sgd.SGD", {"momentum": 0.9}, "sgd-momentum"),
        ("torch.optim.sgd.SGD", {"momentum": 0}, "sgd"),
        ("bitsandbytes.optim.adamw.AdamW8bit", {}, "adamw-8bit"),
        ("transformers.optimization.Adafactor", {}, "adafactor"),
    ],
)
def test_optimizers_by_their_classes(optimizer: str, options: dict[str, Any], name: str) -> None:
    expected = expect(trained(optimizer=optimizer, **options), {}, None, {0})
    assert isinstance(expected, Expected)
    assert expected.recipe.optimizer == name


def test_what_has_no_formula_has_a_reason() -> None:
    assert expect(trained(optimizer="my.Muon"), {}, None, {0}) == Unknown("no formula for the optimizer Muon")
    assert expect(trained(dtype="float64"), {}, None, {0}) == Unknown("no formula for parameters in float64")
    assert expect(Trained((), ()), {}, None, {0}) == Unknown("the probe found no module")


def test_no_post_mortem_of_a_process_that_never_ran_out(tmp_path: Path) -> None:
    ring = RingFile(tmp_path / "probes", gone())
    [process] = Watcher([tmp_path / "probes"]).processes()
    assert open_case(process) is None
    assert read_document(PostMortem, ring.files, process.uid) is None
