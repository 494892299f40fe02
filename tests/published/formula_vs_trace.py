"""How far the formula's largest batch is from the traced one: `python -m tests.published.formula_vs_trace`.

A developer's tool. A model is traced once for each precision and recompute strategy, and that trace is replayed on
twelve GPUs; both largest batches leave the same headroom free. Seconds to minutes a trace: pick models with --models.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gpumem_tui.catalog.loader import find_gpu, find_model, models
from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import PRECISIONS, RECOMPUTES, Recipe
from gpumem_tui.formula.records import as_run_on
from gpumem_tui.memory import Unknown
from gpumem_tui.plan.answers import headroom_of, largest_batch, on_gpu
from gpumem_tui.plan.plan import Plan
from gpumem_tui.run.interpreters import close_idle
from gpumem_tui.search.config import Device, SearchConfig
from gpumem_tui.search.predicting import predict
from gpumem_tui.search.prediction import Traced
from gpumem_tui.simulator.allocator.finder import BatchFinder
from gpumem_tui.workload.spec import WorkloadSpec

GPUS = (
    "rtx-3060-12gb", "t4-16gb", "v100-16gb", "rtx-3090-24gb", "rtx-4090-24gb", "rtx-5090-32gb",
    "a100-40gb", "l40s-48gb", "a100-80gb", "h100-80gb", "h200-141gb", "b200-180gb",
)  # fmt: skip
TRACED_ON = "a100-80gb"
CLOSE, UNSAFE = 0.15, 0.05
"""The goal: the formula within this share of the traced batch, and never above it by more than that one."""


@dataclass(frozen=True)
class LargestPair:
    """The largest batch of one model on one GPU by formula and by trace."""

    gpu: str
    formula: int
    traced: int

    @property
    def is_close(self) -> bool:
        """Within the goal; a single sample more or less always is."""
        return abs(self.formula - self.traced) <= max(1, CLOSE * self.traced)

    @property
    def is_unsafe(self) -> bool:
        """Above the traced one by more than the goal allows."""
        return self.formula > self.traced * (1 + UNSAFE)

    def __str__(self) -> str:
        return f"{self.formula}/{self.traced}{'' if self.is_close else '*'}{'!' if self.is_unsafe else ''}"


def trace_of(shape: ModelShape, recipe: Recipe) -> Traced | Unknown:
    """The traced step of a model of the catalog, or why it is missing."""
    device = Device(find_gpu(TRACED_ON), simulated=True)
    return predict(SearchConfig(WorkloadSpec(recipe, shape=shape), device)).prediction.traced


def compared(shape: ModelShape, recipe: Recipe, traced: Traced, names: Sequence[str] = GPUS) -> Iterator[LargestPair]:
    """Both largest batches on each GPU; one where another attention kernel would run is left out."""
    finder = BatchFinder(traced.trace, traced.settings)
    for name in names:
        plan = Plan(shape, recipe, find_gpu(name))
        if as_run_on(recipe, plan.gpu) != recipe:
            continue
        there, formula = on_gpu(plan, traced, finder), largest_batch(plan)
        by_trace = there.max_batch_size_leaving(headroom_of(plan))
        if isinstance(by_trace, int):
            # The sizes that fit by trace have gaps, and the search may have met the upper end of a lower stretch.
            below = range(formula, max(by_trace, int(formula * (1 - UNSAFE))), -max(1, formula // 100))
            larger = (size for size in below if there.fits_leaving(size, headroom_of(plan)))
            yield LargestPair(name, formula, next(larger, by_trace))


def main(arguments: Sequence[str]) -> int:
    """Print a line a model and recipe: formula/traced on each GPU, * outside the goal, ! unsafe; then the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(models()), metavar="NAME")
    parser.add_argument("--precisions", nargs="*", default=("fp32", "amp-bf16", "amp-fp16", "bf16"), choices=PRECISIONS)
    parser.add_argument("--recomputes", nargs="*", default=["none", "full"], choices=RECOMPUTES)
    chosen = parser.parse_args(arguments)
    pairs: list[LargestPair] = []
    for name in chosen.models:
        for precision in chosen.precisions:
            for recompute in chosen.recomputes:
                shape, recipe = find_model(name), replace(Recipe(precision), recompute=recompute)
                traced = trace_of(shape, recipe)
                if isinstance(traced, Unknown):
                    print(f"{name} {precision} {recompute}: no trace: {traced.reason}", flush=True)
                    continue
                found = list(compared(shape, recipe, traced))
                pairs += found
                print(f"{name} {precision} {recompute}: {'  '.join(map(str, found))}", flush=True)
    counted = [pair for pair in pairs if pair.formula or pair.traced]
    close, unsafe = sum(pair.is_close for pair in counted), sum(pair.is_unsafe for pair in counted)
    print(f"where one sample fits: {close} of {len(counted)} within {CLOSE:.0%} or one sample; ", end="")
    print(f"{unsafe} above by more than {UNSAFE:.0%}")
    close_idle()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
