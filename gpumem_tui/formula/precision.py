"""What is known of each precision, a record each: what it stores, what it computes in, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from gpumem_tui.formula.recipe import Precision
from gpumem_tui.formula.rows import TEXTBOOK


@dataclass(frozen=True, slots=True)
class PrecisionRecord:
    """One precision.

    Attributes:
        weights: the dtype of weights, gradients and optimizer state, by torch's name.
        autocast: the dtype that `torch.autocast` computes in; empty for none.
        scales_loss: a GradScaler is used.
        keeps: what is kept in which format, in a few words.
        advice: what to know before taking it.
        parameter_bytes, gradient_bytes, state_bytes: per weight, gradient and optimizer value.
        working_copy_bytes: per weight, of the 16-bit copies that live beside fp32 weights; 0 for none.
        compute_bytes: per activation.
        note: what the gradients and weights are kept in, for the reader.
    """

    weights: Literal["float32", "bfloat16"]
    autocast: Literal["", "bfloat16", "float16"]
    scales_loss: bool
    keeps: str
    advice: str
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    working_copy_bytes: int
    compute_bytes: int
    source: str
    note: str

    @property
    def computes_in(self) -> str:
        """The dtype of matrix products, by torch's name."""
        return self.autocast or self.weights

    @property
    def is_mixed(self) -> bool:
        """Whether weights are kept in another format than the step computes in."""
        return bool(self.autocast)


_AMP_BF16 = PrecisionRecord(
    weights="float32",
    autocast="bfloat16",
    scales_loss=False,
    keeps="autocast: fp32 weights, bfloat16 compute",
    advice="amp-bf16: the range of fp32, so no loss scaling; weights and their updates stay in fp32.",
    parameter_bytes=4,
    gradient_bytes=4,
    state_bytes=4,
    working_copy_bytes=2,
    compute_bytes=2,
    source="Micikevicius et al. 2018; PyTorch autocast",
    note="fp32, the dtype of the weights under autocast; texts give 2N to 4N",
)

PRECISION_RECORDS: Mapping[Precision, PrecisionRecord] = MappingProxyType(
    {
        "fp32": PrecisionRecord(
            weights="float32",
            autocast="",
            scales_loss=False,
            keeps="4 bytes a value",
            advice="fp32 is safe and slow: mixed precision halves the activations and uses the tensor cores.",
            parameter_bytes=4,
            gradient_bytes=4,
            state_bytes=4,
            working_copy_bytes=0,
            compute_bytes=4,
            source=TEXTBOOK,
            note="fp32",
        ),
        "amp-bf16": _AMP_BF16,
        "amp-fp16": replace(
            _AMP_BF16,
            autocast="float16",
            scales_loss=True,
            keeps="autocast: fp32 weights, fp16 compute, loss scaling",
            advice="amp-fp16: gradients below 6e-8 vanish and above 65,504 overflow, so the loss must be scaled.",
        ),
        "bf16": PrecisionRecord(
            weights="bfloat16",
            autocast="",
            scales_loss=False,
            keeps="everything in bfloat16",
            advice="bf16 throughout: with 7 mantissa bits an update below 1/256 of a weight is lost.",
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
"""Every precision that a recipe can name."""

MASK_BYTES = 1
"""Bytes per element of a dropout mask: PyTorch keeps it as bool, whatever the precision."""

LOSS_BYTES = 4
"""Bytes per value inside the loss: autocast runs log-softmax and cross-entropy in fp32, and recipes in pure
bfloat16 are assumed to cast the logits first."""
