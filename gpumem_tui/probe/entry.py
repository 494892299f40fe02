"""The ways in: before torch is imported, or at any time after.

Every Python process below `gpumem-tui run` loads this as it starts, so it imports next to nothing.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

TYPE_CHECKING = False  # as type checkers read it; importing typing takes longer than all of the rest
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_attached = False
_problem = ""


def attach(how: str = "call") -> str:
    """Watch this process from now on, or from when it imports torch. A second call does nothing. Never raises.

    While torch is being imported, as an attach by pid may find it, nothing is done either: that can be tried again.

    Args:
        how: what viewers show as the way in: ``run``, ``attach``, ``call`` or ``callback``.

    Returns:
        Why this process is not watched; empty if it is, or will be.
    """
    global _attached
    torch = sys.modules.get("torch")
    if _attached:
        return _problem
    if getattr(getattr(torch, "__spec__", None), "_initializing", False):
        return "torch is being imported: try again in a moment"
    _attached = True
    if torch is not None:
        return _install(how)
    sys.meta_path.insert(0, _TorchImport(how))
    return ""


def _install(how: str) -> str:
    global _problem
    try:
        from gpumem_tui.probe.probe import Probe

        Probe(how).install()
    except Exception as error:  # noqa: BLE001  a torch too old, a broken installation: then it is not watched
        _problem = f"{type(error).__name__}: {error}"
        if how != "attach":  # whoever attaches is told, the program's user would not be
            import logging

            logging.getLogger("gpumem_tui").warning("gpumem-tui cannot watch this process: %s", _problem)
    return _problem


class _TorchImport:
    """Lets torch be found and imported as ever, and installs the probe after."""

    def __init__(self, how: str) -> None:
        self._how = how
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch" or self._searching:
            return None
        self._searching = True
        try:
            spec = find_spec("torch")  # by the other finders
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            if self in sys.meta_path:  # some only ask where torch is, without importing it: stay until then
                sys.meta_path.remove(self)
                _install(self._how)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
