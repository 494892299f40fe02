"""Advice on the batch size: what the documents of the field say, with this plan's numbers put in."""

from __future__ import annotations

from collections.abc import Sequence

from gpumem_tui.formula.changes import BF16_SINCE
from gpumem_tui.formula.precision import PRECISION_RECORDS
from gpumem_tui.plan.advice_text import Judgement, Table
from gpumem_tui.plan.batch_advice import critical_batch, learning_rate, multiples
from gpumem_tui.plan.measured import MeasuredRate
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.speed import busy, cost, scaling

SMALLEST_NORMALIZED_BATCH = 16
"""Below it batch norm's statistics are noisy (Wu & He 2018)."""


def judgements(plan: Plan, measured: Sequence[MeasuredRate] = ()) -> tuple[Judgement, ...]:
    """All advice on `plan`. `measured`: the throughput of its step, by micro-batch, where it is known."""
    return (
        busy(plan, measured),
        cost(plan, measured),
        critical_batch(plan),
        multiples(plan),
        learning_rate(plan),
        batch_norm(plan),
        precision(plan),
        scaling(plan, measured),
    )


def batch_norm(plan: Plan) -> Judgement:
    """Whether batch norm sees enough samples: it sees the micro-batch, whatever accumulation adds up to."""
    source = "Ioffe & Szegedy 2015; Wu & He 2018 (group norm)"
    title = "Batch norm"
    if not plan.shape.record.has_batch_norm:
        text = f"{plan.shape.name} has no batch norm: layer norm does not look across samples."
        return Judgement("batch-norm", title, text, source)
    if plan.batch_size >= SMALLEST_NORMALIZED_BATCH:
        text = f"A micro-batch of {plan.batch_size} is enough for batch norm ({SMALLEST_NORMALIZED_BATCH} or more)."
        return Judgement("batch-norm", title, text, source)
    text = (
        f"A micro-batch of {plan.batch_size} is below {SMALLEST_NORMALIZED_BATCH}: batch norm's statistics are noisy, "
        "and accumulation does not help, since each pass is normalized alone. Use group or layer norm, or synchronized "
        "batch norm over the GPUs."
    )
    return Judgement("batch-norm", title, text, source, warning=True)


# Precision and more GPUs

_FORMATS = (
    ("fp32", "3.4e38", "1.2e-38", "23", "no"),
    ("fp16", "65,504", "6e-8", "10", "needed"),
    ("bf16", "3.4e38", "1.2e-38", "7", "no"),
)


def precision(plan: Plan) -> Judgement:
    """Which format to take on this GPU."""
    has_bf16 = plan.gpu.compute_capability >= BF16_SINCE
    record = PRECISION_RECORDS[plan.recipe.precision]
    text = record.advice
    warning = not has_bf16 and record.computes_in == "bfloat16"
    if warning:
        text += f" {plan.gpu.title} has no bfloat16 arithmetic (compute capability 8.0 and newer do): take amp-fp16."
    elif has_bf16 and record.scales_loss:
        text += " This GPU has bfloat16, which needs no scaling."
    table = Table(("format", "largest", "smallest", "mantissa bits", "loss scaling"), _FORMATS)
    source = "IEEE 754; Micikevicius et al. 2018; Kalamkar et al. 2019"
    return Judgement("precision", "Precision", text, source, table, warning)
