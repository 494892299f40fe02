"""Advice on the batch size: what the documents of the field say, with this plan's numbers put in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from gpumem_tui.catalog.shapes import Gpu, ModelShape
from gpumem_tui.catalog.speeds import MULTIPROCESSORS_OF_OTHERS
from gpumem_tui.formula import convnet
from gpumem_tui.formula.accumulation import accumulation
from gpumem_tui.formula.changes import BF16_SINCE
from gpumem_tui.formula.precision import PRECISION_RECORDS
from gpumem_tui.plan.answers import samples, target_of
from gpumem_tui.plan.curves import Curve, CurveSeries
from gpumem_tui.plan.measured import MeasuredRate
from gpumem_tui.plan.plan import Plan

SMALLEST_NORMALIZED_BATCH = 16
"""Below it batch norm's statistics are noisy (Wu & He 2018)."""

REFERENCE_BATCH = 256
"""The global batch that a published learning rate is taken to belong to (Goyal et al. 2017)."""

_TILE_SIDE = 128

_ALMOST = 0.95
"""Of the highest throughput: a larger micro-batch than the first that reaches it gains little."""


@dataclass(frozen=True)
class Table:
    """Rows of text under a heading each."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Judgement:
    """One piece of advice.

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


def judgements(plan: Plan, measured: Sequence[MeasuredRate] = ()) -> tuple[Judgement, ...]:
    """All advice on `plan`. `measured`: the throughput of its step, by micro-batch, where it is known."""
    return (
        busy(plan, measured),
        critical_batch(plan),
        learning_rate(plan),
        batch_norm(plan),
        precision(plan),
        scaling(plan),
    )


def _global_batch(plan: Plan) -> int:
    return accumulation(target_of(plan), plan.batch_size, plan.recipe.gpus).global_batch_size


# Throughput


def busy_share(shape: ModelShape, gpu: Gpu, batch_size: int) -> float:
    """Model, not measurement: the share of the GPU's multiprocessors that the matrix products keep busy, 0 to 1.

    A product whose output has positions · width elements has that many / 128² tiles, one for each multiprocessor at a
    time; from there on more samples only take longer.
    """
    tiles = batch_size * _output_elements(shape) / _TILE_SIDE**2
    return min(1.0, tiles / _multiprocessors(gpu))


def _multiprocessors(gpu: Gpu) -> int:
    return gpu.multiprocessors or MULTIPROCESSORS_OF_OTHERS


def _output_elements(shape: ModelShape) -> float:
    """Outputs of a typical layer for one sample."""
    if shape.record.has_batch_norm:
        convolutions = convnet.resnet(shape).convolutions
        return sum(convolution.values for convolution in convolutions) / len(convolutions)
    return float((shape.tokens or 1) * shape.hidden)


def saturating_batch(shape: ModelShape, gpu: Gpu) -> int:
    """The smallest batch that `busy_share` calls saturated."""
    per_sample = _output_elements(shape) / _TILE_SIDE**2
    return max(1, -int(-_multiprocessors(gpu) // per_sample))


def throughput(plan: Plan, measured: Sequence[MeasuredRate] = ()) -> Curve:
    """Throughput of one GPU against the micro-batch: as measured, or by the model of `busy_share`."""
    if measured:
        points = tuple((float(rate.batch_size), rate.samples_per_s) for rate in measured)
        series = (CurveSeries("measured", points),)
        note = "measured by the search's trials on this GPU; the first step of each is left out"
        return Curve("throughput", "Throughput", "micro-batch", "samples/s", series, note)
    saturated = saturating_batch(plan.shape, plan.gpu)
    last = max(4 * saturated, 2 * plan.batch_size)
    sizes = sorted({min(last, 1 << power) for power in range(last.bit_length() + 1)} | {saturated, plan.batch_size})
    points = tuple((float(size), 100 * busy_share(plan.shape, plan.gpu, size)) for size in sizes)
    count = f"{_multiprocessors(plan.gpu)} multiprocessors"
    if plan.gpu.multiprocessors is None:
        count += f" (an A100's: those of {plan.gpu.title} are not known)"
    note = f"model, not measured: one 128 × 128 tile for each of {count}; rises until saturated, then flat"
    series = (CurveSeries("model", points),)
    return Curve("throughput", "Throughput", "micro-batch", "% of the highest", series, note, x_here=plan.batch_size)


def busy(plan: Plan, measured: Sequence[MeasuredRate] = ()) -> Judgement:
    """Whether the micro-batch keeps the GPU busy, by the model, after what was measured."""
    share = busy_share(plan.shape, plan.gpu, plan.batch_size)
    saturated = saturating_batch(plan.shape, plan.gpu)
    steps = accumulation(target_of(plan), plan.batch_size, plan.recipe.gpus).steps
    text = (
        f"By a model of tiles and multiprocessors, not measured: micro-batch {plan.batch_size} keeps "
        f"{100 * share:.0f} % of the GPU busy, {saturated} all of it. Beyond, a larger micro-batch takes longer in "
        f"proportion. {steps} accumulation step{f's cost {steps} passes' if steps != 1 else ' costs 1 pass'}."
    )
    if measured:
        text = f"{_fastest(measured)} {text}"
    return Judgement("throughput", "Throughput against batch", text, "model of this program; NVIDIA matmul guide")


def _fastest(measured: Sequence[MeasuredRate]) -> str:
    """What the search's trials say, in a sentence."""
    most = max(measured, key=lambda rate: rate.samples_per_s)
    enough = next(rate for rate in measured if rate.samples_per_s >= _ALMOST * most.samples_per_s)
    text = f"Measured by the search: {most.samples_per_s:.3g} samples/s at most, at micro-batch {most.batch_size}"
    if enough is not most:
        text += f"; micro-batch {enough.batch_size} already gives {enough.samples_per_s:.3g}"
    return f"{text}."


# How large a batch helps

_CRITICAL = (("CIFAR-10", 256), ("ImageNet", 2_048), ("some language models", 65_536))


def critical_batch(plan: Plan) -> Judgement:
    """The gradient-noise trade-off: beyond the critical batch size, more samples only waste compute."""
    batch = _global_batch(plan)
    below = [f"{task} ({size:,})" for task, size in _CRITICAL if batch <= size]
    above = [f"{task} ({size:,})" for task, size in _CRITICAL if batch > size]
    stand = f"The plan's {samples(batch)} {'is' if batch == 1 else 'are'} " + " and ".join(
        part
        for part in (
            f"above the critical batch of {', '.join(above)}" if above else "",
            f"within that of {', '.join(below)}" if below else "",
        )
        if part
    )
    text = (
        "Below the critical batch size, doubling the batch about halves the steps; above it, more samples only waste "
        f"compute, and very large batches tend to sharp minima that generalize worse. {stand}."
    )
    rows = tuple((task, f"{size:,}", "above" if batch > size else "within") for task, size in _CRITICAL)
    table = Table(("task", "critical batch size", "this plan"), rows)
    source = "Keskar et al. 2016; Smith et al. 2018; McCandlish et al. 2018; Shallue et al. 2019"
    return Judgement("critical-batch", "Gradient noise and the critical batch size", text, source, table)


def rate_factors(reference_batch: int, batch: int) -> tuple[float, float]:
    """The range to scale a learning rate by between two global batches: √2 to 2 for each doubling."""
    ratio = batch / reference_batch
    return (ratio**0.5, ratio) if ratio >= 1 else (ratio, ratio**0.5)


def learning_rate(plan: Plan) -> Judgement:
    """How the learning rate follows the batch."""
    batch = _global_batch(plan)
    least, most = rate_factors(REFERENCE_BATCH, batch)
    doublings = log2(batch / REFERENCE_BATCH)
    text = (
        f"From a global batch of {REFERENCE_BATCH:,} to {batch:,} ({doublings:+.1f} doublings): multiply the learning "
        f"rate by {least:.2f} to {most:.2f} (√2 to 2 a doubling; the square root suits Adam, the full factor SGD)."
    )
    if batch > REFERENCE_BATCH:
        text += " Warm up over the first epochs or some thousand steps."
    if batch > _CRITICAL[1][1]:
        text += " At this size LARS (convolutional networks) or LAMB (transformers) adapts the rate by layer."
    source = "Goyal et al. 2017 (ImageNet in 1 hour: 8,192 on 256 GPUs); You et al. 2017 (LARS), 2019 (LAMB)"
    return Judgement("learning-rate", "Learning rate", text, source)


def batch_norm(plan: Plan) -> Judgement:
    """Whether batch norm sees enough samples: it sees the micro-batch, whatever accumulation adds up to."""
    source = "Ioffe & Szegedy 2015; Wu & He 2018 (group norm)"
    title = "Batch norm"
    if not plan.shape.record.has_batch_norm:
        text = f"{plan.shape.name} has no batch norm: layer norm does not look across samples."
        return Judgement("batch-norm", title, text, source)
    if plan.batch_size >= SMALLEST_NORMALIZED_BATCH:
        text = (
            f"A micro-batch of {plan.batch_size} gives batch norm enough samples ({SMALLEST_NORMALIZED_BATCH} or more)."
        )
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


_SCALING = ((1, 1.0, 1.0), (2, 0.90, 0.975), (4, 0.90, 0.95), (8, 0.90, 0.95), (16, 0.80, 0.90), (64, 0.80, 0.90))


def scaling(plan: Plan) -> Judgement:
    """What data parallel training over more GPUs brings, on fast links."""
    rows = tuple(
        (
            f"{gpus}",
            "–" if gpus == 1 else f"{100 * least:.3g} to {100 * most:.3g} %",
            "1×" if gpus == 1 else f"{gpus * least:.3g} to {gpus * most:.3g}×",
            f"{plan.batch_size * gpus:,}",
        )
        for gpus, least, most in _SCALING
    )
    text = (
        "On fast links (NVLink, InfiniBand) data parallel training keeps 90 to 95 % of each GPU over 2 to 8 GPUs and "
        "80 to 90 % over 8 to 64; beyond, communication often dominates."
    )
    table = Table(("GPUs", "efficiency", "speed-up", "samples a pass"), rows)
    return Judgement("scaling", "More GPUs", text, "Goyal et al. 2017; Li et al. 2020 (PyTorch DDP)", table)
