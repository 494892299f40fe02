"""What the 4-bit product of bitsandbytes takes on the way (backends/cuda/ops.py of its version 0.50)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpumem_tui.simulator.profile import Profile

WITHOUT = ("dequantize_4bit", "dequantize_blockwise", "quantize_4bit", "quantize_blockwise")
"""Kernels that write their results and no more (csrc/kernels.cu)."""

GEMM = "gemm_4bit"
_MOST_ROWS_FUSED = 1536
"""`_gemm_4bit_custom_max_m`: beyond it the weight is unpacked for a product of cuBLAS."""

_FLOAT_BYTES = 4


def unpacks(args: Sequence[Any]) -> bool:
    """Whether a product unpacks its weight for certain; of few rows the kernel is chosen by architecture.

    Arguments are (input, packed weight, shape [outputs, inputs], scales, block size, …).
    """
    x, _, (_, inputs), _, block = args[:5]
    return bool(x.numel() // inputs > _MOST_ROWS_FUSED or inputs % block)


def product(args: Sequence[Any], profile: Profile) -> list[int]:
    """The weight in the input's format, and of scales that are packed too what they are unpacked into, twice."""
    if not unpacks(args):
        return []
    x, _, (outputs, inputs) = args[:3]
    packed_scales = args[7] if len(args) > 7 else None
    scales = [] if packed_scales is None else [packed_scales.numel() * _FLOAT_BYTES] * 2
    return [*scales, outputs * inputs * x.element_size()]
