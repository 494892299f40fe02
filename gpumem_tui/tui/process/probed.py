"""The report of the probe inside a process, and the formula's expectation."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpumem_tui.formula.predict import DEFAULT_HEADROOM
from gpumem_tui.memory import ALLOCATED_BUCKETS, Breakdown, Bucket, Unknown, Value, format_bytes
from gpumem_tui.report.tables import ago
from gpumem_tui.text import printable
from gpumem_tui.tui.kit.figures import ABSENT, MUTED, Row, age_text, fit, percent, seconds
from gpumem_tui.tui.kit.glyphs import BUCKET_LOOKS
from gpumem_tui.tui.kit.shares import Share, bar
from gpumem_tui.watch.ends import memory_phrase
from gpumem_tui.watch.expected import FIXED, Expected
from gpumem_tui.watch.postmortem import Case, fragmentation_lines, growth_lines, ledger_rows, request_lines, total_title
from gpumem_tui.watch.published import WatchedProcess, total_bytes
from gpumem_tui.watch.records import TRAINING_STAGES

if TYPE_CHECKING:
    from gpumem_tui.watch.records import ProbeSample


TITLE_WIDTH = 13
_NAME_WIDTH = 18
_SIZE_WIDTH = 13
_WRAP_WIDTH = 76
_STAGE_WIDTH, _STAGE_NAME = 28, 11
_ENTRIES = {
    "run": "started by gpumem-tui run",
    "attach": "attached while it ran",
    "call": "called by the program itself",
    "callback": "by the trainer's callback",
}
DRIVER_ONLY = "none: the driver lists only its total"


def probed_rows(watched: WatchedProcess, sample: ProbeSample | None) -> list[Row]:
    """Return the probe's facts, then the buckets now, at the peak and by the formula, side by side."""
    who = watched.process.process
    age = age_text(watched.process.age_s, watched.process.rarer)
    rows = [fact("probe", f"{_ENTRIES.get(who.entry, who.entry)}, torch {who.torch}; {age}")]
    if watched.process.problem:
        rows.append(fact("", watched.process.problem, "$warning"))
    for growth in watched.growth:
        rows.append(fact("grows", growth.phrase, "$warning"))
        rows.append(fact("", "a look at it (l) names what every step leaves behind", MUTED))
    if who.rank is not None:
        of = "" if who.world_size is None else f" of {who.world_size}"
        rows.append(fact("rank", f"{who.rank}{of}"))
    if sample is None:
        return rows
    return [*rows, *sample_rows(watched, sample), [], *_prediction(watched, sample)]


def sample_rows(watched: WatchedProcess, sample: ProbeSample) -> list[Row]:
    """Return one sample of a process: the step, the allocator, and the buckets."""
    step_s = sample.step_s
    pace = step_s.reason if isinstance(step_s, Unknown) else f"{seconds(step_s)} each"
    step = fact("step", f"{sample.record.step:,}, {pace}")
    stages = list(_stage_rows(watched, sample))
    return [step, fact("allocator", "; ".join(_allocator(sample))), [], *_table(watched, sample), *stages]


def _stage_rows(watched: WatchedProcess, sample: ProbeSample) -> Iterator[Row]:
    """Yield a bar for the peak of each stage of the run, if it does more than train; what is not certain is light."""
    stages = watched.process.stages_on(sample.record.device)
    if {one.stage for one in stages} <= set(TRAINING_STAGES):
        return
    most_bytes = max(one.most_bytes for one in stages) or 1
    top = max(stages, key=lambda one: one.least_bytes)
    yield []
    yield [("   peak of each stage of the run", f"bold {MUTED}")]
    for one in stages:
        cells, known = (round(_STAGE_WIDTH * size / most_bytes) for size in (one.most_bytes, one.least_bytes))
        size = format_bytes(one.least_bytes)
        if one.least_bytes < one.most_bytes:
            size += f" or more, at most {format_bytes(one.most_bytes)}"
        yield [
            (f"   {printable(one.stage)[:_STAGE_NAME]:<{_STAGE_NAME}} ", ""),
            ("█" * known, "$primary"),
            ("░" * (cells - known), MUTED),
            (f" {size}", "bold"),
            ("  highest" if one is top else "", "$warning"),
        ]


def fact(title: str, said: str, style: str = "") -> Row:
    """Return a title and the facts."""
    return [(f"{title:<{TITLE_WIDTH}}", MUTED), (said, style)]


def _allocator(sample: ProbeSample) -> Iterator[str]:
    if isinstance(sample.retries, Unknown):
        yield f"{sample.retries.reason}: what was found is shown"
        return
    yield f"{sample.retries:,} retries"
    if isinstance(sample.ooms, int):
        yield f"out of memory {sample.ooms:,} times"
    if isinstance(sample.inactive_split_bytes, int):
        yield f"{format_bytes(sample.inactive_split_bytes)} free in pieces"
    if isinstance(sample.left_bytes, int):
        limit = format_bytes(sample.record.limit_bytes)
        yield f"limits itself to {limit}, {format_bytes(sample.left_bytes)} left"


def _table(watched: WatchedProcess, sample: ProbeSample) -> Iterator[Row]:
    """Yield the buckets; without an allocator, which alone knows of a peak, only those now that were found."""
    now, peak = sample.buckets, sample.peak_buckets
    has_allocator = sample.record.has_allocator
    predicted = _predicted(watched)
    now_title = "now" if watched.is_running else "last"
    headings = [now_title, *(["at the peak"] * has_allocator), *(["predicted", "error"] * (predicted is not None))]
    yield [(" " * (_NAME_WIDTH + 3) + "".join(f"{title:>{_SIZE_WIDTH}}" for title in headings), f"bold {MUTED}")]
    moments = (now, peak) if has_allocator else (now,)
    reasons: list[str] = []
    for bucket in ALLOCATED_BUCKETS:
        values = [moment.get(bucket) for moment in moments]
        unknown = [value.reason for value in values if isinstance(value, Unknown)]
        reasons += [f"{bucket.title}: {unknown[0]}"] if has_allocator and unknown else []
        if not any(isinstance(value, int) for value in values):
            continue
        sizes = ["" if value is None else _size(value) for value in values]
        yield [
            (f"{BUCKET_LOOKS[bucket][0] * 2} ", BUCKET_LOOKS[bucket][1]),
            (f"{bucket.title:<{_NAME_WIDTH}}", ""),
            ("".join(f"{size:>{_SIZE_WIDTH}}" for size in sizes), "bold"),
            *_compared(bucket, now.get(bucket), predicted),
        ]
    if has_allocator:
        yield _sum("= allocated", sample.allocated_bytes, sample.peak_allocated_bytes)
        yield _sum("= reserved", sample.reserved_bytes, sample.peak_reserved_bytes)
    else:
        yield _sum("= found", total_bytes(sample))
    for reason in reasons:
        yield [(f"{ABSENT}  {reason}", MUTED)]


def _predicted(watched: WatchedProcess) -> Breakdown | None:
    expected = watched.expected
    return None if isinstance(expected, Unknown) or len(watched.own) != 1 else expected.at(0).breakdown


def _compared(bucket: Bucket, found: Value | None, predicted: Breakdown | None) -> Row:
    """Return the formula's size and its error; nothing for what depends on the batch, which a probe does not see."""
    if predicted is None or bucket not in (Bucket.PARAMETERS, Bucket.GRADIENTS, Bucket.OPTIMIZER):
        return []
    size_bytes = predicted[bucket]
    error = (size_bytes - found) / found if isinstance(found, int) and found else None
    return [(f"{format_bytes(size_bytes):>{_SIZE_WIDTH}}", ""), (f"{percent(error):>{_SIZE_WIDTH}}", MUTED)]


def _sum(title: str, *values: Value) -> Row:
    sizes = "".join(f"{_size(value):>{_SIZE_WIDTH}}" for value in values)
    return [(f"   {title:<{_NAME_WIDTH}}{sizes}", MUTED)]


def _prediction(watched: WatchedProcess, sample: ProbeSample) -> Iterator[Row]:
    """Yield what the prediction is of, and what it takes for granted."""
    expected = watched.expected
    if isinstance(expected, Unknown):
        yield from _wrapped(f"No prediction: {expected.reason}")
        return
    recipe = expected.recipe
    yield from _wrapped(f"Predicted as {expected.shape.name}, {recipe.precision}, {recipe.optimizer}.")
    if expected.assumed:
        yield from _wrapped(f"Assumed: {'; '.join(expected.assumed)}.")
    if len(watched.own) > 1:
        yield from _wrapped("It trains on several devices; the prediction is of all of them together.")
    activation_bytes = sample.peak_buckets[Bucket.ACTIVATIONS]
    if isinstance(activation_bytes, int):
        held = expected.samples_held(activation_bytes)
        yield from _wrapped(f"The activations at the peak are what about {held:,} samples of a batch hold.")


def _wrapped(text: str, width: int = _WRAP_WIDTH, style: str = MUTED) -> Iterator[Row]:
    return ([(line, style)] for line in textwrap.wrap(text, max(20, width)))


def _size(value: Value) -> str:
    return ABSENT if isinstance(value, Unknown) else format_bytes(value)


_CASE_WIDTH = 12


def post_mortem_rows(case: Case, width: int, now_s: float) -> list[Row]:
    """Return the whole case."""
    found = case.post_mortem
    rows = list(_wrapped(printable(case.process.title), width, "bold"))
    when = f"{case.what_happened} in step {found.step + 1:,}, {ago(now_s - found.wall_ns / 1e9)}"
    rows.append([("✗ ", "bold $error"), (when, "bold $error")])
    for line in growth_lines(case):
        rows += _wrapped(printable(line), width, "bold $warning")
    for line in request_lines(case):
        rows += _wrapped(printable(line), width, "")
    rows += [[], *_ledger(case, width)]
    for line in fragmentation_lines(found):
        rows += _wrapped(line, width, "$warning")
    rows.append([])
    if isinstance(case.expected, Unknown):
        return [*rows, *_wrapped(f"No prediction to compare with: {case.expected.reason}", width, MUTED)]
    return [*rows, *_compared_case(case, case.expected, width), [], *_remedies(case, case.expected, width)]


def ended_rows(watched: WatchedProcess, width: int, now_s: float) -> list[Row]:
    """Return how a process ended of which there is no post-mortem, and what its last sample with a model was."""
    process, end = watched.process, watched.process.end
    when = "" if end is None else f", {ago(now_s - end.time_s)}"
    is_well = process.has_ended_well
    rows = list(_wrapped(printable(process.title), width, "bold"))
    said = f"{'✓' if is_well else '✗'} {printable(process.state_words)}{when}"
    rows += _wrapped(said, width, "bold" if is_well else "bold $error")
    if end is not None and (held := memory_phrase(end.resident_bytes, end.limit_bytes, end.limit_owner)):
        rows += _wrapped(f"host memory: {held}", width, "")
    for placed in watched.own:
        heading = f"{placed.sample.device}, last sample of its training ({process.step_words})"
        rows += [[], [(heading, f"bold {MUTED}")], *sample_rows(watched, placed.sample)]
    return rows if watched.own else [*rows, [], [("no step has finished", MUTED)]]


def _ledger(case: Case, width: int) -> Iterator[Row]:
    """Yield the device as a bar, then row by row."""
    total_bytes = case.total_bytes
    stretches = [Share(title, title, value, BUCKET_LOOKS[bucket]) for bucket, title, value in ledger_rows(case)]
    if total_bytes is not None:
        known_bytes = sum(share.size_bytes for share in stretches if isinstance(share.size_bytes, int))
        unknown = Share("not known", "not known", max(0, total_bytes - known_bytes), BUCKET_LOOKS[Bucket.UNACCOUNTED])
        yield bar([*stretches[:-1], unknown, stretches[-1]], width)
        yield []
    for share in stretches:
        row: Row = [(f"{share.look[0] * 2} ", share.look[1]), (f"{_size(share.size_bytes):>{_CASE_WIDTH}}", "bold")]
        if total_bytes and isinstance(share.size_bytes, int):
            row.append((f"{share.size_bytes / total_bytes:>8.1%}", MUTED))
        else:
            row.append((" " * 8, ""))
        reason = f": {share.size_bytes.reason}" if isinstance(share.size_bytes, Unknown) else ""
        yield [*row, (f"  {share.label}{reason}", "")]
    if total_bytes is not None:
        yield [(f"   {format_bytes(total_bytes):>{_CASE_WIDTH}}{'':8}  = {total_title(case)}", MUTED)]


def _compared_case(case: Case, expected: Expected, width: int) -> Iterator[Row]:
    """Return how far the formula was off on what does not depend on the batch."""
    recipe = expected.recipe
    yield [(f"By the formula, as {expected.shape.name}, {recipe.precision}, {recipe.optimizer}", "bold $primary")]
    heading = f"{'':{_NAME_WIDTH}}{'predicted':>{_CASE_WIDTH}}{'found':>{_CASE_WIDTH}}{'error':>9}"
    yield [(heading, f"bold {MUTED}")]
    predicted, found = expected.at(0).breakdown, case.post_mortem.breakdown
    for bucket in FIXED:
        error = (predicted[bucket] - found[bucket]) / found[bucket] if found[bucket] else None
        sizes = f"{format_bytes(predicted[bucket]):>{_CASE_WIDTH}}{format_bytes(found[bucket]):>{_CASE_WIDTH}}"
        yield [(f"{bucket.title:<{_NAME_WIDTH}}", ""), (sizes, "bold"), (f"{percent(error):>9}", MUTED)]
    if expected.assumed:
        yield from _wrapped(f"Assumed: {'; '.join(expected.assumed)}.", width, MUTED)
    if isinstance(case.rest_bytes, int) and not case.grew.bytes:
        held = expected.samples_held(case.rest_bytes)
        yield from _wrapped(f"The rest is what about {held:,} samples of a batch hold.", width, MUTED)


def _remedies(case: Case, expected: Expected, width: int) -> Iterator[Row]:
    """Yield what would have made it fit."""
    total_bytes = case.total_bytes
    if total_bytes is None:
        return
    fits = expected.max_batch_size(total_bytes)
    put_off = "Changes that would only have delayed it" if case.grew.bytes else "Changes that would have made it fit"
    yield [(put_off, "bold $primary")]
    said = f"a batch of at most {fits:,}, with {DEFAULT_HEADROOM:.0%} of {format_bytes(total_bytes)} left free"
    yield [(f"{fits:>8,}  ", "bold"), (fit(said, max(0, width - 10)), "")]
    for remedy in case.remedies:
        yield [(f"{remedy.max_batch_size:>8,}  ", "bold"), (fit(str(remedy), max(0, width - 10)), "")]
    if case.remedies:
        yield [("The number is the largest batch that then fits.", MUTED)]
