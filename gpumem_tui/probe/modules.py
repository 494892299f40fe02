"""Every module of a process: followed as it is made, and searched for where the probe came in later than it.

Each module is held weakly, and nothing is held between two searches.
"""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Iterable
from inspect import CO_NEWLOCALS, CO_OPTIMIZED
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from gpumem_tui.probe.compiler import passed_over
from gpumem_tui.step.sites import is_own
from gpumem_tui.step.walking import instances_of

_CHUNK = 2_000
_LONGEST = 10_000
"""Containers with more elements are data, not models: a search from the running functions leaves them out."""

_SIZED = {list, dict, tuple, set, frozenset}
_PASSED = (type, ModuleType, BuiltinFunctionType, CodeType, FrameType, TracebackType, torch.Tensor)


class Modules:
    """The modules that are known. One becomes known when a parameter, a buffer or a part is put into it, or when it is
    copied or read from a file: both go through `nn.Module.__setstate__`.

    Attributes:
        changed: modules, parts or parameters came since this was last set to False.
    """

    def __init__(self) -> None:
        self.changed = False
        self._known: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._undo: list[Any] = []

    def follow(self) -> bool:
        """Learn of every module that is made from now on; whether that can be done.

        Costs half a microsecond a parameter of a module's making.
        Compiled code that sets a buffer traces what is called for that too, and finds nothing to do.
        """
        is_compiling = getattr(torch.compiler, "is_compiling", None)
        if is_compiling is None:  # before torch 2.3: compiled code would be broken in two
            return False
        known, numbers = self._known, self._known.data  # type: ignore[attr-defined]

        def put(module: nn.Module, name: str, *_: Any) -> None:
            if is_compiling():
                return
            if id(module) not in numbers:
                known[id(module)] = module
                self.changed = True
            elif name not in module._parameters and name not in module._buffers:
                self.changed = True

        def put_part(module: nn.Module, *_: Any) -> None:
            if is_compiling():
                return
            known[id(module)] = module
            self.changed = True

        before = nn.Module.__setstate__

        def __setstate__(module: nn.Module, state: Any) -> None:  # noqa: N807  it stands in for the method
            before(module, state)  # type: ignore[no-untyped-call]
            put_part(module)

        passed_over(put)
        passed_over(put_part)
        nn.Module.__setstate__ = passed_over(__setstate__)  # type: ignore[method-assign]
        self._undo = [
            register_module_parameter_registration_hook(put).remove,
            register_module_buffer_registration_hook(put).remove,
            register_module_module_registration_hook(put_part).remove,
            lambda: _restore(__setstate__, before),
        ]
        return True

    def leave(self) -> None:
        """Learn of no more."""
        while self._undo:
            self._undo.pop()()

    def add(self, modules: Iterable[nn.Module]) -> None:
        """Make these known."""
        for module in modules:
            if id(module) not in self._known:
                self._known[id(module)] = module
                self.changed = True

    def alive(self) -> list[nn.Module]:
        """All that are known and not gone; one that is being made just now is left out."""
        modules = (ref() for ref in self._known.valuerefs())
        return [module for module in modules if module is not None and "_modules" in module.__dict__]


def _restore(ours: Any, before: Any) -> None:
    if nn.Module.__setstate__ is ours:  # else somebody has put something over it, and goes on calling it
        nn.Module.__setstate__ = before  # type: ignore[method-assign]


def modules_and_optimizers_in(objects: list[Any]) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """The modules and optimizers among objects."""
    modules, optimizers = instances_of(nn.Module, objects), instances_of(torch.optim.Optimizer, objects)
    return modules, [optimizer for optimizer in optimizers if "param_groups" in optimizer.__dict__]


def search_running(budget_s: float) -> tuple[list[nn.Module], list[torch.optim.Optimizer], bool]:
    """What can be reached from the functions that run in any thread and from the main program's globals.

    Much faster than `modules_and_optimizers_in(gc.get_objects())` where a program has millions of objects. Nothing that
    belongs to the program is called: references are followed as the garbage collector follows them.

    Args:
        budget_s: the search ends after this time, whether it is through or not.

    Returns:
        The modules, the optimizers, and whether the search came to its end.
    """
    deadline = time.perf_counter() + budget_s
    seen: set[int] = set()
    modules: list[nn.Module] = []
    optimizers: list[torch.optim.Optimizer] = []
    queue = _entrances()
    while queue:
        if time.perf_counter() > deadline:
            return modules, optimizers, False
        chunk, queue = queue[:_CHUNK], queue[_CHUNK:]
        more_modules, more_optimizers = modules_and_optimizers_in(chunk)
        modules += more_modules
        optimizers += more_optimizers
        new = {id(thing): thing for thing in gc.get_referents(*_entered(chunk)) if id(thing) not in seen}
        seen.update(new)
        queue += [thing for thing in new.values() if _may_lead_on(thing)]
    return modules, optimizers, True


def _may_lead_on(thing: Any) -> bool:
    kind = type(thing)
    if kind in _SIZED:
        return len(thing) <= _LONGEST
    return gc.is_tracked(thing) and not issubclass(kind, _PASSED)


def _entered(things: list[Any]) -> list[Any]:
    """What to follow references from: of a function only what it closes over, not all of the file it is in."""
    return [thing.__closure__ if type(thing) is FunctionType else thing for thing in things]


def _entrances() -> list[Any]:
    """The main program's globals, and the locals of every function that runs, with its globals if it is not torch's."""
    found: dict[int, Any] = {}
    main = sys.modules.get("__main__")
    if main is not None:
        found[id(main.__dict__)] = main.__dict__
    values: list[Any] = []
    frame: FrameType | None
    innermost: FrameType | None
    for innermost in sys._current_frames().values():
        frame = innermost
        while frame is not None:
            if not str(frame.f_globals.get("__name__")).startswith("gpumem_tui."):
                if is_own(frame.f_code.co_filename):
                    found[id(frame.f_globals)] = frame.f_globals
                values += _locals(frame)
            frame = frame.f_back
    frame = innermost = None  # this very frame was among them: it would live until the garbage collector comes by
    return [*found.values(), *(value for value in values if _may_lead_on(value))]


def _locals(frame: FrameType) -> list[Any]:
    """What a function's local variables hold now.

    Before Python 3.13 asking makes a dictionary that lives as long as the frame, and keeps alive what the function
    drops: it is emptied again. A function that calls `locals()` may have that very dictionary, and is left out.
    """
    code: CodeType = frame.f_code
    if not code.co_flags & CO_NEWLOCALS or not code.co_flags & CO_OPTIMIZED or "locals" in code.co_names:
        return []
    held = frame.f_locals
    values = list(held.values())
    if sys.version_info < (3, 13):
        held.clear()
    return values
