"""The passes of an optimizer step while a command is traced: those that reach a target differ by batch size."""

from __future__ import annotations

from dataclasses import replace

from gpumem_tui.memory import Unknown
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.frameworks import dialect_of
from gpumem_tui.search.prediction import Prediction, Traced

TRACED_PASSES = 2
"""Passes with which all batch sizes are traced alike: in most programs a third holds what the second does."""


def stated(config: SearchConfig, passes: int) -> int:
    """Return the passes as the command's line states them: of all ranks, where its framework divides them."""
    command = config.workload.command
    assert command is not None, "a command has passes"
    return passes * config.workload.recipe.pass_micro_batches if dialect_of(command).shares_passes else passes


def with_even_passes(config: SearchConfig, traced: Traced | Unknown) -> SearchConfig | None:
    """Return what traces each batch size with as many passes, where its own left no trace of all; None elsewhere."""
    command = config.workload.command
    if command is None or not command.takes_accumulation or config.target_batch is None or config.passes:
        return None
    is_whole = isinstance(traced, Traced) and not traced.done.only_at
    return None if is_whole else replace(config, passes=stated(config, TRACED_PASSES))


def joined(own: Prediction, even: Prediction, batch_size: int | None, target_batch: int) -> Prediction:
    """Return the prediction of all batch sizes with even passes, and at the one asked for with its own.

    Args:
        own: with the passes that reach the target. even: with as many passes at each batch size.
        batch_size: asked for; None for none.
    """
    if isinstance(even.traced, Unknown):
        return own
    note = f"the largest batch is traced with {TRACED_PASSES} passes, as those that reach {target_batch:,} differ"
    done, trace = even.traced.done, even.traced.done.trace
    if batch_size is not None and isinstance(own.traced, Traced):
        done, trace = own.traced.done, replace(trace, apart=((batch_size, own.traced.done.trace.at(batch_size)),))
    told = replace(done, trace=trace, only_at=0, not_affine="", notes=(*done.notes, note))
    return replace(even, traced=replace(even.traced, done=told))
