"""The Plan screen for a command, as lines: verdict, ledger, what-ifs, GPUs, batch sizes, places."""

from __future__ import annotations

from collections.abc import Sequence

from gpumem_tui.memory import ALLOCATED_BUCKETS, format_bytes
from gpumem_tui.plan.command import BatchRow, CommandFigures, CommandPlan, GpuRow, Place, TechniqueRow
from gpumem_tui.plan.command_report import batch_note, exactness, ranks_line, verdict_line
from gpumem_tui.search import report
from gpumem_tui.search.prediction import Fit
from gpumem_tui.search.ranges import largest_words, range_line
from gpumem_tui.search.report import workload_line
from gpumem_tui.tui.kit.dialogs import help_entry, help_heading
from gpumem_tui.tui.kit.figures import MUTED, ListRow, Row, Span, compact_bytes, fit, header_line, paragraph, row
from gpumem_tui.tui.plan.command_state import CommandPlanState

PANES = {"what-ifs": "w", "GPUs": "u", "batches": "b", "places": "p"}
"""The lists, by the key that shows each."""

_NUMBER = 8
_WORD = 8
_ROOMY = 84
_FITS, _FITS_NOT = ("✓ ", "$text-success"), ("✗ ", "$text-error")
_MARKS: dict[Fit, Span] = {"fits": _FITS, "may fit": ("? ", "$text-warning"), "does not fit": _FITS_NOT}

_KEYS = (
    ("w", "what-ifs: the command run again with a change made to it"),
    ("u", "every GPU of the catalog, from the trace; enter plans for one"),
    ("b", "batch sizes; they need {batch} in the command"),
    ("p", "places of the program that hold the peak"),
    ("enter", "all there is to say of a row"),
    ("g", "choose another GPU: answered without running again"),
    ("r", "run the what-ifs that have not been run"),
    ("c", "stop running what-ifs"),
    ("1 2 3", "Monitor, Search, Plan"),
    ("q", "leave; what runs is ended"),
)


def header_row(state: CommandPlanState, time: str, width: int) -> ListRow:
    """The command and the GPU."""
    right: Row = [(state.gpu.title, "bold"), ("  ", ""), (time, MUTED), (" ", "")]
    workload, plan = state.config.workload, state.plan
    name = workload.name
    if workload.hugging_face is not None:
        name = workload_line(workload, 0 if plan is None else plan.base.parameters)
    return row(*header_line((name, ""), (), right, width))


def verdict_rows(state: CommandPlanState, figures: CommandFigures | None, elapsed_s: int, width: int) -> list[ListRow]:
    """Whether it fits, and what runs now: two lines."""
    return [_verdict(state, figures, width), _progress(state, elapsed_s, width)]


def _verdict(state: CommandPlanState, figures: CommandFigures | None, width: int) -> ListRow:
    if state.failure and state.plan is None:
        return row(_FITS_NOT, (fit(state.failure, width - 2), "bold"))
    if figures is None:
        word = "working it out" if state.plan is not None else f"tracing {state.config.workload.noun} as it is"
        return row(("… ", MUTED), (fit(word, width - 2), "bold"))
    return row(_MARKS[figures.answers.fit], (fit(verdict_line(figures.answers, with_gpu=False), width - 2), "bold"))


def _progress(state: CommandPlanState, elapsed_s: int, width: int) -> ListRow:
    if state.busy:
        what = (
            f"what-if: {state.running.name}" if state.running is not None else f"running {state.config.workload.noun}"
        )
        left = f", {len(state.waiting)} to go" if state.waiting else ""
        said = f" │ {state.said}" if state.said else ""
        return row((fit(f"  {what}{left} · {elapsed_s} s{said}", width), "$primary"))
    if state.failure:
        why = "" if state.plan is None else f"{state.failure}; "
        return row((fit(f"  {why}r runs it again", width), "$text-warning"))
    if state.waiting:
        return row((fit(f"  {len(state.waiting)} what-ifs not run: r runs them", width), MUTED))
    return row((fit("  every what-if has been run" if state.plan is not None else "", width), MUTED))


def ledger_rows(state: CommandPlanState, figures: CommandFigures | None, width: int) -> list[ListRow]:
    """The buckets at the peak, and what the device holds."""
    if figures is None:
        return []
    head = row((fit(f"at {figures.answers.plan.size}", width), f"bold {MUTED}"))
    traced, size = figures.answers.traced, state.batch_size
    replay = traced.at(size)
    lines = [_pair(bucket.title, replay.breakdown[bucket], width) for bucket in ALLOCATED_BUCKETS]
    lines.append(_pair("= allocated", replay.peak_allocated_bytes, width, "bold"))
    lines.append(_pair("= reserved", replay.peak_reserved_bytes, width, "bold"))
    lines.append(_pair("CUDA context", traced.context_bytes, width))
    lines.append(_pair("= device used", traced.device_used_bytes(size), width, "bold"))
    free = figures.answers.free_bytes
    lines.append(_pair("free", free, width, "bold" if free >= 0 else "bold $text-error"))
    lines.append(row())
    between = range_line(traced.device_used_range(size), traced.unknowns(size))
    said = (between, report.peak_line(traced, size), ranks_line(figures.answers.plan), *traced.notes)
    for text in filter(None, said):
        lines += paragraph(text, width)
    return [head, *lines]


def _pair(title: str, size_bytes: int, width: int, style: str = "") -> ListRow:
    shown = f"{compact_bytes(size_bytes):>{_NUMBER}}"
    return row((fit(title, width - _NUMBER), style), (shown, style if size_bytes else MUTED))


def technique_rows(state: CommandPlanState, figures: CommandFigures | None, width: int, selected: str) -> list[ListRow]:
    """What was tried, the best first; what runs, waits, or cannot be."""
    name = width - 2 - 3 * _NUMBER - (_WORD if width >= _ROOMY else 0)
    by = f"  {'by':<{_WORD - 2}}" if width >= _ROOMY else ""
    columns = f"{'saves':>{_NUMBER}}{'peak':>{_NUMBER}}{'largest':>{_NUMBER}}{by}"
    lines = [row((fit("  GiB", name + 2) + columns, f"bold {MUTED}"))]
    for tried in figures.tried if figures is not None else ():
        lines += _technique(tried, name, width, here=tried.change.key == selected)
    if state.running is not None:
        lines.append(row(("… ", "$primary"), (f"{state.running.name}: its run is under way", "$primary")))
    lines += [row((fit(f"· {change.name}: not run yet", width), MUTED), key=change.key) for change in state.waiting]
    for none in figures.not_tried if figures is not None else ():
        lines.append(row((fit(f"– {none.change.name}: {none.reason}", width), MUTED), key=none.change.key))
    return lines


def _technique(tried: TechniqueRow, name: int, width: int, *, here: bool) -> list[ListRow]:
    largest = f"{tried.largest:,}" if isinstance(tried.largest, int) else "–"
    spans = [
        _FITS if tried.fits else _FITS_NOT,
        (fit(tried.change.name, name), ""),
        (f"{compact_bytes(tried.saved_bytes):>{_NUMBER}}", "" if tried.saved_bytes > 0 else MUTED),
        (f"{compact_bytes(tried.peak_bytes):>{_NUMBER}}", ""),
        (f"{largest:>{_NUMBER}}", "bold" if tried.fits else MUTED),
    ]
    if width >= _ROOMY:
        spans.append((f"  {tried.by:<{_WORD - 2}}", MUTED))
    lines = [row(*spans, key=tried.change.key)]
    return lines + (paragraph(f"{tried.by}; costs: {tried.change.cost}", width, indent=2) if here else [])


def gpu_list_rows(state: CommandPlanState, gpus: Sequence[GpuRow], width: int) -> list[ListRow]:
    """Every GPU of the catalog; a tilde before a figure of one whose kernels may differ."""
    if not gpus:
        return [row((fit(f"  worked out once {state.config.workload.noun} is traced", width), MUTED))]
    name = width - 2 - 3 * _NUMBER
    lines = [
        row(
            (f"{fit('  GiB', name + 2)}{'memory':>{_NUMBER}}{'free':>{_NUMBER}}{'largest':>{_NUMBER}}", f"bold {MUTED}")
        )
    ]
    lines += [_gpu(state, found, name) for found in gpus]
    note = f"~ as traced on {state.config.device.gpu.title}: kernels there may take more or less scratch memory"
    return [*lines, *paragraph(note, width)]


def _gpu(state: CommandPlanState, found: GpuRow, name: int) -> ListRow:
    about = "" if found.is_exact else "~"
    largest = f"{about}{found.largest:,}" if isinstance(found.largest, int) else "–"
    style = "bold $primary" if found.gpu == state.gpu else ""
    return row(
        _MARKS[found.fit],
        (fit(found.gpu.title.removeprefix("NVIDIA "), name), style),
        (f"{compact_bytes(found.gpu.total_bytes):>{_NUMBER}}", MUTED),
        (f"{about + compact_bytes(found.free_bytes):>{_NUMBER}}", "" if found.fits else "$text-error"),
        (f"{largest:>{_NUMBER}}", ""),
        key=found.gpu.name,
    )


def batch_list_rows(figures: CommandFigures | None, width: int) -> list[ListRow]:
    """Batch sizes, or why there is one only."""
    if figures is None:
        return []
    head = f"  {'batch':<{_NUMBER}}{'peak':>{_NUMBER}}{'reserved':>{_NUMBER + 1}}{'device':>{_NUMBER}}"
    plan = figures.answers.plan
    lines = [row((head, f"bold {MUTED}")), *(_batch(found, plan) for found in figures.batches)]
    note = batch_note(figures.answers.plan)
    return [*lines, *(paragraph(note, width) if note else [])]


def _batch(found: BatchRow, plan: CommandPlan) -> ListRow:
    shown = f"{found.batch_size:,}" if plan.says_batch else "its own"
    sizes = (found.peak_allocated_bytes, found.peak_reserved_bytes, found.device_used_bytes)
    widths = (_NUMBER, _NUMBER + 1, _NUMBER)
    return row(
        _MARKS[found.fit],
        (f"{shown:<{_NUMBER}}", "bold $primary" if found.batch_size == plan.batch_size else ""),
        *((f"{compact_bytes(size):>{width}}", "") for size, width in zip(sizes, widths, strict=True)),
    )


def place_rows(figures: CommandFigures | None, width: int) -> list[ListRow]:
    """What holds the peak, the largest first."""
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


def technique_details(state: CommandPlanState, figures: CommandFigures, key: str) -> tuple[str, list[Row]] | None:
    """All there is to say of a what-if: its title and its lines; None for one that is not there."""
    for none in figures.not_tried:
        if none.change.key == key:
            return none.change.name, [[(f"Not tried: {none.reason}.", "")]]
    found = next((tried for tried in figures.tried if tried.change.key == key), None)
    if found is None:
        return None
    largest = f"{found.largest:,}" if isinstance(found.largest, int) else found.largest.reason
    noun = state.config.workload.noun
    known = f"a run of {noun} with the change made to it" if found.by == "traced" else f"the trace of {noun} as it is"
    pairs = [
        ("to have it", found.change.how),
        ("peak", f"{format_bytes(found.peak_bytes)} instead of {format_bytes(figures.answers.peak_bytes)}"),
        ("saves", format_bytes(found.saved_bytes)),
        ("reserved", format_bytes(found.reserved_bytes)),
        ("fits", f"{'yes' if found.fits else 'no'}, {figures.answers.plan.size} on {state.gpu.title}"),
        ("largest", largest),
        ("costs", f"{found.change.cost} ({found.change.source})"),
        ("known by", f"{found.by}: {known}"),
    ]
    return found.change.name, [[(f"{title:<12}", MUTED), (text, "")] for title, text in pairs]


def gpu_details(state: CommandPlanState, found: GpuRow) -> str:
    """What a GPU's note in the list of GPUs says."""
    assert state.plan is not None, "the rows come from a trace"
    most = largest_words(found.largest, found.may_fit)
    largest = f"; largest batch {most}" if most else ""
    return f"{format_bytes(found.gpu.total_bytes)}, {exactness(state.plan, found)}: {found.fit}{largest}"


def command_plan_help() -> Sequence[Row]:
    """The lines of the help."""
    return [
        help_heading("Keys"),
        *(help_entry(key, says) for key, says in _KEYS),
        [],
        help_heading("Columns"),
        help_entry("saves", "of the allocated peak at the planned batch size"),
        help_entry("largest", "the largest batch that fits; it needs {batch} in the command"),
        help_entry("traced", "the command was run with the change made to it"),
        help_entry("formula", "worked out from the command's own trace"),
        help_entry("~", "the trace is another GPU's: kernels may choose otherwise here"),
    ]
