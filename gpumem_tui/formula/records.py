"""Facts about each optimizer, precision, way of sharding and format of frozen weights: tables of the catalog.

Standard library only: the child that trains reads the same records. Another entry is its name in `recipe` and a table;
that both agree is a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.catalog.tables import records
from gpumem_tui.formula.recipe import BaseQuantization, Optimizer, Precision, Recipe, Sharding

BF16_SINCE = (8, 0)
"""The first compute capability with bfloat16 arithmetic."""

MASK_BYTES = 1
"""Bytes per element of a dropout mask: PyTorch keeps it as bool, regardless of the precision."""

LOSS_BYTES = 4
"""Bytes per value inside the loss: autocast runs log-softmax and cross-entropy in fp32, and recipes in pure
bfloat16 are assumed to cast the logits first."""

FP32_BYTES = 4
"""Bytes of a value in fp32."""

ZERO3 = 3
"""The stage of ZeRO that spreads the weights too."""


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """An optimizer's state and temporaries, as `catalog/optimizers.toml` has it.

    Attributes:
        states: values that it keeps per parameter; None for what `kept` counts instead.
        kept: how the values are counted that are no whole number per parameter (`fixed.KEPT`).
        keeps: this in a few words, for a choice; `note`: in more, for the ledger; `source`: of both.
        counted_as, per_parameter: what the help of the optimizer's state calls it, and what it keeps per parameter;
            empty for an optimizer that keeps what another does.
        class_names: of the classes that are this optimizer in a running program, torch's own first. One
            that records share is taken for the last of them.
        options: what the class is made with. Everything but the learning rate stays at torch's default: `foreach`
            decides how much scratch a step takes, and what users run is the default. The learning rates only have to
            keep random data finite.
        scratch: values per parameter that one update makes on the way, all tensors at once (`foreach`, torch's default
            on CUDA): Adam's square roots. 0 where it works in place.
        of_largest: values per parameter of the largest tensor that it makes, where it goes from one to the next.
        takes_whole_matrices: it updates matrices whole, so no shards of them.
        updates_parts: it updates parts of matrices as they are (DTensor).
        runs_on_shards: it runs on parameters that FSDP shards.
        way_of: the optimizer that it computes the same as, otherwise.
        technique: as a way to need less memory than AdamW, in the fields of `techniques.Technique`; empty where it
            saves nothing.
    """

    keeps: str
    note: str
    source: str
    class_names: tuple[str, ...]
    states: int | None = None
    kept: Literal["whole-values", "row-and-column-sums", "in-8-bits", "muon"] = "whole-values"
    counted_as: str = ""
    per_parameter: str = ""
    options: Mapping[str, float | bool] = field(default_factory=dict)
    scratch: int = 0
    of_largest: int = 0
    takes_whole_matrices: bool = False
    updates_parts: bool = False
    runs_on_shards: bool = True
    way_of: str = ""
    technique: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PrecisionRecord:
    """The dtypes in which a precision keeps its tensors, as `catalog/precisions.toml` has it.

    Attributes:
        weights: the dtype of weights, gradients and optimizer state, by torch's name.
        autocast: the dtype that `torch.autocast` computes in; empty for none.
        scales_loss: a GradScaler is used.
        keeps: what is kept in which format, in a few words.
        advice: what to know before taking it.
        parameter_bytes, gradient_bytes, state_bytes: per weight, gradient and optimizer value.
        working_copy_bytes: per weight, of the 16-bit copies that live next to fp32 weights; 0 for none.
        compute_bytes: per activation.
        note: what the gradients and weights are kept in, for the reader.
    """

    weights: Literal["float32", "bfloat16", "float16"]
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
        """Return whether weights are kept in another format than the step computes in."""
        return bool(self.autocast)


@dataclass(frozen=True, slots=True)
class ShardingRecord:
    """A way to spread parameters, gradients and optimizer state over GPUs, as `catalog/sharding.toml` has it.

    Attributes:
        stage: of ZeRO: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
        title: for the reader; `keeps`: in a few words, for a choice; `source`: of both.
        own_precision: in mixed precision the network itself runs in 16 bits, instead of under `torch.autocast`.
        keeps_masters: fp32 copies of the weights besides those that the network runs with.
        by_fsdp: FSDP shards the parameters that the optimizer updates.
    """

    stage: int
    title: str
    keeps: str
    source: str
    own_precision: bool = False
    keeps_masters: bool = False
    by_fsdp: bool = False


@dataclass(frozen=True, slots=True)
class QuantizationRecord:
    """A format of frozen weights, as `catalog/quantization.toml` has it.

    Attributes:
        title: as a reader knows it.
        keeps: what is kept, in a few words, for a choice.
        source: where the figures are from.
        bits: of one weight.
        scaled: weights that share a scale in fp32: so many, those of a row, or those of a matrix.
        scales_scaled: scales that are in 8 bits and share one in fp32, with their mean; 0 for scales in fp32.
        by_bitsandbytes: bitsandbytes packs it, where that is there.
    """

    title: str
    keeps: str
    source: str
    bits: int
    scaled: int | Literal["row", "matrix"]
    scales_scaled: int = 0
    by_bitsandbytes: bool = False

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix with so many rows (outputs) and columns (inputs), scales included."""
        packed = -(-rows * columns * self.bits // 8)
        if self.scaled == "row":
            return packed + FP32_BYTES * rows
        if self.scaled == "matrix":
            return packed + FP32_BYTES
        scales = -(-rows * columns // self.scaled)
        if not self.scales_scaled:
            return packed + FP32_BYTES * scales
        return packed + scales + FP32_BYTES * -(-scales // self.scales_scaled) + FP32_BYTES


OPTIMIZER_RECORDS: Mapping[Optimizer, OptimizerRecord] = records("optimizers.toml", OptimizerRecord)
PRECISION_RECORDS: Mapping[Precision, PrecisionRecord] = records("precisions.toml", PrecisionRecord)
SHARDING_RECORDS: Mapping[Sharding, ShardingRecord] = records("sharding.toml", ShardingRecord)
QUANTIZATION_RECORDS: Mapping[BaseQuantization, QuantizationRecord] = records("quantization.toml", QuantizationRecord)
"""Every format but ``none``."""


def stage_of(recipe: Recipe) -> int:
    """Return the stage of ZeRO that the recipe shards by; 0 for none."""
    return SHARDING_RECORDS[recipe.sharding].stage


def has_own_precision(recipe: Recipe) -> bool:
    """Return whether the recipe's engine keeps its own formats instead of autocast's."""
    record = SHARDING_RECORDS[recipe.sharding]
    return record.keeps_masters or (record.own_precision and PRECISION_RECORDS[recipe.precision].is_mixed)


def as_run_on(recipe: Recipe, gpu: Gpu) -> Recipe:
    """Return the recipe with the attention that PyTorch's own choice comes to on a GPU.

    Before compute capability 8.0 no fused kernel takes bfloat16 (sdp_utils.cpp): the scores are written.
    """
    computes_in = PRECISION_RECORDS[recipe.precision].computes_in
    if recipe.attention == "auto" and computes_in == "bfloat16" and gpu.compute_capability < BF16_SINCE:
        return replace(recipe, attention="math")
    return recipe
