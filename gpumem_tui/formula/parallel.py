"""The network cut over GPUs: tensor, sequence, context, expert and pipeline parallel, in closed form.

Tensor parallel cuts every block's matrices, by heads and by the feed-forward's width, and the vocabulary (Shoeybi et
al. 2019, Megatron-LM); what lies between them is whole on every GPU, unless sequence parallel cuts that as well: a
block's activations then are 1/t (Korthikanti et al. 2022, table 2), but for what PyTorch keeps gathered. Context
parallel cuts the sequence everywhere; keys and values go round (Liu et al. 2023). Expert parallel spreads a block's
experts over GPUs that hold all else alike, and tokens are sent to their experts and back (Lepikhin et al. 2020).
Pipeline parallel lays the blocks over GPUs one after another; how many micro-batches' activations a GPU keeps is its
schedule's: with 1F1B p less its place, with GPipe all (Narayanan et al. 2021, section 2.2), interleaved 1 + (p −
1)/(p·v) of the whole network's (Korthikanti et al. 2022, section 4.2.3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.blocks import projection_inputs
from gpumem_tui.formula.freezing import freeze_fault
from gpumem_tui.formula.precision import PRECISION_RECORDS
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.rows import ALWAYS, FORWARD_ENDS, IN_A_BLOCK, FormulaRow, Moment, batch_row, there
from gpumem_tui.formula.sharding import SHARDED, SHARDING_RECORDS, has_own_precision
from gpumem_tui.formula.transformer import ONE_BLOCK, THE_FIRST_BLOCK
from gpumem_tui.memory import Bucket

RowsOf = Callable[[ModelShape], list[FormulaRow]]
_HEAD = "output head"
_MEGATRON = "Shoeybi et al. 2019"
_DTENSOR = "PyTorch, torch.distributed.tensor.parallel"
_RING_BUFFERS = 2


def fault(shape: ModelShape, recipe: Recipe) -> tuple[str, str] | None:
    """Why the network cannot be cut like that: the option to change, and how; None if it can."""
    return next(_faults(shape, recipe), None)


def _faults(shape: ModelShape, recipe: Recipe) -> Iterator[tuple[str, str]]:
    if recipe.has_adapters and (recipe.model_parallel > 1 or has_own_precision(recipe)):
        yield "--adapter", "under adapters a network is counted uncut, with --sharding none, zero1, zero2 or zero3"
    if reason := freeze_fault(shape, recipe):
        yield "--freeze", reason
    if shape.sinks and recipe.attention in ("flash", "efficient"):
        yield "--attention", f"{shape.name} has attention sinks, which PyTorch's fused kernels do not have; use auto"
    tensor, pipeline, context = recipe.tensor_parallel, recipe.pipeline_parallel, recipe.context_parallel
    for name in ("tensor_parallel", "context_parallel", "pipeline_parallel"):
        if getattr(recipe, name) > 1 and not shape.record.has_attention:
            yield _option(name), f"{shape.name} is no transformer; only their blocks are cut"
    if shape.record.has_attention:
        for what in ("heads", "kv_heads", "ffn"):
            if getattr(shape, what) % tensor:
                counted = f"{getattr(shape, what):,} {what.replace('_', '/').replace('kv', 'key')}"
                yield "--tensor-parallel", f"{tensor} does not divide the {counted} of {shape.name}"
    if recipe.sequence_parallel and tensor == 1:
        yield "--sequence-parallel", "cuts what tensor parallel leaves whole: add --tensor-parallel 2 or more"
    if pipeline > shape.layers > 0:
        yield "--pipeline-parallel", f"{shape.name} has {shape.layers} blocks, too few for {pipeline} stages"
    if recipe.schedule == "interleaved" and shape.layers % (pipeline * recipe.virtual_stages):
        pieces = pipeline * recipe.virtual_stages
        yield "--virtual-stages", f"{shape.layers} blocks cannot be cut into {pieces} equal pieces"
    if context > 1 and (shape.record.inputs != "tokens" or shape.seq_len % context):
        yield "--context-parallel", f"{context} does not divide a sequence of {shape.tokens:,} tokens"
    if context > 1 and recipe.attention == "math":
        yield "--attention", "context parallel goes round with a fused kernel; use auto, flash or efficient"
    yield from _expert_faults(shape, recipe)
    if recipe.gpus % recipe.model_parallel:
        cut = f"{tensor} × {context} × {pipeline}"
        yield (
            "--gpus",
            f"{recipe.gpus} is no multiple of {recipe.model_parallel}, which tensor, context and pipeline "
            f"parallel take ({cut})",
        )


def _expert_faults(shape: ModelShape, recipe: Recipe) -> Iterator[tuple[str, str]]:
    ways, experts = recipe.expert_parallel, shape.experts
    if experts is not None and experts.dense_layers and experts.dense_ffn % recipe.tensor_parallel:
        counted = f"{experts.dense_ffn:,} ffn of the first blocks"
        yield "--tensor-parallel", f"{recipe.tensor_parallel} does not divide the {counted} of {shape.name}"
    if ways == 1:
        return
    if experts is None:
        yield "--expert-parallel", f"{shape.name} has no experts to spread"
    elif experts.count % ways:
        yield "--expert-parallel", f"{ways} does not divide the {experts.count} experts of {shape.name}"
    if recipe.sharded_over % ways:
        alike = f"{recipe.sharded_over} GPUs that hold the same part of the network"
        yield "--expert-parallel", f"experts are spread over {ways} of the {alike}: take --gpus {recipe.least_gpus}"


_OPTIMIZERS_OF_PARTS = (
    "adamw", "adamw-fused", "adamw-for-loop", "adam", "sgd", "sgd-momentum", "rmsprop", "adagrad",
)  # fmt: skip
"""Those that update parts of matrices as they are (DTensor)."""


def why_formula_only(shape: ModelShape, recipe: Recipe) -> str:
    """Why nothing here can run a recipe, so that only the formula answers it, and what does; "" where it can be run."""
    instead = "a program that does it can be given as a command after --"
    if SHARDING_RECORDS[recipe.sharding].keeps_masters:
        return f"--sharding {recipe.sharding}: formula only: DeepSpeed is no part of PyTorch; {instead}"
    if recipe.optimizer == "muon" and recipe.sharding != "none" and recipe.sharded_over > 1:
        return "--optimizer muon: formula only over several GPUs: torch.optim.Muon takes whole matrices"
    for name in ("context_parallel", "expert_parallel", "pipeline_parallel"):
        if (ways := getattr(recipe, name)) > 1:
            return f"{_option(name)} {ways}: formula only: the catalog's models are not cut so; {instead}"
    if recipe.tensor_parallel > 1 and (reason := _why_not_cut(shape, recipe)):
        return f"--tensor-parallel {recipe.tensor_parallel}: formula only: {reason}; {instead}"
    return ""


def _why_not_cut(shape: ModelShape, recipe: Recipe) -> str:
    """Why a network is not cut over GPUs by DTensor here; "" where it is."""
    plain = shape.experts is None and shape.latent is None and not (shape.sinks or shape.qk_norm)
    if shape.family not in ("gpt2", "llama") or not plain:
        return f"of the catalog's models GPT-2 and dense Llamas are cut, {shape.name} is not"
    if recipe.sharding != "none":
        return f"not together with --sharding {recipe.sharding}"
    if recipe.has_frozen_layers:
        return "not with frozen layers"
    if recipe.optimizer not in _OPTIMIZERS_OF_PARTS:
        return f"{recipe.optimizer} does not update parts of matrices (DTensor)"
    if recipe.precision == "amp-fp16":
        return "the loss scaling of amp-fp16 is not followed over parts of gradients"
    return ""


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Stage:
    """One GPU of those that hold a copy of the network together.

    Attributes:
        shape: its share of its stage's part of the network.
        uncut: that part, were there no tensor parallel.
        unspread: its share with all of its experts; None where they are not spread.
        place: its stage's, from 0.
    """

    shape: ModelShape
    uncut: ModelShape
    recipe: Recipe
    place: int
    unspread: ModelShape | None = None

    def rows(self, batch_size: int, rows_of: RowsOf) -> list[FormulaRow]:
        """Every row of this GPU.

        Args:
            batch_size: samples of one micro-batch.
            rows_of: every row of a network that one GPU runs alone.
        """
        recipe = self.recipe
        rows = rows_of(self.shape)
        if self.unspread is not None:
            rows = [*_spread(rows, rows_of(self.unspread), recipe), *_sent_rows(self.shape, recipe, batch_size)]
        if recipe.model_parallel == 1:
            return rows
        if recipe.sequence_parallel:
            activations = [_divided(row, recipe.tensor_parallel) for row in rows_of(self.uncut) if _is_of_blocks(row)]
            rows = [*(row for row in rows if not _is_of_blocks(row)), *activations]
            rows += _gathered_rows(self.uncut, recipe, batch_size)
        if recipe.pipeline_parallel > 1:
            kept, of = micro_batches_kept(recipe, self.place)
            rows = [_times(row, kept, of) if _waits_for_backward(row, recipe) else row for row in rows]
            rows = [_lasting(row) for row in rows if row.bucket is not Bucket.GRADIENTS or row.name == "gradients"]
        return [*rows, *_ring_rows(self.shape, recipe, batch_size)]


@lru_cache(1024)
def stages(shape: ModelShape, recipe: Recipe) -> tuple[Stage, ...]:
    """A GPU of each stage that can need the most: of a pipeline the first and the last, else the only one.

    The stages between have no more blocks than the first, fewer micro-batches and nothing outside the blocks.
    """
    parts = [(place, _stage(shape, recipe, place)) for place in sorted({0, recipe.pipeline_parallel - 1})]
    return tuple(_stage_of(part, recipe, place) for place, part in parts)


def _stage_of(part: ModelShape, recipe: Recipe, place: int) -> Stage:
    cut = _cut(part, recipe.tensor_parallel)
    if recipe.expert_parallel == 1 or cut.experts is None:
        return Stage(cut, part, recipe, place)
    spread = replace(cut, experts=replace(cut.experts, spread=recipe.expert_parallel))
    return Stage(spread, part, recipe, place, unspread=cut)


def micro_batches_kept(recipe: Recipe, place: int) -> tuple[int, int]:
    """For how many micro-batches the stage in that place (from 0) keeps activations, as a fraction's two numbers.

    Interleaved, a stage's blocks come in v pieces, so it is in p·v parts of a micro-batch.
    """
    stages = recipe.pipeline_parallel
    micro_batches = recipe.micro_batches or stages
    if recipe.schedule == "gpipe":
        return micro_batches, 1
    if recipe.schedule == "1f1b" or stages == 1:
        return min(micro_batches, stages - place), 1
    pieces = recipe.virtual_stages
    begun = 2 * (stages - place - 1) + (pieces - 1) * stages + 1
    return min(micro_batches * pieces, begun), pieces


def _stage(shape: ModelShape, recipe: Recipe, place: int) -> ModelShape:
    """The part of the network on one stage, which sees its part of each sequence. The first ones have a block more."""
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
    """One GPU's share of every block and of the vocabulary; the residual stream is as wide as ever."""
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


def _spread(rows: list[FormulaRow], unspread: list[FormulaRow], recipe: Recipe) -> list[FormulaRow]:
    """Of spread experts what sharding divides is as of unspread ones: fewer of them, over as many fewer GPUs."""
    divided = SHARDED[recipe.sharding] if recipe.sharded_over > 1 else frozenset[Bucket]()
    by_name = {row.name: row for row in unspread}
    return [by_name[row.name] if row.bucket in divided and not row.grows_with_batch else row for row in rows]


def _sent_rows(shape: ModelShape, recipe: Recipe, batch_size: int) -> list[FormulaRow]:
    """What goes out and what comes in, of a block: each GPU gets as many tokens as it sends."""
    assert shape.experts is not None
    width = PRECISION_RECORDS[recipe.precision].compute_bytes
    factors = (2, batch_size, shape.seq_len, shape.experts.active, shape.hidden, width)
    note = "of one block: those that go to other GPUs' experts, and those that come"
    row = batch_row(Bucket.TEMPORARY, "tokens on their way to experts", factors, "Lepikhin et al. 2020 (GShard)", note)
    return there(IN_A_BLOCK, [row])


def _gathered_rows(shape: ModelShape, recipe: Recipe, batch_size: int) -> list[FormulaRow]:
    """What PyTorch keeps beyond a GPU's own part of a sequence: the projections' inputs, which are gathered for them.

    Megatron-LM gathers them again in backward instead (Korthikanti et al. 2022, section 4.2.2).
    """
    others, width = recipe.tensor_parallel - 1, PRECISION_RECORDS[recipe.precision].compute_bytes
    of_others = batch_size * shape.tokens * shape.hidden * width * others // recipe.tensor_parallel
    count = projection_inputs(shape, recipe)

    def row(suffix: str, inputs: int) -> list[FormulaRow]:
        note = "of the other GPUs' parts of the sequence, kept by the projections that read them"
        return [batch_row(Bucket.ACTIVATIONS, f"gathered inputs{suffix}", (inputs, of_others), _DTENSOR, note)]

    in_head = int(shape.has_head and shape.record.predicts_tokens)
    if recipe.recompute == "full":
        return [*there(FORWARD_ENDS, row("", in_head)), *there(IN_A_BLOCK, row(ONE_BLOCK, count))]
    whole = row("", shape.layers * count + in_head)
    return [*there(FORWARD_ENDS, whole), *there({Moment.FIRST_BLOCK}, row(THE_FIRST_BLOCK, count))]


def _is_of_blocks(row: FormulaRow) -> bool:
    """Activations that sequence parallel cuts: all but the logits, which are in t parts already."""
    is_activation = row.bucket in (Bucket.ACTIVATIONS, Bucket.TEMPORARY)
    return row.grows_with_batch and is_activation and not row.name.startswith(_HEAD)


def _waits_for_backward(row: FormulaRow, recipe: Recipe) -> bool:
    """Whether there is one for each micro-batch that has run forward. With 1F1B the last stage computes a loss only to
    go backward at once."""
    if row.bucket is not Bucket.ACTIVATIONS or not row.grows_with_batch or row.name.endswith(ONE_BLOCK):
        return False
    if row.name.endswith(THE_FIRST_BLOCK):
        return False
    return recipe.schedule == "gpipe" or not row.name.startswith(_HEAD)


def _lasting(row: FormulaRow) -> FormulaRow:
    """The rows with gradients made permanent: those of earlier micro-batches are there at every moment."""
    return replace(row, moments=ALWAYS) if row.bucket is Bucket.GRADIENTS else row


def _divided(row: FormulaRow, ways: int) -> FormulaRow:
    size_bytes, source = -(-row.size_bytes // ways), f"{row.source}; Korthikanti et al. 2022"
    return replace(row, size_bytes=size_bytes, expression=f"{row.expression} / {ways}", source=source)


def _times(row: FormulaRow, kept: int, of: int) -> FormulaRow:
    if kept == of:
        return row
    times = f"{kept}" if of == 1 else f"{kept}/{of}"
    note = "; ".join(word for word in (row.note, f"of {times} micro-batches that wait for backward") if word)
    size_bytes = -(-row.size_bytes * kept // of)
    expression = f"{times} · {row.expression}"
    return replace(
        row, size_bytes=size_bytes, expression=expression, source=f"{row.source}; Narayanan et al. 2021", note=note
    )


def _ring_rows(shape: ModelShape, recipe: Recipe, batch_size: int) -> list[FormulaRow]:
    """Keys and values of another part of the sequence: those that are used and those that come."""
    if recipe.context_parallel == 1:
        return []
    width = PRECISION_RECORDS[recipe.precision].compute_bytes
    values = 2 * shape.kv_heads * shape.attention_width
    factors = (_RING_BUFFERS, batch_size, shape.seq_len, values, width)
    note = "of one layer: those of another GPU that are used, and those that come"
    return [batch_row(Bucket.TEMPORARY, "keys and values on their way", factors, "Liu et al. 2023", note)]


def parallel_assumptions(recipe: Recipe) -> list[str]:
    """What the answer takes for granted where the network is cut."""
    assumed = []
    if recipe.tensor_parallel > 1:
        assumed.append(f"Tensor parallel cuts blocks and vocabulary ({_MEGATRON}), as PyTorch's DTensor does.")
    if recipe.pipeline_parallel > 1:
        assumed.append(
            "Of the pipeline, the fuller of the first and the last stage is shown; the batch is one micro-batch."
        )
    if recipe.expert_parallel > 1:
        assumed.append("Expert parallel: each GPU holds a share of the experts and gets as many tokens as it sends.")
    if recipe.context_parallel > 1:
        assumed.append("Context parallel: keys and values go round in a ring, one layer's at a time.")
    return assumed


def cuts(recipe: Recipe) -> list[str]:
    """How the network is cut, in words; empty where it is not."""
    named = []
    if recipe.tensor_parallel > 1:
        and_sequence = ", sequence parallel" if recipe.sequence_parallel else ""
        named.append(f"tensor parallel {recipe.tensor_parallel}{and_sequence}")
    if recipe.context_parallel > 1:
        named.append(f"context parallel {recipe.context_parallel}")
    if recipe.expert_parallel > 1:
        named.append(f"expert parallel {recipe.expert_parallel}")
    if recipe.pipeline_parallel > 1:
        micro_batches = recipe.micro_batches or recipe.pipeline_parallel
        named.append(f"pipeline {recipe.pipeline_parallel} ({recipe.schedule}, {micro_batches} micro-batches)")
    return named
