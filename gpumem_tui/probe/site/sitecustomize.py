"""Runs at the start of every Python process below `gpumem-tui run`: arms the probe, then hands over.

The interpreter imports the first `sitecustomize` on its path; the one that this hides is run as if it were not hidden.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(_HERE))


def _arm() -> None:
    """Load this very package, though it is not on the path: the path is that of the program's own environment."""
    spec = importlib.util.spec_from_file_location("gpumem_tui", os.path.join(_PACKAGE, "__init__.py"))
    if spec is None or spec.loader is None:
        return
    sys.modules["gpumem_tui"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    from gpumem_tui.probe.entry import attach

    attach("run")


def _hand_over() -> None:
    """Run the `sitecustomize` that would have run. The interpreter reports its errors as ever."""
    others = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


try:
    _arm()
except Exception:  # noqa: BLE001  an interpreter that cannot load the probe runs the program anyway
    sys.modules.pop("gpumem_tui", None)
_hand_over()
