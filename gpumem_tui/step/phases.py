"""Tells where a training step is, without its code saying so: batch, forward, backward, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gpumem_tui.step import Phase

OnPhase = Callable[[Phase], None]


@contextmanager
def watch_phases(
    model: nn.Module, entering: OnPhase, stepped: Callable[[torch.optim.Optimizer], None]
) -> Iterator[None]:
    """Call `entering` as each phase begins and `stepped` with every optimizer after its step.

    Forward begins when `model` is called outside of backward, or a part of it before the whole was (user code may call
    parts); backward with `torch.autograd.backward`, which `Tensor.backward` calls; the optimizer phase with any
    optimizer's `step`.
    """
    backward = torch.autograd.backward
    parts = {id(module) for module in model.modules()}
    current = [Phase.BATCH]

    def enter(phase: Phase) -> None:
        current[0] = phase
        entering(phase)

    def enter_forward(module: nn.Module, *_: Any) -> None:
        starts = module is model or (current[0] is not Phase.FORWARD and id(module) in parts)
        if starts and torch._C._current_graph_task_id() == -1:
            enter(Phase.FORWARD)

    def enter_optimizer(*_: Any) -> None:
        enter(Phase.OPTIMIZER)

    def marked_backward(*args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            enter(Phase.BACKWARD)
        return backward(*args, **kwargs)

    hooks = [
        register_module_forward_pre_hook(enter_forward),
        register_optimizer_step_pre_hook(enter_optimizer),
        register_optimizer_step_post_hook(lambda optimizer, *_: stepped(optimizer)),
    ]
    torch.autograd.backward = marked_backward
    try:
        yield
    finally:
        torch.autograd.backward = backward
        for hook in hooks:
            hook.remove()
