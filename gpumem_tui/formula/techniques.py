"""Every technique that makes a step smaller: its words and price are data, what it applies to and changes is here.

`changes` has all of them for a model of the catalog: `remedies` offers some after a search, the Plan judges all and
combines them. `injected` has those that are made to a user's own command.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import MappingProxyType
from typing import Literal

import msgspec

from gpumem_tui.catalog.loader import toml_tables
from gpumem_tui.catalog.shapes import Gpu, ModelShape, ShapeError
from gpumem_tui.catalog.tables import changed
from gpumem_tui.decoding import decodable
from gpumem_tui.formula.recipe import LOSS_CHUNKS, NOTHING_FROZEN, Extra, Recipe, Setup, Sharding
from gpumem_tui.formula.records import BF16_SINCE, OPTIMIZER_RECORDS, SHARDING_RECORDS, stage_of
from gpumem_tui.formula.resolved import fused
from gpumem_tui.formula.weights import block_count

SHARED_BY_DEFAULT = 8
"""GPUs to shard over where there is one so far: what a server holds."""

STAGES: tuple[Sharding, ...] = ("zero1", "zero2", "zero3")
MORE_RANKS, SHARDED = "more-ranks", "sharded"
"""The changes that are made to the launcher's line as well."""
DEEPSPEED = {"deepspeed-zero2": 2, "deepspeed-zero3": 3}
"""The stages of DeepSpeed's ZeRO that a command is run with, where its line can ask for them."""
SHARDS = (SHARDED, *DEEPSPEED)
"""The changes by which ranks hold parts: of them one at a time."""
ALLOCATOR = "allocator"
"""The change that is made to no program, but to a variable that torch reads."""
HALF_LENGTH = "half-length"
ADAPTERS = ("lora", "qlora")
RECOMPUTES = {"selective-recompute", "full-recompute", "checkpointing"}
"""Techniques that recompute, for models and for commands."""
TYPED = (*ADAPTERS, HALF_LENGTH)
"""Changes that are written in a command's own line where they can be."""

Axis = Literal[
    "weights", "precision", "recompute", "attention", "optimizer", "loss", "sample", "sharding", "state", "blocks",
    "weights-in-host", "batch", "command",
]  # fmt: skip
"""The subject of a technique: only one change per axis can be made."""

COST_ORDER = (
    "no further GPUs, then the same samples (no shorter sequences), then no optimizer of another kind, then no host "
    "memory, then every weight trained (no adapters), then the least risk to accuracy, then the least extra time, then "
    "the fewest changes; under LoRA the weights are quantized before anything is computed twice"
)
"""How prices compare, for the reader."""


@dataclass(frozen=True, order=True, slots=True)
class Price:
    """The price of a set of techniques; the first field that differs decides which of two is cheaper.

    Attributes:
        gpus: further GPUs.
        times_halved: of the sequence or the image side: the network sees less.
        retuned: optimizers of another kind, whose hyperparameters must be found anew.
        offloads: kinds of state moved to host memory, whose bus then bounds the step.
        frozen: ways to freeze weights, as under adapters: a training that learns less, of what is trained already.
        risk: to accuracy; 0: none published, 1: a published method with matching results, 2: what can hurt.
        slower_percent: extra time of a step as far as arithmetic tells.
        changes: techniques in the set.
    """

    gpus: int = 0
    times_halved: int = 0
    retuned: int = 0
    offloads: int = 0
    frozen: int = 0
    risk: int = 0
    slower_percent: float = 0.0
    changes: int = 0

    @property
    def is_last_resort(self) -> bool:
        """Return whether it asks for what nobody gives up gladly, so that its cost is shown with it."""
        return self > Price(frozen=1)

    def __add__(self, other: Price) -> Price:
        return Price(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Price)))


@dataclass(frozen=True, slots=True)
class Technique:
    """A technique: a table of techniques.toml or optimizers.toml, with what it changes filled in.

    Attributes:
        key: names it in code and help.
        name: as a reader knows it; `plain_name`: where its result is unknown.
        cost: what it costs, in words; `source`: where that is from.
        price: the cost as a comparison sees it.
        arithmetic: what becomes of the formula's terms; `caveat`: what else to know. Empty where only commands have it.
        axis: what it is about.
        control: of a plan, those that have it, with spaces between.
        how: what to write in a program of one's own to have it; empty where a plan does not change a program so.
        is_remedy: whether a search that finds nothing proposes it; the others are left to the Plan.
        words: what represents a name in braces, by value.
        given_option: as typed on the command line, where that is not what `recipe`, `shape` and `extra` say.
        shape, recipe, extra: what becomes different.
    """

    key: str
    name: str
    cost: str
    source: str
    price: Price
    arithmetic: str = ""
    caveat: str = ""
    axis: Axis = "command"
    control: str = ""
    plain_name: str = ""
    how: str = ""
    is_remedy: bool = False
    words: Mapping[str, str] = field(default_factory=dict, hash=False)
    given_option: str = ""
    recipe: Mapping[str, object] = field(default_factory=dict, hash=False)
    shape: Mapping[str, int] = field(default_factory=dict, hash=False)
    extra: Extra | None = None

    @property
    def option(self) -> str:
        """The change as typed on the command line."""
        typed = [f"--{name.replace('_', '-')} {value}" for name, value in {**self.shape, **self.recipe}.items()]
        return self.given_option or " ".join([*typed, *([f"--extra {self.extra}"] if self.extra else [])])

    @property
    def gpus(self) -> int:
        """The GPUs that it shards over; 1 where it is about something else."""
        return changed(Recipe(), self.recipe).gpus

    def filled(self, price: Price | None = None, **known: object) -> Technique:
        """Return the technique with what is `known` in its words, and `price` added to its own."""
        name, how, cost, source = (text.format(**known) for text in (self.name, self.how, self.cost, self.source))
        return replace(self, name=name, how=how, cost=cost, source=source, price=self.price + (price or Price()))

    def applied(self, setup: Setup) -> Setup:
        """Return `setup` with this change made."""
        return Setup(
            setup.shape.overridden(**self.shape) if self.shape else setup.shape,
            changed(setup.recipe, self.recipe) if self.recipe else setup.recipe,
            setup.extras if self.extra is None else setup.extras | {self.extra},
        )


def is_advisable(chosen: Collection[Technique], offered: Collection[Technique]) -> bool:
    """Return whether changes are made together: LoRA's base is quantized, if it can be, before anything is recomputed.

    As torchtune's tutorial tunes 7B ("Fine-Tuning Llama2 with QLoRA"). For Llama-3-8B on 24 GB, LoRA with full
    recompute leaves 0.5 GiB, and QLoRA with it 10.
    """
    keys = {change.key for change in chosen}
    return not ("lora" in keys and keys & RECOMPUTES and any(change.key == "qlora" for change in offered))


@dataclass(frozen=True, slots=True)
class NotApplicable:
    """A technique that means nothing here, and why."""

    key: str
    name: str
    reason: str


_Row = dict[str, object]
_AS_OF_THE_ROW = ("name", "cost", "source", "price")
"""The fields that a change to a command takes from its technique unless it has its own."""


@cache
def techniques_of(whom: Literal["model", "command"]) -> Mapping[str, Technique]:
    """Return the rows of techniques.toml as models or as commands have them, by key."""
    rows = msgspec.convert(toml_tables("techniques.toml"), decodable(dict[str, _Row]))
    found = {}
    for key, row in _of_models(rows) if whom == "model" else _of_commands(rows):
        try:
            found[key] = msgspec.convert({"key": key, **row}, decodable(Technique))
        except msgspec.ValidationError as error:
            raise ValueError(f"techniques.toml: {key}: {error}") from error
    return MappingProxyType(found)


def _of_models(rows: Mapping[str, _Row]) -> Iterator[tuple[str, _Row]]:
    for key, row in rows.items():
        if "axis" in row:
            yield key, {name: value for name, value in row.items() if name != "command"}


def _of_commands(rows: Mapping[str, _Row]) -> Iterator[tuple[str, _Row]]:
    for key, row in rows.items():
        if "axis" not in row:
            yield key, row
        usual = {name: row[name] for name in _AS_OF_THE_ROW}
        for change, own in msgspec.convert(row.get("command", {}), decodable(dict[str, _Row])).items():
            yield change, usual | own


@cache
def catalog_techniques() -> Mapping[str, Technique]:
    """Return the techniques for models of the catalog by key, the optimizers among them."""
    optimizers = {
        key: msgspec.convert(
            {"key": key, "axis": "optimizer", "control": "optimizer", "recipe": {"optimizer": key}, **record.technique},
            decodable(Technique),
        )
        for key, record in OPTIMIZER_RECORDS.items()
        if record.technique
    }
    return MappingProxyType({**techniques_of("model"), **optimizers})


def _lacks(key: str, reason: str, name: str = "") -> NotApplicable:
    technique = catalog_techniques()[key]
    return NotApplicable(key, name or technique.plain_name or technique.name, reason)


# Techniques for a model of the catalog


def changes(setup: Setup, gpu: Gpu | None = None) -> list[Technique | NotApplicable]:
    """Return every technique for `setup`, applicable or not, in the order of the axes.

    Args:
        setup: what is trained so far.
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
        _extra(setup, "offload-parameters"),
    ]


def other_way(recipe: Recipe) -> Technique:
    """Return `torch.compile`, or eager PyTorch where the recipe compiles: only a trace tells what it changes."""
    key, option = ("eager", "without --compile") if recipe.compile else ("compile", "--compile")
    return replace(techniques_of("command")[key], given_option=option, recipe={"compile": not recipe.compile})


def _precisions(recipe: Recipe, gpu: Gpu | None) -> Iterator[Technique | NotApplicable]:
    bf16 = gpu is None or gpu.compute_capability >= BF16_SINCE
    mixed, pure = catalog_techniques()["mixed-precision"], catalog_techniques()["pure-bf16"]
    if recipe.precision == "fp32":
        precision = "amp-bf16" if bf16 else "amp-fp16"
        yield replace(mixed.filled(rounding=mixed.words[precision]), recipe={"precision": precision})
    else:
        yield _lacks("mixed-precision", f"the plan is in {recipe.precision} already")
    if recipe.precision == "bf16":
        yield _lacks("pure-bf16", "the plan is in bf16 already")
    elif gpu is not None and not bf16:
        yield _lacks("pure-bf16", f"{gpu.title} has no bfloat16 arithmetic")
    else:
        yield replace(pure, recipe={"precision": "bf16"})


def _recomputes(setup: Setup) -> Iterator[Technique | NotApplicable]:
    shape, recipe = setup.shape, setup.recipe
    selective, full = catalog_techniques()["selective-recompute"], catalog_techniques()["full-recompute"]
    if not shape.record.has_attention:
        yield _lacks("selective-recompute", "the network has no attention to recompute")
    elif recipe.recompute != "none":
        yield _lacks("selective-recompute", f"recompute is {recipe.recompute} already")
    else:
        percent = selective_recompute_percent(shape)
        made = selective.filled(Price(slower_percent=percent), percent=f"{percent:.1f}")
        yield replace(made, recipe={"recompute": "selective"})
    if recipe.recompute == "full":
        yield _lacks("full-recompute", "recompute is full already")
    else:
        yield replace(full, recipe={"recompute": "full"})


def selective_recompute_percent(shape: ModelShape) -> float:
    """Return the extra arithmetic of recomputing the attention core: (S/6h) / (1 + S/6h + V/12hL), in per cent.

    Korthikanti et al. 2022, appendix A: 2.7 for GPT-3, 1.6 for the 530B model.
    """
    core = shape.tokens / (6 * shape.hidden)
    head = (shape.vocab or shape.classes) / (12 * shape.hidden * shape.layers)
    return 100 * core / (1 + core + head)


def _attention(setup: Setup) -> Technique | NotApplicable:
    key = "fused-attention"
    if not setup.shape.record.has_attention:
        return _lacks(key, "the network has no attention")
    if setup.shape.sinks:
        return _lacks(key, "PyTorch's fused kernels have no attention sinks")
    if fused(setup.shape, setup.recipe):
        own = "PyTorch's own choice" if setup.recipe.attention == "auto" else setup.recipe.attention
        return _lacks(key, f"{own} is a fused kernel already")
    technique = catalog_techniques()[key]
    kernel = "efficient" if setup.recipe.precision == "fp32" else "flash"  # flash kernels take 16-bit values only
    return replace(technique.filled(source=technique.words[kernel]), recipe={"attention": kernel})


def _optimizers(recipe: Recipe) -> Iterator[Technique | NotApplicable]:
    now = OPTIMIZER_RECORDS[recipe.optimizer]
    for key, record in OPTIMIZER_RECORDS.items():
        if not record.technique:
            continue
        if recipe.optimizer == key:
            yield _lacks(key, "the plan uses it already")
        elif record.way_of and record.way_of not in (recipe.optimizer, now.way_of):
            yield _lacks(key, f"the plan uses {recipe.optimizer}, not {OPTIMIZER_RECORDS['adamw'].class_names[0]}")
        else:
            yield catalog_techniques()[key]


def _adapters(setup: Setup) -> Iterator[Technique | NotApplicable]:
    """Yield adapters in the place of training every weight, alone and over a quantized base."""
    recipe = setup.recipe
    for key, quantization in (("lora", recipe.base_quantization), ("qlora", "nf4-dq")):
        if not setup.shape.record.predicts_tokens:
            yield _lacks(key, "adapters are counted for language models only")
        elif recipe.has_adapters and recipe.base_quantization == quantization:
            yield _lacks(key, "the plan trains adapters already")
        else:
            option = "" if key == "lora" else f" --base-quantization {quantization}"
            option += f" --freeze {NOTHING_FROZEN}" if recipe.has_frozen_layers else ""
            changed = {"adapter": "lora", "base_quantization": quantization, "freeze": NOTHING_FROZEN}
            made, frozen = catalog_techniques()[key], recipe.has_adapters or recipe.has_frozen_layers
            price = replace(made.price, frozen=0) if frozen else made.price
            yield replace(made, given_option=f"--adapter lora{option}", recipe=changed, price=price)


def _freezing(setup: Setup) -> Technique | NotApplicable:
    """Freeze the lower half of the blocks."""
    key, recipe, half = "freeze-half", setup.recipe, block_count(setup.shape) // 2
    if recipe.has_adapters:
        return _lacks(key, "adapters freeze every weight already")
    if recipe.has_frozen_layers:
        return _lacks(key, f"the plan freezes already: {recipe.freeze_words}")
    if recipe.pipeline_parallel > 1:
        return _lacks(key, "frozen layers are counted without pipeline parallel")
    if not half:
        return _lacks(key, f"{setup.shape.name} has one block")
    return replace(catalog_techniques()[key], recipe={"freeze": str(half)})


MOST_TIMES_HALVED = 4


def smaller_sample(shape: ModelShape, times_halved: int = 1) -> Technique | NotApplicable:
    """Return the sequence or, for images, the side, halved once to `MOST_TIMES_HALVED` times."""
    key = "shorter-sequence"
    technique = catalog_techniques()[key]
    part = technique.words[str(times_halved)]
    if shape.seq_len:
        what, size, cost = "sequence", "seq_len", f"{part} the context in a sample"
    elif shape.image_size:
        what, size, cost = "image side", "image_size", f"1/{4**times_halved} of the pixels in a sample"
    else:
        return _lacks(key, "the network has no sequence and no image")
    made = technique.filled(Price(times_halved=times_halved), part=part, what=what, cost=cost)
    value = getattr(shape, size) >> times_halved
    try:
        shape.overridden(**{size: value})
    except ShapeError as error:
        return _lacks(key, str(error).removeprefix(f"{error.option}: "), made.name)
    return replace(made, shape={size: value})


def _shardings(recipe: Recipe) -> Iterator[Technique | NotApplicable]:
    """Yield each stage over the GPUs there are, or over a server's where there is one; then over twice as many."""
    gpus = recipe.gpus if recipe.gpus > 1 else SHARED_BY_DEFAULT
    for number, stage in enumerate(STAGES, 1):
        change = sharded(stage, gpus, gpus - recipe.gpus)
        if recipe.gpus > 1 and number <= stage_of(recipe):
            yield _lacks(stage, f"the plan shards by {recipe.sharding} already", change.name)
        else:
            yield change
    if recipe.gpus > 1:
        yield sharded("zero3", 2 * recipe.gpus, recipe.gpus, "more-gpus")


def sharded(sharding: Sharding, gpus: int, further_gpus: int, key: str | None = None) -> Technique:
    """Return ZeRO over `gpus` GPUs, `further_gpus` of them new."""
    further = f"{gpus} GPUs; " if further_gpus else ""
    made = catalog_techniques()[key or sharding].filled(Price(gpus=further_gpus), gpus=gpus, further=further)
    return replace(made, recipe={"sharding": sharding, "gpus": gpus})


def _extra(setup: Setup, extra: Extra) -> Technique | NotApplicable:
    reason = "the plan has it already" if extra in setup.extras else why_not(extra, setup.shape, setup.recipe)
    return catalog_techniques()[extra] if reason is None else _lacks(extra, reason)


def why_not(extra: Extra, shape: ModelShape, recipe: Recipe) -> str | None:
    """Return why `extra` means nothing for this network and recipe; None if it does."""
    if extra == "chunked-loss" and not shape.record.predicts_tokens:
        return "a classifier's head has no vocabulary to cut"
    has_masters = SHARDING_RECORDS[recipe.sharding].keeps_masters
    if extra == "offload-optimizer" and OPTIMIZER_RECORDS[recipe.optimizer].states == 0 and not has_masters:
        return "plain SGD keeps no state to move"
    if extra == "offload-parameters" and (stage_of(recipe) < len(STAGES) or recipe.sharded_over == 1):
        return "engines keep the weights in host memory where they shard them: --sharding zero3, fsdp2, deepspeed-zero3"
    if extra == "offload-activations" and not shape.record.has_attention:
        return "modelled for transformer blocks only"
    return None


# Changes to a user's command


def injected(gpu: Gpu, ranks: int) -> tuple[Technique, ...]:
    """Return every change to a command, in the order in which they are run: those that mostly save most come first.

    Args:
        gpu: decides the 16-bit format.
        ranks: of the command as it is.
    """
    kind = "bfloat16" if gpu.compute_capability >= BF16_SINCE else "float16"
    found = []
    for key in INJECTED:
        technique = techniques_of("command").get(key) or catalog_techniques()[key]
        if key in SHARDS:
            gpus = ranks if ranks > 1 else SHARED_BY_DEFAULT
            each = f"{gpus} GPUs, each with that batch; " if gpus > ranks else ""
            made = technique.filled(Price(gpus=gpus - ranks), gpus=gpus, further=each)
            found.append(replace(made, recipe={"gpus": gpus}))
        elif key != MORE_RANKS:
            rounding = technique.words.get(kind, "")
            found.append(technique.filled(kind=kind, rounding=rounding, chunks=LOSS_CHUNKS))
        elif ranks > 1:
            found.append(technique.filled(Price(gpus=ranks), twice=2 * ranks, ranks=ranks))
    return tuple(found)


INJECTED = (
    "no-grad",
    "checkpointing",
    "autocast",
    *(key for key, record in OPTIMIZER_RECORDS.items() if record.technique.get("how")),
    "chunked-loss",
    "set-to-none",
    "fused",
    "no-foreach",
    "compile",
    "eager",
    "lora",
    *SHARDS,
    MORE_RANKS,
)
"""Every change that is made to a running program, and to its launcher, as `--what-if` takes them."""
CHANGES = tuple(dict.fromkeys((*INJECTED, *TYPED)))
"""Every change that can be made to a command, by its name on the command line."""
EVERY_CHANGE = "all"


def changes_named(typed: Sequence[str]) -> tuple[str, ...]:
    """Return the changes that were asked for, where one word may ask for all."""
    return CHANGES if EVERY_CHANGE in typed else tuple(typed)
