"""How fast a plan trains by a roofline of its GPU, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gpumem_tui.catalog.loader import GpuPrice, list_prices
from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.accumulation import accumulation
from gpumem_tui.formula.interconnect import (
    Link,
    bubble,
    efficiency,
    fastest_link,
    links,
    tensor_parallel_seconds,
)
from gpumem_tui.formula.roofline import Engine, engine, pass_seconds, relative_pass, update_seconds
from gpumem_tui.memory import Unknown
from gpumem_tui.plan.answers import LargestOnGpu, target_of
from gpumem_tui.plan.curves import Curve, CurveSeries
from gpumem_tui.plan.plan import Plan

ALMOST = 0.95
"""Share of the highest throughput: a larger micro-batch than the first that reaches it gains little."""
_SATURATED_BATCH = 1 << 14
_HOUR_S, _YOURS = 3600.0, "your price"


@dataclass(frozen=True)
class Rate:
    """Samples a second of one GPU, an optimizer step's passes and update together.

    Attributes:
        engine: what computes, and the share of its rate that is assumed.
    """

    least: float
    most: float
    engine: Engine


@dataclass(frozen=True)
class Run:
    """The time and cost of the wanted tokens over all of a plan's GPUs.

    Attributes:
        link: what joins the GPUs; None for one.
        hours, gpu_hours, cost: the least and the most; cost is None without a price.
    """

    tokens: int
    link: Link | None
    hours: tuple[float, float]
    gpu_hours: tuple[float, float]
    cost: tuple[float, float] | None


def rate(plan: Plan) -> Rate | Unknown:
    """Return how fast one GPU of the plan is, or why that is not known."""
    if offloaded := sorted(extra for extra in plan.extras if extra.startswith("offload")):
        return Unknown(f"{' and '.join(offloaded)}: the host's bus bounds the step, and its rate is not known")
    found = engine(plan.shape, plan.recipe, plan.gpu)
    if isinstance(found, Unknown):
        return found
    bounds = []
    for share in (found.share.least, found.share.most):
        seconds = step_seconds(plan, share)
        if isinstance(seconds, Unknown):
            return seconds
        bounds.append(passes(plan) * plan.batch_size * plan.recipe.pipelined / seconds / plan.recipe.model_parallel)
    return Rate(bounds[0], bounds[1], found)


def step_seconds(plan: Plan, share: float) -> float | Unknown:
    """Return the seconds of an optimizer step of the GPUs that hold one copy of the network: passes and update.

    A copy that is cut over GPUs does a pass in as much less time, with what they send each other and wait for.
    """
    recipe = plan.recipe
    one_pass = pass_seconds(plan.shape, recipe, plan.gpu, plan.batch_size, share)
    update = update_seconds(plan.shape, recipe, plan.gpu)
    if isinstance(one_pass, Unknown):
        return one_pass
    if isinstance(update, Unknown):
        return update
    one_pass /= recipe.model_parallel
    if recipe.tensor_parallel > 1:
        joined = links(plan.gpu)
        if isinstance(joined, Unknown):
            return joined
        link = fastest_link(joined, recipe.tensor_parallel)
        one_pass += tensor_parallel_seconds(plan.shape, recipe, plan.batch_size, link)
    return passes(plan) * recipe.pipelined * one_pass * (1 + bubble(recipe)) + update


def passes(plan: Plan) -> int:
    """Return the passes of one optimizer step."""
    return accumulation(target_of(plan), plan.batch_size, plan.recipe.pass_micro_batches).steps


# The saturation curve


def busy_share(plan: Plan, batch_size: int) -> float:
    """Return model, not measurement: the throughput at a micro-batch, of that at a very large one, 0 to 1.

    Over every matrix product of this model, see `formula.roofline`; where the GPU's rates are not known, by arithmetic
    alone.
    """
    found = engine(plan.shape, plan.recipe, plan.gpu)

    def throughput_of(size: int) -> float:
        if not isinstance(found, Unknown):
            seconds = pass_seconds(plan.shape, plan.recipe, plan.gpu, size, found.share.most)
            if not isinstance(seconds, Unknown):
                return size / seconds
        return size / relative_pass(plan.shape, plan.recipe, plan.gpu.multiprocessors, size)

    return min(1.0, throughput_of(batch_size) / throughput_of(_SATURATED_BATCH))


def saturating_batch(plan: Plan) -> int:
    """Return the smallest micro-batch that `busy_share` gives nearly everything."""
    return _first(lambda size: busy_share(plan, size) >= ALMOST)


def _first(enough: Callable[[int], bool]) -> int:
    """Return the smallest number from 1 that is enough, of a condition that stays true."""
    above = 1
    while not enough(above):
        above *= 2
    below = above // 2
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if enough(middle) else (middle, above)
    return above


def throughput(plan: Plan) -> Curve:
    """Return throughput of one GPU against the micro-batch: by the roofline, else relative."""
    saturated = saturating_batch(plan)
    last = max(4 * saturated, 2 * plan.batch_size)
    sizes = sorted({min(last, 1 << power) for power in range(last.bit_length() + 1)} | {saturated, plan.batch_size})
    found = rate(plan)
    if isinstance(found, Unknown):
        series = (CurveSeries("model", tuple((float(size), 100 * busy_share(plan, size)) for size in sizes)),)
        note = f"model, not measured, and relative: {found.reason}"
        return Curve("throughput", "Throughput", "micro-batch", "% of the highest", series, note, plan.batch_size)
    lines = []
    for share in (found.engine.share.least, found.engine.share.most):
        points = tuple((float(size), _single_pass_rate(plan, size, share)) for size in sizes)
        lines.append(CurveSeries(f"at {100 * share:.0f} %", points))
    note = f"roofline, not measured: {found.engine.share} of {found.engine.words} assumed"
    return Curve("throughput", "Throughput", "micro-batch", "samples/s", tuple(lines), note, plan.batch_size)


def _single_pass_rate(plan: Plan, size: int, share: float) -> float:
    one_pass = pass_seconds(plan.shape, plan.recipe, plan.gpu, size, share)
    update = update_seconds(plan.shape, plan.recipe, plan.gpu)
    assert not isinstance(one_pass, Unknown), "the plan's own rate exists"
    assert not isinstance(update, Unknown)
    return size / (one_pass + update)


# Time and cost of the wanted tokens


def run(plan: Plan) -> Run | Unknown:
    """Return hours, and cost at the plan's price, for the plan's tokens; or why they are not known."""
    tokens, found = plan.goals.tokens, rate(plan)
    if tokens is None:
        return Unknown("no number of tokens is given: --tokens 2B")
    if isinstance(found, Unknown):
        return found
    gpus = plan.recipe.gpus
    shares, link = (1.0, 1.0), None
    if gpus > 1:
        joined = links(plan.gpu)
        if isinstance(joined, Unknown):
            return joined
        link = fastest_link(joined, gpus)
        shares = kept_shares(plan, plan.recipe.sharded_over, link, found)
    a_second = plan.shape.seq_len * gpus
    hours = (
        tokens / (found.most * shares[1] * a_second) / _HOUR_S,
        tokens / (found.least * shares[0] * a_second) / _HOUR_S,
    )
    gpu_hours = (hours[0] * gpus, hours[1] * gpus)
    price = price_of(plan)
    cost = None if price is None else (gpu_hours[0] * price.an_hour, gpu_hours[1] * price.an_hour)
    return Run(tokens, link, hours, gpu_hours, cost)


# On every GPU


@dataclass(frozen=True)
class Cost:
    """The cost of a million tokens on one kind of GPU; of a network without tokens, of a million samples.

    Attributes:
        per_million: the least and the most.
    """

    price: GpuPrice
    per_million: tuple[float, float]


def price_of(plan: Plan, gpu: Gpu | None = None) -> GpuPrice | None:
    """Return the price of a GPU: the plan's own, else the user's settings', else a list's; or None.

    Args:
        gpu: None for the plan's.
    """
    gpu = gpu or plan.gpu
    if gpu == plan.gpu and plan.goals.price is not None:
        return GpuPrice(plan.goals.price, _YOURS)
    if (paid := dict(plan.goals.prices).get(gpu.name)) is not None:
        return GpuPrice(paid, _YOURS)
    return list_prices().get(gpu.name)


def cost_of(plan: Plan, gpu: Gpu) -> Cost | Unknown:
    """Return what the plan's training costs on another kind of GPU, or why that is not known.

    By the roofline, and without what several GPUs lose on each other; whether it fits is a separate question.
    """
    price, found = price_of(plan, gpu), rate(replace(plan, gpu=gpu))
    if price is None:
        return Unknown(f"no price of {gpu.title}: set it under [prices] in the settings")
    if isinstance(found, Unknown):
        return found
    a_sample = price.an_hour / _HOUR_S * 1e6 / (plan.shape.seq_len or 1)
    return Cost(price, (a_sample / found.most, a_sample / found.least))


def by_cost(plan: Plan, on_gpus: Sequence[LargestOnGpu]) -> tuple[tuple[LargestOnGpu, Cost], ...]:
    """Return the GPUs that the plan's batch fits on and that have a cost, the cheapest first."""
    costs = [(row, cost_of(plan, row.gpu)) for row in on_gpus if plan.batch_size <= row.largest]
    known = [(row, cost) for row, cost in costs if isinstance(cost, Cost)]
    return tuple(sorted(known, key=lambda one: sum(one[1].per_million)))


def kept_shares(plan: Plan, alike: int, link: Link, found: Rate) -> tuple[float, float]:
    """Return the share of each GPU's speed that is left: of the fastest step with nothing hidden, of the slowest all.

    Args:
        alike: GPUs that hold the same part of the network.
    """
    steps = passes(plan)
    samples = steps * plan.batch_size * plan.recipe.pipelined / plan.recipe.model_parallel
    least, _ = efficiency(plan.shape, plan.recipe, alike, link, samples / found.most, steps)
    _, most = efficiency(plan.shape, plan.recipe, alike, link, samples / found.least, steps)
    return least, most
