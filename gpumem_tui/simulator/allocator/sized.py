"""The bytes of named causes, by the run in which they were found: at another batch size they are others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from gpumem_tui.causes import Cause, CauseKind, Note
from gpumem_tui.memory import Bucket
from gpumem_tui.simulator.allocator.growing import growth
from gpumem_tui.simulator.allocator.timeline import Timeline
from gpumem_tui.step import CASTS, REDUCE_BUCKETS, UPCASTS, Phase

_MADE_IN_EVALUATION = Bucket.ACTIVATIONS, Bucket.TEMPORARY, Bucket.OTHER


def sized(notes: Iterable[Note], run: Timeline, peak_event: int) -> Iterator[Note]:
    """Yield the notes of a run, each cause with its bytes there; a cause that takes none there is left out.

    Args:
        peak_event: after which event of the run most is allocated.
    """
    for note in notes:
        if not isinstance(note, Cause) or note.cause not in _SIZES:
            yield note
        elif size_bytes := _SIZES[note.cause](run, peak_event):
            sized_note = replace(note, size_bytes=size_bytes)
            yield _placed(sized_note, run, peak_event) if note.cause == "upcasts" else sized_note


def _placed(note: Cause, run: Timeline, peak_event: int) -> Cause:
    """Return a cause of activations that many lines make with the line that makes most of them."""
    by_line: Counter[str] = Counter()
    for one in run.held_after(peak_event):
        if one.site.part == UPCASTS and one.bucket is Bucket.ACTIVATIONS:
            by_line[one.site.source] += one.size_bytes
    [(line, _)] = by_line.most_common(1)
    return replace(note, line=line, sentence=f"most are made at {line}; {note.sentence}") if line else note


def _of_growth(run: Timeline, _: int) -> int:
    grown = growth(run)
    return 0 if grown is None else grown.size_bytes


def _of_part(part: str, *buckets: Bucket) -> Callable[[Timeline, int], int]:
    def size_bytes(run: Timeline, peak_event: int) -> int:
        held = (one for one in run.held_after(peak_event) if one.site.part == part and one.bucket in buckets)
        return sum(one.size_bytes for one in held)

    return size_bytes


_SIZES: Mapping[CauseKind, Callable[[Timeline, int], int]] = {
    "leak": _of_growth,
    "whole_checkpoint": lambda run, _: run.most_made_in(Phase.BACKWARD, Bucket.ACTIVATIONS),
    "evaluation_with_gradients": lambda run, _: run.most_made_in(Phase.EVALUATION, *_MADE_IN_EVALUATION),
    "reduce_buckets": _of_part(REDUCE_BUCKETS, Bucket.TEMPORARY),  # those that gradients are views of are gradients
    "casts": _of_part(CASTS, *Bucket),
    "upcasts": _of_part(UPCASTS, Bucket.ACTIVATIONS),
}
"""The causes whose bytes go by the batch size."""
