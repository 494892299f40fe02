"""How a network is trained: everything besides its shape and the batch size that decides its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from types import MappingProxyType
from typing import Literal, get_args

from gpumem_tui.catalog.shapes import ModelShape

Precision = Literal["fp32", "amp-bf16", "amp-fp16", "bf16", "fp16"]
Optimizer = Literal[
    "adamw", "adam", "sgd", "sgd-momentum", "adafactor", "adagrad", "rmsprop", "lion", "adamw-8bit", "adamw-fused",
    "adamw-for-loop", "muon",
]  # fmt: skip
Recompute = Literal["none", "selective", "full"]
Attention = Literal["auto", "flash", "efficient", "math"]
Sharding = Literal["none", "zero1", "zero2", "zero3", "fsdp2", "deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3"]
Schedule = Literal["1f1b", "gpipe", "interleaved"]
Adapter = Literal["none", "lora", "dora"]
AdapterDtype = Literal["base", "fp32"]
BaseQuantization = Literal["none", "nf4-dq", "nf4", "int8", "fp8"]
Extra = Literal["chunked-loss", "offload-optimizer", "offload-activations", "offload-parameters"]
"""Techniques that the closed form knows and the traced workloads do not."""
Extras = frozenset[Extra]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)
SHARDING_ALIASES: Mapping[str, Sharding] = MappingProxyType({"fsdp2-autocast": "zero3"})
"""Further names that may be typed."""
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
ADAPTERS: tuple[Adapter, ...] = get_args(Adapter)
ADAPTER_DTYPES: tuple[AdapterDtype, ...] = get_args(AdapterDtype)
BASE_QUANTIZATIONS: tuple[BaseQuantization, ...] = get_args(BaseQuantization)
EXTRAS: tuple[Extra, ...] = get_args(Extra)
NO_EXTRAS: Extras = frozenset()

LOSS_CHUNKS = 8
"""Pieces into which a chunked loss cuts each sequence."""

OFFLOADED_BLOCKS = 2
"""Blocks whose activations are on the GPU under offloading: the one that runs and the one on its way."""

ALL_LINEAR = "all-linear"
"""Adapters at every linear layer but the output head, as PEFT calls it."""

NOTHING_FROZEN, ALL_BUT_HEAD = "none", "all-but-head"
"""The value of `Recipe.freeze` that is no number of blocks."""

DEFAULT_LORA_RANK = 8
"""PEFT's own (LoraConfig.r)."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A training configuration.

    Attributes:
        precision: ``fp32``; ``amp-bf16`` and ``amp-fp16``: fp32 weights under `torch.autocast` (fp16 with a
            GradScaler); ``bf16`` and ``fp16``: weights, gradients and optimizer state all in 16 bits.
        recompute: what is recomputed in backward: nothing, the attention core, or every block.
        attention: the scaled-dot-product kernel; ``auto`` is PyTorch's own choice for device, dtype and shape.
        sharding: ZeRO stage over the GPUs that hold the same part: optimizer state, + gradients, + parameters; by name
            of who does it, see `sharding.SHARDING_RECORDS`.
        gpus: all GPUs of the job.
        tensor_parallel: GPUs over which every block's matrices are cut; `sequence_parallel`: also cut what is between.
        context_parallel: GPUs over which each sequence is cut.
        expert_parallel: GPUs over which a block's experts are spread, of those that hold the same part of the network:
            each has samples of its own, and sends tokens to the GPUs that hold their experts.
        pipeline_parallel: GPUs over which the blocks are laid one after another, by `schedule`, and `micro_batches` of
            a step (0 for as many as there are stages); `virtual_stages`: pieces of the network that a GPU has in turn
            when interleaved.
        freeze: which weights have no gradient: `NOTHING_FROZEN`, the first so many blocks (in digits) and all that
            comes before them, or `ALL_BUT_HEAD`: all but the last layer.
        adapter: what is trained: every weight, or low-rank matrices on top of frozen weights (LoRA), whose sum is
            scaled by a trained magnitude of each row (DoRA).
        adapter_dtype: what adapters are kept in: as `precision` keeps weights, or fp32 (PEFT's default).
        lora_rank: their inner width. `lora_targets`: the linear layers that have them, by name with commas between, or
            `ALL_LINEAR`.
        base_quantization: what the frozen weights of the blocks' linear layers are kept in; ``none``: as `precision`
            has it.
        compile: `torch.compile` compiles the network, or each block of one that FSDP shards or that is cut. The closed
            form counts it as eager PyTorch.
        channels_last: of a network of convolutions: images and weights lie in memory pixel by pixel.
    """

    precision: Precision = "fp32"
    optimizer: Optimizer = "adamw"
    recompute: Recompute = "none"
    attention: Attention = "auto"
    sharding: Sharding = "none"
    gpus: int = 1
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    context_parallel: int = 1
    expert_parallel: int = 1
    pipeline_parallel: int = 1
    schedule: Schedule = "1f1b"
    micro_batches: int = 0
    virtual_stages: int = 2
    freeze: str = NOTHING_FROZEN
    adapter: Adapter = "none"
    lora_rank: int = DEFAULT_LORA_RANK
    lora_targets: str = ALL_LINEAR
    adapter_dtype: AdapterDtype = "base"
    base_quantization: BaseQuantization = "none"
    compile: bool = False
    channels_last: bool = False

    @property
    def model_parallel(self) -> int:
        """GPUs that hold one copy of the network together."""
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel

    @property
    def least_gpus(self) -> int:
        """GPUs that a job takes at least: one copy of the network, or as many as its experts are spread over."""
        return self.model_parallel * self.expert_parallel // gcd(self.context_parallel, self.expert_parallel)

    @property
    def data_parallel(self) -> int:
        """Groups of GPUs, each with samples of its own."""
        return max(1, self.gpus // self.model_parallel)

    @property
    def pipelined(self) -> int:
        """Micro-batches that go through the stages of a pipeline in one pass; 1 without a pipeline."""
        return (self.micro_batches or self.pipeline_parallel) if self.pipeline_parallel > 1 else 1

    @property
    def pass_micro_batches(self) -> int:
        """Micro-batches of one pass over all GPUs."""
        return self.data_parallel * self.pipelined

    @property
    def sharded_over(self) -> int:
        """GPUs that hold the same part of the network, over which sharding spreads it.

        They see different samples, or different parts of the same ones (torchtitan and Megatron-LM shard over both).
        """
        return self.data_parallel * self.context_parallel

    @property
    def ranks(self) -> int:
        """GPUs that exchange tensors where PyTorch runs the recipe here: over which it is cut, else sharded."""
        return self.tensor_parallel if self.tensor_parallel > 1 or self.sharding == "none" else self.gpus

    @property
    def has_adapters(self) -> bool:
        """Return whether the network's own weights are frozen, and adapters trained."""
        return self.adapter != "none"

    @property
    def has_frozen_layers(self) -> bool:
        """Return whether some of the network's own weights are frozen, and the others trained."""
        return self.freeze != NOTHING_FROZEN

    @property
    def freeze_words(self) -> str:
        """Which weights are frozen, in a few words; empty for none."""
        if not self.has_frozen_layers:
            return ""
        if self.freeze == ALL_BUT_HEAD:
            return "only the head trained"
        return f"first {self.freeze} block{'' if self.freeze == '1' else 's'} frozen"

    @property
    def adapter_words(self) -> str:
        """The adapters and what is under them in a few words; empty without."""
        if not self.has_adapters:
            return ""
        base = "" if self.base_quantization == "none" else f" over {self.base_quantization}"
        kind = "DoRA" if self.adapter == "dora" else "LoRA"
        wide = " in fp32" if self.adapter_dtype == "fp32" else ""
        return f"{kind} rank {self.lora_rank}{wide} at {self.lora_targets}{base}"


@dataclass(frozen=True, slots=True)
class Setup:
    """A network, its recipe and all else that a technique may change."""

    shape: ModelShape
    recipe: Recipe
    extras: Extras = NO_EXTRAS
