"""The Plan screen of a command: its state, and the lines that are drawn from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.errors import EXIT_INTERRUPTED
from gpumem_tui.memory import ALLOCATED_BUCKETS, Unknown, format_bytes
from gpumem_tui.plan.answers import Place, TracedAnswer
from gpumem_tui.plan.combination import Combination, Effect
from gpumem_tui.plan.combining import Planning, command_of
from gpumem_tui.plan.command import (
    CommandFigures,
    CommandPlan,
    batch_note,
    exactness,
    ranks_line,
)
from gpumem_tui.plan.recommended import change_words, verdict_line
from gpumem_tui.run.events import Sample
from gpumem_tui.search import report
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.predicting import Predicted
from gpumem_tui.search.prediction import Fit
from gpumem_tui.search.words import FIT_ANSWERS, how_far, largest_words, range_line
from gpumem_tui.tui.kit.figures import MUTED, ListRow, Row, Span, compact_bytes, fit, header_line, paragraph, row

PANES = {
    "what-ifs": ("w", "What-ifs: the command run again with a change made to it"),
    "GPUs": ("u", "Every GPU of the catalog, from the trace; enter plans for one"),
    "batches": ("b", "Batch sizes; they need {batch} in the command"),
    "places": ("p", "Places of the program that hold the peak"),
}
"""The lists, with the key that shows each and its words."""

_SET = "set-"
"""Before the place of a set of changes in the plan: the key of its row."""

_NUMBER = 8
_WORD = 8
_ROOMY = 84
_FITS, _FITS_NOT = ("✓ ", "$text-success"), ("✗ ", "$text-error")
_MAY = ("? ", "$text-warning")
_MARKS: dict[Fit, Span] = {"fits": _FITS, "may fit": _MAY, "may not fit": _MAY, "does not fit": _FITS_NOT}


# The state, and the functions that make the next one


@dataclass(frozen=True)
class CommandPlanState:
    """Everything the screen shows.

    Attributes:
        plan: None until the command as it is has been traced.
        running: what is being traced. `waiting`: the changes that can be. `to_go`: how many of them are. `every`: all
            of them, those too that are not needed.
        left_s: about how long all of them take from the moment on when `running` began.
        busy: a run is under way.
        printed: the last line that the running command printed. `reached`: where it is, and how long it takes yet.
        failure: why the command cannot be traced; one line. `exit_code`: what that stands for.
    """

    config: SearchConfig
    batch_size: int
    plan: CommandPlan | None = None
    running: Combination | None = None
    waiting: tuple[Combination, ...] = ()
    to_go: int = 0
    every: bool = False
    left_s: float = 0.0
    busy: bool = False
    printed: str = ""
    reached: str = ""
    failure: str = ""
    exit_code: int = 0

    @property
    def gpu(self) -> Gpu:
        """The GPU that is planned for; the traces are of `config`'s."""
        return self.config.device.gpu if self.plan is None else self.plan.gpu

    @property
    def spared(self) -> tuple[Combination, ...]:
        """The changes that were not needed."""
        return () if self.plan is None else self.plan.spared

    @property
    def leaving_code(self) -> int:
        """The program's exit code if it ended now."""
        return EXIT_INTERRUPTED if self.busy and self.plan is None else self.exit_code


def begun(state: CommandPlanState) -> CommandPlanState:
    """Note that a run is under way, of what was spared too."""
    spared, plan = state.spared, state.plan
    if plan is not None and spared:
        plan = replace(plan, tried=tuple(one for one in plan.tried if not one.is_spared))
        spared = tuple(replace(one, is_spared=False) for one in spared)
        state = replace(state, plan=plan, waiting=(*state.waiting, *spared), every=True)
    return replace(state, busy=True, failure="", exit_code=0, printed="")


def _silent(state: CommandPlanState) -> CommandPlanState:
    """Return the state without what the run before printed, and how far that came."""
    return replace(state, printed="", reached="")


def traced(
    state: CommandPlanState, predicted: Predicted, waiting: Sequence[Combination], refused: Sequence[Combination]
) -> CommandPlanState:
    """Take the trace of the command as it is. `refused`: the changes that cannot be made to it."""
    plan = CommandPlan(state.config, state.batch_size, predicted, tuple(refused))
    return replace(_silent(state), plan=plan, waiting=tuple(waiting))


def went_on(state: CommandPlanState, step: Planning) -> CommandPlanState:
    """Take how far the runs have come; which GPU is planned for stays."""
    assert state.plan is not None, "the command itself is traced first"
    plan = replace(step.plan, elsewhere=state.plan.elsewhere)
    known = replace(_silent(state), plan=plan, running=step.running, waiting=step.waiting)
    return replace(known, to_go=step.to_go, left_s=step.left_s)


def printing(state: CommandPlanState, text: str) -> CommandPlanState:
    """Take a line that the running command has printed; what trains a model of transformers has nothing to say."""
    return state if state.config.workload.hugging_face is not None else replace(state, printed=text)


def reaching(state: CommandPlanState, sample: Sample) -> CommandPlanState:
    """Take how far the running command has come; for how long it runs is said already."""
    return replace(state, reached=how_far(replace(sample, progress=replace(sample.progress, elapsed_s=0.0))))


def planned_for(state: CommandPlanState, gpu: Gpu) -> CommandPlanState:
    """Plan for another GPU."""
    return state if state.plan is None else replace(state, plan=replace(state.plan, elsewhere=gpu))


def ended(state: CommandPlanState, failure: str = "", exit_code: int = 0) -> CommandPlanState:
    """Note that nothing runs any more."""
    plan, running, waiting = state.plan, state.running, state.waiting
    if plan is not None and running is not None and plan.is_alone(running):
        waiting = (running, *waiting)
    return replace(_silent(state), busy=False, running=None, waiting=waiting, failure=failure, exit_code=exit_code)


# The lines


def header_row(state: CommandPlanState, time: str, width: int) -> ListRow:
    """Return the command and the GPU."""
    right: Row = [(state.gpu.title, "bold"), ("  ", ""), (time, MUTED), (" ", "")]
    workload, plan = state.config.workload, state.plan
    name = workload.name
    if workload.hugging_face is not None:
        name = report.workload_line(workload, 0 if plan is None else plan.base.done.parameters)
    return row(*header_line((name, ""), (), right, width))


def verdict_rows(state: CommandPlanState, figures: CommandFigures | None, elapsed_s: int, width: int) -> list[ListRow]:
    """Return two lines: whether it fits, and what runs now."""
    return [_verdict(state, figures, width), _progress(state, elapsed_s, width)]


def _verdict(state: CommandPlanState, figures: CommandFigures | None, width: int) -> ListRow:
    if state.failure and state.plan is None:
        return row(_FITS_NOT, (fit(state.failure, width - 2), "bold"))
    if figures is None:
        noun = state.config.workload.noun
        word = f"tracing {noun} as it is" if state.busy else f"{noun} as it is has not been traced"
        word = word if state.plan is None else "working it out"
        return row(("… ", MUTED), (fit(word, width - 2), "bold"))
    found, change = verdict_line(figures.answer, with_gpu=False), change_words(figures.plan, figures.answer)
    return row(_MARKS[figures.answer.fit], (fit(f"{found}. {change}" if change else found, width - 2), "bold"))


def _progress(state: CommandPlanState, elapsed_s: int, width: int) -> ListRow:
    if state.busy:
        running = state.running
        what = f"running {state.config.workload.noun}" if running is None else f"what-if: {running.words}"
        left = f", {state.to_go} to go" if state.to_go else ""
        left += f", about {state.left_s:,.0f} s left" if running is not None and state.left_s >= 1 else ""
        printed = f" │ {state.printed}" if state.printed else ""
        reached = f", {state.reached}" if state.reached else ""
        return row((fit(f"  {what}{left} · {elapsed_s} s{reached}{printed}", width), "$primary"))
    if state.failure:
        why = "" if state.plan is None else f"{state.failure}; "
        return row((fit(f"  {why}r runs it again", width), "$text-warning"))
    if count := len(state.waiting) + len(state.spared):
        why = "" if state.waiting else ", as it fits without"
        those = "1 what-if not run{}: r runs it" if count == 1 else f"{count} what-ifs not run{{}}: r runs them"
        return row((fit(f"  {those.format(why)}", width), MUTED))
    return row((fit("  every what-if has been run" if state.plan is not None else "  r traces it", width), MUTED))


def ledger_rows(figures: CommandFigures | None, width: int) -> list[ListRow]:
    """Return the buckets at the peak, and what the device holds."""
    if figures is None:
        return []
    answer = figures.answer
    plan, found = figures.plan, answer.traced
    free = answer.spare_bytes
    lines = [row((fit(f"at {plan.size}", width), f"bold {MUTED}"))]
    lines += [_pair(bucket.title, answer.breakdown[bucket], width) for bucket in ALLOCATED_BUCKETS]
    lines += [
        _pair("= allocated", answer.peak_allocated_bytes, width, "bold"),
        _pair("= reserved", answer.peak_reserved_bytes, width, "bold"),
        _pair("CUDA context", found.ready.context_bytes, width),
        _pair("= device used", answer.device_used_bytes, width, "bold"),
        _pair("free", free, width, "bold" if free >= 0 else "bold $text-error"),
        row(),
    ]
    between = range_line(answer.device_used_range, answer.unknowns)
    peak, parts = report.peak_line(found, plan.batch_size), report.parts_lines(found, plan.batch_size)
    notes = (between, peak, *parts, ranks_line(plan), *found.done.notes)
    for text in filter(None, notes):
        lines += paragraph(text, width)
    return lines


def _pair(title: str, size_bytes: int, width: int, style: str = "") -> ListRow:
    shown = f"{compact_bytes(size_bytes):>{_NUMBER}}"
    return row((fit(title, width - _NUMBER), style), (shown, style if size_bytes else MUTED))


def technique_rows(state: CommandPlanState, figures: CommandFigures | None, width: int, selected: str) -> list[ListRow]:
    """Return what was tried, the best first; what runs, waits, or cannot be."""
    name = width - 2 - 3 * _NUMBER - (_WORD if width >= _ROOMY else 0)
    by = f"  {'by':<{_WORD - 2}}" if width >= _ROOMY else ""
    columns = f"{'saves':>{_NUMBER}}{'peak':>{_NUMBER}}{'largest':>{_NUMBER}}{by}"
    lines = [row((fit("  GiB", name + 2) + columns, f"bold {MUTED}"))]
    if state.plan is not None:
        lines += [_set_row(state.plan, number, name) for number in _by_fit(state.plan)]
    for found in figures.techniques.helping if figures is not None else ():
        lines += _technique(found, name, width, here=found.change.key == selected)
    if state.running is not None:
        lines.append(row(("… ", "$primary"), (f"{state.running.words}: its run is under way", "$primary")))
    for one in state.waiting:
        lines.append(row((fit(f"· {one.words}: not run yet", width), MUTED), key=one.changes[0].key))
    for none in figures.techniques.not_applicable if figures is not None else ():
        lines.append(row((fit(f"– {none.name}: {none.reason}", width), MUTED), key=none.key))
    return lines


def _by_fit(plan: CommandPlan) -> list[int]:
    """Return the sets that were run by their place in the plan: the one that fits first."""
    return sorted(range(len(plan.together)), key=lambda number: not plan.fits_with(plan.together[number]))


def _set_row(plan: CommandPlan, number: int, name: int) -> ListRow:
    """Return a set of changes: its peak, or why there is none; enter says how to have it."""
    one, key = plan.together[number], f"{_SET}{number}"
    if isinstance(one.traced, Unknown):
        return row((fit(f"– {one.words}: {one.traced.reason}", name + 2), MUTED), key=key)
    here, before = plan.there(one.traced).at(one.batch_size), plan.there(plan.base).at(plan.batch_size)
    peak = here.peak_allocated_bytes + one.beside_bytes
    return row(
        _MARKS[plan.fit_with(one)],
        (fit(one.words, name), "bold"),
        (f"{compact_bytes(before.peak_allocated_bytes - peak):>{_NUMBER}}", ""),
        (f"{compact_bytes(peak):>{_NUMBER}}", ""),
        key=key,
    )


def _technique(found: Effect, name: int, width: int, *, here: bool) -> list[ListRow]:
    largest = f"{found.largest:,}" if isinstance(found.largest, int) else "–"
    spans = [
        _MARKS[found.fit],
        (fit(found.change.name, name), ""),
        (f"{compact_bytes(found.saved_bytes):>{_NUMBER}}", "" if found.saved_bytes > 0 else MUTED),
        (f"{compact_bytes(found.peak_bytes):>{_NUMBER}}", ""),
        (f"{largest:>{_NUMBER}}", "bold" if found.fits else MUTED),
    ]
    if width >= _ROOMY:
        spans.append((f"  {found.by:<{_WORD - 2}}", MUTED))
    lines = [row(*spans, key=found.change.key)]
    return lines + (paragraph(f"{found.by}; costs: {found.change.cost}", width, indent=2) if here else [])


def gpu_list_rows(
    state: CommandPlanState, gpus: Sequence[tuple[CommandPlan, TracedAnswer]], width: int
) -> list[ListRow]:
    """Return every GPU of the catalog; a tilde stands before a figure of one whose kernels may differ."""
    if not gpus:
        return [row((fit(f"  worked out once {state.config.workload.noun} is traced", width), MUTED))]
    name = width - 2 - 3 * _NUMBER
    columns = f"{'memory':>{_NUMBER}}{'free':>{_NUMBER}}{'largest':>{_NUMBER}}"
    lines = [row((f"{fit('  GiB', name + 2)}{columns}", f"bold {MUTED}"))]
    lines += [_gpu(state, there, found, name) for there, found in gpus]
    note = f"~ as traced on {state.config.device.gpu.title}: kernels there may take more or less scratch memory"
    return [*lines, *paragraph(note, width)]


def _gpu(state: CommandPlanState, there: CommandPlan, found: TracedAnswer, name: int) -> ListRow:
    about, gpu, most = "" if there.is_exact else "~", there.gpu, found.full_batch_size
    largest = f"{about}{most:,}" if isinstance(most, int) else "–"
    return row(
        _MARKS[found.fit],
        (fit(gpu.title.removeprefix("NVIDIA "), name), "bold $primary" if gpu == state.gpu else ""),
        (f"{compact_bytes(gpu.total_bytes):>{_NUMBER}}", MUTED),
        (f"{about + compact_bytes(found.spare_bytes):>{_NUMBER}}", "" if found.fit == "fits" else "$text-error"),
        (f"{largest:>{_NUMBER}}", ""),
        key=gpu.name,
    )


def batch_list_rows(figures: CommandFigures | None, width: int) -> list[ListRow]:
    """Return batch sizes, or why there is one only."""
    if figures is None:
        return []
    head = f"  {'batch':<{_NUMBER}}{'peak':>{_NUMBER}}{'reserved':>{_NUMBER + 1}}{'device':>{_NUMBER}}"
    plan = figures.plan
    lines = [row((head, f"bold {MUTED}")), *(_batch(found, plan) for found in figures.batches)]
    note = batch_note(plan)
    return [*lines, *(paragraph(note, width) if note else [])]


def _batch(found: TracedAnswer, plan: CommandPlan) -> ListRow:
    size = found.plan.batch_size
    shown = f"{size:,}" if plan.says_batch else "its own"
    sizes = (found.peak_allocated_bytes, found.peak_reserved_bytes, found.device_used_bytes)
    widths = (_NUMBER, _NUMBER + 1, _NUMBER)
    return row(
        _MARKS[found.fit],
        (f"{shown:<{_NUMBER}}", "bold $primary" if size == plan.batch_size else ""),
        *((f"{compact_bytes(size):>{width}}", "") for size, width in zip(sizes, widths, strict=True)),
    )


def place_rows(figures: CommandFigures | None, width: int) -> list[ListRow]:
    """Return what holds the peak, the largest first."""
    if figures is None:
        return []
    where = max(10, (width - _NUMBER - 17) // 2)
    head = f"{fit('bucket', 17)}{fit('module', where)}{fit('source', where)}{'GiB':>{_NUMBER}}"
    return [row((head, f"bold {MUTED}")), *(_place(found, where) for found in figures.places)]


def _place(found: Place, where: int) -> ListRow:
    return row(
        (fit(found.bucket.title, 17), MUTED),
        (fit(found.module or "–", where), ""),
        (fit(found.source or "–", where), ""),
        (f"{compact_bytes(found.size_bytes):>{_NUMBER}}", ""),
    )


# Further words


def set_details(state: CommandPlanState, key: str) -> tuple[str, list[Row], str] | None:
    """Return the title, the lines and the command to copy of a set of changes; None for what is no set."""
    if state.plan is None or not key.startswith(_SET):
        return None
    one = state.plan.together[int(key.removeprefix(_SET))]
    line, written = command_of(state.plan, one)
    if isinstance(one.traced, Unknown):
        return one.words, [[(f"Not tried: {one.traced.reason}.", "")]], line
    fits = state.plan.fit_with(one)
    pairs = [("to type", line), *(("to write", how) for how in written), ("by trace", f"{fits} {state.gpu.title}")]
    pairs += [("costs", f"{change.name}: {change.cost} ({change.source})") for change in one.changes]
    return one.words, [[(f"{title:<12}", MUTED), (text, "")] for title, text in pairs], line


def technique_details(state: CommandPlanState, figures: CommandFigures, key: str) -> tuple[str, list[Row]] | None:
    """Return the title and the lines of all there is to say of a what-if; None for one that is not there."""
    for none in figures.techniques.not_applicable:
        if none.key == key:
            return none.name, [[(f"Not tried: {none.reason}.", "")]]
    found = next((one for one in figures.techniques.helping if one.change.key == key), None)
    if found is None:
        return None
    largest = f"{found.largest:,}" if isinstance(found.largest, int) else found.largest.reason
    noun = state.config.workload.noun
    known = f"a run of {noun} with the change made to it" if found.by == "traced" else f"the trace of {noun} as it is"
    pairs = [
        ("to have it", found.change.how),
        ("peak", f"{format_bytes(found.peak_bytes)} instead of {format_bytes(figures.answer.peak_allocated_bytes)}"),
        ("saves", format_bytes(found.saved_bytes)),
        ("reserved", format_bytes(found.reserved_bytes)),
        ("fits", f"{FIT_ANSWERS[found.fit]}, {figures.plan.size} on {state.gpu.title}"),
        ("largest", largest),
        ("costs", f"{found.change.cost} ({found.change.source})"),
        ("known by", f"{found.by}: {known}"),
    ]
    return found.change.name, [[(f"{title:<12}", MUTED), (text, "")] for title, text in pairs]


def gpu_details(there: CommandPlan, found: TracedAnswer) -> str:
    """Return the note of a GPU in the list that one is picked from."""
    most = largest_words(found.full_batch_size, found.may_fit_batch_size)
    largest = f"; largest batch {most}" if most else ""
    return f"{format_bytes(there.gpu.total_bytes)}, {exactness(there)}: {found.fit}{largest}"
