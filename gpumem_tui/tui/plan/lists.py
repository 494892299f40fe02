"""What the panes list: every GPU, how far each number goes, two plans side by side, and what would help."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpumem_tui.memory import ALLOCATED_BUCKETS, Unknown, Value, format_bytes, format_count
from gpumem_tui.plan.answers import Answer, LargestOnGpu, TracedAnswer
from gpumem_tui.plan.combination import Combination, Effect, Techniques
from gpumem_tui.plan.controls import controls
from gpumem_tui.plan.judgement import span
from gpumem_tui.plan.limits import Limit
from gpumem_tui.plan.plan import Plan, draft_of
from gpumem_tui.plan.report import NAMES, capitalized, lift_words
from gpumem_tui.plan.speed import Cost, cost_of
from gpumem_tui.plan.tracing import BackgroundTracer
from gpumem_tui.report.tables import counted
from gpumem_tui.tui.kit.figures import (
    ABSENT,
    MUTED,
    ListRow,
    Span,
    compact_bytes,
    fit,
    fit_right,
    heading,
    paragraph,
    row,
    signed,
)
from gpumem_tui.tui.kit.glyphs import BUCKET_LOOKS
from gpumem_tui.tui.plan.numbers import PENDING

_FIGURE_WIDTH = 12
_FITS = "$text-success"

# Every GPU

_GPU_NAME_WIDTH = 34
_ROOMY_GPUS = 52
"""Cells from which the memory has a column."""
_PRICED_GPUS = 64
"""Cells from which the cost has one."""


def gpu_rows(found: Sequence[LargestOnGpu], plan: Plan, width: int, selected: str) -> list[ListRow]:
    """Return a line a GPU; the one under the cursor also says what it lacks. The plan's own is marked."""
    heads = ("GiB", "traced", "formula")[0 if width >= _ROOMY_GPUS else 1 :]
    heads += ("cost of 1M",) if width >= _PRICED_GPUS else ()
    name_width = max(8, min(_GPU_NAME_WIDTH, width - 2 - len(heads) * _FIGURE_WIDTH))
    head = f"  {fit('largest batch of one GPU', name_width)}" + "".join(f"{one:>{_FIGURE_WIDTH}}" for one in heads)
    lines = [heading(f"Every GPU, {100 * plan.headroom:g} % left free"), row((head, f"bold {MUTED}"))]
    for one in found:
        lines.append(_gpu(one, plan, width, name_width))
        if one.gpu.name == selected:
            lines += _indented(_gpu_notes(one, plan), width)
    return lines


def _gpu(one: LargestOnGpu, plan: Plan, width: int, name_width: int) -> ListRow:
    fits = plan.batch_size <= one.largest
    traced = f"{one.traced:,}" if isinstance(one.traced, int) else ABSENT
    return row(
        ("✓ " if fits else "! " if one.lacks else "  ", _FITS if fits else MUTED),
        (fit(one.gpu.title, name_width), "bold" if one.gpu == plan.gpu else ""),
        (f"{compact_bytes(one.gpu.total_bytes):>{_FIGURE_WIDTH}}" if width >= _ROOMY_GPUS else "", MUTED),
        (f"{traced:>{_FIGURE_WIDTH}}", "bold" if fits else ""),
        (f"{'≈' + format(one.formula, ','):>{_FIGURE_WIDTH}}", MUTED),
        (_cost(one, plan) if width >= _PRICED_GPUS else "", ""),
        key=one.gpu.name,
    )


def _cost(one: LargestOnGpu, plan: Plan) -> str:
    cost = cost_of(plan, one.gpu)
    if plan.batch_size > one.largest or isinstance(cost, Unknown):
        return f"{ABSENT:>{_FIGURE_WIDTH}}"
    return f"{f'≈{sum(cost.per_million) / 2:.2g}':>{_FIGURE_WIDTH}}"


def _gpu_notes(one: LargestOnGpu, plan: Plan) -> Iterator[str]:
    if isinstance(cost := cost_of(plan, one.gpu), Cost):
        of = "tokens" if plan.shape.seq_len else "samples"
        by = f"at {cost.price.words} an hour, {cost.price.source}"
        yield f"a million {of} cost {span(*cost.per_million)} by the roofline, {by}"
    yield from one.lacks
    if isinstance(one.traced, Unknown):
        yield one.traced.reason
    elif one.traced is not None and not one.same_architecture:
        yield "from the trace of another architecture, with this one's context"


def _indented(texts: Iterator[str], width: int) -> list[ListRow]:
    return [line for text in texts for line in paragraph(text, width, indent=2)]


# How far each number goes

_LIMIT_NAME_WIDTH = 26
_ROOMY_LIMITS = _LIMIT_NAME_WIDTH + 2 * _FIGURE_WIDTH + 14
"""Cells from which how it is known has a column."""
_HOW = {"verified": "verified", "traced": "by trace", "formula": "estimate"}


def limit_rows(found: Sequence[Limit], plan: Plan, width: int, selected: str) -> list[ListRow]:
    """Return a line a number; the one under the cursor also says what bounds it and how that is known."""
    name_width = max(10, min(_LIMIT_NAME_WIDTH, width - 2 - 2 * _FIGURE_WIDTH))
    head = f"  {fit('others as they are', name_width)}{'':>{_FIGURE_WIDTH}}{'formula':>{_FIGURE_WIDTH}}"
    lines = [heading(f"How far each number goes, {100 * plan.headroom:g} % left free"), row((head, f"bold {MUTED}"))]
    for one in found:
        lines.append(_limit(one, width, name_width))
        if one.quantity == selected:
            lines += _indented(_limit_notes(one, width), width)
    return lines


def _limit(one: Limit, width: int, name_width: int) -> ListRow:
    value = "none" if one.value is None else f"{'≈' if one.how == 'formula' else ''}{one.value:,}"
    if one.wanted:
        value = f"{PENDING} {value}"
    formula = ABSENT if one.formula is None else f"≈{one.formula:,}"
    return row(
        ("✓ " if one.how == "verified" and not one.wanted else "  ", _FITS),
        (fit(capitalized(NAMES[one.quantity]), name_width), ""),
        (f"{value:>{_FIGURE_WIDTH}}", "bold"),
        (f"{formula:>{_FIGURE_WIDTH}}", MUTED),
        (f"  {_how(one)}" if width >= _ROOMY_LIMITS else "", MUTED),
        key=one.quantity,
    )


def _how(one: Limit) -> str:
    return f"{PENDING} tracing" if one.wanted else _HOW[one.how]


def _limit_notes(one: Limit, width: int) -> Iterator[str]:
    if width < _ROOMY_LIMITS:
        yield _how(one)
    if one.how == "verified" and not one.wanted:
        yield "traced, and it fits" if one.beyond is None else f"traced, and it fits; {one.beyond:,} does not"
    yield from filter(None, (one.note, lift_words(one)))


# Two plans side by side

OTHER = "other"
"""The key of the line that chooses what to compare with."""

_TITLE_WIDTH = 18
_DIFFERENCE_WIDTH = 9
_SAME = "·"


@dataclass(frozen=True)
class Compared:
    """A plan of two that are compared. `traced`: None where there is no trace of it."""

    formula: Answer
    traced: TracedAnswer | None = None


def compare_rows(mine: Compared, theirs: Compared, name: str, width: int) -> list[ListRow]:
    """Return what differs between the plan on the screen and the one called `name`."""
    this, other = mine.formula, theirs.formula
    column = min(18, (width - _TITLE_WIDTH - _DIFFERENCE_WIDTH) // 2)
    heads = (f"{'':<{_TITLE_WIDTH}}", f"{'this plan':>{column}}", f" {fit_right(name, column - 1)}")
    lines = [heading(f"Compared with: {name}"), row(("enter compares with this plan from now on", MUTED), key=OTHER)]
    lines += [row(), row(("".join(heads), f"bold {MUTED}"))]
    settings = _differing(this.plan, other.plan)
    if not settings:
        lines += paragraph("every control is the same", width)
    for label, mine_said, theirs_said in settings:
        shown = (fit_right(mine_said, column), "bold"), (f" {fit_right(theirs_said, column - 1)}", "")
        lines.append(row((fit(label, _TITLE_WIDTH), ""), *shown))
    lines += [row(), row((f"{'GiB by formula':<{_TITLE_WIDTH}}", f"bold {MUTED}"))]
    for bucket in ALLOCATED_BUCKETS:
        mine_bytes, their_bytes = this.breakdown[bucket], other.breakdown[bucket]
        if mine_bytes or their_bytes:
            lines.append(_bytes_row(bucket.title, mine_bytes, their_bytes, column, BUCKET_LOOKS[bucket]))
    lines.append(_bytes_row("= peak", this.peak_bytes, other.peak_bytes, column))
    lines.append(_bytes_row("to spare", this.spare_bytes, other.spare_bytes, column))
    lines.append(_count_row("largest batch", this.max_batch_size, other.max_batch_size, column))
    lines += [row(), *_traced_rows(mine.traced, theirs.traced, name, column, width), row()]
    for label, mine_count, their_count in (
        ("passes a step", this.accumulation.steps, other.accumulation.steps),
        ("samples a step", this.accumulation.global_batch_size, other.accumulation.global_batch_size),
        ("tokens a step", this.global_batch_tokens, other.global_batch_tokens),
    ):
        lines.append(_count_row(label, mine_count, their_count, column))
    return lines


def _traced_rows(
    mine: TracedAnswer | None, theirs: TracedAnswer | None, name: str, column: int, width: int
) -> list[ListRow]:
    """Return what both come to by trace; of two plans the screen traces only the one that it shows."""
    head = row((f"{'GiB by trace':<{_TITLE_WIDTH}}", f"bold {MUTED}"))
    if mine is None and theirs is None:
        return [head, *paragraph("neither plan has been traced", width)]

    def both(value: Callable[[TracedAnswer], Value]) -> tuple[Value, Value]:
        without = Unknown("no trace")
        return without if mine is None else value(mine), without if theirs is None else value(theirs)

    lines = [
        head,
        _bytes_row("= peak", *both(lambda found: found.peak_allocated_bytes), column),
        _bytes_row("left", *both(lambda found: found.spare_bytes), column),
        _count_row("largest batch", *both(lambda found: found.max_batch_size), column),
    ]
    if mine is None or theirs is None:
        lines += paragraph(f"{'this plan' if mine is None else name} has not been traced", width)
    return lines


def _differing(this: Plan, other: Plan) -> list[tuple[str, str, str]]:
    """Return label and both values of each control that differs; a control only one of them has is a dash there."""
    mine, theirs = draft_of(this), draft_of(other)
    labels = {control.key: control.label for draft in (theirs, mine) for control in controls(draft)}
    my_texts = {control.key: control.text(mine) for control in controls(mine)}
    their_texts = {control.key: control.text(theirs) for control in controls(theirs)}
    return [
        (label, my_texts.get(key, "–"), their_texts.get(key, "–"))
        for key, label in labels.items()
        if my_texts.get(key) != their_texts.get(key)
    ]


def _bytes_row(title: str, mine: Value, theirs: Value, column: int, mark: Span = (" ", "")) -> ListRow:
    return row(
        mark,
        (f" {fit(title, _TITLE_WIDTH - 2)}", ""),
        (f"{compact_bytes(mine):>{column}}", f"bold {_alarm(mine)}".strip()),
        (f"{compact_bytes(theirs):>{column}}", _alarm(theirs)),
        (f"{_difference(mine, theirs, signed):>{_DIFFERENCE_WIDTH}}", MUTED),
    )


def _count_row(title: str, mine: Value, theirs: Value, column: int) -> ListRow:
    def more(count: int) -> str:
        return f"{'+' if count > 0 else '−'}{format_count(abs(count))}"

    return row(
        (fit(title, _TITLE_WIDTH), ""),
        (f"{_count(mine):>{column}}", "bold"),
        (f"{_count(theirs):>{column}}", ""),
        (f"{_difference(mine, theirs, more):>{_DIFFERENCE_WIDTH}}", MUTED),
    )


def _difference(mine: Value, theirs: Value, words: Callable[[int], str]) -> str:
    if isinstance(mine, Unknown) or isinstance(theirs, Unknown):
        return ""
    return words(mine - theirs) if mine != theirs else _SAME


def _count(value: Value) -> str:
    return ABSENT if isinstance(value, Unknown) else f"{value:,}"


def _alarm(value: Value) -> str:
    return "$text-error" if isinstance(value, int) and value < 0 else ""


# What would help

COMBINATION, TRACEABLE = "combination", "traceable"
"""The keys of the combinations' rows; a technique's row has the technique's key."""

_ROOMY = 76
_NAME_WIDTH = 22
_ROOMY_NAME_WIDTH = 32
_SAVES_WIDTH = 9
_LARGEST_WIDTH = 12


@dataclass(frozen=True)
class Help:
    """The help that was worked out for one plan.

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

    def with_traces(self, tracer: BackgroundTracer) -> Help:
        """Return the same with what traces say by now, and sorted by that."""
        traced = {key: found for key, plan in self._plans.items() if (found := tracer.known(plan)) is not None}
        waiting = {key for key, plan in self._plans.items() if key not in traced and not tracer.failed(plan)}

        def order(one: Effect) -> tuple[bool, int, int]:
            found = traced.get(one.change.key)
            largest = found.known_batch_size if found is not None else None
            fits = found.fits if found is not None else one.fits
            return not fits, -((one.known_largest or 0) if largest is None else largest), -one.saved_bytes

        judged = replace(self.techniques, helping=tuple(sorted(self.techniques.helping, key=order)))
        now = tracer.known(self.plan)
        known = replace(self, techniques=judged, now=now, traced=traced, waiting=frozenset(waiting))
        fitting = {key for key, found in traced.items() if found.fits}
        best = next((index for index in range(len(self.likely)) if _likely(index) in fitting), None)
        return known if best is None else known.taking(best)

    def taking(self, index: int) -> Help:
        """Return the same with the combination that a trace has confirmed in the place of the formula's."""
        best, key = self.likely[index], _likely(index)
        only = isinstance(self.combination, Combination) and self.combination.formula_only
        traced = {**self.traced, TRACEABLE: self.traced[key], **({} if only else {COMBINATION: self.traced[key]})}
        waiting = self.waiting - {TRACEABLE, *(() if only else (COMBINATION,))}
        combination = self.combination if only else best
        return replace(self, combination=combination, traceable=best, traced=traced, waiting=waiting)

    @property
    def seeks_cheaper(self) -> bool:
        """Return whether a cheaper combination than the one that is shown is being traced."""
        return any(
            _likely(index) in self.waiting
            and isinstance(self.traceable, Combination)
            and one.price < self.traceable.price
            for index, one in enumerate(self.likely)
        )

    @property
    def candidates(self) -> list[Plan]:
        """The plans that are yet to be traced, the best first; last what is compiled for it, which takes long."""
        plans = [plan for key, plan in self._plans.items() if key in self.waiting]
        return sorted(plans, key=lambda one: one.recipe.compile and not self.plan.recipe.compile)

    @property
    def _plans(self) -> dict[str, Plan]:
        """The plans that a trace can answer, by key: the combinations first."""
        best = {COMBINATION: self.combination, TRACEABLE: self.traceable}
        found = {key: one.plan for key, one in best.items() if isinstance(one, Combination) and not one.formula_only}
        found |= {_likely(index): one.plan for index, one in enumerate(self.likely)}
        alone = {one.change.key: one.plan for one in self.techniques.helping if not one.formula_only}
        return found | alone

    def plan_of(self, key: str) -> Plan | None:
        """Return the plan that a row's key stands for; None for a technique that means nothing here."""
        best = {COMBINATION: self.combination, TRACEABLE: self.traceable}.get(key)
        if best is not None:
            return best.plan if isinstance(best, Combination) else None
        return next((one.plan for one in self.techniques.helping if one.change.key == key), None)


def _likely(index: int) -> str:
    return f"{COMBINATION} {index}"


def technique_rows(found: Help, width: int, selected: str) -> list[ListRow]:
    """Return the whole list; the row under the cursor also says what it costs where there is no column for that."""
    lines = _combination_rows(found, width)
    largest = "largest" if found.plan.recipe.gpus == 1 else "largest/GPU"
    head = f"  {'alone':<{_name_width(width)}}{'saves GiB':>{_SAVES_WIDTH}}{largest:>{_LARGEST_WIDTH}}"
    lines += [row(), row((head + ("  cost" if width >= _ROOMY else ""), f"bold {MUTED}"))]
    for technique in found.techniques.helping:
        lines += _technique_rows(technique, found, width, here=technique.change.key == selected)
    useless = found.techniques.not_applicable
    if useless:
        lines += [row(), row(("  no help here", f"bold {MUTED}"))]
        lines += [row((fit(f"  {none.name}: {none.reason}", width), MUTED), key=none.key) for none in useless]
    return lines


def _name_width(width: int) -> int:
    return _ROOMY_NAME_WIDTH if width >= _ROOMY else max(_NAME_WIDTH, width - 2 - _SAVES_WIDTH - _LARGEST_WIDTH)


def _combination_rows(found: Help, width: int) -> list[ListRow]:
    """Return the cheapest set that fits and, where only the formula knows that, the cheapest that can be traced."""
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
    """Return what the trace says of a combination."""
    if key in found.waiting:
        return f"; {PENDING} tracing"
    if key not in found.traced:
        return "; by formula"
    answer = found.traced[key]
    cheaper = f"{PENDING} tracing cheaper ones; " if found.seeks_cheaper else ""
    fits = "fits" if answer.fits else "does not fit"
    plan = found.plan_of(key)
    of_one = " a GPU" if plan is not None and plan.recipe.gpus > 1 else ""
    return f"; {cheaper}traced: {fits}, largest{of_one} {_largest_count(answer.max_batch_size)}"


def _largest_count(largest: int | Unknown) -> str:
    return ABSENT if isinstance(largest, Unknown) else f"{largest:,}" if largest else "none"


def _choice_rows(best: Combination, key: str, found: Help, width: int) -> list[ListRow]:
    """Return one selectable line, and what it comes to."""
    steps = best.by_formula.accumulation
    what = " + ".join(change.name for change in best.changes) or "the same, in smaller passes"
    gpus = f" × {best.plan.recipe.gpus} GPUs" if best.plan.recipe.gpus > 1 else ""
    passes = f"{steps.steps:,} pass{'' if steps.steps == 1 else 'es'} × {best.plan.batch_size:,}{gpus}"
    answer = found.traced.get(key)
    peak = (
        f"≈{format_bytes(best.by_formula.peak_bytes)}" if answer is None else format_bytes(answer.peak_allocated_bytes)
    )
    comes_to = f"{passes} = {counted(steps.global_batch_size, 'sample')} a step; peak {peak}"
    comes_to += "; formula only" if best.formula_only else _traced_words(found, key)
    first, *others = paragraph(what, width - 2, "bold")
    return [
        row(("✓ " if key not in found.traced or found.traced[key].fits else "✗ ", ""), *first.spans, key=key),
        *(row(("  ", ""), *line.spans) for line in others),
        *paragraph(comes_to, width, indent=2),
    ]


def _technique_rows(technique: Effect, found: Help, width: int, *, here: bool) -> list[ListRow]:
    """Return traced figures where there are any; ≈ is the formula's estimate, … one whose trace is to come."""
    change, most = technique.change, technique.known_largest
    traced = found.traced.get(change.key)
    fits, saved_bytes = technique.fits, technique.saved_bytes
    largest = f"≈{most:,}" if most else "≈none"
    if change.key in found.waiting:
        largest = f"{PENDING} {largest}"
    if traced is not None:
        fits, largest = traced.fits, _largest_count(traced.max_batch_size)
        if found.now is not None:
            saved_bytes = found.now.peak_allocated_bytes - traced.peak_allocated_bytes
    mark = ("✓ ", "$text-success") if fits else ("  ", "")
    saves = f"{'' if traced is not None and found.now is not None else '≈'}{compact_bytes(saved_bytes)}"
    spans = [
        mark,
        (fit(change.name, _name_width(width)), ""),
        (f"{saves:>{_SAVES_WIDTH}}", "" if saved_bytes > 0 else MUTED),
        (f"{largest:>{_LARGEST_WIDTH}}", "bold" if fits else MUTED),
    ]
    cost = change.cost + ("; formula only" if technique.formula_only else "")
    if width >= _ROOMY:
        room = width - 2 - _ROOMY_NAME_WIDTH - _SAVES_WIDTH - _LARGEST_WIDTH - 2
        lines = [row(*spans, ("  " + fit(cost, room), MUTED), key=change.key)]
        return lines + (paragraph(cost, width, indent=2) if here and len(cost) > room else [])
    lines = [row(*spans, key=change.key)]
    return lines + (paragraph(f"costs: {cost}", width, indent=2) if here else [])
