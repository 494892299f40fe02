"""Runs inside a training process: finds what fills its memory and publishes it, harming nothing.

Standard library and torch only, on Python 3.9 and torch 2.1 and later: it lives in somebody else's environment.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own: every Python process below `gpumem-tui run` loads this as it starts
if TYPE_CHECKING:
    from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Import `callbacks` on its first use."""
    if name != "callbacks":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return import_module("gpumem_tui.probe.callbacks")
