"""A plan for a command without torch: traces built by hand in the place of runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import MIB, Bucket, Unknown
from gpumem_tui.options.workload import simulated_device
from gpumem_tui.plan.command_runs import Watch, WhatIf
from gpumem_tui.plan.injected import CommandChange, injected
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.control import Control, Unusable
from gpumem_tui.search.predicting import CommandOutput, Predicted
from gpumem_tui.search.prediction import Formula, Prediction, Traced
from gpumem_tui.simulator.replay import AffineTrace
from gpumem_tui.simulator.timeline import Timeline
from gpumem_tui.trial.events import Failed, Ready
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.plan.command_screen import CommandPlanScreen, Runs
from gpumem_tui.workload.command import Command
from gpumem_tui.workload.spec import WorkloadSpec
from tests.search.traces import CONTEXT_BYTES, PROFILE, traced, training
from tests.tui.scene import noon

READY = Ready("2.13.0", PROFILE, CONTEXT_BYTES, "measured on an A100")
REFUSED = "the command uses autocast already"


def command_config(*words: str, gpu: str = "a100-80gb", ranks: int = 1) -> SearchConfig:
    """A command planned for a simulated GPU."""
    command = Command(words or ("python", "train.py", "--batch-size", "{batch}"), "/home/ada/training")
    workload = WorkloadSpec(Recipe(gpus=ranks), command=command)
    return SearchConfig(workload, simulated_device(gpu), python="python")


def timeline(batch_size: int, *, activations: int = 1200, optimizer: int = 950) -> Timeline:
    """A network with MiB of activations a sample, and of optimizer state."""
    sizes = {
        Bucket.PARAMETERS: 475 * MIB,
        Bucket.ACTIVATIONS: activations * MIB * batch_size,
        Bucket.TEMPORARY: 392 * MIB * batch_size,
        Bucket.GRADIENTS: 475 * MIB,
        Bucket.OPTIMIZER: optimizer * MIB,
    }
    return training(sizes, layers=12)


def affine(**sizes: int) -> AffineTrace:
    """The same at every batch size."""
    return AffineTrace.fit((2, timeline(2, **sizes)), (3, timeline(3, **sizes)))


def base_trace(config: SearchConfig) -> Traced:
    """The command as it is."""
    return traced(affine(), config.device.gpu)


def base_predicted(config: SearchConfig) -> Predicted:
    """What its run says."""
    formula = Formula(config.workload, config.device.gpu.total_bytes, config.headroom)
    return Predicted(Prediction(formula, base_trace(config)), READY)


def change(key: str, config: SearchConfig) -> CommandChange:
    """A change by name."""
    return next(one for one in injected(config.device.gpu, 1) if one.key == key)


def changed(config: SearchConfig, key: str, **sizes: int) -> WhatIf:
    """A change whose run found these sizes."""
    return WhatIf(change(key, config), traced(affine(**sizes), config.device.gpu))


@dataclass
class ScriptedRuns:
    """Runs that end when told to: those named in `held` wait until the plan is cancelled."""

    config: SearchConfig
    batch_size: int = 8
    held: tuple[str, ...] = ()
    fails: str = ""
    made: list[str] = field(default_factory=list)

    def trace(self, control: Control | None, watch: Watch) -> tuple[Predicted, list[CommandChange], list[WhatIf]]:
        """The command as it is."""
        self.made.append("as it is")
        watch(CommandOutput("step 0: loss 0.000"))
        if self.fails:
            raise Unusable(Failed("workload", self.fails))
        changes = [change(key, self.config) for key in ("checkpointing", "sgd", "fused")]
        return base_predicted(self.config), changes, [WhatIf(change("autocast", self.config), Unknown(REFUSED))]

    def trace_change(self, change: CommandChange, base: Traced, control: Control | None, watch: Watch) -> WhatIf:
        """The command with a change made to it."""
        self.made.append(change.key)
        watch(CommandOutput("step 0: loss 0.000"))
        while change.key in self.held and control is not None:
            control.check()
            threading.Event().wait(0.01)
        if change.key == "fused":
            return WhatIf(change, Unknown("its run failed: train.py:12: RuntimeError: no such option"))
        sizes = {"checkpointing": {"activations": 300}, "sgd": {"optimizer": 1}}[change.key]
        return changed(self.config, change.key, **sizes)


def command_app(runs: Runs, *, run_all: bool = True) -> GpuMemApp:
    """The program on the Plan screen of a command."""
    make: Callable[[], CommandPlanScreen] = lambda: CommandPlanScreen(runs, run_all=run_all, clock=noon)  # noqa: E731
    return GpuMemApp({"plan": make}, "plan")


def plan_screen(app: GpuMemApp) -> CommandPlanScreen:
    """Its screen."""
    screen = app.main_screen("plan")
    assert isinstance(screen, CommandPlanScreen)
    return screen
