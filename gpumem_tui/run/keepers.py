"""Finds what of a program keeps memory from step to step: the name that holds it, and the statement that put it there.

Memory lives because a name of the program leads to it: a variable, an attribute, a list in one of these, and from there
tensors, and the graph that made them. From what lives the search goes up to the names, and from a name to the
statements of its file that write to it.
"""

from __future__ import annotations

import ast
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from gpumem_tui.causes import Cause
from gpumem_tui.memory import MIB
from gpumem_tui.simulator.allocator.growing import growth, kept_from
from gpumem_tui.simulator.allocator.timeline import CHECKPOINT, Timeline
from gpumem_tui.simulator.device.gpu import SimulatedGpu
from gpumem_tui.simulator.device.memory import DeviceMemory
from gpumem_tui.simulator.device.uses import source_tree
from gpumem_tui.simulator.fast.repeats import Repetition
from gpumem_tui.step.sites import callers, is_installed, is_own
from gpumem_tui.step.walking import instances_of

_HIGHEST = 6
"""Containers within each other that are gone up through: a list in a dict in an attribute is three."""

_MOST_REFERRERS = 200
"""Objects that are gone up from at once: more are not the few that keep something for a program."""

_ADDS = ("append", "appendleft", "extend", "insert", "add", "update", "setdefault", "put", "put_nowait", "push")
_TO_THE_HOST = "; keep a copy on the host (`.cpu()`), or drop it"
_WITHOUT_GRAPH = ", by its graph; keep a number (`.item()`) or what has no graph (`.detach()`)"
_CONTAINERS = (list, dict, tuple, set)


@dataclass(frozen=True)
class _Name:
    """A name that leads to an object, and where its file is; of a local variable the function's first line."""

    words: str
    path: str
    function: str = ""

    @property
    def last(self) -> str:
        return self.words.rpartition(".")[2]


def kept_checkpoint(timeline: Timeline) -> tuple[Cause, ...]:
    """Return what a run holds of checkpoints at its end, which belongs to nothing that it trains."""
    if not any(site.part == CHECKPOINT for site in timeline.site_table):
        return ()
    held = [one for one in timeline.held_after(len(timeline.events) - 1) if one.site.part == CHECKPOINT]
    size_bytes = sum(one.size_bytes for one in held)
    if size_bytes < MIB:
        return ()
    line = held[0].site.source
    words = f"load it with map_location='cpu' ({line or 'unknown line'}), or drop it (`del`) once its weights are taken"
    return (Cause("kept_checkpoint", words, size_bytes, line),)


def leaks_in(timeline: Timeline, gpu: SimulatedGpu | None) -> tuple[Cause, ...]:
    """Return how memory grows in a run, what makes that, and what keeps it.

    Args:
        gpu: on which the run was simulated; None of a real one, of which it is not known what keeps memory.
    """
    grown = growth(timeline)
    if grown is None:
        return ()
    keeps, kept_at = "something keeps", ""
    remedy = ""
    if gpu is not None:
        with suppress(Exception):  # a program's objects may raise anything: the line that makes the memory is enough
            if (keeper := _keeper(set(kept_from(gpu.finish(), grown.site)), gpu.memory)) is not None:
                kept_at, name, remedy = keeper
                keeps = f"`{name}` ({kept_at}) keeps" if kept_at else f"`{name}` keeps"
    return (Cause("leak", f"{keeps} what {grown.place} makes{remedy}", grown.size_bytes, grown.site.source, kept_at),)


def _keeper(numbers: set[int], memory: DeviceMemory) -> tuple[str, str, str] | None:
    """Return the line that puts what keeps allocations where it is, the name that it has there, and what to do."""
    tensors = instances_of(torch.Tensor, gc.get_objects())
    with torch._C.DisableTorchFunction():  # which every look at a tensor's attributes would go through
        themselves = [one for one in tensors if _number(one, memory) in numbers]
        graph = _holding(tensors, numbers, memory)
        by_graph = [one for one in tensors if one.grad_fn in graph]
    for holding, remedy in ((themselves, _TO_THE_HOST), (by_graph, _WITHOUT_GRAPH)):
        if found := [(_statement(name), name.words) for name in _names(holding)]:
            (_, line), name = min(found)
            return line, name, remedy
    return None


def _number(tensor: torch.Tensor, memory: DeviceMemory) -> int | None:
    with suppress(RuntimeError, NotImplementedError):  # kinds of tensors without a storage
        return memory.allocation_of(tensor)
    return None


def _holding(tensors: list[torch.Tensor], numbers: set[int], memory: DeviceMemory) -> set[Any]:
    """Return the nodes of autograd's graphs that hold one of some allocations, or lead to one that does."""
    leading: dict[Any, list[Any]] = {}
    waiting = [one.grad_fn for one in tensors if one.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node not in leading:
            leading[node] = []
            waiting += [following for following, _ in node.next_functions if following is not None]
    for node in list(leading):
        for following, _ in node.next_functions:
            if following is not None:
                leading[following].append(node)
    waiting = [node for node in leading if _holds(node, numbers, memory)]
    found = set[Any]()
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += leading[node]
    return found


def _holds(node: Any, numbers: set[int], memory: DeviceMemory) -> bool:
    repetition = getattr(node, "repetition", None)
    if isinstance(repetition, Repetition) and not numbers.isdisjoint(repetition.numbers()):
        return True
    return any(_number(tensor, memory) in numbers for tensor in _saved(node))


def _saved(node: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a node of autograd's has saved; none once backward has released them."""
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            with suppress(Exception):  # released, changed in place, or packed by the program's own hook
                value = getattr(node, name)
                yield from (one for one in (value if isinstance(value, tuple) else (value,)) if torch.is_tensor(one))


# From objects to names


def _names(objects: list[Any]) -> Iterator[_Name]:
    """Yield the nearest names of the program that lead to one of some objects."""
    frames = [frame for frame in callers(sys._getframe(1)) if is_own(frame.f_code.co_filename)]
    variables = {id(value): (name, frame) for frame in reversed(frames) for name, value in frame.f_locals.items()}
    modules = {id(vars(module)): module for module in list(sys.modules.values()) if hasattr(module, "__dict__")}
    level, seen = objects, set(map(id, objects))
    for _ in range(_HIGHEST):
        found = list[_Name]()
        for one in level:
            if id(one) in variables:
                found.append(_variable(*variables[id(one)]))
        above = [one for one in gc.get_referrers(*level) if id(one) not in seen and one is not level]
        below = set(map(id, level))
        for one in above:
            found += _names_in(one, below, modules)
        if found:
            yield from dict.fromkeys(found)
            return
        level = [one for one in above if isinstance(one, _CONTAINERS) or type(one).__name__ in ("deque", "cell")]
        level = [one for one in level if one is not objects][:_MOST_REFERRERS]
        seen.update(map(id, level))


def _variable(name: str, frame: FrameType) -> _Name:
    is_global = frame.f_locals is frame.f_globals
    return _Name(name, frame.f_code.co_filename, "" if is_global else frame.f_code.co_name)


def _names_in(holder: Any, wanted: set[int], modules: dict[int, Any]) -> Iterator[_Name]:
    """Yield the names by which a module of Python's, or an object of a class of the program's, has something."""
    if isinstance(holder, dict) and id(holder) in modules:
        path = getattr(modules[id(holder)], "__file__", None) or ""
        if is_own(path) and not is_installed(path):
            yield from (_Name(name, path) for name, value in list(holder.items()) if id(value) in wanted)
        return
    owners = [holder]
    if isinstance(holder, dict):
        owners = [one for one in gc.get_referrers(holder) if getattr(one, "__dict__", None) is holder]
    for owner in owners:
        kind = type(owner)
        path = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
        if isinstance(owner, (type, *_CONTAINERS)) or not path or not is_own(path):
            continue
        held = getattr(owner, "__dict__", None) or {}
        yield from (_Name(f"self.{name}", path) for name, value in list(held.items()) if id(value) in wanted)


# From a name to the statement


def _statement(name: _Name) -> tuple[int, str]:
    """Return ``file:line`` of the statement that puts something into what a name means, and how sure that is.

    0: it adds to what is there; 1: it assigns; 2: none exists.
    """
    if (tree := source_tree(name.path)) is None:
        return 2, ""
    scopes = [node for node in ast.walk(tree) if getattr(node, "name", None) == name.function] or [tree]
    found = [(rank, line) for scope in scopes for node in ast.walk(scope) for rank, line in _writes(node, name)]
    if not found:
        return 2, ""
    rank, line = min(found)
    return rank, f"{os.path.basename(name.path)}:{line}"


def _writes(node: ast.AST, name: _Name) -> Iterator[tuple[int, int]]:
    """Yield the line where a statement writes to a name, after 0 where it adds to what is there and 1 elsewhere."""
    if isinstance(node, ast.AugAssign) and _is(node.target, name):
        yield 0, node.lineno
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is(node.func.value, name):
        if node.func.attr in _ADDS or node.func.attr.endswith("_"):  # torch's own operators in place
            yield 0, node.lineno
    elif isinstance(node, ast.Assign):
        adds = any(_is(part, name) for part in ast.walk(node.value) if isinstance(part, (ast.Name, ast.Attribute)))
        for target in node.targets:
            for one in target.elts if isinstance(target, ast.Tuple) else (target,):
                if _is(one, name):
                    yield (0 if adds or isinstance(one, ast.Subscript) else 1), node.lineno


def _is(node: ast.AST, name: _Name) -> bool:
    """Return whether an expression is what a name means, or an item of that."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute):
        return "." in name.words and node.attr == name.last
    return isinstance(node, ast.Name) and node.id == name.words
