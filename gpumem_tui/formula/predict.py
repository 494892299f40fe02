"""The closed-form prediction of one training step's peak, and the largest batch it allows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula import adapters, convnet, mlp, transformer
from gpumem_tui.formula.assumptions import assumptions
from gpumem_tui.formula.cache import left_copies_bytes, pieces_bytes, reserved_bytes
from gpumem_tui.formula.engines import engine_rows
from gpumem_tui.formula.extras import NO_EXTRAS, Extras
from gpumem_tui.formula.freezing import frozen_blocks, only_head, tail, trains_head
from gpumem_tui.formula.frozen_forward import frozen_block_rows
from gpumem_tui.formula.head import head_rows, tied_gradients_row
from gpumem_tui.formula.optimizers import offloaded_row, optimizer_row, scratch_row
from gpumem_tui.formula.parallel import Stage, stages
from gpumem_tui.formula.parameters import (
    ParameterTensor,
    gathered_parameters,
    head_parameters,
)
from gpumem_tui.formula.precision import PRECISION_RECORDS
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.rows import FORWARD_ENDS, IN_A_BLOCK, TEXTBOOK, FormulaRow, Moment, batch_row, fixed_row, there
from gpumem_tui.formula.sharding import as_run, has_own_precision, shard, shard_scratch, stage_of
from gpumem_tui.memory import Breakdown, Bucket, format_bytes

DEFAULT_HEADROOM = 0.1
"""Share of the card kept free for the CUDA context, workspaces and fragmentation."""

_ID_BYTES = 8
_COLOURS = 3


@dataclass(frozen=True)
class FormulaPrediction:
    """The closed form's answer for one GPU.

    Attributes:
        rows: its terms at the moment when they are highest together, in the ledger's order of buckets.
        moment: that moment.
        cache_bytes: what the allocator must be able to hold beside them, for pieces that nothing fits into.
        assumptions: what the whole answer takes for granted, one sentence each.
    """

    batch_size: int
    rows: tuple[FormulaRow, ...]
    moment: Moment
    cache_bytes: int
    assumptions: tuple[str, ...]

    @cached_property
    def breakdown(self) -> Breakdown:
        """The rows summed by bucket."""
        buckets: defaultdict[Bucket, int] = defaultdict(int)
        for row in self.rows:
            buckets[row.bucket] += row.size_bytes
        return Breakdown(buckets)

    @property
    def peak_bytes(self) -> int:
        """The rows together: allocated."""
        return sum(row.size_bytes for row in self.rows)

    @property
    def needed_bytes(self) -> int:
        """What the allocator must be able to reserve."""
        return self.peak_bytes + self.cache_bytes

    @property
    def fixed_bytes(self) -> int:
        """What does not depend on the batch size at that moment: weights, their copies, gradients, optimizer state."""
        return sum(row.size_bytes for row in self.rows if not row.grows_with_batch)

    @property
    def activation_bytes_per_sample(self) -> int:
        """What each sample adds at that moment: activations, head and loss, batch data. 0 at batch size 0."""
        growing_bytes = sum(row.size_bytes for row in self.rows if row.grows_with_batch)
        return growing_bytes // self.batch_size if self.batch_size else 0


def predict(shape: ModelShape, recipe: Recipe, batch_size: int, extras: Extras = NO_EXTRAS) -> FormulaPrediction:
    """The peak of one training step on one of the recipe's GPUs, term by term.

    Args:
        extras: techniques beyond the recipe; those that mean nothing for this network change nothing.

    Raises:
        ValueError: a negative batch size, fewer than one GPU, or adapters that this network cannot have.
    """
    rows = terms(shape, recipe, batch_size, extras)
    sums = {moment: sum(row.size_bytes for row in at_moment(rows, moment)) for moment in Moment}
    moment = max(Moment, key=lambda one: sums[one])
    needed = max(_needed_bytes(moments, batch_size) for moments in by_stage(shape, recipe, extras))
    assumed = tuple(assumptions(shape, recipe, extras))
    return FormulaPrediction(batch_size, at_moment(rows, moment), moment, needed - sums[moment], assumed)


def at_moment(rows: Iterable[FormulaRow], moment: Moment) -> tuple[FormulaRow, ...]:
    """Those that are there at a moment."""
    return tuple(row for row in rows if moment in row.moments)


def terms(shape: ModelShape, recipe: Recipe, batch_size: int, extras: Extras = NO_EXTRAS) -> tuple[FormulaRow, ...]:
    """Every term of a step, each with the moments at which it is there.

    Raises:
        ValueError: as `predict`.
    """
    if batch_size < 0:
        raise ValueError(f"batch size must not be negative, it is {batch_size}")
    if recipe.gpus < 1:
        raise ValueError(f"there must be at least 1 GPU, not {recipe.gpus}")
    order = list(Bucket)
    needed = [_needed_bytes(moments, batch_size) for moments in by_stage(shape, recipe, extras)]
    fullest = stages(shape, recipe)[needed.index(max(needed))]
    rows = _stage_rows(fullest, recipe, batch_size, extras)
    rows.sort(key=lambda row: order.index(row.bucket))
    return tuple(rows)


@dataclass(frozen=True)
class MomentBytes:
    """What is needed at one moment, pieces included: whatever the batch size, and what each sample adds."""

    fixed_bytes: int
    sample_bytes: int


@lru_cache(4096)
def by_stage(shape: ModelShape, recipe: Recipe, extras: Extras = NO_EXTRAS) -> tuple[dict[Moment, MomentBytes], ...]:
    """The bytes of every moment, on a GPU of each stage that can need the most; one but for pipelines."""
    return tuple(_moments(stage, recipe, extras) for stage in stages(shape, recipe))


def by_moment(shape: ModelShape, recipe: Recipe, extras: Extras = NO_EXTRAS) -> dict[Moment, MomentBytes]:
    """The bytes of every moment; of a pipeline, on its stage that needs the most for one sample."""
    return max(by_stage(shape, recipe, extras), key=lambda moments: _needed_bytes(moments, 1))


def _needed_bytes(moments: dict[Moment, MomentBytes], batch_size: int) -> int:
    return max(one.fixed_bytes + batch_size * one.sample_bytes for one in moments.values())


def _moments(stage: Stage, recipe: Recipe, extras: Extras) -> dict[Moment, MomentBytes]:
    rows, run = _stage_rows(stage, recipe, 1, extras), as_run(recipe)
    found = {}
    for moment in Moment:
        fixed = sum(row.size_bytes for row in rows if moment in row.moments and not row.grows_with_batch)
        growing = sum(row.size_bytes for row in rows if moment in row.moments and row.grows_with_batch)
        fixed += left_copies_bytes(stage.shape, run, moment)
        if "chunked-loss" not in extras and stage.shape.has_head:
            growing += pieces_bytes(stage.shape, run, 1, moment)
        found[moment] = MomentBytes(reserved_bytes(fixed, run, moment), reserved_bytes(growing, run, moment))
    return found


def _stage_rows(stage: Stage, recipe: Recipe, batch_size: int, extras: Extras) -> list[FormulaRow]:
    return stage.rows(batch_size, lambda part: _rows(part, recipe, batch_size, extras))


def _rows(shape: ModelShape, recipe: Recipe, batch_size: int, extras: Extras) -> list[FormulaRow]:
    run = as_run(recipe)
    return [
        *_fixed_rows(shape, recipe, extras),
        *_activation_rows(shape, run, batch_size, extras),
        *(head_rows(shape, run, batch_size, chunked="chunked-loss" in extras) if shape.has_head else []),
        *_batch_data_rows(shape, run, batch_size),
    ]


def usable_bytes(total_bytes: int, headroom: float = DEFAULT_HEADROOM) -> int:
    """What a step may take of a card of `total_bytes`.

    Raises:
        ValueError: a headroom that is no share of the card.
    """
    if not 0 <= headroom < 1:
        raise ValueError(f"headroom must be at least 0 and below 1, not {headroom}")
    return int(total_bytes * (1 - headroom))


def max_batch_size(
    shape: ModelShape,
    recipe: Recipe,
    total_bytes: int,
    headroom: float = DEFAULT_HEADROOM,
    extras: Extras = NO_EXTRAS,
    *,
    beside_bytes: int = 0,
) -> int:
    """The least over the moments of a step of floor((M·(1 − headroom) − fixed) / bytes per sample); 0 for none.

    Args:
        total_bytes: M, the memory of one GPU.
        headroom: share of it to leave free.
        extras: techniques beyond the recipe.
        beside_bytes: what the allocator cannot have of it: the driver's reserve, the CUDA context, workspaces.

    Raises:
        ValueError: a headroom that is no share of the card.
    """
    usable = usable_bytes(total_bytes, headroom) - beside_bytes
    moments = [one for stage in by_stage(shape, recipe, extras) for one in stage.values()]
    return max(0, min((usable - one.fixed_bytes) // one.sample_bytes for one in moments))


def largest_obstacle(prediction: FormulaPrediction, capacity_bytes: int, capacity: str = "of the card's") -> str | None:
    """Why `prediction` exceeds `capacity_bytes`, in one line; None if it fits.

    It names the largest bucket, if that alone is too much, else the fewest that are so together.

    Args:
        capacity: what the message calls the bytes there are.
    """
    if prediction.needed_bytes <= capacity_bytes:
        return None
    needed_by = {**prediction.breakdown.buckets, Bucket.CACHE: prediction.cache_bytes}
    sizes = sorted(needed_by.items(), key=lambda item: -item[1])
    chosen = _fewest_exceeding(sizes, capacity_bytes)
    *others, last = (bucket.title for bucket, _ in chosen)
    needed = format_bytes(sum(size_bytes for _, size_bytes in chosen))
    needs = f"{', '.join(others)} and {last} together need {needed}" if others else f"{last} alone needs {needed}"
    what = "nothing fits" if prediction.batch_size <= 1 else f"batch size {prediction.batch_size} does not fit"
    return f"{what}: {needs} {capacity} {format_bytes(capacity_bytes)}"


def _fewest_exceeding(sizes: Sequence[tuple[Bucket, int]], capacity_bytes: int) -> list[tuple[Bucket, int]]:
    """The largest buckets, as few as exceed the capacity together. `sizes` are in descending order."""
    chosen: list[tuple[Bucket, int]] = []
    for item in sizes:
        chosen.append(item)
        if sum(size_bytes for _, size_bytes in chosen) > capacity_bytes:
            break
    return chosen


def _fixed_rows(shape: ModelShape, recipe: Recipe, extras: Extras) -> list[FormulaRow]:
    if has_own_precision(recipe):
        return engine_rows(shape, recipe, offloaded="offload-optimizer" in extras)
    weights = adapters.weights(shape, recipe)
    trained = _values(weights.trained)
    storage = PRECISION_RECORDS[recipe.precision]
    updated = adapters.as_trained(recipe)
    kept = PRECISION_RECORDS[updated.precision]
    gradients = fixed_row(Bucket.GRADIENTS, "gradients", (trained, kept.gradient_bytes), kept.source, kept.note)
    rows = [
        *_parameter_rows(shape, recipe),
        *there({Moment.FIRST_BLOCK, Moment.EMBEDDING, Moment.UPDATE}, [gradients]),
        offloaded_row(recipe) if "offload-optimizer" in extras else optimizer_row(updated, weights.trained),
    ]
    rows = [shard(row, recipe) for row in rows]
    rows += _working_copies(shape, recipe)
    head = head_parameters(shape) if trains_head(shape, recipe) else 0
    if head:
        gradient = fixed_row(
            Bucket.GRADIENTS,
            "gradient of the output head",
            (head, storage.gradient_bytes),
            storage.source,
            "the first that backward makes, and often the largest",
        )
        rows += there({Moment.LAST_BLOCK}, [gradient])
        if shape.tied_head and shape.has_embedding:  # then nothing is frozen
            rows.append(tied_gradients_row(head, storage.gradient_bytes))
    if "offload-optimizer" not in extras and (scratch := scratch_row(updated, weights.trained)) is not None:
        rows.append(shard_scratch(scratch, recipe))
    if stage_of(recipe) == 3 and recipe.sharded_over > 1:
        rows.append(_gathered_row(shape, recipe))
    if (unpacked := adapters.dequantization_row(shape, recipe)) is not None:
        rows += there(IN_A_BLOCK, [unpacked])
    if (norm := adapters.norm_row(shape, recipe)) is not None:
        rows += there(IN_A_BLOCK if recipe.recompute == "full" else {Moment.LAST_BLOCK}, [norm])
    return rows


def _parameter_rows(shape: ModelShape, recipe: Recipe) -> list[FormulaRow]:
    if recipe.has_adapters or recipe.has_frozen_layers:
        return adapters.parameter_rows(shape, recipe)
    storage = PRECISION_RECORDS[recipe.precision]
    factors = adapters.trained_parameters(shape, recipe), storage.parameter_bytes
    return [fixed_row(Bucket.PARAMETERS, "parameters", factors, storage.source, "counted from the architecture")]


def _gathered_row(shape: ModelShape, recipe: Recipe) -> FormulaRow:
    width = PRECISION_RECORDS[recipe.precision].parameter_bytes
    return fixed_row(
        Bucket.TEMPORARY,
        "gathered parameters",
        (adapters.gathered_bytes(shape, recipe),) if recipe.has_adapters else (gathered_parameters(shape), width),
        "PyTorch FSDP2",
        "whole on every GPU while needed: all outside the blocks, the block that runs and the one fetched ahead",
    )


def _values(tensors: Sequence[ParameterTensor]) -> int:
    return sum(tensor.values for tensor in tensors)


def _working_copies(shape: ModelShape, recipe: Recipe) -> list[FormulaRow]:
    """The 16-bit weights that autocast makes: cached until the loss is computed, kept by what backward reads."""
    storage = PRECISION_RECORDS[recipe.precision]
    if not storage.working_copy_bytes:
        return []
    copied, in_block = adapters.copied_parameters(shape, recipe)
    row = fixed_row(
        Bucket.ACTIVATIONS,
        "16-bit working copy of the parameters",
        (copied, storage.working_copy_bytes),
        storage.source,
        "made by forward and kept for backward, so with the activations, though the batch does not change it, and "
        "whole on every GPU however the weights are sharded; embeddings and experts are used in fp32 and not copied",
    )
    if only_head(recipe):  # nothing below asks for a gradient, which the weight would be read for
        return there({Moment.LOSS}, [row])
    if recipe.recompute != "full":
        return there(FORWARD_ENDS, [row])
    again = fixed_row(
        Bucket.ACTIVATIONS,
        "16-bit working copy, one block while recomputed",
        (in_block, storage.working_copy_bytes),
        storage.source,
        "with full recompute the cache goes with the loss, and backward copies a block's weights once more",
    )
    if recipe.has_adapters:  # the cache is for weights that have a gradient
        return there(IN_A_BLOCK, [again])
    return [*there({Moment.LOSS}, [row]), *there(IN_A_BLOCK, [again])]


def _activation_rows(shape: ModelShape, recipe: Recipe, batch_size: int, extras: Extras) -> list[FormulaRow]:
    after, frozen = tail(shape, recipe), frozen_blocks(shape, recipe)
    if shape.record.has_attention:
        offloaded = "offload-activations" in extras
        rows = transformer.activation_rows(after, recipe, batch_size, offloaded=offloaded)
    elif shape.record.has_batch_norm:
        rows = convnet.activation_rows(shape, recipe, batch_size, frozen)
    else:
        rows = mlp.activation_rows(after, recipe, batch_size)
    return [*rows, *frozen_block_rows(shape, recipe, batch_size)] if frozen else rows


def _batch_data_rows(shape: ModelShape, recipe: Recipe, batch_size: int) -> list[FormulaRow]:
    """Inputs in the dtype of the weights that they meet, or int64 ids; and targets, int64."""
    width = PRECISION_RECORDS[recipe.precision].parameter_bytes
    inputs: tuple[int, ...]
    targets: tuple[int, ...] = (batch_size, _ID_BYTES)
    if shape.record.inputs == "tokens":
        name, inputs = "token ids", (batch_size, shape.seq_len, _ID_BYTES)
        targets = inputs if shape.record.predicts_tokens else targets
    elif shape.record.inputs == "features":
        name, inputs = "features", (batch_size, shape.inputs, width)
    else:
        name, inputs = "images", (batch_size, _COLOURS, shape.image_size, shape.image_size, width)
    return [
        batch_row(Bucket.BATCH_DATA, name, inputs, TEXTBOOK),
        batch_row(Bucket.BATCH_DATA, "targets", targets, TEXTBOOK, "int64"),
    ]
