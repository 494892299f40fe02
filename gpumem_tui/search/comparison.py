"""Which prediction a trial is held against, and by how much that was off."""

from __future__ import annotations

from typing import Literal

from gpumem_tui.memory import Unknown, Value
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.prediction import Formula, Traced
from gpumem_tui.trial.events import TrialDone


def compared(config: SearchConfig, traced: Traced | Unknown) -> Literal["formula", "traced"]:
    """The prediction whose error is shown: the trace, on a real GPU.

    A trial on the simulated GPU is the traced step run once more. That the two agree proves nothing, so there the
    closed form is compared, as it is where there is no trace; only a workload file has no closed form.
    """
    if config.workload.shape is not None and (config.device.simulated or isinstance(traced, Unknown)):
        return "formula"
    return "traced"


def caveat(config: SearchConfig, traced: Traced | Unknown) -> str:
    """What an error of 0 is worth where a simulated trial can be held against its own trace only; else empty."""
    if config.device.simulated and compared(config, traced) == "traced":
        return "traced and simulated are two runs of one simulation: that they agree proves nothing about a real GPU"
    return ""


def peak_error(config: SearchConfig, formula: Formula, traced: Traced | Unknown, result: TrialDone) -> Value:
    """The compared prediction less the allocated peak of a trial, in bytes; unknown unless the trial fits."""
    if result.outcome != "fit":
        return Unknown("the trial ended early")
    if compared(config, traced) == "formula":
        counted = formula.at(result.batch_size)
        return counted if isinstance(counted, Unknown) else counted.peak_bytes - result.peak_allocated_bytes
    if isinstance(traced, Unknown):
        return traced
    return traced.at(result.batch_size).peak_allocated_bytes - result.peak_allocated_bytes
