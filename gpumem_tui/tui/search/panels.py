"""The left panel's lines (what is trained, where and how), their short form, the header, the verdict and the help."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from textual.widgets import Static

from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import Unknown, Value, format_bytes, format_count
from gpumem_tui.plan.advice import Advice, advise, obstacle
from gpumem_tui.search.assumed import not_reached_line
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.prediction import Traced
from gpumem_tui.search.report import accumulation_line, gap_line, headroom_line, wanted_accumulation
from gpumem_tui.search.verdict import Verdict
from gpumem_tui.search.words import largest_words
from gpumem_tui.text import shortened
from gpumem_tui.tui.kit.figures import ABSENT, MUTED, Row, compact_bytes, header_line, percent, signed
from gpumem_tui.tui.kit.glyphs import BAR_ORDER, FIT_MARK, OUTCOME_SYMBOLS
from gpumem_tui.tui.kit.help import bucket_lines, help_entries, help_heading
from gpumem_tui.tui.kit.lines import assembled
from gpumem_tui.tui.kit.textual_internals import forget_height
from gpumem_tui.tui.search.bar import running_title
from gpumem_tui.tui.search.ledger import LedgerLine, LedgerView, ledger_view
from gpumem_tui.tui.search.state import SearchState, Stage
from gpumem_tui.workload.command import BATCH

_PANEL_CHARACTERS = 160
_LINE_CHARACTERS = 60
"""How much of a command is shown: in the panel, which has several lines for it, and within a line."""


def workload_lines(config: SearchConfig) -> Iterator[tuple[str, str]]:
    """Yield name and value, a line each; without a name, a sentence across the panel."""
    shape, recipe, command = config.workload.shape, config.workload.recipe, config.workload.command
    if (model := config.workload.hugging_face) is not None:
        yield from (("model", model.name), ("type", model.model_type), ("class", model.kind))
        if model.seq_len:
            yield "seq len", f"{model.seq_len:,}"
        yield from _recipe_lines(recipe)
        return
    if shape is None:
        yield ("file", short_name(config)) if command is None else ("command", "")
        if command is not None:
            yield "", shortened(command.text, _PANEL_CHARACTERS)
        if recipe.gpus > 1:
            yield "ranks", f"{recipe.gpus:,}"
        yield "", "Model, precision and optimizer come from your script."
        return
    yield "model", shape.name
    yield "params", f"{count_parameters(shape):,}"
    if shape.stages:
        yield "blocks", "-".join(map(str, shape.stages))
    for name in ("layers", "hidden", "heads", "vocab"):
        if value := getattr(shape, name):
            yield name, f"{value:,}"
    if shape.seq_len:
        yield "seq len", f"{shape.seq_len:,}"
    if shape.image_size:
        yield "image", f"{shape.image_size} px"
    yield from _recipe_lines(recipe)


def _recipe_lines(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if recipe.has_adapters:
        yield "adapter", recipe.adapter_words
    if recipe.has_frozen_layers:
        yield "frozen", recipe.freeze_words
    yield "precision", recipe.precision
    yield "optimizer", recipe.optimizer
    yield "recompute", recipe.recompute
    yield "attention", recipe.attention
    if recipe.compile:
        yield "compiled", "by torch.compile"


def strategy_lines(state: SearchState) -> Iterator[tuple[str, str]]:
    """Yield how it is searched, and the largest batch by each prediction: with the headroom, by trace without too.

    For a model and for a command alike "traced" leaves the headroom free; "safe" is of the whole GPU.
    """
    config = state.config
    yield "strategy", config.strategy
    yield "steps", f"{config.steps} a trial"
    yield "headroom", f"{config.headroom:.0%}"
    if config.limit_bytes is not None:
        yield "cap", format_bytes(config.limit_bytes)
    if config.target_batch is not None:
        yield "target", f"{config.target_batch:,} a step"
    if config.workload.shape is not None:
        yield "formula", _largest(state.formula.max_batch_size)
    traced = state.traced
    if config.headroom:
        yield "traced", _largest(state.with_headroom)
    sizes = traced.sizes if isinstance(traced, Traced) else traced
    if isinstance(sizes, Unknown):
        yield "safe", "–"
        return
    yield "safe", _largest(sizes.safe)
    if sizes.at_most > sizes.safe:
        yield "at most", _largest(sizes.at_most)


def workload_summary(config: SearchConfig) -> str:
    """Return the workload and the strategy in one line."""
    shape, recipe, model = config.workload.shape, config.workload.recipe, config.workload.hugging_face
    recompute = "" if recipe.recompute == "none" else f"recompute {recipe.recompute}"
    attention = "" if recipe.attention == "auto" else f"attention {recipe.attention}"
    how = [recipe.adapter_words, recipe.freeze_words, recipe.precision, recipe.optimizer, recompute, attention]
    how.append("compiled" if recipe.compile else "")
    if model is not None:
        what = [model.name, model.model_type, f"seq {model.seq_len:,}" if model.seq_len else ""]
    elif shape is None:
        what, how = [short_name(config), f"{recipe.gpus:,} ranks" if recipe.gpus > 1 else ""], []
    else:
        size = f"seq {shape.seq_len:,}" if shape.seq_len else f"{shape.image_size} px" if shape.image_size else ""
        what = [shape.name, f"{format_count(count_parameters(shape))} params", size]
    target = "" if config.target_batch is None else f"target {config.target_batch:,}"
    return " · ".join(filter(None, (*what, *how, config.strategy, target)))


def device_words(config: SearchConfig) -> tuple[str, str]:
    """Return the device's name, that it is simulated in capitals, and a cap on it; and why it was taken."""
    device = config.device
    cap = f" · cap {format_bytes(config.limit_bytes)}" if config.limit_bytes is not None else ""
    return f"{'SIMULATED ' if device.simulated else ''}{device.gpu.title}{cap}", device.reason


def short_name(config: SearchConfig) -> str:
    """Return the workload's name within a line: a file's without its folder, of a command the beginning."""
    workload = config.workload
    if workload.command is not None:
        return shortened(workload.name, _LINE_CHARACTERS)
    return workload.name if workload.shape is not None else Path(workload.name).name


def _largest(value: int | Unknown) -> str:
    return "–" if isinstance(value, Unknown) else f"batch {value:,}"


Tone = Literal["calm", "busy", "good", "warning", "bad"]
_AGAIN = "s tries again · e edits the workload"


@dataclass(frozen=True)
class VerdictView:
    """The lines of a search's verdict.

    Attributes:
        badge: one or two words in capitals. `tone`: its emphasis; the badge states it in words.
        headline: one line. `details`: what may be left out where there is no room.
        reach: how the wanted global batch is reached; empty if none is wanted.
        room: which batch leaves the headroom free, too; empty if that is not wanted or not known.
        larger: which batch is safe at no cost, and how; empty for none.
    """

    badge: str
    tone: Tone
    headline: str
    reach: str = ""
    room: str = ""
    larger: str = ""
    details: tuple[str, ...] = ()
    advice: tuple[Advice, ...] = ()


def verdict_view(state: SearchState, notice: str = "", *, short: bool = False) -> VerdictView:
    """Return the foot of the screen.

    Args:
        notice: where the search will run, in the words of whoever opened the screen.
        short: the bar has no heading, so say here what the running trial does.
    """
    if state.cancelling:
        what = "trial" if state.tracing is None else "command"
        return VerdictView("CANCELLING", "busy", f"ending the running {what}")
    if state.paused:
        runs = state.running is not None or state.tracing is not None
        where = "after the step that runs" if runs else "before the next trial"
        return VerdictView("PAUSED", "warning", f"held {where} · p continues · c cancels")
    if state.stage is Stage.IDLE:
        return _idle(state, notice)
    if state.stage is Stage.PREDICTING:
        return VerdictView("PREDICTING", "busy", _tracing(state))
    if state.stage is Stage.RUNNING:
        if short and state.running is not None:
            return VerdictView("SEARCHING", "busy", running_title(state.running, state).lower())
        return _running(state)
    if state.failure is not None:
        return VerdictView("FAILED", "bad", state.failure.message, details=(_AGAIN,))
    assert state.verdict is not None
    return _ended(state, state.verdict)


def _tracing(state: SearchState) -> str:
    workload = state.config.workload
    if workload.command is None:
        return f"tracing one training step of {workload.name} without a GPU: some seconds"
    at = "" if state.tracing is None else f" batch size {state.tracing:,}"
    return f"tracing{at}: {'the command' if workload.hugging_face is None else workload.name} runs on a simulated GPU"


def _idle(state: SearchState, notice: str) -> VerdictView:
    config = state.config
    how = "simulated" if config.device.simulated else "run"
    where = notice or config.device.gpu.title
    what, traced = f"batch of {short_name(config)}", "The step is traced once"
    if config.workload.command is not None and config.workload.hugging_face is None:
        what, traced = BATCH, "The command is run to trace its step"
    return VerdictView(
        "READY",
        "calm",
        f"s finds the largest {what} that fits · e edits first",
        details=(
            f"{traced}, then {how} at growing sizes until one fits and the next does not.",
            f"On {where}.",
        ),
    )


def _running(state: SearchState) -> VerdictView:
    fitting = [trial.result.batch_size for trial in state.trials if trial.result.outcome == "fit"]
    failing = [trial.result.batch_size for trial in state.trials if trial.result.outcome != "fit"]
    if not state.trials:
        of_one = " of one GPU" if state.config.workload.recipe.gpus > 1 else ""
        predicted = f"predicted largest batch{of_one}: {_predicted(state)}"
        return VerdictView("SEARCHING", "busy", predicted, details=_gap(state))
    fits = f"batch {max(fitting):,} fits" if fitting else "none fits yet"
    fails = f", {min(failing):,} does not" if failing else ""
    return VerdictView("SEARCHING", "busy", f"{fits}{fails}; predicted {_predicted(state)}", details=_gap(state))


def _ended(state: SearchState, verdict: Verdict) -> VerdictView:
    message = _sentence(verdict.message)
    trials = f"{verdict.trials} trial{'' if verdict.trials == 1 else 's'}, {verdict.ooms} out of memory"
    steps = wanted_accumulation(state.config, verdict.safe_batch_size)
    reach = "" if steps is None else _sentence(accumulation_line(state.config.workload, steps))
    larger = "" if verdict.remedy is None else _sentence(verdict.remedy.larger_line)
    if verdict.outcome == "nothing_fits" and state.config.workload.shape is None:
        counted = state.formula.max_batch_size
        unknown = (f"{counted.reason}: no known remedy",) if isinstance(counted, Unknown) else ()
        return VerdictView("NOTHING FITS", "bad", message, larger=larger, details=unknown)
    if verdict.outcome == "nothing_fits":
        return VerdictView(
            "NOTHING FITS", "bad", obstacle(state.config) or message, larger=larger, advice=advise(state.config)
        )
    if verdict.outcome == "found":
        badge = _badge(state, verdict)
        roomy, total_bytes = verdict.with_headroom, state.config.room.total_bytes
        room = "" if roomy is None else _sentence(headroom_line(roomy, total_bytes))
        tone: Tone = "good" if verdict.verified and verdict.safe_batch_size else "warning"
        missing = not_reached_line(state.traced) if isinstance(state.traced, Traced) else ""
        details = (*filter(None, (_sentence(missing),)), trials, *_gap(state))
        return VerdictView(badge, tone, message, reach=reach, room=room, larger=larger, details=details)
    if verdict.outcome == "cancelled":
        return VerdictView("CANCELLED", "warning", message, reach, details=(f"{trials} · s starts over",))
    return VerdictView("FAILED", "bad", message, reach, details=(f"{trials} · {_AGAIN}",))


def _badge(state: SearchState, verdict: Verdict) -> str:
    """Return in a word what the headline's size is; only one that ran is verified."""
    if not verdict.safe_batch_size:
        return "NOT SAFE"
    if not verdict.verified:
        return "NOT VERIFIED"
    if verdict.safe_batch_size < verdict.max_batch_size:
        return "SAFE"
    return "VERIFIED IN SIMULATION" if state.config.device.simulated else "VERIFIED"


def _gap(state: SearchState) -> tuple[str, ...]:
    """Return why the predictions differ, if known."""
    said = "" if state.predicted is None else gap_line(state.predicted.prediction)
    return (_sentence(said),) if said else ()


def _sentence(line: str) -> str:
    return line[:1].upper() + line[1:]


def _predicted(state: SearchState) -> str:
    """Return the largest batch that is predicted to fit, by trace where there is one."""
    traced, formula = state.traced, state.formula.max_batch_size
    if isinstance(traced, Traced) and (largest := largest_words(traced.max_batch_size, traced.may_fit_batch_size)):
        return largest
    return ABSENT if isinstance(formula, Unknown) else f"≈{formula:,} by formula"


_KEY_WIDTH = 10
_TITLE_WIDTH = 16
_WIDTHS = (8, 8, 10)
_TRACED_AT = 1
_SIMULATED = "Simulated"
_ERROR_WIDTH = 9
_SHARE_WIDTH = 7
_OPTION_WIDTH = 32
_TONE_COLOURS: dict[Tone, str] = {
    "calm": "$secondary",
    "busy": "$primary",
    "good": "$success",
    "warning": "$warning",
    "bad": "$error",
}


class LinesPanel(Static):
    """Lines of styled text, drawn again only when they change."""

    _lines: list[Row] | None = None

    def show_lines(self, lines: list[Row]) -> None:
        """Replace the text."""
        if lines != self._lines:
            self._lines = lines
            forget_height(self)
            self.update(assembled(lines))


class WorkloadPanel(LinesPanel):
    """The workload, and how it is searched."""

    BORDER_TITLE = "Workload"

    def show(self, state: SearchState) -> None:
        """Render a state."""
        self.show_lines([*map(_pair, workload_lines(state.config)), [], *map(_pair, strategy_lines(state))])


class WorkloadLine(LinesPanel):
    """The workload and the strategy in one line, for narrow terminals."""

    def show(self, state: SearchState) -> None:
        """Render a state."""
        self.show_lines([[(workload_summary(state.config), "")]])


class LedgerTable(LinesPanel):
    """Formula | Traced | Simulated or Measured | error. `title` names the batch size."""

    title = ""

    def show(self, state: SearchState) -> None:
        """Render a state."""
        view = ledger_view(state)
        trial = f" · trial {view.trial}" if view.trial is not None else ""
        self.title = f"Ledger at batch {view.batch_size:,}{trial}"
        self.show_lines(_table(view))


class VerdictPanel(LinesPanel):
    """The verdict of the search; a short form drops the details."""

    def show(self, state: SearchState, notice: str, elapsed_s: int, *, short: bool) -> None:
        """Render a state, `elapsed_s` seconds after the search began."""
        view = verdict_view(state, notice, short=short)
        for tone in _TONE_COLOURS:
            self.set_class(tone == view.tone, f"-{tone}")
        lines: list[Row] = [
            [(f" {view.badge} ", f"bold $background on {_TONE_COLOURS[view.tone]}"), (f" {view.headline}", "bold")]
        ]
        if state.busy:
            lines[0].append((f" · {elapsed_s} s", MUTED))
        lines += [[(line, "")] for line in (view.larger, view.reach, view.room) if line]
        if not short:
            lines += [[(line, MUTED)] for line in view.details]
        self.show_lines([*lines, *_advice(view, short=short)])


class ReasonPanel(LinesPanel):
    """The output of the shown trial, if it did not fit; when nothing fits, the remedies take the room."""

    def show(self, state: SearchState) -> None:
        """Render a state."""
        shown = state.shown
        said = shown.result.detail if shown is not None and state.stage is not Stage.NOTHING_FITS else ""
        self.set_class(bool(said), "-said")
        self.show_lines([[(f"trial {shown.number} said: ", MUTED), (said, "")]] if shown is not None and said else [])


def _pair(pair: tuple[str, str]) -> Row:
    name, value = pair
    return [(f"{name:<{_KEY_WIDTH}}", MUTED), (value, "")] if name else [(value, "")]


def _table(view: LedgerView) -> list[Row]:
    """Return the table with the columns that have a figure; without any, the reasons alone.

    Where a trial on a simulated GPU repeats what was traced, one column has both.
    """
    heads = enumerate(zip(("Formula", "Traced", view.tried_title), _WIDTHS, strict=True))
    columns = {at: head for at, head in heads if any(_is_known(row.values[at]) for row in view.rows)}
    if view.tried_title == _SIMULATED and all(row.traced == row.tried for row in view.rows):
        columns.pop(_TRACED_AT, None)
    has_error = bool(view.error_title) and any(_is_known(row.error) for row in view.rows)
    lines: list[Row] = [[(caption, "$warning")] for caption in view.captions]
    if columns:
        head = f"{'GiB':<{_TITLE_WIDTH}}" + "".join(f"{title:>{width}}" for title, width in columns.values())
        error = f"{view.error_title:>{_ERROR_WIDTH + _SHARE_WIDTH}}" if has_error else ""
        lines.append([(f"{head}{error}", f"bold {MUTED}")])
        lines += [_row(row, columns, has_error=has_error) for row in view.rows]
    lines += [[(note, MUTED)] for note in view.notes]
    return lines


def _is_known(value: Value) -> bool:
    return not isinstance(value, Unknown)


def _row(row: LedgerLine, columns: Iterable[int], *, has_error: bool) -> Row:
    weight = "bold" if row.is_sum else ""
    spans: Row = [(f"{row.title:<{_TITLE_WIDTH}}", weight)]
    for index in columns:
        value = row.values[index]
        beyond = isinstance(value, int) and value < 0
        figure = f"{compact_bytes(value):>{_WIDTHS[index]}}"
        spans.append((figure, "bold $error" if beyond else _style(value, weight)))
    if not has_error:
        return spans
    spans.append((f"{signed(row.error):>{_ERROR_WIDTH}}", _style(row.error, weight)))
    share = "" if isinstance(row.error, Unknown) else percent(row.error_share)
    spans.append((f"{share:>{_SHARE_WIDTH}}", MUTED))
    return spans


def _style(value: Value, weight: str) -> str:
    if isinstance(value, Unknown) or value == 0:
        return MUTED
    return weight


def _advice(view: VerdictView, *, short: bool) -> list[Row]:
    """Return what to type and what it buys side by side, in columns but for several changes together."""
    width = max((len(one.option) for one in view.advice if len(one.option) <= _OPTION_WIDTH), default=0)
    lines: list[Row] = []
    for one in view.advice:
        lines.append([(f"{one.option:<{width}}", "bold"), (f"  {one.buys}", "")])
        if not short:
            lines.append([(f"  cost: {one.cost}", MUTED)])
    return lines


def header_row(state: SearchState, time: str, width: int) -> Row:
    """Return the GPU, why it was taken, and the version of torch that runs."""
    name, reason = device_words(state.config)
    facts = [(reason, MUTED)] if reason else []
    if state.predicted is not None:
        facts.append((f"torch {state.predicted.ready.torch_version}", MUTED))
    return header_line((name, "bold"), facts, [(time, MUTED)], width)


def search_help(tried_title: str, *, is_command: bool = False) -> list[Row]:
    """Return what the columns, the marks and the buckets mean.

    Args:
        tried_title: what the third column is called here.
        is_command: a command is searched: there is no closed form of it.
    """
    simulated = tried_title == _SIMULATED
    step = "the command's step" if is_command else "a real step"
    ran = "the traced step run once more" if simulated else "the step on this GPU"
    compared = "formula" if simulated and not is_command else "traced"
    columns = (
        *(() if is_command else [("Formula", "the textbook's closed form; knows no cache and no context")]),
        ("Traced", f"{step} recorded without a GPU, replayed at any size"),
        (tried_title, f"{ran}, in a process of its own"),
        *(
            []
            if simulated and is_command
            else [("error", f"{compared} − {tried_title.lower()}, in bytes and of the trial's figure")]
        ),
    )
    marks = (
        (FIT_MARK, "a trial that fits, at the memory the device then held"),
        (OUTCOME_SYMBOLS["oom"], "out of memory, at what it would have needed by trace"),
        (OUTCOME_SYMBOLS["error"], "a trial that failed for another reason"),
    )
    zero = "on a simulated GPU what the command computes, such as its loss, reads 0; "
    return [
        help_heading("Columns"),
        *help_entries(columns),
        *help_entries([("", f"{zero if is_command else ''}figures without a unit are GiB; – is unknown, never 0")]),
        [],
        help_heading("Chart"),
        *help_entries(marks),
        [],
        help_heading("Buckets"),
        *bucket_lines(BAR_ORDER),
        [],
    ]
