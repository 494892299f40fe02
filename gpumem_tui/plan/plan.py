"""A plan: one training configuration on one kind of GPU, and a draft of it: what the controls say."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, Protocol, cast

from gpumem_tui.catalog.loader import is_named, models
from gpumem_tui.catalog.shapes import Gpu, ModelFile, ModelShape, ShapeError
from gpumem_tui.formula.predict import DEFAULT_HEADROOM
from gpumem_tui.formula.recipe import NO_EXTRAS, Extras, Recipe
from gpumem_tui.memory import Unknown
from gpumem_tui.plan.goals import NO_GOALS, Goals

SHAPE_LIMITS = {
    "layers": 10_000, "hidden": 1_000_000, "heads": 10_000, "kv_heads": 10_000, "ffn": 10_000_000, "vocab": 10_000_000,
    "seq_len": 10_000_000, "image_size": 10_000,
}  # fmt: skip
"""Fields of a model's shape that can be changed, where its family has them, and the largest value of each: beyond that
nobody trains, and a step takes for ever to trace."""
MOST_GPUS = 100_000


class Subject(Protocol):
    """The subject of a plan, for one GPU: a model with a closed form (`Plan`) or a command (`command.CommandPlan`)."""

    def at(self, batch_size: int) -> Subject:
        """Return the plan at another batch size."""

    @property
    def size(self) -> str:
        """The batch size in words."""

    @property
    def gpu(self) -> Gpu:
        """The GPU that it is planned for."""

    @property
    def batch_size(self) -> int:
        """Samples of one forward and backward on one GPU (the micro-batch)."""

    @property
    def headroom(self) -> float:
        """Share of the GPU that is left free."""


@dataclass(frozen=True)
class Plan:
    """A model, its recipe and the GPUs that are to train it.

    Attributes:
        batch_size: samples of one forward and backward on one GPU (the micro-batch).
        headroom: share of the GPU that the formula leaves free.
        target_batch: samples wanted per optimizer step over all GPUs; None for none.
        extras: techniques that only the formula knows; a plan with any cannot be traced or searched.
        goals: what it is for; none of that changes what fits.
        model_file: what the model was read from; None for one of the catalog.
        how: options that say how it is traced, as they are typed, for the line that opens it again.
    """

    shape: ModelShape
    recipe: Recipe
    gpu: Gpu
    batch_size: int = 1
    headroom: float = DEFAULT_HEADROOM
    target_batch: int | None = None
    extras: Extras = NO_EXTRAS
    goals: Goals = NO_GOALS
    model_file: ModelFile | None = None
    how: tuple[str, ...] = ()

    def at(self, batch_size: int) -> Plan:
        """Return the same plan at another batch size."""
        return replace(self, batch_size=batch_size)

    @property
    def size(self) -> str:
        """The batch size in words."""
        return f"batch {self.batch_size:,}"

    @property
    def pass_samples(self) -> int:
        """Samples of one forward and backward over all GPUs."""
        return self.batch_size * self.recipe.pass_micro_batches

    @property
    def values(self) -> dict[str, Any]:
        """The plan's fields by name."""
        return {one.name: getattr(self, one.name) for one in fields(Plan)}


@dataclass(frozen=True)
class Draft(Plan):
    """A plan as the controls have it, whether or not it can exist: `shape` is the model that was picked.

    Attributes:
        changes: fields of the shape that were set to something else.
    """

    changes: Mapping[str, int] = field(default_factory=dict)

    def shape_value(self, name: str) -> int:
        """Return a field of the shape, following the other changed fields where they go together."""
        try:
            return cast(int, getattr(self.shape.overridden(**self.changes), name))
        except ShapeError:
            return self.changes.get(name, getattr(self.shape, name))


def draft_of(plan: Plan) -> Draft:
    """Return the controls that describe a plan: its model by file or catalog name, with changes where it has any."""
    picked, changes, file = plan.shape, dict[str, int](), plan.model_file
    known = models().get(plan.shape.name) if file is None else file.shape
    if known is not None and known.family == plan.shape.family:
        differing = {
            name: value
            for name in SHAPE_LIMITS
            if has_field(known, name) and (value := getattr(plan.shape, name)) != getattr(known, name)
        }
        with suppress(ShapeError):  # a shape that cannot exist is nothing but itself
            if known.overridden(**differing) == plan.shape:
                picked, changes = known, differing
    return Draft(**{**plan.values, "shape": picked}, changes=changes)


@lru_cache(1024)
def has_field(shape: ModelShape, name: str) -> bool:
    """Return whether a model of this family has the field, so that it can be set."""
    try:
        shape.overridden(**{name: getattr(shape, name)})
    except ShapeError:
        return False
    return True


def device_option(gpu: Gpu) -> str | Unknown:
    """Return a GPU as `--gpu` takes it, or why it cannot be named."""
    if is_named(gpu):
        return f"sim:{gpu.name}"
    if gpu.name.isdigit():
        return gpu.name  # a GPU of this machine, by its index
    return Unknown("the GPU is none of the catalog's, nor one of this machine")
