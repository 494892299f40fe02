"""What programs ask of tensors that have no data gets the answer that a GPU's tensors would give."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from gpumem_tui.simulator.cuda.presented import device_for
from tests.simulator.simulated_steps import simulated_gpu

WIDE = 1024
"""A layer of so many units on the host is a weight without data."""


@pytest.fixture
def layer() -> Iterator[nn.Linear]:
    """A layer on the host, where the simulated GPU is CUDA."""
    with device_for(simulated_gpu(), user_code=True):
        yield nn.Linear(WIDE, WIDE)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_no_tensor_is_a_fake_one_to_a_program(layer: nn.Linear, place: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, is_fake

    layer.to(place)
    for tensor in (layer.weight, layer.weight * 1, layer.weight.data, layer.weight.detach()):
        assert not isinstance(tensor, FakeTensor)
        assert not isinstance(tensor, torch._subclasses.FakeTensor)
        assert not is_fake(tensor)
    with torch._subclasses.FakeTensorMode() as mode:  # a program's own are
        own = mode.from_tensor(torch.zeros(2, device="cpu"))
    assert isinstance(own, FakeTensor)
    assert is_fake(own)
    assert issubclass(type(own), FakeTensor)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_parameter_is_of_the_class_of_parameters(layer: nn.Linear, place: str) -> None:
    layer.to(place)
    for parameter in (layer.weight, layer.bias, copy.deepcopy(layer).weight, nn.Parameter(layer.weight)):
        assert type(parameter) == nn.Parameter  # noqa: E721 - as libraries ask
        assert type(parameter) in (torch.Tensor, nn.Parameter)
        assert type(parameter).__name__ == "Parameter"
        assert isinstance(parameter, nn.Parameter)
        assert parameter.is_leaf
        assert parameter.requires_grad
        assert parameter.device.type == place
    kind: Any = type(layer.weight)
    made = kind(torch.zeros(2, device="cpu"), requires_grad=False)
    assert type(made) is nn.Parameter
    assert not made.requires_grad


def test_a_parameter_goes_to_the_meta_device_as_accelerate_sends_it(layer: nn.Linear) -> None:
    attributes = {**vars(layer.weight), "requires_grad": True}
    kind: Any = type(layer.weight)
    moved = kind(layer.weight.to(torch.device("meta")), **attributes)
    assert type(moved) is nn.Parameter
    assert moved.device.type == "meta"
    assert moved.shape == (WIDE, WIDE)
    assert moved.stride() == (WIDE, 1)


def test_a_copied_parameter_has_no_gradient_and_a_pickled_one_its_shape(layer: nn.Linear) -> None:
    layer.cuda()
    layer(torch.zeros(2, WIDE, device="cuda")).sum().backward()
    assert copy.deepcopy(layer.weight).grad is None
    read = pickle.loads(pickle.dumps(layer.weight))
    assert read.shape == layer.weight.shape
    assert read.device.type == "cuda"
    assert read.requires_grad
