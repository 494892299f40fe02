"""Where in the program an allocation comes from: the operator, the module it runs in, the line that called it.

Imports nothing of ours but `step`, and beyond the standard library only torch, and is Python 3.9: a user's training
process speaks it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks

from gpumem_tui.step import Site

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NOT_THE_PROGRAM = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.join(_PACKAGE, "run", ""),
    os.path.join(_PACKAGE, "simulator", ""),
    os.path.join(_PACKAGE, "probe", ""),
    os.path.join(_PACKAGE, "step", ""),
    "<",
)
_NOBODY = Site()
_BUFFER = "aten.empty_strided"
_NO_BACKWARD = -1
"""How torch numbers the running backward where none is."""
GENERATED: dict[str, Callable[[int], Site | None]] = {}
"""By file name of code that a compiler has written: what gives the place in the program for a line of it."""

_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]|[/\\]lib[/\\]python3")
"""Where libraries lie, Python's own among them."""


class RunningModules:
    """The modules that are running, by qualified name.

    Args:
        names: by the `id` of a module; others are called by their class.
        changed: called whenever one begins or ends.
    """

    def __init__(self, names: dict[int, str] | None = None, changed: Callable[[], None] | None = None) -> None:
        self._names = {} if names is None else names
        self._changed = changed
        self._running: list[str] = []

    def name(self, model: nn.Module) -> None:
        """Call the modules of `model`, too, by their qualified names from now on, without what torch.compile adds."""
        named = nn.Module.named_modules(model)
        self._names.update((id(module), f"{name}.".replace("_orig_mod.", "")[:-1]) for name, module in named)
        if self._running == [type(model).__name__]:  # its first call, which has just begun
            self._running[0] = self._names[id(model)]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow which module runs."""
        changed = self._changed

        def enter(module: nn.Module, *_: Any) -> None:
            kind = "" if hasattr(module, "_orig_mod") else type(module).__name__  # torch.compile's is no place
            self._running.append(self._names.get(id(module), kind))
            if changed is not None:
                changed()

        def leave(*_: Any) -> None:
            if self._running:  # else the watch began inside of this module
                self._running.pop()
            if changed is not None:
                changed()

        handles = (
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._running.clear()

    @property
    def is_any(self) -> bool:
        """Return whether a module is running."""
        return bool(self._running)

    @property
    def innermost(self) -> str:
        """The module that runs within all others that do; empty if none does."""
        return self._running[-1] if self._running else ""


class SiteFinder:
    """Names the place of each operator; in backward, the place of the forward operator it differentiates.

    Autograd numbers its nodes as forward makes them (`sequence_nr`), which is how backward finds its way home. Each
    thread counts for itself: what a checkpoint runs again in backward is numbered by the engine's thread, and the nodes
    that it makes are called by a backward within that one.
    """

    def __init__(self) -> None:
        self._modules = RunningModules()
        self._forward: dict[int, Site] = {}
        self._run_again: dict[int, Site] = {}
        self._running_again_in = _NO_BACKWARD
        self._places: dict[tuple[int, int], tuple[Site | None, CodeType]] = {}  # by code, kept here, and instruction

    def name_modules(self, model: nn.Module) -> None:
        """Call the modules of `model`, too, by their qualified names from now on."""
        self._modules.name(model)

    def watching(self) -> AbstractContextManager[None]:
        """Follow which module runs."""
        return self._modules.watching()

    @property
    def in_module(self) -> bool:
        """Return whether a module is running."""
        return self._modules.is_any

    def site(self, operator: str) -> Site:
        """Return the place of the operator that is being run."""
        node = torch._C._current_autograd_node()
        if node is not None and not torch.is_grad_enabled():
            made, written = self._of(node), self._caller() if GENERATED else _NOBODY
            return _at(written, operator, made.module) if written.operator else _at(made, operator, "")
        caller, module = self._caller(), self._modules.innermost
        if (
            node is not None and not caller.source
        ):  # what is run again is called by torch alone: where forward called it
            made = self._of(node)
            caller = Site(caller.operator, "", made.source, made.function)
        found = _at(caller, operator, module)
        backward = torch._C._current_graph_task_id()
        if _NO_BACKWARD in (backward, self._running_again_in):
            self._running_again_in = backward
        by_number = self._forward if backward == _NO_BACKWARD else self._run_again
        made = Site("", module, caller.source, caller.function) if caller.operator else found
        by_number.setdefault(torch._C._autograd._get_sequence_nr() - 1, made)
        return found

    def _of(self, node: Any) -> Site:
        """Return the place that made a node which backward is calling."""
        is_within = self._running_again_in not in (_NO_BACKWARD, torch._C._current_graph_task_id())
        return (self._run_again if is_within else self._forward).get(node._sequence_nr(), _NOBODY)

    def calling_line(self) -> str:
        """Return ``file:line`` of the innermost frame that is the program's own."""
        return self._caller().source

    def place(self) -> str:
        """Return `calling_line`, and where that is an installed library's the line of the program that called it."""
        line = self.calling_line()
        for frame in callers(sys._getframe(1)):
            path = frame.f_code.co_filename
            if is_own(path) and not is_installed(path):
                own = f"{os.path.basename(path)}:{frame.f_lineno}"
                return line if line in ("", own) else f"{line}, called from {own}"
        return line

    def forward_line(self) -> str:
        """Return ``file:line`` of the forward operator that backward is differentiating; empty where unknown."""
        node = torch._C._current_autograd_node()
        return self._of(node).source if node is not None else ""

    def _caller(self) -> Site:
        """Return the place of `calling_line`; its operator only where a compiler wrote the code."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            known = self._places.get((id(code), frame.f_lasti))  # to hash code takes long, and so does to count lines
            if known is None:
                known = self._places[id(code), frame.f_lasti] = _line(code, frame.f_lineno), code
            if known[0] is not None:
                return known[0]
            frame = frame.f_back
        return _NOBODY


def callers(innermost: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it, the outermost last."""
    while innermost is not None:
        yield innermost
        innermost = innermost.f_back


def own_line() -> str:
    """Return ``file:line`` of the innermost frame that is of the program's own files; empty if missing."""
    for frame in callers(sys._getframe(1)):
        path = frame.f_code.co_filename
        if is_own(path) and not is_installed(path):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
    return ""


def is_own(path: str) -> bool:
    """Return whether a file is the program's own: not torch's, and not what runs or watches it here."""
    return not path.startswith(_NOT_THE_PROGRAM)


def is_installed(path: str) -> bool:
    """Return whether a file is a library's, or Python's own."""
    return _INSTALLED.search(path) is not None


def _at(place: Site, operator: str, module: str) -> Site:
    """Return a place with what runs there; a compiled buffer is not called by what makes it, but by what fills it."""
    named, within = (place.operator if operator == _BUFFER else "") or operator, f"{module}.{place.module}".strip(".")
    return Site(named, within, place.source, place.function, fused=place.fused)


def _line(code: CodeType, number: int) -> Site | None:
    path = code.co_filename
    if path in GENERATED:
        return GENERATED[path](number)
    return Site(source=f"{os.path.basename(path)}:{number}", function=code.co_name) if is_own(path) else None
