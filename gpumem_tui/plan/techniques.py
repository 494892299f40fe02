"""The saving of each technique, and the cheapest set that makes a plan fit: by formula, unless it was traced."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.accumulation import Accumulation, accumulation
from gpumem_tui.formula.checks import conflict
from gpumem_tui.formula.predict import MomentBytes, by_stage, largest_within
from gpumem_tui.formula.recipe import Setup
from gpumem_tui.formula.records import as_run_on, stage_of
from gpumem_tui.formula.techniques import (
    MOST_TIMES_HALVED,
    STAGES,
    NotApplicable,
    Price,
    Technique,
    catalog_techniques,
    changes,
    is_advisable,
    other_way,
    sharded,
    smaller_sample,
)
from gpumem_tui.memory import Unknown
from gpumem_tui.plan.answers import (
    TracedAnswer,
    answer,
    formula_only,
    largest_batch,
    predicted,
    setup_of,
    target_of,
    usable_as_traced,
    usable_of,
    with_setup,
)
from gpumem_tui.plan.combination import NOTHING, Combination, Effect, Techniques
from gpumem_tui.plan.judgement import SMALLEST_NORMALIZED_BATCH
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.speed import busy_share
from gpumem_tui.search.prediction import Fit

_MOST_ASKED_GPUS = 1024
"""No combination asks for more."""

_SHARED_AXES = ("weights", "precision", "recompute")
_PER_GPU_AXES = ("attention", "loss", "blocks")
_FIXED_AXES = ("optimizer", "sharding", "state", "weights-in-host")
"""Axes that change the fixed bytes only. Axes that change each sample's bytes leave these alone; the shared ones change
both."""
COMBINED_AXES = (*_SHARED_AXES, *_PER_GPU_AXES, *_FIXED_AXES, "sample")
"""The cheapest combination is looked for among changes of these."""
_NOT_UNDER_ADAPTERS = ("optimizer", "state")
"""Techniques that save next to nothing with adapters, so that no set has both."""


def techniques(plan: Plan, largest: int | None = None, traced: Sequence[Effect | NotApplicable] = ()) -> Techniques:
    """Return every technique judged on this plan: those that the formula knows, and some that were traced.

    Sorted by what helps most: where the plan does not fit, what makes it fit comes first; then the larger new
    maximum batch, then the more bytes saved.

    Args:
        largest: the plan's largest batch as traced: what each technique changes of it is the closed form's, so
            that no row contradicts the trace. None for no trace.
    """
    now = _Memory.of(plan, usable_as_traced(plan, largest))
    helping: list[Effect] = []
    others: list[NotApplicable] = []
    for found in [*changes(setup_of(plan), plan.gpu), *_batch_changes(plan, now), *traced]:
        judged = _judged(plan, found, now) if isinstance(found, Technique) else found
        if isinstance(judged, Effect):
            helping.append(judged)
        else:
            others.append(judged)
    return Techniques(tuple(helping), tuple(others)).by_help(fits=now.fits)


@dataclass(frozen=True)
class _Memory:
    peak_bytes: int
    fits: bool
    max_batch_size: int
    usable_bytes: int

    @classmethod
    def of(cls, plan: Plan, usable_bytes: int) -> _Memory:
        prediction, largest = predicted(plan), largest_batch(plan, usable_bytes)
        return cls(prediction.peak_bytes, prediction.needed_bytes <= usable_bytes, largest, usable_bytes)


def _judged(plan: Plan, change: Technique, now: _Memory) -> Effect | NotApplicable:
    changed = with_setup(plan, change.applied(setup_of(plan)))
    if (reason := conflict(changed.recipe)) is not None:
        return NotApplicable(change.key, change.name, reason)
    found = _effect(changed, now, change)
    if reason := found.no_gain(now.max_batch_size):
        return NotApplicable(change.key, change.name, reason)
    return found


def _effect(changed: Plan, now: _Memory, technique: Technique) -> Effect:
    then = _Memory.of(changed, now.usable_bytes)
    fit: Fit = "fits" if then.fits else "does not fit"
    saved_bytes = now.peak_bytes - then.peak_bytes
    return Effect(technique, "formula", then.peak_bytes, saved_bytes, fit, then.max_batch_size, of_model=changed)


def _batch_changes(plan: Plan, now: _Memory) -> Iterator[Effect | NotApplicable]:
    """Yield fewer samples in a pass: with more passes for the same step, or with a smaller step."""
    more_passes, smaller = (catalog_techniques()[key] for key in ("gradient-accumulation", "smaller-batch"))
    if plan.batch_size == 1:
        for technique in (more_passes, smaller):
            yield NotApplicable(technique.key, technique.plain_name, "the micro-batch is 1 already")
        return
    target, micro_batches = target_of(plan), plan.recipe.pass_micro_batches
    most = now.max_batch_size if 0 < now.max_batch_size < plan.batch_size else plan.batch_size // 2
    micro = _even_micro_batch(-(-target // micro_batches), most)
    steps = accumulation(target, micro, micro_batches)
    made = more_passes.filled(passes=steps.steps, micro=micro, cost=_accumulation_cost(plan, micro, steps))
    option = f"--batch-size {micro} --target-batch {target}"
    changed = replace(plan, batch_size=micro, target_batch=target)
    yield _effect(changed, now, replace(made, given_option=option))
    half = plan.batch_size // 2
    made = smaller.filled(micro=half, after=half * micro_batches, before=target)
    changed = replace(plan, batch_size=half, target_batch=None)
    yield _effect(changed, now, replace(made, given_option=f"--batch-size {half}"))


def _even_micro_batch(per_gpu: int, most: int) -> int:
    """Return the samples of a pass where `per_gpu` are spread evenly over the fewest passes of at most `most`."""
    passes = -(-per_gpu // most)
    return -(-per_gpu // passes)


def _accumulation_cost(plan: Plan, micro: int, steps: Accumulation) -> str:
    percent = _accumulation_percent(plan, micro)
    slower = f"about {percent:.0f} % more time by the model of a busy GPU" if percent >= 1 else "no more arithmetic"
    batch_norm = "; batch norm sees fewer samples" if _upsets_batch_norm(plan, micro) else ""
    return f"{steps.steps} passes a step, {slower}{batch_norm}"


def _accumulation_percent(plan: Plan, micro: int) -> float:
    """Return extra time because a smaller pass keeps the GPU less busy, see `speed.busy_share`."""
    return max(0.0, 100 * (busy_share(plan, plan.batch_size) / busy_share(plan, micro) - 1))


def _upsets_batch_norm(plan: Plan, micro: int) -> bool:
    return plan.shape.record.has_batch_norm and micro < min(plan.batch_size, SMALLEST_NORMALIZED_BATCH)


# The cheapest combination


def cheapest_combination(plan: Plan, *, traceable: bool = False, room: float = 1.0) -> Combination | Unknown:
    """Return the cheapest set of techniques with which the plan's samples per optimizer step fit on its GPUs.

    All sets of at most one change an axis are compared by `Price`, in `formula.price.COST_ORDER`. The step's samples
    are the target batch, else those of one pass; a micro-batch smaller than planned, with more passes, is a change
    like the others. GPUs are added, by doubling, only where no set fits without.

    Args:
        traceable: only sets that a trace can confirm.
        room: times what the GPU can take: what would be the cheapest were the formula off by that much.
    """
    most = max(
        n for n in range(MOST_TIMES_HALVED + 1) if n == 0 or isinstance(smaller_sample(plan.shape, n), Technique)
    )

    @cache
    def cheapest_at(gpus: int, times_halved: int) -> Combination | None:
        return _cheapest_at(plan, gpus, times_halved, traceable=traceable, room=room)

    def fits_on(gpus: int) -> bool:
        # If the smallest sample does not fit, no sample fits.
        return cheapest_at(gpus, 0) is not None or bool(most and cheapest_at(gpus, most) is not None)

    numbers = [plan.recipe.gpus]
    while 2 * numbers[-1] <= _MOST_ASKED_GPUS:
        numbers.append(2 * numbers[-1])
    # A plan that fits on some GPUs fits on more, but the first number is by far the likeliest.
    fewest = 0 if fits_on(numbers[0]) else bisect_left(numbers, True, lo=1, key=fits_on)
    if fewest == len(numbers):
        return Unknown(f"nothing makes one sample fit on {_MOST_ASKED_GPUS:,} GPUs of this kind")
    found = (cheapest_at(numbers[fewest], times_halved) for times_halved in range(most + 1))
    return next(one for one in found if one is not None)


_ROOMS = (1.2, 1.1, 1.0, 0.9)
"""The formula may be off by as much, so that a trace may find a cheaper set to fit, or the formula's not to."""


def room_as_traced(plan: Plan, largest: int | None) -> float:
    """Return times what the GPU can take, so that the closed form's largest batch is the traced one; 1 for no trace."""
    usable = usable_of(plan)
    return usable_as_traced(plan, largest) / usable if usable else 1.0


def likely_combinations(plan: Plan, room: float = 1.0) -> tuple[Combination, ...]:
    """Return what may be the cheapest set once it is traced, the cheapest first; without the plan as it is."""
    found = (cheapest_combination(plan, traceable=True, room=room * off) for off in _ROOMS)
    by_plan = {one.plan: one for one in found if isinstance(one, Combination) and one.plan != plan}
    return tuple(sorted(by_plan.values(), key=lambda one: one.price))


def unchanged(plan: Plan) -> Combination:
    """Return the plan as it is."""
    return _combination(plan, (), plan.batch_size)


_MOST_COMPILED_LAYERS, _MOST_SHARDED_LAYERS = 24, 32
"""A compiled model is traced with all its layers, about a second for each, or a third of that where one block is
compiled for all, as of what is sharded; other traces of a plan are of a few layers."""


def compiled_or_eager(plan: Plan, now: TracedAnswer | Unknown) -> Combination | Unknown:
    """Return the plan compiled, or eager where it is, known by trace alone; or why not: `now` is what it takes."""
    if isinstance(now, TracedAnswer) and now.traced.done.is_estimate:
        return Unknown("it cannot be followed here as a GPU would run it")
    technique, layers = other_way(plan.recipe), plan.shape.layers
    most = _MOST_COMPILED_LAYERS if plan.recipe.sharding == "none" else _MOST_SHARDED_LAYERS
    if not plan.recipe.compile and layers > most:
        return Unknown(f"not traced here, as {layers} layers take long to compile; plan again with it")
    return _combination(plan, (technique,), plan.batch_size)


def cheapest_but_as_it_is(plan: Plan, room: float = 1.0) -> Combination | Unknown:
    """Return by formula, the cheapest set where a trace states that the plan does not fit as it is."""
    found = cheapest_combination(plan, room=room)
    if isinstance(found, Combination) and found.plan == plan:
        return next(iter(likely_combinations(plan, room)), Unknown("by formula it fits as it is, traced it does not"))
    return found


def _cheapest_at(plan: Plan, gpus: int, times_halved: int, *, traceable: bool, room: float) -> Combination | None:
    """Return the cheapest on so many GPUs and with the sample halved so many times; None if no set fits."""
    sample = smaller_sample(plan.shape, times_halved) if times_halved else None
    if isinstance(sample, NotApplicable):
        return None
    by_axis = _by_axis(plan, gpus, traceable=traceable)
    under_adapters: dict[str, list[Technique | None]] = {
        axis: [None] if axis in _NOT_UNDER_ADAPTERS else every for axis, every in by_axis.items()
    }
    usable, weights = int(usable_of(plan) * room), [change for change in by_axis["weights"] if change is not None]
    best: tuple[Price, Combination] | None = None
    copies = max(1, gpus // plan.recipe.model_parallel) * plan.recipe.pipelined
    for both in product(*(by_axis[axis] for axis in _SHARED_AXES)):
        base = tuple(change for change in (sample, *both) if change is not None)
        if not is_advisable(base, weights):
            continue
        start = _all_applied(setup_of(plan), base)
        start_price = sum((change.price for change in base), Price())
        if best is not None and best[0] <= start_price:
            continue
        choices = under_adapters if any(change in weights for change in base) else by_axis
        fixed = [
            (price, chosen, _moments(new, plan.gpu))
            for price, chosen, new in _sets(start, [choices[axis] for axis in _FIXED_AXES])
            if new.recipe.gpus == gpus and conflict(new.recipe) is None
        ]
        per_sample = [
            (price, chosen, _moments(new, plan.gpu))
            for price, chosen, new in _sets(start, [choices[axis] for axis in _PER_GPU_AXES])
        ]
        least = [
            min(one.sample_bytes for one in moment) for moment in zip(*(all_ for *_, all_ in per_sample), strict=True)
        ]
        fitting = [
            entry
            for entry in fixed
            if all(one.fixed_bytes + size <= usable for one, size in zip(entry[2], least, strict=True))
        ]
        for (price1, chosen1, held), (price2, chosen2, samples) in product(fitting, per_sample):
            price = start_price + price1 + price2
            if best is not None and best[0] <= price:
                continue
            most = largest_within([one.growing_as(other) for one, other in zip(held, samples, strict=True)], usable)
            if most < 1:
                continue
            found = _within(plan, base + chosen1 + chosen2, copies, most, usable)
            if found is not None and (best is None or price + found.passes_price < best[0]):
                best = price + found.passes_price, found
    return None if best is None else best[1]


def _within(plan: Plan, chosen: tuple[Technique, ...], copies: int, most: int, usable: int) -> Combination | None:
    """Return changes with the most samples of a pass that stay within the usable bytes; None for not even one.

    Args:
        copies, most: as `_micro_batch` takes them; where sharding changes what a sample takes, too, it is less.
    """
    while most:
        micro, extra = _micro_batch(plan, copies, most)
        found = _combination(plan, chosen, micro, extra)
        if found.by_formula.prediction.needed_bytes <= usable:
            return found
        most = min(micro - 1, largest_batch(found.plan, usable))
    return None


def _by_axis(plan: Plan, gpus: int, *, traceable: bool) -> dict[str, list[Technique | None]]:
    """Return the choices of every axis, None for leaving it.

    With more GPUs than the plan has, sharding must be chosen.
    """
    setup = setup_of(plan)
    found: dict[str, list[Technique | None]] = {axis: [None] for axis in COMBINED_AXES}
    for change in changes(setup, plan.gpu):
        if not isinstance(change, Technique) or change.axis == "sharding" or change.key == "freeze-half":
            continue
        if change.key == "lora" and setup.recipe.has_adapters:  # it would unpack a quantized base
            continue
        if not (traceable and formula_only(with_setup(plan, change.applied(setup)))):
            found[change.axis].append(change)
    further = gpus - plan.recipe.gpus
    if gpus > 1:
        held = stage_of(plan.recipe)
        stages = [sharded(stage, gpus, further) for number, stage in enumerate(STAGES, 1) if further or number > held]
        found["sharding"].extend(stages)
    return found


def _sets(start: Setup, axes: list[list[Technique | None]]) -> Iterator[tuple[Price, tuple[Technique, ...], Setup]]:
    """Yield every choice of one change or none an axis: its price, the changes, and `start` with them made."""
    for choice in product(*axes):
        chosen = tuple(change for change in choice if change is not None)
        yield sum((change.price for change in chosen), Price()), chosen, _all_applied(start, chosen)


def _all_applied(setup: Setup, chosen: tuple[Technique, ...]) -> Setup:
    for change in chosen:
        setup = change.applied(setup)
    return setup


@lru_cache(4096)
def _moments(setup: Setup, gpu: Gpu) -> tuple[MomentBytes, ...]:
    """Return what is needed at each moment, of each stage."""
    stages = by_stage(setup.shape, as_run_on(setup.recipe, gpu), setup.extras)
    return tuple(one for stage in stages for one in stage.values())


def _micro_batch(plan: Plan, copies: int, fitting: int) -> tuple[int, Price]:
    """Return the samples of a pass where at most `fitting` fit, and the price of passes smaller than planned.

    Args:
        copies: of the micro-batch in one pass over all GPUs.
    """
    if plan.batch_size <= fitting:
        return plan.batch_size, Price()
    micro = _even_micro_batch(-(-target_of(plan) // copies), fitting)
    if micro == plan.batch_size:
        return micro, Price()
    risk = int(_upsets_batch_norm(plan, micro))
    return micro, Price(risk=risk, slower_percent=_accumulation_percent(plan, micro), changes=1)


def _combination(plan: Plan, chosen: tuple[Technique, ...], micro: int, passes_price: Price = NOTHING) -> Combination:
    changed = with_setup(plan, _all_applied(setup_of(plan), chosen))
    if (micro, changed.recipe.gpus) != (plan.batch_size, plan.recipe.gpus):
        target = max(target_of(plan), micro * changed.recipe.pass_micro_batches)
        changed = replace(changed, batch_size=micro, target_batch=target)
    found = answer(changed)
    return Combination(chosen, micro, found.accumulation.steps, formula=found, passes_price=passes_price)
