"""Hides from torch's compiler what the simulated GPU does around a program, for as long as compiled code is called.

Dynamo reads the program's code, and would read ours where it follows that program: hooks on all modules, the mode that
exchanges CUDA's name, functions of torch's that are replaced. It then compiles our code, or gives the program's up.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.nn.modules import module as modules
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode

from gpumem_tui.simulator.cuda.names import CudaNames
from gpumem_tui.simulator.cuda.presented import fake_tensors_shown
from gpumem_tui.simulator.device.base import DEVICE_TYPE
from gpumem_tui.simulator.device.kinds import all_as_fakes
from gpumem_tui.simulator.torch_internals import ANSWERS, Replacements, replace, without_replacements

_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_forward_hooks_always_called")
_OURS = "gpumem_tui."
CALL = (
    "torch.nn.modules.module.Module.__call__", "torch.utils.checkpoint.checkpoint",
    "torch.nn.functional.cross_entropy",
)  # fmt: skip
"""Replacements around a program's code that would be compiled into it."""
_inside = threading.local()


@contextmanager
def while_called() -> Iterator[None]:
    """Hide hooks and modes of ours while compiled code is called; the outermost call does."""
    if getattr(_inside, "called", False):
        yield
        return
    _inside.called = True
    try:
        hooks = [getattr(modules, name) for name in _HOOKS]
        with _without_names(), _without_hooks(*hooks), without_replacements(CALL), all_as_fakes(), fake_tensors_shown():
            yield
    finally:
        _inside.called = False


@contextmanager
def while_compiled() -> Iterator[None]:
    """Have torch be as it is but for answers about the GPU, while a frame or a graph is compiled."""
    if getattr(_inside, "compiled", False):
        yield
        return
    _inside.compiled = True
    try:
        with without_replacements(("*",), kept=ANSWERS), _without_names(), Replacements() as replacements:
            replacements.set(FakeTensorMode, "avoid_device_init", property(lambda _: True))
            replacements.set(proxy_tensor, "CONSTANT_NUMEL_LIMIT", -1)  # `torch.tensor` on the GPU has a shape alone
            yield
    finally:
        _inside.compiled = False


def name_meshes(module: Any) -> None:
    """Have a mesh of GPUs name the simulated device where CUDA's name is not exchanged: DTensor moves tensors to it.

    Args:
        module: `torch.distributed.device_mesh`.
    """

    def device_type(mesh: Any) -> str:
        hidden = getattr(_inside, "called", False) or getattr(_inside, "compiled", False)
        kind: str = vars(mesh).get("_device_type") or vars(mesh)["device_type"]  # torch up to 2.9
        return DEVICE_TYPE if hidden and kind == "cuda" else kind

    def named(mesh: Any, name: str) -> None:
        vars(mesh)["device_type"] = name

    if torch.distributed.is_available():
        replace(module.DeviceMesh, "device_type", property(device_type, named))


@contextmanager
def _without_names() -> Iterator[None]:
    """Take off the mode that exchanges CUDA's name: the compiler would follow it, and guard the code by it."""
    internals: Any = torch._C
    stack = [internals._get_function_stack_at(place) for place in range(internals._len_torch_function_stack())]
    _set_modes([mode for mode in stack if not isinstance(mode, CudaNames)])
    try:
        yield
    finally:
        _set_modes(stack)


def _set_modes(stack: list[TorchFunctionMode]) -> None:
    internals: Any = torch._C
    for _ in range(internals._len_torch_function_stack()):
        internals._pop_torch_function_stack()
    for mode in stack:
        internals._push_on_torch_function_stack(mode)


@contextmanager
def _without_hooks(*tables: dict[int, Any]) -> Iterator[None]:
    """Take our hooks out of these tables; those that others add within the context stay."""
    taken = [dict(table) for table in tables]
    ours = {key for table in tables for key, hook in table.items() if _is_ours(hook)}
    for table in tables:
        for key in ours & table.keys():
            del table[key]
    try:
        yield
    finally:
        for table, before in zip(tables, taken, strict=True):
            added = {key: hook for key, hook in table.items() if key not in before}
            table.clear()
            table.update(before)
            table.update(added)


def _is_ours(hook: Callable[..., Any]) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(_OURS)


@contextmanager
def announced(function: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[None]:
    """Call our hooks for what is compiled with its own hooks, which Dynamo would follow.

    Args:
        function: a module's call, or a function that calls modules or optimizers, of which those that it names are
            announced: an update that comes after modules in the same function once that has ended.
        args: what it is called with.
    """
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module) and function.__name__ == "_call_impl":
        _call(modules._global_forward_pre_hooks, owner, args)
        try:
            yield
        finally:
            _call(modules._global_forward_hooks, owner, args, None)
        return
    plain = inspect.unwrap(function)
    named = inspect.getclosurevars(plain)[:2] if inspect.isfunction(plain) or inspect.ismethod(plain) else ()
    held = chain(*(values.values() for values in (getattr(owner, "__dict__", {}), *named)))
    used = {id(value): value for value in (owner, *args, *held)}.values()
    parts = [value for value in used if isinstance(value, nn.Module)]
    stepped = [value for value in used if isinstance(value, Optimizer)]
    for part in parts:
        _call(modules._global_forward_pre_hooks, part, args)
        _call(modules._global_forward_hooks, part, args, None)
    before, after = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    if not parts:
        for one in stepped:
            _call(before, one, args, {})
    with _without_hooks(before, after) if stepped else nullcontext():
        yield
    for one in stepped:
        if parts:  # all of a step, of which the update is the end
            _call(before, one, args, {})
        _call(after, one, args, {})


def _call(hooks: dict[int, Any], *args: Any) -> None:
    """Call those hooks that are ours."""
    for hook in [hook for hook in hooks.values() if _is_ours(hook)]:
        hook(*args)
