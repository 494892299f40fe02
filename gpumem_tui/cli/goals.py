"""What a plan is for, on the command line."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from gpumem_tui.cli.parameters import TOKENS
from gpumem_tui.cli.types import AT_LEAST_ONE, Finite
from gpumem_tui.settings import load

if TYPE_CHECKING:
    from gpumem_tui.plan.goals import Goals


GOAL_OPTIONS = [
    click.option(
        "--tokens", type=TOKENS,
        help="To train on, e.g. 2B: says hours, and with --price the cost.",
    ),
    click.option("--price", type=Finite(min=0), help="Of one GPU for an hour, in US dollars."),
    click.option(
        "--batch-multiple", type=AT_LEAST_ONE, default=8, show_default=True, help="Micro-batches in multiples of it."
    ),
    click.option(
        "--node-gpus", type=AT_LEAST_ONE, default=8, show_default=True,
        help="GPUs of one machine: --solve gpus answers in whole machines beyond one.",
    ),
]  # fmt: skip


def goals_from(values: dict[str, Any]) -> Goals:
    """Take what was typed of `GOAL_OPTIONS` out of `values`, with the prices of the user's settings.

    `Goals.check` says whether it can be.

    Raises:
        SettingsError: the settings cannot be read.
    """
    from gpumem_tui.plan.goals import Goals

    given = {field.name: values.pop(field.name) for field in fields(Goals) if field.name in values}
    return Goals(**given, prices=load().prices)


def refuse_goals(goals: Goals) -> None:
    """Refuse goals of what only a trace knows: no speed is known of it, and no advice on the batch is given.

    Raises:
        UsageError: one was given.
    """
    from gpumem_tui.plan.goals import Goals

    for field in fields(Goals):
        if field.name != "prices" and getattr(goals, field.name) != field.default:
            raise click.UsageError(f"--{field.name.replace('_', '-')}: is for models with a closed form; leave it out")
