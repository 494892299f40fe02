"""A plan for a command without torch: traces built by hand in the place of runs."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from gpumem_tui.memory import Unknown
from gpumem_tui.plan.combination import Combination
from gpumem_tui.plan.command import CommandPlan, Runs, Watch
from gpumem_tui.plan.command_state import CommandPlanState
from gpumem_tui.run.control import Control, Unusable
from gpumem_tui.run.events import Failed, Output, Sample
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.predicting import Predicted, TraceProgress
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.plan.planned import CommandPlanned, of_command
from gpumem_tui.tui.plan.screen import PlanScreen
from tests.plan.commands import REFUSED, base_predicted, base_trace, change, changed, command_config
from tests.scenes.search import noon

__all__ = ["command_config"]


@dataclass
class ScriptedRuns:
    """Runs that end when told to: those named in `held` wait until the plan is cancelled."""

    config: SearchConfig
    batch_size: int = 8
    held: tuple[str, ...] = ()
    fails: str = ""
    wanted: tuple[str, ...] = ()
    changes: tuple[str, ...] = ("checkpointing", "sgd", "fused")
    made: list[str] = field(default_factory=list)

    def trace(self, control: Control | None, watch: Watch) -> tuple[Predicted, list[Combination], list[Combination]]:
        """The command as it is."""
        self.made.append("as it is")
        watch(Output("step 0: loss 0.000"))
        watch(Output("  2%|▏         | 1/50 [00:00<00:10,  4.63it/s]"))
        if self.fails:
            raise Unusable(Failed("workload", self.fails))
        changes = [Combination((change(key, self.config),), self.batch_size) for key in self.changes]
        refused = Combination((change("autocast", self.config),), self.batch_size, traced=Unknown(REFUSED))
        return base_predicted(self.config), changes, [refused]

    def run(self, one: Combination, plan: CommandPlan, control: Control | None, watch: Watch) -> Combination:
        """The command with a change made to it, or in passes, with changes made together."""
        if not plan.is_alone(one):
            self.made.append(one.words)
            return replace(one, traced=base_trace(self.config))
        (change,) = one.changes
        self.made.append(change.key)
        watch(Output("step 0: loss 0.000"))
        watch(Output("  2%|▏         | 1/50 [00:00<00:10,  4.63it/s]"))
        watch(TraceProgress(self.batch_size, Sample(1, "forward", 1024, 2048, {})))
        while change.key in self.held and control is not None:
            control.check()
            threading.Event().wait(0.01)
        if change.key == "fused":
            return replace(one, traced=Unknown("its run failed: train.py:12: RuntimeError: no such option"))
        sizes = {"checkpointing": {"activations": 300}, "sgd": {"optimizer": 1}}
        return changed(self.config, change.key, self.batch_size, **sizes.get(change.key, {}))


def command_app(runs: Runs, *, run_all: bool = True) -> GpuMemApp:
    """The program on the Plan screen of a command."""

    def screen() -> PlanScreen:
        return PlanScreen(
            of_command(runs, lambda gpu: f"gpumem-tui plan --gpu sim:{gpu.name}", run_all=run_all), clock=noon
        )

    return GpuMemApp({"plan": screen}, "plan")


def plan_screen(app: GpuMemApp) -> PlanScreen:
    """Its screen."""
    screen = app.main_screen("plan")
    assert isinstance(screen, PlanScreen)
    return screen


def state_of(app: GpuMemApp) -> CommandPlanState:
    """How far its runs have come."""
    planned = plan_screen(app).planned
    assert isinstance(planned, CommandPlanned)
    return planned.state
