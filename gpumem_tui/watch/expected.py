"""The formula's expectation of a process that trains, to show next to the measurement."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from gpumem_tui.catalog.shapes import Gpu, ModelShape
from gpumem_tui.formula.predict import DEFAULT_HEADROOM, FormulaPrediction, at_moment, max_batch_size, predict, terms
from gpumem_tui.formula.recipe import Optimizer, Precision, Recipe, Setup, Sharding
from gpumem_tui.formula.records import OPTIMIZER_RECORDS, PRECISION_RECORDS
from gpumem_tui.formula.remedies import Remedy, remedies
from gpumem_tui.formula.rows import Moment, row
from gpumem_tui.formula.techniques import STAGES
from gpumem_tui.memory import Bucket, Unknown, format_bytes
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.probe.wire import Trained
from gpumem_tui.watch.shape import class_name, derive

FIXED = (Bucket.PARAMETERS, Bucket.GRADIENTS, Bucket.OPTIMIZER)
"""The buckets that do not depend on the batch, and that a probe measures."""

_OPTIMIZERS: Mapping[str, Optimizer] = MappingProxyType(
    {name: key for key, record in OPTIMIZER_RECORDS.items() for name in record.class_names}
)
_SHARDINGS: tuple[Sharding, ...] = ("none", *STAGES)
_PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {record.weights: key for key, record in PRECISION_RECORDS.items() if not record.is_mixed}
)


@dataclass(frozen=True)
class Expected:
    """A model and a recipe for the formula, with what had to be assumed for them, one phrase each.

    Attributes:
        untrained_bytes: of modules next to the model that nothing trains, as found: no formula tells of them.
    """

    shape: ModelShape
    recipe: Recipe
    assumed: tuple[str, ...]
    untrained_bytes: int = 0

    def at(self, batch_size: int) -> FormulaPrediction:
        """Predict for a batch size, which a probe does not see."""
        prediction = predict(self.shape, self.recipe, batch_size)
        if not self.untrained_bytes:
            return prediction
        beside = row("modules that are not trained", self.untrained_bytes)
        return replace(prediction, rows=(beside, *prediction.rows))

    def max_batch_size(self, total_bytes: int) -> int:
        """Return the largest batch that fits on a device of that size, a tenth of it left free."""
        return max_batch_size(self.shape, self.recipe, self._left_bytes(total_bytes))

    def remedies(self, total_bytes: int, gpu: Gpu | None) -> list[Remedy]:
        """List what would make a larger batch fit on such a device, the most useful first."""
        return remedies(Setup(self.shape, self.recipe), self._left_bytes(total_bytes), gpu)

    def _left_bytes(self, total_bytes: int) -> int:
        """Return the size of a device on which, without the untrained modules, as much fits."""
        return max(0, total_bytes - math.ceil(self.untrained_bytes / (1 - DEFAULT_HEADROOM)))

    def samples_held(self, activation_bytes: int) -> int:
        """Return how many samples' activations these bytes are, by the formula."""
        rows = at_moment(terms(self.shape, self.recipe, 1), Moment.LOSS_BACKWARD)
        return round(activation_bytes / sum(row.size_bytes for row in rows if row.grows_with_batch))


def expect(
    trained: Trained, found: Mapping[Bucket, int], world_size: int | None, devices: Collection[int]
) -> Reading[Expected]:
    """Work out the formula's view of what a process trains, or why it is missing.

    Args:
        found: the measured bytes of this rank; they tell by which stage of ZeRO the state is sharded, if at all.
        world_size: ranks of the job; None outside of one.
        devices: those that the prediction is of, as the process numbers them.
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
        others_bytes = sum(one.bytes for one in trained.untrained)
        state = {bucket: size - others_bytes * (bucket is Bucket.PARAMETERS) for bucket, size in found.items()}
        recipe = _sharded(derived.shape, replace(recipe, gpus=world_size), state)
        assumed = (*assumed, f"sharding {recipe.sharding} over {world_size} GPUs, by the size of the state")
    if not trained.complete:
        assumed = (*assumed, "no module besides those found so far: the probe came late; a look finds the others")
    beside = [one for one in trained.untrained if one.device in devices]
    untrained_bytes = sum(one.bytes for one in beside)
    if untrained_bytes:
        names = ", ".join(sorted({class_name(one.name) for one in beside}))
        assumed = (*assumed, f"{format_bytes(untrained_bytes)} of modules that nothing trains ({names}), as found")
    return Expected(derived.shape, recipe, assumed, untrained_bytes)


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
    """Return the recipe with the sharding whose sizes are nearest to those found."""

    def distance(candidate: Recipe) -> int:
        buckets = predict(shape, candidate, 0).breakdown
        return sum(abs(buckets[bucket] - found[bucket]) for bucket in FIXED if bucket in found)

    return min((replace(recipe, sharding=sharding) for sharding in _SHARDINGS), key=distance)
