"""Plans that leave the screen: saved, picked again, exported, searched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from textual.app import App

from gpumem_tui.memory import Unknown
from gpumem_tui.plan.controls import Option
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.store import PlanStore, SavedPlan, StoreError
from gpumem_tui.search.prediction import Traced
from gpumem_tui.tui.background import in_daemon_thread
from gpumem_tui.tui.figures import Span
from gpumem_tui.tui.screens.plan_dialogs import NameScreen, PickScreen, TextScreen
from gpumem_tui.tui.views.plan_export import FORMS, exported


async def save_plan(app: App[int], store: PlanStore, plan: Plan, name: str) -> str | None:
    """Ask for a name and save under it; the name, or None if the user left."""

    def save(wanted: str) -> str:
        try:
            store.save(wanted, plan)
        except StoreError as error:
            return str(error)
        return ""

    return await app.push_screen_wait(NameScreen("Save this plan as", name, save))


async def pick_plan(
    app: App[int], store: PlanStore, title: str, current: str, also: Sequence[SavedPlan] = ()
) -> SavedPlan | None:
    """Let the user pick a saved plan, or one of `also`; files that hold none are named below the list."""
    plans, complaints = await in_daemon_thread(store.saved)
    by_name = {found.name: found for found in (*also, *plans)}
    if not by_name and not complaints:
        app.notify("no plan has been saved yet: w saves this one")
        return None
    options = [Option(found.name, _summary(found.plan)) for found in by_name.values()]
    name = await app.push_screen_wait(PickScreen(title, options, current, complaints))
    return None if name is None else by_name[name]


async def export_plan(app: App[int], plan: Plan, traced: Traced | Unknown, name: str) -> None:
    """Show the plan in the form that the user picks, to read, to copy or to write to a file."""
    options = [Option(form, note) for form, (note, _) in FORMS.items()]
    form = await app.push_screen_wait(PickScreen("Export as", options))
    if form is None:
        return
    text = await in_daemon_thread(partial(exported, form, plan, traced))
    lines: list[list[Span]] = [[(line, "")] for line in text.splitlines()]
    await app.push_screen_wait(TextScreen(f"The plan as {form}", lines, text, f"{name}{FORMS[form][1]}"))


def why_no_search(plan: Plan) -> str:
    """Why a search cannot have a plan's settings; "" if it can."""
    if plan.recipe.sharding != "none":
        return "a search runs the step of one GPU: set sharding to none"
    if plan.extras:
        return "a search cannot run what only the formula knows: set loss to whole and offload to none"
    return ""


def _summary(plan: Plan) -> str:
    recipe = plan.recipe
    return f"{plan.shape.name}, {recipe.precision}, batch {plan.batch_size:,}, {recipe.gpus:,} × {plan.gpu.title}"
