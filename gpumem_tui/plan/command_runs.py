"""The runs behind a plan for a command: as it is, and with each change made to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gpumem_tui.memory import Unknown
from gpumem_tui.plan.injected import MORE_RANKS, CommandChange, injected
from gpumem_tui.search import predicting
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.control import Control, Unusable
from gpumem_tui.search.predicting import CommandOutput, Predicted, TraceStarted
from gpumem_tui.search.prediction import Traced
from gpumem_tui.search.process import ChildDied
from gpumem_tui.trial.events import PROPOSE

Watch = Callable[[CommandOutput | TraceStarted], None]


@dataclass(frozen=True)
class WhatIf:
    """A change and its trace, or why there is none."""

    change: CommandChange
    traced: Traced | Unknown


@dataclass(frozen=True)
class CommandRuns:
    """The runs of one plan.

    Attributes:
        wanted: the changes to try, by key; empty for all that can be made.
    """

    config: SearchConfig
    batch_size: int
    wanted: tuple[str, ...] = ()

    def trace(self, control: Control | None, watch: Watch) -> tuple[Predicted, list[CommandChange], list[WhatIf]]:
        """The command as it is, the changes that are worth a run, and those that cannot be made.

        Raises:
            Unusable, ChildDied, Cancelled: as `predicting.predict`.
        """
        predicted = predicting.predict(replace(self.config, change=PROPOSE), control, self.batch_size, watch=watch)
        base = predicted.prediction.traced
        assert isinstance(base, Traced), "a command at a given batch size is traced or fails"
        reasons = {**dict(base.changes), MORE_RANKS: "" if base.is_sharded else "each rank holds the same"}
        changes = injected(self.config.device.gpu, self.config.workload.recipe.gpus)
        asked = [change for change in changes if not self.wanted or change.key in self.wanted]
        runs = [change for change in asked if not reasons[change.key]]
        refused = [WhatIf(change, Unknown(reasons[change.key])) for change in asked if reasons[change.key]]
        return predicted, runs, refused

    def trace_change(self, change: CommandChange, base: Traced, control: Control | None, watch: Watch) -> WhatIf:
        """The command with a change made to it; what goes wrong then is the answer.

        Args:
            base: the trace of the command as it is: where it answers for every batch size, so will this one.

        Raises:
            Cancelled: the user ended it.
        """
        changed = self._changed(change)
        try:
            if base.only_at:
                found = predicting.predict(changed, control, base.only_at, base.not_affine, watch).prediction.traced
            else:
                found = predicting.predict(changed, control, watch=watch).prediction.traced
                if isinstance(found, Unknown):
                    found = predicting.predict(changed, control, self.batch_size, found.reason, watch).prediction.traced
        except Unusable as error:
            return WhatIf(change, Unknown(f"its run failed: {error}"))
        except ChildDied as error:
            return WhatIf(change, Unknown(f"its run ended early: {error}"))
        if isinstance(found, Traced) and (reason := dict(found.changes).get(change.key)):
            return WhatIf(change, Unknown(reason))
        return WhatIf(change, found)

    def _changed(self, change: CommandChange) -> SearchConfig:
        if change.key != MORE_RANKS:
            return replace(self.config, change=change.key)
        workload = self.config.workload
        more = replace(workload.recipe, gpus=2 * workload.recipe.gpus)
        return replace(self.config, workload=replace(workload, recipe=more))
