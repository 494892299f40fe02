"""A search's events as JSON lines and back, for a search that runs on another machine than the one that shows it.

Both ends are this program in the same version; what is read is validated all the same (msgspec), and no text in it can
move the cursor of the terminal that shows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from gpumem_tui.memory import Unknown
from gpumem_tui.run.events import EventError, Failed, Ready, TraceDone, printable, uncollected
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.predicting import CommandOutput, Predicted, TraceProgress, TraceStarted
from gpumem_tui.search.prediction import Prediction, Traced
from gpumem_tui.search.runner import SearchEvent, SearchFinished, TrialFinished, TrialProgress, TrialStarted

SCHEMA = 1


@dataclass(frozen=True)
class Configured:
    """The search that will run, and its directory."""

    config: SearchConfig
    directory: str


@dataclass(frozen=True)
class NotSearchable:
    """The options cannot be searched there; one line."""

    detail: str


@dataclass(frozen=True)
class _PredictedParts:
    """`Predicted`, of which the closed form is made again from the configuration.

    Attributes:
        trace: None where there is none, and `untraced` says why.
    """

    ready: Ready
    trace: TraceDone | None
    untraced: str
    guess: int | None


class _Line(msgspec.Struct):
    """The fields of every line."""

    schema: int
    event: str
    body: msgspec.Raw


Reply = SearchEvent | Failed | Configured | NotSearchable
"""`Failed`: the search ended without a verdict."""

_KINDS: dict[str, type] = {
    "configured": Configured,
    "refused": NotSearchable,
    "predicted": _PredictedParts,
    "output": CommandOutput,
    "trace_started": TraceStarted,
    "trace_progress": TraceProgress,
    "trial_started": TrialStarted,
    "progress": TrialProgress,
    "trial": TrialFinished,
    "finished": SearchFinished,
    "failed": Failed,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def encode_reply(reply: Reply) -> bytes:
    """Return a reply as one JSON line."""
    body = _parts(reply) if isinstance(reply, Predicted) else reply
    return msgspec.json.encode({"schema": SCHEMA, "event": _NAMES[type(body)], "body": body}) + b"\n"


def decode_reply(line: bytes, config: SearchConfig | None = None) -> Reply:
    """Read and validate a line.

    Args:
        config: what is searched; None before it is known, when nothing can be predicted.

    Raises:
        EventError: no JSON, another schema, an unknown event, or a field of the wrong type.
    """
    try:
        line = printable(line)
        head = msgspec.json.decode(line, type=_Line)
        if head.schema != SCHEMA:
            raise EventError(f"event of schema {head.schema}, expected {SCHEMA}")
        kind = _KINDS[head.event]
        if kind is not _PredictedParts:
            reply: Reply = msgspec.json.decode(head.body, type=kind)
            return reply
        if config is None:
            raise EventError("a prediction of nothing that is known")
        with uncollected():
            return _predicted(msgspec.json.decode(head.body, type=_PredictedParts), config)
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise EventError(f"not an event: {error}") from error


def _parts(event: Predicted) -> _PredictedParts:
    traced = event.prediction.traced
    if isinstance(traced, Unknown):
        return _PredictedParts(event.ready, None, traced.reason, event.guess)
    return _PredictedParts(traced.ready, traced.done, "", event.guess)


def _predicted(parts: _PredictedParts, config: SearchConfig) -> Predicted:
    traced: Traced | Unknown = Unknown(parts.untraced)
    if parts.trace is not None:
        traced = config.traced(parts.ready, parts.trace)
    return Predicted(Prediction(config.formula, traced), parts.ready, parts.guess)
