"""What the frozen weights under adapters are kept in, a record each: bytes with their constants, and the source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType

from gpumem_tui.formula.recipe import BaseQuantization

NF4_BLOCK = 64
"""Weights that share a scale (Dettmers et al. 2023, "QLoRA", section 3; bitsandbytes' `blocksize`)."""

SCALE_BLOCK = 256
"""Scales that share one of their own under double quantization (the same section)."""

_SCALE_BYTES = 4
"""Of a scale in fp32."""


@dataclass(frozen=True, slots=True)
class QuantizationRecord:
    """One format of frozen weights.

    Attributes:
        title: as a reader knows it.
        keeps: what is kept, in a few words, for a choice.
        source: where the figures are from.
        matrix_bytes: of a matrix with so many rows (outputs) and columns (inputs), its constants included.
    """

    title: str
    keeps: str
    source: str
    matrix_bytes: Callable[[int, int], int]


def _nf4_bytes(rows: int, columns: int) -> int:
    """Two weights a byte, and a scale in fp32 for each block: 4.5 bits a weight."""
    return ceil(rows * columns / 2) + _SCALE_BYTES * ceil(rows * columns / NF4_BLOCK)


def _nf4_double_bytes(rows: int, columns: int) -> int:
    """The scales in 8 bits, with one in fp32 for each 256 of them, and their mean: 4.127 bits a weight."""
    scales = ceil(rows * columns / NF4_BLOCK)
    return ceil(rows * columns / 2) + scales + _SCALE_BYTES * ceil(scales / SCALE_BLOCK) + _SCALE_BYTES


def _int8_bytes(rows: int, columns: int) -> int:
    """A byte a weight, and a scale in fp32 for each row."""
    return rows * columns + _SCALE_BYTES * rows


def _fp8_bytes(rows: int, columns: int) -> int:
    """A byte a weight, and one scale in fp32."""
    return rows * columns + _SCALE_BYTES


QUANTIZATION_RECORDS: Mapping[BaseQuantization, QuantizationRecord] = MappingProxyType(
    {
        "nf4-dq": QuantizationRecord(
            "NF4 with double quantization",
            "4.13 bits a weight: 4, and a scale in 8 for each 64",
            "Dettmers et al. 2023 (QLoRA), section 3",
            _nf4_double_bytes,
        ),
        "nf4": QuantizationRecord(
            "NF4",
            "4.5 bits a weight: 4, and a scale in fp32 for each 64",
            "Dettmers et al. 2023 (QLoRA), section 3",
            _nf4_bytes,
        ),
        "int8": QuantizationRecord(
            "int8", "a byte a weight, a scale for each row", "Dettmers et al. 2022 (LLM.int8)", _int8_bytes
        ),
        "fp8": QuantizationRecord(
            "fp8", "a byte a weight, a scale for each matrix", "Micikevicius et al. 2022 (FP8 formats)", _fp8_bytes
        ),
    }
)
"""Every format but ``none``."""
