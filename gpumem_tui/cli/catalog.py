"""`models`, `gpus`, `doctor`, `settings`, `grafana`, `alerts`: what can be looked up before anything is run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpumem_tui.errors import EXIT_FAILED, OptionError
from gpumem_tui.memory import Unknown, format_bytes
from gpumem_tui.report.objects import SCHEMA
from gpumem_tui.report.output import Printer, complain, note
from gpumem_tui.report.tables import counted

if TYPE_CHECKING:
    from gpumem_tui.catalog.calibration import Calibration
    from gpumem_tui.catalog.shapes import ModelShape
    from gpumem_tui.doctor.checks import Check
    from gpumem_tui.monitor.snapshot import Snapshot
    from gpumem_tui.settings import Notify


@click.command
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def models(as_json: bool) -> int:
    """List the models that --model knows."""
    from gpumem_tui.catalog.loader import models as catalog
    from gpumem_tui.cli.printed import ModelsObject
    from gpumem_tui.formula.parameters import count_parameters

    shapes = catalog().values()
    Printer(as_json=as_json).show(
        body=lambda: ModelsObject.of(shapes),
        lines=lambda: (_model_line(shape, count_parameters(shape)) for shape in shapes),
    )
    return 0


def _model_line(shape: ModelShape, parameters: int) -> str:
    size = f"sequence {shape.seq_len:,}" if shape.seq_len else f"{shape.image_size} px" if shape.image_size else ""
    return f"{shape.name:<18}{shape.family:<8}{parameters:>16,} parameters  {size}".rstrip()


@click.command
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def gpus(as_json: bool) -> int:
    """List the GPUs that --gpu sim:NAME simulates."""
    from gpumem_tui.catalog.loader import gpus as catalog
    from gpumem_tui.cli.printed import GpusObject

    listed = catalog().values()
    Printer(as_json=as_json).show(
        body=lambda: GpusObject.of(listed),
        lines=lambda: (
            f"sim:{gpu.name:<24}{format_bytes(gpu.total_bytes):>12}  {gpu.sm:<7}{gpu.title}" for gpu in listed
        ),
    )
    return 0


@click.command
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--python", metavar="PATH", help="Interpreter that trains (default: this one).")
@click.option(
    "--calibrate",
    is_flag=True,
    help="Measure what CUDA's context and libraries take of each kind of GPU here, for predictions and searches.",
)
@click.option(
    "--running",
    "from_running",
    is_flag=True,
    help="With --calibrate: take it from what trains here now under the probe (`run`, `attach`), on GPUs in use too.",
)
@click.option(
    "--seen", metavar="WORDS", help="With --calibrate: keep what `run` or `watch` saw, in the words they print."
)
@click.option(
    "--output",
    "output_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --calibrate: write there instead of the user's calibration.toml.",
)
def doctor(
    as_json: bool, python: str | None, calibrate: bool, from_running: bool, seen: str | None, output_path: Path | None
) -> int:
    """Show what works on this machine, what does not, and the remedy. Exit code 4 if something is broken.

    With --calibrate it starts a small program on each kind of GPU that nobody uses, and keeps what the driver states
    that it takes outside PyTorch's allocator.
    """
    for option, given in {"--output": output_path, "--running": from_running or None, "--seen": seen}.items():
        if given is not None and not calibrate:
            raise click.UsageError(f"{option}: belongs to --calibrate")
    if from_running and seen is not None:
        raise click.UsageError("--running and --seen: give only one of them")
    if from_running or seen is not None:
        return _learn(seen, output_path, as_json=as_json)
    if calibrate:
        return _calibrate(python, output_path, as_json=as_json)
    from gpumem_tui.cli.printed import ChecksObject
    from gpumem_tui.doctor.beside import machine_now
    from gpumem_tui.doctor.checks import Status, System, examine

    output, checks = Printer(as_json=as_json), []
    with output.progress.during("checking …"):
        snapshot = machine_now()
        for check in chain(examine(System.here(), snapshot, python), _offered(snapshot)):
            checks.append(check)
            output.show(lines=partial(_check_lines, check))
    bad = [check.name for check in checks if check.status in (Status.WARN, Status.FAIL)]
    output.show(body=lambda: ChecksObject(schema=SCHEMA, checks=tuple(checks)), lines=lambda: [_checked_line(bad)])
    return EXIT_FAILED if any(check.status is Status.FAIL for check in checks) else 0


def _calibrate(python: str | None, path: Path | None, *, as_json: bool) -> int:
    import sys

    from gpumem_tui.catalog.calibration import save
    from gpumem_tui.catalog.shapes import CatalogError
    from gpumem_tui.cli.printed import CalibrationsObject
    from gpumem_tui.doctor.beside import machine_now
    from gpumem_tui.doctor.calibrating import NotCalibrated, calibrate
    from gpumem_tui.monitor.devices import list_gpus

    listed = list_gpus()
    if isinstance(listed, Unknown):
        return complain(f"--calibrate: {listed.reason}; see `gpumem-tui doctor`", EXIT_FAILED)
    snapshot = machine_now()
    version = Unknown("the driver does not answer") if snapshot is None else snapshot.driver_version
    driver = version if isinstance(version, str) else "of unknown version"
    output, done, failed = Printer(as_json=as_json), [], 0
    for gpu in {(one.name, one.total_bytes): one for one in reversed(listed)}.values():
        note(f"GPU {gpu.index}, {gpu.name}")
        try:
            found = calibrate(gpu, driver, python or sys.executable, note)
            where = save(found, path)
        except (NotCalibrated, CatalogError, OSError) as error:
            failed += 1
            complain(f"--calibrate: {error}", EXIT_FAILED)
        else:
            done.append(found)
            output.show(lines=partial(_calibrated_lines, found, where))
    output.show(body=lambda: CalibrationsObject(schema=SCHEMA, calibrations=tuple(done)))
    return EXIT_FAILED if failed or not done else 0


def _learned(snapshot: Snapshot | None) -> list[Calibration]:
    """Return what the processes that train here take outside their allocators."""
    from gpumem_tui.doctor.beside import held, learned
    from gpumem_tui.watch.collector import Collector

    if snapshot is None or snapshot.problem:
        return []
    return learned(held(snapshot.gpus, Collector().collect(snapshot.gpus)), snapshot.driver_version)


def _offered(snapshot: Snapshot | None) -> Iterator[Check]:
    """Offer to keep what training processes show now."""
    from gpumem_tui.doctor.beside import unkept
    from gpumem_tui.doctor.checks import Check, Status

    for found in unkept(_learned(snapshot)):
        size = format_bytes(found.context.high_bytes)
        words = f"a training process takes up to {size} of {found.gpu} outside its allocator"
        yield Check("CUDA context", Status.OK, words, "`gpumem-tui doctor --calibrate --running` keeps it")


def _learn(words: str | None, path: Path | None, *, as_json: bool) -> int:
    from gpumem_tui.catalog.calibration import save, seen
    from gpumem_tui.catalog.shapes import CatalogError
    from gpumem_tui.cli.printed import CalibrationsObject
    from gpumem_tui.doctor.beside import machine_now

    output = Printer(as_json=as_json)
    try:
        found = [seen(words)] if words is not None else _learned(machine_now())
        for one in found:
            output.show(lines=partial(_calibrated_lines, one, save(one, path)))
    except (CatalogError, OSError) as error:
        return complain(f"--calibrate: {error}", EXIT_FAILED)
    if not found:
        why = "nothing trains on a GPU here under the probe; start it with `gpumem-tui run`, or `attach` to it"
        return complain(f"--calibrate --running: {why}", EXIT_FAILED)
    output.show(body=lambda: CalibrationsObject(schema=SCHEMA, calibrations=tuple(found)))
    return 0


def _calibrated_lines(found: Calibration, where: Path) -> Iterator[str]:
    yield f"{found.gpu}: a process takes {found.size_words} outside PyTorch's allocator"
    yield f"kept in {where}: predictions and searches for this GPU use it from now on"


def _check_lines(check: Check) -> Iterator[str]:
    yield f"{check.status.value:<5} {check.name:<16} {check.found}"
    if check.remedy:
        yield f"{'':<22} → {check.remedy}"


def _checked_line(bad: Sequence[str]) -> str:
    """Return what all checks come to, and what to do next."""
    if bad:
        return f"{counted(len(bad), 'thing')} to fix: {', '.join(bad)}; each line above has its remedy after →"
    return "nothing to fix; next: `gpumem-tui predict --gpu sim:h100-80gb -- python train.py`, with your own command"


@click.command("settings")
def settings_file() -> int:
    """Print a settings file with every key, its default and what it does."""
    from gpumem_tui.settings import default_file, default_path

    click.echo(f"# Save this as {default_path()}")
    click.echo(default_file(), nl=False)
    return 0


@click.command
def grafana() -> int:
    """Print a Grafana dashboard for the metrics of `gpumem-tui monitor --metrics`: save it, and import it in Grafana
    (Dashboards, New, Import)."""  # noqa: D205, D209 - as --help prints it
    from gpumem_tui.monitor.for_prometheus import dashboard

    click.echo(json.dumps(dashboard(), indent=2))
    return 0


@click.command
@click.option("--prometheus", is_flag=True, help="Print alerting rules for Prometheus, with the settings' thresholds.")
@click.option("--try", "is_tried", is_flag=True, help="Tell of a made-up alert now, as the settings' [notify] has it.")
@click.option("--settings", "settings_path", type=click.Path(path_type=Path), metavar="FILE",
              help="Instead of the user's settings file.")  # fmt: skip
def alerts(prometheus: bool, is_tried: bool, settings_path: Path | None) -> int:
    """The alerts that there can be. With --prometheus as rules for the metrics of `gpumem-tui monitor --metrics`; with
    --try a made-up one goes to the command that the settings file names under [notify]."""  # noqa: D205, D209 - as --help prints it
    from gpumem_tui.settings import load

    if prometheus and is_tried:
        raise click.UsageError("--prometheus and --try: give only one of them")
    settings = load(settings_path)
    if is_tried:
        return _try_notify(settings.notify)
    if prometheus:
        from gpumem_tui.monitor.for_prometheus import alerting_rules

        click.echo(alerting_rules(settings), nl=False)
        return 0
    from gpumem_tui.monitor.alerts import AlertKind

    for kind in AlertKind:
        click.echo(f"{kind.value:<10} {kind.meaning}")
    return 0


def _try_notify(wanted: Notify) -> int:
    """Tell of a made-up alert and say what became of it."""
    import time

    from gpumem_tui.monitor.alerts import Alert, AlertKind, Severity
    from gpumem_tui.monitor.notify import Told, run_command

    told = Told("this host", Alert(Severity.NOTE, "", AlertKind.NEAR_FULL, "a try of [notify]", time.time()))
    if not wanted.argv:
        raise OptionError("the settings file has no [notify] with a command; `gpumem-tui settings` shows it")
    if problem := run_command(wanted, told.body(0)):
        return complain(problem, EXIT_FAILED)
    click.echo(f"command: {wanted.argv[0]} was run and ended well")
    return 0
