"""Where in the program an allocation comes from: the operator, the module it runs in, the line that called it.

Imports nothing of ours but `step`, and beyond the standard library only torch, and is Python 3.9: a user's training
process speaks it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as hooks

from gpumem_tui.step import Site

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_NOT_THE_PROGRAM = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.join(_PACKAGE, "command", ""),
    os.path.join(_PACKAGE, "simulator", ""),
    os.path.join(_PACKAGE, "command", ""),
    os.path.join(_PACKAGE, "search", ""),
    os.path.join(_PACKAGE, "probe", ""),
    os.path.join(_PACKAGE, "sites.py"),
    os.path.join(_PACKAGE, "workload", "phases.py"),
    os.path.join(_PACKAGE, "workload", "run.py"),
    "<",
)
_NOBODY = ("", "")


class SiteFinder:
    """Names the place of each operator; in backward, the place of the forward operator it differentiates.

    Autograd numbers its nodes as forward makes them (`sequence_nr`), which is how backward finds its way home.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._running: list[str] = []
        self._forward: dict[int, tuple[str, tuple[str, str]]] = {}
        self._lines: dict[tuple[CodeType, int], tuple[str, str] | None] = {}

    def name_modules(self, model: nn.Module) -> None:
        """Call the modules of `model`, too, by their qualified names from now on."""
        self._names.update((id(module), name) for name, module in model.named_modules())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow which module runs."""

        def enter(module: nn.Module, *_: Any) -> None:
            self._running.append(self._names.get(id(module), type(module).__name__))

        def leave(*_: Any) -> None:
            if self._running:  # else the watch began inside of this module
                self._running.pop()

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
    def in_module(self) -> bool:
        """Whether a module is running."""
        return bool(self._running)

    def site(self, operator: str) -> Site:
        """The place of the operator that is being run."""
        node = torch._C._current_autograd_node()
        if node is not None and not torch.is_grad_enabled():
            module, caller = self._forward.get(node._sequence_nr(), ("", _NOBODY))
            return Site(operator, module, *caller)
        module, caller = self._running[-1] if self._running else "", self._caller()
        self._forward.setdefault(torch._C._autograd._get_sequence_nr() - 1, (module, caller))
        return Site(operator, module, *caller)

    def calling_line(self) -> str:
        """``file:line`` of the innermost frame that is the program's own."""
        return self._caller()[0]

    def forward_line(self) -> str:
        """``file:line`` of the forward operator that backward is differentiating; empty where that is not known."""
        node = torch._C._current_autograd_node()
        return self._forward.get(node._sequence_nr(), ("", _NOBODY))[1][0] if node is not None else ""

    def _caller(self) -> tuple[str, str]:
        """That line, and the name of the function that it is in."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            key = (frame.f_code, frame.f_lineno)
            if key not in self._lines:
                self._lines[key] = _line(*key)
            line = self._lines[key]
            if line is not None:
                return line
            frame = frame.f_back
        return _NOBODY


def is_own(path: str) -> bool:
    """Whether a file is the program's own: not torch's, and not what runs or watches it here."""
    return not path.startswith(_NOT_THE_PROGRAM)


def calling_line_of(frames: Iterable[dict[str, Any]]) -> str:
    """``file:line`` of the program in frames as the CUDA allocator records them, the innermost first."""
    for frame in frames:
        path = frame["filename"]
        if is_own(path) and "/torch/" not in path and "/torchinductor_" not in path:  # which writes code of its own
            return f"{os.path.basename(path)}:{frame['line']}"
    return ""


def in_checkpoint(frames: Iterable[dict[str, Any]]) -> bool:
    """Whether such frames are a checkpoint's that repeats its forward. Its own nested backward is none."""
    for frame in frames:
        if frame["filename"].endswith("torch/autograd/graph.py"):
            return False
        if frame["filename"].endswith("torch/utils/checkpoint.py"):
            return True
    return False


class Noted(Protocol):
    """Something that a run said while the allocator wrote down what it did."""

    @property
    def position(self) -> int:
        """How many allocations and releases had been made by then."""


N = TypeVar("N", bound=Noted)


def in_order(trace: Iterable[dict[str, Any]], notes: Iterable[N]) -> Iterator[dict[str, Any] | N]:
    """The entries of the CUDA allocator's history, each note after as many allocations and releases as it counted."""
    pending = iter(notes)
    note = next(pending, None)
    position = 0
    for entry in trace:
        counts = entry["action"] in ("alloc", "free_requested")
        while counts and note is not None and note.position <= position:
            yield note
            note = next(pending, None)
        position += counts
        yield entry
    while note is not None:
        yield note
        note = next(pending, None)


def _line(code: CodeType, number: int) -> tuple[str, str] | None:
    path = code.co_filename
    return (f"{os.path.basename(path)}:{number}", code.co_name) if is_own(path) else None
