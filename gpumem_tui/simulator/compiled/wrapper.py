"""Runs what Inductor writes for a graph with kernels that do nothing: each buffer is made, reused, dropped as there.

Inductor's wrapper is a Python function: `empty_strided` for a buffer, `del` at its last use, a call of a library's
function (`extern_kernels.mm(..., out=buf3)`) or of a kernel of its own between. Torch's own functions run on tensors
without data; of kernels only what is allocated for them matters, and that stands in the wrapper.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gpumem_tui.step.sites import GENERATED, is_own

_KERNELS_FOLLOW = "async_compile = AsyncCompile()"
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
Place = tuple[str, str]


class _Nothing:
    """A kernel, or whatever else is compiled for a device: called, it does nothing."""

    def run(self, *_: Any, **__: Any) -> None:
        """Launch nothing."""

    __call__ = run


class _Kernels:
    """Stands for Inductor's `AsyncCompile`, which compiles the sources of kernels."""

    def wait(self, _scope: Any) -> None:
        """Wait for nothing."""

    def __getattr__(self, _language: str) -> Callable[..., _Nothing]:
        return lambda *_, **__: _Nothing()


def _reinterpreted(tensor: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _as_it_is(*tensors: torch.Tensor) -> Any:
    return tensors[0] if len(tensors) == 1 else tensors


def loaded(source: str, lines: Iterable[tuple[int, Any]], number: int) -> dict[str, Any]:
    """Execute a wrapper's source, and return its names: `call` among them.

    Args:
        source: as Inductor's code generation gives it.
        lines: (line, node of a graph): from which line on the wrapper does what for that node.
        number: counts the graphs of the process, for the name of its code.
    """
    head, _, rest = source.partition(_KERNELS_FOLLOW)
    name = f"<compiled graph {number}>"
    names: dict[str, Any] = {"__name__": name}
    exec(compile(head, name, "exec"), names)  # noqa: S102 - Inductor's own code
    names.update(async_compile=_Kernels(), reinterpret_tensor=_reinterpreted, copy_if_misaligned=_as_it_is)
    exec(compile("\n" * head.count("\n") + rest, name, "exec"), names)  # noqa: S102
    GENERATED[name] = _places(lines)
    if "call" not in names:
        names["call"] = names["runner"].call
    return names


def _places(lines: Iterable[tuple[int, Any]]) -> Callable[[int], Place | None]:
    """Return what gives the program's line for a line of the wrapper."""
    begins: list[tuple[int, Place | None]] = []
    for number, node in lines:
        begins.append((number, _own_line(getattr(node, "stack_trace", None) or "")))

    def place(line: int) -> Place | None:
        found = None
        for number, own in begins:
            if number > line:
                break
            found = own
        return found

    return place


def _own_line(trace: str) -> Place | None:
    """Return the innermost line of a stack trace that is the program's own, as `SiteFinder` names one."""
    for path, number, function in reversed(_FRAME.findall(trace)):
        if is_own(path):
            return f"{path.rpartition('/')[2]}:{number}", function
    return None
