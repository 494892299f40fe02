"""The trained model and its parts: by storage, on made-up models with known sizes."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import torch
from torch import nn

from gpumem_tui.probe.finding import Finder, Holdings, describe_models, describe_optimizers, describe_untrained
from gpumem_tui.probe.wire import CPU
from gpumem_tui.step.walking import memory_of, tensors_in

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
    """The memory of a process that has nothing else."""
    finder = Finder()
    finder.register(optimizer)
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
    finder.register(optimizer)
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
    finder.register(optimizer)
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
    assert described.name == "torch.nn.modules.container.Sequential"
    assert [(p.name, p.shape, p.dtype, p.trained) for p in described.parameters] == [
        ("0.weight", (4, 8), "bfloat16", True),
        ("0.bias", (4,), "bfloat16", True),
        ("1.weight", (2, 4), "bfloat16", False),
    ]
    (options,) = describe_optimizers([optimizer])
    assert options.name == "torch.optim.adamw.AdamW"
    assert options.options["fused"] is False
    assert options.options["betas"] == (0.9, 0.999)
    assert "lr" not in options.options  # a tensor would have to be read from its device


def test_a_model_that_answers_for_its_parameters_in_its_own_way_is_found() -> None:
    class Grouped(nn.Sequential):
        def parameters(self, recurse: bool = True) -> Any:
            return [{"params": [self[0].weight], "lr": 0.1}, {"params": [self[0].bias]}]

    model, frozen = Grouped(nn.Linear(8, 4)), Grouped(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    finder = Finder()
    finder.scan([*model.modules(), *frozen.modules(), optimizer])
    assert finder.roots == [model]
    assert [p.name for p in describe_models(finder.roots)[0].parameters] == ["0.weight", "0.bias"]
    assert [one.bytes for one in describe_untrained(finder.untrained, finder.roots)] == [6 * FLOAT]


def test_what_stands_beside_untrained_is_described_by_class() -> None:
    student, teacher, average = nn.Linear(8, 4), nn.Linear(16, 4), nn.BatchNorm1d(10)
    shared = nn.Linear(8, 4, bias=False)
    shared.weight = student.weight
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    finder = Finder()
    finder.scan([student, teacher, average, shared, nn.ReLU(), optimizer])
    assert finder.roots == [student]
    found = {(one.name, one.device, one.bytes) for one in describe_untrained(finder.untrained, finder.roots)}
    assert found == {
        ("torch.nn.modules.linear.Linear", CPU, (16 * 4 + 4) * FLOAT),
        ("torch.nn.modules.batchnorm.BatchNorm1d", CPU, 4 * 10 * FLOAT + 8),
    }
