"""Keeps the probe out of torch.compile's sight: nothing of it is traced, and nothing compiled because of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")
_frames: Any = torch._C._dynamo.eval_frame


def invisible(function: _T) -> _T:
    """Mark a function that compiled code calls: it is called as it is. Functions that it calls are not covered.

    `torch.compiler.disable` does this too, but imports all of the compiler.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return passed_over(function)


def passed_over(function: _T) -> _T:
    """Mark a function that compiled code must be able to trace: nothing is compiled for it where it is called as it is.

    An `invisible` one would break the graph, which is an error in a program that asks for a full one. Its behaviour
    while `torch.compiler.is_compiling` is traced; so that should be nothing.
    """
    code = function.__code__  # type: ignore[attr-defined]
    if hasattr(_frames, "set_code_exec_strategy"):
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(skip, skip))
    else:  # before torch 2.7
        _frames.skip_code(code)
    return function


def uncompiled(function: Callable[..., _T]) -> Callable[..., _T]:
    """Wrap a function to run with the compiler off, so that nothing that it calls is looked at either."""

    @functools.wraps(function)
    def run(*args: Any) -> _T:
        compiler = _frames.set_eval_frame(None)
        try:
            return function(*args)
        finally:
            _frames.set_eval_frame(compiler)

    return invisible(run)
