"""`models`, `gpus`, `doctor`, `settings` and `grafana`: what can be looked up before anything is run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import click

from gpumem_tui.errors import EXIT_FAILED
from gpumem_tui.memory import format_bytes
from gpumem_tui.report.objects import SCHEMA, picked
from gpumem_tui.report.output import Printer

if TYPE_CHECKING:
    from gpumem_tui.catalog.shapes import ModelShape
    from gpumem_tui.doctor.checks import Check


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def models(as_json: bool) -> int:
    """List the models that --model knows."""
    from gpumem_tui.catalog.loader import models as catalog
    from gpumem_tui.formula.parameters import count_parameters

    shapes = catalog().values()
    Printer(as_json=as_json).show(
        body=lambda: {
            "schema": SCHEMA,
            "models": [
                {**picked(shape, "name", "family"), "parameters": count_parameters(shape), "source": shape.source}
                for shape in shapes
            ],
        },
        lines=lambda: (_model_line(shape, count_parameters(shape)) for shape in shapes),
    )
    return 0


def _model_line(shape: ModelShape, parameters: int) -> str:
    size = f"sequence {shape.seq_len:,}" if shape.seq_len else f"{shape.image_size} px" if shape.image_size else ""
    return f"{shape.name:<18}{shape.family:<8}{parameters:>16,} parameters  {size}".rstrip()


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def gpus(as_json: bool) -> int:
    """List the GPUs that --gpu sim:NAME simulates."""
    from gpumem_tui.catalog.loader import gpus as catalog

    listed = catalog().values()
    Printer(as_json=as_json).show(
        body=lambda: {
            "schema": SCHEMA,
            "gpus": [picked(gpu, "name", "title", "total_bytes", "sm", "source") for gpu in listed],
        },
        lines=lambda: (
            f"sim:{gpu.name:<24}{format_bytes(gpu.total_bytes):>12}  {gpu.sm:<7}{gpu.title}" for gpu in listed
        ),
    )
    return 0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--python", metavar="PATH", help="Interpreter that trains (default: this one).")
def doctor(as_json: bool, python: str | None) -> int:
    """What works on this machine, what does not, and the remedy. Exit code 4 if something is broken."""
    from gpumem_tui.doctor.checks import Status, System, examine
    from gpumem_tui.monitor.report import NoDriverAnswer, complete
    from gpumem_tui.monitor.sampler import Sampler

    source = Sampler()
    source.start()
    try:
        snapshot = complete(source)
    except NoDriverAnswer:
        snapshot = None
    finally:
        source.stop()
    output, checks = Printer(as_json=as_json), []
    for check in examine(System.here(), snapshot, python):
        checks.append(check)
        output.show(lines=partial(_check_lines, check))
    output.show(body=lambda: {"schema": SCHEMA, "checks": checks})
    return EXIT_FAILED if any(check.status is Status.FAIL for check in checks) else 0


def _check_lines(check: Check) -> Iterator[str]:
    yield f"{check.status.value:<5} {check.name:<16} {check.found}"
    if check.remedy:
        yield f"{'':<22} → {check.remedy}"


@click.command("settings", short_help="Print a settings file with every key explained.")
def settings_file() -> int:
    """Print a settings file with every key, its default and what it does."""
    from gpumem_tui.settings import default_file, default_path

    click.echo(f"# Save this as {default_path()}")
    click.echo(default_file(), nl=False)
    return 0


@click.command(short_help="Print a Grafana dashboard for `monitor --metrics`.")
def grafana() -> int:
    """Print a Grafana dashboard for the metrics of `gpumem-tui monitor --metrics`: save it, and import it in Grafana
    (Dashboards, New, Import)."""  # noqa: D205, D209 - as --help prints it
    from gpumem_tui.monitor.grafana import dashboard

    click.echo(json.dumps(dashboard(), indent=2))
    return 0
