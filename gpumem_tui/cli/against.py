"""`look FILE --against`: a memory snapshot held against the trace of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gpumem_tui.cli.common import complain, predict_or_exit
from gpumem_tui.cli.groups import with_options
from gpumem_tui.cli.search import predicted_size
from gpumem_tui.cli.workload import DEVICE_OPTIONS, WORKLOAD_OPTIONS, configured
from gpumem_tui.exit_codes import EXIT_FAILED

if TYPE_CHECKING:
    from gpumem_tui.snapshots.against import Comparison
    from gpumem_tui.snapshots.analysis import Analysis
    from gpumem_tui.snapshots.model import MemorySnapshot


def _options() -> list[Any]:
    """Those that say what is traced and on what; a snapshot has its own batch size, and no search is made."""

    @with_options(WORKLOAD_OPTIONS, DEVICE_OPTIONS)
    def holder() -> None:
        """Holds the options."""

    unused = {"timeout_s", "share", "headroom", "target_batch", "limit_bytes"}
    return [option for option in reversed(holder.__click_params__) if option.name not in unused]  # type: ignore[attr-defined]


OPTIONS: list[click.Option] = _options()


def given_options(context: click.Context) -> list[str]:
    """Those of `OPTIONS` that were typed."""
    return [
        option.opts[0]
        for option in OPTIONS
        if context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
    ]


def compare_with_trace(
    snapshot: MemorySnapshot, analysis: Analysis, values: dict[str, Any], batch_size: int | None
) -> tuple[Comparison, int]:
    """Trace the step that the options name, and hold the snapshot against it; the trace's peak in bytes too.

    Raises:
        OptionError, click.UsageError: the options name no step.
        SystemExit: it cannot be traced; the reason has been said.
    """
    from gpumem_tui.memory import Unknown
    from gpumem_tui.snapshots import against

    _, config = configured(values, share=True)
    size = predicted_size(config, batch_size)
    traced = predict_or_exit(config, size, quiet=True)[0].traced
    if isinstance(traced, Unknown):
        raise SystemExit(complain(f"--against: there is no trace: {traced.reason}", EXIT_FAILED))
    recording = traced.recorded(size)
    comparison = against.compare(
        against.requests_of_snapshot(snapshot, analysis.device),
        against.requests_of_recording(recording),
        is_whole=not analysis.timeline[0].allocated_bytes,
    )
    return comparison, traced.at(size).peak_allocated_bytes
