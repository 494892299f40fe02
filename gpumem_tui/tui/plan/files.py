"""What the Plan screen asks in dialogues: a plan to save, open, compare with or export, and what a plan is for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

from textual.app import App

from gpumem_tui.catalog.loader import gpus
from gpumem_tui.formula.checks import why_formula_only
from gpumem_tui.memory import Unknown
from gpumem_tui.plan.answers import TracedAnswer
from gpumem_tui.plan.control import Option
from gpumem_tui.plan.export import command_line, plan_csv, plan_json
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.recommended import Known, untraced
from gpumem_tui.plan.report import plan_markdown
from gpumem_tui.plan.store import PlanStore, SavedPlan, StoreError
from gpumem_tui.plan.tracing import BackgroundTracer, TraceFailed, TraceReady, TraceState
from gpumem_tui.search.prediction import Traced
from gpumem_tui.tui.kit.background import in_daemon_thread
from gpumem_tui.tui.kit.dialogs import NameScreen, PickScreen, TextScreen
from gpumem_tui.tui.kit.figures import Row
from gpumem_tui.tui.kit.main_screen import Act, permitted, refused

FORMS = {
    "Markdown": ("to read, or to paste into an issue", ".md"),
    "a command line": ("opens this plan again", ".sh"),
    "JSON": ("what `gpumem-tui plan --json` prints", ".json"),
    "CSV": ("every curve's points and every GPU, for a spreadsheet", ".csv"),
    "SVG": ("a picture of this screen", ".svg"),
}
"""What each form is for, and how its file's name ends."""


def exported(form: str, plan: Plan, traced: Traced | Unknown, known: Known = untraced, picture: str = "") -> str:
    """Return the plan in one of the `FORMS`. Takes a while where the cheapest combination does.

    Args:
        known: what traces say of plans that may be recommended.
        picture: of the screen, as SVG.

    Raises:
        KeyError: no such form.
    """
    if form == "Markdown":
        return plan_markdown(plan, traced, known)
    if form == "JSON":
        return json.dumps(plan_json(plan, traced, known=known), indent=2) + "\n"
    if form == "CSV":
        return plan_csv(plan, traced, known)
    if form == "SVG":
        return picture
    if form == "a command line":
        command = command_line(plan)
        return f"# {command.reason}\n" if isinstance(command, Unknown) else f"{command}\n"
    raise KeyError(form)


AS_OPENED = "as opened"
"""What the plan that the screen began with is called."""


class PlanFiles:
    """The name of the plan on the screen, the plan that it is compared with, and the dialogues about both.

    Args:
        store: where plans are saved.
        first: the plan that the screen began with.
    """

    def __init__(self, store: PlanStore, first: Plan) -> None:
        self._store = store
        self._first = self._saved = first
        self._name = ""
        self.other: tuple[str, Plan] = (AS_OPENED, first)

    def title(self, plan: Plan) -> str:
        """Return the name of the saved plan, with a star where `plan` is not it any more; "" for none."""
        return self._name + (" *" if self._name and self._saved != plan else "")

    async def save(self, app: App[int], plan: Plan) -> None:
        """Ask for a name and save under it; over another plan only when asked for twice."""
        if refused(app, Act.WRITE):
            return
        warned = ""

        def save(wanted: str) -> str:
            nonlocal warned
            if wanted not in (self._name, warned) and self._store.has(wanted):
                warned = wanted
                return f"there is a plan {wanted} already: enter again replaces it"
            try:
                self._store.save(wanted, plan)
            except StoreError as error:
                return str(error)
            return ""

        name = await app.push_screen_wait(NameScreen("Save this plan as", self._name, save))
        if name is not None:
            self._name, self._saved = name, plan

    async def open(self, app: App[int]) -> Plan | None:
        """Ask for a saved plan; None if the user left."""
        found = await self._pick(app, "Open a plan", self._name)
        if found is None:
            return None
        self._name, self._saved = found.name, found.plan
        return found.plan

    async def choose_other(self, app: App[int]) -> None:
        """Ask for another plan to compare with."""
        found = await self._pick(app, "Compare with", self.other[0], (SavedPlan(AS_OPENED, self._first),))
        if found is not None:
            self.other = (found.name, found.plan)

    async def export(self, app: App[int], plan: Plan, trace: TraceState, tracer: BackgroundTracer) -> None:
        """Show the plan in the form that the user picks, to read, to copy or to write to a file."""
        picture = app.export_screenshot(title=plan.shape.name)
        options = [Option(form, note) for form, (note, _) in FORMS.items()]
        form = await app.push_screen_wait(PickScreen("Export as", options))
        if form is None:
            return
        text = await in_daemon_thread(partial(exported, form, plan, _traced(trace), partial(_known, tracer), picture))
        lines: list[Row] = [[(line, "")] for line in text.splitlines()]
        file_name = f"{self._name or plan.shape.name}{FORMS[form][1]}"
        await app.push_screen_wait(TextScreen(f"The plan as {form}", lines, text, file_name))

    async def _pick(self, app: App[int], title: str, current: str, also: Sequence[SavedPlan] = ()) -> SavedPlan | None:
        """Let the user pick a saved plan, or one of `also`; files that hold none are named below the list."""
        plans, complaints = await in_daemon_thread(self._store.saved)
        by_name = {found.name: found for found in (*also, *plans)}
        if not by_name and not complaints:
            app.notify("no plan has been saved yet: w saves this one")
            return None
        options = [Option(found.name, _summary(found.plan)) for found in by_name.values()]
        deletable = {found.name for found in plans}
        delete = self._delete if permitted(app, Act.WRITE) else None
        name = await app.push_screen_wait(PickScreen(title, options, current, complaints, delete, deletable))
        return None if name is None else by_name[name]

    def _delete(self, name: str) -> str:
        try:
            self._store.delete(name)
        except StoreError as error:
            return str(error)
        if name == self._name:
            self._name = ""
        return ""


def why_no_search(plan: Plan) -> str:
    """Return why a search cannot have a plan's settings; "" if it can."""
    if reason := why_formula_only(plan.shape, plan.recipe):
        return reason
    if plan.recipe.sharding != "none" and plan.gpu.name not in gpus():
        return "a search on a GPU of this machine runs the step of one GPU: set sharding to none"
    if plan.extras:
        return "a search cannot run what only the formula knows: set loss to whole and offload to none"
    return ""


def _traced(trace: TraceState) -> Traced | Unknown:
    match trace:
        case TraceReady():
            return trace.traced
        case TraceFailed(_, reason):
            return Unknown(reason)
        case _:
            return Unknown("the step was still being traced")


def _known(tracer: BackgroundTracer, plan: Plan) -> TracedAnswer | Unknown:
    found = tracer.known(plan)
    return Unknown("not traced so far") if found is None else found


def _summary(plan: Plan) -> str:
    recipe = plan.recipe
    return f"{plan.shape.name}, {recipe.precision}, batch {plan.batch_size:,}, {recipe.gpus:,} × {plan.gpu.title}"
