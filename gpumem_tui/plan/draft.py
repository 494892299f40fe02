"""What the Plan screen's controls say, whether or not that can exist."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import cast

from gpumem_tui.catalog.config_file import ModelFile
from gpumem_tui.catalog.loader import models
from gpumem_tui.catalog.shapes import Gpu, ModelShape, ShapeError
from gpumem_tui.formula.extras import NO_EXTRAS, Extras
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.plan.goals import NO_GOALS, Goals
from gpumem_tui.plan.plan import Plan

SHAPE_LIMITS = {
    "layers": 10_000, "hidden": 1_000_000, "heads": 10_000, "kv_heads": 10_000, "ffn": 10_000_000, "vocab": 10_000_000,
    "seq_len": 10_000_000, "image_size": 10_000,
}  # fmt: skip
"""What can be changed of a model's shape, where its family has it, and how large it may be: beyond that nobody trains,
and a step takes for ever to trace."""
MOST_GPUS = 100_000


@dataclass(frozen=True)
class Draft:
    """What the controls say.

    Attributes:
        base: the model that was picked. `changes`: fields of its shape that were set to something else.
        headroom: share of the GPU that the formula leaves free.
        target_batch: samples wanted per optimizer step over all GPUs; None for none.
        extras: techniques that only the formula knows.
        goals: what the plan is for.
        model_file: what `base` was read from; None for a model of the catalog.
    """

    base: ModelShape
    recipe: Recipe
    gpu: Gpu
    batch_size: int
    headroom: float
    target_batch: int | None
    changes: Mapping[str, int] = field(default_factory=dict)
    extras: Extras = NO_EXTRAS
    goals: Goals = NO_GOALS
    model_file: ModelFile | None = None

    @property
    def pass_samples(self) -> int:
        """Samples of one forward and backward over all GPUs."""
        return self.batch_size * self.recipe.data_parallel

    def shape_value(self, name: str) -> int:
        """A field of the shape as the controls have it, followed through from the others where they go together."""
        try:
            return cast(int, getattr(self.base.overridden(**self.changes), name))
        except ShapeError:
            return self.changes.get(name, getattr(self.base, name))


def draft_of(plan: Plan) -> Draft:
    """The controls that describe a plan: its model by file or catalog name, and changes where that is what it is."""
    base, changes, file = plan.shape, dict[str, int](), plan.model_file
    known = models().get(plan.shape.name) if file is None else file.shape
    if known is not None and known.family == plan.shape.family:
        differing = {
            name: value
            for name in SHAPE_LIMITS
            if has_field(known, name) and (value := getattr(plan.shape, name)) != getattr(known, name)
        }
        with suppress(ShapeError):  # a shape that cannot exist is nothing but itself
            if known.overridden(**differing) == plan.shape:
                base, changes = known, differing
    return Draft(
        base,
        plan.recipe,
        plan.gpu,
        plan.batch_size,
        plan.headroom,
        plan.target_batch,
        changes,
        plan.extras,
        plan.goals,
        file,
    )


@lru_cache(1024)
def has_field(shape: ModelShape, name: str) -> bool:
    """Whether a model of this family has the field, so that it can be set."""
    try:
        shape.overridden(**{name: getattr(shape, name)})
    except ShapeError:
        return False
    return True
