"""What a plan for a user's command comes to: any GPU, any batch size and every change, from traces that are made."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from gpumem_tui.catalog.loader import gpus
from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.accumulation import Accumulation, accumulation
from gpumem_tui.formula.changes import SHARED_BY_DEFAULT, STAGES
from gpumem_tui.formula.recipe import Sharding
from gpumem_tui.memory import Breakdown, Bucket, Range, Unknown
from gpumem_tui.plan.command_runs import WhatIf
from gpumem_tui.plan.injected import OFFLOADED, CommandChange, sharded_over
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.predicting import Predicted
from gpumem_tui.search.prediction import Fit, Traced
from gpumem_tui.simulator.profile import CUBLAS_WORKSPACE, profile_for
from gpumem_tui.simulator.replay import AffineTrace, BatchFinder
from gpumem_tui.simulator.timeline import Timeline

_SHARDED: dict[Sharding, tuple[Bucket, ...]] = {
    "zero1": (Bucket.OPTIMIZER,),
    "zero2": (Bucket.OPTIMIZER, Bucket.GRADIENTS),
    "zero3": (Bucket.OPTIMIZER, Bucket.GRADIENTS, Bucket.PARAMETERS),
}


@dataclass(frozen=True)
class CommandPlan:
    """A command's traces.

    Attributes:
        config: the GPU they were made for.
        predicted: the command as it is.
        what_ifs: the changes tried so far, and those that cannot be made.
    """

    config: SearchConfig
    batch_size: int
    predicted: Predicted
    what_ifs: tuple[WhatIf, ...] = ()

    @property
    def base(self) -> Traced:
        """The trace of the command as it is."""
        traced = self.predicted.prediction.traced
        assert isinstance(traced, Traced), "a command at a given batch size is traced or fails"
        return traced

    @property
    def says_batch(self) -> bool:
        """Whether the command's line says its batch size; else `batch_size` stands for whatever it is."""
        command = self.config.workload.command
        return command is None or command.says_batch

    @property
    def size(self) -> str:
        """The planned batch size in words."""
        return f"batch {self.batch_size:,}" if self.says_batch else "the command's own batch"

    @property
    def ranks(self) -> int:
        """Of the command; each has a GPU."""
        return self.config.workload.recipe.gpus

    @property
    def accumulation(self) -> Accumulation | None:
        """Passes per optimizer step that reach the wanted global batch, or one pass; None: the batch is not known."""
        if not self.says_batch:
            return None
        target = self.config.target_batch or self.batch_size * self.ranks
        return accumulation(target, self.batch_size, self.ranks)

    def on(self, gpu: Gpu, traced: Traced | None = None) -> Traced:
        """A trace (the command's own, if none is given) as another GPU would have it.

        The device's memory and the CUDA context are that GPU's, and so is cuBLAS's workspace; kernels are taken to be
        the same, which `same_kernels` tells.
        """
        traced = traced or self.base
        made_on = self.config.device.gpu
        if gpu == made_on:
            return traced
        version = self.predicted.ready.torch_version
        then, now = profile_for(version, made_on), profile_for(version, gpu)
        trace = _with_workspace(traced.trace, then.cublas_workspace_bytes, now.cublas_workspace_bytes)
        return replace(
            traced,
            trace=trace,
            capacity_bytes=gpu.cuda_total_bytes - now.context_bytes,
            allowed_bytes=None,
            profile=now.name,
            context_bytes=now.context_bytes,
            context_source=now.context_source,
            total_range=gpu.cuda_total_range,
            context_range=now.context_range,
            finder=None,
            _runs={},
        )

    def same_kernels(self, gpu: Gpu) -> bool:
        """Whether kernels choose and split their work there as on the GPU that was traced."""
        made_on = self.config.device.gpu
        return (gpu.compute_capability, gpu.multiprocessors) == (made_on.compute_capability, made_on.multiprocessors)


def _with_workspace(trace: AffineTrace, then_bytes: int, now_bytes: int) -> AffineTrace:
    if then_bytes == now_bytes:
        return trace

    def changed(sizes: tuple[int, ...], run: AffineTrace | Timeline) -> tuple[int, ...]:
        ours = {index for index, site in enumerate(run.site_table) if site.operator == CUBLAS_WORKSPACE}
        return tuple(now_bytes if site in ours else size for size, site in zip(sizes, run.sites, strict=True))

    apart = tuple((size, replace(run, sizes=changed(run.sizes, run))) for size, run in trace.apart)
    return replace(trace, constants=changed(trace.constants, trace), apart=apart)


@dataclass(frozen=True)
class GpuRow:
    """One GPU of the catalog.

    Attributes:
        free: what is left there, with the most and with the least of what is not known; below zero: what is missing.
        largest: the largest batch that fits, or why that is not known; `may_fit`: the largest that may.
    """

    gpu: Gpu
    fit: Fit
    free_bytes: int
    free: Range
    largest: int | Unknown
    may_fit: int | Unknown
    is_exact: bool

    @property
    def fits(self) -> bool:
        """Whether it fits with the most that is possible."""
        return self.fit == "fits"


@dataclass(frozen=True)
class BatchRow:
    """One batch size on one GPU."""

    batch_size: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_used_bytes: int
    device_used_range: Range
    fit: Fit

    @property
    def fits(self) -> bool:
        """Whether it fits with the most that is possible."""
        return self.fit == "fits"


@dataclass(frozen=True)
class Place:
    """What is held at the peak by one place of the program; layers of one kind are counted together."""

    bucket: Bucket
    module: str
    source: str
    size_bytes: int


@dataclass(frozen=True)
class TechniqueRow:
    """A technique, as it turns out for the command.

    Attributes:
        by: how the figures are known: ``traced``: by a run with the change made; ``formula``: worked out from the
            command's own trace.
        reserved_bytes, buckets: at the peak; None where only the allocated bytes are worked out.
        saved_bytes: of the allocated peak; negative where it takes more.
        largest: the largest batch that fits with it, or why that is not known.
    """

    change: CommandChange
    by: Literal["traced", "formula"]
    peak_bytes: int
    reserved_bytes: int | None
    buckets: Breakdown | None
    saved_bytes: int
    fits: bool
    largest: int | Unknown


@dataclass(frozen=True)
class NotTried:
    """A technique that cannot be tried here, and why."""

    change: CommandChange
    reason: str


class CommandAnswers:
    """What the traces say of one GPU.

    Args:
        gpu: any; the one that was traced answers exactly.
        finder: of the command's trace as that GPU has it, where it is shared with others.
    """

    def __init__(self, plan: CommandPlan, gpu: Gpu | None = None, finder: BatchFinder | None = None) -> None:
        self.plan = plan
        self.gpu = gpu or plan.config.device.gpu
        self.traced = plan.on(self.gpu)
        if finder is not None:
            self.traced = replace(self.traced, finder=finder)

    @cached_property
    def fit(self) -> Fit:
        """Whether the command fits at the planned batch size, as far as is known."""
        return self.traced.fit(self.plan.batch_size)

    @property
    def fits(self) -> bool:
        """Whether it does with the most that is possible."""
        return self.fit == "fits"

    @cached_property
    def peak_bytes(self) -> int:
        """Allocated at the planned batch size."""
        return self.traced.at(self.plan.batch_size).peak_allocated_bytes

    @property
    def free_bytes(self) -> int:
        """What the device has left at the planned batch size; negative: what is missing."""
        return self.gpu.cuda_total_bytes - self.traced.device_used_bytes(self.plan.batch_size)

    @property
    def free(self) -> Range:
        """The same with the most and with the least of what is not known."""
        return self.traced.free_range(self.plan.batch_size)

    @property
    def largest(self) -> int | Unknown:
        """The largest batch that fits, or why that is not known."""
        return self.traced.max_batch_size

    @property
    def may_fit(self) -> int | Unknown:
        """The largest batch that may fit, or why that is not known."""
        return self.traced.may_fit_batch_size

    def batches(self) -> list[BatchRow]:
        """Powers of two up to the largest batch that fits, it and the next one, and the planned one."""
        sizes = {self.plan.batch_size}
        largest = self.largest
        if isinstance(largest, int):
            sizes |= {1 << power for power in range(largest.bit_length())} | {max(1, largest), largest + 1}
        return [self._batch(size) for size in sorted(sizes)]

    def _batch(self, size: int) -> BatchRow:
        replay = self.traced.at(size)
        used = self.traced.device_used_bytes(size)
        return BatchRow(
            size,
            replay.peak_allocated_bytes,
            replay.peak_reserved_bytes,
            used,
            self.traced.device_used_range(size),
            self.traced.fit(size),
        )

    def places(self) -> list[Place]:
        """What holds the peak, the largest first."""
        totals: Counter[tuple[Bucket, str, str]] = Counter()
        for held in self.traced.held_at_peak(self.plan.batch_size):
            module = re.sub(r"\b\d+\b", "*", held.site.module)
            totals[held.bucket, module, held.site.source] += held.size_bytes
        return [Place(*where, size_bytes) for where, size_bytes in totals.most_common()]

    def techniques(self) -> tuple[list[TechniqueRow], list[NotTried]]:
        """What was tried, the best first, as `plan.techniques` orders it, then the cheapest; and what cannot be."""
        tried: list[TechniqueRow] = []
        others: list[NotTried] = []
        for row in self._rows():
            if isinstance(row, NotTried):
                others.append(row)
            else:
                tried.append(row)
        tried.sort(
            key=lambda row: (not (row.fits or self.fits), -_count(row.largest), -row.saved_bytes, row.change.price)
        )
        return tried, others

    def _rows(self) -> Iterator[TechniqueRow | NotTried]:
        for what_if in self.plan.what_ifs:
            if isinstance(what_if.traced, Unknown):
                yield NotTried(what_if.change, what_if.traced.reason)
                continue
            traced = self.plan.on(self.gpu, what_if.traced)
            replay = traced.at(self.plan.batch_size)
            yield TechniqueRow(
                what_if.change,
                "traced",
                replay.peak_allocated_bytes,
                replay.peak_reserved_bytes,
                replay.breakdown,
                self.peak_bytes - replay.peak_allocated_bytes,
                traced.fits(self.plan.batch_size),
                traced.max_batch_size,
            )
        yield self._without(OFFLOADED, (Bucket.OPTIMIZER,), 0.0)
        if not self.plan.base.is_sharded and self.plan.ranks == 1:
            for stage in STAGES:
                yield self._without(sharded_over(SHARED_BY_DEFAULT, stage), _SHARDED[stage], 1 / SHARED_BY_DEFAULT)

    def _without(self, change: CommandChange, buckets: Iterable[Bucket], kept: float) -> TechniqueRow:
        """With a share of some buckets only: the highest of the phases' peaks less what leaves of each."""
        peak = 0
        for phase in self.traced.at(self.plan.batch_size).phases:
            held = sum(phase.breakdown[bucket] for bucket in buckets)
            peak = max(peak, phase.peak_allocated_bytes - held + int(kept * held))
        saved = max(0, self.peak_bytes - peak)
        total = self.traced.total_range
        roomier = replace(
            self.traced,
            capacity_bytes=self.traced.capacity_bytes + saved,
            total_range=None if total is None else total + Range(saved, saved),
            _runs={},
        )
        fits, largest = roomier.fits(self.plan.batch_size), roomier.max_batch_size
        return TechniqueRow(change, "formula", self.peak_bytes - saved, None, None, saved, fits, largest)


def gpu_rows(plan: CommandPlan) -> list[GpuRow]:
    """Every GPU of the catalog, the smallest first."""
    finders: dict[int, BatchFinder] = {}
    rows = []
    for gpu in sorted(gpus().values(), key=lambda gpu: (gpu.total_bytes, gpu.title)):
        traced = plan.on(gpu)
        workspace = profile_for(plan.predicted.ready.torch_version, gpu).cublas_workspace_bytes
        finder = finders.setdefault(workspace, BatchFinder(traced.trace, traced.settings))
        answers = CommandAnswers(plan, gpu, finder)
        free_bytes, free = answers.free_bytes, answers.free
        rows.append(
            GpuRow(gpu, answers.fit, free_bytes, free, answers.largest, answers.may_fit, plan.same_kernels(gpu))
        )
    return rows


def _count(largest: int | Unknown) -> int:
    return largest if isinstance(largest, int) else 0


@dataclass(frozen=True)
class CommandFigures:
    """All that a plan for a command says of one GPU, worked out: it takes a moment."""

    answers: CommandAnswers
    batches: tuple[BatchRow, ...]
    places: tuple[Place, ...]
    tried: tuple[TechniqueRow, ...]
    not_tried: tuple[NotTried, ...]

    @classmethod
    def of(cls, plan: CommandPlan, gpu: Gpu) -> CommandFigures:
        """Of a GPU."""
        answers = CommandAnswers(plan, gpu)
        tried, not_tried = answers.techniques()
        return cls(answers, tuple(answers.batches()), tuple(answers.places()), tuple(tried), tuple(not_tried))
