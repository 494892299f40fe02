"""The command line that trains a workload: the user's own, or that of `train`. On the viewer's side."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.workload.command import BATCH, Command
from gpumem_tui.workload.spec import WorkloadSpec

_PROGRAM = Path(__file__).with_name("train.py")


def line_of(workload: WorkloadSpec, python: str) -> Command:
    """Return the command that trains a workload.

    Args:
        python: the interpreter; a user's own command has one already.
    """
    if workload.command is not None:
        return workload.command
    if workload.file is not None:
        return program(python, {"workload": workload.file}, workload.recipe)
    assert workload.shape is not None
    shape = json.dumps(_told(workload.shape), separators=(",", ":"))
    return program(python, {"model": workload.shape.name, "shape": shape}, workload.recipe)


def program(python: str, subject: dict[str, object], recipe: Recipe) -> Command:
    """Return the command that trains something by a recipe.

    Args:
        subject: what is trained, by option; a value of 0 is left out.
    """
    options = {**subject, **_changed(recipe)}
    words = [python, str(_PROGRAM), "--batch-size", BATCH]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        words += [option] if value is True else [option, str(value)] if value else []
    return Command(tuple(words), os.getcwd())


def _changed(recipe: Recipe) -> dict[str, Any]:
    """Return what a recipe has otherwise than by default."""
    values = {field.name: (getattr(recipe, field.name), field.default) for field in fields(recipe)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _told(shape: ModelShape) -> dict[str, Any]:
    """Return the fields of a shape that a network is made by, as far as they are not the usual ones."""
    usual = {field.name: field.default for field in fields(shape)}
    left_out = ("name", "published_parameters", "source")
    return {name: value for name, value in asdict(shape).items() if name not in left_out and value != usual[name]}
