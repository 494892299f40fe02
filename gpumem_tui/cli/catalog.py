"""`models` and `gpus`: what the catalog has, by the names the other options take."""

from __future__ import annotations

import json

import click

from gpumem_tui.memory import format_bytes


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def models(as_json: bool) -> int:
    """List the models that --model knows."""
    from gpumem_tui.catalog.loader import models as catalog
    from gpumem_tui.formula.parameters import count_parameters

    shapes = catalog().values()
    if as_json:
        listed = [
            {"name": s.name, "family": s.family, "parameters": count_parameters(s), "source": s.source} for s in shapes
        ]
        click.echo(json.dumps({"schema": 1, "models": listed}))
        return 0
    for shape in shapes:
        size = f"sequence {shape.seq_len:,}" if shape.seq_len else f"{shape.image_size} px" if shape.image_size else ""
        click.echo(f"{shape.name:<18}{shape.family:<8}{count_parameters(shape):>16,} parameters  {size}".rstrip())
    return 0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def gpus(as_json: bool) -> int:
    """List the GPUs that --gpu sim:NAME simulates."""
    from gpumem_tui.catalog.loader import gpus as catalog

    listed = catalog().values()
    if as_json:
        rows = [
            {"name": g.name, "title": g.title, "total_bytes": g.total_bytes, "sm": g.sm, "source": g.source}
            for g in listed
        ]
        click.echo(json.dumps({"schema": 1, "gpus": rows}))
        return 0
    for gpu in listed:
        click.echo(f"sim:{gpu.name:<24}{format_bytes(gpu.total_bytes):>12}  {gpu.sm:<7}{gpu.title}")
    return 0
