"""What cannot be followed without values, in words."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


class Untraceable(RuntimeError):
    """The step does something that cannot be followed without values; one line naming the operator."""


def in_words(func: Any, args: tuple[Any, ...], error: Exception, line: str) -> Exception:
    """What the fake tensors could not follow, naming the operator and the line; any other error as it is.

    Args:
        line: where the program calls it.
    """
    if isinstance(error, NotImplementedError | UnsupportedOperatorException) and _has_sparse(args):
        problem = "works on a sparse tensor, which cannot be followed: make it dense, or run on a real GPU"
    elif isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        problem = (
            "gives a result whose shape depends on what the GPU computes, and nothing is computed here: take it "
            "from data of the CPU, keep the shape fixed (torch.where, a mask as factor), or run on a real GPU"
        )
    elif isinstance(error, NotImplementedError | UnsupportedOperatorException):
        problem = "does not say what shape its result has (it has no meta kernel)"
    else:
        return error
    return Untraceable(f"{func} {problem} ({line})")


def _has_sparse(args: tuple[Any, ...]) -> bool:
    return any(isinstance(argument, torch.Tensor) and argument.layout is not torch.strided for argument in args)
