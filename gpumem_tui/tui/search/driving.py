"""Runs a search to its end, in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpumem_tui.exit_codes import EXIT_FAILED
from gpumem_tui.search.control import Unusable
from gpumem_tui.search.predicting import CommandOutput, Predicted
from gpumem_tui.search.prediction import Prediction
from gpumem_tui.search.runner import SearchEvent, TrialStarted
from gpumem_tui.tui.kit.output_pane import Printed
from gpumem_tui.tui.search.plot import warm
from gpumem_tui.tui.search.state import Failure


def drive(events: Iterator[SearchEvent], printed: Printed, arrived: Callable[[SearchEvent], object]) -> Failure | None:
    """Take what a search says as it comes; why it ended without a verdict, if it did.

    Args:
        printed: takes what the command prints. There may be much of it: the screen looks when it draws.
        arrived: takes everything else.
    """
    prediction: Prediction | None = None
    try:
        for event in events:
            printed.take(event)
            if isinstance(event, CommandOutput):
                continue
            if isinstance(event, Predicted):
                prediction = event.prediction
                warm(prediction)
            elif isinstance(event, TrialStarted) and prediction is not None:
                warm(prediction, [event.batch_size])
            arrived(event)
    except Unusable as error:
        return Failure(str(error), error.exit_code)
    except Exception as error:  # noqa: BLE001  whatever it is, the screen says it in one line
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return Failure(f"the search itself broke off: {said}", EXIT_FAILED)
    return None
