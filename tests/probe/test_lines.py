"""Allocations of autograd's own threads have the line of the forward that they undo, as on the simulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functions
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils.checkpoint import checkpoint

from gpumem_tui.probe.finding import Finder
from gpumem_tui.probe.lines import ForwardLines
from gpumem_tui.probe.look import Look
from gpumem_tui.step import Site
from gpumem_tui.step.cuda_history import made_at
from tests.probe.allocating import Allocating, allocating
from tests.probe.looks import BATCH, as_written, assert_nothing_left


class Doubled(torch.autograd.Function):
    """A function whose backward is Python."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


OWN_BACKWARD = f"test_lines.py:{Doubled.backward.__code__.co_firstlineno + 2}"
"""In Python, so the allocator sees it; on the simulated GPU it is the line of the forward."""


class Block(nn.Module):
    """Lines of its own, operators of Python, and modules of torch's."""

    def __init__(self, doubles: bool) -> None:
        super().__init__()
        self._doubles = doubles
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = functions.gelu(self.up(x))
        gate = gate * torch.sigmoid(gate)
        gate = Doubled.apply(gate) if self._doubles else gate  # type: ignore[no-untyped-call]
        out: torch.Tensor = self.down(gate)
        return x + out


class Network(nn.Module):
    def __init__(self, recomputes: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(doubles=recomputes is None) for _ in range(3))
        self.head = nn.Linear(64, 1000)
        self._recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self._recomputes is None else checkpoint(block, x, use_reentrant=self._recomputes)
        logits: torch.Tensor = self.head(x)
        return functions.cross_entropy(logits.float(), torch.zeros(len(x), dtype=torch.long))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.randn(BATCH, 64, requires_grad=True)
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()


def looked(cuda: Allocating, model: nn.Module, step: Callable[[nn.Module, torch.optim.Optimizer], None]) -> Any:
    """Look at a step; return the document."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(model, optimizer)
    finder = Finder()
    finder.register(optimizer)
    finder.scan([*model.modules(), optimizer])
    look = Look(1, 1, optimizer, finder.trained)
    assert look.start([model]) == ""
    step(model, optimizer)
    document = as_written(look.step_ended(2))
    assert look.stop()
    assert torch._C._len_torch_function_stack() == 0
    return document


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[Site]:
    """The place of each allocation, in order, as the look finds it."""
    found: list[Site] = []

    def noted(*args: Any) -> Any:
        made = made_at(*args)
        found.append(made[0])
        return made

    monkeypatch.setattr("gpumem_tui.probe.recorders.made_at", noted)
    return found


@pytest.mark.parametrize("recomputes", [None, False], ids=["plain", "checkpoint"])
def test_every_line_is_the_simulated_gpus(
    recomputes: bool | None, placed: list[Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    with allocating(monkeypatch) as cuda:
        document = looked(cuda, Network(recomputes), trained)
    found = [(site.source, line) for site, line in zip(placed, cuda.lines, strict=True) if site.source != OWN_BACKWARD]
    assert [line for line, _ in found] == [line for _, line in found]
    assert len(placed) - 10 < len(found) > 60
    assert all(line.startswith("test_lines.py:") for line in cuda.lines)
    gate = f"test_lines.py:{Block.forward.__code__.co_firstlineno + 2}"
    assert {site.module for site in placed if site.source == gate} == {"blocks.0", "blocks.1", "blocks.2"}
    assert_nothing_left()
    assert list(document["unavailable"]) == []


def test_a_backward_within_backward_is_not_the_outer_ones_line(
    placed: list[Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that enters autograd again is one node of the outer graph, and calls many lines."""
    with allocating(monkeypatch) as cuda:
        looked(cuda, Network(recomputes=True), trained)
    found = zip(placed, cuda.lines, strict=True)
    assert [(site.source, line) for site, line in found if site.source not in ("", line)] == []
    assert 0 < sum(not site.source for site in placed) < len(placed) / 2


def test_what_is_trained_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    model, plain = Network(), Network()
    plain.load_state_dict(model.state_dict())
    torch.manual_seed(4)
    with allocating(monkeypatch) as cuda:
        looked(cuda, model, trained)
    torch.manual_seed(4)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    trained(plain, optimizer)
    trained(plain, optimizer)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_graph_that_is_kept_is_followed_once() -> None:
    parameter, told = nn.Parameter(torch.ones(3)), list[Site]()
    lines = ForwardLines(lambda: "module", told.append)
    assert lines.start() == ""
    loss = (parameter * 2).sum()
    lines.backward_begins(((loss,), {}))
    loss.backward(retain_graph=True)
    lines.backward_ended()
    loss.backward()
    line = f"test_lines.py:{test_a_graph_that_is_kept_is_followed_once.__code__.co_firstlineno + 4}"
    assert told == [Site(module="module", source=line)] * 2
    assert lines.stop()


class Passing(TorchFunctionMode):
    """A program's own mode, which does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_programs_own_is_left_alone(placed: list[Site], monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward's allocations have no line then, and the answer reports it."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with Passing():
            trained(model, optimizer)

    with allocating(monkeypatch) as cuda:
        document = looked(cuda, Network(), step)
    assert document["unavailable"] == {
        "line": "the program has a mode of its own for torch's functions active; backward's are not known"
    }
    assert {site.source for site, line in zip(placed, cuda.lines, strict=True) if site.source != line} == {
        "",
        OWN_BACKWARD,
    }


def test_below_a_mode_that_was_entered_since_it_waits() -> None:
    lines = ForwardLines(str, lambda _: None)
    assert lines.start() == lines.start() == ""
    with Passing():
        assert not lines.stop()
        assert torch._C._len_torch_function_stack() == 2
    assert lines.stop()
    assert torch._C._len_torch_function_stack() == 0


def test_one_that_the_program_took_out_is_gone() -> None:
    lines = ForwardLines(str, lambda _: None)
    assert lines.start() == ""
    torch._C._pop_torch_function_stack()
    assert lines.stop()
    assert lines.start() == ""
    assert lines.stop()


def test_a_default_device_may_come_and_go() -> None:
    torch.set_default_device("cpu")
    try:
        lines = ForwardLines(str, lambda _: None)
        assert lines.start() == ""
        with torch.device("meta"):
            assert torch.empty(1).is_meta
        assert torch.empty(1).is_cpu
        assert lines.stop()
        assert torch.empty(1).is_cpu
    finally:
        torch.set_default_device(None)
    assert torch._C._len_torch_function_stack() == 0


def test_a_default_device_that_would_take_another_mode_out_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch before 2.6 had it: the topmost mode goes, whichever that is."""
    for name in ("__enter__", "__exit__"):
        monkeypatch.setattr(DeviceContext, name, getattr(TorchFunctionMode, name))
    monkeypatch.setattr("gpumem_tui.probe.lines._DEFAULTS_STAY_BELOW", False)
    lines = ForwardLines(str, lambda _: None)
    with torch.device("cpu"):
        assert lines.start() == f"torch {torch.__version__} has a default device in the way"
    assert torch._C._len_torch_function_stack() == 0
    assert lines.stop()


def test_what_is_compiled_meanwhile_is_compiled_whole() -> None:
    """A program's first compilation may come while a look continues, and may ask for one graph."""
    compiled = torch.compile(lambda x: (x * 2).sin().sum(), backend="eager", fullgraph=True)
    x = torch.ones(3, requires_grad=True)
    lines = ForwardLines(str, lambda _: None)
    assert lines.start() == ""
    try:
        compiled(x).backward()
        assert lines.active
    finally:
        assert lines.stop()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()  # else looks take the process for one that compiles
    assert x.grad is not None


def test_what_cannot_begin_does_not_reach_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise AttributeError("not in this torch")

    monkeypatch.setattr(torch._C._autograd, "_get_sequence_nr", fail)
    lines = ForwardLines(str, lambda _: None)
    assert lines.start() == "AttributeError: not in this torch"
    assert torch._C._len_torch_function_stack() == 0
    assert lines.stop()


def test_what_fails_does_not_reach_the_program() -> None:
    def fail(*_: object) -> Any:
        raise ZeroDivisionError

    parameter = nn.Parameter(torch.ones(3))
    in_forward, in_backward = ForwardLines(fail, lambda _: None), ForwardLines(str, fail)
    for lines in (in_forward, in_backward):
        assert lines.start() == ""
        loss = (parameter * 2).sum()
        lines.backward_begins(((loss,), {}))
        loss.backward()
        assert not lines.active
        assert lines.stop()
