"""Advice on batch size, learning rate, precision, speed and cost: what papers say, with a plan's numbers put in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import log, log2

import msgspec

from gpumem_tui.catalog.loader import toml_tables
from gpumem_tui.formula.accumulation import accumulation
from gpumem_tui.formula.interconnect import GPUS_OF_A_NODE, links
from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.formula.records import BF16_SINCE, PRECISION_RECORDS
from gpumem_tui.memory import Unknown
from gpumem_tui.plan.answers import largest_batch, target_of
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.speed import ALMOST, Rate, busy_share, kept_shares, passes, price_of, rate, run, saturating_batch
from gpumem_tui.report.tables import counted

SMALLEST_NORMALIZED_BATCH = 16
"""Below it batch norm's statistics are noisy (Wu & He 2018)."""


@dataclass(frozen=True)
class Table:
    """Rows of text under a heading each."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Judgement:
    """A piece of advice on a plan, with the papers behind it.

    Attributes:
        key: names it in code.
        text: the advice, with the plan's numbers.
        source: the papers behind it.
        warning: the plan does what the advice warns of.
    """

    key: str
    title: str
    text: str
    source: str
    table: Table | None = None
    warning: bool = False


class JudgementWords(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The words of one piece of advice: a table of help.toml. `texts`: sentences with numbers left out, by name."""

    title: str
    formula: str
    source: str
    texts: dict[str, str]


@cache
def judgement_words() -> dict[str, JudgementWords]:
    """Return the words of every piece of advice by key."""
    return msgspec.convert(toml_tables("help.toml")["judgements"], dict[str, JudgementWords])


class _Advice:
    """The words of one piece of advice, to be filled in."""

    def __init__(self, key: str) -> None:
        self._key, self._words = key, judgement_words()[key]

    def text(self, name: str, **known: object) -> str:
        return self._words.texts[name].format(**known)

    def judgement(
        self, text: str, table: Table | None = None, *, before: str = "", after: str = "", warning: bool = False
    ) -> Judgement:
        """Return the judgement. `before`, `after`: what else it is from."""
        source = "; ".join(part for part in (before, self._words.source, after) if part)
        return Judgement(self._key, self._words.title, text, source, table, warning)


def judgements(plan: Plan, largest: int | None = None) -> tuple[Judgement, ...]:
    """Return all advice on `plan`.

    Args:
        largest: its largest batch as traced; None for the closed form's.
    """
    return (
        busy(plan),
        cost(plan),
        critical_batch(plan),
        multiples(plan, largest),
        learning_rate(plan),
        batch_norm(plan),
        precision(plan),
        scaling(plan),
    )


# Speed and cost


def busy(plan: Plan) -> Judgement:
    """Say how fast one GPU is, and whether the micro-batch keeps it busy."""
    advice, found = _Advice("throughput"), rate(plan)
    saturated, steps, after = saturating_batch(plan), passes(plan), ""
    if isinstance(found, Unknown):
        words = advice.text("unknown", reason=found.reason)
    else:
        assert plan.gpu.speed is not None
        share = found.engine.share
        words = advice.text("rate", share=share, engine=found.engine.words, rate=rate_words(plan, found))
        after = advice.text("rate_source", share=share.source, speed=plan.gpu.speed.source)
    further = ""
    if saturated != plan.batch_size:
        further = advice.text("further", saturated=saturated, almost=f"{100 * ALMOST:.0f}")
    percent = f"{100 * busy_share(plan, plan.batch_size):.0f}"
    filled = advice.text("filled", batch=plan.batch_size, percent=percent, further=further)
    cost_of_steps = advice.text("passes" if steps != 1 else "one_pass", steps=steps)
    return advice.judgement(f"{words} {filled} {cost_of_steps}", after=after)


def rate_words(plan: Plan, found: Rate) -> str:
    """Say samples, and tokens of a sequence, a second.

    For example ``104 to 158 samples/s, 107,000 to 162,000 tokens/s``.
    """
    words = f"{span(found.least, found.most)} samples/s"
    if plan.shape.seq_len:
        words += f", {span(found.least * plan.shape.seq_len, found.most * plan.shape.seq_len)} tokens/s"
    return words


def span(least: float, most: float) -> str:
    """Return a range in three digits that count.

    >>> span(104.4, 1584.0), span(7.0, 7.001)
    ('104 to 1,580', '7')
    """
    low, high = _three_digits(least), _three_digits(most)
    return low if low == high else f"{low} to {high}"


def _three_digits(value: float) -> str:
    if value >= 100:
        digits = len(str(int(value))) - 3
        return f"{round(value, -digits):,.0f}"
    return f"{value:.3g}"


def cost(plan: Plan) -> Judgement:
    """Say what the wanted tokens take."""
    advice, found, gpus = _Advice("cost"), run(plan), plan.recipe.gpus
    if isinstance(found, Unknown):
        return advice.judgement(advice.text("unknown", reason=found.reason))
    over = advice.text("on_one")
    if found.link is not None:
        over = advice.text("over", gpus=f"{gpus:,}", link=found.link.name)
    text = advice.text("time", tokens=f"{found.tokens:,}", over=over, hours=span(*found.hours))
    text += advice.text("gpu_hours", gpu_hours=span(*found.gpu_hours)) if gpus > 1 else "."
    if found.cost is not None and (price := price_of(plan)) is not None:
        text += advice.text("price", price=f"{price.words} ({price.source})", cost=span(*found.cost))
    else:
        text += advice.text("no_price")
    return advice.judgement(text)


_SCALED = (2, 4, 8, 16, 64)


def scaling(plan: Plan) -> Judgement:
    """Say what data parallel training over more GPUs of this kind brings, by the link between them."""
    advice, joined, found = _Advice("scaling"), links(plan.gpu), rate(plan)
    if isinstance(joined, Unknown):
        return advice.judgement(advice.text("unknown", reason=joined.reason))
    if isinstance(found, Unknown):
        return advice.judgement(advice.text("unknown", reason=found.reason))
    rows = []
    for copies in _SCALED:
        gpus = copies * plan.recipe.model_parallel
        inside = gpus <= GPUS_OF_A_NODE
        for link in joined:
            if link.most < gpus or (link.most <= GPUS_OF_A_NODE) != inside:
                continue
            least, most = kept_shares(plan, copies * plan.recipe.context_parallel, link, found)
            rows.append(
                (
                    f"{gpus}",
                    f"{link.name}, {link.gigabytes_per_s:g} GB/s",
                    f"{100 * least:.0f} to {100 * most:.0f} %",
                    f"{copies * least:.3g} to {copies * most:.3g}×",
                    f"{plan.batch_size * plan.recipe.pipelined * copies:,}",
                )
            )
    table = Table(("GPUs", "over", "efficiency", "speed-up", "samples a pass"), tuple(rows))
    return advice.judgement(advice.text("text"), table)


# How large a batch helps

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


def global_batch(plan: Plan) -> int:
    """Return the samples of an optimizer step over all GPUs."""
    return accumulation(target_of(plan), plan.batch_size, plan.recipe.pass_micro_batches).global_batch_size


def kaplan_critical_tokens(loss: float) -> float:
    """Return a language model's critical batch at a loss in nats: 2.1e8 tokens / L^(1/0.21) (Kaplan 2020, 5.3)."""
    return float(_KAPLAN_BATCH / loss ** (1 / _KAPLAN_EXPONENT))


def critical_batch(plan: Plan) -> Judgement:
    """Say where the plan's batch is: beyond the critical batch size, more samples only waste compute."""
    advice, batch, seq_len = _Advice("critical-batch"), global_batch(plan), plan.shape.seq_len
    known = {
        "begins": advice.text("begins"),
        "samples": counted(batch, "sample"),
        "are": "is" if batch == 1 else "are",
    }
    if plan.shape.record.predicts_tokens:
        text = advice.text("by_loss", tokens=f"{batch * seq_len:,}", **known)
        critical = [(loss, kaplan_critical_tokens(loss)) for loss in _LOSSES]
        rows = [(f"{loss:.1f}", f"{_about(most)} tokens", _stands(batch * seq_len, most)) for loss, most in critical]
        table = Table(("loss in nats", "critical batch", "this plan"), tuple(rows))
        return advice.judgement(text, table, before=advice.text("law"))
    if plan.shape.record.inputs != "images":
        return advice.judgement(advice.text("unpublished", **known))
    rows = [(task, f"{size:,}", _stands(batch, size)) for task, size in _IMAGES]
    table = Table(("task", "critical batch size", "this plan"), tuple(rows))
    return advice.judgement(advice.text("tasks", **known), table)


def _stands(batch: float, critical: float) -> str:
    return "above" if batch > critical else "within"


def _about(value: float) -> str:
    """Round to two digits that count.

    >>> _about(1123456.0), _about(42.4), _about(0.31)
    ('1,100,000', '42', '0.31')
    """
    if value < 1:
        return f"{value:.2g}"
    return f"{round(value, 1 - int(log(value, 10))):,.0f}"


def rounded_batch(plan: Plan, largest: int) -> int:
    """Return the largest multiple of the plan's that is not above `largest`; `largest` itself below one multiple."""
    multiple = plan.goals.batch_multiple
    return largest // multiple * multiple or largest


def multiples(plan: Plan, largest: int | None = None) -> Judgement:
    """Say which micro-batch to take, in the multiples that are wanted; `largest` as in `judgements`."""
    advice, multiple = _Advice("batch-multiple"), plan.goals.batch_multiple
    how, largest = ("formula", largest_batch(plan)) if largest is None else ("trace", largest)
    if not largest:
        text = advice.text("none_fits", how=how)
    else:
        rounded, words = rounded_batch(plan, largest), advice.text("no_multiple")
        if rounded % multiple == 0:
            words = advice.text("rounded", rounded=f"{rounded:,}", multiple=multiple)
        text = advice.text("most", how=how, largest=f"{largest:,}", rounded=words)
    seq_len = plan.shape.seq_len
    if seq_len and seq_len % multiple == 0:
        text += advice.text("sequence", seq_len=f"{seq_len:,}", multiple=multiple)
    else:
        text += advice.text("eights")
    return advice.judgement(text)


# The learning rate


@dataclass(frozen=True)
class Reference:
    """A global batch, in samples, and the rate that is right for it; None for a rate that is not given."""

    batch_size: float
    learning_rate: float | None
    source: str


def rate_factors(reference_batch: float, batch: float) -> tuple[float, float]:
    """Return the range to scale a learning rate by between two global batches: √2 to 2 for each doubling."""
    ratio = batch / reference_batch
    return (ratio**0.5, ratio) if ratio >= 1 else (ratio, ratio**0.5)


def reference(plan: Plan) -> Reference | None:
    """Return a published recipe's value for such a network; None if missing."""
    advice, shape = _Advice("learning-rate"), plan.shape
    if shape.record.predicts_tokens:
        parameters = count_parameters(shape)
        size, tokens, learning = min(_GPT3, key=lambda row: abs(log(row[0] / parameters)))
        return Reference(tokens / shape.seq_len, learning, advice.text("gpt3", billions=f"{size / 1e9:g}"))
    if shape.record.inputs == "images":
        return Reference(_IMAGE_BATCH, None, advice.text("imagenet"))
    return None


def _cap(plan: Plan, advice: _Advice) -> tuple[float, str] | None:
    """Return the batch beyond which a rate is not scaled any further, and why."""
    if plan.shape.record.predicts_tokens:
        tokens = kaplan_critical_tokens(_CAP_LOSS)
        return tokens / plan.shape.seq_len, advice.text("loss_cap", loss=_CAP_LOSS, tokens=_about(tokens))
    if plan.shape.record.inputs == "images":
        return _IMAGE_CAP, advice.text("image_cap", samples=f"{_IMAGE_CAP:,}")
    return None


def learning_rate(plan: Plan) -> Judgement:
    """Say how the learning rate follows the batch, from a reference, and no further than where that holds."""
    advice, known, batch = _Advice("learning-rate"), reference(plan), global_batch(plan)
    if known is None:
        return advice.judgement(advice.text("unknown"))
    begins = advice.text("begins", reference=f"{known.batch_size:,.0f}", whose=known.source, batch=f"{batch:,}")
    cap, scaled, capped = _cap(plan, advice), float(batch), ""
    if cap is not None and batch > max(cap[0], known.batch_size):
        scaled, capped = max(cap[0], known.batch_size), advice.text("capped", why=cap[1])
    least, most = rate_factors(known.batch_size, scaled)
    rates = ""
    if (rate_there := known.learning_rate) is not None:
        rates = f", from {rate_there:.3g} to {rate_there * least:.3g} to {rate_there * most:.3g}"
    doublings, words = f"{log2(batch / known.batch_size):+.1f}", {"least": f"{least:.2f}", "most": f"{most:.2f}"}
    text = advice.text("range", begins=begins, doublings=doublings, rates=rates, capped=capped, **words)
    if batch > known.batch_size:
        text += advice.text("warm_up")
    if plan.shape.record.inputs == "images" and batch > _IMAGES[1][1]:
        text += advice.text("layerwise")
    return advice.judgement(text)


# Batch norm and precision


def batch_norm(plan: Plan) -> Judgement:
    """Say whether batch norm sees enough samples: it sees only the micro-batch, not the accumulated batch."""
    advice, known = _Advice("batch-norm"), {"batch": plan.batch_size, "least": SMALLEST_NORMALIZED_BATCH}
    if not plan.shape.record.has_batch_norm:
        return advice.judgement(advice.text("none", model=plan.shape.name))
    if plan.batch_size >= SMALLEST_NORMALIZED_BATCH:
        return advice.judgement(advice.text("enough", **known))
    return advice.judgement(advice.text("noisy", **known), warning=True)


_FORMATS = (
    ("fp32", "3.4e38", "1.2e-38", "23", "no"),
    ("fp16", "65,504", "6e-8", "10", "needed"),
    ("bf16", "3.4e38", "1.2e-38", "7", "no"),
)


def precision(plan: Plan) -> Judgement:
    """Say which format to take on this GPU."""
    advice, record = _Advice("precision"), PRECISION_RECORDS[plan.recipe.precision]
    has_bf16, text = plan.gpu.compute_capability >= BF16_SINCE, record.advice
    warning = not has_bf16 and record.computes_in == "bfloat16"
    if warning:
        text += advice.text("lacks_bf16", gpu=plan.gpu.title)
    elif has_bf16 and record.scales_loss:
        text += advice.text("has_bf16")
    table = Table(("format", "largest", "smallest", "mantissa bits", "loss scaling"), _FORMATS)
    return advice.judgement(text, table, warning=warning)
