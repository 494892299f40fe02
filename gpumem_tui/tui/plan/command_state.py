"""The state of the Plan screen for a command: one immutable value, and the functions that make the next one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.exit_codes import EXIT_INTERRUPTED
from gpumem_tui.plan.command import CommandPlan
from gpumem_tui.plan.command_runs import WhatIf
from gpumem_tui.plan.injected import CommandChange
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.predicting import Predicted


@dataclass(frozen=True)
class CommandPlanState:
    """Everything the screen shows.

    Attributes:
        gpu: what is planned for; the traces are of `config`'s.
        plan: None until the command as it is has been traced.
        running: the change that is being traced. `waiting`: those that can be.
        busy: a run is under way.
        said: the last line that the running command printed.
        failure: why the command cannot be traced; one line. `exit_code`: what that stands for.
    """

    config: SearchConfig
    batch_size: int
    gpu: Gpu
    plan: CommandPlan | None = None
    running: CommandChange | None = None
    waiting: tuple[CommandChange, ...] = ()
    busy: bool = False
    said: str = ""
    failure: str = ""
    exit_code: int = 0

    @property
    def leaving_code(self) -> int:
        """What the program would exit with if it ended now."""
        return EXIT_INTERRUPTED if self.busy and self.plan is None else self.exit_code


def begun(state: CommandPlanState) -> CommandPlanState:
    """A run is under way."""
    return replace(state, busy=True, failure="", exit_code=0, said="")


def traced(
    state: CommandPlanState, predicted: Predicted, waiting: tuple[CommandChange, ...], refused: tuple[WhatIf, ...]
) -> CommandPlanState:
    """The command as it is has been traced. `refused`: the changes that cannot be made to it."""
    plan = CommandPlan(state.config, state.batch_size, predicted, refused)
    return replace(state, plan=plan, waiting=waiting, said="")


def trying(state: CommandPlanState, change: CommandChange) -> CommandPlanState:
    """A change is being traced."""
    waiting = tuple(other for other in state.waiting if other != change)
    return replace(state, running=change, waiting=waiting, said="")


def tried(state: CommandPlanState, found: WhatIf) -> CommandPlanState:
    """A change has been."""
    assert state.plan is not None, "the command itself is traced first"
    plan = replace(state.plan, what_ifs=(found, *state.plan.what_ifs))
    return replace(state, plan=plan, running=None, said="")


def saying(state: CommandPlanState, text: str) -> CommandPlanState:
    """The running command has printed a line."""
    return replace(state, said=text)


def planned_for(state: CommandPlanState, gpu: Gpu) -> CommandPlanState:
    """The user plans for another GPU."""
    return replace(state, gpu=gpu)


def ended(state: CommandPlanState, failure: str = "", exit_code: int = 0) -> CommandPlanState:
    """Nothing runs any more."""
    waiting = state.waiting if state.running is None else (state.running, *state.waiting)
    return replace(state, busy=False, running=None, waiting=waiting, said="", failure=failure, exit_code=exit_code)
