"""Help where one looks: a control, a row of the ledger, a technique; and the keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpumem_tui.memory import ALLOCATED_BUCKETS, Bucket, format_bytes
from gpumem_tui.plan.answers import Place, TracedAnswer, answer
from gpumem_tui.plan.control import Choice
from gpumem_tui.plan.controls import control_of
from gpumem_tui.plan.explain import DECISIONS, Explanation, explanations
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.state import PlanState
from gpumem_tui.report.tables import counted
from gpumem_tui.search.words import PHASE_WORDS
from gpumem_tui.tui.kit.figures import ABSENT, MUTED, Row
from gpumem_tui.tui.kit.glyphs import BAR_ORDER
from gpumem_tui.tui.kit.help import help_heading

Text = tuple[str, list[Row]]
"""A title and its lines."""

_BESIDE_FORMULA: Mapping[str, str] = {
    **{bucket.value: bucket.explanation for bucket in Bucket if bucket.explanation},
    "moment": "The two columns are of two moments, so that activations and temporary differ most. Traced: the buckets "
    "when most is allocated, which is outside forward and backward here. Formula: every row in full at once, as at the "
    "turn from forward to backward.",
}
_ALSO: Mapping[str, tuple[str, ...]] = {
    Bucket.PARAMETERS.value: ("textbook-parameters",),
    Bucket.ACTIVATIONS.value: ("textbook-activations",),
    "max-batch": ("usable",),
    "sharding": ("beyond-one-gpu",),
    "gpus": ("beyond-one-gpu",),
    "traceable": ("combination",),
    "batch-by-sample-size": ("max-batch",),
    "batch-by-model": ("max-batch",),
    "batch-by-gpu": ("max-batch",),
    "activations-by-recompute": ("textbook-activations",),
    "memory-over-step": ("peak",),
    "moment": ("peak",),
}
"""Explanations that belong to a row or a control."""
_MOST_PLACES = 12
"""Places of a bucket that are listed; the pane of places has them all."""


def explanation(plan: Plan, key: str) -> Text | None:
    """Return all there is to say about a row of the ledger, a fact or a technique of a model; None for nothing."""
    known = explanations(plan)
    names = [row.name for row in answer(plan).prediction.rows if row.bucket.value == key]
    texts = [known[name] for name in (*names, key, *_ALSO.get(key, ())) if name in known]
    lines = [line for text in texts for line in _explained(text, headed=len(texts) > 1)]
    if key in _BESIDE_FORMULA:
        lines = [[(_BESIDE_FORMULA[key], "")], [], *lines]
    if not lines:
        return None
    title = texts[0].title if len(texts) == 1 or key not in _titles() else _titles()[key]
    return title.capitalize() if title.islower() else title, _without_last_blank(lines)


def traced_explanation(found: TracedAnswer, key: str) -> Text | None:
    """Return what a trace alone states of a row of the ledger or a fact, for a command; None for nothing."""
    title, lines = _titles().get(key, ""), list[Row]()
    if key in _BESIDE_FORMULA:
        lines = [[(_BESIDE_FORMULA[key], "")], []]
    held = [place for place in found.places() if place.bucket.value == key]
    if held:
        lines.append(help_heading("Memory at the peak"))
        lines += [_place(place) for place in held[:_MOST_PLACES]]
        if left := held[_MOST_PLACES:]:
            rest_bytes = sum(place.size_bytes for place in left)
            lines.append([(f"{format_bytes(rest_bytes):>12}  ", ""), (counted(len(left), "further place"), MUTED)])
    elif key in {bucket.value for bucket in ALLOCATED_BUCKETS} and not lines:
        lines = [[("Nothing of it is held when most is allocated.", "")]]
    if key == "peak":
        title, where = "Peak of a step", "" if found.peak_phase is None else f", {PHASE_WORDS[found.peak_phase]}"
        lines = [[(f"The most that is allocated at one moment of the traced step{where}.", "")]]
    elif key == "max-batch":
        title = DECISIONS[key].title
        lines = [
            [("The largest batch at which the traced step, replayed by the allocator's rules, fits on the GPU.", "")]
        ]
    elif key in ("accumulation", "global-batch"):
        words = DECISIONS[key]
        title = words.title
        lines = [[(words.formula, "bold")], [(words.limits, MUTED)], [(f"Source: {words.source}", MUTED)]]
    return (title.capitalize() if title.islower() else title, _without_last_blank(lines)) if lines else None


def _place(place: Place) -> Row:
    where = ", ".join(filter(None, (place.module, place.source))) or ABSENT
    return [(f"{format_bytes(place.size_bytes):>12}  ", ""), (where, MUTED)]


def control_help(state: PlanState, key: str) -> Text:
    """Return what a control sets, and its values."""
    control = control_of(state.draft, key)
    lines: list[Row] = [[(control.hint, "")], []]
    if isinstance(control, Choice):
        options = control.options(state.draft)
        width = max(len(option.value) for option in options) + 2
        lines += [[(f"{option.value:<{width}}", "bold"), (option.note, MUTED)] for option in options]
    else:
        lines.append([("from ", MUTED), (f"{control.least:,}", ""), (" to ", MUTED), (f"{control.most:,}", "")])
    known = explanations(state.plan)
    for other in _ALSO.get(key, ()):
        if other in known:
            lines += [[], *_explained(known[other], headed=True)]
    return control.label, _without_last_blank(lines)


def _explained(text: Explanation, *, headed: bool) -> Iterable[Row]:
    if headed:
        yield help_heading(text.title)
    yield [(text.formula, "bold")]
    yield [(text.numbers, "")]
    if text.limits:
        yield [(text.limits, MUTED)]
    yield [(f"Source: {text.source}", MUTED)]
    yield []


def _titles() -> dict[str, str]:
    return {bucket.value: bucket.title for bucket in (*ALLOCATED_BUCKETS, *BAR_ORDER)}


def _without_last_blank(lines: list[Row]) -> list[Row]:
    return lines[:-1] if lines and not lines[-1] else lines
