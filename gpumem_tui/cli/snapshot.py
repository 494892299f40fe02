"""What a prediction writes as a memory snapshot."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from gpumem_tui.cli.common import complain
from gpumem_tui.errors import OptionError
from gpumem_tui.exit_codes import EXIT_FAILED

if TYPE_CHECKING:
    from gpumem_tui.search.prediction import Prediction

_OPTION = "--snapshot"


def check_target(path: Path) -> None:
    """Whether a snapshot can be written there; to be asked before a trace that takes minutes.

    Raises:
        OptionError: it cannot.
    """
    folder = path.parent
    if path.is_dir():
        raise OptionError(f"{_OPTION} {path}: is a folder; give the name of a file in it")
    if not folder.is_dir():
        raise OptionError(f"{_OPTION} {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise OptionError(f"{_OPTION} {path}: no permission to write in {folder}")


def write_prediction(prediction: Prediction, batch_size: int, path: Path) -> int:
    """Write the traced run at a batch size, and say so on stderr; the exit code."""
    from gpumem_tui.memory import Unknown, format_bytes
    from gpumem_tui.snapshots.write import write_snapshot

    traced = prediction.traced
    if isinstance(traced, Unknown):
        return complain(f"{_OPTION}: there is no trace to write: {traced.reason}", EXIT_FAILED)
    recording = traced.recorded(batch_size)
    try:
        write_snapshot(recording, path)
    except OSError as error:
        return complain(f"{_OPTION} {path}: cannot be written: {error.strerror}", EXIT_FAILED)
    last = recording.events[-1] if recording.events else None
    end = "" if recording.fits or last is None else f", up to where {format_bytes(last.size_bytes)} no longer fit"
    return complain(f"{path}: {len(recording.events):,} events of the simulated run{end}; `gpumem-tui look {path}`", 0)
