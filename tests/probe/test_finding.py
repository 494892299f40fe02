"""What is trained, and what of it is which: by storage, on made-up models with known sizes."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpumem_tui.probe.finding import Finder, Holdings
from gpumem_tui.probe.model import describe_models, describe_optimizers, describe_untrained
from gpumem_tui.probe.modules import search_running
from gpumem_tui.probe.steps import StepCount
from gpumem_tui.probe.tensors import memory_of, tensors_in
from gpumem_tui.probe.wire import CPU

FLOAT = 4


class EightBit(torch.Tensor):
    """A quantized state as bitsandbytes and torchao keep it: a wrapper around codes and scales."""

    codes: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor) -> EightBit:
        made: EightBit = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scales = codes, scales
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise AssertionError(f"the probe ran {func}")


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, size: int = 8) -> None:
    model(torch.ones(2, size)).sum().backward()
    optimizer.step()


def _held(optimizer: torch.optim.Optimizer, *models: nn.Module) -> dict[int, Holdings]:
    """What a process that has nothing else would hold."""
    finder = Finder()
    finder.meet(optimizer)
    finder.scan(module for model in models for module in model.modules())
    return finder.trained().holdings()


def test_frozen_parameters_and_buffers_belong_to_the_model() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    _step(model, optimizer)
    holdings = _held(optimizer, model)[CPU]
    assert holdings.buffers_bytes == 2 * 8 * FLOAT + 8
    assert holdings.parameters_bytes == (72 + 16 + 64) * FLOAT + holdings.buffers_bytes
    assert holdings.gradients_bytes == (16 + 64) * FLOAT  # the norm's too, though no optimizer has it
    assert holdings.optimizer_bytes == 64 * FLOAT


def test_a_model_that_nothing_trains_holds_parameters_and_is_not_described() -> None:
    """A teacher, a reference model, a moving average: else they would pass for activations at the peak."""
    model = nn.Linear(8, 8)
    teacher = nn.Sequential(copy.deepcopy(model), nn.ReLU(), nn.BatchNorm1d(8)).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model, optimizer)
    buffers_bytes = 2 * 8 * FLOAT + 8
    assert _held(optimizer, model, teacher)[CPU] == Holdings(
        parameters_bytes=(72 + 72 + 16) * FLOAT + buffers_bytes,
        gradients_bytes=72 * FLOAT,
        buffers_bytes=buffers_bytes,
    )
    finder = Finder()
    finder.meet(optimizer)
    finder.scan([model, *teacher.modules()])
    assert finder.roots == [model]


def test_tied_weights_and_views_count_once_and_whole() -> None:
    flat = torch.zeros(100)
    model = nn.Module()
    model.first, model.second = nn.Parameter(flat[:40]), nn.Parameter(flat[40:60])
    model.tied = model.first
    model.alias = nn.Parameter(model.first.detach())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model.first.sum() + model.second.sum()).backward()
    optimizer.step()
    assert _held(optimizer, model)[CPU] == Holdings(parameters_bytes=100 * FLOAT, gradients_bytes=60 * FLOAT)


def test_quantized_nested_and_sparse_state_is_counted_by_its_parts() -> None:
    model = nn.Embedding(100, 8, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.tensor([1, 2, 3])).sum().backward()
    optimizer.step()
    shared = torch.zeros(256)
    optimizer.state[model.weight] = {
        "first": EightBit(torch.zeros(800, dtype=torch.uint8), torch.zeros(4)),
        "second": [{"codes": torch.zeros(800, dtype=torch.uint8), "map": shared}, {"map": shared}, (None, 1.5)],
        "nowhere": torch.zeros(1000, device="meta"),
    }
    holdings = _held(optimizer, model)[CPU]
    assert holdings.gradients_bytes == 3 * 8 * FLOAT + 3 * 8
    assert holdings.optimizer_bytes == 800 + 4 * FLOAT + 800 + 256 * FLOAT


def test_master_weights_in_the_optimizer_and_the_models_own_are_both_parameters() -> None:
    """As Apex and fairseq train: the optimizer has float copies, the model's own have the gradients."""
    model = nn.Linear(8, 8).bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer.step()
    held = _held(optimizer, model)[CPU]
    assert held == Holdings(parameters_bytes=72 * (FLOAT + 2), gradients_bytes=72 * (FLOAT + 2))


def test_optimizers_that_were_there_before_are_found() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    _step(model, optimizer)
    finder = Finder()
    finder.scan()
    assert optimizer in finder.optimizers
    assert model in finder.roots


def test_nothing_is_kept_alive() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    _step(model, optimizer)
    finder = Finder()
    finder.meet(optimizer)
    finder.scan()
    assert finder.trained().holdings()[CPU].parameters_bytes >= 72 * FLOAT
    gone = weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]
    finder.trained()
    assert finder.stale


def test_fake_tensors_hold_nothing() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(1000)
    assert memory_of(fake) == []
    assert memory_of(torch.zeros(10, device="meta")) == []


def test_state_that_holds_itself_ends() -> None:
    state: dict[str, Any] = {"value": torch.zeros(1)}
    state["self"] = state
    assert {id(tensor) for tensor in tensors_in(state)} == {id(state["value"])}


def test_the_model_is_described_once_with_plain_options() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2, bias=False)).bfloat16()
    model[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=torch.tensor(0.1), fused=False)
    (described,) = describe_models([model])
    assert described["name"] == "torch.nn.modules.container.Sequential"
    assert [(p["name"], p["shape"], p["dtype"], p["trained"]) for p in described["parameters"]] == [
        ("0.weight", [4, 8], "bfloat16", True),
        ("0.bias", [4], "bfloat16", True),
        ("1.weight", [2, 4], "bfloat16", False),
    ]
    (options,) = describe_optimizers([optimizer])
    assert options["name"] == "torch.optim.adamw.AdamW"
    assert options["options"]["fused"] is False
    assert options["options"]["betas"] == (0.9, 0.999)
    assert "lr" not in options["options"]  # a tensor would have to be read from its device


def test_a_model_that_answers_for_its_parameters_in_its_own_way_is_found() -> None:
    class Grouped(nn.Sequential):
        def parameters(self, recurse: bool = True) -> Any:
            return [{"params": [self[0].weight], "lr": 0.1}, {"params": [self[0].bias]}]

    model, frozen = Grouped(nn.Linear(8, 4)), Grouped(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    finder = Finder()
    finder.scan([*model.modules(), *frozen.modules(), optimizer])
    assert finder.roots == [model]
    assert [p["name"] for p in describe_models(finder.roots)[0]["parameters"]] == ["0.weight", "0.bias"]
    assert [one["bytes"] for one in describe_untrained(finder.untrained, finder.roots)] == [6 * FLOAT]


def test_what_stands_beside_untrained_is_described_by_class() -> None:
    student, teacher, average = nn.Linear(8, 4), nn.Linear(16, 4), nn.BatchNorm1d(10)
    shared = nn.Linear(8, 4, bias=False)
    shared.weight = student.weight
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    finder = Finder()
    finder.scan([student, teacher, average, shared, nn.ReLU(), optimizer])
    assert finder.roots == [student]
    found = {(one["name"], one["device"], one["bytes"]) for one in describe_untrained(finder.untrained, finder.roots)}
    assert found == {
        ("torch.nn.modules.linear.Linear", CPU, (16 * 4 + 4) * FLOAT),
        ("torch.nn.modules.batchnorm.BatchNorm1d", CPU, 4 * 10 * FLOAT + 8),
    }


# Modules that come later


@pytest.fixture
def followed() -> Iterator[Finder]:
    """A finder that is there from the beginning."""
    finder = Finder()
    finder.follow(late=False)
    yield finder
    finder.leave()


def _found(finder: Finder) -> Holdings:
    assert finder.stale
    finder.update()
    assert (finder.complete, finder.stale) == (True, False)
    return finder.trained().holdings()[CPU]


def test_models_that_are_made_copied_read_and_replaced_later_are_found(
    followed: Finder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a walk over all objects."""
    monkeypatch.setattr(gc, "get_objects", None)
    model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 1, 8))
    own = sum(p.numel() for p in model.parameters()) * FLOAT
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    followed.meet(optimizer)
    assert _found(followed) == Holdings(parameters_bytes=own)
    average = copy.deepcopy(model)
    assert _found(followed).parameters_bytes == 2 * own
    reread = pickle.loads(pickle.dumps(model))
    assert _found(followed).parameters_bytes == 3 * own
    averaged: nn.Module = torch.optim.swa_utils.AveragedModel(model)
    held = _found(followed)
    assert (held.parameters_bytes, held.buffers_bytes) == (4 * own + 8, 8)
    model[0].adapter = nn.Linear(8, 2, bias=False)
    assert _found(followed).parameters_bytes == 4 * own + 8 + 16 * FLOAT
    model[0].register_parameter("scale", nn.Parameter(torch.ones(8)))
    assert _found(followed).parameters_bytes == 4 * own + 8 + 24 * FLOAT
    del average, reread, averaged
    model[0] = nn.Linear(8, 8)  # of which the optimizer knows nothing; it keeps the old one's parameters
    assert _found(followed).parameters_bytes == own + 72 * FLOAT
    assert followed.roots == [model]


def test_a_buffer_that_is_set_in_each_step_is_nothing_new(followed: Finder) -> None:
    model: Any = nn.Module()
    model.register_buffer("mean", torch.zeros(8))
    model.weight = nn.Parameter(torch.zeros(8))
    followed.update()
    model.mean = model.mean * 0.9
    model.weight = nn.Parameter(torch.zeros(16))
    assert not followed.stale
    assert followed.trained().holdings()[CPU].parameters_bytes == (8 + 16) * FLOAT


def test_following_ends_and_leaves_torch_as_it_was() -> None:
    before = nn.Module.__setstate__
    finder = Finder()
    finder.follow(late=False)
    assert nn.Module.__setstate__ is not before
    finder.leave()
    finder.update()
    model = copy.deepcopy(nn.Linear(8, 8))
    assert nn.Module.__setstate__ is before
    assert not finder.stale
    finder.scan([model])
    assert finder.untrained == [model]


def test_one_that_comes_late_goes_through_few_objects_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumem_tui.probe.finding._FEW_BLOCKS", 10**9)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    finder = Finder()
    finder.follow(late=True)
    try:
        assert (finder.complete, finder.stale) == (False, True)
        finder.update()
    finally:
        finder.leave()
    assert (finder.complete, finder.stale) == (True, False)
    assert model in finder.roots
    assert optimizer in finder.optimizers


class _Trainer:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, teach: Callable[[], nn.Module]) -> None:
        self.parts = {"model": [model], "teach": teach}
        self.state = [{"optimizer": optimizer}]


def _train(teacher: nn.Module) -> tuple[Any, bool, int]:
    """What is found from here, whether what is dropped afterwards is gone, and how many modules are data. (No assert
    here: pytest writes one with a call of `locals`.)"""
    trainer = _Trainer(nn.Sequential(), torch.optim.SGD([nn.Parameter(torch.zeros(8))]), lambda: teacher)
    data = [[nn.Linear(1, 1)] for _ in range(10_001)]
    found = search_running(5.0)
    gone = weakref.ref(trainer)
    del trainer
    return found, gone() is None, len(data)


def test_of_many_objects_what_running_functions_reach_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a function drops stays alive for it, and data is passed over."""
    monkeypatch.setattr(gc, "get_objects", None)
    teacher = nn.Linear(4, 4)
    (modules, optimizers, through), is_gone, data = _train(teacher)
    assert through
    assert is_gone
    assert teacher in modules
    assert nn.Sequential in map(type, modules)
    assert torch.optim.SGD in map(type, optimizers)
    assert len(modules) < data
    assert search_running(0.0)[2] is False


# Steps


class Twice(torch.optim.SGD):
    """Overrides `step` and calls its parent's, so that the hook fires twice."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.fixture
def count() -> Any:
    """A step count that torch's own hook drives."""
    steps = StepCount()

    def fired(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not steps.fire(id(optimizer)):
            steps.meet(optimizer)

    handle = register_optimizer_step_post_hook(fired)
    yield steps
    handle.remove()


def _optimizer(kind: type[torch.optim.Optimizer]) -> Any:
    return kind([nn.Parameter(torch.zeros(1))], lr=0.1)  # type: ignore[call-arg]


def test_a_step_that_calls_its_parents_is_one(count: StepCount) -> None:
    _optimizer(torch.optim.SGD)  # torch puts hooks around a class's `step` when the first of it is made
    optimizer = _optimizer(Twice)
    for _ in range(3):
        optimizer.step()
    assert count.steps == 3
    assert count.is_whole(optimizer)
    assert count.fire(id(optimizer))
    assert not count.is_whole(optimizer)
    assert count.steps == 4


def test_a_parent_that_fires_later_too_is_seen(count: StepCount) -> None:
    class Parent(torch.optim.Optimizer):
        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, {"lr": lr})

        def step(self, closure: Any = None) -> Any:
            return None

    class Child(Parent):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                return super().step(closure)

    optimizer = _optimizer(Child)
    for _ in range(3):
        optimizer.step()
    assert count.steps == 3
    _optimizer(Parent)  # now torch puts the hook around the parent's step too
    whole = []

    def boundary(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        count.recheck(optimizer)
        whole.append(count.is_whole(optimizer))

    handle = register_optimizer_step_post_hook(boundary)
    optimizer.step()
    handle.remove()
    for _ in range(3):
        optimizer.step()
    assert whole == [False, True]
    assert count.steps == 7


def test_two_optimizers_count_once_and_the_busier_one_decides(count: StepCount) -> None:
    generator, discriminator = _optimizer(torch.optim.SGD), _optimizer(torch.optim.Adam)
    for _ in range(4):
        for _ in range(3):
            discriminator.step()
        generator.step()
    assert count.steps == 12


def test_optimizers_that_are_used_one_after_another_count_all(count: StepCount) -> None:
    """As where two are trained in turns; the first step of a turn may be of the step before."""
    first, second = _optimizer(torch.optim.SGD), _optimizer(torch.optim.Adam)
    first.step()
    second.step()
    assert count.steps == 1
    for _ in range(50):
        first.step()
    for _ in range(50):
        second.step()
    assert count.steps == 1 + 50 + 49


def test_a_later_run_in_the_same_process_goes_on(count: StepCount) -> None:
    first = _optimizer(torch.optim.SGD)
    for _ in range(10):
        first.step()
    second = _optimizer(torch.optim.SGD)
    second.step()
    assert count.steps == 10
    count.forget(id(first))
    del first
    for _ in range(5):
        second.step()
    assert count.steps == 15
