"""What the probe inside a process says of it, and what the formula expects."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpumem_tui.memory import ALLOCATED_BUCKETS, Breakdown, Bucket, Unknown, Value, format_bytes
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.tui.kit.figures import ABSENT, MUTED, Row, percent
from gpumem_tui.tui.kit.glyphs import BUCKET_LOOKS
from gpumem_tui.watch.jobs import total_bytes
from gpumem_tui.watch.published import WatchedProcess

if TYPE_CHECKING:
    from gpumem_tui.watch.records import ProbeSample


TITLE_WIDTH = 13
_NAME_WIDTH = 18
_SIZE_WIDTH = 13
_WRAP_WIDTH = 76
_ENTRIES = {
    "run": "started by gpumem-tui run",
    "attach": "attached while it ran",
    "call": "called by the program itself",
    "callback": "by the trainer's callback",
}
DRIVER_ONLY = "none: the driver says what it holds as a whole, not of what"


def seconds(reading: Reading[float]) -> str:
    """A duration in three digits or so.

    >>> seconds(0.0123), seconds(12.3)
    ('12.3 ms', '12.3 s')
    """
    if isinstance(reading, Unknown):
        return ABSENT
    if reading < 1:
        return f"{reading * 1e3:.3g} ms" if reading < 0.9995 else "1 s"
    return f"{reading:.3g} s" if reading < 999.5 else f"{reading:,.0f} s"


def age_text(age_s: Reading[float]) -> str:
    """How old the figures are."""
    return age_s.reason if isinstance(age_s, Unknown) else f"{age_s:.1f} s old" if age_s < 10 else f"{age_s:.0f} s old"


def probed_rows(watched: WatchedProcess, sample: ProbeSample | None) -> list[Row]:
    """The probe's facts, then the buckets now, at the peak and by the formula, side by side."""
    who = watched.process.process
    rows = [
        fact("probe", f"{_ENTRIES.get(who.entry, who.entry)}, torch {who.torch}; {age_text(watched.process.age_s)}"),
    ]
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
    """One sample of it: the step, the allocator, and the buckets."""
    step_s = sample.step_s
    pace = step_s.reason if isinstance(step_s, Unknown) else f"{seconds(step_s)} each"
    step = fact("step", f"{sample.record.step:,}, {pace}")
    return [step, fact("allocator", "; ".join(_allocator(sample))), [], *_table(watched, sample)]


def fact(title: str, said: str, style: str = "") -> Row:
    """A title and what is known."""
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


def _table(watched: WatchedProcess, sample: ProbeSample) -> Iterator[Row]:
    """The buckets; without an allocator, which alone knows of a peak, only those now that were found."""
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
    """The formula's size and its error; nothing for what depends on the batch, which a probe does not see."""
    if predicted is None or bucket not in (Bucket.PARAMETERS, Bucket.GRADIENTS, Bucket.OPTIMIZER):
        return []
    size_bytes = predicted[bucket]
    error = (size_bytes - found) / found if isinstance(found, int) and found else None
    return [(f"{format_bytes(size_bytes):>{_SIZE_WIDTH}}", ""), (f"{percent(error):>{_SIZE_WIDTH}}", MUTED)]


def _sum(title: str, *values: Value) -> Row:
    sizes = "".join(f"{_size(value):>{_SIZE_WIDTH}}" for value in values)
    return [(f"   {title:<{_NAME_WIDTH}}{sizes}", MUTED)]


def _prediction(watched: WatchedProcess, sample: ProbeSample) -> Iterator[Row]:
    """What the prediction is of, and what it takes for granted."""
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


def _wrapped(text: str) -> Iterator[Row]:
    return ([(line, MUTED)] for line in textwrap.wrap(text, _WRAP_WIDTH))


def _size(value: Value) -> str:
    return ABSENT if isinstance(value, Unknown) else format_bytes(value)
