"""What the Plan screen asks in dialogues: a plan to save, open, compare with or export, and what a plan is for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Label, Static

from gpumem_tui.catalog.loader import gpus
from gpumem_tui.errors import OptionError
from gpumem_tui.formula.checks import why_formula_only
from gpumem_tui.memory import Unknown
from gpumem_tui.options.typed import tokens_from
from gpumem_tui.plan.answers import TracedAnswer
from gpumem_tui.plan.control import Option
from gpumem_tui.plan.export import command_line, plan_csv, plan_json
from gpumem_tui.plan.goals import USUAL_MULTIPLE, USUAL_NODE, Goals
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


_Read = Callable[[str], Any]


_FIELDS: Mapping[str, tuple[str, str, _Read, str]] = {
    "tokens": ("--tokens", "Tokens", tokens_from, "to train on, such as 2B; says hours and cost"),
    "price": ("--price", "Price", float, "of one GPU for an hour, in US dollars"),
    "batch_multiple": ("--batch-multiple", "Multiple", int, f"of micro-batches; {USUAL_MULTIPLE}"),
    "node_gpus": ("--node-gpus", "Machine", int, f"GPUs of one, when their number is solved for; {USUAL_NODE}"),
}  # fmt: skip
"""By field of `Goals`: its option, its label, how it is read, and what it means."""


class GoalsScreen(ModalScreen[Goals | None]):
    """A form that gives back the goals that were typed; None for none."""

    CSS_PATH = "goals_form.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "cancel"),
        Binding("up", "app.focus_previous", show=False),
        Binding("down", "app.focus_next", show=False),
    ]

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._goals = plan.goals
        self._has_tokens = bool(plan.shape.seq_len)

    def compose(self) -> ComposeResult:
        """Yield a row a field."""
        with Vertical(id="goals") as box:
            box.border_title = "Goals"
            box.border_subtitle = "↑↓ · enter applies · esc leaves"
            for name, (_, label, _, means) in _FIELDS.items():
                with Horizontal():
                    yield Label(label)
                    yield Input(goal_text(self._goals, name), placeholder=means, compact=True, id=name)
            yield Static(id="wrong")

    @on(Input.Submitted)
    def _submitted(self) -> None:
        """Give back what was typed, or say what is wrong with it."""
        typed = {name: self.query_one(f"#{name}", Input).value.strip() for name in _FIELDS}
        try:
            goals = replace(goals_from_text(typed), prices=self._goals.prices)
            goals.check(has_tokens=self._has_tokens)
        except OptionError as error:
            self.query_one("#wrong", Static).update(Content(str(error)))
        else:
            self.dismiss(goals)


def goal_text(goals: Goals, name: str) -> str:
    """Return a goal as it is typed; nothing where there is none."""
    value = getattr(goals, name)
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def goals_from_text(typed: dict[str, str]) -> Goals:
    """Return the goals behind what was typed.

    Raises:
        OptionError: something is not what its field holds; names the option of the command line.
    """
    values: dict[str, Any] = {}
    for name, (option, _, read, _) in _FIELDS.items():
        try:
            if text := typed[name]:
                values[name] = read(text)
        except ValueError as error:
            words = f"{text!r} is not a number" if read in (int, float) else str(error)
            raise OptionError(f"{option}: {words}") from error
    return Goals(**values)
