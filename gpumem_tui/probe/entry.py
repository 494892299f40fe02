"""The ways in: before torch is imported, or at any time after.

Every Python process below `gpumem-tui run` loads this as it starts, so it imports next to nothing.
"""

from __future__ import annotations

import sys

from gpumem_tui.importing import after_import

TYPE_CHECKING = False  # typing's own
if TYPE_CHECKING:
    from gpumem_tui.probe.trackers import Tracker

_attached = False
_problem = ""


def is_attached() -> bool:
    """Return whether `attach` has been called in this process, or in the one that it was forked from."""
    return _attached


def attach(how: str = "call", log: Tracker | None = None) -> str:
    """Watch this process from now on, or from when it has imported torch. A second call does nothing. Never raises.

    Args:
        how: what viewers show as the way in: ``run``, ``attach``, ``call`` or ``callback``.
        log: where samples are written besides, as `trackers.Tracker`. A later call adds one.

    Returns:
        Why this process is not watched; empty if it is, or will be.
    """
    global _attached
    if log is not None:
        from gpumem_tui.probe import trackers

        trackers.add(log)
    if not _attached:
        _attached = True
        torch = sys.modules.get("torch")
        late = torch is not None and not getattr(getattr(torch, "__spec__", None), "_initializing", False)

        def install(_: object) -> None:
            _install(how, late)

        after_import("torch", install)
    return _problem


def _install(how: str, late: bool) -> None:
    global _problem
    try:
        from gpumem_tui.probe.probe import Probe

        Probe(how, late).install()
    except Exception as error:  # noqa: BLE001  a torch too old, a broken installation: then it is not watched
        _problem = f"{type(error).__name__}: {error}"
        if how != "attach":  # reported to whoever attaches, not to the program's user
            import logging

            logging.getLogger("gpumem_tui").warning("gpumem-tui cannot watch this process: %s", _problem)
