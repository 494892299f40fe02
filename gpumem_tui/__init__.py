"""Where GPU memory goes while a neural network trains, how large a batch fits, and what would make a larger one fit."""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own; `import gpumem_tui` imports nothing
if TYPE_CHECKING:
    from gpumem_tui.api.steps import StepMemory as StepMemory
    from gpumem_tui.api.steps import predict as predict
    from gpumem_tui.api.steps import simulated as simulated
    from gpumem_tui.probe.trackers import Tracker

__version__ = "1.0.0"
_PLACES = {
    "predict": "api.steps",
    "simulated": "api.steps",
    "StepMemory": "api.steps",
    "load_ipython_extension": "api.notebook",
    "unload_ipython_extension": "api.notebook",
}
"""Where in the package each function is that is imported on its first use."""


def attach(log: Tracker | None = None) -> None:
    """Let gpumem-tui watch this training process: parameters, gradients, optimizer state, the allocator's figures.

    One line anywhere in the program, before or after the model is made. Never raises, has no thread, and costs nothing
    that can be measured; see `gpumem_tui.probe`.

    Args:
        log: a tracker that gets each sample too, in GiB: a `SummaryWriter`, a wandb run, the module `mlflow`, an
            OpenTelemetry meter, or a function `(step, values)`. See ``gpumem-tui manual trackers``.
    """
    from gpumem_tui.probe.entry import attach

    attach("call", log)


def __getattr__(name: str) -> object:
    """Import what is asked for: `gpumem_tui.probe.callbacks.hugging_face()` and `gpumem_tui.predict` need no import."""
    if name != "probe" and name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"gpumem_tui.{_PLACES.get(name, name)}")
    return getattr(module, name) if name in _PLACES else module
