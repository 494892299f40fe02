"""LoRA (Hu et al. 2021) and QLoRA (Dettmers et al. 2023): which weights are trained, which are frozen, and in what.

Beside a frozen matrix W [outputs, inputs] two are trained, A [rank, inputs] and B [outputs, rank]; the layer computes
W x + (alpha / rank) B A x. Gradients and the optimizer's state exist for A and B only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.parameters import ParameterTensor, parameter_tensors
from gpumem_tui.formula.precision import PRECISION_RECORDS
from gpumem_tui.formula.quantization import QUANTIZATION_RECORDS
from gpumem_tui.formula.recipe import ALL_LINEAR, DEFAULT_LORA_RANK, Recipe
from gpumem_tui.formula.rows import FormulaRow, fixed_row
from gpumem_tui.memory import Bucket

SOURCE = "Hu et al. 2021 (LoRA)"


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

    Of a classifier PEFT trains the head as well (`modules_to_save`), which these forms do not count.
    """
    if not shape.record.predicts_tokens:
        return ()
    return tuple(tensor.linear for tensor in parameter_tensors(shape) if tensor.linear)


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
        if recipe.lora_rank < 1:
            raise AdapterError("--lora-rank", f"must be at least 1, not {recipe.lora_rank}")
        return
    if recipe.base_quantization != "none":
        raise AdapterError(
            "--base-quantization", "weights that are trained cannot be quantized; add --adapter lora to freeze them"
        )
    if recipe.lora_rank != DEFAULT_LORA_RANK:
        raise AdapterError("--lora-rank", "all weights are trained, without adapters; add --adapter lora")
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
    tensors = parameter_tensors(shape)
    if not recipe.has_adapters:
        return Weights(tensors)
    at = targets(shape, recipe)
    adapters = tuple(pair for tensor in tensors if tensor.linear in at for pair in _adapter(tensor, recipe.lora_rank))
    if recipe.base_quantization == "none":
        return Weights(adapters, tensors)
    return Weights(
        adapters,
        tuple(tensor for tensor in tensors if not tensor.linear),
        tuple(tensor for tensor in tensors if tensor.linear),
    )


def _adapter(tensor: ParameterTensor, rank: int) -> Iterator[ParameterTensor]:
    outputs, inputs = tensor.dims
    yield ParameterTensor((rank, inputs), tensor.copies, tensor.linear)
    yield ParameterTensor((outputs, rank), tensor.copies, tensor.linear)


def trained_parameters(shape: ModelShape, recipe: Recipe) -> int:
    """Values with a gradient: all of the network's, or the adapters'."""
    return _values(weights(shape, recipe).trained)


def unquantized_parameters(shape: ModelShape, recipe: Recipe) -> int:
    """Values that are kept as the precision has it: all but the quantized ones, adapters included."""
    found = weights(shape, recipe)
    return _values((*found.trained, *found.frozen))


def unquantized_in_block(shape: ModelShape, recipe: Recipe) -> int:
    """Those of one transformer block."""
    without = replace(shape, layers=shape.layers - 1)
    return unquantized_parameters(shape, recipe) - unquantized_parameters(without, recipe)


def kept_bytes(shape: ModelShape, recipe: Recipe) -> int:
    """Bytes of all weights, frozen, quantized and trained, unsharded."""
    found, width = weights(shape, recipe), PRECISION_RECORDS[recipe.precision].parameter_bytes
    return width * _values((*found.trained, *found.frozen)) + _quantized_bytes(found.quantized, recipe)


def parameter_rows(shape: ModelShape, recipe: Recipe) -> list[FormulaRow]:
    """The weights of a network with adapters, unsharded: frozen, quantized, and the adapters themselves."""
    found, storage = weights(shape, recipe), PRECISION_RECORDS[recipe.precision]
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
            "adapters",
            (_values(found.trained), storage.parameter_bytes),
            SOURCE,
            f"rank {recipe.lora_rank} beside {recipe.lora_targets}",
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


def gathered_bytes(shape: ModelShape, recipe: Recipe) -> int:
    """What a GPU holds whole at once of a transformer under ZeRO-3: all outside the blocks, and two of these."""
    whole = kept_bytes(shape, recipe)
    one_block = whole - kept_bytes(replace(shape, layers=shape.layers - 1), recipe)
    return whole - max(0, shape.layers - 2) * one_block


def _values(tensors: Iterable[ParameterTensor]) -> int:
    return sum(tensor.values for tensor in tensors)


def _quantized_bytes(tensors: Iterable[ParameterTensor], recipe: Recipe) -> int:
    if recipe.base_quantization == "none":
        return 0
    record = QUANTIZATION_RECORDS[recipe.base_quantization]
    return sum(record.matrix_bytes(tensor.dims[0], tensor.dims[1]) * tensor.copies for tensor in tensors)
