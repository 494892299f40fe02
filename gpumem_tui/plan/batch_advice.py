"""How large a batch helps, in which multiples, and how the learning rate follows it."""

from __future__ import annotations

from dataclasses import dataclass
from math import log, log2

from gpumem_tui.formula.accumulation import accumulation
from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.plan.advice_text import Judgement, Table
from gpumem_tui.plan.answers import largest_batch, samples, target_of
from gpumem_tui.plan.plan import Plan

_KAPLAN_BATCH = 2.1e8
_KAPLAN_EXPONENT = 0.21
_LOSSES = (4.0, 3.5, 3.0, 2.5, 2.0)
_CAP_LOSS = 2.5
"""Up to the critical batch at this loss a rate is scaled: where published models of the catalog's sizes end."""
_IMAGES = (("CIFAR-10", 256), ("ImageNet", 2_048))
_IMAGE_BATCH, _IMAGE_CAP = 256, 8_192
"""The batch that an ImageNet recipe's rate belongs to, and up to which it was scaled without loss (Goyal et al.)."""

_GPT3 = (
    (125e6, 0.5e6, 6.0e-4), (350e6, 0.5e6, 3.0e-4), (760e6, 0.5e6, 2.5e-4), (1.3e9, 1e6, 2.0e-4),
    (2.7e9, 1e6, 1.6e-4), (6.7e9, 2e6, 1.2e-4), (13e9, 2e6, 1.0e-4), (175e9, 3.2e6, 0.6e-4),
)  # fmt: skip
"""Parameters, batch in tokens, learning rate: Brown et al. 2020 (GPT-3), table 2.1."""


@dataclass(frozen=True)
class Reference:
    """A global batch, in samples, and the rate that is right for it; None for a rate that is not said."""

    batch_size: float
    learning_rate: float | None
    source: str


def global_batch(plan: Plan) -> int:
    """Samples of an optimizer step over all GPUs."""
    return accumulation(target_of(plan), plan.batch_size, plan.recipe.data_parallel).global_batch_size


def kaplan_critical_tokens(loss: float) -> float:
    """The critical batch of a language model at a loss in nats: 2.1e8 tokens / L^(1/0.21) (Kaplan et al. 2020, 5.3)."""
    return float(_KAPLAN_BATCH / loss ** (1 / _KAPLAN_EXPONENT))


# How large a batch helps


def critical_batch(plan: Plan) -> Judgement:
    """The gradient-noise trade-off: beyond the critical batch size, more samples only waste compute."""
    title = "Gradient noise and the critical batch size"
    below = (
        "Below the critical batch size, doubling the batch about halves the steps; above it, more samples only waste"
    )
    text = f"{below} compute."
    source = "McCandlish et al. 2018; Shallue et al. 2019"
    if plan.goals.noise is not None:
        said, table = _measured_noise(plan)
        return Judgement("critical-batch", title, f"{text} {said}", f"{source}; your gradient norms", table)
    if plan.shape.record.predicts_tokens:
        said, table = _by_loss(plan)
        return Judgement(
            "critical-batch", title, f"{text} {said}", f"Kaplan et al. 2020, equation 5.3; {source}", table
        )
    measure = "Two gradient norms measure it: --gradient-norm 8=2.1 --gradient-norm 64=1.3, or g on the screen."
    if plan.shape.record.inputs != "images":
        return Judgement("critical-batch", title, f"{text} None is published for such a network. {measure}", source)
    rows = tuple((task, f"{size:,}", _stands(global_batch(plan), size)) for task, size in _IMAGES)
    batch = global_batch(plan)
    said = f"The plan's {samples(batch)} beside two published tasks: the task counts, not the network. {measure}"
    table = Table(("task", "critical batch size", "this plan"), rows)
    return Judgement("critical-batch", title, f"{text} {said}", source, table)


def _stands(batch: float, critical: float) -> str:
    return "above" if batch > critical else "within"


def _measured_noise(plan: Plan) -> tuple[str, Table]:
    noise = plan.goals.noise
    assert noise is not None
    batch = global_batch(plan)
    text = (
        f"By your gradient norms the noise scale is {_about(noise.batch_size)} samples"
        f"{_tokens(plan, noise.batch_size)}; it grows as training goes on. The plan's "
        f"{samples(batch)} {'is' if batch == 1 else 'are'} {_stands(batch, noise.batch_size)} it."
    )
    sizes = sorted({max(1, round(noise.batch_size * factor)) for factor in (0.25, 0.5, 1, 2, 4)} | {batch})
    rows = tuple(
        (f"{size:,}{' (here)' if size == batch else ''}", f"{noise.steps(size):.2f}×", f"{noise.examples(size):.2f}×")
        for size in sizes
    )
    return text, Table(("global batch", "steps of the fewest", "samples of the fewest"), rows)


def _by_loss(plan: Plan) -> tuple[str, Table]:
    batch = global_batch(plan)
    tokens = batch * plan.shape.seq_len
    rows = tuple(
        (f"{loss:.1f}", f"{_about(kaplan_critical_tokens(loss))} tokens", _stands(tokens, kaplan_critical_tokens(loss)))
        for loss in _LOSSES
    )
    text = (
        f"For language models it grows as the loss falls. The plan's {samples(batch)} "
        f"{'is' if batch == 1 else 'are'} {tokens:,} tokens. The law was fitted to GPT-like models on web text; two "
        "gradient norms measure yours: --gradient-norm 8=2.1 --gradient-norm 64=1.3, or g on the screen."
    )
    return text, Table(("loss in nats", "critical batch", "this plan"), rows)


def _tokens(plan: Plan, batch_size: float) -> str:
    return f" ({_about(batch_size * plan.shape.seq_len)} tokens)" if plan.shape.seq_len else ""


def _about(value: float) -> str:
    """Two digits that count.

    >>> _about(1123456.0), _about(42.4), _about(0.31)
    ('1,100,000', '42', '0.31')
    """
    if value < 1:
        return f"{value:.2g}"
    return f"{round(value, 1 - int(log(value, 10))):,.0f}"


# In which multiples


def rounded_batch(plan: Plan, largest: int) -> int:
    """The largest multiple of the plan's that is not above `largest`; `largest` itself below one multiple."""
    multiple = plan.goals.batch_multiple
    return largest // multiple * multiple or largest


def multiples(plan: Plan) -> Judgement:
    """The micro-batch to take, in the multiples that are wanted."""
    multiple, largest = plan.goals.batch_multiple, largest_batch(plan)
    if not largest:
        text = "By the formula not one sample fits, so there is nothing to round."
    else:
        rounded = rounded_batch(plan, largest)
        said = f"{rounded:,} is the largest multiple of {multiple}" if rounded % multiple == 0 else "no multiple fits"
        text = f"By the formula at most {largest:,} a GPU fit; {said} (--batch-multiple)."
    if plan.shape.seq_len and plan.shape.seq_len % multiple == 0:
        text += (
            f" Tensor cores see batch times sequence: {plan.shape.seq_len:,} is a multiple of {multiple} already, so "
            "any micro-batch is as fast."
        )
    else:
        text += " Tensor cores are fastest where a product's dimensions are multiples of 8 values of 16 bits."
    return Judgement("batch-multiple", "Multiples", text, "NVIDIA matmul guide")


# The learning rate


def rate_factors(reference_batch: float, batch: float) -> tuple[float, float]:
    """The range to scale a learning rate by between two global batches: √2 to 2 for each doubling."""
    ratio = batch / reference_batch
    return (ratio**0.5, ratio) if ratio >= 1 else (ratio, ratio**0.5)


def reference(plan: Plan) -> Reference | None:
    """The user's own, else a published recipe's for such a network; None where there is none."""
    goals, shape = plan.goals, plan.shape
    if goals.reference_batch is not None:
        return Reference(goals.reference_batch, goals.reference_rate, "your own")
    if shape.record.predicts_tokens:
        parameters = count_parameters(shape)
        size, tokens, rate = min(_GPT3, key=lambda row: abs(log(row[0] / parameters)))
        source = f"GPT-3 of {size / 1e9:g} billion parameters, Brown et al. 2020, table 2.1"
        return Reference(tokens / shape.seq_len, rate, source)
    if shape.record.inputs == "images":
        return Reference(_IMAGE_BATCH, None, "ImageNet, Goyal et al. 2017")
    return None


def _cap(plan: Plan) -> tuple[float, str] | None:
    """The batch beyond which a rate is not scaled any further, and why."""
    if plan.shape.record.predicts_tokens:
        tokens = kaplan_critical_tokens(_CAP_LOSS)
        said = f"the critical batch at a loss of {_CAP_LOSS}, {_about(tokens)} tokens"
        return tokens / plan.shape.seq_len, said
    if plan.shape.record.inputs == "images":
        return _IMAGE_CAP, f"{_IMAGE_CAP:,} samples, as far as Goyal et al. found no loss"
    return None


def learning_rate(plan: Plan) -> Judgement:
    """How the learning rate follows the batch, from a reference, and no further than where that is known to hold."""
    title, known, batch = "Learning rate", reference(plan), global_batch(plan)
    source = "Goyal et al. 2017 (linear); Krizhevsky 2014, Malladi et al. 2022 (square root); You et al. 2017, 2019"
    if known is None:
        text = "No recipe for such a network is known here: give your own by --reference-batch and --reference-rate."
        return Judgement("learning-rate", title, text, source)
    begins = f"From a global batch of {known.batch_size:,.0f} ({known.source}) to {batch:,}"
    noise = plan.goals.noise
    if noise is not None:
        factor = noise.rate_factor(known.batch_size, batch)
        rates = "" if known.learning_rate is None else f", to {known.learning_rate * factor:.2g}"
        text = f"{begins}: multiply the learning rate by {factor:.2f}{rates}, by your noise scale."
        return Judgement("learning-rate", title, text, f"McCandlish et al. 2018, equation 2.6; {source}")
    cap = _cap(plan)
    scaled, capped = float(batch), ""
    if cap is not None and batch > max(cap[0], known.batch_size):
        scaled, capped = max(cap[0], known.batch_size), f" No further than for {cap[1]}."
    least, most = rate_factors(known.batch_size, scaled)
    text = (
        f"{begins} ({log2(batch / known.batch_size):+.1f} doublings): multiply the learning rate by {least:.2f} to "
        f"{most:.2f}{_rates(known, least, most)} (√2 to 2 a doubling; the square root suits Adam, the full factor "
        f"SGD).{capped}"
    )
    if batch > known.batch_size:
        text += " Warm up over the first epochs or some thousand steps."
    if plan.shape.record.inputs == "images" and batch > _IMAGES[1][1]:
        text += " At this size LARS (convolutional networks) or LAMB (transformers) adapts the rate by layer."
    return Judgement("learning-rate", title, text, source)


def _rates(known: Reference, least: float, most: float) -> str:
    if known.learning_rate is None:
        return ""
    return f", from {known.learning_rate:.2g} to {known.learning_rate * least:.2g} to {known.learning_rate * most:.2g}"
