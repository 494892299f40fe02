"""What a plan is for, on the command line; and `noise-scale`."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from gpumem_tui.cli.parameters import TOKENS
from gpumem_tui.cli.types import AT_LEAST_ONE, Finite, Typed
from gpumem_tui.formula.noise_scale import MeasuredNorm, noise_scale
from gpumem_tui.options.typed import norm_from
from gpumem_tui.report.output import Printer
from gpumem_tui.settings import load

if TYPE_CHECKING:
    from gpumem_tui.plan.goals import Goals


_NORM = Typed("norm", norm_from)

GOAL_OPTIONS = [
    click.option(
        "--tokens", type=TOKENS,
        help="To train on, e.g. 2B: says hours, and with --price the cost.",
    ),
    click.option("--price", type=Finite(min=0), help="Of one GPU for an hour."),
    click.option("--currency", help="Of --price, such as EUR; else the settings', USD where they say none."),
    click.option(
        "--batch-multiple", type=AT_LEAST_ONE, default=8, show_default=True, help="Micro-batches in multiples of it."
    ),
    click.option(
        "--node-gpus", type=AT_LEAST_ONE, default=8, show_default=True,
        help="GPUs of one machine: --solve gpus answers in whole machines beyond one.",
    ),
    click.option("--reference-batch", type=AT_LEAST_ONE, help="A global batch whose learning rate you know."),
    click.option("--reference-rate", type=Finite(min=0, min_open=True), help="That learning rate."),
    click.option(
        "--gradient-norm", "norms", type=_NORM, multiple=True, metavar="BATCH=NORM",
        help="The gradient's norm at two batch sizes, in samples: says the critical batch.",
    ),
]  # fmt: skip


def goals_from(values: dict[str, Any]) -> Goals:
    """Take what was typed of `GOAL_OPTIONS` out of `values`, with the prices of the user's settings.

    `Goals.check` says whether it can be.

    Raises:
        SettingsError: the settings cannot be read.
    """
    from gpumem_tui.plan.goals import Goals

    given, known = {field.name: values.pop(field.name) for field in fields(Goals) if field.name in values}, load()
    given["currency"] = given.get("currency") or known.currency
    return Goals(**given, prices=known.prices if given["currency"] == known.currency else ())


def refuse_goals(goals: Goals) -> None:
    """Refuse goals of what only a trace knows: no speed is known of it, and no advice on the batch is given.

    Raises:
        UsageError: one was given.
    """
    from gpumem_tui.plan.goals import Goals

    for field in fields(Goals):
        if field.name not in ("prices", "currency") and getattr(goals, field.name) != field.default:
            option = "gradient-norm" if field.name == "norms" else field.name.replace("_", "-")
            raise click.UsageError(f"--{option}: is for models with a closed form; leave it out")


@click.command("noise-scale", short_help="The critical batch size, from gradient norms at two batch sizes.")
@click.argument("norms", type=_NORM, nargs=-1, required=True, metavar="BATCH=NORM BATCH=NORM...")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def noise_scale_command(norms: tuple[MeasuredNorm, ...], as_json: bool) -> int:
    """The gradient noise scale, an estimate of the critical batch size (McCandlish et al. 2018, arXiv:1812.06162).

    Give the norm of the whole gradient (what torch.nn.utils.clip_grad_norm_ returns) at the same weights, averaged over
    a small and a large batch: `gpumem-tui noise-scale 8=2.1 64=1.3`. Several of a batch size are averaged: one pair is
    very noisy. The answer is in the unit of the batches, samples or tokens.
    """
    found = noise_scale(norms)
    sizes = [found.batch_size * factor for factor in (0.25, 0.5, 1, 2, 4)]
    rows = [{"batch_size": size, "steps": found.steps(size), "examples": found.examples(size)} for size in sizes]
    Printer(as_json=as_json).show(
        body=lambda: {
            "schema": 1,
            "noise_scale": found.batch_size,
            "squared_gradient": found.squared_gradient,
            "noise": found.noise,
            "batches": rows,
        },
        lines=lambda: [
            f"critical batch: about {found.batch_size:,.3g} samples, or tokens if the batches were in tokens",
            f"gradient noise scale {found.batch_size:,.4g}, of |G|² {found.squared_gradient:.4g} and tr(Σ) "
            f"{found.noise:.4g}",
            "batch     steps of the fewest   examples of the fewest",
            *(f"{row['batch_size']:<10,.4g}{row['steps']:<22.2f}{row['examples']:.2f}" for row in rows),
        ],
    )
    return 0
