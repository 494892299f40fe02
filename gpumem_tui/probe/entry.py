"""The ways in: before torch is imported, or at any time after.

Every Python process below `gpumem-tui run` loads this as it starts, so it imports next to nothing.
"""

from __future__ import annotations

import sys

from gpumem_tui.importing import after_import

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
        return _install(how, late=True)

    def install(torch: object) -> None:
        _install(how, late=False)

    after_import("torch", install)
    return ""


def _install(how: str, late: bool) -> str:
    global _problem
    try:
        from gpumem_tui.probe.probe import Probe

        Probe(how, late).install()
    except Exception as error:  # noqa: BLE001  a torch too old, a broken installation: then it is not watched
        _problem = f"{type(error).__name__}: {error}"
        if how != "attach":  # whoever attaches is told, the program's user would not be
            import logging

            logging.getLogger("gpumem_tui").warning("gpumem-tui cannot watch this process: %s", _problem)
    return _problem
