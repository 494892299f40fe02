"""Watching without a screen: JSON lines or a table on stdout, until interrupted or until the process ends."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gpumem_tui.watch import report
from gpumem_tui.watch.cleaning import clean
from gpumem_tui.watch.growth import Growth, growth_line, growth_of
from gpumem_tui.watch.reader import Watcher
from gpumem_tui.watch.records import ProbedProcess

_HEADER_EVERY = 30
_GROWTH_EVERY_S = 5.0
_GROWTH_AGAIN_S = 600.0
ENDED_LATELY_S = 1800.0
"""How long a process that has ended stays listed."""


def show_last(process: ProbedProcess, *, as_json: bool) -> None:
    """Print the last sample of a process that has ended."""
    writer = _Json() if as_json else _Table()
    writer.begun(process)
    writer.samples(process)
    if as_json:
        writer.ended(process)


def _show_ended(processes: Iterable[ProbedProcess], writer: _Json | _Table) -> None:
    """Those that have ended lately, the last one last."""
    since_s = time.time() - ENDED_LATELY_S
    lately = [process for process in processes if process.end is not None and process.end.time_s >= since_s]
    for process in sorted(lately, key=lambda process: process.end.time_s if process.end is not None else 0.0):
        writer.ended(process)


def watch(
    watcher: Watcher,
    pid: int | None,
    interval_s: float,
    *,
    as_json: bool,
    while_silent: Callable[[], None] = lambda: None,
) -> ProbedProcess | None:
    """Print every new sample of the running processes, or of one of them until it ends.

    Args:
        while_silent: called after each look at which no running process published.

    Returns:
        The process watched, once it has ended. Without a `pid` it goes on until interrupted.
    """
    writer = _Json() if as_json else _Table()
    clean(watcher.processes())
    for refused in watcher.read().refused:
        print(f"gpumem-tui: not read: {refused.reason}", file=sys.stderr)
    if pid is None:
        _show_ended(watcher.processes(), writer)
    growing = _Growing()
    shown: dict[tuple[int, int], int] = {}
    running: set[tuple[int, int]] = set()
    if pid is None and not any(process.is_running for process in watcher.processes()):
        print(
            "gpumem-tui: no process publishes yet; start one with `gpumem-tui run -- COMMAND`, or put the probe into a "
            "running one with `gpumem-tui attach PID`",
            file=sys.stderr,
        )
    while True:
        for process in watcher.processes():
            if process.is_running:
                if pid not in (None, process.pid):
                    continue
                if process.key not in running:
                    writer.begun(process)
                    running.add(process.key)
            elif process.key not in running and process.known_pid != pid:
                continue
            if process.is_running and growing.is_new(process, watcher):
                writer.grows(process, growing.found[process.key])
            newest = max((sample.record.sequence for sample in process.samples), default=0)
            if newest > shown.get(process.key, 0):
                shown[process.key] = newest
                writer.samples(process)
            if not process.is_running:
                running.discard(process.key)
                writer.ended(process)
                if pid is not None:
                    return process
        if not running:
            while_silent()
        time.sleep(interval_s)


def table_width() -> int:
    """The width of the terminal; without one, any."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


class _Growing:
    """Who is known to take more and more memory. `found`: by key, of each device."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, int], tuple[Growth, ...]] = {}
        self._looked_s: dict[tuple[int, int], float] = {}
        self._seen_s: dict[tuple[int, int], float] = {}

    def is_new(self, process: ProbedProcess, watcher: Watcher) -> bool:
        """Look now and then; whether a process has just begun to, or begins again after it has not for a while."""
        now_s = time.monotonic()
        if now_s - self._looked_s.get(process.key, -_GROWTH_EVERY_S) < _GROWTH_EVERY_S:
            return False
        self._looked_s[process.key] = now_s
        found = growth_of(watcher.history(process))
        if not found:
            return False
        before_s = self._seen_s.get(process.key, -_GROWTH_AGAIN_S)
        self.found[process.key], self._seen_s[process.key] = found, now_s
        return now_s - before_s >= _GROWTH_AGAIN_S


class _Json:
    def begun(self, process: ProbedProcess) -> None:
        """Nothing happens: samples have been printed."""

    def samples(self, process: ProbedProcess) -> None:
        for sample in process.samples:
            self._print(report.sample_json(process, sample))

    def grows(self, process: ProbedProcess, growth: Sequence[Growth]) -> None:
        for one in growth:
            self._print(report.growth_json(process, one))

    def ended(self, process: ProbedProcess) -> None:
        self._print(report.ended_json(process))

    @staticmethod
    def _print(body: dict[str, Any]) -> None:
        print(json.dumps(body, allow_nan=False), flush=True)


class _Table:
    def __init__(self) -> None:
        self._rows = 0
        self._columns = report.fitting_columns(table_width())

    def begun(self, process: ProbedProcess) -> None:
        self._print(report.process_line(process))
        self._rows = 0

    def samples(self, process: ProbedProcess) -> None:
        for sample in process.samples:
            if self._rows % _HEADER_EVERY == 0:
                self._print(report.header_line(self._columns))
            self._print(report.sample_line(process, sample, self._columns))
            self._rows += 1

    def grows(self, process: ProbedProcess, growth: Sequence[Growth]) -> None:
        for one in growth:
            self._print(growth_line(process, one))

    def ended(self, process: ProbedProcess) -> None:
        self._print(report.process_line(process))

    @staticmethod
    def _print(line: str) -> None:
        print(line, flush=True)
