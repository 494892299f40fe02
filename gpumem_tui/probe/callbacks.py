"""Callbacks that let gpumem-tui watch a training run, for those who prefer them to the one-line call.

    Trainer(..., callbacks=[gpumem_tui.probe.callbacks.hugging_face(log=True)])
    L.Trainer(..., callbacks=[gpumem_tui.probe.callbacks.lightning(log=True)])

With `log`, the newest sample (`gpumem_tui.probe.trackers.METRICS`) is among what the trainer itself logs, so it reaches
every tracker of that trainer at the trainer's steps; trainers log on rank 0. Neither library is imported until asked
for.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from gpumem_tui.probe.entry import attach


class _Newest:
    """The newest sample, kept for a trainer that logs at steps of its own."""

    def __init__(self, log: bool) -> None:
        self._log = log
        self.values: dict[str, float] = {}

    def attach(self) -> None:
        attach("callback", self._take if self._log else None)
        self._log = False  # a trainer may begin more than once

    def _take(self, _: int, values: Mapping[str, float]) -> None:
        self.values = dict(values)


def hugging_face(log: bool = False) -> Any:
    """Make a `transformers.TrainerCallback` that attaches as training begins.

    Args:
        log: whether samples are among what the Trainer logs: to all of its `report_to`, and in `log_history`.

    Raises:
        ImportError: transformers is not installed.
    """
    newest = _Newest(log)

    def on_train_begin(self: Any, *_: Any, **__: Any) -> None:
        newest.attach()
        if log:
            with suppress(Exception):  # a handler of another make: then those before it log without us
                handler = sys._getframe(1).f_locals["self"]  # a Trainer's own callbacks log before the user's
                handler.callbacks = [self, *(one for one in handler.callbacks if one is not self)]

    def on_log(_: Any, __: Any, state: Any, ___: Any, logs: dict[str, float] | None = None, **____: Any) -> None:
        with suppress(Exception):  # a state of another make
            for values in filter(None, (logs, state.log_history[-1])):
                values.update(newest.values)

    base = import_module("transformers").TrainerCallback
    return type("WatchCallback", (base,), {"on_train_begin": on_train_begin, "on_log": on_log})()


def lightning(log: bool = False) -> Any:
    """Make a Lightning `Callback` that attaches as fitting begins, of ``lightning`` or a ``pytorch_lightning`` in use.

    Args:
        log: whether samples go to the trainer's loggers, every `log_every_n_steps`.

    Raises:
        ImportError: neither is installed.
    """
    newest = _Newest(log)
    written = 0

    def on_fit_start(*_: Any) -> None:
        newest.attach()

    def on_train_batch_end(_: Any, trainer: Any, *__: Any) -> None:
        nonlocal written
        if log and newest.values:
            with suppress(Exception):  # a logger that fails, a trainer of another make
                step = trainer.global_step
                if step != written and step % trainer.log_every_n_steps == 0:
                    written = step
                    for logger in trainer.loggers:
                        logger.log_metrics(newest.values, step=step - 1)  # as it counts what it logs by itself

    package = "pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch"
    base = import_module(package).Callback
    hooks = {"on_fit_start": on_fit_start, "on_train_batch_end": on_train_batch_end}
    return type("WatchCallback", (base,), hooks)()
