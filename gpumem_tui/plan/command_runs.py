"""The runs behind a plan for a command: as it is, and with each change made to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gpumem_tui.memory import Unknown
from gpumem_tui.plan.injected import MORE_RANKS, Injected, injected
from gpumem_tui.search import runner
from gpumem_tui.search.events import PROPOSE
from gpumem_tui.search.prediction import Traced
from gpumem_tui.search.process import ChildDied
from gpumem_tui.search.runner import CommandOutput, Control, Predicted, SearchConfig, TraceStarted, Unusable

Watch = Callable[[CommandOutput | TraceStarted], None]


@dataclass(frozen=True)
class WhatIf:
    """A change and its trace, or why there is none."""

    change: Injected
    traced: Traced | Unknown


def trace_command(config: SearchConfig, batch_size: int, control: Control | None, watch: Watch) -> Predicted:
    """The command as it is, and which changes could be made to it.

    Raises:
        Unusable, ChildDied, Cancelled: as `runner.predict`.
    """
    return runner.predict(replace(config, change=PROPOSE), control, batch_size, watch=watch)


def proposed(config: SearchConfig, base: Traced, wanted: Sequence[str] = ()) -> tuple[list[Injected], list[WhatIf]]:
    """The changes that are worth a run, and those that cannot be made, with the reason.

    Args:
        base: the trace of the command as it is.
        wanted: keys; empty for all.
    """
    reasons = {**dict(base.changes), MORE_RANKS: "" if base.is_sharded else "each rank holds the same"}
    runs: list[Injected] = []
    others: list[WhatIf] = []
    for change in injected(config.device.gpu, config.workload.recipe.gpus):
        if wanted and change.key not in wanted:
            continue
        reason = reasons[change.key]
        if reason:
            others.append(WhatIf(change, Unknown(reason)))
        else:
            runs.append(change)
    return runs, others


def trace_change(
    config: SearchConfig, change: Injected, base: Traced, batch_size: int, control: Control | None, watch: Watch
) -> WhatIf:
    """Run the command with a change made to it; what goes wrong then is the answer.

    Args:
        base: the trace of the command as it is: where it answers for every batch size, so will this one.

    Raises:
        Cancelled: the user ended it.
    """
    if change.key == MORE_RANKS:
        recipe = config.workload.recipe
        more = replace(config.workload, recipe=replace(recipe, gpus=2 * recipe.gpus))
        changed = replace(config, workload=more)
    else:
        changed = replace(config, change=change.key)
    try:
        if base.only_at:
            found = runner.predict(changed, control, base.only_at, base.not_affine, watch).prediction.traced
        else:
            found = runner.predict(changed, control, watch=watch).prediction.traced
            if isinstance(found, Unknown):
                found = runner.predict(changed, control, batch_size, found.reason, watch).prediction.traced
    except Unusable as error:
        return WhatIf(change, Unknown(f"its run failed: {error}"))
    except ChildDied as error:
        return WhatIf(change, Unknown(f"its run ended early: {error}"))
    if isinstance(found, Traced) and (reason := dict(found.changes).get(change.key)):
        return WhatIf(change, Unknown(reason))
    return WhatIf(change, found)
