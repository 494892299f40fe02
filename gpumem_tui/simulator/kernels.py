"""Operators that CUDA runs as one kernel where another backend would be given a composition of several.

Composed, they would ask for intermediate results that CUDA never holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_ONE_KERNEL = ("silu_backward", "mish_backward")
"""ops with both a composite and a CUDA kernel of their own (native_functions.yaml, `CompositeImplicitAutograd` beside
`CUDA`), as far as training meets them."""

_libraries: list[torch.library.Library] = []


def register() -> None:
    """Keep these ops whole on the simulated device. Call once per process."""
    aten = torch.library.Library("aten", "IMPL")
    for name in _ONE_KERNEL:
        aten.impl(name, _whole(getattr(torch.ops.aten, name).default), "AutogradPrivateUse1")
    _libraries.append(aten)


def _whole(op: torch._ops.OpOverload[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return run
