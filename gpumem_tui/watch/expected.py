"""What the formula expects of a process that trains, to stand beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.predict import FormulaPrediction, predict
from gpumem_tui.formula.recipe import SHARDINGS, Optimizer, Precision, Recipe
from gpumem_tui.memory import Bucket, Unknown
from gpumem_tui.monitor.snapshot import Reading
from gpumem_tui.watch.documents import Trained
from gpumem_tui.watch.shape import class_name, derive

FIXED = (Bucket.PARAMETERS, Bucket.GRADIENTS, Bucket.OPTIMIZER)
"""The buckets that do not depend on the batch, and that a probe measures."""

_OPTIMIZERS: Mapping[str, Optimizer] = MappingProxyType(
    {
        "AdamW": "adamw",
        "Adam": "adam",
        "SGD": "sgd",
        "Adafactor": "adafactor",
        "Adagrad": "adagrad",
        "RMSprop": "rmsprop",
        "Lion": "lion",
        "AdamW8bit": "adamw-8bit",
        "PagedAdamW8bit": "adamw-8bit",
    }
)
_PRECISIONS: Mapping[str, Precision] = MappingProxyType({"float32": "fp32", "bfloat16": "bf16"})


@dataclass(frozen=True)
class Expected:
    """A model and a recipe for the formula, with what had to be assumed for them, one phrase each."""

    shape: ModelShape
    recipe: Recipe
    assumed: tuple[str, ...]

    def at(self, batch_size: int) -> FormulaPrediction:
        """The prediction for a batch size, which a probe does not see."""
        return predict(self.shape, self.recipe, batch_size)

    def samples_held(self, activation_bytes: int) -> int:
        """How many samples' activations these bytes are, by the formula."""
        return round(activation_bytes / self.at(1).activation_bytes_per_sample)


def expect(trained: Trained, found: Mapping[Bucket, int], world_size: int | None) -> Reading[Expected]:
    """The formula's view of what a process trains, or why there is none.

    Args:
        found: the measured bytes of this rank; they tell by which stage of ZeRO the state is sharded, if at all.
        world_size: ranks of the job; None outside of one.
    """
    derived = derive(trained)
    if isinstance(derived, Unknown):
        return derived
    optimizer = _optimizer(trained)
    if isinstance(optimizer, Unknown):
        return optimizer
    precision = _precision(trained)
    if isinstance(precision, Unknown):
        return precision
    recipe = Recipe(precision=precision, optimizer=optimizer)
    assumed = derived.assumed
    if precision == "fp32":
        assumed = (*assumed, "no autocast and no recompute, which parameters do not show")
    if world_size is not None and world_size > 1:
        recipe = _sharded(derived.shape, replace(recipe, gpus=world_size), found)
        assumed = (*assumed, f"sharding {recipe.sharding} over {world_size} GPUs, by the size of the state")
    return Expected(derived.shape, recipe, assumed)


def _optimizer(trained: Trained) -> Reading[Optimizer]:
    names = {class_name(optimizer.name) for optimizer in trained.optimizers}
    if len(names) != 1:
        return Unknown(f"trained by {' and '.join(sorted(names)) or 'no optimizer that was found'}")
    name = names.pop()
    if name not in _OPTIMIZERS:
        return Unknown(f"no formula for the optimizer {name}")
    if name == "SGD" and any(optimizer.options.get("momentum") for optimizer in trained.optimizers):
        return "sgd-momentum"
    return _OPTIMIZERS[name]


def _precision(trained: Trained) -> Reading[Precision]:
    dtypes = {parameter.dtype for model in trained.models for parameter in model.parameters if parameter.trained}
    if len(dtypes) != 1 or not dtypes <= _PRECISIONS.keys():
        return Unknown(f"no formula for parameters in {' and '.join(sorted(dtypes))}")
    return _PRECISIONS[dtypes.pop()]


def _sharded(shape: ModelShape, recipe: Recipe, found: Mapping[Bucket, int]) -> Recipe:
    """The recipe with the sharding whose sizes are nearest to those found."""

    def distance(candidate: Recipe) -> int:
        buckets = predict(shape, candidate, 0).breakdown
        return sum(abs(buckets[bucket] - found[bucket]) for bucket in FIXED if bucket in found)

    return min((replace(recipe, sharding=sharding) for sharding in SHARDINGS), key=distance)
