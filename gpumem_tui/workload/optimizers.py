"""The optimizers a recipe can name, as PyTorch implements them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn

from gpumem_tui.formula.recipe import Optimizer
from gpumem_tui.workload.base import WorkloadError

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

# Everything but the learning rate stays at torch's default: `foreach` decides how much scratch memory a step
# takes, and what users run is the default. The learning rates only have to keep random data finite.
_FACTORIES: dict[Optimizer, OptimizerFactory] = {
    "adamw": partial(torch.optim.AdamW, lr=3e-4),
    "adam": partial(torch.optim.Adam, lr=3e-4),
    "sgd": partial(torch.optim.SGD, lr=1e-2),
    "sgd-momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-3),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-4),
}

_ELSEWHERE: dict[Optimizer, str] = {
    "lion": "use lion-pytorch in a workload file (--workload)",
    "adamw-8bit": "use bitsandbytes in a workload file (--workload)",
}
"""Optimizers that PyTorch does not have, and how to run them all the same."""


def optimizer_factory(name: Optimizer) -> OptimizerFactory:
    """What makes the optimizer of that name from parameters.

    Raises:
        WorkloadError: PyTorch has no implementation of it.
    """
    if name in _FACTORIES:
        return _FACTORIES[name]
    raise WorkloadError(
        f"--optimizer {name}: PyTorch does not implement it, so only the formula knows it; {_ELSEWHERE[name]}"
    )
