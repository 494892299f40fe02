"""Which weights are trained, which are frozen, and in what they are kept: all, the last layers, or adapters.

`--freeze N` freezes what comes before the blocks and the first N of them, as `requires_grad_(False)` on these modules
does. Autograd then keeps nothing in them and stops before them; a head that is tied to the embedding is frozen with it.

LoRA (Hu et al. 2021) and QLoRA (Dettmers et al. 2023): next to a frozen matrix W [outputs, inputs] two are trained, A
[rank, inputs] and B [outputs, rank]; the layer computes W x + (alpha / rank) B A x. DoRA (Liu et al. 2024) scales each
output by a trained magnitude over the norm of its row of W + (alpha / rank) B A, which every forward pass makes anew.
Gradients and the optimizer's state exist for these only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from gpumem_tui.catalog.shapes import ModelShape, ShapeError
from gpumem_tui.formula import convnet
from gpumem_tui.formula.parameters import (
    ParameterTensor,
    count_parameters,
    head_tensors,
    parameter_tensors,
    residual_tensors,
)
from gpumem_tui.formula.recipe import ALL_BUT_HEAD, ALL_LINEAR, NOTHING_FROZEN, Recipe
from gpumem_tui.formula.records import PRECISION_RECORDS, QUANTIZATION_RECORDS

GATHERED_BLOCKS = 2
"""Held whole under ZeRO-3 next to what is outside the blocks: the one that runs and the one fetched ahead."""


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


# Frozen layers


def block_count(shape: ModelShape) -> int:
    """Count the blocks of a network: of a ResNet those of all stages, of an MLP the layers before the last."""
    if shape.record.has_batch_norm:
        return sum(shape.stages)
    return shape.layers if shape.record.has_attention else shape.layers - 1


def frozen_blocks(shape: ModelShape, recipe: Recipe) -> int:
    """Return how many of a network's blocks are frozen, the first ones, and all before them.

    0 if every weight is trained.
    """
    if recipe.freeze == NOTHING_FROZEN:
        return 0
    blocks = block_count(shape)
    return blocks if recipe.freeze == ALL_BUT_HEAD else min(blocks, int(recipe.freeze))


def only_head(recipe: Recipe) -> bool:
    """Return whether the last layer alone is trained."""
    return recipe.freeze == ALL_BUT_HEAD


def tail(shape: ModelShape, recipe: Recipe) -> ModelShape:
    """Return what comes after the frozen blocks, as a network of its own.

    A ResNet is returned whole, because its blocks differ.
    """
    frozen = frozen_blocks(shape, recipe)
    if not recipe.has_frozen_layers or shape.record.has_batch_norm:
        return shape
    if not shape.record.has_attention:
        return replace(shape, layers=shape.layers - frozen, inputs=shape.hidden)
    experts = shape.experts
    if experts is not None:
        experts = replace(experts, dense_layers=max(0, experts.dense_layers - frozen))
    return replace(shape, layers=shape.layers - frozen, experts=experts, part="last")


def trains_head(shape: ModelShape, recipe: Recipe) -> bool:
    """Return whether the output head's weight has a gradient."""
    return not recipe.has_adapters and not (recipe.has_frozen_layers and shape.tied_head)


@lru_cache(256)
def _split(shape: ModelShape, recipe: Recipe) -> tuple[tuple[ParameterTensor, ...], tuple[ParameterTensor, ...]]:
    """Return the weights that are trained, and those that are frozen."""
    every = parameter_tensors(shape)
    if not recipe.has_frozen_layers:
        return every, ()
    if only_head(recipe):
        trained = head_tensors(shape)
    elif shape.record.has_batch_norm:
        trained = residual_tensors(shape, frozen_blocks(shape, recipe))
    else:
        after = tail(shape, recipe)
        tied = head_tensors(shape) if shape.tied_head else ()
        trained = tuple(_without(parameter_tensors(after), tied))
    return trained, tuple(_without(every, trained))


def _without(tensors: Iterable[ParameterTensor], taken: Iterable[ParameterTensor]) -> Iterator[ParameterTensor]:
    """Yield `tensors` with as many copies fewer of each as are `taken`."""
    left: Counter[ParameterTensor] = Counter()
    for tensor in taken:
        left[replace(tensor, copies=1)] += tensor.copies
    for tensor in tensors:
        one = replace(tensor, copies=1)
        gone = min(left[one], tensor.copies)
        left[one] -= gone
        if tensor.copies > gone:
            yield replace(tensor, copies=tensor.copies - gone)


# Adapters


def linear_names(shape: ModelShape) -> tuple[str, ...]:
    """Return what the linear layers of its blocks are called, which may have adapters; of language models only.

    Routers and experts are no linear layers in transformers 5, and PEFT's ``all-linear`` leaves them out.

    PEFT also trains a classifier's head (`modules_to_save`), which these forms do not count.
    """
    if not shape.record.predicts_tokens:
        return ()
    return tuple(dict.fromkeys(tensor.linear for tensor in parameter_tensors(shape) if tensor.linear))


def targets(shape: ModelShape, recipe: Recipe) -> frozenset[str]:
    """Return the linear layers that have adapters.

    Raises:
        ShapeError: the network has none that could, or none of a name.
    """
    names = linear_names(shape)
    if not names:
        raise ShapeError(
            "--adapter", f"{shape.name} is no language model, and of others none are counted; train it in full"
        )
    if recipe.lora_targets == ALL_LINEAR:
        return frozenset(names)
    wanted = [name.strip() for name in recipe.lora_targets.split(",")]
    for name in wanted:
        if name not in names:
            raise ShapeError(
                "--lora-targets",
                f"{shape.name} has no {name or 'nameless layer'}: write {ALL_LINEAR}, or some of {','.join(names)}",
            )
    return frozenset(wanted)


@lru_cache(1024)
def weights(shape: ModelShape, recipe: Recipe) -> Weights:
    """Return every weight of the network, adapters included.

    Raises:
        ShapeError: adapters that this network cannot have.
    """
    if not recipe.has_adapters:
        return Weights(*_split(shape, recipe))
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
    """Return the recipe by which gradients and state of what is trained are kept: adapters may be in fp32 over less."""
    return replace(recipe, precision="fp32") if recipe.adapter_dtype == "fp32" else recipe


def adapter_width(recipe: Recipe) -> int:
    """Return bytes of one value of an adapter."""
    return PRECISION_RECORDS[as_trained(recipe).precision].parameter_bytes


def copies_inputs(recipe: Recipe) -> bool:
    """Return whether each adapter keeps a wider copy of its input, instead of the input; under autocast it does not."""
    storage = PRECISION_RECORDS[recipe.precision]
    return recipe.has_adapters and adapter_width(recipe) > storage.compute_bytes and not storage.is_mixed


# Counts


def kept_by_adapters(shape: ModelShape, recipe: Recipe) -> int:
    """Return the bytes a token that the adapters of one block keep for backward.

    That is the value between the two matrices; a wider copy of the input where adapters are wider than the step, one
    for each (PEFT's `cast_input_dtype`); and with magnitudes what base and adapter made, each to be scaled. A bias is
    taken off
    what the base made, which has its width then: fp32 under autocast (peft/tuners/lora/dora.py, DoraLinearLayer).
    """
    storage, weight = PRECISION_RECORDS[recipe.precision], adapter_width(recipe)
    compute = storage.compute_bytes
    inner = compute if storage.is_mixed else weight
    at = targets(shape, recipe)
    inputs = made = count = 0
    for tensor in parameter_tensors(shape):
        if tensor.linear in at:
            inputs += tensor.dims[1] * tensor.copies
            unbiased = max(compute, storage.parameter_bytes) if tensor.has_bias else compute
            made += tensor.dims[0] * tensor.copies * (unbiased + inner)
            count += tensor.copies
    total = count * recipe.lora_rank * inner
    total += inputs * weight if copies_inputs(recipe) else 0
    total += made if recipe.adapter == "dora" else 0
    return -(-total // shape.layers)


@dataclass(frozen=True, slots=True)
class Counts:
    """Values of a network's weights, as its rows count them.

    Attributes:
        trained, frozen: unquantized values with a gradient, and without one. `quantized_bytes`: bytes of the others.
        head: values of a language model's vocabulary projection if that is trained; else 0.
        copied, copied_in_block: values that autocast casts to 16 bits: in the whole network; in its largest block.
        gathered: parameters unsharded at the same time (ZeRO-3), or at the end of backward (FSDP2 as ZeRO-2); else 0.
        gathered_bytes: their bytes as stored.
        block: values of the largest block; 0 if not needed.
    """

    trained: int
    frozen: int
    quantized_bytes: int
    head: int
    copied: int = 0
    copied_in_block: int = 0
    gathered: int = 0
    gathered_bytes: int = 0
    block: int = 0


def counted(shape: ModelShape, recipe: Recipe, *, copies: bool, gathers: bool) -> Counts:
    """Count the weights of a network.

    Args:
        shape: the network, or a GPU's part of it.
        recipe: shows which of them are trained.
        copies: autocast copies weights.
        gathers: a GPU holds a part of the weights, and gathers what it needs.
    """
    found = weights(shape, recipe)
    copied, in_block = _copied(shape, recipe) if copies else (0, 0)
    part = with_largest_blocks(shape, GATHERED_BLOCKS) if gathers and recipe.has_adapters else None
    return Counts(
        trained=values_of(found.trained),
        frozen=values_of(found.frozen),
        quantized_bytes=quantized_bytes(found.quantized, recipe),
        head=head_parameters(shape) if trains_head(shape, recipe) else 0,
        copied=copied,
        copied_in_block=in_block,
        gathered=gathered_parameters(shape) if gathers else 0,
        gathered_bytes=0 if part is None else kept_bytes(part, recipe),
        block=block_parameters(shape) if gathers else 0,
    )


def gathered_parameters(shape: ModelShape) -> int:
    """Return the most parameters that a GPU holds whole at once under ZeRO-3, as FSDP2 shards by block.

    Weights outside the blocks stay gathered while the blocks run; two blocks are gathered: the one that runs and the
    one fetched ahead.
    """
    if shape.record.has_batch_norm:
        blocks = sorted((_block_parameters(block) for block in convnet.resnet(shape).blocks), reverse=True)
        return count_parameters(shape) - sum(blocks[2:])
    return count_parameters(with_largest_blocks(shape, GATHERED_BLOCKS))


def with_largest_blocks(shape: ModelShape, blocks: int) -> ModelShape:
    """Return the shape cut to its `blocks` largest blocks.

    Blocks with experts count as larger.
    """
    blocks = min(blocks, shape.layers)
    if shape.experts is None:
        return replace(shape, layers=blocks)
    dense = max(0, blocks - (shape.layers - shape.dense_layers))
    return replace(shape, layers=blocks, experts=replace(shape.experts, dense_layers=dense))


def block_parameters(shape: ModelShape) -> int:
    """Return the parameters of one block, the largest where they differ."""
    if shape.record.has_batch_norm:
        return max(_block_parameters(block) for block in convnet.resnet(shape).blocks)
    if shape.experts is not None:
        return count_parameters(with_largest_blocks(shape, 1)) - count_parameters(with_largest_blocks(shape, 0))
    return count_parameters(shape) - count_parameters(replace(shape, layers=shape.layers - 1))


def head_parameters(shape: ModelShape) -> int:
    """Return the weight of a language model's vocabulary projection, tied or not.

    0 for a classifier, whose own is small.
    """
    return shape.vocab * shape.hidden if shape.record.predicts_tokens and shape.has_head else 0


def embedding_parameters(shape: ModelShape) -> int:
    """Return the tables that nothing multiplies with: of tokens unless the head is tied to them, and of positions."""
    if not shape.has_embedding:
        return 0
    if shape.has_patches:
        return shape.tokens * shape.hidden
    if shape.record.inputs != "tokens":
        return 0
    tokens = 0 if shape.tied_head else shape.vocab
    positions = shape.max_seq_len if shape.record.positions == "learned" else 0
    return (tokens + positions) * shape.hidden


def _block_parameters(block: convnet.ConvBlock) -> int:
    return sum(conv.outputs * (conv.inputs * conv.kernel**2 + 2) for conv in block.convolutions)


def trained_parameters(shape: ModelShape, recipe: Recipe) -> int:
    """Return values with a gradient: all of the network's, or the adapters'."""
    return values_of(weights(shape, recipe).trained)


def _copied(shape: ModelShape, recipe: Recipe) -> tuple[int, int]:
    """Return values that autocast copies in 16 bits: of the network, and of one block, the largest.

    Embeddings are looked up, and grouped products of experts run, in the dtype of the weights. Frozen layers keep
    the copies that backward needs: a tied head's.
    """

    def copied(part: ModelShape) -> int:
        found = weights(part, replace(recipe, freeze=NOTHING_FROZEN))
        return values_of(tensor for tensor in (*found.trained, *found.frozen) if not tensor.is_experts)

    if shape.record.has_batch_norm:
        in_block = block_parameters(shape)
    else:
        in_block = copied(with_largest_blocks(shape, 1)) - copied(with_largest_blocks(shape, 0))
    if not recipe.has_frozen_layers:
        return copied(shape) - embedding_parameters(shape), in_block
    kept_head = 0 if trains_head(shape, recipe) else head_parameters(shape)
    whole = kept_head + values_of(tensor for tensor in weights(shape, recipe).trained if not tensor.is_experts)
    return whole, in_block if frozen_blocks(shape, recipe) < block_count(shape) else 0


def kept_bytes(shape: ModelShape, recipe: Recipe) -> int:
    """Return bytes of all weights, frozen, quantized and trained, unsharded."""
    found, width = weights(shape, recipe), PRECISION_RECORDS[recipe.precision].parameter_bytes
    adapters = adapter_width(recipe) * values_of(found.trained)
    return adapters + width * values_of(found.frozen) + quantized_bytes(found.quantized, recipe)


def values_of(tensors: Iterable[ParameterTensor]) -> int:
    """Return the values of all tensors together."""
    return sum(tensor.values for tensor in tensors)


def quantized_bytes(tensors: Iterable[ParameterTensor], recipe: Recipe) -> int:
    """Return the bytes of tensors in the recipe's quantization."""
    if recipe.base_quantization == "none":
        return 0
    record = QUANTIZATION_RECORDS[recipe.base_quantization]
    return sum(record.matrix_bytes(prod(tensor.dims[:-1]), tensor.dims[-1]) * tensor.copies for tensor in tensors)
