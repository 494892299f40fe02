"""What each precision stores: bytes per weight, gradient, optimizer value and activation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gpumem_tui.formula.recipe import Precision
from gpumem_tui.formula.rows import TEXTBOOK


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes per value under one precision.

    Attributes:
        parameter_bytes, gradient_bytes, state_bytes: per weight, gradient and optimizer value.
        working_copy_bytes: per weight, of the 16-bit copies that live beside fp32 weights; 0 for none.
        compute_bytes: per activation.
        note: what the gradients and weights are kept in, for the reader.
    """

    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    working_copy_bytes: int
    compute_bytes: int
    source: str
    note: str


_AMP = Storage(
    parameter_bytes=4,
    gradient_bytes=4,
    state_bytes=4,
    working_copy_bytes=2,
    compute_bytes=2,
    source="Micikevicius et al. 2018; PyTorch autocast",
    note="fp32, the dtype of the weights under autocast; texts give 2N to 4N",
)

STORAGE: Mapping[Precision, Storage] = MappingProxyType(
    {
        "fp32": Storage(
            parameter_bytes=4,
            gradient_bytes=4,
            state_bytes=4,
            working_copy_bytes=0,
            compute_bytes=4,
            source=TEXTBOOK,
            note="fp32",
        ),
        "amp-bf16": _AMP,
        "amp-fp16": _AMP,
        "bf16": Storage(
            parameter_bytes=2,
            gradient_bytes=2,
            state_bytes=2,
            working_copy_bytes=0,
            compute_bytes=2,
            source=TEXTBOOK,
            note="bfloat16 with no fp32 master copy: small updates are lost to rounding",
        ),
    }
)
"""The storage of every precision that a recipe can name."""

MASK_BYTES = 1
"""Bytes per element of a dropout mask: PyTorch keeps it as bool, whatever the precision."""

LOSS_BYTES = 4
"""Bytes per value inside the loss: autocast runs log-softmax and cross-entropy in fp32, and recipes in pure
bfloat16 are assumed to cast the logits first."""
