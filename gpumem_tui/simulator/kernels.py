"""Operators that CUDA runs in its own way where another backend would be given something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from gpumem_tui.simulator.profile import Profile

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
    for overload, shape in _SHAPES.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{overload}", "Meta"):
            aten.impl(overload, shape, "Meta")
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


_GRU_WORKSPACE, _GRU_GATES = 5, 3
"""Values per hidden unit that a GRU cell keeps for backward, and its gates (aten/src/ATen/native/cuda/RNN.cu)."""


def _gru_cell(
    input_gates: torch.Tensor, hidden_gates: torch.Tensor, hidden: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new hidden state and the cell's workspace."""
    rows, units = hidden.shape
    made = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    return made, hidden.new_empty(rows, units * _GRU_WORKSPACE)


def _gru_cell_backward(gradient: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> tuple[Any, ...]:
    """Gradients of the input's and the hidden state's gates, of the hidden state, and of both biases."""
    rows, units = gradient.shape
    gates = [workspace.new_empty(rows, units * _GRU_GATES) for _ in range(2)]
    biases = [workspace.new_empty(units * _GRU_GATES) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(gradient, memory_format=torch.contiguous_format), *biases)


def _per_channel(images: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Statistics of each channel, in float32 of 16-bit images (aten/src/ATen/native/cuda/Normalization.cu)."""
    dtype = torch.float32 if images.dtype in (torch.float16, torch.bfloat16) else images.dtype
    return tuple(images.new_empty(images.shape[1], dtype=dtype) for _ in range(count))


def _statistics(images: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    """Mean and inverse deviation, of one rank's batch or of all: `SyncBatchNorm`'s forward."""
    return _per_channel(images, 2)


def _like_first(images: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(images)


def _reduced(
    gradient: torch.Tensor, images: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor,
    weight: torch.Tensor | None, for_images: bool, for_weight: bool, for_bias: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Sums over the batch for the gradient of the images, and the gradients of weight and bias."""
    sums = _per_channel(images, 2) if for_images else (None, None)
    dtype = weight.dtype if weight is not None else None
    of_parameters = (
        images.new_empty(images.shape[1], dtype=dtype) if wanted else None for wanted in (for_weight, for_bias)
    )
    return (*sums, *of_parameters)


_SHAPES: dict[str, Callable[..., Any]] = {
    "_ctc_loss_backward": _like_second,
    "_ctc_loss_backward.Tensor": _like_second,
    "batch_norm_stats": _statistics,
    "batch_norm_gather_stats": _statistics,
    "batch_norm_gather_stats_with_counts": _statistics,
    "batch_norm_elemt": _like_first,
    "batch_norm_backward_reduce": _reduced,
    "batch_norm_backward_elemt": _like_first,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}
"""What CUDA's kernels give where torch has no shape function of theirs."""


def grouped_product(args: Sequence[Any], profile: Profile) -> torch.Tensor:
    """`_grouped_mm`: (matrix, matrix, offsets or none, bias, result's type).

    CUDA multiplies what is not bfloat16 group by group, which torch's own shape function refuses; rows begin at whole
    16 bytes (`_grouped_mm_fallback` and `create_grouped_gemm_output_tensor` in aten/src/ATen/native/GroupedMMUtils.h).
    """
    left, right, offsets = (*args, None)[:3]
    dtype = (args[4] if len(args) > 4 else None) or left.dtype
    rows, columns = left.shape[-2], right.shape[-1]
    padded = -(-columns // (16 // dtype.itemsize)) * (16 // dtype.itemsize)
    if left.dim() == right.dim():
        groups = left.shape[0] if left.dim() == 3 else offsets.shape[0]
        return torch.empty_strided((groups, rows, columns), (rows * padded, padded, 1), dtype=dtype, device="meta")
    return torch.empty_strided((rows, columns), (padded, 1), dtype=dtype, device="meta")


GIVEN: dict[Any, Callable[[Sequence[Any], Profile], Any]] = {torch.ops.aten._grouped_mm.default: grouped_product}
"""Operators of which torch's own shape function gives something else than CUDA."""


def _whole(op: torch._ops.OpOverload[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return run
