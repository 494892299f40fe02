"""Host tensors without data: models that are built on the host and end on the simulated device.

Tensors on the host keep their values, since data loading and metrics depend on them. But a large tensor that a module
makes for itself while it is constructed is a weight on its way to the device: nobody reads it, and a model of 8 billion
parameters would fill the host with it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_LARGE_ELEMENTS = 1 << 18
"""From here on a tensor that a module makes has no data: smaller ones (position tables, running statistics) do."""

_aten: Any = torch.ops.aten
FACTORIES = frozenset(
    {
        _aten.empty.memory_format, _aten.empty_strided.default, _aten.zeros.default, _aten.ones.default,
        _aten.full.default, _aten.rand.default, _aten.randn.default,
    }
)  # fmt: skip
"""What makes a tensor of the size given by its first argument."""


def ends_on_device(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a factory is asked for a large tensor on the host by a module that is being constructed."""
    device = kwargs.get("device")
    is_here = device is None or device.type == "cpu"
    return is_here and math.prod(args[0]) >= _LARGE_ELEMENTS and _in_construction()


def _in_construction() -> bool:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
    return False
