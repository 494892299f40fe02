"""How many training steps there were, by what optimizers do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpumem_tui.probe.steps import StepCount


class Twice(torch.optim.SGD):
    """Overrides `step` and calls its parent's, so that the hook fires twice."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.fixture
def count() -> Any:
    """A step count that torch's own hook drives."""
    steps = StepCount()

    def fired(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not steps.fire(id(optimizer)):
            steps.register(optimizer)

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

    def boundary(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
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
