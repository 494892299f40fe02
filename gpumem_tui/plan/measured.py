"""Throughput that a search has measured, for the plans of the same step on the same GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from gpumem_tui.catalog.shapes import Gpu, ModelShape
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.plan.plan import Plan
from gpumem_tui.trial.events import TrialDone
from gpumem_tui.workload.spec import WorkloadSpec


@dataclass(frozen=True)
class MeasuredRate:
    """Samples a second of one GPU at one micro-batch."""

    shape: ModelShape
    recipe: Recipe
    gpu: Gpu
    batch_size: int
    samples_per_s: float

    def is_of(self, plan: Plan) -> bool:
        """Whether the step of `plan` is the one that was timed, whatever its micro-batch."""
        return (self.shape, self.recipe, self.gpu) == (plan.shape, plan.recipe, plan.gpu) and not plan.extras


def rate_of(workload: WorkloadSpec, gpu: Gpu, trial: TrialDone) -> MeasuredRate | None:
    """What a trial measured: its median step without the first, which warms up.

    None for a trial that timed no later step, as on a simulated GPU, and for a workload that has no shape.
    """
    later = trial.step_seconds[1:]
    if workload.shape is None or trial.outcome != "fit" or not later:
        return None
    return MeasuredRate(workload.shape, workload.recipe, gpu, trial.batch_size, trial.batch_size / median(later))


def rates_for(plan: Plan, rates: Iterable[MeasuredRate]) -> tuple[MeasuredRate, ...]:
    """Those of the plan's step by micro-batch; of several at one micro-batch the last."""
    latest = {rate.batch_size: rate for rate in rates if rate.is_of(plan)}
    return tuple(latest[batch_size] for batch_size in sorted(latest))
