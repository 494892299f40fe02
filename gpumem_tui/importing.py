"""Calls a function after a module was imported, without importing it.

Every watched Python process loads this as it starts, so it imports next to nothing.
"""

from __future__ import annotations

import gc
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

TYPE_CHECKING = False  # as type checkers read it; importing typing takes longer than all of the rest
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from types import ModuleType


def after_import(
    name: str, call: Callable[[ModuleType], None], within: AbstractContextManager[object] | None = None
) -> None:
    """Call `call` with the module once it has been imported; at once if it has been already, to its end.

    Args:
        name: the module's full name.
        call: what it raises is raised by the import.
        within: what the module is imported within, if it was not yet.
    """
    module = sys.modules.get(name)
    if module is not None:
        spec = getattr(module, "__spec__", None)
        if spec is not None and getattr(
            spec, "_initializing", False
        ):  # it is being imported, and so far has imported who calls this
            _BeingImported.tell(spec, call)
        else:
            call(module)
    else:
        sys.meta_path.insert(0, _AfterImport(name, call, within))


class Uncollected:
    """Keeps Python from looking for cycles, of which there are few among what is imported, traced or compiled."""

    def __enter__(self) -> None:
        self._was_on = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._was_on:
            gc.enable()


class _BeingImported(ModuleSpec):
    """The spec of a module that is being imported; the import system notes there that it is done."""

    _calls: list[Callable[[ModuleType], None]]

    @classmethod
    def tell(cls, spec: ModuleSpec, call: Callable[[ModuleType], None]) -> None:
        """Make a module's spec one of these, and have it call `call`."""
        if type(spec) is not cls:
            spec.__class__ = cls
            vars(spec)["_calls"] = []
        vars(spec)["_calls"].append(call)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            calls, module = vars(self).pop("_calls"), sys.modules.get(self.name)
            for call in calls if module is not None else ():
                call(module)


class _AfterImport:
    """Lets a module be found and imported as ever, and calls the function after."""

    def __init__(
        self, name: str, call: Callable[[ModuleType], None], within: AbstractContextManager[object] | None
    ) -> None:
        self._name = name
        self._call = call
        self._within = within
        self._searching = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the import system's protocol
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return the module's spec as the other finders have it, with a loader that calls the function."""
        if fullname != self._name or self._searching:
            return None
        self._searching = True
        try:
            spec = find_spec(self._name)  # by the other finders
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            if self._within is None:
                execute(module)
            else:
                with self._within:
                    execute(module)
            if self in sys.meta_path:  # some only ask where it is, without importing it: stay until then
                sys.meta_path.remove(self)
                self._call(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
