"""What would make a larger batch fit, computed on this very model, and what each remedy costs."""

from __future__ import annotations

from dataclasses import dataclass

from gpumem_tui.catalog.shapes import Gpu, ModelShape
from gpumem_tui.formula.predict import DEFAULT_HEADROOM, max_batch_size, predict
from gpumem_tui.formula.recipe import Recipe, Setup
from gpumem_tui.formula.techniques import SHARED_BY_DEFAULT, Technique, changes

_WORTHWHILE = 0.01
"""Share of the step that a remedy must save to be worth naming, unless it raises the batch size."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change to the training, and the bytes that it saves.

    Attributes:
        option: as typed on the command line.
        saved_bytes: of the peak at batch size 1, per GPU; negative where a fixed price pays off only at
            larger batches.
        max_batch_size: per GPU, with the change.
        cost: what it costs, in words.
        source: where the cost is from.
        shape, recipe: with the change made.
    """

    name: str
    option: str
    saved_bytes: int
    max_batch_size: int
    cost: str
    source: str
    shape: ModelShape
    recipe: Recipe


def remedies(
    shape: ModelShape,
    recipe: Recipe,
    total_bytes: int,
    headroom: float = DEFAULT_HEADROOM,
    gpu: Gpu | None = None,
    beside_bytes: int = 0,
) -> list[Remedy]:
    """Return every single change of a search's options that helps, the largest batch first, then the most bytes.

    Args:
        total_bytes: memory of one GPU.
        headroom: share of it to leave free.
        gpu: decides the 16-bit format; None for one that has bfloat16.
        beside_bytes: of the GPU, that the allocator cannot have.

    Raises:
        ValueError: a headroom that is no share of the card.
    """
    peak_bytes = predict(shape, recipe, 1).peak_bytes
    fitting = max_batch_size(shape, recipe, total_bytes, headroom, beside_bytes=beside_bytes)
    found = []
    setup = Setup(shape, recipe)
    for change in changes(setup, gpu):
        if not isinstance(change, Technique) or not _offered(change, recipe):
            continue
        new = change.applied(setup)
        saved_bytes = peak_bytes - predict(new.shape, new.recipe, 1).peak_bytes
        new_size = max_batch_size(new.shape, new.recipe, total_bytes, headroom, beside_bytes=beside_bytes)
        if new_size > fitting or saved_bytes >= _WORTHWHILE * peak_bytes:
            remedy = Remedy(
                change.name, change.option, saved_bytes, new_size, change.cost, change.source, new.shape, new.recipe
            )
            found.append(remedy)
    return sorted(found, key=lambda remedy: (-remedy.max_batch_size, -remedy.saved_bytes))


def _offered(change: Technique, recipe: Recipe) -> bool:
    if change.key == "more-gpus":
        return recipe.gpus < SHARED_BY_DEFAULT
    return change.is_remedy
