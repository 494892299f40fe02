"""Whether the parts of a recipe go together, with each other and with a network, and whether it can be run here."""

from __future__ import annotations

from collections.abc import Iterator

from gpumem_tui.catalog.shapes import ModelShape, ShapeError
from gpumem_tui.formula.recipe import ALL_BUT_HEAD, NOTHING_FROZEN, Recipe
from gpumem_tui.formula.records import OPTIMIZER_RECORDS, SHARDING_RECORDS, has_own_precision
from gpumem_tui.formula.weights import block_count, only_head, targets

_ADAPTERS_UNCUT = "under adapters a network is counted uncut, with --sharding none, zero1, zero2 or zero3"


def check_recipe(recipe: Recipe) -> None:
    """Raise ShapeError where a recipe's parts about adapters do not go together, regardless of the network."""
    if recipe.has_adapters:
        if recipe.has_frozen_layers:
            raise ShapeError("--freeze", "adapters freeze every weight already; take --adapter none")
        if recipe.lora_rank < 1:
            raise ShapeError("--lora-rank", f"must be at least 1, not {recipe.lora_rank}")
        return
    if recipe.base_quantization != "none":
        raise ShapeError(
            "--base-quantization", "weights that are trained cannot be quantized; add --adapter lora to freeze them"
        )
    for name in ("lora_rank", "adapter_dtype", "lora_targets"):
        if getattr(recipe, name) != getattr(Recipe(), name):
            raise ShapeError(_option(name), "all weights are trained, without adapters; add --adapter lora")


def check_adapters(shape: ModelShape, recipe: Recipe) -> None:
    """Raise ShapeError for adapters that this network cannot have."""
    check_recipe(recipe)
    if recipe.has_adapters:
        targets(shape, recipe)


def freeze_fault(shape: ModelShape, recipe: Recipe) -> str | None:
    """Return why this cannot be frozen of the network, and what to do; None if it can."""
    if not recipe.has_frozen_layers:
        return None
    if recipe.pipeline_parallel > 1:
        return "frozen layers are counted without pipeline parallel; take --pipeline-parallel 1"
    blocks = block_count(shape)
    if only_head(recipe):
        if shape.tied_head:
            return f"the head of {shape.name} shares its weight with the embedding; freeze the first {blocks} blocks"
        return None
    if not counts_blocks(recipe.freeze) or int(recipe.freeze) > blocks:
        return f"takes {NOTHING_FROZEN}, {ALL_BUT_HEAD} or how many of the {blocks} blocks of {shape.name}"
    return None


def counts_blocks(freeze: str) -> bool:
    """Return whether it states a number of blocks, from 1 on."""
    return freeze.isdecimal() and int(freeze) > 0


def fault(shape: ModelShape, recipe: Recipe) -> tuple[str, str] | None:
    """Return why the network cannot be cut like that: the option to change, and how; None if it can."""
    return next(_faults(shape, recipe), None)


def _faults(shape: ModelShape, recipe: Recipe) -> Iterator[tuple[str, str]]:
    if recipe.has_adapters and (recipe.model_parallel > 1 or has_own_precision(recipe)):
        yield "--adapter", _ADAPTERS_UNCUT
    if reason := freeze_fault(shape, recipe):
        yield "--freeze", reason
    if shape.sinks and recipe.attention in ("flash", "efficient"):
        yield "--attention", f"{shape.name} has attention sinks, which PyTorch's fused kernels do not have; use auto"
    if recipe.channels_last and not shape.record.has_batch_norm:
        yield "--channels-last", f"{shape.name} has no convolutions; leave it out"
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
        taken = f"{recipe.model_parallel}, which tensor, context and pipeline parallel take ({cut})"
        yield "--gpus", f"{recipe.gpus} is no multiple of {taken}"


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


def why_formula_only(shape: ModelShape, recipe: Recipe) -> str:
    """Return why nothing here can run a recipe, so that only the formula answers it, and what does.

    "" where it can be run.
    """
    instead = "a program that does it can be given as a command after --"
    if SHARDING_RECORDS[recipe.sharding].keeps_masters:
        return f"--sharding {recipe.sharding}: formula only: DeepSpeed is no part of PyTorch; {instead}"
    is_sharded = recipe.sharding != "none" and recipe.sharded_over > 1
    if is_sharded and OPTIMIZER_RECORDS[recipe.optimizer].takes_whole_matrices:
        return f"--optimizer {recipe.optimizer}: formula only over several GPUs: torch.optim.Muon takes whole matrices"
    for name in ("context_parallel", "expert_parallel", "pipeline_parallel"):
        if (ways := getattr(recipe, name)) > 1:
            return f"{_option(name)} {ways}: formula only: the catalog's models are not cut so; {instead}"
    if recipe.tensor_parallel > 1 and (reason := _why_not_cut(shape, recipe)):
        return f"--tensor-parallel {recipe.tensor_parallel}: formula only: {reason}; {instead}"
    return ""


def conflict(recipe: Recipe) -> str | None:
    """Return why the parts of a recipe do not go together, though the formula has an answer; None if they do."""
    optimizer, sharding = OPTIMIZER_RECORDS[recipe.optimizer], SHARDING_RECORDS[recipe.sharding]
    if recipe.gpus > 1 and sharding.by_fsdp and not optimizer.runs_on_shards:
        return f"PyTorch's {optimizer.class_names[0]} does not run on parameters that FSDP shards (torch 2.13)"
    if recipe.has_adapters and (recipe.model_parallel > 1 or has_own_precision(recipe)):
        return _ADAPTERS_UNCUT
    return None


def _why_not_cut(shape: ModelShape, recipe: Recipe) -> str:
    """Return why a network is not cut over GPUs by DTensor here; "" where it is."""
    plain = shape.experts is None and shape.latent is None and not (shape.sinks or shape.qk_norm)
    if not shape.record.is_cut or not plain:
        return f"of the catalog's models GPT-2 and dense Llamas are cut, {shape.name} is not"
    if recipe.sharding != "none":
        return f"not together with --sharding {recipe.sharding}"
    if recipe.has_frozen_layers:
        return "not with frozen layers"
    if not OPTIMIZER_RECORDS[recipe.optimizer].updates_parts:
        return f"{recipe.optimizer} does not update parts of matrices (DTensor)"
    if recipe.precision == "amp-fp16":
        return "the loss scaling of amp-fp16 is not followed over parts of gradients"
    return ""


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def cuts(recipe: Recipe) -> list[str]:
    """Return how the network is cut, in words; empty where it is not."""
    named = []
    if recipe.tensor_parallel > 1:
        and_sequence = ", sequence parallel" if recipe.sequence_parallel else ""
        named.append(f"tensor parallel {recipe.tensor_parallel}{and_sequence}")
    if recipe.context_parallel > 1:
        named.append(f"context parallel {recipe.context_parallel}")
    if recipe.expert_parallel > 1:
        named.append(f"expert parallel {recipe.expert_parallel}")
    if recipe.pipeline_parallel > 1:
        named.append(f"pipeline {recipe.pipeline_parallel} ({recipe.schedule}, {recipe.pipelined} micro-batches)")
    return named
