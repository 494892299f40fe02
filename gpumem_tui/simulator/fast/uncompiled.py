"""Does without torch's compiler until a program compiles: to load it takes as long as torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

from gpumem_tui.simulator.torch_internals import replace

_COMPILER = "torch._dynamo"
_CONFIG = f"{_COMPILER}.config"


def leave_compiler_unloaded(torch: ModuleType) -> None:
    """Have ``import torch._dynamo`` load no more than its configuration until a program uses it.

    Fake tensors read that. What optimizers ask of it at each step is answered by doing nothing.
    """
    if _COMPILER in sys.modules:
        return
    unloaded = _Unloaded(_COMPILER)
    unloaded.__path__ = [f"{path}/_dynamo" for path in torch.__path__]
    sys.modules[_COMPILER] = unloaded
    replace(torch, "_dynamo", unloaded)
    import_module(_CONFIG)
    sys.meta_path.insert(0, _Parts())


def exclude_nothing(module: ModuleType) -> None:
    """Have functions that torch excludes from compilation, such as an optimizer's `zero_grad`, stay as they are.

    Args:
        module: ``torch._compile``, as yet unused.
    """
    replace(module, "_disable_dynamo", _kept)


def _kept(function: Callable[..., Any] | None = None, recursive: bool = True, **_: Any) -> Any:
    return partial(_kept, recursive=recursive) if function is None else function


def _load() -> ModuleType:
    """Return the compiler, loaded now if it was not."""
    if isinstance(sys.modules.get(_COMPILER), _Unloaded):
        del sys.modules[_COMPILER]
        sys.modules.pop(_CONFIG, None)
    compiler = import_module(_COMPILER)
    replace(compiler, "reset", _Unloaded.reset)
    return compiler


class _Unloaded(ModuleType):
    """Stands for the compiler; whatever else is asked of it loads it."""

    __path__: list[str]
    disable = staticmethod(_kept)

    @staticmethod
    def graph_break(*_: Any) -> None:
        """Do nothing: there is no graph."""

    @staticmethod
    def reset() -> None:
        """Do nothing, as nothing was compiled; torch's own asks a CUDA build for its graphs."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_load(), name)


class _Parts(Loader):
    """Finds the parts of the compiler: who imports one has all of it loaded first, perhaps with that one."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return the specification of a module that the loading has loaded; None for what others find."""
        if not name.startswith(f"{_COMPILER}.") or not isinstance(sys.modules.get(_COMPILER), _Unloaded):
            return None
        _load()
        sys.meta_path.remove(self)
        self._module = sys.modules.get(name)
        if self._module is None:
            return None
        self._spec = self._module.__spec__
        self._module.__spec__ = None  # importlib would take that instead of what is returned, and load it once more
        return spec_from_loader(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:  # noqa: ARG002 - Python's
        """Return the module, which is loaded already."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing: all was run as the module was loaded."""
        module.__spec__ = self._spec
