"""The optimizers a recipe can name, as PyTorch implements them, or as we do where it has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from gpumem_tui.formula.recipe import Optimizer
from gpumem_tui.formula.records import OPTIMIZER_RECORDS
from gpumem_tui.step.eight_bit import EightBitAdamW
from gpumem_tui.step.workload import WorkloadError

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_MATRIX = 2
"""Dimensions of what Muon takes."""


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2; makes what lion-pytorch makes on the way: two values a parameter of one tensor."""

    def __init__(self, parameters: Any, lr: float = 1e-4, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter by the sign of its momentum."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (fast, slow) = self.state[parameter], group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        momentum = state["exp_avg"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        update = (momentum * fast).add(gradient, alpha=1 - fast).sign_()
        parameter.add_(update, alpha=-group["lr"])
        momentum.mul_(slow).add_(gradient, alpha=1 - slow)


class MuonWithAdamW(torch.optim.Optimizer):
    """torch.optim.Muon for the matrices of the blocks, torch.optim.AdamW for all else (Jordan et al. 2024).

    Args:
        matrices: those of the parameters that Muon updates, of two dimensions.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], matrices: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        every, chosen = list(parameters), {id(matrix) for matrix in matrices}
        super().__init__(every, {"lr": lr})
        by_muon = [parameter for parameter in every if id(parameter) in chosen]
        by_adamw = [parameter for parameter in every if id(parameter) not in chosen]
        self._parts: list[torch.optim.Optimizer] = []
        if by_muon:
            self._parts.append(torch.optim.Muon(by_muon, lr=lr))
        if by_adamw:
            self._parts.append(torch.optim.AdamW(by_adamw, lr=lr))
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let both optimizers update their own parameters."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for part in self._parts:
            part.step()
        return loss


def matrices_of(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the matrices of a network's blocks: of two dimensions, within a `ModuleList`, and no embedding."""
    for blocks in model.modules():
        if isinstance(blocks, nn.ModuleList):
            for module in blocks.modules():
                if not isinstance(module, nn.Embedding):
                    yield from (one for one in module.parameters(recurse=False) if one.dim() == _MATRIX)


def optimizer_of(name: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of that name for a model's parameters that have a gradient.

    Raises:
        WorkloadError: as `optimizer_factory`.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    record = OPTIMIZER_RECORDS[name]
    if record.takes_whole_matrices:
        return MuonWithAdamW(parameters, matrices_of(model), **record.options)
    return optimizer_factory(name)(parameters)


def optimizer_factory(name: Optimizer) -> OptimizerFactory:
    """Return what makes the optimizer of that name from parameters.

    Raises:
        WorkloadError: it needs more than parameters.
    """
    record = OPTIMIZER_RECORDS[name]
    if record.takes_whole_matrices:
        raise WorkloadError(
            f"--optimizer {name}: runs on one GPU, as torch.optim.Muon takes whole matrices; use --sharding none"
        )
    kind = _OURS.get(record.class_names[0]) or getattr(torch.optim, record.class_names[0], None)
    if kind is None:
        raise WorkloadError(
            f"--optimizer {name}: torch {torch.__version__} has no {record.class_names[0]}; use a newer torch"
        )
    return partial(kind, **record.options)


def _eight_bit(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Make bitsandbytes' own on a real GPU; without values, what it keeps.

    Raises:
        WorkloadError: on a real GPU, bitsandbytes is not there.
    """
    every = list(parameters)
    if not any(_is_real(parameter) for parameter in every):
        return EightBitAdamW(every, lr)
    try:
        bitsandbytes = import_module("bitsandbytes")
    except ImportError as error:
        raise WorkloadError(
            f"--optimizer adamw-8bit: on a real GPU it needs bitsandbytes in --python's environment ({error})"
        ) from error
    made: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(every, lr=lr)
    return made


_OURS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {"Lion": Lion, "AdamW8bit": _eight_bit}
"""By the first of a record's classes, what torch has not."""


def _is_real(parameter: Tensor) -> bool:
    """Return whether it is on a GPU that is there: a simulated one is presented as CUDA, and is `torch.simgpu`."""
    return parameter.device.type == "cuda" and not hasattr(torch, "simgpu")
