"""Decisions that follow from the batch a card can take: how many accumulation steps reach the wanted one."""

from __future__ import annotations

from dataclasses import dataclass

from gpumem_tui.catalog.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Accumulation:
    """How micro-batches add up to one optimizer step.

    Attributes:
        steps: forward and backward passes before the optimizer steps.
        global_batch_size: samples the optimizer really sees: batch size · micro-batches of a pass · steps.
        target_batch: samples it was asked to see; fewer, where they do not divide.
    """

    steps: int
    global_batch_size: int
    target_batch: int

    @property
    def exact(self) -> bool:
        """Return whether the target is met without rounding up."""
        return self.global_batch_size == self.target_batch


def accumulation(target_batch: int, batch_size: int, micro_batches: int = 1) -> Accumulation:
    """Work out how many passes make a step: target / (b·m), rounded up.

    Args:
        target_batch: samples wanted per optimizer step, over all GPUs.
        batch_size: samples of one micro-batch on one GPU.
        micro_batches: of one pass over all GPUs (`Recipe.pass_micro_batches`).

    Raises:
        ValueError: a number below 1.
    """
    given = {"target batch": target_batch, "batch size": batch_size, "micro-batches of a pass": micro_batches}
    for name, value in given.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    per_pass = batch_size * micro_batches
    steps = -(-target_batch // per_pass)
    return Accumulation(steps, per_pass * steps, target_batch)


def tokens_per_global_batch(shape: ModelShape, steps: Accumulation) -> int:
    """Return tokens of one optimizer step: global batch · sequence length. 0 for a network without a sequence."""
    return steps.global_batch_size * shape.seq_len
