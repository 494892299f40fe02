"""A trace's assumptions on rows and kernels, ranges of cuDNN's workspaces, and parts not included, in words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from gpumem_tui.memory import Range, format_bytes, format_range
from gpumem_tui.report.objects import JsonObject
from gpumem_tui.report.tables import counted
from gpumem_tui.run.later import NotReached
from gpumem_tui.search.prediction import Traced
from gpumem_tui.simulator.allocator.assumptions import Kind
from gpumem_tui.simulator.allocator.rules import CONVOLUTIONS, NOT_EXAMINED

_CONVOLUTION_WORDS = {
    "measured": "as measured on an H200 with cuDNN 9.19",
    "bounded": "known between two ends",
    "unknown": "not known but for what others were measured to take at most",
}

_EVERY_STEPS = re.compile(r"\w+ (every [\d,]+) steps")


def not_reached_line(traced: Traced) -> str:
    """Say how many steps of a command were followed, and what it does besides these; empty where all is included."""
    steps, missing = traced.done.steps, traced.done.not_reached
    if not missing:
        return ""
    followed = f"{counted(steps, 'step')} followed; not included: "
    if not any(one.when for one in missing):
        names = " or ".join(one.phase for one in missing)
        return f"{followed}anything after step {steps}, such as {names}; --steps N follows more"
    phases = [one.phase if one.phase == "resuming" else f"{one.phase} ({when})" for one, when in _short(missing)]
    return f"{followed}{', '.join(phases)}; {_options(missing)} follows {'it' if len(missing) == 1 else 'them'}"


def _short(missing: Sequence[NotReached]) -> Iterator[tuple[NotReached, str]]:
    """Yield each with when it comes; the unit is named once where the same one follows."""
    is_named = False
    for one in missing:
        when = one.when or ""
        match = _EVERY_STEPS.fullmatch(when)
        yield one, match[1] if match and is_named else when
        is_named = is_named or match is not None


def _options(missing: Sequence[NotReached]) -> str:
    reach = [one.reach for one in missing]
    both = [f"--through {part}" for part in ("eval", "save")]
    return " ".join(["--through all", *reach[2:]] if reach[:2] == both else reach)


class RowsAssumed(JsonObject, frozen=True):
    """Rows that a trace takes for kept where only a GPU's values tell, and the least and the most that can be.

    Attributes:
        place: ``file:line``.
        changes_sizes: whether what the step takes depends on it; at its other end it takes what
            `device_used_range` begins at.
    """

    place: str
    kind: Kind
    rows: int
    low: int
    high: int
    changes_sizes: bool

    @classmethod
    def of(cls, traced: Traced) -> tuple[RowsAssumed, ...]:
        """Return what a trace assumes."""
        return tuple(cls(**asdict(one), changes_sizes=bool(traced.assumptions)) for one in traced.done.assumptions)


class ConvolutionPasses(JsonObject, frozen=True):
    """Passes of convolutions with equally known workspaces: how many, and the bytes of the largest."""

    passes: int
    largest: Range


def assumption_words(traced: Traced) -> str:
    """Return what is assumed of the most rows, and at how many other places; empty where no size depends on it."""
    if not (found := traced.assumptions):
        return ""
    more = f" and at {counted(len(found) - 1, 'other place')}" if found[1:] else ""
    return f"{found[0].words}{more} ({found[0].remedy})"


def assumed_lines(traced: Traced, batch_size: int) -> Iterator[str]:
    """Yield what we know about workspaces, and then about scratch."""
    yield from workspace_lines(traced, batch_size)
    yield from scratch_lines(traced)


def scratch_lines(traced: Traced) -> Iterator[str]:
    """Yield a line for each operator that takes scratch that is not included, and one for all that may."""
    for name, times, why in traced.done.assumed:
        if why != NOT_EXAMINED:
            yield f"not included: scratch of aten.{name} ({times} times; {why})"
    if unknown := [name for name, _, why in traced.done.assumed if why == NOT_EXAMINED]:
        yield f"{counted(len(unknown), 'operator')} not examined: {', '.join(unknown)}"


def assumed_line(traced: Traced) -> str:
    """Return the operators whose scratch is counted as none in one line; empty if missing."""
    names = [f"aten.{name}" for name, _, _ in traced.done.assumed]
    return f"counted without scratch, which is not known: {', '.join(names)}" if names else ""


def workspace_lines(traced: Traced, batch_size: int) -> Iterator[str]:
    """Yield what trials take for a moment, and how many convolutions have known workspaces, and between what bytes."""
    yield from filter(None, (momentary_line(traced, batch_size),))
    yield from convolution_lines(traced, batch_size)


def momentary_line(traced: Traced, batch_size: int) -> str:
    """Return what cudnn.benchmark's trials take for a moment in the first step; empty where it is off."""
    if (peaks := traced.momentary_peaks(batch_size)) is None:
        return ""
    settled = traced.at(batch_size).peak_allocated_bytes
    return (
        f"{format_bytes(settled)} allocated, and up to {format_bytes(peaks[0])} for a moment in the first step "
        f"where there is room ({format_bytes(peaks[1])} reserved): cudnn.benchmark tries algorithms and continues "
        "without those that do not fit"
    )


def convolution_lines(traced: Traced, batch_size: int) -> Iterator[str]:
    """Yield how many convolutions have known workspaces, and between what bytes."""
    library = "MIOpen" if traced.gpu.arch else "cuDNN"
    for known, (times, each) in convolutions(traced, batch_size).items():
        yield (
            f"{counted(times, 'convolution')} whose workspace is {_CONVOLUTION_WORDS[known]}: "
            f"{format_range(each)} for the largest, as {library} chooses"
        )


def convolutions(traced: Traced, batch_size: int) -> dict[str, tuple[int, Range]]:
    """Return how many passes of convolutions the traced steps have, by what we know about their workspaces.

    Each with the least and the most of that of them that may take most.
    """
    found = {}
    computed = traced.trace.at(batch_size).computed
    for known, rule in CONVOLUTIONS.items():
        if sizes := [size for _, size in computed if size.rule == rule]:
            largest = max(sizes, key=lambda size: size.bytes_at("most"))
            found[known] = len(sizes), Range(largest.bytes_at("least"), largest.bytes_at("most"))
    return found
