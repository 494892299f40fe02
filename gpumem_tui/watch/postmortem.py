"""After memory ran out: what filled the device, what was asked for, and what would have made it fit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.predict import DEFAULT_HEADROOM
from gpumem_tui.formula.remedies import Remedy
from gpumem_tui.memory import MIB, Breakdown, Bucket, Range, Unknown, Value, format_bytes, format_range
from gpumem_tui.monitor.devices import RealGpu
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.probe.files import WireError
from gpumem_tui.probe.wire import CPU, PostMortem, Trained
from gpumem_tui.report.objects import SCHEMA, picked
from gpumem_tui.report.tables import ago
from gpumem_tui.text import printable
from gpumem_tui.watch.documents import read_document
from gpumem_tui.watch.ends import memory_phrase
from gpumem_tui.watch.expected import FIXED, Expected, expect
from gpumem_tui.watch.growth import StepGrowth, mean_step_growth, step_growth
from gpumem_tui.watch.records import FOR_MEMORY, End, ProbedProcess, ProcessState, device_name, kept_place

_BEST_REMEDIES = 4
_MOST_PLACES = 3
_SMALL_SHARE = 10
"""Places that keep less than this part of the growth are not named."""


@dataclass(frozen=True)
class Case:
    """A process that ran out of memory, and what the formula states of it.

    Attributes:
        expected: the model and recipe for the formula, or why they cannot be told.
    """

    process: ProbedProcess
    post_mortem: PostMortem
    expected: Reading[Expected]

    @property
    def what_happened(self) -> str:
        """The title's words for what happened to the process."""
        if self.process.state is ProcessState.KILLED_FOR_MEMORY:
            return "was killed by the kernel as host memory ran out"
        return "ran out of memory"

    @property
    def grew(self) -> StepGrowth:
        """By how much memory grew from step to step; by nothing where it did not, or nobody saw it.

        Steps that were recorded may be long past: what they kept counts where the last samples do not contradict.
        """
        found = self.post_mortem
        if found.device is None:
            return StepGrowth()
        seen, kept_bytes = step_growth(found.samples, found.device), sum(one.bytes for one in found.kept)
        mean_bytes = mean_step_growth(found.samples, found.device)
        is_past = mean_bytes is not None and mean_bytes < kept_bytes / 2
        return seen if seen.bytes or kept_bytes < MIB or is_past else StepGrowth(kept_bytes)

    @property
    def grown_bytes(self) -> int:
        """The growth over these steps."""
        rest_bytes = self.rest_bytes
        return min(rest_bytes if isinstance(rest_bytes, int) else 0, self.grown_steps * self.grew.bytes)

    @property
    def grown_steps(self) -> int:
        """The steps since memory was first seen to grow."""
        since = self.grew.since_step
        return max(0, self.post_mortem.step - since) if since else 0

    @property
    def rest_bytes(self) -> Value:
        """The bytes allocated beyond parameters, gradients and optimizer state: activations, batch data, others."""
        if self.post_mortem.allocated_bytes is None:
            return Unknown("no allocator figures")
        left_bytes = self.post_mortem.allocated_bytes - self.post_mortem.breakdown.total_bytes
        return left_bytes if left_bytes >= 0 else Unknown("the figures are of different moments")

    @property
    def outside_bytes(self) -> Value:
        """The bytes that others held of the device: other processes, CUDA contexts, the driver."""
        found = self.post_mortem
        if found.device_total_bytes is None or found.device_free_bytes is None or found.reserved_bytes is None:
            return Unknown("the device did not say")
        left_bytes = found.device_total_bytes - found.device_free_bytes - found.reserved_bytes
        return left_bytes if left_bytes >= 0 else Unknown("the figures are of different moments")

    @property
    def total_bytes(self) -> int | None:
        """The sum of the ledger: the device, or the limit that the process had set itself where that was nearer."""
        return self.post_mortem.device_limit_bytes if self.is_limited else self.post_mortem.device_total_bytes

    @property
    def free_bytes(self) -> int | None:
        """Bytes that the process could still reserve; None if unknown."""
        free_bytes, left_bytes = self.post_mortem.device_free_bytes, self._left_bytes
        return left_bytes if self.is_limited else free_bytes

    @property
    def is_limited(self) -> bool:
        """Return whether less was left by the limit that the process had set itself than was free on the device."""
        free_bytes, left_bytes = self.post_mortem.device_free_bytes, self._left_bytes
        return left_bytes is not None and (free_bytes is None or left_bytes < free_bytes)

    @property
    def _left_bytes(self) -> int | None:
        found = self.post_mortem
        if found.device_limit_bytes is None or found.reserved_bytes is None:
            return None
        return max(0, found.device_limit_bytes - found.reserved_bytes)

    @property
    def remedies(self) -> list[Remedy]:
        """The changes that would have made a larger batch fit on this device, the most useful first."""
        total_bytes = self.total_bytes
        if isinstance(self.expected, Unknown) or total_bytes is None:
            return []
        return self.expected.remedies(total_bytes, self._gpu(total_bytes))[:_BEST_REMEDIES]

    def _gpu(self, total_bytes: int) -> Gpu | None:
        """Describe the GPU that it ran on, as far as known."""
        found = self.post_mortem
        if found.device is None or found.compute_capability is None:
            return None
        return RealGpu(
            index=found.device,
            uuid=found.device_uuid,
            name=found.device_name,
            total_bytes=total_bytes,
            reserved_bytes=0,
            used_bytes=0,
            compute_capability=found.compute_capability,
            pids=(),
        ).describe()


def open_case(process: ProbedProcess) -> Case | None:
    """Open the post-mortem of a process; None if memory never ran out.

    Raises:
        WireError: its documents are not to be trusted.
    """
    post_mortem = read_document(PostMortem, process.files, process.uid)
    if process.end is not None and process.state is ProcessState.KILLED_FOR_MEMORY:
        post_mortem = _of_kill(process, process.end)
    if post_mortem is None:
        return None
    try:
        trained = read_document(Trained, process.files, process.uid)
    except WireError as error:
        return Case(process, post_mortem, Unknown(str(error)))
    if trained is None:
        return Case(process, post_mortem, Unknown("the probe had not listed the parameters yet"))
    found = {bucket: post_mortem.breakdown[bucket] for bucket in FIXED}
    devices = {CPU if post_mortem.device is None else post_mortem.device}
    return Case(process, post_mortem, expect(trained, found, process.process.world_size, devices))


def _of_kill(process: ProbedProcess, end: End) -> PostMortem:
    """Make the post-mortem of a process that the kernel killed: nobody wrote one, so its last sample represents it."""
    sample = next((one for one in process.samples if not one.is_on_gpu), None)
    found = {} if sample is None else {bucket.value: sample.buckets[bucket] for bucket in FIXED}
    return PostMortem(
        step=process.step,
        wall_ns=round(end.time_s * 1e9),
        device=CPU,
        buckets={name: size for name, size in found.items() if isinstance(size, int)},
        fatal=True,
        resident_bytes=end.resident_bytes,
        limit_bytes=end.limit_bytes,
        limit_owner=end.limit_owner,
    )


def case_json(case: Case) -> dict[str, object]:
    """Return the case as one object."""
    return {
        "event": "post_mortem",
        "schema": SCHEMA,
        "pid": case.process.files.pid,
        "rank": case.process.process.rank,
        **msgspec.to_builtins(case.post_mortem),
        "free_bytes": case.free_bytes,
        "grew_bytes_a_step": case.grew.bytes or None,
        "expected": None if isinstance(case.expected, Unknown) else _expected_json(case.expected),
        "remedies": [
            {**picked(one.technique, "name", "option"), **picked(one, "saved_bytes", "max_batch_size")}
            for one in case.remedies
        ],
        "unavailable": {"expected": case.expected.reason} if isinstance(case.expected, Unknown) else {},
    }


def _expected_json(expected: Expected) -> dict[str, object]:
    buckets = expected.at(0).breakdown.as_json(FIXED)
    return {"model": expected.shape.name, "assumed": list(expected.assumed), "buckets": buckets}


def case_lines(case: Case, now_s: float | None = None) -> list[str]:
    """Write the case for a person."""
    found = case.post_mortem
    when = ago((time.time() if now_s is None else now_s) - found.wall_ns / 1e9)
    lines = [f"{case.process.title} {case.what_happened} in step {found.step + 1:,}, {when}{_ending(case)}"]
    lines += growth_lines(case)
    lines += request_lines(case)
    lines += ["", *_ledger_lines(case)]
    lines += fragmentation_lines(found)
    lines += ["", *_formula_lines(case)]
    return [printable(line) for line in lines]


def _ending(case: Case) -> str:
    if case.process.state in FOR_MEMORY:
        return "" if case.process.state is ProcessState.KILLED_FOR_MEMORY else ", and ended"
    if case.process.end is not None:
        return f", and went on; later: {case.process.end.phrase}"
    return ", and went on, as it seems: the error was not seen to end it"


def growth_lines(case: Case) -> Iterator[str]:
    """Yield how much each step kept, with the line that made it, and what to do, where memory grew until it ran out."""
    if not case.grew.bytes:
        return
    least_bytes = case.grew.bytes / _SMALL_SHARE
    places = [kept_place(one) for one in case.post_mortem.kept if one.source and one.bytes >= least_bytes]
    grew = f"memory grew {format_bytes(case.grew.bytes)} a step"
    if places:
        yield f"{grew}, made at {'; '.join(places[:_MOST_PLACES])} and never released: fix that first"
    else:
        yield f"{grew} and was never released: fix that first; `gpumem-tui look PID` on the next run names the line"


@dataclass(frozen=True)
class Confirmed:
    """The memory of a training at its peak, as a trial had it before.

    Attributes:
        breakdown: of what was allocated. `used_bytes`: of the device, with the CUDA context.
    """

    breakdown: Breakdown
    reserved_bytes: int
    used_bytes: int


_REST = "activations, batch data and the rest"
_BESIDE = "other processes, CUDA contexts, driver"


def grown_words(case: Case, before: Confirmed) -> str:
    """Say which buckets have more than a trial confirmed, the one that grew most first; empty for host memory.

    The request that failed belongs to activations and the rest.
    """
    found, rest_bytes = case.post_mortem, case.rest_bytes
    if found.device in (None, CPU) or found.reserved_bytes is None or found.allocated_bytes is None:
        return ""
    fixed_bytes = sum(before.breakdown[bucket] for bucket in FIXED)
    total_bytes = before.breakdown.total_bytes
    rows: list[tuple[str, int, Value]] = [
        (bucket.title, before.breakdown[bucket], found.breakdown[bucket]) for bucket in FIXED
    ]
    asked_bytes = found.requested_bytes or 0
    wanted = rest_bytes if isinstance(rest_bytes, Unknown) else rest_bytes + asked_bytes
    rows.append((_REST, total_bytes - fixed_bytes, wanted))
    cached_bytes = max(0, found.reserved_bytes - found.allocated_bytes)
    rows.append((Bucket.CACHE.title, before.reserved_bytes - total_bytes, cached_bytes))
    rows.append((_BESIDE, before.used_bytes - before.reserved_bytes, case.outside_bytes))
    grown = [(now - then, title, then, now) for title, then, now in rows if isinstance(now, int) and now > then]
    grown = [one for one in sorted(grown, reverse=True) if one[0] >= max(MIB, total_bytes // 100)]
    if not grown:
        return "no bucket had more than the trial confirmed"
    asked = f", {format_bytes(asked_bytes)} of it asked for" if asked_bytes else ""
    said = (
        f"{title} {format_range(Range(then, now)).replace('–', ' → ')}{asked if title == _REST else ''}"
        for _, title, then, now in grown
    )
    return f"since the trial these grew: {'; '.join(said)}"


def request_lines(case: Case) -> Iterator[str]:
    """Yield what was asked for, where, and what was free; of host memory what the process held, of which limit."""
    found = case.post_mortem
    if found.requested_bytes is not None:
        about = "about " if found.requested_is_rounded else ""
        where = f" at {found.source}" if found.source else ""
        free = "" if case.free_bytes is None else f", {format_bytes(case.free_bytes)} was free"
        kind = f" ({found.device_name})" if found.device_name else ""
        device = "" if found.device is None else f" on {device_name(found.device)}{kind}"
        yield f"the failed request: {about}{format_bytes(found.requested_bytes)}{device}{where}{free}"
        if case.is_limited and found.device_limit_bytes is not None:
            limit = f"{format_bytes(found.device_limit_bytes)} (torch.cuda.set_per_process_memory_fraction)"
            device_free = found.device_free_bytes
            more = "" if device_free is None else f"; the device had {format_bytes(device_free)} free"
            yield f"the process limits itself to {limit}{more}"
    elif found.message:
        where = f" at {found.source}" if found.source else ""
        yield f"the error: {found.message}{where}"
    if held := memory_phrase(found.resident_bytes, found.limit_bytes, found.limit_owner):
        yield f"host memory: {held}"


def ledger_rows(case: Case) -> Iterator[tuple[Bucket, str, Value]]:
    """Yield what filled the device, row by row, each with the bucket that it is drawn as; they sum to `total_bytes`.

    The process's own limit is of what its allocator reserves, so what others hold of the device is no part of that. For
    host memory, the others' share and the total are unknown.
    """
    found = case.post_mortem
    for bucket in FIXED:
        yield bucket, bucket.title, found.breakdown[bucket]
    rest_bytes, grown_bytes = case.rest_bytes, case.grown_bytes
    if grown_bytes:
        yield Bucket.OTHER, f"kept by the last {case.grown_steps:,} steps", grown_bytes
    rest_bytes = rest_bytes - grown_bytes if isinstance(rest_bytes, int) else rest_bytes
    yield Bucket.ACTIVATIONS, _REST, rest_bytes
    if found.allocated_bytes is not None and found.reserved_bytes is not None:
        yield Bucket.CACHE, Bucket.CACHE.title, max(0, found.reserved_bytes - found.allocated_bytes)
    if found.device != CPU and not case.is_limited:
        yield Bucket.OTHER_PROCESSES, _BESIDE, case.outside_bytes
    if case.free_bytes is not None:
        yield Bucket.FREE, Bucket.FREE.title, case.free_bytes


def _ledger_lines(case: Case) -> Iterator[str]:
    rows = [(title, value) for _, title, value in ledger_rows(case)]
    if case.total_bytes is not None:
        rows.append((f"= {total_title(case)}", case.total_bytes))
    for title, value in rows:
        yield f"  {'–' if isinstance(value, Unknown) else format_bytes(value):>12}  {title}"


def total_title(case: Case) -> str:
    """Return the name of what the ledger sums to."""
    return "the process's own limit" if case.is_limited else "device"


def fragmentation_lines(found: PostMortem) -> Iterator[str]:
    """Yield a line if the request failed only because what was free lay in pieces."""
    pieces_bytes, requested_bytes = found.inactive_split_bytes, found.requested_bytes
    if pieces_bytes is not None and requested_bytes is not None and pieces_bytes >= requested_bytes:
        yield (
            f"the cache held {format_bytes(pieces_bytes)} in pieces too small for the request: "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may help"
        )


def _formula_lines(case: Case) -> Iterator[str]:
    expected = case.expected
    if isinstance(expected, Unknown):
        yield f"no prediction to compare with: {expected.reason}"
        return
    recipe = expected.recipe
    yield f"the formula for {expected.shape.name}, {recipe.precision}, {recipe.optimizer}:"
    yield f"  assumed: {'; '.join(expected.assumed) or 'nothing'}"
    predicted, found = expected.at(0).breakdown, case.post_mortem.breakdown
    for bucket in FIXED:
        error = f" ({(predicted[bucket] - found[bucket]) / found[bucket]:+.1%})" if found[bucket] else ""
        yield f"  {f'{bucket.title}:':<17}{format_bytes(predicted[bucket])}, found {format_bytes(found[bucket])}{error}"
    total_bytes = case.total_bytes
    if isinstance(case.rest_bytes, int) and not case.grew.bytes:
        yield f"  the rest is what about {expected.samples_held(case.rest_bytes)} samples of a batch hold"
    if total_bytes is not None:
        fits = expected.max_batch_size(total_bytes)
        yield f"  largest batch in {format_bytes(total_bytes)}, {DEFAULT_HEADROOM:.0%} left free: {fits:,}"
    if case.remedies:
        helped = "would only have put it off" if case.grew.bytes else "would have helped"
        yield f"what {helped}, with the largest batch that then fits:"
    for remedy in case.remedies:
        yield f"  {remedy.max_batch_size:>6,}  {remedy}"
