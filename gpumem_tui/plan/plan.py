"""A plan: one training configuration on one kind of GPU, and the batch that is wanted."""

from __future__ import annotations

from dataclasses import dataclass

from gpumem_tui.catalog.config_file import ModelFile
from gpumem_tui.catalog.shapes import Gpu, ModelShape
from gpumem_tui.formula.extras import NO_EXTRAS, Extras
from gpumem_tui.formula.predict import DEFAULT_HEADROOM
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.plan.goals import NO_GOALS, Goals


@dataclass(frozen=True)
class Plan:
    """What the Plan screen's controls say.

    Attributes:
        batch_size: samples of one forward and backward on one GPU (the micro-batch).
        headroom: share of the GPU that the formula leaves free.
        target_batch: samples wanted per optimizer step over all GPUs; None for none.
        extras: techniques that only the formula knows; a plan with any cannot be traced or searched.
        goals: what it is for; none of that changes what fits.
        model_file: what the model was read from; None for one of the catalog.
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
