"""What each optimizer keeps per parameter, between steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from gpumem_tui.formula.parameters import ParameterTensor
from gpumem_tui.formula.precision import STORAGE
from gpumem_tui.formula.recipe import Optimizer, Recipe
from gpumem_tui.formula.rows import FormulaRow, fixed_row
from gpumem_tui.memory import Bucket


@dataclass(frozen=True, slots=True)
class _Dense:
    """An optimizer with `states` values per parameter. `state_bytes`: None for the precision's own."""

    states: int
    note: str
    source: str
    state_bytes: int | None = None


_DENSE: Mapping[Optimizer, _Dense] = MappingProxyType(
    {
        "adamw": _Dense(2, "first and second moment", "Loshchilov & Hutter 2019; torch.optim.AdamW"),
        "adam": _Dense(2, "first and second moment", "Kingma & Ba 2015; torch.optim.Adam"),
        "sgd": _Dense(0, "keeps nothing between steps", "torch.optim.SGD"),
        "sgd-momentum": _Dense(1, "momentum buffer", "torch.optim.SGD"),
        "adagrad": _Dense(1, "sum of squared gradients", "Duchi et al. 2011; torch.optim.Adagrad"),
        "rmsprop": _Dense(
            1, "running mean of squared gradients; neither centred nor with momentum", "torch.optim.RMSprop"
        ),
        "lion": _Dense(1, "momentum; updates by its sign", "Chen et al. 2023"),
        "adamw-8bit": _Dense(
            2,
            "both moments in 8 bits; the scale of each quantization block and tensors too small to quantize "
            "are left out",
            "Dettmers et al. 2022; bitsandbytes",
            state_bytes=1,
        ),
    }
)


def optimizer_row(recipe: Recipe, tensors: Iterable[ParameterTensor]) -> FormulaRow:
    """The optimizer's state over all `tensors`, unsharded."""
    state_bytes = STORAGE[recipe.precision].state_bytes
    if recipe.optimizer == "adafactor":
        return fixed_row(
            Bucket.OPTIMIZER,
            "optimizer state",
            (sum(factored_values(tensor) for tensor in tensors), state_bytes),
            "Shazeer & Stern 2018; torch.optim.Adafactor",
            "row and column sums of each weight's squared gradients, vectors in full, no momentum; variants "
            "that keep a first moment need about half of Adam's",
        )
    dense = _DENSE[recipe.optimizer]
    parameters = sum(tensor.values for tensor in tensors)
    return fixed_row(
        Bucket.OPTIMIZER,
        "optimizer state",
        (parameters, dense.states, dense.state_bytes or state_bytes),
        dense.source,
        dense.note,
    )


def offloaded_row(recipe: Recipe) -> FormulaRow:
    """The optimizer's state where it lies in host memory, and the update runs there."""
    return fixed_row(
        Bucket.OPTIMIZER,
        "optimizer state",
        (0,),
        "Ren et al. 2021",
        f"{recipe.optimizer}'s state lies in host memory; gradients stay on the GPU until the update",
    )


def factored_values(tensor: ParameterTensor) -> int:
    """Values Adafactor keeps for `tensor`: sums over the last and over the last but one dimension."""
    if len(tensor.dims) < 2:
        return tensor.values
    *leading, rows, columns = tensor.dims
    return prod(leading) * (rows + columns) * tensor.copies
