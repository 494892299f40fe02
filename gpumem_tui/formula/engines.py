"""What engines with a mixed precision of their own keep: FSDP2's MixedPrecisionPolicy, and DeepSpeed's ZeRO.

FSDP2 (torch.distributed.fsdp, `_fsdp_collectives.py`): sharded weights, gradients and state in fp32; the weights are
gathered in 16 bits, and gradients made in 16 bits are reduced in fp32.

DeepSpeed (`deepspeed/runtime/zero/stage_1_and_2.py`, `stage3.py` and `config.py`, August 2026, with its defaults):
weights and gradients in 16 bits, an fp32 copy of this GPU's weights beside Adam's moments, this GPU's gradients in fp32
for the update, and a bucket of 5·10^8 gradients on their way.
"""

from __future__ import annotations

from dataclasses import replace

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.freezing import split, trains_head
from gpumem_tui.formula.optimizers import offloaded_row, optimizer_row, scratch_row
from gpumem_tui.formula.parameters import block_parameters, gathered_parameters, head_parameters
from gpumem_tui.formula.precision import PRECISION_RECORDS
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.rows import ALWAYS, FORWARD_ENDS, IN_A_BLOCK, FormulaRow, Moment, fixed_row, there
from gpumem_tui.formula.sharding import SHARDING_RECORDS, shard, shard_scratch
from gpumem_tui.memory import Bucket

REDUCE_BUCKET = 500_000_000
"""`reduce_bucket_size`: gradients that DeepSpeed sums at once."""
SUB_GROUP = 1_000_000_000
"""`sub_group_size`: weights that DeepSpeed's ZeRO-3 updates at once."""
LIVE_PARAMETERS = 1_000_000_000
"""`stage3_max_live_parameters`: weights that ZeRO-3 keeps gathered at most."""
_FP32 = 4
_PARTITIONED = 3
"""The stage that spreads the weights too."""
_GATHERED_BLOCKS = 2
_WITH_GRADIENTS = frozenset({Moment.FIRST_BLOCK, Moment.UPDATE})
_FSDP2_POLICY = "FSDP2 with MixedPrecisionPolicy(param_dtype=16 bits, reduce_dtype=float32)"


def engine_rows(shape: ModelShape, recipe: Recipe, *, offloaded: bool) -> list[FormulaRow]:
    """The fixed memory of one GPU under a sharding that has its own precision.

    Args:
        shape: this GPU's part of the network.
        offloaded: the optimizer's state lies in host memory.
    """
    if SHARDING_RECORDS[recipe.sharding].keeps_masters:
        return _deepspeed_rows(shape, recipe, offloaded=offloaded)
    return _fsdp2_rows(shape, recipe, offloaded=offloaded)


def _fsdp2_rows(shape: ModelShape, recipe: Recipe, *, offloaded: bool) -> list[FormulaRow]:
    tensors, frozen = split(shape, recipe)
    trained = sum(tensor.values for tensor in tensors)
    parameters = trained + sum(tensor.values for tensor in frozen)
    width = PRECISION_RECORDS[recipe.precision].compute_bytes
    gradients = fixed_row(Bucket.GRADIENTS, "gradients", (trained, _FP32), _FSDP2_POLICY, "reduced and kept in fp32")
    rows = [
        fixed_row(Bucket.PARAMETERS, "parameters", (parameters, _FP32), _FSDP2_POLICY, "sharded in fp32"),
        *there(_WITH_GRADIENTS, [gradients]),
        offloaded_row(recipe) if offloaded else optimizer_row(recipe, tensors),
    ]
    rows = [shard(row, recipe) for row in rows]
    if not offloaded and (scratch := scratch_row(recipe, tensors)) is not None:
        rows.append(shard_scratch(scratch, recipe))
    note = "whole in 16 bits while needed: all outside the blocks, the block that runs and the one fetched ahead"
    gathered = (gathered_parameters(shape), width)
    rows += there(FORWARD_ENDS, [fixed_row(Bucket.TEMPORARY, "gathered parameters", gathered, _FSDP2_POLICY, note)])
    head = (head_parameters(shape) if trains_head(shape, recipe) else 0, width)
    note = "made in 16 bits as backward begins, and reduced at its end with all else outside the blocks"
    made = fixed_row(Bucket.TEMPORARY, "gradient of the output head", head, _FSDP2_POLICY, note)
    outside = max(0, gathered_parameters(shape) - _GATHERED_BLOCKS * block_parameters(shape))
    if recipe.has_frozen_layers:
        outside = min(outside, trained)
    note = "of all outside the blocks, as backward ends: as they were made, and in fp32 to be reduced"
    reduced = (outside, width + _FP32)
    reducing = fixed_row(Bucket.TEMPORARY, "gradients being reduced", reduced, _FSDP2_POLICY, note)
    return [*rows, *there({Moment.LAST_BLOCK}, [made]), *there({Moment.FIRST_BLOCK}, [reducing])]


def _deepspeed_rows(shape: ModelShape, recipe: Recipe, *, offloaded: bool) -> list[FormulaRow]:
    record, (tensors, frozen) = SHARDING_RECORDS[recipe.sharding], split(shape, recipe)
    trained = sum(tensor.values for tensor in tensors)
    parameters = trained + sum(tensor.values for tensor in frozen)
    width = PRECISION_RECORDS[recipe.precision].compute_bytes
    note = "in the format of the network; with data_types.grad_accum_dtype fp32 there are more"
    gradients = fixed_row(Bucket.GRADIENTS, "gradients", (trained, width), record.source, note)
    note = "those that the network runs with"
    rows = [
        fixed_row(Bucket.PARAMETERS, "parameters", (parameters, width), record.source, note),
        *there(ALWAYS if record.stage == _PARTITIONED else {Moment.FIRST_BLOCK}, [gradients]),
    ]
    if offloaded:
        rows.append(offloaded_row(recipe))
    else:
        note = "a copy of this GPU's weights, which the optimizer updates; made for fp32 weights too"
        rows.append(fixed_row(Bucket.OPTIMIZER, "fp32 master weights", (trained, _FP32), record.source, note))
        rows.append(optimizer_row(replace(recipe, precision="fp32"), tensors))
    rows = [shard(row, recipe) for row in rows]
    return [*rows, *_deepspeed_temporaries(parameters, trained, recipe, offloaded=offloaded)]


def _deepspeed_temporaries(parameters: int, trained: int, recipe: Recipe, *, offloaded: bool) -> list[FormulaRow]:
    record, share = SHARDING_RECORDS[recipe.sharding], -(-trained // recipe.sharded_over)
    width = PRECISION_RECORDS[recipe.precision].compute_bytes
    rows = []
    if not offloaded:
        updated = min(share, SUB_GROUP) if record.stage == _PARTITIONED else share
        note = "of the weights that are updated at once, until they are"
        fp32 = fixed_row(Bucket.TEMPORARY, "fp32 gradients for the update", (updated, _FP32), record.source, note)
        rows += there({Moment.UPDATE}, [fp32])
    note = "reduce_bucket_size, 5e8 by default, whatever the model"
    bucket = fixed_row(Bucket.TEMPORARY, "gradients being summed", (REDUCE_BUCKET, width), record.source, note)
    rows += there(IN_A_BLOCK, [bucket])
    if record.stage == _PARTITIONED:
        live = (min(parameters, LIVE_PARAMETERS), width)
        note = "stage3_max_live_parameters, 1e9 by default"
        gathered = fixed_row(Bucket.TEMPORARY, "gathered parameters", live, record.source, note)
        rows += there(FORWARD_ENDS | IN_A_BLOCK, [gathered])
    return rows
