"""`schema`: the JSON Schema of what a command prints with ``--json``, made of the types that are printed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import click

if TYPE_CHECKING:
    from gpumem_tui.report.objects import JsonObject

COMMANDS = ("predict", "plan", "search", "fit", "look", "report", "free", "doctor", "models", "gpus")


def printed() -> dict[str, tuple[type[JsonObject], ...]]:
    """Return by command what it prints with ``--json``, one of these a line; loads most of the program."""
    from gpumem_tui.cli.free import FreeObject
    from gpumem_tui.cli.printed import CalibrationsObject, ChecksObject, GpusObject, ModelsObject
    from gpumem_tui.plan.printed import CommandPlanObject, FitObject, PlanObject, SolveObject
    from gpumem_tui.recording.jobs import JobObject
    from gpumem_tui.search.printed import PredictObject, ResultLine, TrialLine
    from gpumem_tui.search.serving import ServeObject
    from gpumem_tui.snapshots.printed import ComparisonObject, SnapshotObject
    from gpumem_tui.watch.printed import LookLine

    return {
        "predict": (PredictObject, ServeObject),
        "plan": (PlanObject, CommandPlanObject, SolveObject),
        "search": (TrialLine, ResultLine),
        "fit": (FitObject,),
        "look": (SnapshotObject, ComparisonObject, LookLine),
        "report": (JobObject,),
        "free": (FreeObject,),
        "doctor": (ChecksObject, CalibrationsObject),
        "models": (ModelsObject,),
        "gpus": (GpusObject,),
    }


@click.command
@click.argument("of", type=click.Choice(COMMANDS))
def schema(of: str) -> int:
    """Print the JSON Schema of what a command prints with --json."""
    print(json.dumps(schema_of(of), indent=2))
    return 0


def schema_of(command: str) -> dict[str, Any]:
    """Return the JSON Schema of what a command prints with ``--json``; keys that it lacks are allowed."""
    import msgspec

    schemas, parts = msgspec.json.schema_components(printed()[command], ref_template="#/$defs/{name}")
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"gpumem-tui {command} --json",
        "anyOf": list(schemas),
        "$defs": dict(parts),
    }
    return cast("dict[str, Any]", _public(whole))


def _public(part: object) -> object:
    """Return a part of a schema without our marks of what is private."""
    if isinstance(part, dict):
        return {key.removeprefix("_"): _public(value) for key, value in part.items()}
    if isinstance(part, str):
        return part.replace("$defs/_", "$defs/").removeprefix("_")
    return [_public(one) for one in part] if isinstance(part, list) else part
