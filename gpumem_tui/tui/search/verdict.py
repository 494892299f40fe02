"""What happens, what came out, and what would help: the lines at the foot of the screen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpumem_tui.memory import Unknown
from gpumem_tui.plan.advice import Advice, advise, obstacle
from gpumem_tui.search.json_report import wanted_accumulation
from gpumem_tui.search.prediction import Traced
from gpumem_tui.search.ranges import found_line, largest_words
from gpumem_tui.search.report import accumulation_line, gap_line, headroom_line
from gpumem_tui.search.verdict import Verdict
from gpumem_tui.tui.kit.figures import ABSENT
from gpumem_tui.tui.search.bar import running_title
from gpumem_tui.tui.search.state import SearchState, Stage
from gpumem_tui.tui.search.workload import short_name
from gpumem_tui.workload.command import BATCH

Tone = Literal["calm", "busy", "good", "warning", "bad"]
_AGAIN = "s tries again · e edits the workload"


@dataclass(frozen=True)
class VerdictView:
    """What to say.

    Attributes:
        badge: one or two words in capitals. `tone`: how it stands out; the badge says the same in words.
        headline: one line. `details`: what may be left out where there is no room.
        reach: how the wanted global batch is reached; empty if none is wanted.
        room: which batch leaves the headroom free, too; empty if that is not wanted or not known.
    """

    badge: str
    tone: Tone
    headline: str
    reach: str = ""
    room: str = ""
    details: tuple[str, ...] = ()
    advice: tuple[Advice, ...] = ()


def verdict_view(state: SearchState, notice: str = "", *, short: bool = False) -> VerdictView:
    """The foot of the screen.

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
        return VerdictView("PAUSED", "warning", f"held {where} · p goes on · c cancels")
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


def command_found(state: SearchState) -> str:
    """The user's command with the largest batch size found, as it is typed; empty without a command or a size."""
    workload, verdict = state.config.workload, state.verdict
    if workload.command is None or workload.hugging_face is not None or verdict is None or not verdict.max_batch_size:
        return ""
    size = verdict.max_batch_size
    passes = workload.command.accumulation(size, state.config.target_batch, workload.recipe.data_parallel)
    return workload.command.text_at(size, passes)


def _again(state: SearchState) -> str:
    return "s tries again · e edits the workload"


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
        predicted = f"predicted largest batch{of_one}: {_predictions(state)}"
        return VerdictView("SEARCHING", "busy", predicted, details=_gap(state))
    fits = f"batch {max(fitting):,} fits" if fitting else "none fits yet"
    fails = f", {min(failing):,} does not" if failing else ""
    return VerdictView("SEARCHING", "busy", f"{fits}{fails}; predicted: {_predictions(state)}", details=_gap(state))


def _ended(state: SearchState, verdict: Verdict) -> VerdictView:
    message = _sentence(verdict.message)
    trials = f"{verdict.trials} trial{'' if verdict.trials == 1 else 's'}, {verdict.ooms} out of memory"
    summary = f"{trials} · predicted: {_predictions(state)}"
    steps = wanted_accumulation(state.config, verdict.max_batch_size)
    reach = "" if steps is None else _sentence(accumulation_line(state.config.workload, steps))
    if verdict.outcome == "nothing_fits":
        return _nothing_fits(state, message)
    if verdict.outcome == "found":
        verified = "VERIFIED IN SIMULATION" if state.config.device.simulated else "VERIFIED"
        badge = verified if verdict.verified else "NOT VERIFIED"
        room = "" if verdict.with_headroom is None else _sentence(headroom_line(verdict.with_headroom))
        tone: Tone = "good" if verdict.verified else "warning"
        real = ""
        if state.config.device.simulated and isinstance(state.traced, Traced):
            real = _sentence(found_line(state.traced, verdict.max_batch_size))
        return VerdictView(badge, tone, message, reach, room, (summary, *filter(None, (real,)), *_gap(state)))
    if verdict.outcome == "cancelled":
        return VerdictView("CANCELLED", "warning", message, reach, details=(f"{summary} · s starts over",))
    return VerdictView("FAILED", "bad", message, reach, details=(f"{trials} · {_AGAIN}",))


def _nothing_fits(state: SearchState, message: str) -> VerdictView:
    """The obstacle, and what would help most, by the closed form."""
    config = state.config
    if config.workload.shape is None:
        counted = state.formula.max_batch_size
        unknown = (f"{counted.reason}: no remedy is known",) if isinstance(counted, Unknown) else ()
        return VerdictView("NOTHING FITS", "bad", message, details=unknown)
    return VerdictView("NOTHING FITS", "bad", obstacle(config) or message, advice=advise(config))


def _gap(state: SearchState) -> tuple[str, ...]:
    """Why the predictions differ, where they do and that is known."""
    said = "" if state.predicted is None else gap_line(state.predicted.prediction)
    return (_sentence(said),) if said else ()


def _sentence(line: str) -> str:
    return line[:1].upper() + line[1:]


def _predictions(state: SearchState) -> str:
    """Both largest batches with the same headroom, and the traced one up to out of memory."""
    traced, formula = state.traced, state.formula.max_batch_size
    whole = ABSENT
    if isinstance(traced, Traced):
        whole = largest_words(traced.max_batch_size, traced.may_fit_batch_size) or ABSENT
    if state.config.workload.shape is None:
        return f"traced {whole}"
    by_formula = f"formula {largest_words(formula, formula) or ABSENT}"
    roomy = state.with_headroom
    if not state.config.headroom or isinstance(roomy, Unknown):
        return f"{by_formula}, traced {whole}"
    return f"with {state.config.headroom:.0%} free {by_formula}, traced {roomy:,}; with none free traced {whole}"
