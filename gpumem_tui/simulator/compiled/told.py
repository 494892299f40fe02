"""The compiled parts of a program, and the lines that report them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.memory import format_bytes
from gpumem_tui.simulator.allocator.profile import followed_as, not_known_of

_ESTIMATE = (
    "torch.compile: traced as eager PyTorch, an estimate (compiled runs held 0.48 to 1.05 times their eager trace, 2.3 "
    "times and more where a checkpoint runs inside)"
)

_COMPILING = "torch.compile: what a GPU takes while it compiles (benchmarks, autotuning) is not traced"

_NOTHING = "torch.compile: nothing was compiled"


class Followed:
    """A program's compilations, and the lines that report them.

    Args:
        notes: gets the lines, each as a key, the latest figures only.
        begins: called with the number of a graph, from 1, before it is compiled.

    Attributes:
        is_estimate: something that was compiled was traced as eager.
        unsure_bytes: what padding takes that a GPU may do without.
    """

    def __init__(self, notes: dict[str, None], begins: Callable[[int], None] = lambda _number: None) -> None:
        self._notes, self._begins, self._begun = notes, begins, 0
        self.is_estimate = False
        self._graphs = self._breaks = 0
        self._eager: dict[str, str] = {}
        self._line = self._padded_line = ""
        self._padded: dict[tuple[int, int, int], int] = {}
        self.unsure_bytes = 0

    def begin_again(self) -> None:
        """Count a further run of the program by itself."""
        self._eager.clear()
        self._padded.clear()

    @property
    def compiles(self) -> bool:
        """Return whether anything was compiled, or would have been."""
        return self._graphs > 0 or self.is_estimate

    def lines(self) -> tuple[str, ...]:
        """Return the lines so far."""
        return tuple(self._notes)

    def unsure(self, asked: str, gpu: Gpu) -> dict[str, Any]:
        """Return what a trace on a GPU, as an asked torch, cannot be sure of; the compilers of two versions differ."""
        by_another = self.compiles and followed_as(asked, torch.__version__)
        is_estimate = self.is_estimate or bool(by_another or not_known_of(gpu))
        return {"is_estimate": is_estimate, "is_compiled": self._graphs > 0, "unsure_bytes": self.unsure_bytes}

    def counted(self, counters: Any) -> None:
        """Take over what Dynamo has counted (`torch._dynamo.utils.counters`)."""
        self._graphs = counters["stats"]["unique_graphs"]
        self._breaks = sum(counters["graph_break"].values())
        if self._graphs or self._eager or self._line:
            self._say()

    def asked(self) -> None:
        """Say that the program compiles for nothing, until something that it gave is called."""
        if not self._line and not self.is_estimate:
            self._line = f"{_NOTHING}: what the program gave it was not called"
            self._notes[self._line] = None

    def graph_begins(self) -> None:
        """Say that a graph is about to be compiled."""
        self._begun += 1
        self._notes.setdefault(_COMPILING)
        self._begins(self._begun)

    def ran_eager(self, place: str, reason: str) -> None:
        """Count a frame that Dynamo gave up, once however often it is met."""
        self._eager[place] = reason

    def estimated(self, reason: str) -> None:
        """Say that compiled code is traced as eager, and why."""
        self.is_estimate = True
        if not self._graphs:
            self._notes.pop(self._line, None)
            self._line = ""
        self._notes.setdefault(f"{_ESTIMATE}: {reason}")

    def left_out(self, what: str) -> None:
        """Say what is not followed of what was asked of the compiler."""
        self.is_estimate = True
        self._notes.setdefault(f"torch.compile: {what}: an estimate")

    def checkpoints(self, times: int) -> None:
        """Say that the compiler places what a checkpoint computes again."""
        self._notes.setdefault(
            f"torch.compile: {_counted(times, 'checkpoint')} within a graph: the compiler decides when to compute each "
            "again, and may hold several at once, as traced here (2.3 to 3.5 times eager in pytorch issue 193193)"
        )

    def padded(self, sizes: tuple[int, int, int], more_bytes: int) -> None:
        """Say which products are padded where a GPU's benchmark would decide."""
        self._padded[sizes] = more_bytes
        self.unsure_bytes = max(self._padded.values())  # of one product at a time
        largest = "×".join(f"{size:,}" for size in max(self._padded, key=self._padded.__getitem__))
        self._notes.pop(self._padded_line, None)
        self._padded_line = (
            f"torch.compile: {_counted(len(self._padded), 'product')} of odd sizes (the largest {largest}) padded, as "
            f"a GPU's benchmark may find faster; without, up to {format_bytes(self.unsure_bytes)} less"
        )
        self._notes[self._padded_line] = None

    def _say(self) -> None:
        parts = [f"torch.compile: {_counted(self._graphs, 'graph')} compiled, traced by the compiler's own buffers"]
        if not self._graphs:
            parts = [_NOTHING]
        if self._breaks:
            parts.append(_counted(self._breaks, "graph break"))
        reasons = "; ".join(f"{place}: {reason}" for place, reason in list(self._eager.items())[:2])
        none = "no frame ran eager" if self._graphs else "of what was called there is nothing that Dynamo compiles"
        parts.append(f"{_counted(len(self._eager), 'frame')} ran eager ({reasons})" if self._eager else none)
        self._notes.pop(self._line, None)
        self._line = "; ".join(parts)
        self._notes[self._line] = None


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"
