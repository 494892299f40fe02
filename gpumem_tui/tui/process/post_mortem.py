"""After memory ran out: what filled the device, what was asked for, and what would have made it fit."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from gpumem_tui.formula.predict import DEFAULT_HEADROOM
from gpumem_tui.memory import Bucket, Unknown, format_bytes
from gpumem_tui.text import printable
from gpumem_tui.tui.kit.figures import ABSENT, MUTED, Row, fit, percent
from gpumem_tui.tui.kit.glyphs import BUCKET_LOOKS
from gpumem_tui.tui.kit.shares import Share, bar
from gpumem_tui.tui.process.probed import sample_rows
from gpumem_tui.watch.ends import memory_phrase
from gpumem_tui.watch.expected import FIXED, Expected
from gpumem_tui.watch.postmortem import Case, fragmentation_lines, ledger_rows, request_lines, what_happened
from gpumem_tui.watch.published import WatchedProcess
from gpumem_tui.watch.report import ago

_SIZE_WIDTH = 12
_NAME_WIDTH = 18


def post_mortem_rows(case: Case, width: int, now_s: float) -> list[Row]:
    """The whole case."""
    found = case.post_mortem
    rows = list(_wrapped(printable(case.process.title), width, "bold"))
    when = f"{what_happened(case)} in step {found.step + 1:,}, {ago(now_s - found.wall_ns / 1e9)}"
    rows.append([("✗ ", "bold $error"), (when, "bold $error")])
    for line in request_lines(found):
        rows += _wrapped(printable(line), width)
    rows += [[], *_ledger(case, width)]
    for line in fragmentation_lines(found):
        rows += _wrapped(line, width, "$warning")
    rows.append([])
    if isinstance(case.expected, Unknown):
        return [*rows, *_wrapped(f"No prediction to compare with: {case.expected.reason}", width, MUTED)]
    return [*rows, *_prediction(case, case.expected, width), [], *_remedies(case, case.expected, width)]


def ended_rows(watched: WatchedProcess, width: int, now_s: float) -> list[Row]:
    """How a process ended of which there is no post-mortem, and what its last sample with a model was."""
    process, end = watched.process, watched.process.end
    when = "" if end is None else f", {ago(now_s - end.time_s)}"
    is_well = process.has_ended_well
    rows = list(_wrapped(printable(process.title), width, "bold"))
    said = f"{'✓' if is_well else '✗'} {printable(process.state_words)}{when}"
    rows += _wrapped(said, width, "bold" if is_well else "bold $error")
    if end is not None and (held := memory_phrase(end.resident_bytes, end.limit_bytes, end.limit_owner)):
        rows += _wrapped(f"host memory: {held}", width)
    for placed in watched.own:
        heading = f"{placed.sample.device}, last sample of its training (the last step seen was {process.step:,})"
        rows += [[], [(heading, f"bold {MUTED}")], *sample_rows(watched, placed.sample)]
    return rows if watched.own else [*rows, [], [("no step has finished", MUTED)]]


def _ledger(case: Case, width: int) -> Iterator[Row]:
    """The device as a bar, then row by row."""
    total_bytes = case.post_mortem.device_total_bytes
    stretches = [Share(title, title, value, BUCKET_LOOKS[bucket]) for bucket, title, value in ledger_rows(case)]
    if total_bytes is not None:
        known_bytes = sum(share.size_bytes for share in stretches if isinstance(share.size_bytes, int))
        unknown = Share("not known", "not known", max(0, total_bytes - known_bytes), BUCKET_LOOKS[Bucket.UNACCOUNTED])
        yield bar([*stretches[:-1], unknown, stretches[-1]], width)
        yield []
    for share in stretches:
        size = ABSENT if isinstance(share.size_bytes, Unknown) else format_bytes(share.size_bytes)
        row: Row = [(f"{share.look[0] * 2} ", share.look[1]), (f"{size:>{_SIZE_WIDTH}}", "bold")]
        if total_bytes and isinstance(share.size_bytes, int):
            row.append((f"{share.size_bytes / total_bytes:>8.1%}", MUTED))
        else:
            row.append((" " * 8, ""))
        reason = f": {share.size_bytes.reason}" if isinstance(share.size_bytes, Unknown) else ""
        yield [*row, (f"  {share.label}{reason}", "")]
    if total_bytes is not None:
        yield [(f"   {format_bytes(total_bytes):>{_SIZE_WIDTH}}{'':8}  = device", MUTED)]


def _prediction(case: Case, expected: Expected, width: int) -> Iterator[Row]:
    """How far the formula was off on what does not depend on the batch."""
    recipe = expected.recipe
    yield [(f"By the formula, as {expected.shape.name}, {recipe.precision}, {recipe.optimizer}", "bold $primary")]
    heading = f"{'':{_NAME_WIDTH}}{'predicted':>{_SIZE_WIDTH}}{'found':>{_SIZE_WIDTH}}{'error':>9}"
    yield [(heading, f"bold {MUTED}")]
    predicted, found = expected.at(0).breakdown, case.post_mortem.breakdown
    for bucket in FIXED:
        error = (predicted[bucket] - found[bucket]) / found[bucket] if found[bucket] else None
        sizes = f"{format_bytes(predicted[bucket]):>{_SIZE_WIDTH}}{format_bytes(found[bucket]):>{_SIZE_WIDTH}}"
        yield [(f"{bucket.title:<{_NAME_WIDTH}}", ""), (sizes, "bold"), (f"{percent(error):>9}", MUTED)]
    if expected.assumed:
        yield from _wrapped(f"Assumed: {'; '.join(expected.assumed)}.", width, MUTED)
    if isinstance(case.rest_bytes, int):
        held = expected.samples_held(case.rest_bytes)
        yield from _wrapped(f"The rest is what about {held:,} samples of a batch hold.", width, MUTED)


def _remedies(case: Case, expected: Expected, width: int) -> Iterator[Row]:
    """What would have made it fit."""
    total_bytes = case.post_mortem.device_total_bytes
    if total_bytes is None:
        return
    fits = expected.max_batch_size(total_bytes)
    yield [("What would have made it fit", "bold $primary")]
    said = f"a batch of at most {fits:,}, with {DEFAULT_HEADROOM:.0%} of the device left free"
    yield [(f"{fits:>8,}  ", "bold"), (fit(said, max(0, width - 10)), "")]
    for remedy in case.remedies:
        said = f"{remedy.name} ({remedy.option}); costs {remedy.cost}"
        yield [(f"{remedy.max_batch_size:>8,}  ", "bold"), (fit(said, max(0, width - 10)), "")]
    if case.remedies:
        yield [("The number is the largest batch that then fits.", MUTED)]


def _wrapped(text: str, width: int, style: str = "") -> Iterator[Row]:
    return ([(line, style)] for line in textwrap.wrap(text, max(20, width)))
