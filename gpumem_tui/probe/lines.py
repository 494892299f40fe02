"""The line of the program that autograd's own threads work for: no Python runs there, so nothing else names it.

Autograd numbers its nodes as forward makes them (`sequence_nr`), in each thread for itself. The numbers used up when a
function of torch's returns belong to the line that called it. In backward a hook before each node tells which one runs;
hooks change nothing, and are taken out as soon as backward has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _device
from torch.utils._device import DeviceContext

from gpumem_tui.probe.compiler import invisible
from gpumem_tui.step import Site
from gpumem_tui.step.phases import in_backward
from gpumem_tui.step.sites import SiteFinder
from gpumem_tui.step.walking import tensors_in

_LEAF = "torch::autograd::AccumulateGrad"
"""The node of a parameter, without a number of its own. It runs right after the node that made its gradient, whose line
counts for it."""

_is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)  # since torch 2.3
"""torch.compile traces what the program calls through the mode, where a call that cannot be traced is an error."""

_DEFAULTS_STAY_BELOW = hasattr(_device, "_push_mode")
"""Whether a default device is a mode that stays below all others (torch/utils/_device.py). In older versions it is the
topmost: one that ended above another mode would take that one out, and stay itself."""


class ForwardLines(TorchFunctionMode):
    """Knows which line and module made each node of autograd's graph, and tells of the one that backward calls.

    A node that no function of torch's made, such as that of a `torch.autograd.Function`, counts for the line that calls
    torch next: mostly in the forward of that very function.

    Args:
        module: gives the qualified name of the module that runs.
        undoes: called, in autograd's thread, with the place whose backward begins there; an empty one is unknown.

    Attributes:
        active: whether it notes anything; it can be switched off at any moment.
    """

    def __init__(self, module: Callable[[], str], undoes: Callable[[Site], None]) -> None:
        super().__init__()
        self.active = False
        self._module = module
        self._undoes = undoes
        self._sites = SiteFinder()
        self._made: dict[int, Site] = {}
        self._next = 0
        self._thread = 0
        self._hooks: list[Any] = []

    def start(self) -> str:
        """Begin to note, in this thread; or return the reason why that would get into the program's way.

        A second call does nothing.
        """
        if self._thread:
            return ""
        try:
            modes = [torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack())]
            if not all(isinstance(mode, DeviceContext) for mode in modes):
                return "the program has a mode of its own for torch's functions active"
            if modes and not _DEFAULTS_STAY_BELOW:
                return f"torch {torch.__version__} has a default device in the way"
            self._next = torch._C._autograd._get_sequence_nr()
            self.__enter__()  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001  the program's module must not fail for it
            return f"{type(error).__name__}: {error}"
        self._thread = threading.get_ident()
        self.active = True
        return ""

    def stop(self) -> bool:
        """Note nothing more, and leave. Return whether that could be done.

        Below another mode this one must wait, and inside of backward, where autograd's thread has a stack of its own.
        From another thread of the program it cannot be taken out: it stays, without effect.
        """
        self.active = False
        self.backward_ended()
        self._made.clear()
        if not self._thread or in_backward():
            return not self._thread
        if self._thread == threading.get_ident():
            modes = [torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack())]
            if self in modes[:-1]:
                return False
            if self in modes:  # else somebody took it out already
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._thread = 0
        return True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _is_compiling() and self.active and torch._C._autograd._get_sequence_nr() != self._next:
            self._note()
        return result

    def _note(self) -> None:
        """Note the line that has made the nodes since the last time."""
        if threading.get_ident() != self._thread:
            return
        made = torch._C._autograd._get_sequence_nr()
        try:
            site = Site(module=self._module(), source=self._sites.calling_line())
            self._made.update((number, site) for number in range(self._next, made))
        except Exception:  # noqa: BLE001  the program's function must not fail for it
            self.active = False
        self._next = made

    def backward_begins(self, roots: Any) -> None:
        """Have the nodes that backward will call tell of themselves.

        Args:
            roots: the arguments of `torch.autograd.backward`.
        """
        self.backward_ended()  # as one has not that failed
        if not self.active:
            return
        telling: dict[Site, Callable[[Any], None]] = {}
        seen: dict[int, Any] = {}
        waiting = [tensor.grad_fn for tensor in tensors_in(roots)]
        while waiting:
            node: Any = waiting.pop()
            if node is None or id(node) in seen:
                continue
            seen[id(node)] = node
            waiting.extend(before for before, _ in node.next_functions)
            if node.name() != _LEAF:
                site = self._made.get(node._sequence_nr(), Site())
                self._hooks.append(node.register_prehook(telling.setdefault(site, self._telling(site))))

    def _telling(self, site: Site) -> Callable[[Any], None]:
        def tell(_: Any) -> None:
            if self.active:
                try:
                    self._undoes(site)
                except Exception:  # noqa: BLE001  the program's backward must not fail for it
                    self.active = False

        return invisible(tell)

    def backward_ended(self) -> None:
        """Take the hooks out of nodes that live on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
