"""`monitor`, `doctor`, `settings` and `grafana`: what the GPUs hold now, whether this machine is fit for it."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpumem_tui.cli.common import complain, drop_output, is_terminal
from gpumem_tui.cli.groups import with_options
from gpumem_tui.cli.hosts import HOSTS_OPTIONS, mark_line, watch_hosts
from gpumem_tui.cli.metrics import metrics_option, serve_metrics
from gpumem_tui.cli.numbers import Finite
from gpumem_tui.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED

if TYPE_CHECKING:
    from gpumem_tui.monitor.alerts import Alerts
    from gpumem_tui.monitor.probes import Ask
    from gpumem_tui.monitor.recording import SnapshotRecorder, SnapshotRecording
    from gpumem_tui.monitor.snapshot import Source
    from gpumem_tui.remote.recording import HostsRecording
    from gpumem_tui.settings import Settings

_FILE = click.Path(path_type=Path)


@click.command(short_help="Every GPU's memory as one ledger, live.")
@click.option("--once", is_flag=True, help="Print one reading and end.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines, one a reading; with --once a single object.")
@click.option("--interval", "interval_s", type=Finite(0.2, 3600), metavar="S", help="Seconds between readings.")
@click.option("--record", type=_FILE, metavar="FILE", help="Also keep every reading in a new file.")
@click.option("--replay", type=_FILE, metavar="FILE", help="Show a recording instead of this machine.")
@click.option("--speed", type=Finite(0.01, 1000), metavar="X", help="Play it X times as fast on the screen.")
@metrics_option
@click.option("--read-only", is_flag=True, help="Only watch: end no process, attach to none, search nothing.")
@click.option("--bell", is_flag=True, help="Ring the terminal's bell when an alert begins.")
@click.option("--settings", "settings_path", type=_FILE, metavar="FILE", help="Instead of the user's settings file.")
@with_options(HOSTS_OPTIONS)
def monitor(
    hosts: tuple[str, ...],
    hosts_file: Path | None,
    slurm_job: str | None,
    remote_command: str | None,
    once: bool,
    as_json: bool,
    interval_s: float | None,
    record: Path | None,
    replay: Path | None,
    speed: float | None,
    address: tuple[str, int] | None,
    read_only: bool,
    bell: bool,
    settings_path: Path | None,
) -> int:
    """Every GPU's memory as one ledger, live: on the screen, as lines, as JSON, as metrics.

    With --host, --hosts or --slurm the GPUs of other machines. A recording of several hosts is one file; while it is
    played [ and ] go a minute back and on, / to a time (/03:12), a to an alert.
    """
    if hosts or hosts_file or slurm_job:
        _check_hosts_alone({"--once": once, "--json": as_json, "--replay": replay, "--speed": speed})
        return watch_hosts(hosts, hosts_file, slurm_job or "", remote_command, interval_s, address, record)
    if remote_command is not None:
        raise click.UsageError("--remote-command is for other hosts: name them with --host, --hosts or --slurm")
    given = {"--once": once, "--record": record, "--metrics": address, "--replay": replay, "--interval": interval_s}
    for one, other in (("--once", "--record"), ("--once", "--metrics"), ("--replay", "--record"),
                       ("--replay", "--metrics"), ("--replay", "--interval")):  # fmt: skip
        if given[one] and given[other]:
            raise click.UsageError(f"{one} and {other}: give only one of them")
    if speed is not None and replay is None:
        raise click.UsageError("--speed: says how fast --replay plays; give both")
    from gpumem_tui.settings import load

    settings = load(settings_path)
    settings = dataclasses.replace(
        settings,
        interval_s=interval_s or settings.interval_s,
        read_only=read_only or settings.read_only,
        bell=bell or settings.bell,
    )
    on_screen = not once and not as_json and is_terminal()
    if replay is not None:
        from gpumem_tui.remote.recording import HostsRecording

        recording = _recording(replay)
        if isinstance(recording, HostsRecording):
            return _show_hosts(recording, settings, speed or 1.0, on_screen=on_screen, as_json=as_json, once=once)
        if on_screen:
            return _show_recording(recording, settings, speed or 1.0)
        return _print_recording(recording, _alerts(settings), once=once, as_json=as_json)
    from gpumem_tui.monitor.sampler import Sampler

    source = Sampler(interval_s=settings.interval_s)
    with ExitStack() as stack:
        recorder = None if record is None else _recorder(record)
        notice = "" if address is None else _serve_metrics(stack, source, *address)
        if on_screen:
            return _show(source, settings, recorder, notice)
        if notice:
            click.echo(f"gpumem-tui: {notice}", err=True)
        stack.callback(source.stop)
        source.start()
        if once:
            return _print_once(source, _alerts(settings), as_json=as_json)
        return _stream(source, settings, recorder, as_json=as_json)


def _show(source: Source, settings: Settings, recorder: SnapshotRecorder | None, notice: str) -> int:
    from gpumem_tui.monitor.recording import Recorded
    from gpumem_tui.tui.start import open_monitor

    if recorder is None:
        return open_monitor(source, settings, notice=notice)
    recorded = Recorded(source, recorder, settings.interval_s, _alerts(settings), _probes())
    code = open_monitor(recorded, settings, notice=notice)
    return complain(recorded.notice, EXIT_FAILED) if recorded.notice else code


def _show_recording(recording: SnapshotRecording, settings: Settings, speed: float) -> int:
    from gpumem_tui.monitor.replay import RecordingReplay
    from gpumem_tui.tui.start import open_replay

    replay = RecordingReplay(recording, speed, settings.chart_minutes * 60)
    return _say_damage(recording, open_replay(replay, settings))


def _show_hosts(
    recording: HostsRecording, settings: Settings, speed: float, *, on_screen: bool, as_json: bool, once: bool
) -> int:
    """The hosts screen, or the alerts that began and the hosts that went away, a line each."""
    from gpumem_tui.monitor.recording_index import RecordingIndex
    from gpumem_tui.remote.recording import HostsReplay
    from gpumem_tui.tui.start import open_hosts

    if on_screen:
        replay = HostsReplay(recording, speed, settings.chart_minutes * 60)
        return _say_damage(recording, open_hosts(replay, settings))
    if as_json or once:
        raise click.UsageError("--replay of several hosts prints the alerts that began; leave out --once and --json")
    index = RecordingIndex(recording)
    index.start()
    index.wait()

    def write() -> None:
        for mark in index.marks:
            click.echo(mark_line(mark))

    code = _written(write)
    if not recording.has_reading:
        complain(f"{recording.path} holds no reading: no host answered while it was made", 0)
    return complain(index.damage, code) if index.damage else code


def _check_hosts_alone(given: Mapping[str, object]) -> None:
    """Hosts are shown, or recorded."""
    for option, value in given.items():
        if value:
            raise click.UsageError(f"{option} is for one machine: `ssh HOST gpumem-tui monitor {option}`")


def _print_once(source: Source, alerts: Alerts, *, as_json: bool) -> int:
    from gpumem_tui.monitor.headless import NoDriverAnswer, complete, print_once

    try:
        snapshot = complete(source)
    except NoDriverAnswer as error:
        return complain(str(error), EXIT_FAILED)
    if snapshot.problem and not as_json:
        return complain(snapshot.problem, EXIT_FAILED)
    code = _written(lambda: print_once(snapshot, alerts, as_json=as_json, ask=_probes()))
    return complain(snapshot.problem, EXIT_FAILED) if snapshot.problem else code


def _stream(source: Source, settings: Settings, recorder: SnapshotRecorder | None, *, as_json: bool) -> int:
    from gpumem_tui.monitor.headless import NoDriverAnswer, live, stream
    from gpumem_tui.monitor.recording_file import RecordingError

    snapshots = live(source, settings.interval_s)
    try:
        with nullcontext() if recorder is None else closing(recorder):
            return _written(
                lambda: stream(snapshots, _alerts(settings), as_json=as_json, recorder=recorder, ask=_probes())
            )
    except (NoDriverAnswer, RecordingError) as error:
        return complain(str(error), EXIT_FAILED)


def _print_recording(recording: SnapshotRecording, alerts: Alerts, *, once: bool, as_json: bool) -> int:
    """All of it, as fast as it can be written; with `once` its last reading."""
    from gpumem_tui.monitor.headless import print_once, stream

    if not once:
        return _say_damage(recording, _written(lambda: stream(recording.snapshots(), alerts, as_json=as_json)))
    (last,) = deque(recording.snapshots(), maxlen=1)
    return _say_damage(recording, _written(lambda: print_once(last, alerts, as_json=as_json)))


def _written(write: Callable[[], None]) -> int:
    """The exit code after writing to stdout: ctrl+c and a reader that leaves are ordinary ends."""
    _replace_unencodable()
    try:
        write()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        drop_output()
    return 0


def _replace_unencodable() -> None:
    """A character that stdout's encoding lacks becomes a question mark, not an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _say_damage(recording: SnapshotRecording | HostsRecording, code: int) -> int:
    """A recording that ends early is no failure: a killed recorder leaves one."""
    if recording.damage:
        complain(recording.damage, 0)
    return code


def _probes() -> Ask:
    """What the probes of this machine's processes say."""
    from gpumem_tui.watch.collector import Collector
    from gpumem_tui.watch.report import probe_report

    collector = Collector()
    return lambda snapshot: probe_report(collector.collect(snapshot.gpus))


def _alerts(settings: Settings) -> Alerts:
    from gpumem_tui.monitor.alerts import Alerts

    return Alerts(settings)


def _serve_metrics(stack: ExitStack, source: Source, host: str, port: int) -> str:
    from gpumem_tui.monitor.metrics import this_machine

    return serve_metrics(stack, this_machine(source, _probes()), host, port)


def _recorder(path: Path) -> SnapshotRecorder:
    from gpumem_tui.monitor.recording import SnapshotRecorder
    from gpumem_tui.monitor.recording_file import RecordingError

    try:
        return SnapshotRecorder(path)
    except RecordingError as error:
        raise click.UsageError(f"--record: {error}") from error


def _recording(path: Path) -> SnapshotRecording | HostsRecording:
    from gpumem_tui.monitor.recording import SnapshotRecording
    from gpumem_tui.monitor.recording_file import HEADER_KEY, RecordingError, RecordingFile
    from gpumem_tui.remote.recording import HostsRecording

    recording: SnapshotRecording | HostsRecording
    try:
        file = RecordingFile(path)
        one = file.header[HEADER_KEY] == 1
        recording = SnapshotRecording(file) if one else HostsRecording(file)
    except RecordingError as error:
        raise click.UsageError(f"--replay: {error}") from error
    if next(iter(recording.pictures()), None) is None:
        raise click.UsageError(f"--replay: {path} holds no reading that can be played")
    return recording


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--python", metavar="PATH", help="Interpreter that trains (default: this one).")
def doctor(as_json: bool, python: str | None) -> int:
    """What works on this machine, what does not, and the remedy. Exit code 4 if something is broken."""
    from gpumem_tui.doctor.checks import Status, System, examine
    from gpumem_tui.monitor.headless import NoDriverAnswer, complete
    from gpumem_tui.monitor.sampler import Sampler

    source = Sampler()
    source.start()
    try:
        snapshot = complete(source)
    except NoDriverAnswer:
        snapshot = None
    finally:
        source.stop()
    _replace_unencodable()
    checks = []
    for check in examine(System.here(), snapshot, python):
        checks.append(check)
        if not as_json:
            click.echo(f"{check.status.value:<5} {check.name:<16} {check.found}")
            if check.remedy:
                click.echo(f"{'':<22} → {check.remedy}")
    if as_json:
        listed = [{**dataclasses.asdict(check), "status": check.status.value} for check in checks]
        click.echo(json.dumps({"schema": 1, "checks": listed}))
    return EXIT_FAILED if any(check.status is Status.FAIL for check in checks) else 0


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
    (Dashboards, New, Import)."""
    from gpumem_tui.monitor.grafana import dashboard

    click.echo(json.dumps(dashboard(), indent=2))
    return 0
