"""What would make a larger batch fit, computed on this very model, and what each remedy costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpumem_tui.catalog.shapes import ATTENTION_FAMILIES, ModelShape, ShapeError
from gpumem_tui.formula.predict import DEFAULT_HEADROOM, max_batch_size, predict
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.transformer import fused

_ZERO_GPUS = 8
_WORTHWHILE = 0.01
"""Share of the step that a remedy must save to be worth naming, unless it raises the batch size."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change to the training, and what it buys.

    Attributes:
        option: as typed on the command line.
        saved_bytes: of the peak at batch size 1, per GPU; negative where a fixed price pays off only at
            larger batches.
        max_batch_size: per GPU, with the change.
        cost: what it costs, in words.
        source: where the cost is from.
        shape, recipe: with the change made.
    """

    name: str
    option: str
    saved_bytes: int
    max_batch_size: int
    cost: str
    source: str
    shape: ModelShape
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class _Change:
    name: str
    option: str
    cost: str
    source: str
    shape: ModelShape
    recipe: Recipe


def remedies(shape: ModelShape, recipe: Recipe, total_bytes: int, headroom: float = DEFAULT_HEADROOM) -> list[Remedy]:
    """Every single change that helps, the largest resulting batch first, then the most bytes saved.

    Args:
        total_bytes: memory of one GPU.
        headroom: share of it to leave free.

    Raises:
        ValueError: a headroom that is no share of the card.
    """
    peak_bytes = predict(shape, recipe, 1).peak_bytes
    fitting = max_batch_size(shape, recipe, total_bytes, headroom)
    found = []
    for change in _changes(shape, recipe):
        saved_bytes = peak_bytes - predict(change.shape, change.recipe, 1).peak_bytes
        new_size = max_batch_size(change.shape, change.recipe, total_bytes, headroom)
        if new_size > fitting or saved_bytes >= _WORTHWHILE * peak_bytes:
            found.append(
                Remedy(
                    change.name,
                    change.option,
                    saved_bytes,
                    new_size,
                    change.cost,
                    change.source,
                    change.shape,
                    change.recipe,
                )
            )
    return sorted(found, key=lambda remedy: (-remedy.max_batch_size, -remedy.saved_bytes))


def _changes(shape: ModelShape, recipe: Recipe) -> Iterator[_Change]:
    yield from _precisions(shape, recipe)
    yield from _recomputes(shape, recipe)
    yield from _attentions(shape, recipe)
    yield from _optimizers(shape, recipe)
    yield from _smaller_samples(shape, recipe)
    yield from _shardings(shape, recipe)


def _precisions(shape: ModelShape, recipe: Recipe) -> Iterator[_Change]:
    if recipe.precision == "fp32":
        yield _Change(
            "mixed precision",
            "--precision amp-bf16",
            "a 16-bit copy of the weights; 7 mantissa bits instead of 23 in matrix products",
            "Micikevicius et al. 2018",
            shape,
            replace(recipe, precision="amp-bf16"),
        )
    if recipe.precision != "bf16":
        yield _Change(
            "pure bfloat16",
            "--precision bf16",
            "no fp32 master weights: small updates are rounded away",
            "Micikevicius et al. 2018",
            shape,
            replace(recipe, precision="bf16"),
        )


def _recomputes(shape: ModelShape, recipe: Recipe) -> Iterator[_Change]:
    if recipe.recompute == "none":
        yield _Change(
            "selective recompute",
            "--recompute selective",
            "about 2.7 % more FLOPs at GPT-3's size",
            "Korthikanti et al. 2022",
            shape,
            replace(recipe, recompute="selective"),
        )
    if recipe.recompute != "full":
        yield _Change(
            "full recompute",
            "--recompute full",
            "30 to 40 % more time: a second forward pass",
            "Korthikanti et al. 2022",
            shape,
            replace(recipe, recompute="full"),
        )


def _attentions(shape: ModelShape, recipe: Recipe) -> Iterator[_Change]:
    if shape.family not in ATTENTION_FAMILIES or fused(recipe):
        return
    if recipe.precision == "fp32":  # flash kernels take 16-bit values only
        changed, source = replace(recipe, attention="efficient"), "Rabe & Staats 2021"
    else:
        changed, source = replace(recipe, attention="flash"), "Dao et al. 2022"
    yield _Change(
        "fused attention",
        f"--attention {changed.attention}",
        "none: the result is exact, and usually faster",
        source,
        shape,
        changed,
    )


def _optimizers(shape: ModelShape, recipe: Recipe) -> Iterator[_Change]:
    yield _Change(
        "SGD with momentum",
        "--optimizer sgd-momentum",
        "the learning rate must be tuned anew; transformers usually train worse than with Adam",
        "Zhang et al. 2020",
        shape,
        replace(recipe, optimizer="sgd-momentum"),
    )
    yield _Change(
        "Adafactor",
        "--optimizer adafactor",
        "second moments as row and column sums, no momentum",
        "Shazeer & Stern 2018",
        shape,
        replace(recipe, optimizer="adafactor"),
    )
    yield _Change(
        "8-bit AdamW",
        "--optimizer adamw-8bit",
        "moments quantized in blocks; needs the bitsandbytes package",
        "Dettmers et al. 2022",
        shape,
        replace(recipe, optimizer="adamw-8bit"),
    )


def _smaller_samples(shape: ModelShape, recipe: Recipe) -> Iterator[_Change]:
    """Half the sequence or, for images, half the side."""
    if shape.seq_len:
        name, field, value = "half the sequence", "seq_len", shape.seq_len // 2
        cost = "half the context in a sample"
    elif shape.image_size:
        name, field, value = "half the image side", "image_size", shape.image_size // 2
        cost = "a quarter of the pixels in a sample"
    else:
        return
    try:
        smaller = shape.overridden(**{field: value})
    except ShapeError:
        return  # too small for the architecture
    yield _Change(name, f"--{field.replace('_', '-')} {value}", cost, "less work per sample", smaller, recipe)


def _shardings(shape: ModelShape, recipe: Recipe) -> Iterator[_Change]:
    gpus = max(_ZERO_GPUS, recipe.gpus)
    if recipe.sharding == "zero3" and recipe.gpus == gpus:
        return
    yield _Change(
        f"ZeRO-3 over {gpus} GPUs",
        f"--sharding zero3 --gpus {gpus}",
        f"{gpus} GPUs, and 1.5 times the communication of plain data parallel training",
        "Rajbhandari et al. 2020",
        shape,
        replace(recipe, sharding="zero3", gpus=gpus),
    )
