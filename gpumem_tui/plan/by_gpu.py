"""The largest batch, and whether the plan fits, on every GPU of the catalog: from the one trace there is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpumem_tui.catalog.loader import gpus
from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.blocks import as_run_on
from gpumem_tui.memory import Unknown
from gpumem_tui.plan.answers import headroom_of, largest_batch, on_gpu
from gpumem_tui.plan.lacking import lacking
from gpumem_tui.plan.plan import Plan
from gpumem_tui.search.prediction import Traced
from gpumem_tui.simulator.finder import BatchFinder


@dataclass(frozen=True)
class LargestOnGpu:
    """The largest batches on one GPU with the plan's headroom left free; 0 for none.

    Attributes:
        traced: None without a trace; or why it cannot tell.
        same_architecture: of the GPU that the trace was made for.
        lacks: what the plan asks for that this GPU has not, a sentence each.
    """

    gpu: Gpu
    formula: int
    traced: int | Unknown | None
    same_architecture: bool
    lacks: tuple[str, ...]

    @property
    def largest(self) -> int:
        """By the trace where it tells, else by formula."""
        return self.traced if isinstance(self.traced, int) else self.formula


def largest_by_gpu(plan: Plan, traced: Traced | None, finder: BatchFinder | None = None) -> tuple[LargestOnGpu, ...]:
    """Every GPU of the catalog, the one with the least memory first. With a trace this takes seconds.

    Args:
        traced: of the plan, whatever GPU it was made on; None for the formula alone.
        finder: of this very trace.
    """
    if traced is not None and finder is None and not traced.only_at:
        finder = BatchFinder(traced.trace, traced.settings)
    found = []
    for gpu in sorted(gpus().values(), key=lambda one: (one.total_bytes, one.name)):
        there = replace(plan, gpu=gpu)
        by_trace: int | Unknown | None = None
        if traced is not None and as_run_on(plan.recipe, gpu) != as_run_on(plan.recipe, plan.gpu):
            by_trace = Unknown(f"attention takes another kernel on {gpu.sm}: choose this GPU to trace it")
        elif traced is not None:
            by_trace = on_gpu(there, traced, finder).max_batch_size_leaving(headroom_of(there))
        same = traced is not None and traced.profile.endswith(f" {gpu.sm}")
        found.append(LargestOnGpu(gpu, largest_batch(there), by_trace, same, lacking(there)))
    return tuple(found)
