"""What cannot be followed without values, in words."""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from gpumem_tui.simulator.sparse import is_sparse


class Untraceable(RuntimeError):
    """The step does something that cannot be followed without values; one line naming the operator and the place."""

    says_where = True


def in_words(func: Any, args: tuple[Any, ...], error: Exception, line: str) -> Exception:
    """What the fake tensors could not follow, naming the operator and the line; any other error as it is.

    Args:
        line: where the program calls it.
    """
    if isinstance(error, NotImplementedError | UnsupportedOperatorException) and is_sparse(func, args):
        problem = (
            "works on a sparse tensor, of which only products with dense ones are followed: make it dense (of an "
            "embedding, sparse=False), or run on a real GPU"
        )
    elif isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        problem = (
            "gives a result whose shape depends on what the GPU computes, and nothing is computed here: take it "
            "from data of the CPU, keep the shape fixed (torch.where, a mask as factor), say what share of the rows "
            "it keeps (--assume-rows 0.5), or run on a real GPU"
        )
    elif "NestedInt" in str(error) or func._opname.startswith("_nested_"):
        problem = (
            "works on a jagged tensor, of which only what is done row by row is followed: pad it, or run on a real GPU"
        )
    elif isinstance(error, NotImplementedError | UnsupportedOperatorException):
        problem = "does not say what shape its result has (it has no meta kernel)"
    else:
        return error
    return Untraceable(f"{func} {problem} ({line})")
