"""Fills the pane next to the numbers: worked out away from the screen, the latest request wins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.timer import Timer

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.plan.answers import LargestOnGpu, TracedAnswer, answer, kernel_plans, largest_by_gpu
from gpumem_tui.plan.combination import Combination
from gpumem_tui.plan.command import CommandPlan, batch_note, largest_of_command
from gpumem_tui.plan.curves import Curve, curves, memory_over_step
from gpumem_tui.plan.goals import AT_ONE_SIZE, QUANTITIES
from gpumem_tui.plan.judgement import Judgement, Table, judgements
from gpumem_tui.plan.limits import limit
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.speed import throughput
from gpumem_tui.plan.tracing import BackgroundTracer
from gpumem_tui.report.objects import reason_of
from gpumem_tui.search.prediction import Traced
from gpumem_tui.tui.kit.background import in_daemon_thread
from gpumem_tui.tui.kit.figures import MUTED, ListRow, Row, Rows, heading, no_rows, paragraph, row
from gpumem_tui.tui.kit.row_list import RowList
from gpumem_tui.tui.plan.curves import curve_rows, open_curve
from gpumem_tui.tui.plan.help import CommandHelp, Help, technique_rows
from gpumem_tui.tui.plan.lists import Compared, batch_rows, compare_rows, gpu_rows, limit_rows, place_rows
from gpumem_tui.tui.plan.numbers import PaneNames

_READABLE = 96
"""Cells beyond which a line of text is hard to follow."""


def judgement_rows(judgements: Sequence[Judgement], throughput: Curve, width: int) -> list[ListRow]:
    """Return every judgement open, one below the other; the throughput's with its curve."""
    width = min(width, _READABLE)
    lines: list[ListRow] = []
    for judgement in judgements:
        mark = ("! ", "bold $text-warning") if judgement.warning else ("  ", "")
        lines.append(row(mark, (judgement.title, "bold $primary"), key=judgement.key))
        lines += paragraph(judgement.text, width, "", indent=2)
        if judgement.key == "throughput":
            lines += open_curve(throughput, width)
        if judgement.table is not None:
            lines += _table_rows(judgement.table, width)
        lines += [*paragraph(judgement.source, width, MUTED, indent=2), row()]
    return lines


def _table_rows(table: Table, width: int) -> list[ListRow]:
    """Return columns as wide as what is in them; what does not fit is left out at the right."""
    widths = [max(map(len, column)) + 2 for column in zip(table.columns, *table.rows, strict=True)]
    lines = [row(("  " + _cells(table.columns, widths), f"bold {MUTED}"))]
    lines += [row(("  " + _cells(cells, widths), "")) for cells in table.rows]
    return [ListRow(tuple((text[:width], style) for text, style in line.spans)) for line in lines]


def _cells(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


@dataclass(frozen=True)
class PaneRequest:
    """A request to show something of a plan in a pane.

    Attributes:
        plan: a model's plan; of a command the plan so far, None before it has been traced.
        other: a model's plan to compare with, and what it is called.
        with_step: memory over a step is wanted too.
        traced: the trace that answers a model's plan, where there is one and something of it is shown.
        answer: what the trace reports, where that is shown.
        running, waiting: of a command, what is being run, and the changes that are not yet.
        traces: how many further ones had arrived: with another the pane is worked out anew.
    """

    pane: str
    plan: Plan | CommandPlan | None
    other: tuple[str, Plan] | None = None
    with_step: bool = False
    traced: Traced | None = None
    answer: TracedAnswer | None = None
    running: Combination | None = None
    waiting: tuple[Combination, ...] = ()
    traces: int = 0


Choice = Plan | Gpu | tuple[str, list[Row], str]
"""The meaning of a row of a pane: a plan, a GPU to plan for, or a title, its explanation and its text to copy."""


@dataclass(frozen=True)
class PaneContent:
    """The content of a pane, and memory over a step if that was wanted.

    Attributes:
        choice: what the row of a key represents; None for nothing.
        candidates: plans whose traces would tell more; `one_size`: at their batch sizes alone.
        start: the key of the row to begin at; "" for the first.
    """

    view: Rows
    choice: Callable[[str], Choice | None] = lambda _: None
    step: Rows = no_rows
    candidates: tuple[Plan, ...] = ()
    one_size: bool = False
    start: str = ""


_NOT_TRACED = PaneContent(lambda width, _: paragraph("filled by the trace (r traces, if none is under way)", width))


def command_content(request: PaneRequest) -> PaneContent:
    """Work out what a pane shows of a command, which its trace and the runs with changes say."""
    plan, answer = request.plan, request.answer
    if not isinstance(plan, CommandPlan) or answer is None:
        return _NOT_TRACED
    match request.pane:
        case "techniques":
            found = CommandHelp.of(plan, answer, request.running, request.waiting)
            return PaneContent(found.rows, found.details)
        case "gpus":
            return _gpus_content(largest_of_command(plan), plan)
        case "batches" | "places":
            return _by_trace(request.pane, answer, "" if plan.says_batch else "its own", batch_note(plan))
        case _:
            return PaneContent(no_rows)


def model_content(request: PaneRequest, tracer: BackgroundTracer) -> PaneContent:
    """Work out what a pane shows: in milliseconds, but for the cheapest combination and replays, which take seconds.

    Args:
        tracer: shows what traces know of a plan, and is given the techniques' plans to trace.
    """
    content = _content(request, tracer)
    tracer.also(content.candidates, one_size=content.one_size)
    if not request.with_step:
        return content
    curve = _step(request)
    return replace(content, step=lambda width, _: [heading(curve.title), *open_curve(curve, width)])


def _content(request: PaneRequest, tracer: BackgroundTracer) -> PaneContent:
    plan = _model(request)
    match request.pane:
        case "techniques":
            found = Help.of(plan, tracer)
            return PaneContent(partial(technique_rows, found), found.plan_of, candidates=tuple(found.candidates))
        case "curves":
            on_gpus = () if request.traced is None else largest_by_gpu(plan, request.traced)
            drawn = (*curves(plan, on_gpus), _step(request))
            return PaneContent(partial(curve_rows, drawn))
        case "gpus":
            shown = _gpus_content(largest_by_gpu(plan, request.traced, tracer.trace_of), plan)
            unknown = tuple(one for one in kernel_plans(plan) if tracer.trace_of(one) is None)
            return shown if request.traced is None else replace(shown, candidates=unknown)
        case "batches" | "places":
            if request.answer is None:
                return _NOT_TRACED
            return _by_trace(request.pane, request.answer, note=reason_of(request.answer.max_batch_size) or "")
        case "limits":
            solved = tuple(
                limit(quantity, plan, partial(tracer.trace_of, one_size=quantity in AT_ONE_SIZE))
                for quantity in QUANTITIES
            )
            plans: dict[str, Plan | None] = {one.quantity: one.plan for one in solved}
            wanted = tuple(one for found in solved if found.quantity in AT_ONE_SIZE for one in found.wanted)
            return PaneContent(partial(limit_rows, solved, plan), plans.get, candidates=wanted, one_size=True)
        case "judgement":
            known = tracer.known(plan)
            most = None if known is None else known.known_batch_size
            advice, rate = judgements(plan, most), throughput(plan)
            return PaneContent(lambda width, _: judgement_rows(advice, rate, width))
        case "compare":
            assert request.other is not None, "a model's plan is compared with the one that was opened"
            name, other = request.other
            mine, theirs = (Compared(answer(one), tracer.known(one)) for one in (plan, other))
            return PaneContent(lambda width, _: compare_rows(mine, theirs, name, width))
        case _:
            return PaneContent(no_rows)


def _gpus_content(found: Sequence[LargestOnGpu], plan: Plan | CommandPlan) -> PaneContent:
    by_name = {one.gpu.name: one.gpu for one in found}
    smallest = next((one.gpu.name for one in found if one.fit_of(plan) == "fits"), "")
    return PaneContent(partial(gpu_rows, found, plan), by_name.get, start=smallest)


def _by_trace(pane: str, found: TracedAnswer, size: str = "", note: str = "") -> PaneContent:
    """Work out a pane that the trace alone fills: other batch sizes, as `batch_rows` has them, or the places."""
    if pane == "places":
        places = found.places()
        return PaneContent(lambda width, _: place_rows(places, width))
    batches, planned = found.batches(), found.plan.batch_size
    for one in batches:
        _ = one.fit, one.peak_allocated_bytes, one.peak_reserved_bytes, one.device_used_bytes
    return PaneContent(lambda width, _: batch_rows(batches, planned, size, note, width))


def _model(request: PaneRequest) -> Plan:
    assert isinstance(request.plan, Plan), "a command's panes are its own"
    return request.plan


def _step(request: PaneRequest) -> Curve:
    return memory_over_step(_model(request), request.traced)


_ASKING = ("techniques", "gpus", "limits")
"""The panes that ask for further traces."""

_SETTLE_S = 0.06
"""The pane follows the numbers by this much, so that it never holds them up."""
_SIGN_S = 0.15
"""From a key on, until it is shown that another pane is being worked out; and how often the seconds are."""


class PlanPane(Vertical):
    """Shows what is asked for when it is there; until then what was there of the same pane, or for how long it takes.

    Args:
        content: works out what a pane shows; called from another thread.
    """

    @dataclass
    class Drawn(Message):
        """The pane is drawn; `step`: memory over a step, to be drawn elsewhere."""

        step: Rows

    def __init__(self, content: Callable[[PaneRequest], PaneContent]) -> None:
        super().__init__(id="pane-box")
        self._work_out = content
        self._content = PaneContent(no_rows)
        self._wanted: PaneRequest | None = None
        self._shown: PaneRequest | None = None
        self._working = False
        self._traces = 0
        self._filled = ""
        self._since_s = 0.0
        self._clock: Timer | None = None

    def compose(self) -> ComposeResult:
        """Yield the panes' names over the one that is shown."""
        yield PaneNames(classes="inner")
        yield RowList(id="pane")

    @property
    def settled(self) -> bool:
        """Return whether the pane shows what was asked for last."""
        return self._wanted == self._shown and not self._working

    def want(self, request: PaneRequest) -> None:
        """Show this as soon as it is worked out, unless something else is wanted by then."""
        if self._wanted is None or request.pane != self._wanted.pane:
            self._since_s = time.monotonic()
            self._clock = self._clock or self.set_interval(_SIGN_S, self._wait)
            self._clock.reset()
            self._clock.resume()
        self._wanted = request = replace(request, traces=self._traces)
        if not self._working and request != self._shown:
            self._working = True
            self.run_worker(self._work())

    def trace_arrived(self) -> None:
        """Show what a further trace reports."""
        if self._wanted is not None and self._wanted.pane in _ASKING:
            self._traces += 1
            self.want(self._wanted)

    def choice(self, key: str) -> Choice | None:
        """Return what a row of the pane represents; None for a row without meaning."""
        return self._content.choice(key)

    def _wait(self) -> None:
        """Say for how long a pane is being worked out that is not the one that is filled."""
        if self._wanted is None or self._wanted.pane == self._filled:
            if self._clock is not None:
                self._clock.pause()
            return
        words = f"working out {self._wanted.pane} … {time.monotonic() - self._since_s:.0f} s"
        self._content = PaneContent(no_rows)
        self._filled = ""
        self.query_one("#pane", RowList).show(lambda width, _: paragraph(words, width))

    async def _work(self) -> None:
        try:
            while (wanted := self._wanted) is not None and wanted != self._shown:
                await asyncio.sleep(_SETTLE_S)
                if wanted != self._wanted:
                    continue
                content = await in_daemon_thread(partial(self._work_out, wanted))
                rows = next(self.query("#pane").results(RowList), None)
                if rows is None or not self.is_attached:
                    return  # the program ends
                if wanted.pane == self._wanted.pane:
                    self._content, self._filled = content, wanted.pane
                    rows.show(content.view, content.start)
                    self.post_message(self.Drawn(content.step))
                self._shown = wanted
        finally:
            self._working = False
