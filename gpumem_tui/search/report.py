"""The search and the predictions as plain lines and as JSON objects: schema 1, whose keys are a public contract."""

from __future__ import annotations

import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from gpumem_tui.causes import INPUTS_ALIKE, TRIES_LONGER, Note
from gpumem_tui.formula.accumulation import Accumulation, accumulation, tokens_per_global_batch
from gpumem_tui.formula.checks import cuts
from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.formula.predict import FormulaPrediction
from gpumem_tui.formula.recipe import Sharding
from gpumem_tui.memory import ALLOCATED_BUCKETS, Bucket, Unknown, format_bytes
from gpumem_tui.report.objects import reason_of
from gpumem_tui.report.tables import TextColumn, TextTable, counted
from gpumem_tui.run.events import Outcome, Ready, TrialDone
from gpumem_tui.search.assumed import convolution_lines, momentary_line, not_reached_line, scratch_lines
from gpumem_tui.search.beside import share_line
from gpumem_tui.search.config import Device, SearchConfig
from gpumem_tui.search.fragmentation import remedy
from gpumem_tui.search.frameworks import line_for_any_batch
from gpumem_tui.search.prediction import Formula, Prediction, Traced
from gpumem_tui.search.stages import deciding_words, stage_lines
from gpumem_tui.search.verdict import Verdict, WithHeadroom
from gpumem_tui.search.words import (
    cached_line,
    compared,
    fit_words,
    forward_only_words,
    fused_words,
    ledger_lines,
    moment_words,
    peak_error,
    proves_something,
    range_line,
    reserve_words,
    rests_on,
    room_words,
    shortfall,
    signed,
    sizes_words,
    temporaries_line,
    up_to,
    used_words,
    verdict_words,
    what_fits,
)
from gpumem_tui.workload.spec import WorkloadSpec

OUTCOME_WORDS: dict[Outcome, str] = {"fit": "fits", "oom": "out of memory", "error": "failed"}
_COMPOSITION_LINES = 20
_COMPOSITION = TextTable(TextColumn("bucket", 16), TextColumn("place", 32), TextColumn("size", 10, ">"))
_FORMULA_BUCKETS = tuple(bucket for bucket in ALLOCATED_BUCKETS if bucket is not Bucket.OTHER)
_SHARDING_NOTES: dict[Sharding, str] = {
    "zero1": "ZeRO-1: ZeroRedundancyOptimizer hands out whole parameters, so rank 0 can hold more than its share",
    "zero2": "ZeRO-2: FSDP2 without resharding after forward, so between steps parameters are sharded too",
    "fsdp2": "FSDP2 with its own mixed precision: MixedPrecisionPolicy(param_dtype=16 bits, reduce_dtype=float32)",
}


def workload_line(workload: WorkloadSpec, parameters: int = 0) -> str:
    """Return the workload in one line.

    Args:
        parameters: as a trace has counted them, where there is no closed form.
    """
    shape, recipe, model = workload.shape, workload.recipe, workload.hugging_face
    how = [recipe.adapter_words, recipe.freeze_words, recipe.precision, recipe.optimizer]
    how += [f"recompute {recipe.recompute}", f"attention {recipe.attention}"]
    how += ["compiled"] if recipe.compile else []
    if model is not None:
        packed = recipe.base_quantization != "none"  # what a trace counts then are not weights
        parameters = count_parameters(shape) if shape is not None else 0 if packed else parameters
        counted = f"{parameters:,} parameters" if parameters else ""
        size = f"sequence length {model.seq_len:,}" if model.seq_len else ""
        return " · ".join(filter(None, (model.name, model.kind, counted, size, *how)))
    if workload.command is not None:
        ranks = f" · rank {workload.rank} of {recipe.gpus}" if recipe.gpus > 1 else ""
        return f"{workload.name}{ranks}"
    if shape is None:
        return f"workload file {workload.name}"
    parts = [shape.name, f"{count_parameters(shape):,} parameters"]
    if shape.seq_len:
        parts.append(f"sequence length {shape.seq_len:,}")
    if shape.image_size:
        parts.append(f"{shape.image_size} px")
    parts += how
    if recipe.sharding != "none":
        parts.append(f"sharding {recipe.sharding} over {recipe.sharded_over} GPUs")
    elif recipe.gpus > 1:
        parts.append(f"{recipe.gpus} GPUs")
    parts += cuts(recipe)
    return " · ".join(filter(None, parts))


def device_line(device: Device, limit_bytes: int | None = None) -> str:
    """Return the device in one line, saying in words when it is simulated, and when less of it may be used."""
    reason = f" ({device.reason})" if device.reason else ""
    kind = "SIMULATED " if device.simulated else ""
    limit = f", limited to {format_bytes(limit_bytes)}" if limit_bytes is not None else ""
    return f"{kind}{device.gpu.title}{reason}, {format_bytes(device.gpu.total_bytes)}, {device.gpu.sm}{limit}"


def largest_lines(prediction: Prediction) -> list[str]:
    """Return the predicted largest batches as a table: with the headroom left free, and with nothing left free."""
    formula, traced = prediction.formula, prediction.traced
    title = f"predicted largest batch{' of one GPU' if formula.workload.recipe.gpus > 1 else ''}"
    largest = traced if isinstance(traced, Unknown) else traced.max_batch_size
    by_formula = formula.max_batch_size
    if isinstance(traced, Unknown) or isinstance(largest, Unknown):
        counted = "" if isinstance(by_formula, Unknown) else f"formula {by_formula:,}, "
        return [f"{title}: {counted}traced not known ({reason_of(largest)})"]
    by_trace = f"{largest:,}", up_to(largest, traced.may_fit_batch_size)
    roomy = prediction.with_headroom
    rows = [] if isinstance(roomy, Unknown) else [(f"{100 * formula.headroom:g} % left free", f"{roomy:,}", "")]
    rows = [*rows, ("nothing left free", *by_trace)] if formula.headroom else [("nothing left free", *by_trace)]
    cells = [] if isinstance(by_formula, Unknown) else [f"{by_formula:,}", *("–" for _ in rows[1:])]
    lines = [f"{title:<34}{'Formula':>10}{'Traced':>10}" if cells else f"{title:<34}{'Traced':>10}"]
    for index, (name, found, more) in enumerate(rows):
        lines.append(f"  {name:<32}{f'{cells[index]:>10}' if cells else ''}{found:>10}{more}")
    return lines


def gap_line(prediction: Prediction) -> str:
    """Return why the formula's largest batch is larger than the traced one, in figures; empty where it is not."""
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
    """Return whether a step that is not traced fits by the closed form; empty where there is no closed form."""
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


def formula_takes(formula: Formula, batch_size: int) -> str:
    """Return in a few words what a step takes by the closed form; empty where there is no closed form."""
    found = formula.at(batch_size)
    if isinstance(found, Unknown):
        return ""
    needed, most = format_bytes(found.needed_bytes), format_bytes(formula.usable_bytes(headroom=0.0))
    return f"by formula {formula.workload.batch_words(batch_size)} takes {needed} of {most}"


def prediction_notes(prediction: Prediction) -> list[str]:
    """Return why the predictions differ, and which smaller sizes do not fit although the largest does."""
    return [line for line in (gap_line(prediction), uneven_line(prediction.traced)) if line]


def uneven_line(traced: Traced | Unknown) -> str:
    """Return which smaller sizes do not fit although the largest does; empty where all do."""
    if isinstance(traced, Unknown) or isinstance(largest := traced.expected_batch_size, Unknown):
        return ""
    if not (too_large := traced.too_large_below(largest)):
        return ""
    sizes = ", ".join(f"{size:,}" for size in too_large)
    do = "does" if len(too_large) == 1 else "do"
    return f"by trace {sizes} {do} not fit although {largest:,} does: the allocator's pieces differ by size"


def answer_line(config: SearchConfig, prediction: Prediction, batch_size: int) -> str:
    """Return whether the step fits, what it takes and leaves, the safe batch, and what to type next.

    Empty where there is neither a trace nor a closed form.
    """
    traced = prediction.traced
    if isinstance(traced, Unknown):
        return formula_fits_line(prediction.formula, batch_size)
    answer = verdict_line(config, traced, batch_size, config.workload.batch_words(batch_size))
    return f"{answer}. {next_words(config, traced, batch_size)}".removesuffix(". ")


def verdict_line(config: SearchConfig, traced: Traced, batch_size: int, what: str) -> str:
    """Return whether a step fits, what it takes and leaves, and the safe batch.

    Args:
        what: the words for the step.
    """
    subject = what_fits(traced, batch_size, what)
    limited = f" limited to {format_bytes(config.limit_bytes)}" if config.limit_bytes is not None else ""
    verdict = f"{subject} {fit_words(traced, batch_size)} on {traced.gpu.title}{limited}"
    used, total_bytes = traced.device_used_range(batch_size), traced.gpu.cuda_total_bytes
    if config.limit_bytes is not None:
        used, total_bytes = traced.reserved_range_at(batch_size), config.limit_bytes
    return verdict_words(
        verdict,
        used_words(used, total_bytes),
        room_words(traced.free_range(batch_size)),
        _sizes_words(config.workload, traced),
        (*rests_on(traced, config.workload.network), *deciding_words(traced, batch_size)),
    )


def _sizes_words(workload: WorkloadSpec, traced: Traced) -> str:
    """Return the three batch sizes of the verdict, or why they are not known; empty of a command with one batch."""
    if traced.done.ran_out is not None or (workload.command is not None and not workload.command.takes_batch):
        return ""
    if isinstance(sizes := traced.sizes, Unknown):
        return f"the largest batch is not known: {sizes.reason}"
    return sizes_words(sizes, is_estimate=traced.done.is_estimate)


def next_words(config: SearchConfig, traced: Traced, batch_size: int) -> str:
    """Return what to type next: what makes the step fit, else what finds the largest batch; empty for nothing."""
    command = config.workload.command
    if not traced.fits_leaving(batch_size, 0):
        found = remedy(traced, batch_size)
        if found is not None and found.fit == "fits":
            return f"{found.how} makes it fit at no cost"
        if config.limit_bytes is None:  # which no plan takes
            return f"To make it fit: {plan_line(config, batch_size)}"
    if command is None or command.takes_batch or traced.done.ran_out is not None:
        return ""
    return f"Largest batch: {line_for_any_batch(config, 'search')}"


def plan_line(config: SearchConfig, batch_size: int) -> str:
    """Return the complete line to type that plans what was predicted."""
    return line_of(config, batch_size, "plan")


def line_of(config: SearchConfig, batch_size: int, *verb: str) -> str:
    """Return the complete line to type that asks another verb, or for more, of what was predicted."""
    command = config.workload.command
    size = ["--batch-size", str(batch_size)] if config.workload.takes_batch else []
    words = ["gpumem-tui", *verb, *size, *config.typed]
    return f"`{shlex.join(words)}{f' -- {command.text}' if command is not None else ''}`"


def peak_line(traced: Traced, batch_size: int) -> str:
    """Return the moment of the traced peak. Buckets empty at that moment, gradients most often, count nothing."""
    replay = traced.at(batch_size)
    moment = replay.peak_moment
    if moment is None:
        return "the traced step allocates nothing"
    mark, site = moment
    place = f", at {site.operator} ({site.source or 'unknown line'})" if site.operator else ""
    return f"traced peak: {moment_words(mark)}{place}{forward_only_words(replay)}"


def context_line(traced: Traced) -> str:
    """Return how large the CUDA context is taken to be, and its source. Its range is a part of `range_line`."""
    ready = traced.ready
    return f"{traced.gpu.runtime} context {format_bytes(ready.context_bytes)}: {ready.context_source}"


def trial_line(config: SearchConfig, number: int, result: TrialDone, prediction: Prediction | None) -> str:
    """Return one trial of the log."""
    line = f"trial {number:>2}  batch {result.batch_size:>5}  {OUTCOME_WORDS[result.outcome]:<13}"
    if result.peak_allocated_bytes:
        line += (
            f"  peak {format_bytes(result.peak_allocated_bytes):>10} allocated"
            f" {format_bytes(result.peak_reserved_bytes):>10} reserved"
            f" {format_bytes(result.device_used_bytes):>10} of the device"
        )
    if prediction is not None and proves_something(config, prediction.traced):
        error = peak_error(config, prediction.formula, prediction.traced, result)
        if not isinstance(error, Unknown):
            line += f"  {compared(config, prediction.traced)} {signed(error)}"
    return f"{line}  {result.seconds:.1f} s  {shortfall(result, config.limit_bytes)}".rstrip()


_MUCH_MORE = 1.5
_LEFT = {"trace": "if unknown sizes are as expected", "trial": "left in its trial"}
"""Source of the free bytes, printed after their number."""


def headroom_line(found: WithHeadroom, total_bytes: int) -> str:
    """Return which batch keeps the headroom free, and how much it leaves of the memory, which is `total_bytes`.

    Where it leaves much more than that share, as its unknown parts may take the rest, the line shows that it may.
    """
    share = f"{found.share * 100:g} %"
    if not found.batch_size:
        return f"no batch keeps {share} free"
    left = format_bytes(found.free_bytes)
    if found.free_bytes > _MUCH_MORE * found.share * total_bytes:
        return f"batch {found.batch_size:,} keeps {share} free ({left} {_LEFT[found.known_by]})"
    return f"batch {found.batch_size:,} keeps {share} ({left}) free"


def accumulation_line(workload: WorkloadSpec, steps: Accumulation) -> str:
    """Return how micro-batches reach the wanted global batch, or the next larger one and what smaller ones would do."""
    shape, recipe, wanted = workload.shape, workload.recipe, f"{steps.target_batch:,}"
    passes = steps.steps * recipe.pass_micro_batches
    one = steps.steps == 1
    line = f"{steps.steps:,} accumulation step{'' if one else 's'} of batch {steps.global_batch_size // passes:,}"
    line += f", {recipe.pipelined:,} of them through the pipeline," if recipe.pipelined > 1 else ""
    line += f" on {recipe.data_parallel:,} GPUs" if recipe.data_parallel > 1 else ""
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
    """Return which networks were traced in place of a deeper one; empty where that was traced itself."""
    if not traced.done.traced_layers:
        return ""
    *others, last = traced.done.traced_layers
    counts = f"{', '.join(map(str, others))} and {last}"
    return f"traced with {counts} such layers: each adds an equal amount to the step, and the last count confirms it"


def frozen_line(traced: Traced, batch_size: int) -> str:
    """Return what frozen weights of 32 bits could save; empty without any."""
    if not (saving_bytes := traced.frozen_saving_bytes(batch_size)):
        return ""
    return f"frozen weights of 32 bits would take {format_bytes(saving_bytes)} less in 16 bits (.to(torch.bfloat16))"


def parts_lines(traced: Traced, batch_size: int) -> Iterator[str]:
    """Yield what a bucket consists of at the peak, where it has named parts."""
    found = traced.parts(batch_size)
    for bucket in ALLOCATED_BUCKETS:
        parts = [f"{format_bytes(size_bytes)} {part}" for of, part, size_bytes in found if of is bucket]
        if parts:
            yield f"{bucket.title}: {', '.join(parts)}"


def composition_lines(traced: Traced, batch_size: int, by: str) -> list[str]:
    """Return what holds the peak, by ``module``, ``operator`` or ``source`` line; layers of one kind count together."""
    totals: Counter[tuple[str, str]] = Counter()
    fused: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for held in traced.held_at_peak(batch_size):
        named = str(getattr(held.site, by))
        if by == "operator" and held.bucket is Bucket.TEMPORARY:
            named = held.site.part or named
        key = held.bucket.title, re.sub(r"\b\d+\b", "*", named) if by == "module" else named
        totals[key] += held.size_bytes
        fused[key].update(held.site.fused if by == "source" else ())
    return [
        _COMPOSITION.row(bucket, fused_words(place, fused[bucket, place]), format_bytes(size_bytes))
        for (bucket, place), size_bytes in totals.most_common(_COMPOSITION_LINES)
    ]


# A whole report


def prediction_lines(
    config: SearchConfig, prediction: Prediction, ready: Ready | None, batch_size: int, by: str | None, *, explain: bool
) -> Iterator[str]:
    """Yield what `predict` states.

    Args:
        ready: what traced; None if nothing did.
        by: also list what holds the traced peak, by ``module``, ``operator`` or ``source``.
        explain: also the details, else one line that names them and the line to type.
    """
    traced = prediction.traced
    if answer := answer_line(config, prediction, batch_size):
        yield answer
    if isinstance(traced, Traced) and (share := share_line(traced, batch_size)):
        yield share
    if isinstance(traced, Traced) and (found := remedy(traced, batch_size)) is not None:
        yield found.line
    if (steps := wanted_accumulation(config, batch_size)) is not None:
        yield accumulation_line(config.workload, steps)
    yield ""
    yield from ledger_lines(config, prediction, None, batch_size)
    if config.workload.takes_batch:
        yield from largest_lines(prediction)
    yield ""
    yield workload_line(config.workload, traced.done.parameters if isinstance(traced, Traced) else 0)
    by_what = "by formula only" if ready is None else f"torch {ready.torch_version}, profile {ready.profile}"
    yield f"on {device_line(config.device, config.limit_bytes)}, {by_what}"
    yield from prediction_notes(prediction)
    if isinstance(traced, Traced):
        yield from filter(None, (not_reached_line(traced),))
        yield from _traced_lines(traced, batch_size)
        yield from details_lines(config, traced, batch_size, explain=explain)
        if by is not None:
            yield f"\nthe traced peak by {by}"
            yield from composition_lines(traced, batch_size, by)


def _traced_lines(traced: Traced, batch_size: int) -> Iterator[str]:
    """Yield where the peak is and what holds it, and every note that can change the verdict."""
    replay = traced.at(batch_size)
    yield peak_line(traced, batch_size)
    yield from stage_lines(traced, batch_size)
    yield from filter(None, (temporaries_line(traced.held_at_peak(batch_size)),))
    kept = cached_line(traced.done.ran_out, replay.peak_reserved_bytes)
    yield from filter(None, (kept, frozen_line(traced, batch_size), momentary_line(traced, batch_size)))
    yield from notes_lines(traced.notes(batch_size))


def notes_lines(notes: Iterable[Note]) -> Iterator[str]:
    """Yield the notes that are no details."""
    yield from (str(note) for note in notes if not _is_detail(note))


def _is_detail(note: Note) -> bool:
    """Return whether a note is on inputs of one length where nothing tells of longer ones: it changes no verdict."""
    return str(note).startswith(INPUTS_ALIKE) and str(note).endswith(TRIES_LONGER)


def _details(config: SearchConfig, traced: Traced, batch_size: int) -> Iterator[tuple[str, str]]:
    """Yield what the figures rest on: the topic of each line, and the line; empty without anything to say."""
    gpu = config.device.gpu
    used, unknowns = traced.device_used_range(batch_size), traced.unknowns(batch_size)
    yield "range of device used", range_line(used, unknowns)
    yield f"{gpu.runtime} context", context_line(traced)
    yield "driver reserve", f"driver reserve {reserve_words(gpu)}" if gpu.reserves else ""
    yield "sharding", _SHARDING_NOTES.get(config.workload.recipe.sharding, "")
    yield "layers traced", layers_line(traced)
    yield from (("parts of buckets", line) for line in parts_lines(traced, batch_size))
    yield from (("workspaces", line) for line in convolution_lines(traced, batch_size))
    yield from (("scratch not included", line) for line in scratch_lines(traced))
    yield from (("inputs", str(note)) for note in traced.notes(batch_size) if _is_detail(note))


def details_lines(config: SearchConfig, traced: Traced, batch_size: int, *, explain: bool = False) -> Iterator[str]:
    """Yield the details, or one line that names their topics and what to type for them."""
    found = [(topic, line) for topic, line in _details(config, traced, batch_size) if line]
    if explain:
        yield from (line for _, line in found)
    elif found:
        topics = ", ".join(dict.fromkeys(topic for topic, _ in found))
        yield f"{counted(len(found), 'more line')} ({topics}): {line_of(config, batch_size, 'predict', '--explain')}"


def begun_lines(config: SearchConfig) -> list[str]:
    """Return the subject of a search, before its first result."""
    where = device_line(config.device, config.limit_bytes)
    return [workload_line(config.workload), f"on {where}, strategy {config.strategy}"]


def predicted_lines(prediction: Prediction, ready: Ready) -> Iterator[str]:
    """Yield what a search states of its prediction."""
    yield f"torch {ready.torch_version}, profile {ready.profile}"
    yield from largest_lines(prediction)
    yield from prediction_notes(prediction)


def result_lines(
    config: SearchConfig,
    verdict: Verdict,
    prediction: Prediction | None,
    largest: TrialDone | None,
    advice: Sequence[str],
) -> Iterator[str]:
    """Yield what a search's verdict rests on.

    Args:
        largest: the trial of the largest batch that fits.
        advice: what would help where nothing fits.
    """
    traced = None if prediction is None else prediction.traced
    if prediction is not None and largest is not None:
        yield ""
        yield from ledger_lines(config, prediction, largest, largest.batch_size)
        if isinstance(traced, Traced):
            yield peak_line(traced, largest.batch_size)
            yield from filter(None, (momentary_line(traced, largest.batch_size),))
        yield ""
    yield from () if largest is None else notes_lines(largest.notes)
    if isinstance(traced, Traced) and (missing := not_reached_line(traced)):
        yield missing
    verified = f"batch {verdict.max_batch_size:,} verified{' on the simulated GPU' if config.device.simulated else ''}"
    checked = f"{verified}, " if verdict.verified else "not verified, " if verdict.outcome == "found" else ""
    yield f"{checked}{counted(verdict.trials, 'trial')}, {verdict.ooms} out of memory"
    if isinstance(traced, Traced) and (size := verdict.safe_batch_size or verdict.max_batch_size):
        yield from details_lines(config, traced, size)
    yield from (f"  {line}" for line in advice)
    if (steps := wanted_accumulation(config, verdict.safe_batch_size)) is not None:
        yield accumulation_line(config.workload, steps)


def verdict_lines(config: SearchConfig, verdict: Verdict, change: str = "") -> Iterator[str]:
    """Yield how a search has ended: what fits with room left, or what to change; then the command to run."""
    line = f"{verdict.message[:1].upper()}{verdict.message[1:]}"
    if verdict.with_headroom is not None:
        line += f"; {headroom_line(verdict.with_headroom, config.room.total_bytes)}"
    if verdict.remedy is not None:
        line += f"; {verdict.remedy.larger_line}"
    yield f"{line}. To change: {change}." if change else f"{line}."
    if command := command_found(config, verdict):
        yield f"To run: {command}"


def command_found(config: SearchConfig, verdict: Verdict | None) -> str:
    """Return the user's command with the safe batch size, as it is typed; empty without one of them."""
    workload, size = config.workload, 0 if verdict is None else verdict.safe_batch_size
    if workload.command is None or workload.hugging_face is not None or not size:
        return ""
    passes = workload.command.accumulation(size, config.target_batch, workload.recipe.pass_micro_batches)
    return workload.command.files_at(size, passes) + workload.command.text_at(size, passes)


def wanted_accumulation(config: SearchConfig, batch_size: int) -> Accumulation | None:
    """Return how a micro-batch reaches the wanted global batch; None if none is wanted, or not one sample fits."""
    if config.target_batch is None or not batch_size:
        return None
    return accumulation(config.target_batch, batch_size, config.workload.recipe.pass_micro_batches)
