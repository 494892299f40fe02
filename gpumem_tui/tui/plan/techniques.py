"""What would help: the cheapest combination that fits, then every technique alone, the best first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpumem_tui.memory import Unknown, format_bytes
from gpumem_tui.plan.answers import TracedAnswer, samples
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.techniques import Combination, Technique, Techniques
from gpumem_tui.plan.tracing import PlanTracer
from gpumem_tui.tui.kit.figures import ABSENT, MUTED, ListRow, compact_bytes, fit, heading, paragraph, row
from gpumem_tui.tui.plan.numbers import PENDING

COMBINATION, TRACEABLE = "combination", "traceable"
"""The keys of the combinations' rows; a technique's row has the technique's key."""

_ROOMY = 76
_NAME_WIDTH = 22
_ROOMY_NAME_WIDTH = 32
_SAVES_WIDTH = 9
_LARGEST_WIDTH = 12


@dataclass(frozen=True)
class Help:
    """What was worked out for one plan.

    Attributes:
        traceable: the cheapest combination that a trace can confirm; the same one where that is the cheapest. With
            traces, the cheapest that was traced to fit.
        likely: what else may be the cheapest once it is traced, the cheapest first.
        now: what the trace says of the plan as it is; None where there is none.
        traced: what traces say with a technique or combination, by the key of its row.
        waiting: keys of those whose trace is to come.
    """

    plan: Plan
    techniques: Techniques
    combination: Combination | Unknown
    traceable: Combination | Unknown
    likely: tuple[Combination, ...] = ()
    now: TracedAnswer | None = None
    traced: Mapping[str, TracedAnswer] = field(default_factory=dict)
    waiting: frozenset[str] = frozenset()

    def with_traces(self, tracer: PlanTracer) -> Help:
        """The same with what traces say by now, where they say it sorted by it."""
        traced = {key: found for key, plan in self._plans.items() if (found := tracer.known(plan)) is not None}
        waiting = {key for key, plan in self._plans.items() if key not in traced and not tracer.failed(plan)}

        def order(one: Technique) -> tuple[bool, int, int]:
            found = traced.get(one.key)
            largest = found.max_batch_size if found is not None else one.max_batch_size
            fits = found.fits if found is not None else one.fits
            return not fits, -(largest if isinstance(largest, int) else one.max_batch_size), -one.saved_bytes

        judged = replace(self.techniques, helping=tuple(sorted(self.techniques.helping, key=order)))
        now = tracer.known(self.plan)
        known = replace(self, techniques=judged, now=now, traced=traced, waiting=frozenset(waiting))
        best = next((index for index, one in enumerate(self.likely) if _fits(traced.get(_likely(index)))), None)
        return known if best is None else known._taking(best)

    def _taking(self, index: int) -> Help:
        """The same with the combination that a trace has confirmed in the place of the formula's."""
        best, key = self.likely[index], _likely(index)
        only = isinstance(self.combination, Combination) and self.combination.formula_only
        traced = {**self.traced, TRACEABLE: self.traced[key], **({} if only else {COMBINATION: self.traced[key]})}
        waiting = self.waiting - {TRACEABLE, *(() if only else (COMBINATION,))}
        combination = self.combination if only else best
        return replace(self, combination=combination, traceable=best, traced=traced, waiting=waiting)

    @property
    def seeks_cheaper(self) -> bool:
        """A cheaper combination than the one that is shown is being traced."""
        return any(
            _likely(index) in self.waiting
            and isinstance(self.traceable, Combination)
            and one.price < self.traceable.price
            for index, one in enumerate(self.likely)
        )

    @property
    def candidates(self) -> list[Plan]:
        """What is yet to be traced, the best first."""
        return [plan for key, plan in self._plans.items() if key in self.waiting]

    @property
    def _plans(self) -> dict[str, Plan]:
        """By key, what a trace can answer: the combinations first."""
        best = {COMBINATION: self.combination, TRACEABLE: self.traceable}
        found = {key: one.plan for key, one in best.items() if isinstance(one, Combination) and not one.formula_only}
        found |= {_likely(index): one.plan for index, one in enumerate(self.likely)}
        return {**found, **{one.key: one.plan for one in self.techniques.helping if not one.formula_only}}

    def plan_of(self, key: str) -> Plan | None:
        """The plan that a row's key stands for; None for a technique that means nothing here."""
        for name, best in ((COMBINATION, self.combination), (TRACEABLE, self.traceable)):
            if key == name:
                return best.plan if isinstance(best, Combination) else None
        return next((technique.plan for technique in self.techniques.helping if technique.key == key), None)


def _likely(index: int) -> str:
    return f"{COMBINATION} {index}"


def _fits(found: TracedAnswer | None) -> bool:
    return found is not None and found.fits


def technique_rows(found: Help, width: int, selected: str) -> list[ListRow]:
    """The whole list; the row under the cursor also says what it costs where there is no column for that."""
    lines = _combination_rows(found, width)
    largest = "largest" if found.plan.recipe.gpus == 1 else "largest/GPU"
    head = f"  {'alone':<{_name_width(width)}}{'saves GiB':>{_SAVES_WIDTH}}{largest:>{_LARGEST_WIDTH}}"
    lines += [row(), row((head + ("  cost" if width >= _ROOMY else ""), f"bold {MUTED}"))]
    for technique in found.techniques.helping:
        lines += _technique_rows(technique, found, width, here=technique.key == selected)
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
    if found.now is not None and found.now.fits:
        return [heading("It fits as it is, traced"), *paragraph(_LARGER, width)]
    if isinstance(best, Unknown):
        return [heading("Cheapest combination that fits"), *paragraph(best.reason, width, "")]
    if best.plan == found.plan and found.now is None:
        return [heading("It fits as it is, by formula"), *paragraph(_LARGER, width)]
    if best.plan == found.plan:
        said = "by formula it fits as it is, traced it does not"
        said += f"; {PENDING} tracing what may" if found.waiting else ": take one that is traced to fit (✓ without ≈)"
        return [heading("It does not fit as it is"), *paragraph(said, width)]
    lines = [heading("Cheapest combination that fits"), *_choice_rows(best, COMBINATION, found, width)]
    if best.formula_only and isinstance(traceable, Combination):
        lines += [heading("Cheapest that can be traced"), *_choice_rows(traceable, TRACEABLE, found, width)]
    return lines


_LARGER = "each technique below makes a larger batch fit"


def _traced_words(found: Help, key: str) -> str:
    """What the trace says of a combination."""
    if key in found.waiting:
        return f"; {PENDING} tracing"
    if key not in found.traced:
        return "; by formula"
    answer = found.traced[key]
    cheaper = f"{PENDING} tracing cheaper ones; " if found.seeks_cheaper else ""
    fits = "fits" if answer.fits else "does not fit"
    of_one = " a GPU" if answer.plan.recipe.gpus > 1 else ""
    return f"; {cheaper}traced: {fits}, largest{of_one} {_count(answer.max_batch_size)}"


def _count(largest: int | Unknown) -> str:
    return ABSENT if isinstance(largest, Unknown) else f"{largest:,}" if largest else "none"


def _choice_rows(best: Combination, key: str, found: Help, width: int) -> list[ListRow]:
    """One selectable line, and what it comes to."""
    steps = best.accumulation
    what = " + ".join(change.name for change in best.changes) or "the same, in smaller passes"
    gpus = f" × {best.plan.recipe.gpus} GPUs" if best.plan.recipe.gpus > 1 else ""
    passes = f"{steps.steps:,} pass{'' if steps.steps == 1 else 'es'} × {best.plan.batch_size:,}{gpus}"
    answer = found.traced.get(key)
    peak = f"≈{format_bytes(best.peak_bytes)}" if answer is None else format_bytes(answer.peak_allocated_bytes)
    comes_to = f"{passes} = {samples(steps.global_batch_size)} a step; peak {peak}"
    comes_to += "; formula only" if best.formula_only else _traced_words(found, key)
    first, *others = paragraph(what, width - 2, "bold")
    return [
        row(("✓ " if key not in found.traced or found.traced[key].fits else "✗ ", ""), *first.spans, key=key),
        *(row(("  ", ""), *line.spans) for line in others),
        *paragraph(comes_to, width, indent=2),
    ]


def _technique_rows(technique: Technique, found: Help, width: int, *, here: bool) -> list[ListRow]:
    """Traced figures where they are there; ≈ is the formula's estimate, … one whose trace is to come."""
    traced = found.traced.get(technique.key)
    fits, saved_bytes = technique.fits, technique.saved_bytes
    largest = f"≈{technique.max_batch_size:,}" if technique.max_batch_size else "≈none"
    if technique.key in found.waiting:
        largest = f"{PENDING} {largest}"
    if traced is not None:
        fits, largest = traced.fits, _count(traced.max_batch_size)
        if found.now is not None:
            saved_bytes = found.now.peak_allocated_bytes - traced.peak_allocated_bytes
    mark = ("✓ ", "$text-success") if fits else ("  ", "")
    saves = f"{'' if traced is not None and found.now is not None else '≈'}{compact_bytes(saved_bytes)}"
    spans = [
        mark,
        (fit(technique.name, _name_width(width)), ""),
        (f"{saves:>{_SAVES_WIDTH}}", "" if saved_bytes > 0 else MUTED),
        (f"{largest:>{_LARGEST_WIDTH}}", "bold" if fits else MUTED),
    ]
    cost = technique.cost + ("; formula only" if technique.formula_only else "")
    if width >= _ROOMY:
        room = width - 2 - _ROOMY_NAME_WIDTH - _SAVES_WIDTH - _LARGEST_WIDTH - 2
        lines = [row(*spans, ("  " + fit(cost, room), MUTED), key=technique.key)]
        return lines + (paragraph(cost, width, indent=2) if here and len(cost) > room else [])
    lines = [row(*spans, key=technique.key)]
    return lines + (paragraph(f"costs: {cost}", width, indent=2) if here else [])
