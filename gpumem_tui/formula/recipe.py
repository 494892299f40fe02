"""How a network is trained: everything besides its shape and the batch size that decides its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Precision = Literal["fp32", "amp-bf16", "amp-fp16", "bf16"]
Optimizer = Literal["adamw", "adam", "sgd", "sgd-momentum", "adafactor", "adagrad", "rmsprop", "lion", "adamw-8bit"]
Recompute = Literal["none", "selective", "full"]
Attention = Literal["auto", "flash", "efficient", "math"]
Sharding = Literal["none", "zero1", "zero2", "zero3"]
Adapter = Literal["none", "lora"]
BaseQuantization = Literal["none", "nf4-dq", "nf4", "int8", "fp8"]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)
ADAPTERS: tuple[Adapter, ...] = get_args(Adapter)
BASE_QUANTIZATIONS: tuple[BaseQuantization, ...] = get_args(BaseQuantization)

ALL_LINEAR = "all-linear"
"""Adapters at every linear layer but the output head, as PEFT calls it."""

DEFAULT_LORA_RANK = 8
"""PEFT's own (LoraConfig.r)."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One training configuration.

    Attributes:
        precision: ``fp32``; ``amp-bf16`` and ``amp-fp16``: fp32 weights under `torch.autocast` (fp16 with a
            GradScaler); ``bf16``: weights, gradients and optimizer state all in bfloat16.
        recompute: what is recomputed in backward: nothing, the attention core, or every block.
        attention: the scaled-dot-product kernel; ``auto`` is PyTorch's own choice for device, dtype and shape.
        sharding: ZeRO stage over `gpus` GPUs: optimizer state, + gradients, + parameters.
        adapter: what is trained: every weight, or low-rank matrices beside frozen weights (LoRA).
        lora_rank: their inner width. `lora_targets`: the linear layers that have them, by name with commas between, or
            `ALL_LINEAR`.
        base_quantization: what the frozen weights of the blocks' linear layers are kept in; ``none``: as `precision`
            has it.
    """

    precision: Precision = "fp32"
    optimizer: Optimizer = "adamw"
    recompute: Recompute = "none"
    attention: Attention = "auto"
    sharding: Sharding = "none"
    gpus: int = 1
    adapter: Adapter = "none"
    lora_rank: int = DEFAULT_LORA_RANK
    lora_targets: str = ALL_LINEAR
    base_quantization: BaseQuantization = "none"

    @property
    def has_adapters(self) -> bool:
        """Whether the network's own weights are frozen, and adapters trained."""
        return self.adapter != "none"

    @property
    def adapter_words(self) -> str:
        """The adapters and what is under them in a few words; empty without."""
        if not self.has_adapters:
            return ""
        base = "" if self.base_quantization == "none" else f" over {self.base_quantization}"
        return f"LoRA rank {self.lora_rank} at {self.lora_targets}{base}"
