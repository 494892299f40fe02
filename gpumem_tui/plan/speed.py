"""How fast a plan trains: as the search's trials measured it, else by a roofline of its GPU; and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

from gpumem_tui.formula.accumulation import accumulation
from gpumem_tui.formula.interconnect import (
    GPUS_OF_A_NODE,
    Link,
    bubble,
    efficiency,
    fastest_link,
    links,
    tensor_parallel_seconds,
)
from gpumem_tui.formula.roofline import Engine, engine, pass_seconds, relative_pass, training_flops, update_seconds
from gpumem_tui.memory import Unknown
from gpumem_tui.plan.advice_text import Judgement, Table
from gpumem_tui.plan.answers import target_of
from gpumem_tui.plan.curves import Curve, CurveSeries
from gpumem_tui.plan.measured import MeasuredRate
from gpumem_tui.plan.plan import Plan

ALMOST = 0.95
"""Of the highest throughput: a larger micro-batch than the first that reaches it gains little."""
_SATURATED_BATCH = 1 << 14
_SCALED = (2, 4, 8, 16, 64)
_HOUR_S = 3600.0
_ROOFLINE = "Williams et al. 2009; NVIDIA matmul guide"


@dataclass(frozen=True)
class Rate:
    """Samples a second of one GPU, an optimizer step's passes and update together.

    Attributes:
        least, most: the same where it was measured.
        measured: the micro-batch that a trial timed; None for the roofline.
        engine: what computes, and the share of its rate that is assumed; None where it was measured.
    """

    least: float
    most: float
    measured: int | None = None
    engine: Engine | None = None


@dataclass(frozen=True)
class Run:
    """What the wanted tokens take over all of a plan's GPUs.

    Attributes:
        link: what joins the GPUs; None for one.
        hours, gpu_hours, cost: the least and the most; cost is None without a price.
    """

    tokens: int
    link: Link | None
    hours: tuple[float, float]
    gpu_hours: tuple[float, float]
    cost: tuple[float, float] | None


def rate(plan: Plan, measured: Sequence[MeasuredRate] = ()) -> Rate | Unknown:
    """How fast one GPU of the plan is, or why that is not known; of measurements that of the nearest micro-batch."""
    if measured:
        nearest = min(measured, key=lambda one: abs(log(one.batch_size / plan.batch_size)))
        return Rate(nearest.samples_per_s, nearest.samples_per_s, nearest.batch_size)
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
        bounds.append(_passes(plan) * plan.batch_size / seconds / plan.recipe.model_parallel)
    return Rate(bounds[0], bounds[1], engine=found)


def step_seconds(plan: Plan, share: float) -> float | Unknown:
    """One optimizer step of the GPUs that hold one copy of the network, by the roofline: its passes and the update.

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
    return _passes(plan) * one_pass * (1 + bubble(recipe, _passes(plan))) + update


def _passes(plan: Plan) -> int:
    return accumulation(target_of(plan), plan.batch_size, plan.recipe.data_parallel).steps


# The saturation curve


def busy_share(plan: Plan, batch_size: int) -> float:
    """Model, not measurement: the throughput at a micro-batch, of that at a very large one, 0 to 1.

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
    """The smallest micro-batch that `busy_share` gives nearly everything."""
    return _first(lambda size: busy_share(plan, size) >= ALMOST)


def _first(enough: Callable[[int], bool]) -> int:
    """The smallest number from 1 that is enough, of a condition that stays true."""
    above = 1
    while not enough(above):
        above *= 2
    below = above // 2
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if enough(middle) else (middle, above)
    return above


def throughput(plan: Plan, measured: Sequence[MeasuredRate] = ()) -> Curve:
    """Throughput of one GPU against the micro-batch: as measured, else by the roofline, else relative."""
    if measured:
        points = tuple((float(one.batch_size), one.samples_per_s) for one in measured)
        note = "measured by the search's trials on this GPU; the first step of each is left out"
        return Curve("throughput", "Throughput", "micro-batch", "samples/s", (CurveSeries("measured", points),), note)
    saturated = saturating_batch(plan)
    last = max(4 * saturated, 2 * plan.batch_size)
    sizes = sorted({min(last, 1 << power) for power in range(last.bit_length() + 1)} | {saturated, plan.batch_size})
    found = rate(plan)
    if isinstance(found, Unknown) or found.engine is None:
        reason = found.reason if isinstance(found, Unknown) else ""
        series = (CurveSeries("model", tuple((float(size), 100 * busy_share(plan, size)) for size in sizes)),)
        note = f"model, not measured, and relative: {reason}"
        return Curve("throughput", "Throughput", "micro-batch", "% of the highest", series, note, plan.batch_size)
    lines = []
    for share in (found.engine.share.least, found.engine.share.most):
        points = tuple((float(size), _single_pass_rate(plan, size, share)) for size in sizes)
        lines.append(CurveSeries(f"at {100 * share:.0f} %", points))
    note = f"roofline, not measured: {found.engine.share} of {_engine(found.engine)} assumed"
    return Curve("throughput", "Throughput", "micro-batch", "samples/s", tuple(lines), note, plan.batch_size)


def _single_pass_rate(plan: Plan, size: int, share: float) -> float:
    one_pass = pass_seconds(plan.shape, plan.recipe, plan.gpu, size, share)
    update = update_seconds(plan.shape, plan.recipe, plan.gpu)
    assert not isinstance(one_pass, Unknown), "the plan's own rate is known"
    assert not isinstance(update, Unknown)
    return size / (one_pass + update)


def _engine(found: Engine) -> str:
    return f"the {found.tflops:,.4g} TFLOP/s of its {found.name}"


# The advice


def busy(plan: Plan, measured: Sequence[MeasuredRate] = ()) -> Judgement:
    """How fast one GPU is, and whether the micro-batch keeps it busy."""
    found, saturated, steps = rate(plan, measured), saturating_batch(plan), _passes(plan)
    source = _ROOFLINE
    if measured:
        said = _fastest(measured)
    elif isinstance(found, Unknown):
        said = f"Not known: {found.reason}."
    else:
        assert found.engine is not None
        assert plan.gpu.speed is not None
        said = f"At {found.engine.share} of {_engine(found.engine)}, not measured: {rate_words(plan, found)} a GPU."
        source = f"{source}; share assumed: {found.engine.share.source}; rates: NVIDIA, {plan.gpu.speed.source}"
    further = "" if saturated == plan.batch_size else f", {saturated} at least {100 * ALMOST:.0f} %"
    filled = (
        f"By a model of tiles and multiprocessors micro-batch {plan.batch_size} gives "
        f"{100 * busy_share(plan, plan.batch_size):.0f} % of the highest throughput{further}."
    )
    passes = f"{steps} accumulation steps cost {steps} passes." if steps != 1 else "1 accumulation step costs 1 pass."
    return Judgement("throughput", "Throughput against batch", f"{said} {filled} {passes}", source)


def rate_words(plan: Plan, found: Rate) -> str:
    """Samples, and tokens of a sequence, a second.

    For example ``104 to 158 samples/s, 107,000 to 162,000 tokens/s``.
    """
    said = f"{_span(found.least, found.most)} samples/s"
    if plan.shape.seq_len:
        said += f", {_span(found.least * plan.shape.seq_len, found.most * plan.shape.seq_len)} tokens/s"
    return said


def _span(least: float, most: float) -> str:
    low, high = _three_digits(least), _three_digits(most)
    return low if low == high else f"{low} to {high}"


def _three_digits(value: float) -> str:
    if value >= 100:
        digits = len(str(int(value))) - 3
        return f"{round(value, -digits):,.0f}"
    return f"{value:.3g}"


def _fastest(measured: Sequence[MeasuredRate]) -> str:
    """What the search's trials say, in a sentence."""
    most = max(measured, key=lambda one: one.samples_per_s)
    enough = next(one for one in measured if one.samples_per_s >= ALMOST * most.samples_per_s)
    text = f"Measured by the search: {most.samples_per_s:.3g} samples/s at most, at micro-batch {most.batch_size}"
    if enough is not most:
        text += f"; micro-batch {enough.batch_size} already gives {enough.samples_per_s:.3g}"
    return f"{text}."


def run(plan: Plan, measured: Sequence[MeasuredRate] = ()) -> Run | Unknown:
    """Hours, and cost at the plan's price, for the plan's tokens; or why they are not known."""
    tokens, found = plan.goals.tokens, rate(plan, measured)
    if tokens is None:
        return Unknown("no number of tokens is given: --tokens 2B, or g on the screen")
    if isinstance(found, Unknown):
        return found
    gpus = plan.recipe.gpus
    shares, link = (1.0, 1.0), None
    if gpus > 1:
        joined = links(plan.gpu)
        if isinstance(joined, Unknown):
            return joined
        link = fastest_link(joined, gpus)
        shares = _kept(plan, plan.recipe.sharded_over, link, found)
    a_second = plan.shape.seq_len * gpus
    hours = (
        tokens / (found.most * shares[1] * a_second) / _HOUR_S,
        tokens / (found.least * shares[0] * a_second) / _HOUR_S,
    )
    gpu_hours = (hours[0] * gpus, hours[1] * gpus)
    price = plan.goals.price
    cost = None if price is None else (gpu_hours[0] * price, gpu_hours[1] * price)
    return Run(tokens, link, hours, gpu_hours, cost)


def _kept(plan: Plan, alike: int, link: Link, found: Rate) -> tuple[float, float]:
    """The share of each GPU's speed that is left: of the fastest step with nothing hidden, of the slowest with all.

    Args:
        alike: GPUs that hold the same part of the network.
    """
    passes = _passes(plan)
    samples = passes * plan.batch_size / plan.recipe.model_parallel
    least, _ = efficiency(plan.shape, plan.recipe, alike, link, samples / found.most, passes)
    _, most = efficiency(plan.shape, plan.recipe, alike, link, samples / found.least, passes)
    return least, most


def cost(plan: Plan, measured: Sequence[MeasuredRate] = ()) -> Judgement:
    """What the wanted tokens take."""
    found = run(plan, measured)
    title, source = "Time and cost", "the throughput above; links at their full rate"
    if isinstance(found, Unknown):
        return Judgement("cost", title, f"Not known: {found.reason}.", source)
    gpus = plan.recipe.gpus
    over = f" on {gpus:,} GPUs over {found.link.name}" if found.link is not None else " on one GPU"
    text = f"{found.tokens:,} tokens{over} take {_span(*found.hours)} hours"
    text += f", {_span(*found.gpu_hours)} GPU-hours." if gpus > 1 else "."
    if found.cost is not None:
        text += f" At {plan.goals.price:g} for a GPU an hour they cost {_span(*found.cost)}."
    else:
        text += " A price (--price, or g on the screen) gives the cost."
    return Judgement("cost", title, text, source)


def scaling(plan: Plan, measured: Sequence[MeasuredRate] = ()) -> Judgement:
    """What data parallel training over more GPUs of this kind brings, by the link between them."""
    title = "More GPUs"
    source = "Patarasuk & Yuan 2009; Li et al. 2020 (PyTorch DDP); Rajbhandari et al. 2020 (ZeRO)"
    joined, found = links(plan.gpu), rate(plan, measured)
    unknown = joined if isinstance(joined, Unknown) else found if isinstance(found, Unknown) else None
    if isinstance(joined, Unknown) or isinstance(found, Unknown):
        assert unknown is not None
        return Judgement("scaling", title, f"Not known: {unknown.reason}.", source)
    rows = []
    for copies in _SCALED:
        gpus = copies * plan.recipe.model_parallel
        inside = gpus <= GPUS_OF_A_NODE
        for link in joined:
            if link.most < gpus or (link.most <= GPUS_OF_A_NODE) != inside:
                continue
            least, most = _kept(plan, copies * plan.recipe.context_parallel, link, found)
            rows.append(
                (
                    f"{gpus}",
                    f"{link.name}, {link.gigabytes_per_s:g} GB/s",
                    f"{100 * least:.0f} to {100 * most:.0f} %",
                    f"{copies * least:.3g} to {copies * most:.3g}×",
                    f"{plan.batch_size * copies:,}",
                )
            )
    text = (
        "Each GPU sends its gradients once an optimizer step: with nothing hidden, and with all that backward can "
        "hide; under ZeRO 3 at every pass, and its parameters. Links count at their full rate: an upper bound."
    )
    table = Table(("GPUs", "over", "efficiency", "speed-up", "samples a pass"), tuple(rows))
    return Judgement("scaling", title, text, source, table)


def flops_of_sample(plan: Plan) -> int | Unknown:
    """Floating-point operations of a sample's forward and backward, with what is recomputed."""
    return training_flops(plan.shape, plan.recipe)
