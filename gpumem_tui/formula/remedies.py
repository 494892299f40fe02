"""Remedies that make a larger batch fit, computed for this very model, with the cost of each."""

from __future__ import annotations

from dataclasses import dataclass

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.predict import max_batch_size, predict
from gpumem_tui.formula.recipe import Recipe, Setup
from gpumem_tui.formula.techniques import SHARED_BY_DEFAULT, Technique, changes

_WORTHWHILE = 0.01
"""Share of the step that a remedy must save to be worth naming, unless it raises the batch size."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change to the training, and the bytes that it saves.

    Attributes:
        technique: what is changed, and what that costs.
        saved_bytes: of the peak at batch size 1, per GPU; negative where a fixed price pays off only at
            larger batches.
        max_batch_size: per GPU, with the change.
        setup: with the change made.
    """

    technique: Technique
    saved_bytes: int
    max_batch_size: int
    setup: Setup

    def __str__(self) -> str:
        """Return its name, what to type, and its cost."""
        return f"{self.technique.name} ({self.technique.option}); costs {self.technique.cost}"


def remedies(setup: Setup, total_bytes: int, gpu: Gpu | None = None) -> list[Remedy]:
    """Return every single change of a search's options that helps, the largest batch first, then the most bytes.

    Args:
        total_bytes: memory of one GPU, of which a tenth is left free.
        gpu: decides the 16-bit format; None for one that has bfloat16.
    """
    peak_bytes = predict(setup.shape, setup.recipe, 1).peak_bytes
    fitting = max_batch_size(setup.shape, setup.recipe, total_bytes)
    found = []
    for change in changes(setup, gpu):
        if not isinstance(change, Technique) or not _offered(change, setup.recipe):
            continue
        new = change.applied(setup)
        saved_bytes = peak_bytes - predict(new.shape, new.recipe, 1).peak_bytes
        new_size = max_batch_size(new.shape, new.recipe, total_bytes)
        if new_size > fitting or saved_bytes >= _WORTHWHILE * peak_bytes:
            found.append(Remedy(change, saved_bytes, new_size, new))
    return sorted(found, key=lambda remedy: (-remedy.max_batch_size, -remedy.saved_bytes))


def _offered(change: Technique, recipe: Recipe) -> bool:
    if change.key == "more-gpus":
        return recipe.gpus < SHARED_BY_DEFAULT
    return change.is_remedy
