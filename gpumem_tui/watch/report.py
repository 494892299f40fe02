"""Watching without a screen: samples, looks and ends as JSON (schema 1, keys are a contract) and as plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal

import msgspec

from gpumem_tui.memory import ALLOCATED_BUCKETS, Bucket, Unknown, Value, format_bytes
from gpumem_tui.monitor.probes import ProbeReport
from gpumem_tui.probe.wire import LookAnswer, LookedDevice
from gpumem_tui.report.objects import SCHEMA, Body, picked
from gpumem_tui.report.output import Printer, columns, complain
from gpumem_tui.report.tables import ago, largest_first
from gpumem_tui.text import printable
from gpumem_tui.watch.folders import clean
from gpumem_tui.watch.growth import Growth, growth_line, growth_of
from gpumem_tui.watch.printed import EndedLine, GrowthLine, StageObject, totals
from gpumem_tui.watch.published import Placed, Published
from gpumem_tui.watch.reader import Watcher
from gpumem_tui.watch.records import ProbedProcess, ProbeSample, device_name, kept_place, last_first
from gpumem_tui.watch.stops import StoppedJob, stopped_at_json, stopped_jobs

By = Literal["bucket", "module", "source"]

_FIGURES = (
    "allocated_bytes",
    "reserved_bytes",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "inactive_split_bytes",
    "retries",
    "ooms",
    "step_s",
)
_MOST_PLACES = 20
_MOST_KEPT = 10
_MOST_REFUSED = 5
_GROWTH_EVERY_S = 5.0
_GROWTH_AGAIN_S = 600.0
ENDED_LATELY_S = 1800.0
"""How long a process that has ended stays listed."""


# Watching


def show_last(process: ProbedProcess, *, as_json: bool) -> None:
    """Print the last sample of a process that has ended."""
    printer = _Printer(as_json=as_json)
    printer.begun(process)
    printer.samples(process)
    if as_json:
        printer.ended(process)


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
        interval_s: seconds between two looks at what is published.
        while_silent: called after each look at which no running process published.

    Returns:
        The process watched, once it has ended. Without a `pid` it continues until interrupted.
    """
    printer = _Printer(as_json=as_json)
    clean(watcher.processes())
    watcher.processes()
    refused = watcher.refused
    for each in refused[:_MOST_REFUSED]:
        complain(each.words, 0)
    if more := len(refused[_MOST_REFUSED:]):
        complain(f"not read: {more} more, such as {refused[-1].path}", 0)
    if pid is None:
        for process in _ended_lately(watcher.processes()):
            printer.ended(process)
        if not any(process.is_running for process in watcher.processes()):
            complain(
                "no process publishes yet; start one with `gpumem-tui run -- COMMAND`, or put the probe into a "
                "running one with `gpumem-tui attach PID`",
                0,
            )
    while True:
        for process in watcher.processes():
            if printer.wants(process, pid):
                printer.update(process, watcher)
                if not process.is_running and pid is not None:
                    return process
        printer.stopped(watcher.processes(), pid)
        if not printer.running:
            while_silent()
        time.sleep(interval_s)


def _ended_lately(processes: Iterable[ProbedProcess]) -> list[ProbedProcess]:
    """Return the processes that have ended lately, the last one last."""
    now_s = time.time()
    since_s = now_s - ENDED_LATELY_S
    ends = [(process.end.time_s, process) for process in processes if process.end is not None]
    return [
        process for time_s, process in sorted(ends, key=lambda end: -last_first(end[0], now_s)) if time_s >= since_s
    ]


class _GrowthWatch:
    """Looks now and then whether the memory of a process rises."""

    def __init__(self) -> None:
        self._looked_s: dict[tuple[int, int], float] = {}
        self._seen_s: dict[tuple[int, int], float] = {}

    def begun(self, process: ProbedProcess, watcher: Watcher) -> tuple[Growth, ...]:
        """Return the growth of each device once when a process starts to leak, or starts again after ten minutes."""
        now_s = time.monotonic()
        if now_s - self._looked_s.get(process.key, -_GROWTH_EVERY_S) < _GROWTH_EVERY_S:
            return ()
        self._looked_s[process.key] = now_s
        growth = growth_of(watcher.history(process))
        if not growth:
            return ()
        before_s = self._seen_s.get(process.key, -_GROWTH_AGAIN_S)
        self._seen_s[process.key] = now_s
        return growth if now_s - before_s >= _GROWTH_AGAIN_S else ()


def _growth_lines(process: ProbedProcess, growth: Growth) -> list[str]:
    return [growth_line(process, growth)]


class _Printer:
    """Prints what is new of each process.

    Attributes:
        running: keys of the running processes that were printed.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._output = Printer(as_json=as_json)
        self._columns = fitting_columns(columns())
        self._growth = _GrowthWatch()
        self._printed: dict[tuple[int, int], int] = {}
        self._stopped: dict[tuple[int, int], object] = {}
        self.running: set[tuple[int, int]] = set()

    def wants(self, process: ProbedProcess, pid: int | None) -> bool:
        """Return whether a process is printed: one of that pid, or any that runs or ran when it was printed last."""
        if process.is_running:
            return pid in (None, process.pid)
        return process.key in self.running or process.known_pid == pid

    def update(self, process: ProbedProcess, watcher: Watcher) -> None:
        """Print what has happened to a process since it was printed last."""
        if process.is_running:
            if process.key not in self.running:
                self.begun(process)
                self.running.add(process.key)
            for growth in self._growth.begun(process, watcher):
                self._output.show(
                    body=partial(GrowthLine.of, process, growth), lines=partial(_growth_lines, process, growth)
                )
        newest = max((sample.record.sequence for sample in process.samples), default=0)
        if newest > self._printed.get(process.key, 0):
            self._printed[process.key] = newest
            self.samples(process)
        if not process.is_running:
            self.running.discard(process.key)
            self.ended(process)

    def stopped(self, processes: Iterable[ProbedProcess], pid: int | None) -> None:
        """Print what has stopped since it was printed last: of a job the rank that did so first, and where."""
        stopped = {each.processes[0].key: each for each in stopped_jobs(processes)}
        for key, each in stopped.items():
            if pid in (None, *(process.pid for process in each.processes)) and self._stopped.get(key) != each.place:
                self._output.show(body=each.as_json, lines=partial(_stopped_lines, each))
        self._stopped = {key: each.place for key, each in stopped.items()}

    def begun(self, process: ProbedProcess) -> None:
        """Print that a process publishes; as JSON its samples say so."""
        self._output.show(lines=lambda: [process_line(process)])
        self._output.begin_table()

    def samples(self, process: ProbedProcess) -> None:
        """Print the newest sample of each device."""
        for sample in process.samples:
            self._output.show_row(
                body=partial(sample_json, process, sample),
                header=header_line(self._columns),
                line=partial(sample_line, process, sample, self._columns),
            )

    def ended(self, process: ProbedProcess) -> None:
        """Print how a process has ended."""
        self._output.show(body=lambda: EndedLine.of(process), lines=lambda: [process_line(process)])


def _stopped_lines(job: StoppedJob) -> list[str]:
    return [printable(job.line)]


# JSON


def sample_json(process: ProbedProcess, sample: ProbeSample) -> dict[str, object]:
    """Return one sample of one device, as a line of its own."""
    return {"event": "sample", "schema": SCHEMA, **probe_json(process, sample)}


def probe_json(process: ProbedProcess, sample: ProbeSample) -> dict[str, object]:
    """Return one sample of one device. A value that is not known is null, with its reason under `unavailable`."""
    body = Body(
        pid=process.known_pid,
        **picked(process.process, "rank", "world_size", "job"),
        step=sample.record.step,
        phase=sample.record.phase,
        time_s=sample.record.wall_ns / 1e9,
        device=sample.device,
        device_uuid=sample.record.device_uuid or None,
    )
    body.put_each("buckets", _by_key(sample.buckets))
    body.put_each("peak_buckets", _by_key(sample.peak_buckets))
    body.put_all(_FIGURES, sample)
    body.put("limit_left_bytes", sample.left_bytes)
    body.put("age_s", process.age_s)
    body.put("newest_step", process.step)
    body.put("newest_step_age_s", process.heard_s)
    body.put("entry", process.process.entry)
    body.put("state", process.state.value)
    body.put("problem", process.problem or None)
    more: dict[str, object] = {} if process.stall is None else {"stopped_at": stopped_at_json(process)}
    if stages := StageObject.all_of(process, sample.record.device):
        more["stages"] = [msgspec.to_builtins(one) for one in stages]
    return body.done(**more)


def _by_key(values: Mapping[Bucket, Value]) -> dict[str, Value]:
    return {bucket.value: value for bucket, value in values.items()}


def probe_report(published: Published) -> ProbeReport:
    """Return all that is published, for the Monitor's JSON and alerts."""
    running = [watched for watched in published.processes if watched.is_running]
    return ProbeReport(
        figures=published.figures,
        ended=published.out_of_memory,
        growing=published.growing,
        stopped=published.stopped,
        said={
            (_where(placed), watched.pid): probe_json(watched.process, placed.sample)
            for watched in running
            for placed in watched.own
        },
        hosts={watched.pid: watched.host for watched in running},
    )


def _where(placed: Placed) -> str:
    """Return the GPU of a sample; its own name of the device where that is none, or cannot be told."""
    return placed.gpu_uuid if isinstance(placed.gpu_uuid, str) else placed.sample.device


# Lines

_WIDTHS = {
    "PID": 8,
    "rank": 4,
    "device": 7,
    "step": 9,
    "s/step": 8,
    "parameters": 10,
    "gradients": 10,
    "optimizer": 10,
    "other": 10,
    "allocated": 10,
    "reserved": 10,
    "peak": 10,
}
"""The columns of the table with their widths in characters."""

_LEAVE_AWAY = ("other", "reserved", "s/step", "allocated", "rank")
"""Columns that are left out first where they do not all fit, in this order."""


def header_line(names: Sequence[str] = tuple(_WIDTHS)) -> str:
    """Return the column headings of `sample_line`."""
    return " ".join(name.rjust(_WIDTHS[name]) for name in names)


def fitting_columns(width: int) -> tuple[str, ...]:
    """Return the columns that fit into `width` characters, without the least important ones."""
    columns = list(_WIDTHS)
    for name in _LEAVE_AWAY:
        if len(header_line(columns)) <= width:
            break
        columns.remove(name)
    return tuple(columns)


def sample_line(process: ProbedProcess, sample: ProbeSample, names: Sequence[str] = tuple(_WIDTHS)) -> str:
    """Return one sample of one device, aligned under `header_line`; a dash is a value that is not known."""
    buckets, step_s = sample.buckets, sample.step_s
    sizes = {
        "parameters": buckets[Bucket.PARAMETERS],
        "gradients": buckets[Bucket.GRADIENTS],
        "optimizer": buckets[Bucket.OPTIMIZER],
        "other": buckets[Bucket.OTHER],
        "allocated": sample.allocated_bytes,
        "reserved": sample.reserved_bytes,
        "peak": sample.peak_allocated_bytes,
    }
    cells = {
        "PID": str(process.known_pid),
        "rank": "–" if process.process.rank is None else str(process.process.rank),
        "device": sample.device,
        "step": f"{sample.record.step:,}",
        "s/step": "–" if isinstance(step_s, Unknown) else f"{step_s:.4f}",
        **{name: "–" if isinstance(value, Unknown) else format_bytes(value) for name, value in sizes.items()},
    }
    return " ".join(cells[name].rjust(_WIDTHS[name]) for name in names)


def process_line(process: ProbedProcess, now_s: float | None = None) -> str:
    """Return a process that publishes, how its probe was loaded, and its state."""
    who = process.process
    of = "" if who.world_size is None else f" of {who.world_size}"
    rank = "" if who.rank is None else f", rank {who.rank}{of}"
    begun = ago((time.time() if now_s is None else now_s) - who.started_ns / 1e9)
    line = f"{process.title.replace(f', rank {who.rank}', rank, 1)}, torch {who.torch}, by {who.entry} {begun}"
    if not process.is_running:
        line += f": {process.state_words}; {process.step_words}"
    elif isinstance(process.age_s, Unknown):
        line += f": {process.age_s.reason}"
    return printable(f"{line} ({process.problem})" if process.problem else line)


_LACKING = {"kept": "account of what steps keep"}


def look_lines(process: ProbedProcess, look: LookAnswer, by: By = "source") -> list[str]:
    """Return a deep look: what each device's peak is mostly, by bucket, by module or source line, and over the step."""
    lines = peaks(look)
    lines += [f"{process.title}: step {look.step:,}, {look.step_s:.3f} s with the recording ({look.method or 'none'})"]
    for device in look.devices:
        peak = f"peak {format_bytes(device.peak_bytes)} at {device.peak_s:.3f} s"
        lines += ["", f"{device_name(device.device)}: {peak}{_limit(process, device)}"]
        for bucket in ALLOCATED_BUCKETS:
            lines.append(_size_line(bucket_words(device, bucket), device.breakdown[bucket], device.peak_bytes))
        if by != "bucket":
            lines += ["", f"by {by}", *_place_lines(device, by)]
        lines += ["", *_timeline_lines(device)]
    lines += ["", *_kept_lines(look)] if look.kept is not None else []
    lines += [f"no {_LACKING.get(what, what)}: {why}" for what, why in look.unavailable.items()]
    return [printable(line) for line in lines]


def peaks(look: LookAnswer) -> list[str]:
    """Return each device's peak in a look, and what holds most of it."""
    lines = []
    for device in look.devices:
        most = max(ALLOCATED_BUCKETS, key=lambda bucket: device.breakdown[bucket])
        held = f"most of it {most.title} ({format_bytes(device.breakdown[most])})"
        lines.append(f"{device_name(device.device)}: peak {format_bytes(device.peak_bytes)} allocated, {held}")
    return lines


def _limit(process: ProbedProcess, device: LookedDevice) -> str:
    """Return the limit that the process has set itself on the device of a look."""
    limits = [one.record.limit_bytes for one in process.samples if one.record.device == device.device]
    known = [limit_bytes for limit_bytes in limits if limit_bytes >= 0]
    return f"; the process limits itself to {format_bytes(known[0])}" if known else ""


def bucket_words(device: LookedDevice, bucket: Bucket) -> str:
    """Return a bucket's title, with the most that it held in the step where that is more than at the peak."""
    most = device.highest.get(bucket.value, 0)
    more = f", at most {format_bytes(most)} in the step" if most > device.breakdown[bucket] else ""
    return bucket.title + more


def _kept_lines(look: LookAnswer) -> list[str]:
    """Return what every step leaves behind, the largest first."""
    if not look.kept:
        return ["every step releases what it makes: nothing is left behind two steps later"]
    return [
        "left behind by every step, and not released two steps later:",
        *largest_first(
            look.kept,
            _MOST_KEPT,
            lambda kept: f"  {format_bytes(kept.bytes):>12}  {device_name(kept.device)}  {kept_place(kept)}",
            lambda rest: f"  {format_bytes(sum(kept.bytes for kept in rest)):>12}  {len(rest)} smaller places",
        ),
    ]


def _place_lines(device: LookedDevice, by: Literal["module", "source"]) -> Iterable[str]:
    return largest_first(
        totals((held.place(by), held.bytes) for held in device.held),
        _MOST_PLACES,
        lambda place: _size_line(*place, device.peak_bytes),
        lambda rest: _size_line(
            f"{len(rest)} smaller places", sum(size_bytes for _, size_bytes in rest), device.peak_bytes
        ),
    )


def _timeline_lines(device: LookedDevice) -> list[str]:
    """Return a line for each phase: when it began, and the least and the most that was live in it."""
    lines = []
    phases = device.phases or ((0.0, "step"),)
    ends = [begin for begin, _ in phases[1:]] + [float("inf")]
    for (begin, phase), end in zip(phases, ends, strict=True):
        live = [size_bytes for at, size_bytes in device.timeline if begin <= at < end]
        if live:
            mark = "  <- peak" if begin <= device.peak_s < end else ""
            span = f"{format_bytes(min(live))} to {format_bytes(max(live))}"
            lines.append(f"  {begin:8.3f} s  {phase or 'step':<10} {span}{mark}")
    return lines


def _size_line(title: str, size_bytes: int, total_bytes: int) -> str:
    share = size_bytes / total_bytes if total_bytes else 0.0
    return f"  {format_bytes(size_bytes):>12} {share:6.1%}  {title}"
