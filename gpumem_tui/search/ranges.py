"""What a trace does not know exactly, in words and as JSON: verdicts of three kinds, device totals from low to high."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gpumem_tui.memory import Range, Unknown, format_bytes, format_range
from gpumem_tui.search.prediction import Fit, KnownUnknown, Traced

FIT_ANSWERS: dict[Fit, str] = {"fits": "yes", "may fit": "maybe", "does not fit": "no"}
"""Whether something fits, in a word."""


def room_words(fit: Fit, free: Range, of: str = "") -> str:
    """What is left of the device, or missing.

    Args:
        free: with the most and with the least of what is not known.
        of: what it is left of, in words.
    """
    left = [max(0, size_bytes) for size_bytes in (free.low_bytes, free.high_bytes)]
    missing = Range.of(max(0, -size_bytes) for size_bytes in (free.low_bytes, free.high_bytes))
    if fit == "fits":
        return f"{format_range(Range.of(left))}{of} left"
    if fit == "may fit":
        return f"{format_bytes(missing.high_bytes)} missing to {format_bytes(max(left))}{of} left"
    return f"{format_range(missing)} missing"


def range_json(fit: Fit, used: Range, may_fit: int | Unknown, unknowns: Iterable[KnownUnknown]) -> dict[str, Any]:
    """Whether a step fits as far as is known, and between what the device total lies and why."""
    return {
        "fits": fit == "fits",
        "fit": fit,
        "device_used_range": used.as_json(),
        "may_fit_batch_size": may_fit if isinstance(may_fit, int) else None,
        "unknowns": [{"name": one.name, **one.size.as_json(), "source": one.source} for one in unknowns],
    }


def up_to(largest: int | Unknown, may_fit: int | Unknown) -> str:
    """The largest batch that may fit, where that is more than what fits for certain; else empty."""
    if isinstance(largest, Unknown) or isinstance(may_fit, Unknown) or may_fit <= largest:
        return ""
    return f" (up to {may_fit:,} may fit)"


def largest_words(largest: int | Unknown, may_fit: int | Unknown) -> str:
    """From the largest batch that fits for certain to the largest that may; empty where that is not known."""
    if isinstance(largest, Unknown):
        return ""
    if isinstance(may_fit, Unknown) or may_fit <= largest:
        return f"{largest:,}"
    return f"{largest:,}–{may_fit:,}"


def range_line(used: Range, unknowns: Sequence[KnownUnknown]) -> str:
    """Between what the device total lies, and by what; empty where it is exact."""
    if used.is_exact:
        return ""
    parts = [f"{one.name} {format_range(one.size)}" for one in unknowns]
    return f"device used {format_range(used)}: {', '.join(parts)}"


def found_line(traced: Traced, batch_size: int) -> str:
    """What a batch that ran on the simulated GPU, which is as expected, is worth on a real one; empty where that is
    known exactly.
    """
    certain, may_fit = traced.max_batch_size, traced.may_fit_batch_size
    used = traced.device_used_range(batch_size)
    if isinstance(certain, Unknown) or isinstance(may_fit, Unknown) or certain == may_fit:
        return ""
    sure = f"batch {certain:,} fits for certain" if certain else "no batch fits for certain"
    return f"on a real one {sure}, {may_fit:,} may: {range_line(used, traced.unknowns(batch_size))}"
