"""When nothing fits: what would help most on this very model, and what a search itself can confirm of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpumem_tui.formula.optimizers import OPTIMIZER_RECORDS
from gpumem_tui.formula.predict import largest_obstacle, predict
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.remedies import remedies
from gpumem_tui.memory import Unknown, format_bytes
from gpumem_tui.search.config import SearchConfig

_MOST_SINGLE = 3


@dataclass(frozen=True)
class Advice:
    """One change, or several together. `option`: as typed; `buys` and `cost`: in words."""

    option: str
    buys: str
    cost: str


def obstacle(config: SearchConfig) -> str:
    """What of one sample exceeds the card, by the closed form; empty if nothing does or there is no formula."""
    shape = config.workload.shape
    if shape is None:
        return ""
    found = largest_obstacle(predict(shape, config.workload.recipe, 1), config.room.total_bytes)
    return found.removeprefix("nothing fits: ") if found is not None else ""


def advice_lines(config: SearchConfig) -> list[str]:
    """When nothing fits: which bucket alone exceeds the card, and what would help most, a line each."""
    lines = [f"{one.option}: {one.buys}; {one.cost}" for one in advise(config)]
    found = obstacle(config)
    return [found, *lines] if found else lines


def advise(config: SearchConfig) -> tuple[Advice, ...]:
    """The cheapest set of changes with which one sample fits, where no change alone is enough, and the best single
    ones; none for a workload file, which has no formula.

    By the closed form. Whatever `search` would not run says so.
    """
    shape = config.workload.shape
    if shape is None:
        return ()
    recipe = config.workload.recipe
    single = remedies(
        shape, recipe, config.room.total_bytes, config.headroom, config.device.gpu, config.room.beside_bytes
    )
    advice = [
        Advice(
            remedy.option,
            f"saves {format_bytes(remedy.saved_bytes)}, "
            + (f"batch {remedy.max_batch_size:,} fits" if remedy.max_batch_size else "not enough alone"),
            remedy.cost + _unsearchable(remedy.recipe, recipe),
        )
        for remedy in single[:_MOST_SINGLE]
    ]
    if any(remedy.max_batch_size and not _unsearchable(remedy.recipe, recipe) for remedy in single):
        return tuple(advice)
    return (*_together(config), *advice)[:_MOST_SINGLE]


def _together(config: SearchConfig) -> Iterator[Advice]:
    # Only where nothing fits: else every search would wait for what a plan imports.
    from gpumem_tui.plan.plan import Plan
    from gpumem_tui.plan.techniques import cheapest_combination

    shape, recipe, gpu = config.workload.shape, config.workload.recipe, config.device.gpu
    assert shape is not None
    capped = replace(gpu, total_bytes=config.room.total_bytes)
    found = cheapest_combination(Plan(shape, recipe, capped, headroom=config.headroom), traceable=True)
    if isinstance(found, Unknown) or len(found.changes) < 2:
        return
    options = " ".join(change.option for change in found.changes)
    costs = "; ".join(change.cost for change in found.changes)
    yield Advice(options, f"batch {found.max_batch_size:,} fits", costs + _unsearchable(found.plan.recipe, recipe))


def _unsearchable(recipe: Recipe, was: Recipe) -> str:
    """What `search` says of a recipe that it does not run; empty for one that it does."""
    if recipe.sharding != "none" and was.sharding == "none":
        return "; predicted only: a search runs the step of one GPU"
    if OPTIMIZER_RECORDS[recipe.optimizer].elsewhere and recipe.optimizer != was.optimizer:
        return "; by the formula only: PyTorch has none, so a search takes it in a workload file"
    return ""
