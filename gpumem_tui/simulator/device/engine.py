"""Autograd's thread, which lets go of what a backward held after `backward()` may have returned.

A pass (`GraphTask` in torch/csrc/autograd/engine.cpp) belongs to the thread that waits for it and to the one that ran
it, and holds the gradients that `torch.autograd.grad` gives. Where the second is slow to wake up, a program that drops
them sooner has them released there, at some later time and in the other order.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

_MOST_SECONDS = 2.0
"""To wait where something else keeps a pass, which nothing we know of does."""


class _Witness:
    """Is called at the end of a pass, and lives as long."""

    def __call__(self) -> None:
        """Do nothing."""


class Passes:
    """Waits after each backward until the engine has let go of it."""

    def __init__(self) -> None:
        self._is_due = False
        self._witness: Callable[[], _Witness | None] = lambda: None

    def run(self, engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward that is within no other, and wait for its end."""
        self._is_due = True
        try:
            result = engine(*args, **kwargs)
        finally:
            self._is_due = False
        until = time.monotonic() + _MOST_SECONDS
        while self._witness() is not None and time.monotonic() < until:
            time.sleep(0)  # the other thread needs the interpreter
        return result

    def note_operator(self) -> None:
        """Note that an operator runs in backward, the first of which has the pass hold a witness."""
        if self._is_due:
            self._is_due = False
            witness = _Witness()
            self._witness = weakref.ref(witness)
            torch.autograd.Variable._execution_engine.queue_callback(witness)
