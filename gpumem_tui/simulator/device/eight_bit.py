"""Linear layers on weights of 8 bits (LLM.int8 of bitsandbytes): what their operators run on CUDA, one by one.

Follows backends/cuda/ops.py and backends/default/ops.py of bitsandbytes 0.50, but for the kernels of its own, which
write into what is made here (csrc/kernels.cu; `igemmlt` in csrc/ops.cu gives cuBLASLt no workspace).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpumem_tui.simulator.device.base import DeviceParts

_OUTLIERS = 7
_SCALE = 1 / 127

NOTE = (
    f"linear layers of 8 bits: {_OUTLIERS} columns of their input are taken to have outliers, which only its values "
    "tell: the most in models of up to 13 billion parameters (arXiv 2208.07339, section 3.2)"
)


def bodies(current: Callable[[], DeviceParts]) -> dict[str, Callable[..., Any]]:
    """Return what these operators run, by name.

    Args:
        current: the GPU that is simulated now.
    """

    def quantize(values: torch.Tensor, threshold: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, Any]:
        columns = values.shape[-1]
        scales = values.new_empty(values.numel() // columns, dtype=torch.float32)
        made = values.new_empty(values.shape, dtype=torch.int8)
        found = None
        if threshold > 0:
            current().notes[NOTE] = None
            outliers = values.abs() >= threshold
            outliers.any()
            outliers.any(dim=0)
            found = values.new_empty(min(_OUTLIERS, columns), dtype=torch.int64)
            if scales.numel() > 1:
                made[:, found] = 0
        return made, scales, found

    return {
        "bitsandbytes::int8_vectorwise_quant": quantize,
        "bitsandbytes::int8_vectorwise_dequant": lambda values, scales: values * scales.view(-1, 1) * _SCALE,
        "bitsandbytes::int8_mm_dequant": _unscaled,
        "bitsandbytes::int8_scaled_mm": _product,
        "bitsandbytes::int8_mixed_scaled_mm": _mixed_product,
    }


def _unscaled(
    product: torch.Tensor, _rows: Any, _columns: Any, dtype: torch.dtype | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    made = torch.empty_like(product, dtype=torch.float16)
    if bias is not None and bias.dtype != torch.float16:
        made.add_(bias)
    return made.to(dtype or torch.float16)


def _product(
    values: torch.Tensor,
    weight: torch.Tensor,
    value_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    operators = torch.ops.bitsandbytes
    product = operators.int8_linear_matmul.default(values, weight)
    return operators.int8_mm_dequant.default(product, value_scales, weight_scales, dtype=dtype, bias=bias)


def _mixed_product(
    values: torch.Tensor, quantized: torch.Tensor, weight: torch.Tensor, *more: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply in 8 bits, and the columns with outliers in the input's type."""
    value_scales, weight_scales, outliers, bias = (*more, None, None)[:4]
    operators, dtype = torch.ops.bitsandbytes, values.dtype
    product = operators.int8_scaled_mm.default
    if outliers is None or not outliers.numel():
        columns = values.new_empty(0)
        return product(quantized, weight, value_scales, weight_scales, bias=bias, dtype=dtype), columns
    columns = values[:, outliers].contiguous()
    of_weight = operators.int8_vectorwise_dequant.default(weight[:, outliers].contiguous(), weight_scales)
    of_weight = of_weight.to(dtype).t()
    made = product(quantized, weight, value_scales, weight_scales, bias=bias, dtype=dtype)
    return made.addmm(columns, of_weight), columns
