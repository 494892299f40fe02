"""A deep look at a step on the CPU: what the peak was made of, and that nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gpumem_tui.probe.finding import Finder
from gpumem_tui.probe.look import Look
from gpumem_tui.probe.wire import CPU
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
from tests.probe.watched import run

REQUESTS = """
import json, os, torch
from torch import nn

model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
optimizer = torch.optim.AdamW(model.parameters())

def train(steps):
    for _ in range(steps):
        x = torch.randn(512, 16)
        optimizer.zero_grad()
        (model(x) - x).pow(2).mean().backward()
        optimizer.step()

from gpumem_tui.probe import files, probe, wire
from gpumem_tui.watch import documents
probe.INTERVAL_S, probe.SAMPLE_SHARE = 0.0, float("inf")
mine = files.Files(files.default_directory(), os.getpid(), files.start_ticks())
def looking():
    return documents.decode_header(mine.ring.read_bytes()).looking

train(3)
for number, kind in ((1, "look"), (2, "dance"), (1, "look"), (3, "look")):
    files.write_document(mine.control, wire.encode_document(wire.ViewerRequest(number, kind)))
    print(looking(), end=" ")  # it waits for a step's end
    train(1)
    print(torch._C._len_torch_dispatch_stack(), looking(), end=" ")
    train(1)
    answer = json.loads(mine.look.read_bytes())
    print(looking(), answer["request"], answer["step"], bool(answer["devices"]), answer["kept"], end=" ")
    train(2)  # which are followed too
    answer = json.loads(mine.look.read_bytes())
    print(torch._C._len_torch_dispatch_stack(), answer["request"], answer["step"], answer["kept"])
"""
"""A program that asks for looks at itself, since nobody else can do so at a known step."""


class Passing(TorchDispatchMode):
    """A program's own mode, which does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _look(step: Callable[[nn.Module, torch.optim.Optimizer], None] = train_step, model: nn.Module | None = None) -> Any:
    model = model or small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer)
    finder = Finder()
    finder.register(optimizer)
    finder.scan([*model.modules(), optimizer])
    look = Look(5, 1, optimizer, finder.trained)
    assert look.start([model]) == ""
    step(model, optimizer)
    assert look.ends_with(optimizer)
    document = as_written(look.step_ended(2))
    look.stop()
    return document


def test_the_peak_by_bucket_module_and_line() -> None:
    document = _look()
    device = only_device(document)
    assert_nothing_left()
    assert (document["request"], document["step"], document["method"]) == (5, 2, "operators")
    assert device["device"] == CPU
    buckets = device["buckets"]
    assert buckets["parameters"] == PARAMETERS_BYTES
    assert buckets["optimizer"] == 2 * buckets["parameters"] + 4 * 4
    assert buckets["batch_data"] == INPUT_BYTES
    assert buckets.get("gradients", 0) < device["highest"]["gradients"] == PARAMETERS_BYTES
    tanh = [row for row in device["held"] if row["operator"] == "aten.tanh"]
    assert [(row["bucket"], row["module"], row["bytes"]) for row in tanh] == [("activations", "1", HIDDEN_BYTES)]
    assert tanh[0]["source"].startswith("looks.py:")
    phases = [phase for _, phase in device["phases"]]
    assert phases == ["batch", "forward", "backward", "optimizer"]
    times = [time_s for time_s, _ in device["timeline"]]
    assert times == sorted(times)
    assert 0 < device["peak_s"] <= times[-1] <= document["step_s"]


def test_what_was_there_before_the_step_is_its_modules() -> None:
    def held(rows: list[dict[str, Any]], bucket: str) -> list[tuple[str, bool]]:
        return sorted({(row["module"], row["before_step"]) for row in rows if row["bucket"] == bucket})

    model = small_model()
    model.register_buffer("scale", torch.ones(7))
    rows = only_device(_look(model=model))["held"]
    assert held(rows, "parameters") == [("0", True), ("2", True), ("Sequential", True)]
    assert held(rows, "optimizer") == [("0", True), ("2", True)]
    assert {module for module, _ in held(rows, "activations")} <= {"", "0", "1", "2"}
    optimizer_bytes = sum(row["bytes"] for row in rows if (row["bucket"], row["module"]) == ("optimizer", "0"))
    assert optimizer_bytes == 2 * (16 * 64 + 64) * 4 + 2 * 4
    assert all(row["before_step"] == (row["bucket"] in ("parameters", "optimizer")) for row in rows)


def test_memory_that_modules_share_is_not_one_modules() -> None:
    """As FSDP keeps it: one flat piece of memory, of which every parameter is a part."""
    flat = torch.randn(2 * 16 * 16)
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 16, bias=False))
    for place, linear in enumerate((model[0], model[2])):
        linear.weight = nn.Parameter(flat[place * 256 : place * 256 + 256].view(16, 16))
    rows = only_device(_look(model=model))["held"]
    assert {row["module"] for row in rows if row["bucket"] == "parameters"} == {""}
    assert {row["module"] for row in rows if row["bucket"] == "optimizer"} == {"0", "2"}


def test_requests_are_answered_once(tmp_path: Path) -> None:
    done = run(["-c", REQUESTS], tmp_path / "published")
    assert (done.code, done.errors) == (0, "")
    assert done.output.splitlines() == [
        "0 1 1 0 1 5 True None 0 1 5 []",
        "0 0 0 0 1 5 True [] 0 1 5 []",
        "0 0 0 0 1 5 True [] 0 1 5 []",
        "0 1 3 0 3 17 True None 0 3 17 []",
    ]
    assert done.published[0].last.errors == 0
    assert done.published[0].documents["look"]["devices"][0]["buckets"]["activations"] > 0


def test_accumulated_micro_batches_are_one_step() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        for _ in range(3):
            x = torch.randn(BATCH, 16)
            (model(x) - x).pow(2).mean().backward()
        optimizer.step()

    device = only_device(_look(step))
    assert [phase for _, phase in device["phases"]] == ["batch", *["forward", "backward"] * 3, "optimizer"]
    assert device["buckets"]["activations"] < 2 * HIDDEN_BYTES  # those of one micro-batch at a time


def test_recomputed_activations_are_activations() -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_model()

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    device = only_device(_look(model=Recomputed()))
    assert device["buckets"]["activations"] >= HIDDEN_BYTES
    assert any(row["operator"] == "aten.tanh" and row["bucket"] == "activations" for row in device["held"])


def test_a_program_with_a_mode_of_its_own_is_left_alone() -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    finder = Finder()
    look = Look(1, 1, optimizer, finder.trained)
    with Passing():  # type: ignore[no-untyped-call]
        assert look.start([model]) == "the program has a dispatch mode of its own active"
    assert_nothing_left()


def test_a_mode_that_the_program_enters_is_not_torn_out() -> None:
    """The recorder is below it then, and goes as soon as it can."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer)
    finder = Finder()
    finder.register(optimizer)
    look = Look(1, 1, optimizer, finder.trained)
    assert look.start([model]) == ""
    with Passing():  # type: ignore[no-untyped-call]
        train_step(model, optimizer)
        document = as_written(look.step_ended(2))
        assert document is not None
        assert document["devices"]
        assert not look.stop()
        assert torch._C._len_torch_dispatch_stack() == 2
    assert look.stop()
    assert_nothing_left()


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("has_run", [False, True])
def test_compiled_code_is_not_compiled_anew(fullgraph: bool, has_run: bool) -> None:
    """With `fullgraph`, code that cannot be compiled would end the program. The answer has memory after the step."""
    from torch._dynamo.utils import counters

    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    finder = Finder()
    finder.scan([*model.modules(), optimizer])
    compiled: Any = torch.compile(model, backend="eager", fullgraph=fullgraph)
    try:
        if has_run:
            train_step(compiled, optimizer)
        graphs = counters["stats"]["unique_graphs"]
        look = Look(1, 1, optimizer, finder.trained)
        assert look.start([model] if has_run else [compiled]) == ""  # what has run is seen also where no module tells
        train_step(compiled, optimizer)
        document = as_written(look.step_ended(2))
        assert look.is_over
        assert look.stop()
        assert counters["stats"]["unique_graphs"] == (graphs or 1)
    finally:
        torch._dynamo.reset()
        counters.clear()
    assert_nothing_left()
    assert document is not None
    parameters_bytes = PARAMETERS_BYTES
    assert only_device(document)["buckets"] == {
        "parameters": parameters_bytes,
        "gradients": parameters_bytes,
        "optimizer": 2 * parameters_bytes + 4 * 4,
    }
    assert all("torch.compile" in document["unavailable"][what] for what in ("peak", "phases", "kept"))
    assert document["kept"] is None


def test_a_failure_while_recording_is_told_and_the_step_is_not_harmed(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpumem_tui.probe.history import StepHistory

    def fail(*_: Any) -> int:
        raise ZeroDivisionError("no place")

    monkeypatch.setattr(StepHistory, "allocate", fail)
    document = _look()
    assert document["devices"] == []
    assert document["unavailable"] == {"look": "ZeroDivisionError: no place"}
    assert_nothing_left()


def test_an_argument_that_cannot_be_looked_through_does_not_stop_the_forward() -> None:
    class Lazy(Mapping[str, torch.Tensor]):
        def __getitem__(self, key: str) -> torch.Tensor:
            raise LookupError("not loaded yet")

        def __iter__(self) -> Iterator[str]:
            return iter(("x",))

        def __len__(self) -> int:
            return 1

    class TakesMore(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, more: Lazy) -> Any:
            return self.inner(x)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        x = torch.randn(BATCH, 16)
        (model(x, Lazy()) - x).pow(2).mean().backward()
        optimizer.step()

    model = TakesMore()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    finder = Finder()
    finder.scan([model, optimizer])
    look = Look(5, 1, optimizer, finder.trained)
    assert look.start([model]) == ""
    step(model, optimizer)
    document = as_written(look.step_ended(2))
    assert look.is_over
    assert document is not None
    assert_nothing_left()
    assert document["unavailable"]["look"] == "LookupError: not loaded yet"


def test_an_optimizer_that_goes_ends_the_look() -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    finder = Finder()
    look = Look(1, 1, optimizer, finder.trained)
    assert look.start([model]) == ""
    assert not look.ends_with(other)
    del optimizer
    assert look.ends_with(other)
    document = as_written(look.step_ended(2))
    assert document is not None
    assert document["unavailable"] == {"look": "the optimizer went before its next step"}
    assert_nothing_left()
