"""When nothing fits: what would help most on this very model, and what a search itself can confirm of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpumem_tui.formula.predict import largest_obstacle, predict
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import Unknown, format_bytes
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.simulator.allocator.profile import beside_allocator_bytes

if TYPE_CHECKING:
    from gpumem_tui.plan.plan import Plan

_MOST_SINGLE = 3


@dataclass(frozen=True)
class Advice:
    """A change to the plan, or several together. `option`: as typed; `buys` and `cost`: in words."""

    option: str
    buys: str
    cost: str


def obstacle(config: SearchConfig) -> str:
    """Return what of one sample exceeds the card, by the closed form; empty if nothing does or there is no formula."""
    shape = config.workload.shape
    if shape is None:
        return ""
    found = largest_obstacle(predict(shape, config.workload.recipe, 1), config.room.total_bytes)
    return found.removeprefix("nothing fits: ") if found is not None else ""


def best_and_lines(config: SearchConfig) -> tuple[str, list[str]]:
    """Return the change that would help most, empty for none, and the lines for where nothing fits.

    These say which bucket alone exceeds the card, and what would help most, a line each.
    """
    changes = [(f"{one.option}: {one.buys}", one.cost) for one in advise(config)]
    lines = [f"{change}; {cost}" for change, cost in changes]
    found = obstacle(config)
    return changes[0][0] if changes else "", [found, *lines] if found else lines


def advise(config: SearchConfig) -> tuple[Advice, ...]:
    """Return the cheapest set of changes with which one sample fits, and the best single ones.

    The set is left out where one change alone is enough; a workload file, which has no formula, has none of either.

    By the closed form. The line tells what `search` would not run.
    """
    plan = _plan(config)
    if plan is None:
        return ()
    # Only where nothing fits: else every search would wait for what a plan imports.
    from gpumem_tui.plan.techniques import techniques

    single = techniques(plan).helping
    advice = [
        Advice(
            technique.change.option,
            f"saves {format_bytes(technique.saved_bytes)}, "
            + (f"batch {technique.largest:,} fits" if technique.known_largest else "not enough alone"),
            technique.change.cost + _unsearchable(technique.plan, plan.recipe),
        )
        for technique in single[:_MOST_SINGLE]
    ]
    if any(technique.known_largest and not _unsearchable(technique.plan, plan.recipe) for technique in single):
        return tuple(advice)
    return (*_together(plan), *advice)[:_MOST_SINGLE]


def _plan(config: SearchConfig) -> Plan | None:
    """Return what is searched as a plan, on what of the GPU there is to search in; None without a closed form."""
    shape = config.workload.shape
    if shape is None:
        return None
    from gpumem_tui.plan.plan import Plan

    gpu, room = config.device.gpu, config.room
    # A plan takes what is outside the allocator off; a cap counts what is reserved only, and need not.
    beside_bytes = beside_allocator_bytes(gpu) - room.beside_bytes
    total_bytes = room.total_bytes + round(beside_bytes / (1 - config.headroom))
    capped = replace(gpu, total_bytes=total_bytes, cuda_total_bytes=total_bytes - gpu.reserve_bytes)
    return Plan(shape, config.workload.recipe, capped, headroom=config.headroom)


def _together(plan: Plan) -> Iterator[Advice]:
    from gpumem_tui.plan.techniques import cheapest_combination

    found = cheapest_combination(plan, traceable=True)
    if isinstance(found, Unknown) or len(found.changes) < 2:
        return
    options = " ".join(change.option for change in found.changes)
    costs = "; ".join(change.cost for change in found.changes)
    yield Advice(
        options, f"batch {found.by_formula.max_batch_size:,} fits", costs + _unsearchable(found.plan, plan.recipe)
    )


def _unsearchable(plan: Plan, was: Recipe) -> str:
    """Return what `search` states of a plan that it does not run; empty for one that it does."""
    recipe = plan.recipe
    if plan.extras:
        return "; by the formula only: a search does not run it"
    if recipe.sharding != "none" and was.sharding == "none":
        return "; needs more GPUs than the one that is searched"
    return ""
