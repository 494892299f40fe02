"""A program's own functions that backward calls: what they raise is reported before it ends the process.

An exception that leaves one of the autograd engine's threads ends the process (see `Storages.raise_if_full`), so it
never reaches the line that called ``backward()``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules

from gpumem_tui.step.phases import in_backward

_REGISTERS: tuple[tuple[Any, str], ...] = (
    (torch.Tensor, "register_hook"),
    (torch.Tensor, "register_post_accumulate_grad_hook"),
    (nn.Module, "register_backward_hook"),
    (nn.Module, "register_full_backward_hook"),
    (nn.Module, "register_full_backward_pre_hook"),
    (modules, "register_module_backward_hook"),
    (modules, "register_module_full_backward_hook"),
    (modules, "register_module_full_backward_pre_hook"),
)
"""What takes a function that backward is to call."""


def answers(on_error: Callable[[Exception], None]) -> dict[tuple[Any, str], Any]:
    """The replaced attributes, by owner and name.

    Args:
        on_error: called with what such a function raises in a thread of the engine.
    """
    saved: Any = torch.autograd.graph.saved_tensors_hooks
    construct = saved.__init__

    def told(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except Exception as error:
                if is_engines_thread():
                    on_error(error)
                raise

        return called

    def registering(register: Callable[..., Any], of_owner: bool) -> Callable[..., Any]:
        @functools.wraps(register)
        def registered(*args: Any, **kwargs: Any) -> Any:
            given = list(args)
            if len(given) > of_owner and callable(given[of_owner]):
                given[of_owner] = told(given[of_owner])
            elif callable(kwargs.get("hook")):
                kwargs["hook"] = told(kwargs["hook"])
            return register(*given, **kwargs)

        return registered

    def init(context: Any, pack_hook: Any, unpack_hook: Any) -> None:
        construct(context, pack_hook, told(unpack_hook))

    replaced = {(owner, name): registering(getattr(owner, name), isinstance(owner, type)) for owner, name in _REGISTERS}
    return {**replaced, (saved, "__init__"): init}


def is_engines_thread() -> bool:
    """Whether this thread is one that the autograd engine has started for a device."""
    return in_backward() and isinstance(threading.current_thread(), threading._DummyThread)
