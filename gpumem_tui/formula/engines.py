"""What engines with a mixed precision of their own keep: FSDP2's MixedPrecisionPolicy, and DeepSpeed's ZeRO.

FSDP2 (torch.distributed.fsdp, `_fsdp_collectives.py`): sharded weights, gradients and state in fp32; the weights are
gathered in 16 bits, and gradients made in 16 bits are reduced in fp32.

DeepSpeed (`deepspeed/runtime/zero/stage_1_and_2.py`, `stage3.py` and `config.py`, August 2026, with its defaults):
weights and gradients in 16 bits, an fp32 copy of this GPU's weights beside Adam's moments, this GPU's gradients in fp32
for the update, and a bucket of 5·10^8 gradients on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpumem_tui.formula.optimizers import offloaded_row, optimizer_row
from gpumem_tui.formula.parameters import ParameterTensor
from gpumem_tui.formula.precision import PRECISION_RECORDS
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.rows import FormulaRow, fixed_row
from gpumem_tui.formula.sharding import SHARDING_RECORDS, shard
from gpumem_tui.memory import Bucket

REDUCE_BUCKET = 500_000_000
"""`reduce_bucket_size`: gradients that DeepSpeed sums at once."""
SUB_GROUP = 1_000_000_000
"""`sub_group_size`: weights that DeepSpeed's ZeRO-3 updates at once."""
LIVE_PARAMETERS = 1_000_000_000
"""`stage3_max_live_parameters`: weights that ZeRO-3 keeps gathered at most."""
_FP32 = 4
_FSDP2_POLICY = "FSDP2 with MixedPrecisionPolicy(param_dtype=16 bits, reduce_dtype=float32)"


def engine_rows(
    tensors: Sequence[ParameterTensor], recipe: Recipe, gathered: int, *, offloaded: bool
) -> list[FormulaRow]:
    """The fixed memory of one GPU under a sharding that has its own precision.

    Args:
        tensors: all weights of this GPU's part of the network.
        gathered: weights that are whole on the GPU at once, if all are sharded by block.
        offloaded: the optimizer's state lies in host memory.
    """
    if SHARDING_RECORDS[recipe.sharding].keeps_masters:
        return _deepspeed_rows(tensors, recipe, offloaded=offloaded)
    parameters = sum(tensor.values for tensor in tensors)
    width = PRECISION_RECORDS[recipe.precision].compute_bytes
    rows = [
        fixed_row(Bucket.PARAMETERS, "parameters", (parameters, _FP32), _FSDP2_POLICY, "sharded in fp32"),
        fixed_row(Bucket.GRADIENTS, "gradients", (parameters, _FP32), _FSDP2_POLICY, "reduced and kept in fp32"),
        offloaded_row(recipe) if offloaded else optimizer_row(recipe, tensors),
    ]
    note = "whole in 16 bits while needed: all outside the blocks, the block that runs and the one fetched ahead"
    whole = fixed_row(Bucket.TEMPORARY, "gathered parameters", (gathered, width), _FSDP2_POLICY, note)
    return [*(shard(row, recipe) for row in rows), whole]


def _deepspeed_rows(tensors: Sequence[ParameterTensor], recipe: Recipe, *, offloaded: bool) -> list[FormulaRow]:
    record = SHARDING_RECORDS[recipe.sharding]
    parameters = sum(tensor.values for tensor in tensors)
    width = PRECISION_RECORDS[recipe.precision].compute_bytes
    share = -(-parameters // recipe.sharded_over)
    rows = [
        fixed_row(Bucket.PARAMETERS, "parameters", (parameters, width), record.source, "those that the network runs"),
        fixed_row(Bucket.GRADIENTS, "gradients", (parameters, width), record.source, "in the format of the network; "
                  "data_types.grad_accum_dtype fp32 is not counted"),
    ]  # fmt: skip
    if offloaded:
        rows.append(offloaded_row(recipe))
    else:
        masters = (parameters, _FP32)
        note = "a copy of this GPU's weights, which the optimizer updates; made for fp32 weights too"
        rows.append(fixed_row(Bucket.OPTIMIZER, "fp32 master weights", masters, record.source, note))
        rows.append(optimizer_row(replace(recipe, precision="fp32"), tensors))
    rows = [shard(row, recipe) for row in rows]
    if not offloaded:
        updated = min(share, SUB_GROUP) if record.stage == 3 else share
        note = "of the weights that are updated at once, until they are"
        rows.append(fixed_row(Bucket.TEMPORARY, "fp32 gradients for the update", (updated, _FP32), record.source, note))
    note = "reduce_bucket_size, 5e8 by default, whatever the model"
    rows.append(fixed_row(Bucket.TEMPORARY, "gradients being summed", (REDUCE_BUCKET, width), record.source, note))
    if record.stage == 3:
        live = min(parameters, LIVE_PARAMETERS)
        note = "stage3_max_live_parameters, 1e9 by default"
        rows.append(fixed_row(Bucket.TEMPORARY, "gathered parameters", (live, width), record.source, note))
    return rows
