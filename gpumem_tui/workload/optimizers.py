"""The optimizers a recipe can name, as PyTorch implements them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn

from gpumem_tui.formula.optimizers import OPTIMIZER_RECORDS
from gpumem_tui.formula.recipe import Optimizer
from gpumem_tui.workload.base import WorkloadError

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def optimizer_factory(name: Optimizer) -> OptimizerFactory:
    """What makes the optimizer of that name from parameters.

    Raises:
        WorkloadError: PyTorch has no implementation of it.
    """
    record = OPTIMIZER_RECORDS[name]
    if record.elsewhere:
        only = "PyTorch does not implement it, so only the formula knows it"
        raise WorkloadError(f"--optimizer {name}: {only}; {record.elsewhere}")
    return partial(getattr(torch.optim, record.class_names[0]), **record.options)
