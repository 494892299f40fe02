"""What probes publish, as JSON (schema 1, keys are a public contract) and as plain lines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from gpumem_tui.memory import ALLOCATED_BUCKETS, Bucket, Unknown, Value, format_bytes
from gpumem_tui.monitor.probes import ProbeReport
from gpumem_tui.probe.documents import HeldPlace, KeptPlace, LookAnswer, LookedDevice
from gpumem_tui.text import printable
from gpumem_tui.watch.growth import Growth
from gpumem_tui.watch.published import Published
from gpumem_tui.watch.records import ProbedProcess, ProbeSample, device_name

By = Literal["bucket", "module", "source"]

SCHEMA = 1
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


# JSON


def sample_json(process: ProbedProcess, sample: ProbeSample) -> dict[str, Any]:
    """One sample of one device, as a line of its own."""
    return {"event": "sample", "schema": SCHEMA, **probe_json(process, sample)}


def probe_json(process: ProbedProcess, sample: ProbeSample) -> dict[str, Any]:
    """One sample of one device. A value that is not known is null, with its reason under `unavailable`."""
    unavailable: dict[str, str] = {}

    def known(name: str, value: object) -> object:
        if isinstance(value, Unknown):
            unavailable[name] = value.reason
            return None
        return value

    def buckets(name: str, values: Mapping[Bucket, Value]) -> dict[str, object]:
        return {bucket.value: known(f"{name}.{bucket.value}", value) for bucket, value in values.items()}

    return {
        "pid": process.known_pid,
        "rank": process.process.rank,
        "world_size": process.process.world_size,
        "job": process.process.job,
        "step": sample.record.step,
        "phase": sample.record.phase,
        "time_s": sample.record.wall_ns / 1e9,
        "device": sample.device,
        "device_uuid": sample.record.device_uuid or None,
        "buckets": buckets("buckets", sample.buckets),
        "peak_buckets": buckets("peak_buckets", sample.peak_buckets),
        **{name: known(name, getattr(sample, name)) for name in _FIGURES},
        "age_s": known("age_s", process.age_s),
        "entry": process.process.entry,
        "state": process.state.value,
        "problem": process.problem or None,
        "unavailable": unavailable,
    }


def probe_report(published: Published) -> ProbeReport:
    """All that is published, for the Monitor's JSON and alerts."""
    running = [watched for watched in published.processes if watched.is_running]
    return ProbeReport(
        figures=published.figures,
        ended=published.out_of_memory,
        growing=published.growing,
        listed={
            (placed.gpu_uuid, watched.pid): probe_json(watched.process, placed.sample)
            for watched in running
            for placed in watched.placed
            if isinstance(placed.gpu_uuid, str)
        },
        unlisted=tuple(
            probe_json(watched.process, placed.sample)
            for watched in running
            for placed in watched.own
            if not isinstance(placed.gpu_uuid, str)
        ),
    )


def ended_json(process: ProbedProcess) -> dict[str, Any]:
    """A process that has ended, and how; what was not seen of that is null."""
    end = process.end
    return {
        "event": "ended",
        "schema": SCHEMA,
        "pid": process.files.pid,
        "rank": process.process.rank,
        "step": process.step,
        "state": process.state.value,
        "how": process.state_words,
        "time_s": None if end is None else end.time_s,
        "exit_code": None if end is None else end.exit_code,
        "signal": None if end is None else end.signal or None,
        "resident_bytes": None if end is None else end.resident_bytes,
        "limit_bytes": None if end is None else end.limit_bytes,
        "limit_owner": None if end is None else end.limit_owner or None,
    }


def growth_json(process: ProbedProcess, growth: Growth) -> dict[str, Any]:
    """A process whose memory after each step has begun to rise steadily."""
    return {
        "event": "growth",
        "schema": SCHEMA,
        "pid": process.known_pid,
        "rank": process.process.rank,
        "step": process.step,
        "device": device_name(growth.device),
        "bytes_per_s": growth.bytes_per_s,
        "over_s": growth.over_s,
    }


def look_json(process: ProbedProcess, look: LookAnswer) -> dict[str, Any]:
    """A deep look, as the probe published it."""
    return {
        "event": "look",
        "schema": SCHEMA,
        "pid": process.pid,
        "rank": process.process.rank,
        "step": look.step,
        "step_s": look.step_s,
        "method": look.method or None,
        "devices": [_looked_json(device) for device in look.devices],
        "kept": None if look.kept is None else [_kept_json(kept) for kept in look.kept],
        "unavailable": look.unavailable,
    }


def _kept_json(kept: KeptPlace) -> dict[str, Any]:
    return {
        "device": device_name(kept.device),
        "operator": kept.operator or None,
        "module": kept.module or None,
        "source": kept.source or None,
        "bytes": kept.bytes,
        "allocations": kept.allocations,
    }


def _looked_json(device: LookedDevice) -> dict[str, Any]:
    return {
        "device": device_name(device.device),
        "device_uuid": device.device_uuid or None,
        "peak_bytes": device.peak_bytes,
        "peak_s": device.peak_s,
        "buckets": device.breakdown.as_json(),
        "by_module": _places_json(device.held, "module"),
        "by_source": _places_json(device.held, "source"),
        "timeline": device.timeline,
        "phases": device.phases,
    }


def _places_json(held: Sequence[HeldPlace], by: By) -> list[dict[str, Any]]:
    places = _totals((str(getattr(one, by)), one.bytes) for one in held)
    return [{by: place or None, "bytes": size_bytes} for place, size_bytes in places]


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
"""The columns of the table, and how wide they are."""

_LEAVE_AWAY = ("other", "reserved", "s/step", "allocated", "rank")
"""In this order, where they do not all fit."""


def header_line(columns: Sequence[str] = tuple(_WIDTHS)) -> str:
    """The column headings of `sample_line`."""
    return " ".join(name.rjust(_WIDTHS[name]) for name in columns)


def fitting_columns(width: int) -> tuple[str, ...]:
    """The columns of the table that fit into so many characters, the least important left away."""
    columns = list(_WIDTHS)
    for name in _LEAVE_AWAY:
        if len(header_line(columns)) <= width:
            break
        columns.remove(name)
    return tuple(columns)


def sample_line(process: ProbedProcess, sample: ProbeSample, columns: Sequence[str] = tuple(_WIDTHS)) -> str:
    """One sample of one device, aligned under `header_line`; a dash is a value that is not known."""
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
    return " ".join(cells[name].rjust(_WIDTHS[name]) for name in columns)


def process_line(process: ProbedProcess, now_s: float | None = None) -> str:
    """A process that publishes, how its probe was loaded, and its state."""
    who = process.process
    of = "" if who.world_size is None else f" of {who.world_size}"
    rank = "" if who.rank is None else f", rank {who.rank}{of}"
    begun = ago((time.time() if now_s is None else now_s) - who.started_ns / 1e9)
    line = f"{process.title.replace(f', rank {who.rank}', rank, 1)}, torch {who.torch}, by {who.entry} {begun}"
    if not process.is_running:
        line += f": {process.state_words}; the last step seen was {process.step:,}"
    elif isinstance(process.age_s, Unknown):
        line += f": {process.age_s.reason}"
    return printable(f"{line} ({process.problem})" if process.problem else line)


_LACKING = {"kept": "account of what steps keep"}


def look_lines(process: ProbedProcess, look: LookAnswer, by: By = "source") -> list[str]:
    """A deep look: each device's peak by bucket, then by module or source line, then how memory went over the step."""
    lines = [f"{process.title}: step {look.step:,}, {look.step_s:.3f} s with the recording ({look.method or 'none'})"]
    for device in look.devices:
        lines += ["", f"{device_name(device.device)}: peak {format_bytes(device.peak_bytes)} at {device.peak_s:.3f} s"]
        for bucket in ALLOCATED_BUCKETS:
            lines.append(_size_line(bucket.title, device.breakdown[bucket], device.peak_bytes))
        if by != "bucket":
            lines += ["", f"by {by}", *_place_lines(device, by)]
        lines += ["", *_timeline_lines(device)]
    lines += ["", *_kept_lines(look)] if look.kept is not None else []
    lines += [f"no {_LACKING.get(what, what)}: {why}" for what, why in look.unavailable.items()]
    return [printable(line) for line in lines]


def _kept_lines(look: LookAnswer) -> list[str]:
    """What every step leaves behind, the largest first."""
    if not look.kept:
        return ["every step releases what it makes: nothing is left behind two steps later"]
    lines = ["left behind by every step, and not released two steps later:"]
    for kept in look.kept[:_MOST_KEPT]:
        lines.append(f"  {format_bytes(kept.bytes):>12}  {device_name(kept.device)}  {kept_place(kept)}")
    rest = look.kept[_MOST_KEPT:]
    if rest:
        lines.append(f"  {format_bytes(sum(kept.bytes for kept in rest)):>12}  {len(rest)} smaller places")
    return lines


def kept_place(kept: KeptPlace) -> str:
    """Where in the program it was made: the line, the module, the operator, as far as they are known."""
    places = (kept.source or "(no line known)", kept.module and f"in {kept.module}", kept.operator)
    return ", ".join(place for place in places if place)


def _place_lines(device: LookedDevice, by: Literal["module", "source"]) -> list[str]:
    places = _totals((held.place(by), held.bytes) for held in device.held)
    shown, rest = places[:_MOST_PLACES], places[_MOST_PLACES:]
    lines = [_size_line(place, size_bytes, device.peak_bytes) for place, size_bytes in shown]
    if rest:
        title = f"{len(rest)} smaller places"
        lines.append(_size_line(title, sum(size_bytes for _, size_bytes in rest), device.peak_bytes))
    return lines


def _timeline_lines(device: LookedDevice) -> list[str]:
    """For each phase: when it began, and the least and the most that was live in it."""
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


def _totals(sizes: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """The bytes of each place, the largest first."""
    totals: Counter[str] = Counter()
    for place, size_bytes in sizes:
        totals[place] += size_bytes
    return totals.most_common()


def _size_line(title: str, size_bytes: int, total_bytes: int) -> str:
    share = size_bytes / total_bytes if total_bytes else 0.0
    return f"  {format_bytes(size_bytes):>12} {share:6.1%}  {title}"


def ago(seconds: float) -> str:
    """A span as a person says it: ``4 s ago``, ``2 h ago``."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
