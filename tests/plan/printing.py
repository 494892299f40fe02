"""The output of ``plan --json``, read back."""

from __future__ import annotations

import json
from typing import Any

from gpumem_tui.memory import Unknown
from gpumem_tui.plan.command import CommandPlan
from gpumem_tui.plan.limits import Limit
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.printed import CommandPlanObject, PlanObject, SolveObject
from gpumem_tui.plan.recommended import Known, untraced
from gpumem_tui.report.objects import encoded
from gpumem_tui.search.prediction import Traced


def plan_json(plan: Plan, traced: Traced | Unknown, trace_of: Known = untraced) -> Any:
    """The plan of a model."""
    return json.loads(encoded(PlanObject.of(plan, traced, trace_of=trace_of)))


def command_plan_json(plan: CommandPlan) -> Any:
    """The plan of a command."""
    return json.loads(encoded(CommandPlanObject.of(plan)))


def limit_json(plan: Plan, found: Limit) -> Any:
    """A number that a plan was solved for."""
    return json.loads(encoded(SolveObject.of(plan, found)))
