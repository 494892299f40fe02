"""What would help: the cheapest combination that fits, then every technique alone, the best first."""

from __future__ import annotations

from dataclasses import dataclass

from gpumem_tui.memory import Unknown, format_bytes
from gpumem_tui.plan.answers import samples
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.techniques import Combination, Technique, Techniques
from gpumem_tui.tui.kit.figures import MUTED, ListRow, compact_bytes, fit, heading, paragraph, row

COMBINATION, TRACEABLE = "combination", "traceable"
"""The keys of the combinations' rows; a technique's row has the technique's key."""

_ROOMY = 76
_NAME_WIDTH = 22
_ROOMY_NAME_WIDTH = 32
_SAVES_WIDTH = 9
_LARGEST_WIDTH = 9


@dataclass(frozen=True)
class Help:
    """What was worked out for one plan.

    Attributes:
        traceable: the cheapest combination that a trace can confirm; the same one where that is the cheapest.
    """

    plan: Plan
    techniques: Techniques
    combination: Combination | Unknown
    traceable: Combination | Unknown

    def plan_of(self, key: str) -> Plan | None:
        """The plan that a row's key stands for; None for a technique that means nothing here."""
        for name, best in ((COMBINATION, self.combination), (TRACEABLE, self.traceable)):
            if key == name:
                return best.plan if isinstance(best, Combination) else None
        return next((technique.plan for technique in self.techniques.helping if technique.key == key), None)


def technique_rows(found: Help, width: int, selected: str) -> list[ListRow]:
    """The whole list; the row under the cursor also says what it costs where there is no column for that."""
    lines = _combination_rows(found, width)
    head = f"  {'alone':<{_name_width(width)}}{'saves GiB':>{_SAVES_WIDTH}}{'largest':>{_LARGEST_WIDTH}}"
    lines += [row(), row((head + ("  cost" if width >= _ROOMY else ""), f"bold {MUTED}"))]
    for technique in found.techniques.helping:
        lines += _technique_rows(technique, width, here=technique.key == selected)
    useless = found.techniques.not_applicable
    if useless:
        lines += [row(), row(("  no help here", f"bold {MUTED}"))]
        lines += [row((fit(f"  {none.name}: {none.reason}", width), MUTED), key=none.key) for none in useless]
    return lines


def _name_width(width: int) -> int:
    return _ROOMY_NAME_WIDTH if width >= _ROOMY else max(_NAME_WIDTH, width - 2 - _SAVES_WIDTH - _LARGEST_WIDTH)


def _combination_rows(found: Help, width: int) -> list[ListRow]:
    """The cheapest set that fits and, where only the formula knows that one, the cheapest that can be traced."""
    best, traceable = found.combination, found.traceable
    if isinstance(best, Unknown):
        return [heading("Cheapest combination that fits"), *paragraph(best.reason, width, "")]
    if best.plan == found.plan:
        return [heading("It fits as it is"), *paragraph("each technique below makes a larger batch fit", width)]
    lines = [heading("Cheapest combination that fits"), *_choice_rows(best, COMBINATION, width)]
    if best.formula_only and isinstance(traceable, Combination):
        lines += [heading("Cheapest that can be traced"), *_choice_rows(traceable, TRACEABLE, width)]
    return lines


def _choice_rows(best: Combination, key: str, width: int) -> list[ListRow]:
    """One selectable line, and what it comes to."""
    steps = best.accumulation
    what = " + ".join(change.name for change in best.changes) or "the same, in smaller passes"
    gpus = f" × {best.plan.recipe.gpus} GPUs" if best.plan.recipe.gpus > 1 else ""
    passes = f"{steps.steps:,} pass{'' if steps.steps == 1 else 'es'} × {best.plan.batch_size:,}{gpus}"
    comes_to = f"{passes} = {samples(steps.global_batch_size)} a step; peak {format_bytes(best.peak_bytes)}"
    if best.formula_only:
        comes_to += "; formula only"
    first, *others = paragraph(what, width - 2, "bold")
    return [
        row(("✓ ", "$text-success"), *first.spans, key=key),
        *(row(("  ", ""), *line.spans) for line in others),
        *paragraph(comes_to, width, indent=2),
    ]


def _technique_rows(technique: Technique, width: int, *, here: bool) -> list[ListRow]:
    mark = ("✓ ", "$text-success") if technique.fits else ("  ", "")
    saves = compact_bytes(technique.saved_bytes)
    largest = f"{technique.max_batch_size:,}" if technique.max_batch_size else "none"
    spans = [
        mark,
        (fit(technique.name, _name_width(width)), ""),
        (f"{saves:>{_SAVES_WIDTH}}", "" if technique.saved_bytes > 0 else MUTED),
        (f"{largest:>{_LARGEST_WIDTH}}", "bold" if technique.fits else MUTED),
    ]
    cost = technique.cost + ("; formula only" if technique.formula_only else "")
    if width >= _ROOMY:
        room = width - 2 - _ROOMY_NAME_WIDTH - _SAVES_WIDTH - _LARGEST_WIDTH - 2
        lines = [row(*spans, ("  " + fit(cost, room), MUTED), key=technique.key)]
        return lines + (paragraph(cost, width, indent=2) if here and len(cost) > room else [])
    lines = [row(*spans, key=technique.key)]
    return lines + (paragraph(f"costs: {cost}", width, indent=2) if here else [])
