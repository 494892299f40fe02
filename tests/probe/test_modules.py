"""Modules that are made, copied, read and replaced after the first step, or were there before the probe."""

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

from gpumem_tui.probe.finding import Finder, Holdings, search_running
from gpumem_tui.probe.wire import CPU

FLOAT = 4


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
    followed.register(optimizer)
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
    """The modules found from here, whether those dropped afterwards are gone, and how many modules are data. (No assert
    here: pytest writes one with a call of `locals`.)"""
    trainer = _Trainer(nn.Sequential(), torch.optim.SGD([nn.Parameter(torch.zeros(8))]), lambda: teacher)
    data = [[nn.Linear(1, 1)] for _ in range(10_001)]
    found = search_running(120.0)
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
