"""One stacked bar of the device's memory: the running trial live, else the peak known best."""

from __future__ import annotations

from collections.abc import Mapping

from textual.content import Content
from textual.widget import Widget

from gpumem_tui.ledger import Ledger
from gpumem_tui.memory import ALLOCATED_BUCKETS, Breakdown, Bucket, Unknown
from gpumem_tui.run.events import Outcome, Sample
from gpumem_tui.search.runner import TrialProgress
from gpumem_tui.tui.kit.figures import compact_bytes, joined, wrapped
from gpumem_tui.tui.kit.glyphs import BAR_ORDER, BUCKET_LOOKS
from gpumem_tui.tui.kit.lines import assembled
from gpumem_tui.tui.kit.shares import bucket_cells
from gpumem_tui.tui.search.state import SearchState

_ENDINGS: dict[Outcome, str] = {"fit": "ended", "oom": "ran out of memory", "error": "failed"}
_PHASE_WORDS = {"build": "building the model", "batch": "between steps", "optimizer": "optimizer step"}


Bar = tuple[str, Mapping[Bucket, int]]
"""The heading of a bar, and its bytes by bucket: none where we know nothing, and the heading gives the reason."""


def bar_of(state: SearchState) -> Bar:
    """Return the bar of a state: live, the shown trial's peak, the traced peak or the closed form's."""
    running, shown = state.running, state.shown
    if running is not None:
        context_bytes = state.predicted.ready.context_bytes if state.predicted is not None else 0
        title = running_title(running, state)
        if running.sample is not None and not running.sample.buckets:
            title += " · by bucket at its end"
        return _bar(state, title, *_live(running.sample), context_bytes)
    batch_size = state.shown_batch_size
    if shown is not None:
        result, breakdown = shown.result, shown.result.breakdown
        until = "" if result.outcome == "fit" else f", until it {_ENDINGS[result.outcome]}"
        title = f"Peak of trial {shown.number} · batch {batch_size:,}{until}"
        if breakdown is None:
            return f"{title} · composition unknown: {result.buckets_unknown}", {}
        context_bytes = result.device_used_bytes - result.peak_reserved_bytes
        return _bar(state, title, breakdown, result.peak_reserved_bytes, context_bytes)
    if not isinstance(state.traced, Unknown):
        replay = state.traced.at(batch_size)
        title = f"Traced peak · batch {batch_size:,}"
        return _bar(state, title, replay.breakdown, replay.peak_reserved_bytes, state.traced.ready.context_bytes)
    formula = state.formula.at(batch_size)
    if isinstance(formula, Unknown):
        return f"Device memory: {state.traced.reason}", {}
    title = f"Peak by formula · batch {batch_size:,}"
    return _bar(state, title, formula.breakdown, formula.peak_bytes, 0)


def running_title(running: TrialProgress, state: SearchState) -> str:
    """Return what the running trial does, in words."""
    parts = [f"Trial {running.number}", f"batch {running.batch_size:,}"]
    sample = running.sample
    if sample is None:
        parts.append("starting")
    else:
        if sample.step:
            parts.append(f"step {sample.step} of {state.config.steps}")
        parts.append(_PHASE_WORDS.get(sample.phase, sample.phase))
    if state.paused:
        parts.append("held after this step")
    return " · ".join(parts)


def _live(sample: Sample | None) -> tuple[Breakdown, int]:
    """Return the sample's buckets, with what they do not explain as other; and the reserved bytes."""
    if sample is None:
        return Breakdown({}), 0
    buckets = {bucket: sample.buckets.get(bucket.value, 0) for bucket in ALLOCATED_BUCKETS}
    buckets[Bucket.OTHER] += max(0, sample.allocated_bytes - sum(buckets.values()))
    return Breakdown(buckets), max(sample.reserved_bytes, sum(buckets.values()))


def _bar(state: SearchState, title: str, allocated: Breakdown, reserved_bytes: int, context_bytes: int) -> Bar:
    gpu = state.config.device.gpu
    ledger: Ledger[None] = Ledger.of_step(
        allocated,
        allocated_bytes=allocated.total_bytes,
        reserved_bytes=reserved_bytes,
        used_bytes=reserved_bytes + context_bytes,
        cuda_total_bytes=gpu.cuda_total_bytes,
        total_bytes=gpu.total_bytes,
    )
    segments = ledger.known()
    if segments[Bucket.FREE] < 0:
        title += f" · {compact_bytes(-segments[Bucket.FREE])} more than the device has"
        segments[Bucket.FREE] = 0
    return title, segments


_LEGEND_TITLE_WIDTH = 15
_LEGEND_VALUE_WIDTH = 8
_ROOMY = 100


class MemoryBar(Widget):
    """A heading, the bar, and its legend in numbers as far as the height allows."""

    ALLOW_SELECT = False

    def __init__(self) -> None:
        super().__init__()
        self._bar: Bar = "", {}

    def show(self, state: SearchState) -> None:
        """Render a state; nothing is drawn again if nothing changed."""
        bar = bar_of(state)
        if bar != self._bar:
            self._bar = bar
            self.border_title = Content(bar[0])
            self.refresh()

    def render(self) -> Content:
        """Return the bar at the widget's size."""
        width, (_, segments) = self.size.width, self._bar
        shown = [(bucket, segments[bucket]) for bucket in BAR_ORDER if segments.get(bucket)]
        bar = joined(bucket_cells(segments, width))
        legend = [
            [
                BUCKET_LOOKS[bucket],
                (f" {bucket.title:<{_LEGEND_TITLE_WIDTH}}", ""),
                (f"{compact_bytes(size_bytes):>{_LEGEND_VALUE_WIDTH}}", "bold"),
            ]
            for bucket, size_bytes in shown
        ]
        return assembled([bar, *wrapped(legend, width, gap=3 if width > _ROOMY else 1)])
