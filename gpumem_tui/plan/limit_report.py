"""What a plan was solved for: in words, as Markdown and as JSON."""

from __future__ import annotations

from typing import Any

from gpumem_tui.memory import Unknown
from gpumem_tui.plan.export import command_line
from gpumem_tui.plan.limits import Limit
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.quantities import Quantity
from gpumem_tui.search import report
from gpumem_tui.workload.spec import WorkloadSpec

NAMES: dict[Quantity, str] = {
    "batch-size": "largest micro-batch",
    "seq-len": "longest sequence",
    "gpus": "fewest GPUs",
    "accumulation": "fewest passes of a step",
}
_UNITS: dict[Quantity, tuple[str, str]] = {
    "batch-size": ("sample", "samples"),
    "seq-len": ("token", "tokens"),
    "gpus": ("GPU", "GPUs"),
    "accumulation": ("pass", "passes"),
}


def capitalized(quantity: Quantity) -> str:
    """What is solved for, as a line begins with it."""
    name = NAMES[quantity]
    return name[:1].upper() + name[1:]


def value_words(found: Limit) -> str:
    """The answer and how it is known.

    >>> value_words(Limit("seq-len", 8192, 8064, "verified", None, 8320))
    '8,192 tokens, verified: it was traced and fits, 8,320 was traced and does not'
    >>> value_words(Limit("gpus", 8, 8, "formula", None))
    '≈8 GPUs, by formula: an estimate'
    """
    if found.value is None:
        return "none"
    one, many = _UNITS[found.quantity]
    words = f"{found.value:,} {one if found.value == 1 else many}"
    if found.how == "formula":
        return f"≈{words}, by formula: an estimate"
    if found.how == "traced":
        return f"{words}, by trace"
    beyond = "" if found.beyond is None else f", {found.beyond:,} was traced and does not"
    return f"{words}, verified: it was traced and fits{beyond}"


def limit_lines(plan: Plan, found: Limit) -> list[str]:
    """The answer, what it is of, and how to open it, a line each."""
    lines = [f"{NAMES[found.quantity]}: {value_words(found)}"]
    if found.note:
        lines.append(f"  {found.note}")
    if found.how != "formula":
        lines.append(f"  formula: {'none' if found.formula is None else f'≈{found.formula:,}'}")
    lines.append(f"  {report.workload_line(WorkloadSpec(plan.recipe, shape=plan.shape))}")
    lines.append(f"  {given_words(found.quantity, plan)}")
    if found.plan is not None and isinstance(command := command_line(found.plan), str):
        lines.append(f"  {command}")
    return lines


def given_words(quantity: Quantity, plan: Plan) -> str:
    """The numbers that were given, and the GPU.

    Every one but what was solved for: of the GPUs their kind alone.
    """
    gpus = "" if quantity == "gpus" or plan.recipe.gpus == 1 else f"{plan.recipe.gpus:,} × "
    given = [f"{gpus}{plan.gpu.title}, {100 * plan.headroom:g} % of it left free"]
    if quantity not in ("batch-size", "accumulation"):
        given.insert(0, f"micro-batch {plan.batch_size:,}")
    if plan.target_batch is not None:
        given.append(f"target batch {plan.target_batch:,}")
    return ", ".join(given)


def limit_markdown(plan: Plan, found: Limit) -> str:
    """The answer under a heading."""
    heading = f"# {capitalized(found.quantity)}: {plan.shape.name} on {plan.gpu.title}"
    first, *others = limit_lines(plan, found)
    said = "\n".join(f"- {line.strip()}" for line in others if not line.strip().startswith("gpumem-tui "))
    parts = [heading, f"**{first.partition(': ')[2]}**", said]
    if found.plan is not None and isinstance(command := command_line(found.plan), str):
        parts.append(f"```sh\n{command}\n```")
    return "\n\n".join(parts) + "\n"


def limit_json(plan: Plan, found: Limit) -> dict[str, Any]:
    """The answer as an object of schema 1."""
    command = Unknown("no value") if found.plan is None else command_line(found.plan)
    return {
        "schema": 1,
        "solve": found.quantity,
        "value": found.value,
        "how": found.how if found.value is not None else None,
        "beyond": found.beyond,
        "formula": found.formula,
        "note": found.note or None,
        "model": plan.shape.name,
        "gpu": plan.gpu.name,
        "headroom": plan.headroom,
        "command": command if isinstance(command, str) else None,
    }
