"""Progress on stderr while a step is traced without a screen."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from gpumem_tui.catalog.loader import find_model
from gpumem_tui.formula.predict import FormulaPrediction
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import format_bytes
from gpumem_tui.run.events import Sample
from gpumem_tui.run.micro_batches import HowFar
from gpumem_tui.search.headless import CommandLog
from gpumem_tui.search.headless import _Printer as Printer
from gpumem_tui.search.predicting import TraceProgress
from gpumem_tui.search.runner import TrialProgress
from gpumem_tui.workload.spec import HuggingFaceModel, WorkloadSpec
from tests.plan.commands import command_config


def test_a_command_that_prints_nothing_is_shown_to_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its imports alone take transformers 10 s."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    log = CommandLog(command_config(), quiet=True)
    log.show(TraceProgress(8))
    with log.following():
        pass
    assert "tracing batch 8, before its first step … 0 s" in capsys.readouterr().err


def test_what_a_model_of_transformers_is_at_is_said_from_the_start_and_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints nothing itself: neither while PyTorch starts nor in a phase that takes long."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    config = command_config()
    model = HuggingFaceModel("gemma", "gemma3_text", "Gemma3ForCausalLM", "no formula", 2048)
    log = CommandLog(replace(config, workload=replace(config.workload, hugging_face=model)), quiet=False)
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    with log.following():
        pass
    assert "starting PyTorch for gemma … 0 s" in capsys.readouterr().err
    log.show(TraceProgress(2, Sample(1, "backward", 0, 0, {}, HowFar(1, 1, 20.0, 30.0))))
    capsys.readouterr()
    now_s += 7
    with log.following():
        pass
    assert "tracing batch 2, step 2 backward, 27 s, about 23 s left" in capsys.readouterr().err


def test_the_formula_answers_until_the_trace_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    workload = WorkloadSpec(Recipe(), shape=find_model("gpt2"))
    config = replace(command_config(), workload=workload)
    with CommandLog(config, quiet=False, batch_size=4).following():
        pass
    said = capsys.readouterr().err
    found = config.formula.at(4)
    assert isinstance(found, FormulaPrediction)
    assert f"by formula batch 4 takes {format_bytes(found.needed_bytes)} of " in said
    assert "; tracing … 0 s" in said
    assert max(map(len, said.split("\r"))) < 80


def test_a_long_trial_is_shown_every_ten_seconds_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    printer = Printer(command_config(), lambda _: ("", []), as_json=False, quiet=False)
    printer.show(TrialProgress(1, 8))
    for now_s in (101.0, 109.0, 111.0, 119.0, 122.0):
        printer.show(TrialProgress(1, 8, Sample(0, "forward", 0, 0, {}, HowFar(1, 1, now_s - 100))))
    assert capsys.readouterr().err.splitlines() == [
        "    0 s  trial 1: batch 8 …",
        "   11 s  trial 1: batch 8, step 1 forward, 11 s",
        "   22 s  trial 1: batch 8, step 1 forward, 22 s",
    ]
    Printer(command_config(), lambda _: ("", []), as_json=True, quiet=False).show(TrialProgress(1, 8))
    assert not capsys.readouterr().err
