"""The pane of changes that help: the cheapest that fits, then each technique alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpumem_tui.formula.techniques import ALLOCATOR
from gpumem_tui.memory import Unknown, format_bytes
from gpumem_tui.plan.answers import TracedAnswer
from gpumem_tui.plan.combination import Combination, Effect, Recommended, Techniques
from gpumem_tui.plan.combining import command_of
from gpumem_tui.plan.command import CommandPlan, techniques_of_command
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.recommended import all_techniques, change_words, recommended
from gpumem_tui.plan.tracing import BackgroundTracer
from gpumem_tui.report.tables import counted
from gpumem_tui.search.words import FIT_ANSWERS
from gpumem_tui.tui.kit.figures import ABSENT, MUTED, ListRow, Row, Span, compact_bytes, fit, heading, paragraph, row
from gpumem_tui.tui.plan.lists import MARKS
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
    """The help that was worked out for one plan of a model, with what traces say by now.

    Attributes:
        best: what is recommended.
        now: what the trace reports of the plan as it is; None if missing.
        waiting: keys of techniques whose trace is to come.
        pending: plans of sets, and of what is compiled, whose traces would tell more.
    """

    plan: Plan
    techniques: Techniques
    best: Recommended
    now: TracedAnswer | None
    waiting: frozenset[str]
    pending: tuple[Plan, ...]

    @classmethod
    def of(cls, plan: Plan, tracer: BackgroundTracer) -> Help:
        """Work out what helps, by the traces made so far; this takes seconds where the cheapest combination does."""
        now, pending = tracer.known(plan), list[Plan]()

        def known(one: Plan) -> TracedAnswer | Unknown:
            if (found := tracer.known(one)) is not None:
                return found
            trace = tracer.trace_of(one)
            if trace is None and one not in pending:
                pending.append(one)
            return trace if isinstance(trace, Unknown) else Unknown(f"{PENDING} tracing")

        by_trace = now or Unknown("not traced so far")
        best, judged = recommended(plan, by_trace, known), all_techniques(plan, by_trace, known)
        traceable = [one for one in judged.helping if not one.formula_only and one.change.key != ALLOCATOR]
        traced = {one.change.key: found for one in traceable if (found := tracer.known(one.plan)) is not None}
        waiting = {one.change.key for one in traceable if one.change.key not in traced and not tracer.failed(one.plan)}
        helping = tuple(_traced_effect(one, traced.get(one.change.key), now) for one in judged.helping)
        judged = replace(judged, helping=helping).by_help(fits=False)
        return cls(plan, judged, best, now, frozenset(waiting), tuple(pending))

    @property
    def combination(self) -> Combination | Unknown:
        """The cheapest, which only the formula may know."""
        return self.best.formula_only or self.best.combination

    @property
    def candidates(self) -> list[Plan]:
        """The plans that are yet to be traced, the best first; last what is compiled for it, which takes long."""
        alone = [one.plan for one in self.techniques.helping if one.change.key in self.waiting]
        plans = dict.fromkeys((*self.pending, *alone))
        return sorted(plans, key=lambda one: one.recipe.compile and not self.plan.recipe.compile)

    def plan_of(self, key: str) -> Plan | None:
        """Return the plan that a row's key represents; None for a technique that means nothing here."""
        best = {COMBINATION: self.combination, TRACEABLE: self.best.combination}.get(key)
        if best is not None:
            return best.plan if isinstance(best, Combination) else None
        return next((one.plan for one in self.techniques.helping if one.change.key == key), None)


def _traced_effect(effect: Effect, found: TracedAnswer | None, now: TracedAnswer | None) -> Effect:
    """Return an effect by its trace, where it has one; what it saves is by formula where the plan has none."""
    if found is None:
        return effect
    saved_bytes = effect.saved_bytes if now is None else now.peak_allocated_bytes - found.peak_allocated_bytes
    kept = replace(effect, peak_bytes=found.peak_allocated_bytes, saved_bytes=saved_bytes, largest=found.max_batch_size)
    return replace(kept, by="traced", fit="fits" if found.fits else "does not fit")


@dataclass(frozen=True)
class Alone:
    """Each technique alone, as a list has it.

    Attributes:
        waiting: keys of those whose trace is to come; `running`: what is being run, in words; `left`: what is not yet.
        saves_known: a trace shows the saving where the technique was traced.
        of_gpus: the largest batch is of one of several GPUs.
    """

    techniques: Techniques
    waiting: frozenset[str] = frozenset()
    running: str = ""
    left: tuple[tuple[str, str], ...] = ()
    saves_known: bool = True
    of_gpus: bool = False


def technique_rows(found: Help, width: int, selected: str) -> list[ListRow]:
    """Return what would help a model's plan; the row under the cursor also shows what it costs where no column does."""
    alone = Alone(
        found.techniques, found.waiting, saves_known=found.now is not None, of_gpus=found.plan.recipe.gpus > 1
    )
    return [*_combination_rows(found, width), *alone_rows(alone, width, selected)]


def alone_rows(found: Alone, width: int, selected: str) -> list[ListRow]:
    """Return a line a technique, and those that do not help with the reason."""
    largest = "largest/GPU" if found.of_gpus else "largest"
    head = f"  {'alone':<{_name_width(width)}}{'saves GiB':>{_SAVES_WIDTH}}{largest:>{_LARGEST_WIDTH}}"
    lines = [row(), row((head + ("  cost" if width >= _ROOMY else ""), f"bold {MUTED}"))]
    for effect in found.techniques.helping:
        lines += _technique_rows(effect, found, width, here=effect.change.key == selected)
    if found.running:
        lines.append(row((f"{PENDING} ", "$primary"), (f"{found.running}: its run is under way", "$primary")))
    lines += [row((fit(f"· {name}: not run yet", width), MUTED), key=key) for key, name in found.left]
    useless = found.techniques.not_applicable
    if useless:
        lines += [row(), row(("  no help here", f"bold {MUTED}"))]
        lines += [row((fit(f"  {none.name}: {none.reason}", width), MUTED), key=none.key) for none in useless]
    return lines


def _technique_rows(effect: Effect, found: Alone, width: int, *, here: bool) -> list[ListRow]:
    """Return traced figures where there are any; ≈ is an estimate, … one whose trace is to come."""
    change, most, is_traced = effect.change, effect.known_largest, effect.by == "traced"
    if is_traced:
        largest = ABSENT if most is None else f"{most:,}" if most else "none"
    else:
        largest = f"≈{most:,}" if most else ABSENT if most is None else "≈none"
    if change.key in found.waiting:
        largest = f"{PENDING} {largest}"
    saves = f"{'' if is_traced and found.saves_known else '≈'}{compact_bytes(effect.saved_bytes)}"
    spans = [
        MARKS["fits"] if effect.fits else ("  ", "") if effect.of_model else MARKS[effect.fit],
        (fit(change.name, _name_width(width)), ""),
        (f"{saves:>{_SAVES_WIDTH}}", "" if effect.saved_bytes > 0 else MUTED),
        (f"{largest:>{_LARGEST_WIDTH}}", "bold" if effect.fits else MUTED),
    ]
    cost = change.cost + ("; formula only" if effect.formula_only else "")
    if width >= _ROOMY:
        room = width - 2 - _ROOMY_NAME_WIDTH - _SAVES_WIDTH - _LARGEST_WIDTH - 2
        lines = [row(*spans, ("  " + fit(cost, room), MUTED), key=change.key)]
        return lines + (paragraph(cost, width, indent=2) if here and len(cost) > room else [])
    lines = [row(*spans, key=change.key)]
    return lines + (paragraph(f"costs: {cost}", width, indent=2) if here else [])


def _name_width(width: int) -> int:
    return _ROOMY_NAME_WIDTH if width >= _ROOMY else max(_NAME_WIDTH, width - 2 - _SAVES_WIDTH - _LARGEST_WIDTH)


# A model's plan


def _combination_rows(found: Help, width: int) -> list[ListRow]:
    """Return the cheapest set that fits and, where only the formula knows that, the cheapest that can be traced."""
    best, traceable = found.combination, found.best.combination
    if found.now is not None and found.now.fits:
        return [heading("It fits as it is, traced"), *paragraph(_LARGER, width)]
    if isinstance(best, Unknown):
        return [heading("Cheapest combination that fits"), *paragraph(best.reason, width, "")]
    if best.plan == found.plan and not best.changes:
        return [heading("It fits as it is, by formula"), *paragraph(_LARGER, width)]
    lines = [heading("Cheapest combination that fits"), *_choice_rows(best, COMBINATION, found, width)]
    if best is not traceable and isinstance(traceable, Combination):
        lines += [heading("Cheapest that can be traced"), *_choice_rows(traceable, TRACEABLE, found, width)]
    return lines


_LARGER = "largest: the batch that fits with each change alone"


def _choice_rows(best: Combination, key: str, found: Help, width: int) -> list[ListRow]:
    """Return one selectable line, and what it comes to."""
    steps, several = best.by_formula.accumulation, best.plan.recipe.gpus > 1
    what = " + ".join(change.name for change in best.changes) or "smaller passes"
    gpus = f" × {best.plan.recipe.gpus} GPUs" if several else ""
    passes = f"{steps.steps:,} pass{'' if steps.steps == 1 else 'es'} × {best.plan.batch_size:,}{gpus}"
    needs, by = f"needs ≈{format_bytes(best.by_formula.prediction.needed_bytes)}", "by formula"
    if best.formula_only:
        by = "formula only"
    elif isinstance(answer := found.best.traced, TracedAnswer):
        seeks = any(one.plan in found.pending and one.price < best.price for one in found.best.untraced)
        most, cheaper = answer.max_batch_size, f"{PENDING} tracing cheaper options; " if seeks else ""
        largest = ABSENT if isinstance(most, Unknown) else f"{most:,}" if most else "none"
        needs = f"device used {format_bytes(answer.device_used_bytes)}"
        by = f"{cheaper}traced: fits, largest{' a GPU' if several else ''} {largest}"
    elif best.plan in found.pending:
        by = f"{PENDING} tracing"
    comes_to = f"{passes} = {counted(steps.global_batch_size, 'sample')} a step; {needs}; {by}"
    return _set_lines(("✓ ", ""), what, comes_to, key, width)


def _set_lines(mark: Span, what: str, comes_to: str, key: str, width: int) -> list[ListRow]:
    """Return the lines of changes made together, of which the first is selectable, and what they come to."""
    first, *others = paragraph(what, width - 2, "bold")
    lines = [row(mark, *first.spans, key=key), *(row(("  ", ""), *line.spans) for line in others)]
    return [*lines, *paragraph(comes_to, width, indent=2)]


# A command's plan

_SET = "set-"
"""Before the place of what was run together in the plan: the key of its row."""


@dataclass(frozen=True)
class CommandHelp:
    """Changes that help a command, as far as they were run.

    Attributes:
        answer: of the command as it is. `running`: what is being run; `waiting`: changes whose runs have not begun.
    """

    plan: CommandPlan
    answer: TracedAnswer
    techniques: Techniques
    running: Combination | None
    waiting: tuple[Combination, ...]

    @classmethod
    def of(
        cls,
        plan: CommandPlan,
        answer: TracedAnswer,
        running: Combination | None,
        waiting: tuple[Combination, ...],
    ) -> CommandHelp:
        """Judge what was run for the planned GPU; this takes a moment."""
        return cls(plan, answer, techniques_of_command(plan, answer), running, waiting)

    def rows(self, width: int, selected: str) -> list[ListRow]:
        """Return the cheapest that fits, what else was run together, and each technique alone."""
        left = tuple((one.changes[0].key, one.words) for one in self.waiting)
        running = "" if self.running is None else self.running.words
        alone = Alone(self.techniques, running=running, left=left, of_gpus=self.plan.ranks > 1)
        return [*self._combinations(width), *alone_rows(alone, width, selected)]

    def _combinations(self, width: int) -> list[ListRow]:
        plan, best = self.plan, self.plan.fitting
        if plan.fits_as_it_is:
            lines, best = [heading(f"It {self.answer.fit} as it is, traced"), *paragraph(_LARGER, width)], None
        elif best is None:
            lines = [heading("Cheapest combination that fits"), *paragraph(change_words(plan, self.answer), width, "")]
        else:
            lines = [heading("Cheapest combination that fits"), *_set_rows(plan, best, COMBINATION, width)]
        others = [(number, one) for number, one in enumerate(plan.together) if one is not best]
        if others:
            lines += [row(), row(("  run together", f"bold {MUTED}"))]
        for number, one in others:
            lines += _set_rows(plan, one, f"{_SET}{number}", width)
        return lines

    def details(self, key: str) -> tuple[str, list[Row], str] | None:
        """Return title, lines and what to copy of all there is to say of a row; None for one that is not there."""
        if key == COMBINATION:
            return None if self.plan.fitting is None else _set_details(self.plan, self.plan.fitting)
        if key.startswith(_SET):
            return _set_details(self.plan, self.plan.together[int(key.removeprefix(_SET))])
        for none in self.techniques.not_applicable:
            if none.key == key:
                return none.name, [[(f"Not tried: {none.reason}.", "")]], ""
        found = next((one for one in self.techniques.helping if one.change.key == key), None)
        return None if found is None else self._technique_details(found)

    def _technique_details(self, found: Effect) -> tuple[str, list[Row], str]:
        largest = f"{found.largest:,}" if isinstance(found.largest, int) else found.largest.reason
        noun, used_bytes = self.plan.config.workload.noun, self.answer.device_used_bytes
        ran, own = f"a run of {noun} with the change made to it", f"the trace of {noun} as it is"
        pairs = [
            ("to have it", found.change.how),
            ("device used", f"{format_bytes(found.device_used_bytes)} instead of {format_bytes(used_bytes)}"),
            ("fits", f"{FIT_ANSWERS[found.fit]}, {self.plan.size} on {self.plan.gpu.title}"),
            ("largest", largest),
            ("peak", format_bytes(found.peak_bytes)),
            ("saves", format_bytes(found.saved_bytes)),
            ("costs", f"{found.change.cost} ({found.change.source})"),
            ("known by", f"{found.by}: {ran if found.by == 'traced' else own}"),
        ]
        return found.change.name, _paired(pairs), ""


def _set_rows(plan: CommandPlan, one: Combination, key: str, width: int) -> list[ListRow]:
    """Return what was run together, and what it came to; enter shows how to have it."""
    if isinstance(used_bytes := plan.device_used_bytes(one), Unknown):
        return _set_lines(("– ", MUTED), one.words, used_bytes.reason, key, width)
    fit_with = plan.fit_with(one)
    comes_to = f"device used {format_bytes(used_bytes)}; traced: {fit_with}"
    return _set_lines(MARKS[fit_with], one.words, comes_to, key, width)


def _set_details(plan: CommandPlan, one: Combination) -> tuple[str, list[Row], str]:
    line, written = command_of(plan, one)
    if isinstance(one.traced, Unknown):
        return one.words, [[(f"Not tried: {one.traced.reason}.", "")]], line
    pairs = [("to type", line), *(("to write", how) for how in written)]
    pairs.append(("by trace", f"{plan.fit_with(one)} {plan.gpu.title}"))
    pairs += [("costs", f"{change.name}: {change.cost} ({change.source})") for change in one.changes]
    return one.words, _paired(pairs), line


def _paired(pairs: Sequence[tuple[str, str]]) -> list[Row]:
    return [[(f"{title:<12}", MUTED), (text, "")] for title, text in pairs]
