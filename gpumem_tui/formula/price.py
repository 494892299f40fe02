"""What a technique costs, in an order that compares any two sets of techniques."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpumem_tui.catalog.shapes import ModelShape

Axis = Literal[
    "weights", "precision", "recompute", "attention", "optimizer", "loss", "sample", "sharding", "state", "blocks"
]
"""What a change is about: of one axis only one change can be made."""

ONE_MORE_FORWARD = 100 / 3
"""Per cent of a step that full recompute adds: a backward takes two forwards, so one more makes three into four."""

COST_ORDER = (
    "no further GPUs, then the same samples (no shorter sequences), then no host memory, then no optimizer to tune "
    "anew, then the least risk to accuracy, then the least extra time, then the fewest changes"
)
"""How prices compare, for the reader."""


@dataclass(frozen=True, order=True, slots=True)
class Price:
    """The price of a set of techniques; the first field that differs decides which of two is cheaper.

    Attributes:
        gpus: further GPUs.
        times_halved: of the sequence or the image side: the network sees less.
        offloads: kinds of state moved to host memory, whose bus then bounds the step.
        retuned: optimizers of another kind, whose hyperparameters must be found anew.
        risk: to accuracy; 0: none published, 1: a published method with matching results, 2: what can hurt.
        slower_percent: extra time of a step as far as arithmetic tells.
        changes: techniques in the set.
    """

    gpus: int = 0
    times_halved: int = 0
    offloads: int = 0
    retuned: int = 0
    risk: int = 0
    slower_percent: float = 0.0
    changes: int = 0

    def __add__(self, other: Price) -> Price:
        return Price(
            self.gpus + other.gpus,
            self.times_halved + other.times_halved,
            self.offloads + other.offloads,
            self.retuned + other.retuned,
            self.risk + other.risk,
            self.slower_percent + other.slower_percent,
            self.changes + other.changes,
        )


def selective_recompute_percent(shape: ModelShape) -> float:
    """Extra arithmetic of recomputing the attention core: (S/6h) / (1 + S/6h + V/12hL), in per cent.

    Korthikanti et al. 2022, appendix A: 2.7 for GPT-3, 1.6 for the 530B model.
    """
    core = shape.tokens / (6 * shape.hidden)
    head = (shape.vocab or shape.classes) / (12 * shape.hidden * shape.layers)
    return 100 * core / (1 + core + head)
