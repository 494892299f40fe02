"""Whether a step cuts its batch into parts of a given size, as ``for part in batch.split(64)`` does.

Such a step makes the same allocations for every batch that is no larger than one part, so that traces at small sizes
say nothing of larger ones.
"""

from __future__ import annotations

from typing import Any

import torch

_aten: Any = torch.ops.aten
_SPLIT, _SLICE = _aten.split.Tensor, _aten.slice.Tensor
CUTS = frozenset((_SPLIT, _SLICE))
"""Operators that ask for at most so many rows."""

_LEAST, _MOST = 4, 1024
"""Rows of a part. Fewer are seen at the sizes that are traced anyway; a batch of more than twice as many would be made
for the trace, out of a program's own data."""


def rows_asked_for(func: Any, args: tuple[Any, ...]) -> int:
    """How many of a tensor's rows one of `CUTS` asks for where there are fewer; 0 where there are as many."""
    tensor = args[0]
    if not tensor.dim() or (len(args) > (2 if func is _SPLIT else 1) and args[2 if func is _SPLIT else 1]):
        return 0
    if func is _SPLIT:
        wanted = args[1]
    else:
        start, end = (args[2] if len(args) > 2 else None) or 0, args[3] if len(args) > 3 else None
        wanted = 0 if start < 0 or end is None else end - start
    return wanted if type(wanted) is int and max(_LEAST, tensor.shape[0] + 1) <= wanted <= _MOST else 0
