"""The recorder of a training run, and the sample of memory that is taken as each phase begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from gpumem_tui.memory import Bucket
from gpumem_tui.step import Phase, RunStage


@dataclass(frozen=True)
class MemorySample:
    """The allocator's figures as `phase` of `step` begins, and the live buckets as far as known by then."""

    step: int
    phase: Phase
    allocated_bytes: int
    reserved_bytes: int
    buckets: dict[Bucket, int]

    @classmethod
    def of(
        cls, step: int, phase: Phase, allocated_bytes: int, reserved_bytes: int, known: Mapping[Bucket, int]
    ) -> MemorySample:
        """Make a sample of the buckets known by name. After forward, all other allocations are kept for backward."""
        buckets = dict(known)
        rest = allocated_bytes - sum(buckets.values())
        if rest > 0:
            buckets[Bucket.ACTIVATIONS if phase is Phase.BACKWARD else Bucket.TEMPORARY] = rest
        return cls(step, phase, allocated_bytes, reserved_bytes, buckets)


class Recorder(Protocol):
    """Records a run: its phases, the buckets of its tensors, the names of its modules."""

    def mark(self, step: int, phase: Phase, stage: RunStage | None = None) -> None:
        """State that the run is in `phase` of `step` from here on, and in that stage if the phase does not show it."""

    def tag(self, bucket: Bucket, tensors: Iterable[torch.Tensor], part: str = "") -> None:
        """State which bucket these tensors are, and which part of it."""

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor's allocation, as they were made; 0 of the program's data, None if unknown."""

    def name_modules(self, model: torch.nn.Module) -> None:
        """Call the modules of `model` by their qualified names from now on."""
