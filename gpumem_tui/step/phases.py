"""Where a training step is, without its code saying so: batch, forward, backward, optimizer.

Imports nothing of ours but `step`, and beyond the standard library only torch, and is Python 3.9: a user's training
process speaks it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gpumem_tui.step import Phase


def in_backward() -> bool:
    """Return whether this thread is inside of a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def mark_backward(
    begins: Callable[[], None],
    ended: Callable[[], None] = lambda: None,
    hidden: Callable[[Any], Any] = lambda function: function,
    starts: Callable[[Any], None] = lambda arguments: None,  # noqa: ARG005
) -> Callable[[], None]:
    """Have these called when backward begins and has ended, but for one within another; returns what undoes that.

    Args:
        starts: called with the arguments of backward, once it has begun.
        hidden: marks the function that is put in the place of `torch.autograd.backward`.
    """
    autograd: Any = torch.autograd
    backward, engine = autograd.backward, autograd.Variable._execution_engine

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*args: Any, **kwargs: Any) -> Any:
            if in_backward():
                return function(*args, **kwargs)
            begins()
            starts((args, kwargs))
            result = function(*args, **kwargs)
            ended()
            return result

        return marked

    marked, marked_engine = hidden(mark(backward)), MarkedEngine(engine, mark)

    def undo() -> None:  # unless something was put over it, which keeps calling it
        if autograd.backward is marked:
            autograd.backward = backward
        if autograd.Variable._execution_engine is marked_engine:
            autograd.Variable._execution_engine = engine

    autograd.backward, autograd.Variable._execution_engine = marked, marked_engine
    return undo


class MarkedEngine:
    """Autograd's engine, for programs that start a backward there and not by `torch.autograd`, as Megatron-LM does."""

    def __init__(self, engine: Any, mark: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._engine, self._mark = engine, mark

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a backward, and mark it where the program has called this."""
        caller: str = sys._getframe(1).f_globals.get("__name__", "")
        by_program = not (caller.startswith("torch.autograd") or caller == __name__)
        return (self.from_program if by_program else self._engine.run_backward)(*args, **kwargs)

    def from_program(self, *args: Any, **kwargs: Any) -> Any:
        """Run a backward that is marked, by all that mark one."""
        onward = self._engine.from_program if isinstance(self._engine, MarkedEngine) else self._through_torch
        return self._mark(onward)(*args, **kwargs)

    def _through_torch(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Go the way of `torch.autograd.backward`, which others may follow; torch before 2.3 has none."""
        run = getattr(torch.autograd, "_engine_run_backward", self._engine.run_backward)
        return run(tensors, *args, **kwargs)


class PhaseHooks(ExitStack):
    """Hooks that tell where a step is; closing it takes them out.

    Forward begins when one of the `parts` of a model is called outside of backward, while another phase continues: user
    code may call parts alone. Backward is `torch.autograd.backward`, which `Tensor.backward` calls.
    """

    def on_forward(
        self,
        parts: Container[int],
        phase: Callable[[], Phase],
        begins: Callable[[nn.Module, Any], None],
        root: nn.Module | None = None,
    ) -> None:
        """Have `begins` called with the module and its arguments.

        Args:
            parts: modules by `id`.
            phase: gives the one that continues.
            root: begins forward anew also while forward continues.
        """

        def called(module: nn.Module, arguments: Any) -> None:
            starts = module is root or (phase() is not Phase.FORWARD and id(module) in parts)
            if starts and not in_backward():
                begins(module, arguments)

        self.callback(register_module_forward_pre_hook(called).remove)

    def on_optimizer(
        self,
        begins: Callable[[torch.optim.Optimizer], None],
        ended: Callable[[torch.optim.Optimizer], None] | None = None,
    ) -> None:
        """Have these called with an optimizer before and after its step."""
        self.callback(register_optimizer_step_pre_hook(lambda optimizer, *_: begins(optimizer)).remove)
        if ended is not None:
            after = ended
            self.callback(register_optimizer_step_post_hook(lambda optimizer, *_: after(optimizer)).remove)

    def on_backward(self, begins: Callable[[], None]) -> None:
        """Have this called as backward begins."""
        self.callback(mark_backward(begins))


_followers: list[Callable[[], None]] = []


def begin_step() -> None:
    """Say that a step begins, and that the one before it is over: whoever follows the program hears of it.

    For programs whose steps nothing else tells, as one without an optimizer.
    """
    for begins in list(_followers):
        begins()


def follow_steps(begins: Callable[[], None]) -> Callable[[], None]:
    """Have a function called when a program announces a step; returns what undoes that."""
    _followers.append(begins)
    return lambda: _followers.remove(begins)
