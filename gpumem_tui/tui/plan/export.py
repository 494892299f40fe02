"""A plan to take along."""

from __future__ import annotations

import json

from gpumem_tui.memory import Unknown
from gpumem_tui.plan.export import command_line, plan_json
from gpumem_tui.plan.markdown import plan_markdown
from gpumem_tui.plan.plan import Plan
from gpumem_tui.search.prediction import Traced

FORMS = {
    "Markdown": ("to read, or to paste into an issue", ".md"),
    "a command line": ("opens this plan again", ".sh"),
    "JSON": ("what `gpumem-tui plan --json` prints", ".json"),
}
"""What each form is for, and how its file's name ends."""


def exported(form: str, plan: Plan, traced: Traced | Unknown) -> str:
    """The plan in one of the `FORMS`. Takes a while where the cheapest combination does.

    Raises:
        KeyError: no such form.
    """
    if form == "Markdown":
        return plan_markdown(plan, traced)
    if form == "JSON":
        return json.dumps(plan_json(plan, traced), indent=2) + "\n"
    if form == "a command line":
        command = command_line(plan)
        return f"# {command.reason}\n" if isinstance(command, Unknown) else f"{command}\n"
    raise KeyError(form)
