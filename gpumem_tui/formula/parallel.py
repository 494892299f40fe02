"""The network cut over GPUs: tensor, sequence, context, expert and pipeline parallel, in closed form.

Tensor parallel cuts every block's matrices, by heads and by the feed-forward's width, and the vocabulary (Shoeybi et
al. 2019, Megatron-LM); what is between them is whole on every GPU, unless sequence parallel cuts that as well: a
block's activations then are 1/t (Korthikanti et al. 2022, table 2), but for what PyTorch keeps gathered. Context
parallel cuts the sequence everywhere; keys and values go round (Liu et al. 2023). Expert parallel spreads a block's
experts over GPUs that hold all else alike, and tokens are sent to their experts and back (Lepikhin et al. 2020).
Pipeline parallel lays the blocks over GPUs one after another; how many micro-batches' activations a GPU keeps is its
schedule's: with 1F1B p less its place, with GPipe all (Narayanan et al. 2021, section 2.2), interleaved 1 + (p −
1)/(p·v) of the whole network's (Korthikanti et al. 2022, section 4.2.3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.activations import activation_rows
from gpumem_tui.formula.blocks import projection_inputs
from gpumem_tui.formula.fixed import fixed_rows, sharded_buckets
from gpumem_tui.formula.recipe import NO_EXTRAS, Extras, Recipe
from gpumem_tui.formula.resolved import Resolved, resolve
from gpumem_tui.formula.rows import (
    ALWAYS,
    FIRST_BLOCK,
    FORWARD_ENDS,
    IN_A_BLOCK,
    ONE_BLOCK,
    THE_FIRST_BLOCK,
    FormulaRow,
    row,
)
from gpumem_tui.memory import Bucket

_HEAD = "output head"
_RING_BUFFERS = 2


@dataclass(frozen=True, eq=False)
class PipelineStage:
    """The part of a network that one GPU holds, of the GPUs that hold a copy of it together.

    Attributes:
        share: its share of its stage's part of the network.
        uncut: that part, were there no tensor parallel.
        unspread: its share with all of its experts; None where they are not spread.
        place: its stage's, from 0.
    """

    share: Resolved
    uncut: Resolved
    place: int
    unspread: Resolved | None = None

    def rows(self, batch_size: int) -> list[FormulaRow]:
        """Return every row of this GPU. `batch_size`: samples of one micro-batch."""
        recipe = self.share.recipe
        rows = _rows(self.share, batch_size)
        if self.unspread is not None:
            rows = [*_spread(rows, _rows(self.unspread, batch_size), self.share), _sent_row(self.share, batch_size)]
        if recipe.model_parallel == 1:
            return rows
        if recipe.sequence_parallel:
            whole = [one for one in _rows(self.uncut, batch_size) if _is_of_blocks(one)]
            rows = [one for one in rows if not _is_of_blocks(one)]
            rows += [one.over(recipe.tensor_parallel, "Korthikanti et al. 2022") for one in whole]
            rows += _gathered_rows(self.uncut, batch_size)
        if recipe.pipeline_parallel > 1:
            kept, of = micro_batches_kept(recipe, self.place)
            rows = [_times(one, kept, of) if _waits_for_backward(one, recipe) else one for one in rows]
            # Gradients of earlier micro-batches are there at every moment.
            rows = [one for one in rows if one.bucket is not Bucket.GRADIENTS or one.name == "gradients"]
            rows = [replace(one, moments=ALWAYS) if one.bucket is Bucket.GRADIENTS else one for one in rows]
        return [*rows, *_ring_rows(self.share, batch_size)]


def _rows(r: Resolved, batch_size: int) -> list[FormulaRow]:
    """Return every row of a network that one GPU runs alone."""
    return [*fixed_rows(r), *activation_rows(r, batch_size)]


@lru_cache(1024)
def stages(shape: ModelShape, recipe: Recipe, extras: Extras = NO_EXTRAS) -> tuple[PipelineStage, ...]:
    """Return a GPU of each stage that can need the most: of a pipeline the first and the last, else the only one.

    The stages between have no more blocks than the first, fewer micro-batches and nothing outside the blocks.
    """
    return tuple(_stage(shape, recipe, extras, place) for place in sorted({0, recipe.pipeline_parallel - 1}))


def _stage(shape: ModelShape, recipe: Recipe, extras: Extras, place: int) -> PipelineStage:
    part = _part(shape, recipe, place)
    cut = _cut(part, recipe.tensor_parallel)
    share, uncut = resolve(cut, recipe, extras), resolve(part, recipe, extras)
    if recipe.expert_parallel == 1 or cut.experts is None:
        return PipelineStage(share, uncut, place)
    spread = replace(cut, experts=replace(cut.experts, spread=recipe.expert_parallel))
    return PipelineStage(resolve(spread, recipe, extras), uncut, place, unspread=share)


def micro_batches_kept(recipe: Recipe, place: int) -> tuple[int, int]:
    """Return for how many micro-batches the stage in that place (from 0) keeps activations, as a fraction.

    Interleaved, a stage's blocks come in v pieces, so it is in p·v parts of a micro-batch.
    """
    stages = recipe.pipeline_parallel
    micro_batches = recipe.pipelined
    if recipe.schedule == "gpipe":
        return micro_batches, 1
    if recipe.schedule == "1f1b" or stages == 1:
        return min(micro_batches, stages - place), 1
    pieces = recipe.virtual_stages
    begun = 2 * (stages - place - 1) + (pieces - 1) * stages + 1
    return min(micro_batches * pieces, begun), pieces


def _part(shape: ModelShape, recipe: Recipe, place: int) -> ModelShape:
    """Return the part of the network on one stage, which sees its part of each sequence.

    The first ones have a block more.
    """
    stages = recipe.pipeline_parallel
    part = shape.part
    if stages > 1:
        part = "first" if place == 0 else "last" if place == stages - 1 else "middle"
    layers = shape.layers // stages + (place < shape.layers % stages)
    seq_len = shape.seq_len // recipe.context_parallel
    experts = shape.experts
    if experts is not None and place > 0:
        experts = replace(experts, dense_layers=0)  # the first blocks are the first stage's
    return replace(shape, layers=layers, seq_len=seq_len, part=part, experts=experts)


def _cut(shape: ModelShape, ways: int) -> ModelShape:
    """Return one GPU's share of every block and of the vocabulary; the residual stream is as wide as ever."""
    if ways == 1:
        return shape
    experts = shape.experts
    return replace(
        shape,
        heads=shape.heads // ways,
        kv_heads=shape.kv_heads // ways,
        head_dim=shape.attention_width,
        ffn=shape.ffn // ways,
        vocab=-(-shape.vocab // ways),
        experts=None if experts is None else replace(experts, dense_ffn=experts.dense_ffn // ways),
    )


def _spread(rows: list[FormulaRow], unspread: list[FormulaRow], r: Resolved) -> list[FormulaRow]:
    """Return the rows of spread experts; what sharding divides is as of unspread ones.

    There are fewer of them, over as many fewer GPUs.
    """
    divided, by_name = sharded_buckets(r), {one.name: one for one in unspread}
    return [by_name[one.name] if one.bucket in divided and not one.grows_with_batch else one for one in rows]


def _sent_row(r: Resolved, batch_size: int) -> FormulaRow:
    """Return what goes out and what comes in, of a block: each GPU gets as many tokens as it sends."""
    shape = r.shape
    assert shape.experts is not None
    factors = (2, batch_size, shape.seq_len, shape.experts.active, shape.hidden, r.width)
    return row("tokens on their way to experts", *factors, at=IN_A_BLOCK)


def _gathered_rows(r: Resolved, batch_size: int) -> list[FormulaRow]:
    """Return what PyTorch keeps beyond a GPU's own part of a sequence: the projections' inputs, gathered for them.

    Megatron-LM gathers them again in backward instead (Korthikanti et al. 2022, section 4.2.2).
    """
    shape, ways = r.shape, r.recipe.tensor_parallel
    of_others = batch_size * shape.tokens * shape.hidden * r.width * (ways - 1) // ways
    count, in_head = projection_inputs(r), int(shape.has_head and shape.record.predicts_tokens)
    name = "gathered inputs"
    if r.recipe.recompute == "full":
        outside = row(name, in_head, of_others, at=FORWARD_ENDS)
        return [outside, row(name, count, of_others, at=IN_A_BLOCK, suffix=ONE_BLOCK)]
    whole = row(name, shape.layers * count + in_head, of_others, at=FORWARD_ENDS)
    return [whole, row(name, count, of_others, at=FIRST_BLOCK, suffix=THE_FIRST_BLOCK)]


def _is_of_blocks(one: FormulaRow) -> bool:
    """Return whether sequence parallel cuts the row: all activations but the logits, which are in t parts already."""
    is_activation = one.bucket in (Bucket.ACTIVATIONS, Bucket.TEMPORARY)
    return one.grows_with_batch and is_activation and not one.name.startswith(_HEAD)


def _waits_for_backward(one: FormulaRow, recipe: Recipe) -> bool:
    """Return whether there is one for each micro-batch that has run forward.

    With 1F1B the last stage computes a loss only to go backward at once.
    """
    if one.bucket is not Bucket.ACTIVATIONS or not one.grows_with_batch or one.name.endswith(ONE_BLOCK):
        return False
    if one.name.endswith(THE_FIRST_BLOCK):
        return False
    return recipe.schedule == "gpipe" or not one.name.startswith(_HEAD)


def _times(one: FormulaRow, kept: int, of: int) -> FormulaRow:
    if kept == of:
        return one
    times = f"{kept}" if of == 1 else f"{kept}/{of}"
    note = "; ".join(word for word in (one.note, f"of {times} micro-batches that wait for backward") if word)
    size_bytes = -(-one.size_bytes * kept // of)
    expression = f"{times} · {one.expression}"
    return replace(
        one, size_bytes=size_bytes, expression=expression, source=f"{one.source}; Narayanan et al. 2021", note=note
    )


def _ring_rows(r: Resolved, batch_size: int) -> list[FormulaRow]:
    """Return keys and values of another part of the sequence: those that are used and those that come."""
    shape = r.shape
    if r.recipe.context_parallel == 1:
        return []
    values = 2 * shape.kv_heads * shape.attention_width
    return [row("keys and values on their way", _RING_BUFFERS, batch_size, shape.seq_len, values, r.width)]
