"""Memory independent of the batch: weights, gradients, optimizer state, their copies, and engines' buffers of them.

FSDP2 (torch.distributed.fsdp, `_fsdp_collectives.py`) with a MixedPrecisionPolicy: sharded weights, gradients and state
in fp32; the weights are gathered in 16 bits, and gradients made in 16 bits are reduced in fp32.

DeepSpeed's ZeRO (`deepspeed/runtime/zero/stage_1_and_2.py`, `stage3.py` and `config.py`, August 2026, with its
defaults): weights and gradients in 16 bits, an fp32 copy of this GPU's weights next to Adam's moments, this GPU's
gradients in fp32 for the update, and a bucket of 5·10^8 gradients on their way.

The stages of ZeRO: Rajbhandari et al. 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, prod
from types import MappingProxyType

from gpumem_tui.formula.parameters import ParameterTensor
from gpumem_tui.formula.records import FP32_BYTES, QUANTIZATION_RECORDS, ZERO3, OptimizerRecord
from gpumem_tui.formula.resolved import Resolved
from gpumem_tui.formula.rows import (
    ALWAYS,
    AS_BACKWARD_ENDS,
    FIRST_BLOCK,
    FORWARD_ENDS,
    IN_A_BLOCK,
    LAST_BLOCK,
    LOSS,
    ONE_BLOCK,
    UPDATE,
    FormulaRow,
    Moment,
    row,
)
from gpumem_tui.formula.weights import GATHERED_BLOCKS, values_of
from gpumem_tui.memory import Bucket

_BF16_BYTES = 2
_REDUCE_BUCKET = 500_000_000
"""`reduce_bucket_size`: gradients that DeepSpeed sums at once."""
_SUB_GROUP = 1_000_000_000
"""`sub_group_size`: weights that DeepSpeed's ZeRO-3 updates at once."""
_LIVE_PARAMETERS = 1_000_000_000
"""`stage3_max_live_parameters`: weights that ZeRO-3 keeps gathered at most."""
_OFFLOADED = "Rajbhandari et al. 2021 (ZeRO-Infinity); torch.distributed.fsdp, CPUOffloadPolicy"
_FSDP2_POLICY = "FSDP2 with MixedPrecisionPolicy(param_dtype=16 bits, reduce_dtype=float32)"
_SHARDED: tuple[frozenset[Bucket], ...] = (
    frozenset(),
    frozenset({Bucket.OPTIMIZER}),
    frozenset({Bucket.OPTIMIZER, Bucket.GRADIENTS}),
    frozenset({Bucket.OPTIMIZER, Bucket.GRADIENTS, Bucket.PARAMETERS}),
)
"""By stage of ZeRO, the buckets of which each GPU has a share; FSDP2's has a share of all at every stage."""
_BACKWARD_ENDS = FIRST_BLOCK | {Moment.EMBEDDING}


def sharded_buckets(r: Resolved) -> frozenset[Bucket]:
    """Return the buckets whose fixed rows are divided by the number of GPUs."""
    return frozenset() if r.over == 1 else _SHARDED[ZERO3 if r.sharding.by_fsdp else r.sharding.stage]


def fixed_rows(r: Resolved) -> list[FormulaRow]:
    """Return the fixed memory of one GPU that holds the network, or its share of it, by the recipe's sharding."""
    if not r.has_own_precision:
        rows = _usual_rows(r)
    else:
        rows = _deepspeed_rows(r) if r.sharding.keeps_masters else _fsdp2_rows(r)
    if "offload-parameters" not in r.extras or r.sharding.stage < ZERO3 or r.over == 1:
        return rows
    return [_in_host_memory(one) if one.name in _WEIGHTS else one for one in rows]


_WEIGHTS = ("parameters", "frozen parameters", "quantized parameters", "trained parameters", "adapters")


def _in_host_memory(one: FormulaRow) -> FormulaRow:
    """Return a GPU's share of weights that wait in host memory; what is gathered of them is counted by itself."""
    note = "they lie in host memory, but for those that are gathered"
    return replace(one, size_bytes=0, expression=f"0 of {one.expression}", source=_OFFLOADED, note=note)


def _usual_rows(r: Resolved) -> list[FormulaRow]:
    shape, precision, kept = r.shape, r.precision, r.trained_as
    trained = r.counts.trained
    factors = (trained, kept.gradient_bytes)
    rows = [
        *_parameter_rows(r),
        row("gradients", *factors, at=_BACKWARD_ENDS | UPDATE, source=kept.source, note=kept.note),
        _state_row(r, kept.state_bytes),
    ]
    whole = sum(one.size_bytes for one in rows if one.bucket is Bucket.PARAMETERS)
    rows = [_shared(one, r) for one in rows] + _working_copies(r)
    if r.counts.head:
        factors = (r.counts.head, precision.gradient_bytes)
        first = row("gradient of the output head", *factors, at=LAST_BLOCK, source=precision.source)
        on_its_way = Bucket.GRADIENTS in sharded_buckets(r)  # of which a share stays
        rows.append(replace(first, bucket=Bucket.TEMPORARY) if on_its_way else first)
        if shape.tied_head and shape.has_embedding:  # then nothing is frozen
            at = frozenset({Moment.EMBEDDING})
            rows.append(row("gradients of the tied embedding", 2, *factors, at=at))
    rows += _scratch_rows(r, kept.state_bytes)
    return [*rows, *_exchange_rows(r, whole), *_adapter_rows(r)]


def _exchange_rows(r: Resolved, whole_bytes: int) -> Iterator[FormulaRow]:
    """Yield what PyTorch's engines hold to exchange weights and gradients, where `whole_bytes` are all the weights.

    ZeRO-1's DistributedDataParallel has a buffer for all gradients as long as it lives. FSDP2 gathers weights until
    backward is past them, and none for the update (torch/distributed/fsdp/_fully_shard, `_fsdp_collectives.py`).
    """
    if r.over == 1 or not r.sharding.stage:
        return
    if not r.sharding.by_fsdp:
        yield row("gradients being exchanged", r.counts.trained, r.trained_as.gradient_bytes)
        return
    some = (r.counts.gathered_bytes,) if r.recipe.has_adapters else (r.counts.gathered, r.precision.parameter_bytes)
    if r.sharding.stage == ZERO3:
        yield row("gathered parameters", *some, at=ALWAYS - UPDATE)
    else:
        note = "whole on every GPU from forward on, until backward is past them"
        yield row("gathered parameters", whole_bytes, at=ALWAYS - UPDATE - _BACKWARD_ENDS, note=note)
        yield row("gathered parameters", *some, at=_BACKWARD_ENDS, suffix=AS_BACKWARD_ENDS)
    if not r.recipe.has_adapters:
        yield from _flat_rows(r, 2 if r.sharding.stage == ZERO3 else 1, r.precision.gradient_bytes)


def _flat_rows(r: Resolved, blocks: int, each: int) -> Iterator[FormulaRow]:
    """Yield gradients on their way under FSDP2 next to the weights of two blocks, and in one piece what is sent.

    In the last block of `blocks` blocks; as backward ends of what is outside of them, where that is more.
    """
    block, outside = r.counts.block, _outside(r)
    yield row("gradients being reduced", blocks, block, each, at=LAST_BLOCK)
    yield row(
        "gradients being reduced", max(2 * block, outside - 2 * block), each, at=FIRST_BLOCK, suffix=AS_BACKWARD_ENDS
    )


def _outside(r: Resolved) -> int:
    """Return how many weights are gathered that lie outside the blocks, of frozen ones those that are trained."""
    outside = max(0, r.counts.gathered - GATHERED_BLOCKS * r.counts.block)
    return min(outside, r.counts.trained) if r.recipe.has_frozen_layers else outside


def _shared(one: FormulaRow, r: Resolved) -> FormulaRow:
    """Return one GPU's share of a fixed row, where its bucket is shared."""
    return _share(one, r, "Rajbhandari et al. 2020") if one.bucket in sharded_buckets(r) else one


def _share(one: FormulaRow, r: Resolved, source: str = "") -> FormulaRow:
    """Return one GPU's share; of ZeroRedundancyOptimizer, which spreads whole tensors, at least the largest one's."""
    share = one.over(r.over, source)
    largest = 0 if r.sharding.by_fsdp or r.sharding.keeps_masters else max(prod(one.dims) for one in r.weights.trained)
    size_bytes = -(-one.size_bytes * largest // r.counts.trained)
    if size_bytes <= share.size_bytes:
        return share
    return replace(share, size_bytes=size_bytes, expression=f"{one.expression} · {largest:,} / {r.counts.trained:,}")


# Weights


def _parameter_rows(r: Resolved) -> list[FormulaRow]:
    """Return the weights, unsharded: all, or what is frozen, quantized and trained of them."""
    recipe, found, precision = r.recipe, r.weights, r.precision
    source = precision.source
    if not (recipe.has_adapters or recipe.has_frozen_layers):
        return [row("parameters", r.counts.trained, precision.parameter_bytes, source=source)]
    note = "embeddings, normalizations, biases and the output head" if found.quantized else None
    factors = (r.counts.frozen, precision.parameter_bytes)
    rows = [row("frozen parameters", *factors, source=source, note=note)]
    if found.quantized:
        record = QUANTIZATION_RECORDS[recipe.base_quantization]
        size_bytes, values = r.counts.quantized_bytes, values_of(found.quantized)
        rows.append(
            FormulaRow(
                bucket=Bucket.PARAMETERS,
                name="quantized parameters",
                size_bytes=size_bytes,
                expression=f"{values:,} · {8 * size_bytes / values:.4g} bits",
                source=record.source,
                note=f"{record.title}, with its scales: {record.keeps}",
            )
        )
    factors = (r.counts.trained, r.trained_as.parameter_bytes)
    if recipe.has_frozen_layers:
        return [*rows, row("trained parameters", *factors, source=source, note=recipe.freeze_words)]
    source = "Liu et al. 2024 (DoRA); PEFT, tuners/lora/dora.py" if recipe.adapter == "dora" else ""
    note = f"rank {recipe.lora_rank} on {recipe.lora_targets}"
    return [*rows, row("adapters", *factors, source=source, note=note)]


def _working_copies(r: Resolved) -> list[FormulaRow]:
    """Return the 16-bit weights that autocast makes: cached until the loss is computed, kept by what backward reads.

    Values that backward does not read are temporary, as in a trace (`step.buckets`): forward releases what it made.
    """
    each, source, full = r.precision.working_copy_bytes, r.precision.source, r.recipe.recompute == "full"
    if not each:
        return []
    # Where the head alone is trained nothing below asks for a gradient, which the weight would be read for.
    at = LOSS if r.only_head or full else FORWARD_ENDS
    cached = row("16-bit working copy of the parameters", r.counts.copied, each, at=at, source=source)
    rows = [replace(cached, bucket=Bucket.TEMPORARY) if at == LOSS else cached]
    if r.only_head or not full:
        return rows
    again = row("16-bit working copy", r.counts.copied_in_block, each, at=IN_A_BLOCK, suffix=ONE_BLOCK, source=source)
    return [again] if r.recipe.has_adapters else [*rows, again]  # the cache is for weights that have a gradient


def _adapter_rows(r: Resolved) -> list[FormulaRow]:
    """Return what is made of frozen weights under adapters, one layer at a time.

    The largest quantized matrix is unpacked in the dtype of the step. DoRA makes of its largest layer in every forward
    pass B A by way of an identity matrix, scaled, and added; and W in the adapters' format, where that is another one.
    """
    recipe, rows = r.recipe, []
    if r.weights.quantized:
        largest = max(tensor.values // tensor.copies for tensor in r.weights.quantized)
        rows.append(row("dequantized matrix", largest, r.width, at=IN_A_BLOCK))
    if recipe.adapter == "dora":
        width = r.trained_as.parameter_bytes
        copied = recipe.base_quantization != "none" or width != r.precision.parameter_bytes
        matrices = [tensor.dims for tensor in r.tensors if tensor.linear in r.targets]
        largest = max(inputs * inputs + (3 + copied) * outputs * inputs for outputs, inputs in matrices)
        at = IN_A_BLOCK if recipe.recompute == "full" else LAST_BLOCK
        rows.append(row("norm of W + B A", largest, width, at=at))
    return rows


# The optimizer


def state_factors(record: OptimizerRecord, tensors: Sequence[ParameterTensor], each: int) -> tuple[int, ...]:
    """Return what multiplies to the bytes of an optimizer's state, unsharded. `each`: bytes of one value."""
    if record.states is not None:
        return values_of(tensors), record.states, each
    return (sum(KEPT[record.kept](tensor, each) for tensor in tensors),)


def _state_row(r: Resolved, each: int) -> FormulaRow:
    """Return the optimizer's state, unsharded; offloaded it is in host memory, and the update runs there."""
    record = r.optimizer
    if "offload-optimizer" in r.extras:
        note = f"{r.recipe.optimizer}'s state is in host memory; gradients stay on the GPU until the update"
        return row("optimizer state", 0, source="Ren et al. 2021", note=note)
    factors = state_factors(record, r.weights.trained, each)
    return row("optimizer state", *factors, source=record.source, note=record.note)


def _scratch_rows(r: Resolved, each: int) -> list[FormulaRow]:
    """Return what one update makes on the way: under every stage a GPU updates its share of the state."""
    record, tensors = r.optimizer, r.weights.trained
    if "offload-optimizer" in r.extras:
        return []
    source, note = record.source, "made for all parameters at once and freed; a fused or for-loop optimizer has none"
    if record.takes_whole_matrices:
        factors: tuple[int, ...] = (_muon_scratch_bytes(tensors, each),)
    elif record.of_largest:
        factors = (max(prod(tensor.dims) for tensor in tensors), record.of_largest, each)
        note = "made for one parameter after the other and freed"
    elif record.scratch:
        factors, source = (values_of(tensors), record.scratch, each), ""
    else:
        return []
    made = row("scratch of the update", *factors, at=UPDATE, source=source, note=note)
    return [made if r.over == 1 or not r.sharding.stage else _share(made, r)]


_QUANTIZED_FROM, _QUANTIZATION_BLOCK = 4096, 256
"""bitsandbytes, optim/optimizer.py: `min_8bit_size`, `blocksize`."""


def _eight_bit_bytes(tensor: ParameterTensor, _each: int) -> int:
    """Return two moments, each a byte a value and an fp32 scale a block; of small tensors two fp32 values."""
    values = prod(tensor.dims)
    if values < _QUANTIZED_FROM:
        return 2 * FP32_BYTES * tensor.values
    return 2 * (values + FP32_BYTES * ceil(values / _QUANTIZATION_BLOCK)) * tensor.copies


def _factored_bytes(tensor: ParameterTensor, each: int) -> int:
    """Return what Adafactor keeps: sums over the last and over the last but one dimension."""
    if len(tensor.dims) < 2:
        return tensor.values * each
    *leading, rows, columns = tensor.dims
    return prod(leading) * (rows + columns) * tensor.copies * each


def _by_muon(tensor: ParameterTensor) -> bool:
    """Return whether it is a matrix of the blocks."""
    return bool(tensor.linear) and len(tensor.dims) == 2


def _muon_bytes(tensor: ParameterTensor, each: int) -> int:
    return tensor.values * each * (1 if _by_muon(tensor) else 2)


KEPT: Mapping[str, Callable[[ParameterTensor, int], int]] = MappingProxyType(
    {"row-and-column-sums": _factored_bytes, "in-8-bits": _eight_bit_bytes, "muon": _muon_bytes}
)
"""State of a weight under optimizers that do not keep whole values for each parameter."""


def _muon_scratch_bytes(tensors: Sequence[ParameterTensor], each: int) -> int:
    """Return the larger of AdamW's copy of all that it updates, and of what Muon makes for one matrix.

    That is the update, its 16-bit copy where it is fp32, the next iterate, and two products of the narrow side with
    itself (torch/optim/_muon.py).
    """
    rest = sum(tensor.values for tensor in tensors if not _by_muon(tensor))
    of_matrix = [
        (each + (_BF16_BYTES if each == FP32_BYTES else 0) + _BF16_BYTES) * prod(tensor.dims)
        + 2 * _BF16_BYTES * min(tensor.dims) ** 2
        for tensor in tensors
        if _by_muon(tensor)
    ]
    return max(rest * each, *of_matrix, 0)


# Engines with a mixed precision of their own


def _fsdp2_rows(r: Resolved) -> list[FormulaRow]:
    width, source = r.width, _FSDP2_POLICY
    trained, all_outside = r.counts.trained, r.counts.gathered
    parameters = trained + r.counts.frozen
    rows = [
        row("parameters", parameters, FP32_BYTES, source=source, note="sharded in fp32"),
        row("gradients", trained, FP32_BYTES, at=FIRST_BLOCK | UPDATE, source=source, note="reduced and kept in fp32"),
        _state_row(r, FP32_BYTES),
    ]
    rows = [_shared(one, r) for one in rows] + _scratch_rows(r, FP32_BYTES)
    note = "whole in 16 bits while needed: all outside the blocks, the block that runs and the one fetched ahead"
    rows.append(row("gathered parameters", all_outside, width, at=FORWARD_ENDS, source=source, note=note))
    head = r.counts.head
    note = "made in 16 bits as backward begins, and reduced at its end with all else outside the blocks"
    made = row("gradient of the output head", head, width, at=LAST_BLOCK, source=source, note=note)
    rows.append(replace(made, bucket=Bucket.TEMPORARY))
    rows.append(row("gradients being reduced", r.counts.block, width + FP32_BYTES, at=LAST_BLOCK))
    return [
        *rows,
        row("gradients being reduced", _outside(r), width + FP32_BYTES, at=FIRST_BLOCK, suffix=AS_BACKWARD_ENDS),
    ]


def _deepspeed_rows(r: Resolved) -> list[FormulaRow]:
    width, source, partitioned = r.width, r.sharding.source, r.sharding.stage == ZERO3
    trained, offloaded = r.counts.trained, "offload-optimizer" in r.extras
    parameters = trained + r.counts.frozen
    note = "in the format of the network; with data_types.grad_accum_dtype fp32 there are more"
    at = ALWAYS if partitioned else FIRST_BLOCK
    rows = [
        row("parameters", parameters, width, source=source, note="those that the network runs with"),
        row("gradients", trained, width, at=at, source=source, note=note),
    ]
    if not offloaded:
        rows.append(row("fp32 master weights", trained, FP32_BYTES, source=source))
    rows = [_shared(one, r) for one in (*rows, _state_row(r, FP32_BYTES))]
    if not offloaded:
        share = -(-trained // r.over)
        updated = min(share, _SUB_GROUP) if partitioned else share
        rows.append(row("fp32 gradients for the update", updated, FP32_BYTES, at=UPDATE, source=source))
    rows.append(row("gradients being summed", _REDUCE_BUCKET, width, at=IN_A_BLOCK, source=source))
    if partitioned:
        live, note = min(parameters, _LIVE_PARAMETERS), "stage3_max_live_parameters, 1e9 by default"
        at = FORWARD_ENDS | IN_A_BLOCK
        rows.append(row("gathered parameters", live, width, at=at, source=source, note=note))
    return rows
