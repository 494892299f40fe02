"""Every technique that makes a step smaller, as a change of what is trained and how. The one list of them.

`remedies` offers some of them after a search; the Plan judges all of them and combines them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from gpumem_tui.catalog.shapes import Gpu, ModelShape, ShapeError
from gpumem_tui.formula.blocks import fused
from gpumem_tui.formula.extras import EXTRA_RECORDS, NO_EXTRAS, Extra, Extras, why_not
from gpumem_tui.formula.freezing import block_count
from gpumem_tui.formula.optimizers import OPTIMIZER_TECHNIQUES
from gpumem_tui.formula.price import ONE_MORE_FORWARD, Axis, Price, selective_recompute_percent
from gpumem_tui.formula.recipe import NOTHING_FROZEN, Recipe, Sharding
from gpumem_tui.formula.sharding import has_own_precision, stage_of

SHARED_BY_DEFAULT = 8
"""GPUs to shard over where there is one so far: what a server holds."""

STAGES: tuple[Sharding, ...] = ("zero1", "zero2", "zero3")

BF16_SINCE = (8, 0)
"""The first compute capability with bfloat16 arithmetic."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is trained and how, in all that a technique may change."""

    shape: ModelShape
    recipe: Recipe
    extras: Extras = NO_EXTRAS


@dataclass(frozen=True, slots=True)
class Change:
    """One technique.

    Attributes:
        key: names it in code and help.
        option: as typed on the command line.
        cost: what it costs, in words; `source`: where that is from.
        price: the cost as a comparison sees it.
        shape, recipe, extra: what becomes different.
    """

    key: str
    axis: Axis
    name: str
    option: str
    cost: str
    source: str
    price: Price
    recipe: Mapping[str, Any] = field(default_factory=dict)
    shape: Mapping[str, int] = field(default_factory=dict)
    extra: Extra | None = None

    def applied(self, setup: Setup) -> Setup:
        """`setup` with this change made."""
        return Setup(
            setup.shape.overridden(**self.shape) if self.shape else setup.shape,
            replace(setup.recipe, **self.recipe) if self.recipe else setup.recipe,
            setup.extras if self.extra is None else setup.extras | {self.extra},
        )


def conflict(recipe: Recipe) -> str | None:
    """Why the parts of a recipe do not go together, though the formula has an answer; None if they do."""
    if recipe.optimizer == "adafactor" and recipe.gpus > 1 and recipe.sharding in ("zero2", "zero3", "fsdp2"):
        return "PyTorch's Adafactor does not run on parameters that FSDP shards (torch 2.13)"
    if recipe.has_adapters and (recipe.model_parallel > 1 or has_own_precision(recipe)):
        return "under adapters a network is counted uncut, with --sharding none, zero1, zero2 or zero3"
    return None


@dataclass(frozen=True, slots=True)
class NotApplicable:
    """A technique that means nothing here, and why."""

    key: str
    name: str
    reason: str


def changes(setup: Setup, gpu: Gpu | None = None) -> list[Change | NotApplicable]:
    """Every technique for `setup`, applicable or not, in the order of the axes.

    Args:
        gpu: where it runs, which decides the 16-bit format; None for one that has bfloat16.
    """
    return [
        *_precisions(setup.recipe, gpu),
        *_recomputes(setup),
        _attention(setup),
        *_optimizers(setup.recipe),
        *_adapters(setup),
        _freezing(setup),
        _extra(setup, "chunked-loss"),
        smaller_sample(setup.shape),
        *_shardings(setup.recipe),
        _extra(setup, "offload-optimizer"),
        _extra(setup, "offload-activations"),
    ]


def sharded(sharding: Sharding, gpus: int, further_gpus: int, key: str | None = None) -> Change:
    """ZeRO over `gpus` GPUs, `further_gpus` of them new."""
    communication = {
        "zero1": "no more communication than plain data parallel training",
        "zero2": "no more communication than plain data parallel training",
        "zero3": "1.5 times the communication of plain data parallel training",
    }[sharding]
    return Change(
        key or sharding,
        "sharding",
        f"ZeRO-{sharding[-1]} over {gpus} GPUs",
        f"--sharding {sharding} --gpus {gpus}",
        f"{gpus} GPUs; {communication}" if further_gpus else communication,
        "Rajbhandari et al. 2020",
        Price(gpus=further_gpus, slower_percent=_ZERO3_PERCENT if sharding == "zero3" else 0.0, changes=1),
        recipe={"sharding": sharding, "gpus": gpus},
    )


_ZERO3_PERCENT = 5.0
"""Assumed for the comparison only: half of what data parallel training loses at the most over 8 fast links."""


MOST_TIMES_HALVED = 4
_PARTS = ("half", "a quarter of", "an eighth of", "a sixteenth of")


def smaller_sample(shape: ModelShape, times_halved: int = 1) -> Change | NotApplicable:
    """The sequence or, for images, the side, halved once to `MOST_TIMES_HALVED` times."""
    key, part = "shorter-sequence", _PARTS[times_halved - 1]
    if shape.seq_len:
        name, size, cost = "sequence", "seq_len", f"{part} the context in a sample"
    elif shape.image_size:
        name, size, cost = "image side", "image_size", f"1/{4**times_halved} of the pixels in a sample"
    else:
        return NotApplicable(key, "shorter sequence", "the network has no sequence and no image")
    value = getattr(shape, size) >> times_halved
    try:
        shape.overridden(**{size: value})
    except ShapeError as error:
        return NotApplicable(key, f"{part} the {name}", str(error).removeprefix(f"{error.option}: "))
    return Change(
        key,
        "sample",
        f"{part} the {name}",
        f"--{size.replace('_', '-')} {value}",
        cost,
        "less work per sample",
        Price(times_halved=times_halved, changes=1),
        shape={size: value},
    )


def _precisions(recipe: Recipe, gpu: Gpu | None) -> Iterator[Change | NotApplicable]:
    bf16 = gpu is None or gpu.compute_capability >= BF16_SINCE
    mixed = "amp-bf16" if bf16 else "amp-fp16"
    if recipe.precision == "fp32":
        rounding = "7 mantissa bits instead of 23" if bf16 else "loss scaling, and 10 mantissa bits instead of 23,"
        yield Change(
            "mixed-precision",
            "precision",
            "mixed precision",
            f"--precision {mixed}",
            f"a 16-bit copy of the weights; {rounding} in matrix products",
            "Micikevicius et al. 2018",
            Price(changes=1),
            recipe={"precision": mixed},
        )
    else:
        yield NotApplicable("mixed-precision", "mixed precision", f"the plan is in {recipe.precision} already")
    if recipe.precision == "bf16":
        yield NotApplicable("pure-bf16", "pure bfloat16", "the plan is in bf16 already")
    elif gpu is not None and not bf16:
        yield NotApplicable("pure-bf16", "pure bfloat16", f"{gpu.title} has no bfloat16 arithmetic")
    else:
        yield Change(
            "pure-bf16",
            "precision",
            "pure bfloat16",
            "--precision bf16",
            "no fp32 master weights: small updates are rounded away",
            "Micikevicius et al. 2018",
            Price(risk=2, changes=1),
            recipe={"precision": "bf16"},
        )


def _recomputes(setup: Setup) -> Iterator[Change | NotApplicable]:
    shape, recipe = setup.shape, setup.recipe
    key, name = "selective-recompute", "selective recompute"
    if not shape.record.has_attention:
        yield NotApplicable(key, name, "the network has no attention to recompute")
    elif recipe.recompute != "none":
        yield NotApplicable(key, name, f"recompute is {recipe.recompute} already")
    else:
        percent = selective_recompute_percent(shape)
        yield Change(
            key,
            "recompute",
            name,
            "--recompute selective",
            f"{percent:.1f} % more FLOPs here, 2.7 % at GPT-3's size",
            "Korthikanti et al. 2022",
            Price(slower_percent=percent, changes=1),
            recipe={"recompute": "selective"},
        )
    if recipe.recompute == "full":
        yield NotApplicable("full-recompute", "full recompute", "recompute is full already")
        return
    yield Change(
        "full-recompute",
        "recompute",
        "full recompute",
        "--recompute full",
        "30 to 40 % more time: a second forward pass",
        "Korthikanti et al. 2022",
        Price(slower_percent=ONE_MORE_FORWARD, changes=1),
        recipe={"recompute": "full"},
    )


def _attention(setup: Setup) -> Change | NotApplicable:
    key, name = "fused-attention", "fused attention"
    if not setup.shape.record.has_attention:
        return NotApplicable(key, name, "the network has no attention")
    if setup.shape.sinks:
        return NotApplicable(key, name, "PyTorch's fused kernels have no attention sinks")
    if fused(setup.shape, setup.recipe):
        own = "PyTorch's own choice" if setup.recipe.attention == "auto" else setup.recipe.attention
        return NotApplicable(key, name, f"{own} is a fused kernel already")
    if setup.recipe.precision == "fp32":  # flash kernels take 16-bit values only
        kernel, source = "efficient", "Rabe & Staats 2021"
    else:
        kernel, source = "flash", "Dao et al. 2022"
    return Change(
        key,
        "attention",
        name,
        f"--attention {kernel}",
        "none: the result is exact, and usually faster",
        source,
        Price(changes=1),
        recipe={"attention": kernel},
    )


def _optimizers(recipe: Recipe) -> Iterator[Change | NotApplicable]:
    for key, technique in OPTIMIZER_TECHNIQUES.items():
        if recipe.optimizer == key:
            yield NotApplicable(key, technique.name, "the plan uses it already")
        elif key in _WAYS_OF_ADAMW and recipe.optimizer not in ("adamw", *_WAYS_OF_ADAMW):
            yield NotApplicable(key, technique.name, f"the plan uses {recipe.optimizer}, not AdamW")
        else:
            yield Change(
                key,
                "optimizer",
                technique.name,
                f"--optimizer {key}",
                technique.cost,
                technique.source,
                technique.price,
                recipe={"optimizer": key},
            )


_WAYS_OF_ADAMW = ("adamw-fused", "adamw-for-loop")


def _adapters(setup: Setup) -> Iterator[Change | NotApplicable]:
    """Adapters in the place of training every weight, alone and over a quantized base."""
    recipe = setup.recipe
    names = {"lora": "LoRA", "qlora": "QLoRA"}
    for key, quantization in (("lora", recipe.base_quantization), ("qlora", "nf4-dq")):
        if not setup.shape.record.predicts_tokens:
            yield NotApplicable(key, names[key], "adapters are counted for language models only")
        elif recipe.has_adapters and recipe.base_quantization == quantization:
            yield NotApplicable(key, names[key], "the plan trains adapters already")
        else:
            option = "" if key == "lora" else f" --base-quantization {quantization}"
            option += f" --freeze {NOTHING_FROZEN}" if recipe.has_frozen_layers else ""
            yield Change(
                key,
                "weights",
                names[key],
                f"--adapter lora{option}",
                _ADAPTER_COSTS[key],
                _ADAPTER_SOURCES[key],
                Price(retuned=1, risk=1, changes=1),
                recipe={"adapter": "lora", "base_quantization": quantization, "freeze": NOTHING_FROZEN},
            )


_ADAPTER_COSTS: Mapping[str, str] = MappingProxyType(
    {
        "lora": "the weights are frozen: what is learned has a low rank, and another learning rate",
        "qlora": "as LoRA; weights rounded to 4 bits, unpacked for every product: slower",
    }
)
_ADAPTER_SOURCES: Mapping[str, str] = MappingProxyType({"lora": "Hu et al. 2021", "qlora": "Dettmers et al. 2023"})


def _freezing(setup: Setup) -> Change | NotApplicable:
    """The lower half of the blocks left as it is."""
    key, name = "freeze-half", "freeze the lower half"
    recipe, half = setup.recipe, block_count(setup.shape) // 2
    if recipe.has_adapters:
        return NotApplicable(key, name, "adapters freeze every weight already")
    if recipe.has_frozen_layers:
        return NotApplicable(key, name, f"the plan freezes already: {recipe.freeze_words}")
    if recipe.pipeline_parallel > 1:
        return NotApplicable(key, name, "frozen layers are counted without pipeline parallel")
    if not half:
        return NotApplicable(key, name, f"{setup.shape.name} has one block")
    return Change(
        key,
        "weights",
        name,
        f"--freeze {half}",
        "fine-tuning only: the first blocks stay as they were trained, and less is learned",
        "Lee et al. 2019 (What Would Elsa Do?)",
        Price(retuned=1, risk=2, changes=1),
        recipe={"freeze": str(half)},
    )


def _shardings(recipe: Recipe) -> Iterator[Change | NotApplicable]:
    """Each stage over the GPUs there are, or over a server's where there is one; then over twice as many."""
    gpus = recipe.gpus if recipe.gpus > 1 else SHARED_BY_DEFAULT
    for number, stage in enumerate(STAGES, 1):
        if recipe.gpus > 1 and number <= stage_of(recipe):
            reason = f"the plan shards by {recipe.sharding} already"
            yield NotApplicable(stage, f"ZeRO-{stage[-1]} over {gpus} GPUs", reason)
        else:
            yield sharded(stage, gpus, gpus - recipe.gpus)
    if recipe.gpus > 1:
        yield sharded("zero3", 2 * recipe.gpus, recipe.gpus, "more-gpus")


def _extra(setup: Setup, extra: Extra) -> Change | NotApplicable:
    record = EXTRA_RECORDS[extra]
    reason = "the plan has it already" if extra in setup.extras else why_not(extra, setup.shape, setup.recipe)
    if reason is not None:
        return NotApplicable(extra, record.name, reason)
    return Change(
        extra, record.axis, record.name, f"--extra {extra}", record.cost, record.source, record.price, extra=extra
    )
