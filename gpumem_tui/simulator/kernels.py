"""Operators that CUDA runs in its own way where another backend would be given something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

_ONE_KERNEL = ("silu_backward", "mish_backward")
"""ops with both a composite and a CUDA kernel of their own (native_functions.yaml, `CompositeImplicitAutograd` beside
`CUDA`), as far as training meets them. Composed, they would ask for intermediate results that CUDA never holds."""

_FUSED_STEPS = ("_fused_sgd_", "_fused_adagrad_", "_fused_adam_", "_fused_adamw_")
"""Optimizer steps in one kernel, which change their arguments and give nothing; torch lacks shape functions of some."""

_libraries: list[torch.library.Library] = []


def register() -> None:
    """Keep these ops whole on the simulated device. Call once per process."""
    aten = torch.library.Library("aten", "IMPL")
    for name in _ONE_KERNEL:
        aten.impl(name, _whole(getattr(torch.ops.aten, name).default), "AutogradPrivateUse1")
    for name in _FUSED_STEPS:
        for overload in (name, f"{name}.tensor_lr"):
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{overload}", "Meta"):
                aten.impl(overload, _in_place, "Meta")
    for overload in ("_ctc_loss_backward", "_ctc_loss_backward.Tensor"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{overload}", "Meta"):
            aten.impl(overload, _like_second, "Meta")
    _libraries.append(aten)


def convolution_layout(images: torch.Tensor, weight: torch.Tensor, backend: object) -> torch.memory_format:
    """What cuDNN gives back (`cudnn_conv_suggest_memory_format`): channels last if an argument is, but for float64."""
    for layout, dimensions in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        suggested = layout in (suggest_memory_format(images), suggest_memory_format(weight))
        if suggested and weight.dim() == dimensions and torch.float64 not in (images.dtype, weight.dtype):
            return layout
    return torch.contiguous_format


def _in_place(*_: Any, **__: Any) -> None:
    """The shape of nothing."""


def _like_second(gradient: torch.Tensor, log_probabilities: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """`ctc_loss_backward` (aten/src/ATen/native/cuda/LossCTC.cu) gives the gradient of the log probabilities."""
    return torch.empty_like(log_probabilities, memory_format=torch.contiguous_format)


def _whole(op: torch._ops.OpOverload[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return run
