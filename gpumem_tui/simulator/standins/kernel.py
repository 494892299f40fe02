"""What the bodies of stand-ins have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from gpumem_tui.simulator.device.gpu import backend
from gpumem_tui.simulator.standins.register import named


def kernel(package: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function stand for one of a package's compiled ones.

    Its body makes with torch what the compiled one makes (`torch.empty_like`, `x.new_empty`), in its order, and lets go
    of its scratch by returning. Values of what it returns are unknown. The result of the trace says that the package
    is stood in for.
    """

    def marked(body: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(body)
        def run(*args: Any, **kwargs: Any) -> Any:
            backend._gpu.notes[named(package).note] = None
            with torch.no_grad():
                return body(*args, **kwargs)

        return run

    return marked


def on_gpu(package: str, *tensors: torch.Tensor | None) -> None:
    """Raise as compiled code does of a tensor that does not lie on the GPU.

    Raises:
        RuntimeError: one lies elsewhere.
    """
    for tensor in tensors:
        if tensor is not None and not tensor.is_cuda:
            raise RuntimeError(f"{package}: input tensor must be on CUDA device, and is on {tensor.device}")
