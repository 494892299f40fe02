"""LoRA (Hu et al. 2021) and QLoRA (Dettmers et al. 2023): which weights are trained, which are frozen, and in what.

Beside a frozen matrix W [outputs, inputs] two are trained, A [rank, inputs] and B [outputs, rank]; the layer computes
W x + (alpha / rank) B A x. DoRA (Liu et al. 2024) scales each output by a trained magnitude over the norm of its row
of W + (alpha / rank) B A, which every forward pass makes anew. Gradients and the optimizer's state exist for these
only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.freezing import block_count, frozen_blocks, split, trains_head
from gpumem_tui.formula.parameters import (
    GATHERED_BLOCKS,
    ParameterTensor,
    block_parameters,
    embedding_parameters,
    head_parameters,
    parameter_tensors,
    with_largest_blocks,
)
from gpumem_tui.formula.precision import PRECISION_RECORDS
from gpumem_tui.formula.quantization import QUANTIZATION_RECORDS
from gpumem_tui.formula.recipe import ALL_LINEAR, DEFAULT_LORA_RANK, NOTHING_FROZEN, Recipe
from gpumem_tui.formula.rows import FormulaRow, fixed_row
from gpumem_tui.memory import Bucket

SOURCE = "Hu et al. 2021 (LoRA)"
_DORA_SOURCE = "Liu et al. 2024 (DoRA); PEFT, tuners/lora/dora.py"
_FP32_BYTES = 4


class AdapterError(ValueError):
    """Adapters that this network cannot have; `option` is the command line's."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")
        self.option = option


@dataclass(frozen=True, slots=True)
class Weights:
    """The network's weights by what becomes of them.

    Attributes:
        trained: those with a gradient.
        frozen: those without, kept as the precision has it.
        quantized: those without, kept in the recipe's quantization.
    """

    trained: tuple[ParameterTensor, ...]
    frozen: tuple[ParameterTensor, ...] = ()
    quantized: tuple[ParameterTensor, ...] = ()


def linear_names(shape: ModelShape) -> tuple[str, ...]:
    """What the linear layers of its blocks are called, which may have adapters; of language models only.

    Routers and experts are no linear layers in transformers 5, and PEFT's ``all-linear`` leaves them out.

    Of a classifier PEFT trains the head as well (`modules_to_save`), which these forms do not count.
    """
    if not shape.record.predicts_tokens:
        return ()
    return tuple(dict.fromkeys(tensor.linear for tensor in parameter_tensors(shape) if tensor.linear))


def targets(shape: ModelShape, recipe: Recipe) -> frozenset[str]:
    """The linear layers that have adapters.

    Raises:
        AdapterError: the network has none that could, or none of a name.
    """
    names = linear_names(shape)
    if not names:
        raise AdapterError(
            "--adapter", f"{shape.name} is no language model, and of others none are counted; train it in full"
        )
    if recipe.lora_targets == ALL_LINEAR:
        return frozenset(names)
    wanted = [name.strip() for name in recipe.lora_targets.split(",")]
    for name in wanted:
        if name not in names:
            raise AdapterError(
                "--lora-targets",
                f"{shape.name} has no {name or 'layer without a name'}: {ALL_LINEAR}, or some of {','.join(names)}",
            )
    return frozenset(wanted)


def check_recipe(recipe: Recipe) -> None:
    """Raise AdapterError where a recipe's parts about adapters do not go together, whatever the network."""
    if recipe.has_adapters:
        if recipe.has_frozen_layers:
            raise AdapterError("--freeze", "adapters freeze every weight already; take --adapter none")
        if recipe.lora_rank < 1:
            raise AdapterError("--lora-rank", f"must be at least 1, not {recipe.lora_rank}")
        return
    if recipe.base_quantization != "none":
        raise AdapterError(
            "--base-quantization", "weights that are trained cannot be quantized; add --adapter lora to freeze them"
        )
    if recipe.lora_rank != DEFAULT_LORA_RANK:
        raise AdapterError("--lora-rank", "all weights are trained, without adapters; add --adapter lora")
    if recipe.adapter_dtype != "base":
        raise AdapterError("--adapter-dtype", "all weights are trained, without adapters; add --adapter lora")
    if recipe.lora_targets != ALL_LINEAR:
        raise AdapterError("--lora-targets", "all weights are trained, without adapters; add --adapter lora")


def check_adapters(shape: ModelShape, recipe: Recipe) -> None:
    """Raise AdapterError for adapters that this network cannot have."""
    check_recipe(recipe)
    if recipe.has_adapters:
        targets(shape, recipe)


def weights(shape: ModelShape, recipe: Recipe) -> Weights:
    """Every weight of the network, adapters included.

    Raises:
        AdapterError: adapters that this network cannot have.
    """
    if not recipe.has_adapters:
        return Weights(*split(shape, recipe))
    tensors = parameter_tensors(shape)
    at = targets(shape, recipe)
    adapters = tuple(part for tensor in tensors if tensor.linear in at for part in _adapter(tensor, recipe))
    if recipe.base_quantization == "none":
        return Weights(adapters, tensors)
    return Weights(
        adapters,
        tuple(tensor for tensor in tensors if not (tensor.linear or tensor.is_experts)),
        tuple(tensor for tensor in tensors if tensor.linear or tensor.is_experts),
    )


def _adapter(tensor: ParameterTensor, recipe: Recipe) -> Iterator[ParameterTensor]:
    outputs, inputs = tensor.dims
    yield ParameterTensor((recipe.lora_rank, inputs), tensor.copies, tensor.linear)
    yield ParameterTensor((outputs, recipe.lora_rank), tensor.copies, tensor.linear)
    if recipe.adapter == "dora":
        yield ParameterTensor((outputs,), tensor.copies)


def as_trained(recipe: Recipe) -> Recipe:
    """The recipe by which gradients and state of what is trained are kept: adapters may be in fp32 over less."""
    return replace(recipe, precision="fp32") if recipe.adapter_dtype == "fp32" else recipe


def adapter_width(recipe: Recipe) -> int:
    """Bytes of one value of an adapter."""
    return PRECISION_RECORDS[as_trained(recipe).precision].parameter_bytes


def copies_inputs(recipe: Recipe) -> bool:
    """Whether each adapter keeps a wider copy of its input, instead of the input; under autocast it does not."""
    storage = PRECISION_RECORDS[recipe.precision]
    return recipe.has_adapters and adapter_width(recipe) > storage.compute_bytes and not storage.is_mixed


def kept_by_adapters(shape: ModelShape, recipe: Recipe) -> int:
    """Bytes a token that the adapters of one block keep for backward.

    What lies between the two matrices; a wider copy of the input where adapters are wider than the step, one for each
    (PEFT's `cast_input_dtype`); and with magnitudes what base and adapter made, each to be scaled.
    """
    compute, weight = PRECISION_RECORDS[recipe.precision].compute_bytes, adapter_width(recipe)
    inner = compute if PRECISION_RECORDS[recipe.precision].is_mixed else weight
    at = targets(shape, recipe)
    inputs = outputs = count = 0
    for tensor in parameter_tensors(shape):
        if tensor.linear in at:
            inputs += tensor.dims[1] * tensor.copies
            outputs += tensor.dims[0] * tensor.copies
            count += tensor.copies
    total = count * recipe.lora_rank * inner
    total += inputs * weight if copies_inputs(recipe) else 0
    total += outputs * (compute + inner) if recipe.adapter == "dora" else 0
    return -(-total // shape.layers)


def trained_parameters(shape: ModelShape, recipe: Recipe) -> int:
    """Values with a gradient: all of the network's, or the adapters'."""
    return _values(weights(shape, recipe).trained)


def copied_parameters(shape: ModelShape, recipe: Recipe) -> tuple[int, int]:
    """Values that autocast copies in 16 bits: of the network, and of one block, the largest.

    Embeddings are looked up, and grouped products of experts run, in the dtype of the weights. Of frozen layers those
    copies stay that backward needs: a tied head's.
    """

    def copied(part: ModelShape) -> int:
        found = weights(part, replace(recipe, freeze=NOTHING_FROZEN))
        return _values(tensor for tensor in (*found.trained, *found.frozen) if not tensor.is_experts)

    if shape.record.has_batch_norm:
        in_block = block_parameters(shape)
    else:
        in_block = copied(with_largest_blocks(shape, 1)) - copied(with_largest_blocks(shape, 0))
    if not recipe.has_frozen_layers:
        return copied(shape) - embedding_parameters(shape), in_block
    kept_head = 0 if trains_head(shape, recipe) else head_parameters(shape)
    whole = kept_head + _values(tensor for tensor in weights(shape, recipe).trained if not tensor.is_experts)
    return whole, in_block if frozen_blocks(shape, recipe) < block_count(shape) else 0


def kept_bytes(shape: ModelShape, recipe: Recipe) -> int:
    """Bytes of all weights, frozen, quantized and trained, unsharded."""
    found, width = weights(shape, recipe), PRECISION_RECORDS[recipe.precision].parameter_bytes
    adapters = adapter_width(recipe) * _values(found.trained)
    return adapters + width * _values(found.frozen) + _quantized_bytes(found.quantized, recipe)


def parameter_rows(shape: ModelShape, recipe: Recipe) -> list[FormulaRow]:
    """The weights of a network of which some are frozen, unsharded: frozen, quantized, and what is trained."""
    found, storage = weights(shape, recipe), PRECISION_RECORDS[recipe.precision]
    name, source, note = "adapters", SOURCE, f"rank {recipe.lora_rank} beside {recipe.lora_targets}"
    if recipe.has_frozen_layers:
        name, source, note = "trained parameters", storage.source, recipe.freeze_words
    elif recipe.adapter == "dora":
        source = _DORA_SOURCE
    rows = [
        fixed_row(
            Bucket.PARAMETERS,
            "frozen parameters",
            (_values(found.frozen), storage.parameter_bytes),
            storage.source,
            "embeddings, normalizations, biases and the output head" if found.quantized else "no gradient, no state",
        ),
        fixed_row(
            Bucket.PARAMETERS,
            name,
            (_values(found.trained), adapter_width(recipe)),
            source,
            note,
        ),
    ]
    if found.quantized:
        record = QUANTIZATION_RECORDS[recipe.base_quantization]
        size_bytes, values = _quantized_bytes(found.quantized, recipe), _values(found.quantized)
        row = FormulaRow(
            Bucket.PARAMETERS,
            "quantized parameters",
            size_bytes,
            f"{values:,} · {8 * size_bytes / values:.4g} bits",
            record.source,
            f"{record.title}, with its scales: {record.keeps}",
        )
        rows.insert(1, row)
    return rows


def dequantization_row(shape: ModelShape, recipe: Recipe) -> FormulaRow | None:
    """The largest matrix in the dtype of the step: one at a time is unpacked, in forward and again in backward."""
    quantized = weights(shape, recipe).quantized
    if not quantized:
        return None
    largest = max(tensor.values // tensor.copies for tensor in quantized)
    return fixed_row(
        Bucket.TEMPORARY,
        "dequantized matrix",
        (largest, PRECISION_RECORDS[recipe.precision].compute_bytes),
        "bitsandbytes, autograd of its 4-bit product",
        "one at a time, in forward and again in backward",
    )


def norm_row(shape: ModelShape, recipe: Recipe) -> FormulaRow | None:
    """What DoRA makes of its largest layer in every forward pass: B A by way of an identity matrix, scaled, and added.

    W besides in the adapters' format, where that is another one.
    """
    if recipe.adapter != "dora":
        return None
    found, at, width = parameter_tensors(shape), targets(shape, recipe), adapter_width(recipe)
    copied = recipe.base_quantization != "none" or width != PRECISION_RECORDS[recipe.precision].parameter_bytes
    sizes = [
        (tensor.dims[1] * tensor.dims[1] + (3 + copied) * tensor.dims[0] * tensor.dims[1])
        for tensor in found
        if tensor.linear in at
    ]
    return fixed_row(
        Bucket.TEMPORARY, "norm of W + B A", (max(sizes), width), _DORA_SOURCE, "of one layer at a time, in forward"
    )


def gathered_bytes(shape: ModelShape, recipe: Recipe) -> int:
    """What a GPU holds whole at once of a transformer under ZeRO-3: all outside the blocks, and two of these."""
    return kept_bytes(with_largest_blocks(shape, GATHERED_BLOCKS), recipe)


def _values(tensors: Iterable[ParameterTensor]) -> int:
    return sum(tensor.values for tensor in tensors)


def _quantized_bytes(tensors: Iterable[ParameterTensor], recipe: Recipe) -> int:
    if recipe.base_quantization == "none":
        return 0
    record = QUANTIZATION_RECORDS[recipe.base_quantization]
    return sum(record.matrix_bytes(prod(tensor.dims[:-1]), tensor.dims[-1]) * tensor.copies for tensor in tensors)
