"""A look at steps of other kinds, and at what they leave behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpumem_tui.probe.finding import Finder
from gpumem_tui.probe.look import Look
from tests.probe.looks import (
    BATCH,
    HIDDEN_BYTES,
    INPUT_BYTES,
    PARAMETERS_BYTES,
    as_written,
    assert_nothing_left,
    only_device,
    small_model,
    train_step,
)
from tests.probe.watched import SCRIPTS, run

LOOKED = """
import json, os, runpy, sys
import torch
from gpumem_tui.probe import files, probe, wire
probe.INTERVAL_S, probe.SAMPLE_SHARE = 0.0, float("inf")
train = runpy.run_path(sys.argv[1])["train"]
mine = files.Files(files.default_directory(), os.getpid(), files.start_ticks())
files.write_document(mine.control, wire.encode_document(wire.ViewerRequest(1, "look")))
train(4)
print(torch._C._len_torch_dispatch_stack(), torch.autograd.backward.__module__)
"""


@pytest.mark.slow
def test_an_optimizer_that_steps_inside_of_backward(tmp_path: Path) -> None:
    """A step ends with backward. Gradients live shortly, one after the other."""
    script = SCRIPTS / "optimizer_in_backward.py"
    done = run(["-c", LOOKED, script], tmp_path / "published")
    assert (done.code, done.errors) == (0, "")
    assert done.output.split() == ["0", "torch.autograd"]
    (found,) = done.published
    document: Any = found.documents["look"]
    device = only_device(document)
    assert document["step"] == 42  # the 41st is the one in which the request is seen
    assert document["kept"] == []
    assert found.last.errors == 0
    assert found.last.step == 44
    buckets = device["buckets"]
    assert buckets["parameters"] == PARAMETERS_BYTES
    assert buckets["optimizer"] == 2 * buckets["parameters"] + 4 * 4
    assert buckets["activations"] >= HIDDEN_BYTES
    assert buckets["batch_data"] == INPUT_BYTES
    phases = [phase for _, phase in device["phases"]]
    assert phases[:4] == ["batch", "forward", "backward", "optimizer"]
    assert phases[3:] == ["optimizer", "backward"] * 4


def test_what_keeps_memory_is_named_and_a_model_that_was_missed_is_found(tmp_path: Path) -> None:
    """A look goes through all objects: a module that was made past every hook is among them."""
    done = run(["-c", LOOKED, SCRIPTS / "leak.py"], tmp_path / "published")
    assert (done.code, done.errors) == (0, "")
    (found,) = done.published
    document: Any = found.documents["look"]
    kept = document["kept"]
    assert (kept[0]["module"], kept[0]["operator"], kept[0]["bytes"]) == ("body.1", "aten.sigmoid", HIDDEN_BYTES)
    assert kept[0]["source"] == "leak.py:14"
    sizes = {record.step: record.parameters_bytes for record in found.records}
    assert sizes[6] == PARAMETERS_BYTES
    assert sizes[max(sizes)] == sizes[6] + 100 * 100 * 4
    assert found.documents["model"]["untrained"][0]["bytes"] == 100 * 100 * 4
    assert found.last.host_bytes > 100 << 20
    assert found.last.host_bytes > found.records[0].host_bytes


def _look_through(step: Callable[[], None], optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[Any, Any]:
    """The answers after the first step, and after the last."""
    finder = Finder()
    finder.scan([*model.modules(), optimizer])
    look = Look(1, 1, optimizer, finder.trained)
    assert look.start([model]) == ""
    told = []
    for number in (2, 3, 4):
        assert not look.is_over
        step()
        told.append(as_written(look.step_ended(number)))
    assert look.is_over
    assert look.stop()
    assert_nothing_left()
    first, between, last = told
    assert first is not None
    assert between is None
    assert last is not None
    assert last == {**first, "kept": last["kept"]}
    return first, last


def test_what_every_step_leaves_behind_is_told_with_its_place() -> None:
    """As a list of losses that keep their graphs does; not what is made once, nor what the next step replaces."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    losses: list[torch.Tensor] = []
    once: list[torch.Tensor] = []
    last: list[torch.Tensor] = []

    def step() -> None:
        x = torch.randn(BATCH, 16)
        optimizer.zero_grad()
        loss = (model(x) - x).pow(2).mean()
        loss.backward(retain_graph=True)
        losses.append(loss)
        last[:] = [x * 2]
        if not once:
            once.append(x * 3)
        optimizer.step()

    step()
    once.clear()
    first, document = _look_through(step, optimizer, model)
    assert first["kept"] is None
    assert document["kept"] is not None
    rows = [(row["operator"], row["module"], row["bytes"], row["allocations"]) for row in document["kept"]]
    assert rows[0] == ("aten.tanh", "1", HIDDEN_BYTES, 1)
    assert {row[2] for row in rows[1:3]} == {INPUT_BYTES}
    assert sum(row[2] for row in rows) == HIDDEN_BYTES + 2 * INPUT_BYTES + 4  # and the loss itself
    assert all(row["source"].startswith("test_look_steps.py:") for row in document["kept"])


def test_a_training_that_keeps_nothing() -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    _, document = _look_through(lambda: train_step(model, optimizer), optimizer, model)
    assert document["kept"] == []


def test_a_step_of_very_many_operators_is_not_followed_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumem_tui.probe.look._MOST_FOLLOWED", 10)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    finder = Finder()
    finder.scan([*model.modules(), optimizer])
    look = Look(1, 1, optimizer, finder.trained)
    assert look.start([model]) == ""
    train_step(model, optimizer)
    document = as_written(look.step_ended(2))
    assert look.is_over
    assert_nothing_left()
    assert document is not None
    assert only_device(document)["buckets"]["activations"] > 0
    assert (document["kept"], list(document["unavailable"])) == (None, ["allocator", "kept"])


def test_the_closures_of_lbfgs() -> None:
    """Each call of the closure is a forward and a backward; what the optimizer does between them is its own."""
    model = small_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=2)
    x = torch.randn(BATCH, 16)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(x) - x).pow(2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    document, _ = _look_through(lambda: optimizer.step(closure), optimizer, model)
    device = only_device(document)
    phases = [phase for _, phase in device["phases"]]
    assert phases == ["batch", "optimizer", *["forward", "backward", "optimizer"] * ((len(phases) - 2) // 3)]
    assert len(phases) > 2 + 3
    parameters_bytes = PARAMETERS_BYTES
    assert device["buckets"]["parameters"] == parameters_bytes
    assert device["buckets"]["optimizer"] >= 4 * parameters_bytes  # directions, steps, the gradient and step before
    assert device["buckets"]["activations"] >= HIDDEN_BYTES
