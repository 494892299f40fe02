"""Words for a search's results: ranges, how far a prediction was off, missing memory, the ledger of a batch size."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.predict import FormulaPrediction
from gpumem_tui.memory import ALLOCATED_BUCKETS, Breakdown, Bucket, Range, Unknown, Value, format_bytes, format_range
from gpumem_tui.report.tables import counted
from gpumem_tui.run.events import RanOut, Sample, TrialDone
from gpumem_tui.search.assumed import assumption_words
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.prediction import BatchSizes, Fit, Formula, KnownUnknown, Prediction, Traced
from gpumem_tui.simulator.allocator.replay import Replay
from gpumem_tui.simulator.allocator.timeline import Held, Mark
from gpumem_tui.step import Phase

PHASE_WORDS = {
    Phase.BUILD: "while the model is built",
    Phase.BATCH: "before forward",
    Phase.FORWARD: "in forward",
    Phase.BACKWARD: "in backward",
    Phase.OPTIMIZER: "in the optimizer step",
    Phase.EVALUATION: "in evaluation or sampling",
    Phase.FORWARD_ONLY: "in forward only",
}


def moment_words(mark: Mark) -> str:
    """Say in which phase of which step a moment is; an evaluation is after a step."""
    if mark.phase is Phase.EVALUATION:
        return f"{PHASE_WORDS[mark.phase]}, {f'after step {mark.step - 1}' if mark.step > 1 else 'before any step'}"
    if mark.phase is Phase.FORWARD_ONLY:
        return PHASE_WORDS[mark.phase]
    return PHASE_WORDS[mark.phase] + (f" of step {mark.step}" if mark.step else "")


# Ranges

FIT_ANSWERS: dict[Fit, str] = {"fits": "yes", "may fit": "maybe", "may not fit": "maybe not", "does not fit": "no"}
"""Whether something fits, in a word."""


def used_words(used: Range, total_bytes: int) -> str:
    """Say how much of a device's memory a step takes: ``1.50–3.62 of 23.64 GiB``, or needs where that is more.

    Args:
        used: with the least and with the most of what is not known.
    """
    taken, total = format_range(used), format_bytes(total_bytes)
    unit = f" {total.rpartition(' ')[2]}"
    return f"{'needs ' if used.high_bytes > total_bytes else ''}{taken.removesuffix(unit)} of {total}"


def room_words(free: Range, of: str = "") -> str:
    """Say what is left of the device, or missing.

    Args:
        free: with the most and with the least of what is not known; below 0 it is missing.
        of: what it is left of, in words.
    """
    if free.low_bytes >= 0:
        return f"{format_range(free)}{of} left"
    if free.high_bytes < 0:
        return f"{format_range(Range(-free.high_bytes, -free.low_bytes))} missing"
    return f"{format_bytes(-free.low_bytes)} missing to {format_bytes(free.high_bytes)}{of} left"


def sizes_words(sizes: BatchSizes | Unknown, *, is_estimate: bool = False) -> str:
    """Say which batch is safe, which is expected to run and which fits at most; empty where that is not known.

    Args:
        is_estimate: the trace is one, by which no batch is safe.
    """
    if isinstance(sizes, Unknown):
        return ""
    if not sizes.at_most:
        return "no batch fits"
    if is_estimate:
        return f"largest batch that may fit {largest_words(sizes.safe, sizes.at_most)}"
    if sizes.safe == sizes.at_most:
        return f"safe batch {sizes.safe:,}"
    safe = f"safe batch {sizes.safe:,}" if sizes.safe else "no batch is safe"
    return f"{safe}, {sizes.expected:,} expected, {sizes.at_most:,} at most"


_WIDE = 1.5
"""Times what a step takes that is left where an estimate of it fits by a wide margin: 60 % of the device."""


def fit_words(traced: Traced, batch_size: int) -> str:
    """Say whether a step fits; where memory grows, for about how many steps."""
    fit: str = traced.fit(batch_size)
    steps = traced.steps_left(batch_size)
    if fit == "may fit" and traced.done.is_estimate and traced.done.steps:
        used, free = traced.device_used_range(batch_size), traced.free_range(batch_size)
        if free.low_bytes >= _WIDE * used.high_bytes:
            fit = "fits by a wide margin (estimate)"
    return fit if steps is None or "not" in fit else f"{fit} for about {steps:,} steps"


def verdict_words(verdict: str, used: str, room: str, sizes: str, rests_on: Iterable[str] = ()) -> str:
    """Return the first line of `predict` and `plan`, for models and for commands, without its full stop.

    Args:
        verdict: what fits, or not, and where. `used`: of the memory; see `used_words`. `room`: what is left or missing.
        sizes: see `sizes_words`. `rests_on`: what the verdict rests on; see `rests_on`.
    """
    return "; ".join(filter(None, (f"{verdict}: {used}, {room}", sizes, *rests_on)))


def rests_on(traced: Traced | Unknown, network: str = "") -> tuple[str, ...]:
    """Return what a verdict by trace rests on, a phrase each, for its first line in every verb.

    Args:
        network: what was traced, where that is not to be taken for granted.
    """
    if isinstance(traced, Unknown):
        return ()
    samples = traced.done.samples
    is_less = samples and not isinstance(sizes := traced.sizes, Unknown) and samples < sizes.at_most
    without = f"without {' and '.join(traced.done.without)}, compiled for CUDA" if traced.done.without else ""
    few = samples_words(samples, traced) if is_less else ""
    return tuple(filter(None, (network, assumption_words(traced), without, few)))


def samples_words(samples: int, traced: Traced | Unknown | None = None) -> str:
    """Say that no batch was run that is larger than the data, or than a rank's share of it.

    Args:
        samples: of the largest batch, which may be of several passes. `traced`: tells that, if known.
    """
    of_rank = has = ""
    if isinstance(traced, Traced):
        of_rank = " a rank" if max(traced.ready.groups, default=1) > 1 else ""
        in_passes = traced.done.fed_by and all(count != samples for count, _ in traced.done.fed_by)
        has = f"the data fills no batch above {samples:,}" if in_passes else ""
    has = has or f"the data has {counted(samples, 'sample')}"
    return f"{has}{of_rank}: larger ones were not run"


def up_to(largest: int | Unknown, may_fit: int | Unknown) -> str:
    """Say which largest batch may fit, where that is more than what fits for certain; else empty."""
    if isinstance(largest, Unknown) or isinstance(may_fit, Unknown) or may_fit <= largest:
        return ""
    return f" (up to {may_fit:,} may fit)"


def largest_words(largest: int | Unknown, may_fit: int | Unknown) -> str:
    """Write the largest batch that fits for certain to the largest that may; empty where that is not known."""
    if isinstance(largest, Unknown):
        return ""
    if isinstance(may_fit, Unknown) or may_fit <= largest:
        return f"{largest:,}"
    return f"{largest:,}–{may_fit:,}"


def range_line(used: Range, unknowns: Sequence[KnownUnknown]) -> str:
    """Say between what the device total is, and by what; empty where it is exact."""
    if used.is_exact:
        return ""
    parts = [f"{one.name} {format_range(one.size)}" for one in unknowns]
    return f"device used {format_range(used)}: {', '.join(parts)}"


# Which prediction a trial is held against, and by how much that was off


def compared(config: SearchConfig, traced: Traced | Unknown) -> Literal["formula", "traced"]:
    """Return which prediction's error is shown: the trace's, on a real GPU.

    A trial on the simulated GPU is the traced step run once more. That the two agree proves nothing, so there the
    closed form is compared, as it is where there is no trace; only a workload file has no closed form.
    """
    if config.workload.shape is not None and (config.device.simulated or isinstance(traced, Unknown)):
        return "formula"
    return "traced"


def proves_something(config: SearchConfig, traced: Traced | Unknown) -> bool:
    """Return whether a trial shows how far a prediction is off: not on the simulated GPU, of what is traced alone.

    Trial and trace are two runs of one simulation there.
    """
    return not config.device.simulated or compared(config, traced) == "formula"


def peak_error(config: SearchConfig, formula: Formula, traced: Traced | Unknown, result: TrialDone) -> Value:
    """Return the compared prediction less a trial's allocated peak, in bytes; unknown unless the trial fits."""
    if result.outcome != "fit":
        return Unknown("the trial ended early")
    if compared(config, traced) == "formula":
        counted = formula.at(result.batch_size)
        return counted if isinstance(counted, Unknown) else counted.peak_bytes - result.peak_allocated_bytes
    if isinstance(traced, Unknown):
        return traced
    return traced.at(result.batch_size).peak_allocated_bytes - result.peak_allocated_bytes


# Out of memory

_MUCH_MORE = 1.1


def tried_words(ran_out: RanOut | None, fit: Fit) -> str:
    """Say what a command ran out of memory with, and what it settled at; empty where it never ran out."""
    if ran_out is None:
        return ""
    if ran_out.tried and fit == "does not fit":
        return f"tried {ran_out.tried[0]:,} down to {ran_out.settled or 0:,}"
    if ran_out.tried:
        return f"tried {ran_out.tried[0]:,}, settled at {ran_out.settled or 0:,}"
    times = "once" if ran_out.times == 1 else f"{ran_out.times} times, first"
    return f"ran out of memory {times} at {ran_out.place or 'an unknown line'} and went on"


def what_fits(traced: Traced, batch_size: int, otherwise: str) -> str:
    """Say what a verdict is about, to stand before "fits".

    Args:
        otherwise: that, of what never ran out of memory.
    """
    ran_out = traced.done.ran_out
    said = tried_words(ran_out, traced.fit(batch_size))
    said = f"{said}{', which' if ran_out is not None and ran_out.tried else '; the rest'}" if said else otherwise
    return f"{said[:1].upper()}{said[1:]}"


def cached_line(ran_out: RanOut | None, needed_bytes: int) -> str:
    """Say what the allocator keeps of what a command tried; empty where that is no more than what it needs.

    Args:
        needed_bytes: what it reserves at most with what it settled at.
    """
    if ran_out is None or ran_out.reserved_bytes <= _MUCH_MORE * needed_bytes:
        return ""
    kept = format_bytes(ran_out.reserved_bytes)
    return f"PyTorch keeps {kept} reserved after it ran out of memory: torch.cuda.empty_cache() gives back what is free"


_SIZE = r"([\d.]+ (?:[KMGT]iB|bytes))"
_WANTED = re.compile(rf"Tried to allocate {_SIZE}")
_FREE = re.compile(rf"of which {_SIZE} is free|; {_SIZE} free")
"""PyTorch's own words, and those of a real trial."""


def shortfall(result: TrialDone, limit_bytes: int | None = None) -> str:
    """Say ``wanted 9.78 GiB, 9.02 GiB free`` of a trial that was out of memory; empty for one that fits.

    Its own message stays where it names no sizes or the trial failed for another reason.

    Args:
        limit_bytes: a user's cap on reserved bytes: memory beyond it is free, but cannot be used.
    """
    wanted, free = _WANTED.search(result.detail), _FREE.search(result.detail)
    if result.outcome != "oom" or wanted is None:
        return result.detail
    line = f"wanted {wanted[1]}"
    if free is not None:
        line += f", {free[1] or free[2]} free"
    return line if limit_bytes is None else f"{line}, limited to {format_bytes(limit_bytes)}"


# The ledger of one batch size


@dataclass(frozen=True)
class _Column:
    """A column of the ledger: the figures of one producer, None where it has none."""

    title: str
    held: Breakdown | None
    reserved_bytes: int | None = None
    used_bytes: int | None = None
    counts_other: bool = True

    @property
    def cells(self) -> list[int | None]:
        """Its figures, in the order of the rows."""
        held = self.held
        buckets = [
            None if held is None or (bucket is Bucket.OTHER and not self.counts_other) else held[bucket]
            for bucket in ALLOCATED_BUCKETS
        ]
        return [*buckets, None if held is None else held.total_bytes, self.reserved_bytes, self.used_bytes]


_LEDGER_ROWS = (*(bucket.title for bucket in ALLOCATED_BUCKETS), "= allocated", "reserved", "device used")
ENGINE = ", ".join(("inference engine", "beside"))
"""The row of an inference engine in the GPU, which the step's own memory is without."""


def ledger_lines(config: SearchConfig, prediction: Prediction, result: TrialDone | None, batch_size: int) -> list[str]:
    """Write Formula | Traced | Simulated or Measured | error of the compared prediction, a line a bucket.

    Formula where there is a closed form. Without Traced where a trial on the simulated GPU repeats it, and where
    there is no closed form: the trace is the same simulation.
    """
    counted = prediction.formula.at(batch_size)
    traced = prediction.traced if isinstance(prediction.traced, Traced) else None
    replay = traced.at(batch_size) if traced is not None else None
    columns = []
    if isinstance(counted, FormulaPrediction):
        columns.append(_Column("Formula", counted.breakdown, counts_other=False))
    if traced is not None and replay is not None and (result is None or proves_something(config, traced)):
        used = traced.device_used_bytes(batch_size)
        columns.append(_Column("Traced", replay.breakdown, replay.peak_reserved_bytes, used))
    if result is not None:
        title, reserved = config.device.measured_title, result.peak_reserved_bytes
        trial = _Column(title, result.breakdown, reserved, result.device_used_bytes)
        if config.device.simulated and columns and columns[-1].cells == trial.cells:
            columns.pop()
        columns.append(trial)
    engine_bytes = config.device.gpu.engine_bytes
    width, at = len(ENGINE) if engine_bytes else 20, f"at {config.workload.batch_words(batch_size)}"
    heading = f"{at:<{width}}" + "".join(f" {one.title:>11}" for one in columns)
    most = _most_words(counted, replay) if result is None else {}
    errors = _errors(config, prediction, columns) if result is not None else ()
    if errors:
        heading += f"{f'{compared(config, prediction.traced)} error':>16}"
    elif result is None:
        of = "forward" if replay and _in_forward_only(replay) else "the step"
        heading += f"   Most in {of}{'' if replay else ' (formula)'}"
    lines = [heading]
    for index, (title, *values) in enumerate(zip(_LEDGER_ROWS, *(one.cells for one in columns), strict=True)):
        line = f"{title:<{width}}" + "".join(f" {format_bytes(value):>11}" for value in values)
        line += f"{errors[index]:>16}" if errors else ""
        line += f"   {most[title]}" if title in most else ""
        lines.append(line)
    if engine_bytes:
        lines.append(ENGINE + f" {format_bytes(engine_bytes):>11}" * len(columns))
    return lines


def _errors(config: SearchConfig, prediction: Prediction, columns: Sequence[_Column]) -> Sequence[str]:
    """Return the compared prediction less the trial, a text a row; empty where that proves nothing or is not known."""
    title = compared(config, prediction.traced).capitalize()
    predicted = next((one for one in columns if one.title == title), None)
    if predicted is None or not proves_something(config, prediction.traced):
        return ()
    return [
        "–" if said is None or ran is None else signed(said - ran)
        for said, ran in zip(predicted.cells, columns[-1].cells, strict=True)
    ]


def _most_words(counted: FormulaPrediction | Unknown, replay: Replay | None) -> dict[str, str]:
    """Return by a bucket's title the most that it holds in a step: traced, with the phase where that is not the peak.

    Without a trace by formula.
    """
    if replay is not None:
        return {
            bucket.title: f"{format_bytes(one.size_bytes):>9}"
            + (f", {PHASE_WORDS[one.mark.phase]}" if one.size_bytes > replay.breakdown[bucket] else "")
            for bucket, one in replay.bucket_peaks.items()
        }
    if isinstance(counted, Unknown):
        return {}
    return {bucket.title: f"{format_bytes(size_bytes):>9}" for bucket, size_bytes in counted.highest.buckets.items()}


def _in_forward_only(replay: Replay) -> int:
    """Return the highest allocated bytes in forward of a program that trains nothing; 0 of one that trains."""
    return max((one.peak_allocated_bytes for one in replay.phases if one.phase is Phase.FORWARD_ONLY), default=0)


def forward_only_words(replay: Replay) -> str:
    """Say how much forward takes at most, where nothing is trained and more is taken before; else empty."""
    peak_bytes = _in_forward_only(replay)
    is_less = 0 < peak_bytes < replay.peak_allocated_bytes
    return f"; in forward only {format_bytes(peak_bytes)} at most" if is_less else ""


def highest_line(replay: Replay) -> str:
    """Name the buckets that hold more at another moment than at the peak, with the most that they do; or nothing."""
    more = [
        f"{bucket.title} {format_bytes(one.size_bytes)} ({PHASE_WORDS[one.mark.phase]})"
        for bucket, one in replay.bucket_peaks.items()
        if one.size_bytes > replay.breakdown[bucket]
    ]
    return f"more at other moments of the step: {', '.join(more)}" if more else ""


_GRADIENTS_OF = {
    "log_softmax_backward": "the logits' gradient by ",
    "cross_entropy_loss_backward": "the logits' gradient by ",
    "nll_loss_backward": "the log-probabilities' gradient by ",
}
"""Words for the results of a loss's backward operators."""
_LARGEST_TEMPORARIES, _MOST_FUSED = 3, 4


def temporaries_line(held: Sequence[Held]) -> str:
    """Name what makes the largest temporary tensors at a moment, by operator and line; empty if missing.

    Args:
        held: what is live then, the largest first.
    """
    words = []
    for one in [one for one in held if one.bucket is Bucket.TEMPORARY][:_LARGEST_TEMPORARIES]:
        what = next((words for name, words in _GRADIENTS_OF.items() if name in one.site.operator), "")
        place = fused_words(one.site.source or "unknown line", one.site.fused)
        named = one.site.part or one.site.operator or "an unknown operator"
        words.append(f"{format_bytes(one.size_bytes)} {what}{named} ({place})")
    return f"temporary at the peak, the largest: {'; '.join(words)}" if words else ""


def fused_words(source: str, fused: Iterable[str]) -> str:
    """Name a place of compiled code: its line, and the lines whose operators are in the same kernel.

    Args:
        source: ``file:line``; empty where unknown.
        fused: further such lines, of which those of the same file are named by their numbers.
    """
    own, spans = source.rpartition(":")[0], list[tuple[str, int, int]]()
    by_file = sorted((file, int(number)) for file, _, number in (line.rpartition(":") for line in {*fused} - {source}))
    for file, number in by_file:
        if spans and spans[-1][0] == file and number == spans[-1][2] + 1:
            spans[-1] = (file, spans[-1][1], number)
        else:
            spans.append((file, number, number))
    words = [
        f"{'' if file == own else f'{file}:'}{first}{f' to {last}' if last > first else ''}"
        for file, first, last in sorted(spans, key=lambda span: span[0] != own)
    ]
    more = f" and {len(words) - _MOST_FUSED} more" if len(words) > _MOST_FUSED else ""
    return f"{source or '–'}{', fused with ' if words else ''}{', '.join(words[:_MOST_FUSED])}{more}"


def signed(size_bytes: int) -> str:
    """Write a difference of bytes with its sign."""
    return f"{'+' if size_bytes > 0 else ''}{format_bytes(size_bytes)}" if size_bytes else "±0"


def reserve_words(gpu: Gpu) -> str:
    """Say what the driver keeps for itself, and between what figures that moves from one driver to the next."""
    said = format_bytes(gpu.reserve_bytes)
    if not gpu.reserves:
        return said
    sizes = [gpu.reserve_bytes, *(size_bytes for _, size_bytes in gpu.reserves)]
    first, last = gpu.reserves[0][0], gpu.reserves[-1][0]
    if not first:
        return f"{said}; {format_bytes(min(sizes))} to {format_bytes(max(sizes))} of GPUs of about its size"
    return f"{said}; {format_bytes(min(sizes))} to {format_bytes(max(sizes))} by driver ({first} to {last}, and others)"


def how_far(sample: Sample) -> str:
    """Say where a run is: its step and phase, micro-batch, a graph that is compiled, and how long the rest takes."""
    at = sample.progress
    parts = [f"step {sample.step + bool(at.micro_batch)} {sample.phase}"]
    if at.micro_batch and at.micro_batches != 1:
        parts.append(f"micro-batch {at.micro_batch}" + (f" of {at.micro_batches}" if at.micro_batches else ""))
    if at.ooms:
        parts.append(f"out of memory {counted(at.ooms, 'time')}")
    if at.graph:
        parts.append(f"compiling graph {at.graph}")
    if at.elapsed_s >= 1:
        parts.append(f"{at.elapsed_s:.0f} s")
    if at.left_s is not None and at.left_s >= 1:
        parts.append(f"about {at.left_s:.0f} s left")
    return ", ".join(parts)
