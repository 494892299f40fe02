"""Printed JSON has the keys and the types of its schema, and no others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import msgspec
import pytest

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.cli.schema import COMMANDS, printed, schema_of
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import Unknown
from gpumem_tui.plan.answers import traced_answer
from gpumem_tui.plan.command import CommandPlan
from gpumem_tui.plan.goals import QUANTITIES, Goals
from gpumem_tui.plan.limits import limit
from gpumem_tui.plan.printed import CommandPlanObject, PlanObject, SolveObject
from gpumem_tui.report.objects import JsonObject, encoded
from gpumem_tui.run.events import TrialDone
from gpumem_tui.search.config import Device, SearchConfig
from gpumem_tui.search.prediction import Formula, Prediction
from gpumem_tui.search.printed import PredictObject, ResultLine, TrialLine
from gpumem_tui.search.verdict import Verdict
from gpumem_tui.workload.spec import WorkloadSpec
from tests.cli.conftest import Program
from tests.plan.commands import base_predicted, base_trace, change, changed, command_config, ran
from tests.plan.plans import GPT2, LLAMA, TRACED
from tests.snapshots import files
from tests.snapshots.files import written

NONE = Unknown("no torch")


def is_of_its_type(body: JsonObject) -> bool:
    """Whether what is printed has the keys of its type, and values of the types there: no others come back."""
    lines = json.loads(encoded(body))
    return bool(json.loads(encoded(msgspec.convert(lines, type(body)))) == lines)


def faults(found: object, command: str) -> list[str]:
    """The parts of a printed object that its schema does not allow."""
    schema = schema_of(command)
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    return [fault.message for fault in kind(schema).iter_errors(found)]


def test_a_plan_of_a_model() -> None:
    plan = replace(GPT2, target_batch=256, goals=Goals(tokens=10**9, price=2.5))
    for one in (plan, replace(plan, shape=find_model("resnet-50"), goals=Goals()), LLAMA):
        for traced in (TRACED, NONE):
            assert is_of_its_type(PlanObject.of(one, traced))
    assert is_of_its_type(PlanObject.of(LLAMA, NONE, trace_of=lambda wanted: traced_answer(wanted, TRACED)))


def test_a_plan_of_a_command() -> None:
    config = command_config("python", "train.py", "--batch-size", "16", gpu="rtx-4090-24gb")
    what_ifs = (changed(config, "checkpointing", 16, activations=200), changed(config, "adafactor", 16, optimizer=0))
    together = (
        ran((change("checkpointing", config),), 8, 2, base_trace(config)),
        ran((change("autocast", config),), 4, 4, Unknown("its run failed")),
    )
    assert is_of_its_type(CommandPlanObject.of(CommandPlan(config, 16, base_predicted(config), (*what_ifs, *together))))


def test_a_number_that_a_plan_was_solved_for() -> None:
    for plan in (GPT2, replace(LLAMA, gpu=find_gpu("t4-16gb"), recipe=Recipe())):
        for quantity in QUANTITIES:
            assert is_of_its_type(SolveObject.of(plan, limit(quantity, plan, lambda _: NONE)))


def test_a_prediction_and_the_lines_of_a_search() -> None:
    device = Device(GPT2.gpu, simulated=True)
    for spec in (WorkloadSpec(GPT2.recipe, shape=GPT2.shape), command_config().workload):
        config = SearchConfig(spec, device, target_batch=64)
        for traced in (TRACED, NONE):
            prediction = Prediction(Formula(spec, GPT2.gpu.total_bytes, 0.1), traced)
            assert is_of_its_type(PredictObject.of(config, prediction, 4))
            verdict = Verdict("found", 4, 5, True, 3, 1, "largest batch 4")
            assert is_of_its_type(ResultLine.of(config, verdict, prediction, ["full recompute"]))
    assert is_of_its_type(
        TrialLine.of(1, TrialDone(4, "fit", 3, 5, 7, {"parameters": 2, "other": 1}, "", 0.5, 3, (0.1, 0.2)), device)
    )


def test_every_command_that_has_a_schema_is_named() -> None:
    assert tuple(printed()) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_the_schema_names_what_it_refers_to_and_allows_new_keys(command: str) -> None:
    text = json.dumps(schema_of(command))
    parts = schema_of(command)["$defs"]
    assert all(f'"{name}"' in text for name in parts)
    _, private = msgspec.json.schema_components(printed()[command])
    assert len(parts) == len(private), "no two have one name"
    wanted = {one.partition('"')[0] for one in text.split("#/$defs/")[1:]}
    assert wanted <= parts.keys()
    assert '"additionalProperties": false' not in text


@pytest.mark.parametrize("words", [("models",), ("gpus",), ("doctor",), ("plan", "--no-trace", "--target-batch", "64")])
def test_what_a_command_prints_is_valid_by_its_schema(words: tuple[str, ...], program: Program) -> None:
    found = json.loads(program(*words, "--json").out)
    assert faults(found, words[0]) == []


def test_what_look_prints_of_a_file_is_valid_by_its_schema(program: Program, tmp_path: Path) -> None:
    for body in (files.training(), files.fragmented()):
        path = written(tmp_path, body)
        assert faults(json.loads(program("look", str(path), "--json").out), "look") == []
    compared = json.loads(program("look", str(path), str(path), "--json").out)
    assert compared["event"] == "comparison"
    assert faults(compared, "look") == []
