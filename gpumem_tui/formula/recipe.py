"""How a network is trained: everything besides its shape and the batch size that decides its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Precision = Literal["fp32", "amp-bf16", "amp-fp16", "bf16"]
Optimizer = Literal["adamw", "adam", "sgd", "sgd-momentum", "adafactor", "adagrad", "rmsprop", "lion", "adamw-8bit"]
Recompute = Literal["none", "selective", "full"]
Attention = Literal["auto", "flash", "efficient", "math"]
Sharding = Literal["none", "zero1", "zero2", "zero3"]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)


@dataclass(frozen=True, slots=True)
class Recipe:
    """One training configuration.

    Attributes:
        precision: ``fp32``; ``amp-bf16`` and ``amp-fp16``: fp32 weights under `torch.autocast` (fp16 with a
            GradScaler); ``bf16``: weights, gradients and optimizer state all in bfloat16.
        recompute: what is recomputed in backward: nothing, the attention core, or every block.
        attention: the scaled-dot-product kernel; ``auto`` is PyTorch's own choice for device, dtype and shape.
        sharding: ZeRO stage over `gpus` GPUs: optimizer state, + gradients, + parameters.
    """

    precision: Precision = "fp32"
    optimizer: Optimizer = "adamw"
    recompute: Recompute = "none"
    attention: Attention = "auto"
    sharding: Sharding = "none"
    gpus: int = 1
