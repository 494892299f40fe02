"""Callbacks that let gpumem-tui watch a training run, for those who prefer them to the one-line call.

    Trainer(..., callbacks=[gpumem_tui.probe.callbacks.hugging_face()])
    L.Trainer(..., callbacks=[gpumem_tui.probe.callbacks.lightning()])

Neither library is imported until asked for.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from gpumem_tui.probe.entry import attach


def hugging_face() -> Any:
    """Make a `transformers.TrainerCallback` that attaches as training begins.

    Raises:
        ImportError: transformers is not installed.
    """

    def on_train_begin(*_: Any, **__: Any) -> None:
        attach("callback")

    base = import_module("transformers").TrainerCallback
    return type("WatchCallback", (base,), {"on_train_begin": on_train_begin})()


def lightning() -> Any:
    """Make a Lightning `Callback` that attaches as fitting begins, of ``lightning`` or a ``pytorch_lightning`` in use.

    Raises:
        ImportError: neither is installed.
    """

    def on_fit_start(*_: Any) -> None:
        attach("callback")

    package = "pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch"
    base = import_module(package).Callback
    return type("WatchCallback", (base,), {"on_fit_start": on_fit_start})()
