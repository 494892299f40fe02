"""Runs what Inductor writes for a graph with kernels that do nothing: each buffer is made, reused, dropped as there.

Inductor's wrapper is a Python function: `empty_strided` for a buffer, `del` at its last use, a call of a library's
function (`extern_kernels.mm(..., out=buf3)`) or of a kernel of its own between. Torch's own functions run on tensors
without data; of kernels only what is allocated for them matters, and that is in the wrapper.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import torch

from gpumem_tui.step import Site
from gpumem_tui.step.sites import GENERATED, is_own

_KERNELS_FOLLOW = "async_compile = AsyncCompile()"
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_MADE = re.compile(r"^\s*(\w+) = ")
_graphs = itertools.count(1)


class _Nothing:
    """A kernel, or anything else that is compiled for a device: called, it does nothing."""

    def run(self, *_: Any, **__: Any) -> None:
        """Launch nothing."""

    __call__ = run


class _Kernels:
    """Stand-in for Inductor's `AsyncCompile`, which compiles the sources of kernels."""

    def wait(self, _scope: Any) -> None:
        """Wait for nothing."""

    def __getattr__(self, _language: str) -> Callable[..., _Nothing]:
        return lambda *_, **__: _Nothing()


def _reinterpreted(tensor: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
    with torch._C._AutoDispatchBelowADInplaceOrView():  # no view, which compiled code that gets it would be guarded by
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


@dataclass(frozen=True)
class Wrapper:
    """The code that Inductor writes for a graph, here or in another process.

    Attributes:
        source: Python.
        begins: (line, place in the program): from which line on it does what for that place.
        written: places of buffers by name.
    """

    source: str
    begins: list[tuple[int, Site | None]]
    written: dict[str, Site]

    @classmethod
    def of(cls, lowering: Any) -> Wrapper:
        """Return the wrapper of a graph that is ready for its code to be generated."""
        code, lines = lowering.codegen()
        source, lines = (code, lines) if isinstance(code, str) else (code.value, code.line_map)  # torch 2.6 or newer
        begins = [(number, own_line(node)) for number, node in lines]
        return cls(source, begins, _written(lowering.scheduler.nodes))

    def loaded(self) -> SimpleNamespace:
        """Execute it, and return what `GraphLowering.compile_to_module` does: its `call` and its `runner`."""
        head, _, rest = self.source.partition(_KERNELS_FOLLOW)
        name = f"<compiled graph {next(_graphs)}>"
        names: dict[str, Any] = {"__name__": name}
        exec(compile(head, name, "exec"), names)  # noqa: S102 - Inductor's own code
        names.update(async_compile=_Kernels(), reinterpret_tensor=_reinterpreted)
        names["copy_if_misaligned"] = lambda *tensors: tensors[0] if len(tensors) == 1 else tensors
        exec(compile("\n" * head.count("\n") + rest, name, "exec"), names)  # noqa: S102
        GENERATED[name] = self._places(self.source.splitlines())
        runner: Any = names.get("runner")
        return SimpleNamespace(call=names.get("call") or runner.call, __file__=name, runner=runner)

    def _places(self, lines: Sequence[str]) -> Callable[[int], Site | None]:
        """Return what gives the program's place for a line."""

        def place(line: int) -> Site | None:
            made = _MADE.match(lines[line - 1])
            if made and made[1] in self.written:
                return self.written[made[1]]
            before = bisect_right(self.begins, line, key=itemgetter(0))
            return self.begins[before - 1][1] if before else None

        return place


def _written(kernels: Iterable[Any]) -> dict[str, Site]:
    """Return the places of buffers by name: the line whose operator gives it, and those of the rest of its kernel."""
    found: dict[str, Site] = {}
    for kernel in kernels:
        made = {part: _in_order(part.node.get_origins()) for part in kernel.get_nodes() if part.node is not None}
        lines = {place.source for places in made.values() for place in places}
        for part, places in made.items():
            if places:
                rest = tuple(sorted(lines - {places[-1].source}))
                site = replace(places[-1], fused=rest)
                found.update((buffer.get_name(), site) for buffer in part.get_outputs())
    return found


def _in_order(nodes: Iterable[Any]) -> list[Site]:
    """Return the places of a graph's nodes that have one, as the graph runs them."""
    number = {node: place for graph in {node.graph for node in nodes} for place, node in enumerate(graph.nodes)}
    places = (own_line(node) for node in sorted(nodes, key=number.__getitem__))
    return [place for place in places if place is not None]


def own_line(node: Any) -> Site | None:
    """Return the innermost line of the program's own that a node represents, as `SiteFinder` names one."""
    for path, number, function in reversed(_FRAME.findall(getattr(node, "stack_trace", None) or "")):
        if is_own(path):
            target = str(node.meta.get("original_aten") or node.target).rpartition(".")[0]
            source = f"{path.rpartition('/')[2]}:{number}"
            return Site(target or "compiled", _module(node.meta), source, function)
    return None


def _module(meta: Mapping[str, Any]) -> str:
    """Return the path of the module that a node runs in, from what is compiled: `L['self'].layers.0` is `layers.0`."""
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    words = re.findall(r"\w+", next(reversed(stack.values()))[0]) if stack else []
    begins = len(words) - words[::-1].index("cell_contents") if "cell_contents" in words else 2
    return ".".join(word for word in words[begins:] if word != "_modules")
