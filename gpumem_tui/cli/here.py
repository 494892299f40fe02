"""`monitor` of this machine, and of recordings: on the screen, as lines, as JSON."""

from __future__ import annotations

import sys
from collections import deque
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpumem_tui.cli.asked import AskedMonitor, settings_of
from gpumem_tui.errors import EXIT_FAILED, OptionError
from gpumem_tui.report.output import complain, held_stdin, is_read_by_a_person, is_terminal, on_end, written

if TYPE_CHECKING:
    from gpumem_tui.monitor.alerts import Alerts
    from gpumem_tui.monitor.probes import Ask
    from gpumem_tui.monitor.sampler import Sampler
    from gpumem_tui.monitor.snapshot import Source
    from gpumem_tui.recording.recording import GpuRecorder, GpuRecording
    from gpumem_tui.settings import Settings


def monitor_here(asked: AskedMonitor) -> int:
    """Show this machine's GPUs, or a recording, as it was asked for, and return the exit code.

    Raises:
        OptionError: the recording cannot be played so; the settings are invalid.
    """
    settings = settings_of(asked)
    on_screen = not (asked.once or asked.as_json or asked.wire or asked.quiet) and is_terminal()
    if asked.replay is not None:
        return _replayed(asked.replay, asked, settings, on_screen=on_screen)
    from gpumem_tui.monitor.sampler import Sampler

    source = Sampler(interval_s=settings.interval_s)
    with ExitStack() as stack:
        recorder = None if asked.record is None else _recorder(asked.record)
        notice = "" if asked.address is None else _serve_metrics(stack, source, *asked.address)
        if on_screen:
            return _show(source, settings, recorder, notice)
        if notice:
            complain(notice, 0)
        stack.callback(source.stop)
        source.start()
        if asked.once:
            return _print_once(source, settings, as_json=asked.as_json)
        return _stream(source, settings, recorder, asked)


def _replayed(path: Path, asked: AskedMonitor, settings: Settings, *, on_screen: bool) -> int:
    recording, speed = _recording(path), asked.speed or 1.0
    if not recording.of_one_machine and asked.once:
        raise OptionError("--replay of several hosts prints the alerts that began, or --json; leave out --once")
    if not recording.of_one_machine and asked.as_json:
        return _print_pictures(recording)
    if on_screen:
        return _show_recording(recording, settings, speed)
    if not recording.of_one_machine:
        return _print_hosts(recording)
    return _print_recording(recording, settings, once=asked.once, as_json=asked.as_json)


def _show(source: Sampler, settings: Settings, recorder: GpuRecorder | None, notice: str) -> int:
    from gpumem_tui.tui.start import open_monitor

    if recorder is None:
        return open_monitor(source, settings, notice=notice)
    from gpumem_tui.recording.recording import record_source

    def say(problem: str) -> None:
        source.notice = problem

    recorded = record_source(source, recorder, settings.interval_s, _alerts(settings), _probes(), say)
    recorded.start()
    try:
        code = open_monitor(source, settings, notice=notice)
    finally:
        recorded.stop()
    return complain(recorded.notice, EXIT_FAILED) if recorded.notice else code


def _show_recording(recording: GpuRecording, settings: Settings, speed: float) -> int:
    from gpumem_tui.recording.player import Player
    from gpumem_tui.tui.start import open_hosts, open_replay

    replay = Player(recording, speed, settings.chart_minutes * 60)
    code = open_replay(replay, settings) if recording.of_one_machine else open_hosts(replay, settings)
    return _say_damage(recording, code)


def _print_pictures(recording: GpuRecording) -> int:
    """Print every reading of every host, an object a line."""
    from gpumem_tui.remote.report import HostPrinter

    def write() -> None:
        printer = HostPrinter(as_json=True, as_csv=False)
        for picture in recording.pictures():
            printer.show(picture.statuses, once=False)

    return _say_damage(recording, written(write))


def _print_hosts(recording: GpuRecording) -> int:
    """Print the alerts that began and the hosts that went away, a line each."""
    from gpumem_tui.cli.hosts import mark_line
    from gpumem_tui.recording.player import RecordingIndex

    index = RecordingIndex(recording)
    index.start()
    index.wait()

    def write() -> None:
        for mark in index.marks:
            print(mark_line(mark), flush=True)

    code = written(write)
    if not recording.has_reading:
        complain(f"{recording.path} has no reading: no host answered; see `gpumem-tui monitor --host HOST --once`", 0)
    return complain(index.damage, code) if index.damage else code


def _print_once(source: Source, settings: Settings, *, as_json: bool) -> int:
    from gpumem_tui.monitor.report import NoDriverAnswer, complete, print_once

    try:
        snapshot = complete(source)
    except NoDriverAnswer as error:
        return complain(str(error), EXIT_FAILED)
    if snapshot.problem and not as_json:
        return complain(snapshot.problem, EXIT_FAILED)
    alerts, only = _alerts(settings), _only(settings)
    code = written(lambda: print_once(snapshot, alerts, as_json=as_json, only=only, ask=_probes()))
    return complain(snapshot.problem, EXIT_FAILED) if snapshot.problem else code


def _stream(source: Source, settings: Settings, recorder: GpuRecorder | None, asked: AskedMonitor) -> int:
    from gpumem_tui.monitor.notify import Notifier
    from gpumem_tui.monitor.report import NoDriverAnswer, live, stream
    from gpumem_tui.monitor.wire import ReportWriter
    from gpumem_tui.recording.file import RecordingError

    quiet = asked.quiet or (recorder is not None and not (asked.as_json or asked.wire or is_read_by_a_person()))
    if recorder is not None:
        on_end(sys.exit)  # as services and batch systems end it: the file has its end
    if quiet and recorder is not None:
        complain(f"recording to {asked.record}; ctrl+c ends it", 0)
    snapshots = live(source, settings.interval_s, held_stdin() if asked.wire else (), early=asked.wire)
    notifier = None if asked.as_json or asked.wire else Notifier(settings.notify)  # who reads the JSON has its alerts
    try:
        with nullcontext() if recorder is None else closing(recorder):
            return written(
                lambda: stream(
                    snapshots, _alerts(settings), as_json=asked.as_json, wire=ReportWriter() if asked.wire else None,
                    only=_only(settings), recorder=recorder, ask=_probes(), notifier=notifier,
                    quiet=quiet,
                )
            )  # fmt: skip
    except (NoDriverAnswer, RecordingError) as error:
        return complain(str(error), EXIT_FAILED)
    finally:
        if notifier is not None:
            notifier.close()


def _print_recording(recording: GpuRecording, settings: Settings, *, once: bool, as_json: bool) -> int:
    """Print all of a recording, as fast as it can be written; with `once` its last reading."""
    from gpumem_tui.monitor.report import print_once, stream

    alerts, only = _alerts(settings), _only(settings)
    if not once:
        shown = partial(stream, recording.snapshots(), alerts, as_json=as_json, only=only)
        return _say_damage(recording, written(shown))
    (last,) = deque(recording.snapshots(), maxlen=1)
    return _say_damage(recording, written(lambda: print_once(last, alerts, as_json=as_json, only=only)))


def _say_damage(recording: GpuRecording, code: int) -> int:
    """Complain of a recording that ends early. That is no failure: a killed recorder leaves one."""
    if recording.damage:
        complain(recording.damage, 0)
    return code


def _probes() -> Ask:
    """Return what asks the probes of this machine's processes."""
    from gpumem_tui.watch.live import ask_probes

    return ask_probes()


def _only(settings: Settings) -> str:
    """Return whose processes are printed; empty for everybody's."""
    from gpumem_tui.monitor.users import viewer

    return viewer() if settings.mine else ""


def _alerts(settings: Settings) -> Alerts:
    from gpumem_tui.monitor.alerts import Alerts

    return Alerts(settings)


def _serve_metrics(stack: ExitStack, source: Source, host: str, port: int) -> str:
    from gpumem_tui.cli.hosts import serve_metrics
    from gpumem_tui.monitor.metrics import this_machine

    return serve_metrics(stack, this_machine(source, _probes()), host, port)


def _recorder(path: Path) -> GpuRecorder:
    from gpumem_tui.recording.recording import GpuRecorder

    return GpuRecorder(path)


def _recording(path: Path) -> GpuRecording:
    from gpumem_tui.recording.recording import GpuRecording

    recording = GpuRecording(path)
    if next(iter(recording.pictures()), None) is None:
        why = recording.damage or f"{path} has no reading to play"
        raise OptionError(f"--replay: {why}; record one with `gpumem-tui monitor --record FILE`")
    return recording
