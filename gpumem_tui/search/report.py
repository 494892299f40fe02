"""The search and the predictions as plain lines."""

from __future__ import annotations

import re
from collections import Counter

from gpumem_tui.formula.accumulation import Accumulation, tokens_per_global_batch
from gpumem_tui.formula.parallel import cuts
from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.formula.predict import FormulaPrediction
from gpumem_tui.formula.recipe import Recipe, Sharding
from gpumem_tui.memory import Unknown, format_bytes, format_range
from gpumem_tui.search.comparison import compared, peak_error
from gpumem_tui.search.config import Device, SearchConfig
from gpumem_tui.search.headroom import WithHeadroom
from gpumem_tui.search.ledger import signed
from gpumem_tui.search.prediction import Formula, Prediction, Traced
from gpumem_tui.search.ranges import up_to
from gpumem_tui.search.shortfall import shortfall
from gpumem_tui.simulator.rules import NOT_EXAMINED
from gpumem_tui.step import Phase
from gpumem_tui.trial.events import Outcome, TrialDone
from gpumem_tui.workload.spec import WorkloadSpec

OUTCOME_WORDS: dict[Outcome, str] = {"fit": "fits", "oom": "out of memory", "error": "failed"}
_COMPOSITION_LINES = 20
_SHARDING_NOTES: dict[Sharding, str] = {
    "zero1": "ZeRO-1: ZeroRedundancyOptimizer hands out whole parameters, so rank 0 can hold more than its share",
    "zero2": "ZeRO-2: FSDP2 without resharding after forward, so between steps parameters are sharded too",
    "fsdp2": "FSDP2 with its own mixed precision: MixedPrecisionPolicy(param_dtype=16 bits, reduce_dtype=float32)",
}
PHASE_WORDS = {
    Phase.BUILD: "while the model is built",
    Phase.BATCH: "before forward",
    Phase.FORWARD: "in forward",
    Phase.BACKWARD: "in backward",
    Phase.OPTIMIZER: "in the optimizer step",
}


def workload_line(workload: WorkloadSpec, parameters: int = 0) -> str:
    """The workload in one line. `parameters`: as a trace has counted them, where there is no closed form."""
    shape, recipe, model = workload.shape, workload.recipe, workload.hugging_face
    if model is not None:
        packed = recipe.base_quantization != "none"  # what a trace counts then are not weights
        counted = f"{parameters:,} parameters" if parameters and not packed else ""
        size = f"sequence length {model.seq_len:,}" if model.seq_len else ""
        how = (
            recipe.adapter_words,
            recipe.freeze_words,
            recipe.precision,
            recipe.optimizer,
            f"recompute {recipe.recompute}",
            f"attention {recipe.attention}",
        )
        return " · ".join(part for part in (model.name, model.kind, counted, size, *how) if part)
    if workload.command is not None:
        ranks = f" · rank 0 of {recipe.gpus}" if recipe.gpus > 1 else ""
        return f"{workload.name}{ranks}"
    if shape is None:
        return f"workload file {workload.name}"
    parts = [shape.name, f"{count_parameters(shape):,} parameters"]
    if shape.seq_len:
        parts.append(f"sequence length {shape.seq_len:,}")
    if shape.image_size:
        parts.append(f"{shape.image_size} px")
    parts += [recipe.adapter_words] * recipe.has_adapters
    parts += [recipe.freeze_words] * recipe.has_frozen_layers
    parts += [recipe.precision, recipe.optimizer, f"recompute {recipe.recompute}", f"attention {recipe.attention}"]
    if recipe.sharding != "none":
        parts.append(f"sharding {recipe.sharding} over {recipe.sharded_over} GPUs")
    elif recipe.gpus > 1:
        parts.append(f"{recipe.gpus} GPUs")
    parts += cuts(recipe)
    return " · ".join(parts)


def device_line(device: Device, limit_bytes: int | None = None) -> str:
    """The device in one line, saying in words when it is simulated, and when less of it may be used."""
    reason = f" ({device.reason})" if device.reason else ""
    kind = "SIMULATED " if device.simulated else ""
    limit = f", limited to {format_bytes(limit_bytes)}" if limit_bytes is not None else ""
    host = f"{device.host}: " if device.host else ""
    return f"{host}{kind}{device.gpu.title}{reason}, {format_bytes(device.gpu.total_bytes)}, {device.gpu.sm}{limit}"


def predicted_line(prediction: Prediction) -> str:
    """Both predicted largest batches, with the same headroom, and what the trace says of the whole device."""
    formula, traced = prediction.formula, prediction.traced
    said = f"predicted largest batch{' of one GPU' if formula.workload.recipe.gpus > 1 else ''}: "
    figures = f"formula {_value(formula.max_batch_size)}, traced "
    if isinstance(traced, Unknown):
        return f"{said}{figures}{_value(traced)}"
    whole = _value(traced.max_batch_size) + up_to(traced.max_batch_size, traced.may_fit_batch_size)
    if not formula.headroom or isinstance(formula.max_batch_size, Unknown):
        return f"{said}{figures}{whole}"
    free = f"with {100 * formula.headroom:g} % left free"
    return f"{said}{free} {figures}{_value(prediction.with_headroom)}; with none free traced {whole}"


def gap_line(prediction: Prediction) -> str:
    """Why the formula's largest batch is larger than the traced one, in figures; empty where it is not."""
    formula, traced = prediction.formula, prediction.traced
    if not isinstance(traced, Traced):
        return ""
    by_formula, by_trace = formula.max_batch_size, prediction.with_headroom
    if isinstance(by_formula, Unknown) or isinstance(by_trace, Unknown) or by_formula <= by_trace:
        return ""
    at = max(1, by_trace)
    counted, replay = formula.at(at), traced.at(at)
    assert isinstance(counted, FormulaPrediction), "a formula with a largest batch has rows"
    return (
        f"the formula counts {format_bytes(counted.peak_bytes)} at batch {at}, the traced step"
        f" {format_bytes(replay.peak_allocated_bytes)}, for which the allocator reserves"
        f" {format_bytes(replay.peak_reserved_bytes)}"
    )


def formula_fits_line(formula: Formula, batch_size: int) -> str:
    """Whether the step fits by the closed form, for what is not traced; empty where there is none."""
    found = formula.at(batch_size)
    if isinstance(found, Unknown):
        return ""
    least, most, needed = formula.usable_bytes(), formula.usable_bytes(headroom=0.0), found.needed_bytes
    verdict = "does not fit" if needed > most else "fits" if needed <= least else "fits, but not with the headroom"
    return (
        f"by formula, not traced, {formula.workload.batch_words(batch_size)} {verdict}: with the allocator's cache it "
        f"takes {format_bytes(needed)} of {format_bytes(most)}, {format_bytes(least)} with "
        f"{100 * formula.headroom:g} % left free"
    )


def prediction_notes(prediction: Prediction) -> list[str]:
    """Why the predictions differ, and which smaller sizes do not fit although the largest does."""
    return [line for line in (gap_line(prediction), uneven_line(prediction.traced)) if line]


def uneven_line(traced: Traced | Unknown) -> str:
    """Which smaller sizes do not fit although the largest does; empty where all do."""
    if isinstance(traced, Unknown) or isinstance(largest := traced.expected_batch_size, Unknown):
        return ""
    if not (found := traced.too_large_below(largest)):
        return ""
    sizes = ", ".join(f"{size:,}" for size in found)
    do = "does" if len(found) == 1 else "do"
    return f"by trace {sizes} {do} not fit although {largest:,} does: the allocator's pieces differ by size"


def fits_line(workload: WorkloadSpec, traced: Traced, batch_size: int) -> str:
    """Whether the traced step fits on the device."""
    largest = traced.max_batch_size
    verdict = f"{workload.batch_words(batch_size)} {traced.fit(batch_size)}"
    if workload.command is not None and not workload.command.takes_batch:
        return f"by trace {verdict}; for the largest batch that does, {workload.command.rewriting}"
    if isinstance(largest, Unknown):
        return f"by trace {verdict}; the largest that does is not known: {largest.reason}"
    return f"by trace {verdict}; the largest that does is {largest}{up_to(largest, traced.may_fit_batch_size)}"


def peak_line(traced: Traced, batch_size: int) -> str:
    """The moment of the traced peak: what is not held then (gradients, most often) counts nothing."""
    moment = traced.at(batch_size).peak_moment
    if moment is None:
        return "the traced step allocates nothing"
    mark, site = moment
    place = f", at {site.operator} ({site.source or 'unknown line'})" if site.operator else ""
    return f"traced peak: {PHASE_WORDS[mark.phase]}{f' of step {mark.step}' if mark.step else ''}{place}"


def context_words(traced: Traced) -> str:
    """How large the CUDA context is taken to be, and how that is known."""
    between = traced.context_range
    said = "" if between is None or between.is_exact else f" ({format_range(between)})"
    return f"{format_bytes(traced.context_bytes)}{said}: {traced.context_source}"


def sharding_line(recipe: Recipe) -> str:
    """How a sharded step is traced, where PyTorch's engine differs from the textbook; empty where it does not."""
    return _SHARDING_NOTES.get(recipe.sharding, "")


def trial_line(config: SearchConfig, number: int, result: TrialDone, prediction: Prediction | None) -> str:
    """One trial of the log."""
    line = f"trial {number:>2}  batch {result.batch_size:>5}  {OUTCOME_WORDS[result.outcome]:<13}"
    if result.peak_allocated_bytes:
        line += (
            f"  peak {format_bytes(result.peak_allocated_bytes):>10} allocated"
            f" {format_bytes(result.peak_reserved_bytes):>10} reserved"
            f" {format_bytes(result.device_used_bytes):>10} of the device"
        )
    if prediction is not None:
        error = peak_error(config, prediction.formula, prediction.traced, result)
        if not isinstance(error, Unknown):
            line += f"  {compared(config, prediction.traced)} {signed(error)}"
    return f"{line}  {result.seconds:.1f} s  {shortfall(result, config.limit_bytes)}".rstrip()


def headroom_line(found: WithHeadroom) -> str:
    """Which batch leaves the headroom free, how much that is, and how it is known."""
    share = f"the headroom of {found.share * 100:g} %"
    if not found.batch_size:
        return f"no batch leaves {share} free, by trace"
    known = "as it ran" if found.known_by == "trial" else "by trace"
    return f"batch {found.batch_size:,} leaves {share} free, too: {format_bytes(found.free_bytes)}, {known}"


def accumulation_line(workload: WorkloadSpec, steps: Accumulation) -> str:
    """How the micro-batches reach the wanted global batch, or the next larger one and what smaller ones would do."""
    shape, gpus = workload.shape, workload.recipe.data_parallel
    passes, wanted = steps.steps * gpus, f"{steps.target_batch:,}"
    one = steps.steps == 1
    line = f"{steps.steps:,} accumulation step{'' if one else 's'} of batch {steps.global_batch_size // passes:,}"
    line += f" on {gpus:,} GPUs" if gpus > 1 else ""
    line += f" make{'s' if one else ''} a global batch of {steps.global_batch_size:,}"
    if shape is not None and shape.seq_len:
        line += f" sequences, {tokens_per_global_batch(shape, steps):,} tokens"
    if steps.exact:
        return line
    smaller, rest = divmod(steps.target_batch, passes)
    if smaller and not rest:
        return f"{line}; batch {smaller:,} would make exactly {wanted}"
    return f"{line}; {wanted} cannot be split evenly"


def layers_line(traced: Traced) -> str:
    """Which networks were traced in place of a deeper one; empty where it was traced itself."""
    if not traced.traced_layers:
        return ""
    *others, last = traced.traced_layers
    counts = f"{', '.join(map(str, others))} and {last}"
    return f"traced with {counts} such layers: each adds the same to the step, and the last count confirms it"


def assumed_lines(traced: Traced) -> list[str]:
    """The operators whose kernels' scratch is counted as none: known to take some, a line each, and not examined."""
    known = [entry for entry in traced.assumed if entry[2] != NOT_EXAMINED]
    unknown = [name for name, _, why in traced.assumed if why == NOT_EXAMINED]
    lines = [f"assumed without scratch: aten.{name} ({times} times; {why})" for name, times, why in known]
    if unknown:
        one = len(unknown) == 1
        lines.append(f"{len(unknown)} operator{'' if one else 's'} not examined: {', '.join(unknown)}")
    return lines


def assumed_line(traced: Traced) -> str:
    """The same in one line; empty if nothing was assumed."""
    names = [f"aten.{name}" for name, _, _ in traced.assumed]
    return f"counted without scratch, which is not known: {', '.join(names)}" if names else ""


def composition_lines(traced: Traced, batch_size: int, by: str) -> list[str]:
    """What holds the peak, by ``module``, ``operator`` or ``source`` line; layers of one kind are counted together."""
    totals: Counter[tuple[str, str]] = Counter()
    for held in traced.held_at_peak(batch_size):
        place = re.sub(r"\b\d+\b", "*", str(getattr(held.site, by))) if by == "module" else str(getattr(held.site, by))
        totals[held.bucket.title, place or "–"] += held.size_bytes
    return [
        f"{bucket:<16}  {place:<32}  {format_bytes(size_bytes):>10}"
        for (bucket, place), size_bytes in totals.most_common(_COMPOSITION_LINES)
    ]


def _value(value: int | Unknown) -> str:
    return f"none ({value.reason})" if isinstance(value, Unknown) else str(value)
