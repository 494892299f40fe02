"""How the weights of a configuration are quantized: a format, its size with its constants, a record each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

_SCALE_BITS = 32
_NF4_BLOCK, _NF4_BLOCKS_OF_SCALES, _NF4_SCALE_BITS = 64, 256, 8
"""Weights that share a scale; with double quantization, scales of 8 bits that share one of 32 (Dettmers et al. 2023,
"QLoRA", section 3)."""
_MXFP4_BLOCK, _MXFP4_SCALE_BITS = 32, 8
"""OCP Microscaling Formats (MX) Specification 1.0, section 5.1."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """One format.

    Attributes:
        title: what it is called.
        bits: a weight takes with its share of the constants; None where that depends on the shape of its matrix, or is
            not known here.
        source: where the figure is from; empty without one.
        base: what a recipe calls it, for adapters over it; empty for what is not trained over here.
    """

    title: str
    bits: float | None = None
    source: str = ""
    base: Literal["", "nf4", "nf4-dq"] = ""

    @property
    def words(self) -> str:
        """The format and its size, in words."""
        return self.title if self.bits is None else f"{self.title}, {self.bits:.4g} bits a weight"


def quantization_of(config: Mapping[str, object]) -> Quantization | None:
    """The format that a config.json's ``quantization_config`` names; None for weights that are not quantized."""
    said = config.get("quantization_config")
    if not isinstance(said, Mapping) or not said:
        return None
    method = str(said.get("quant_method", "bitsandbytes"))
    if method == "bitsandbytes" and said.get("load_in_4bit"):
        return _four_bit(said)
    if method == "bitsandbytes":
        return Quantization("8-bit LLM.int8() of bitsandbytes")
    if method == "mxfp4":
        bits = 4 + _MXFP4_SCALE_BITS / _MXFP4_BLOCK
        return Quantization("4-bit MXFP4 (experts)", bits, "OCP Microscaling Formats 1.0")
    if method == "fp8":
        block = said.get("weight_block_size")
        if isinstance(block, (list, tuple)) and len(block) == 2 and all(isinstance(side, int) for side in block):
            bits = 8 + _SCALE_BITS / (block[0] * block[1])
            return Quantization(
                f"8-bit FP8 in blocks of {block[0]} × {block[1]}", bits, "transformers, finegrained_fp8"
            )
        return Quantization("8-bit FP8")
    bits_said = said.get("bits")
    return Quantization(f"{bits_said}-bit {method.upper()}" if isinstance(bits_said, int) else method)


def _four_bit(said: Mapping[str, object]) -> Quantization:
    """4 bits, and a 32-bit scale for each block, or that scale in 8 bits with a 32-bit one for 256 of them."""
    kind = str(said.get("bnb_4bit_quant_type", "fp4")).upper()
    title = f"4-bit {kind} of bitsandbytes"
    if not said.get("bnb_4bit_use_double_quant"):
        return Quantization(title, 4 + _SCALE_BITS / _NF4_BLOCK, "Dettmers et al. 2023 (QLoRA)", "nf4")
    scales = (_NF4_SCALE_BITS + _SCALE_BITS / _NF4_BLOCKS_OF_SCALES) / _NF4_BLOCK
    return Quantization(f"{title} with double quantization", 4 + scales, "Dettmers et al. 2023 (QLoRA)", "nf4-dq")
