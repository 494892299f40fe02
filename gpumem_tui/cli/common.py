"""What every command shares: whether there is a terminal, how a complaint is made, how a step is predicted."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from gpumem_tui.exit_codes import EXIT_BAD_INPUT, EXIT_FAILED
from gpumem_tui.memory import Unknown

if TYPE_CHECKING:
    from gpumem_tui.search.config import SearchConfig
    from gpumem_tui.search.prediction import Prediction
    from gpumem_tui.trial.events import Ready


def is_terminal() -> bool:
    """Textual draws on stderr and reads stdin; all three must be the terminal, and one that can be drawn on."""
    streams = (sys.stdin, sys.stdout, sys.stderr)  # None where whoever started the program closed them
    return all(stream is not None and stream.isatty() for stream in streams) and os.environ.get("TERM") != "dumb"


def drop_output() -> None:
    """What stdout still holds is not wanted, or has no place: without this it would be written at the exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(message: str, code: int) -> int:
    """One line on stderr; returns the exit code."""
    print(f"gpumem-tui: {' '.join(message.split())}", file=sys.stderr)
    return code


def predict_or_exit(
    config: SearchConfig, batch_size: int, *, quiet: bool = False, limit_s: float | None = None
) -> tuple[Prediction, Ready | None]:
    """Both predictions, and what traced; where there can be none, the program ends with one line that says why.

    Without a torch that traces, the closed form answers where there is one: None for what traced.

    Args:
        quiet: do not show what a command prints.
        limit_s: seconds that the trace may take; None for as long as it takes.

    Raises:
        Cancelled: the trace took longer.
    """
    from gpumem_tui.search.control import Control, Unusable
    from gpumem_tui.search.headless import CommandLog
    from gpumem_tui.search.predicting import predict
    from gpumem_tui.search.prediction import Prediction
    from gpumem_tui.search.process import ChildDied

    control = Control()
    try:
        with control.within(limit_s):
            predicted = predict(config, control, batch_size, watch=CommandLog(config, quiet=quiet).show)
    except Unusable as error:
        if error.kind == "torch" and config.workload.shape is not None:
            return Prediction(config.formula, Unknown(str(error))), None
        raise SystemExit(complain(str(error), error.exit_code)) from error
    except ChildDied as error:
        raise SystemExit(complain(f"tracing failed: {error}", EXIT_FAILED)) from error
    traced, formula = predicted.prediction.traced, predicted.prediction.formula
    if isinstance(traced, Unknown) and isinstance(formula.at(batch_size), Unknown):
        raise SystemExit(complain(traced.reason, EXIT_BAD_INPUT))
    return predicted.prediction, predicted.ready
