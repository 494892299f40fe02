"""A plan for a user's command: any GPU, any batch size and every change, from the runs that are made for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from gpumem_tui.catalog.loader import gpus
from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.accumulation import Accumulation, accumulation
from gpumem_tui.formula.recipe import Sharding
from gpumem_tui.formula.techniques import (
    DEEPSPEED,
    INJECTED,
    MORE_RANKS,
    SHARDED,
    SHARDS,
    SHARED_BY_DEFAULT,
    STAGES,
    NotApplicable,
    Price,
    Technique,
    catalog_techniques,
    injected,
    sharded,
)
from gpumem_tui.memory import GIB, Bucket, Unknown, format_bytes
from gpumem_tui.plan.answers import LargestOnGpu, TracedAnswer
from gpumem_tui.plan.combination import Combination, Effect, Techniques
from gpumem_tui.plan.dialects import sharded_line, spoken, typed_changes, typed_command, with_lines
from gpumem_tui.plan.replayed import effect_on, replayed
from gpumem_tui.run.children import ChildDied
from gpumem_tui.run.control import Control, Unusable
from gpumem_tui.run.events import PROPOSE, Ready
from gpumem_tui.search import predicting
from gpumem_tui.search.beside import as_beside
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.fragmentation import remedy
from gpumem_tui.search.frameworks import line_for_any_batch
from gpumem_tui.search.predicting import Predicted, WhileTracing
from gpumem_tui.search.prediction import Fit, Traced
from gpumem_tui.simulator.allocator.finder import BatchFinder
from gpumem_tui.simulator.allocator.profile import CUBLAS_WORKSPACE, HIPBLAS_WORKSPACE, profile_for
from gpumem_tui.simulator.allocator.replay import AffineTrace
from gpumem_tui.simulator.allocator.timeline import Timeline
from gpumem_tui.workload.spec import WorkloadSpec

Watch = Callable[[WhileTracing], None]
DIED = "its run ended early"
_FROM_OUTSIDE = {*INJECTED} - {MORE_RANKS, *SHARDS, "autocast"}  # which needs nothing that may be missing


def _traced_in(predicted: Predicted) -> Traced:
    traced = predicted.prediction.traced
    assert isinstance(traced, Traced), "a command at a given batch size is traced or fails"
    return traced


# The plan


@dataclass(frozen=True)
class CommandPlan:
    """A command, its traces and the GPU it is planned for: a `Subject` without a closed form.

    Attributes:
        config: the GPU that the traces were made for.
        predicted: the command as it is.
        tried: what was run so far, in its order, and the changes that cannot be made: a change alone at the planned
            batch (`what_ifs`), and sets with smaller passes (`together`).
        elsewhere: another GPU that it is planned for; None for the one that was traced, which answers exactly.
    """

    config: SearchConfig
    batch_size: int
    predicted: Predicted
    tried: tuple[Combination, ...] = ()
    elsewhere: Gpu | None = None

    def at(self, batch_size: int) -> CommandPlan:
        """Return the plan at another batch size."""
        return replace(self, batch_size=batch_size)

    def is_alone(self, one: Combination) -> bool:
        """Return whether it is one change at the planned batch, which shows what that change saves."""
        return len(one.changes) == 1 and one.passes == 1 and one.batch_size == self.batch_size

    @property
    def what_ifs(self) -> tuple[Combination, ...]:
        """The changes that were tried alone, and those that cannot be made; first the one that needs no run."""
        return tuple(one for one in (*self.replayed, *self.tried) if self.is_alone(one))

    @property
    def together(self) -> tuple[Combination, ...]:
        """The sets of changes that were run, and those that fit by a replay of what was run."""
        return tuple(one for one in (*self.tried, *self.replayed) if not self.is_alone(one))

    @cached_property
    def replayed(self) -> tuple[Combination, ...]:
        """The command under the setting of the allocator that helps it most, and what was run and fits with one only.

        Nothing is run for it: the traces are replayed.
        """
        ran = [one for one in self.tried if isinstance(one.traced, Traced) and not self.fits_with(one)]
        as_it_is = Combination((), self.batch_size, traced=self.base)
        found = [(one, self._replayed(one)) for one in (as_it_is, *ran)]
        return tuple(new for one, new in found if new is not None and (not one.changes or self.fits_with(new)))

    def _replayed(self, one: Combination) -> Combination | None:
        return None if isinstance(one.traced, Unknown) else replayed(one, self.there(one.traced))

    @property
    def headroom(self) -> float:
        """Nothing: a command's largest batch is that of the whole GPU."""
        return 0.0

    @property
    def gpu(self) -> Gpu:
        """The GPU that it is planned for."""
        return self.elsewhere or self.config.device.gpu

    @property
    def base(self) -> Traced:
        """The trace of the command as it is, on the GPU that was traced."""
        return _traced_in(self.predicted)

    @property
    def says_batch(self) -> bool:
        """Return whether the command's line states its batch size; else `batch_size` is only a label."""
        command = self.config.workload.command
        return command is None or command.says_batch

    @property
    def size(self) -> str:
        """The planned batch size in words."""
        return f"batch {self.batch_size:,}" if self.says_batch else "the command's own batch"

    @property
    def ranks(self) -> int:
        """The command's processes; each has a GPU."""
        return self.config.workload.recipe.gpus

    @property
    def accumulation(self) -> Accumulation | None:
        """Passes per optimizer step that reach the wanted global batch, or one pass; None: the batch is not known."""
        if not self.says_batch:
            return None
        target = self.config.target_batch or self.batch_size * self.ranks
        return accumulation(target, self.batch_size, self.ranks)

    def there(self, traced: Traced) -> Traced:
        """Return a trace of the command as the planned GPU would have it.

        The device's memory and the CUDA context are that GPU's, and so is cuBLAS's workspace; kernels are
        assumed equal, see `is_exact`.
        """
        made_on = self.config.device.gpu
        if self.gpu == made_on:
            return traced
        version = self.predicted.ready.torch_version
        then, now = profile_for(version, made_on), profile_for(version, self.gpu)
        trace = _with_workspace(traced.trace, then.cublas_workspace_bytes, now.cublas_workspace_bytes)
        used = now.using(self.gpu, traced.ready.groups, traced.ready.libraries)
        return traced.with_trace(trace).on(self.gpu, Ready.of(version, used))

    def answer(self, finder: BatchFinder | None = None) -> TracedAnswer:
        """Carry the command's trace over to the planned GPU.

        Args:
            finder: of the command's trace as that GPU has it, where it is shared with others.
        """
        traced = self.there(self.base)
        return TracedAnswer(self, traced if finder is None else replace(traced, finder=finder))

    @property
    def fitting(self) -> Combination | None:
        """The cheapest that was run and fits on the planned GPU: smaller passes, one change or a set; None for none."""
        fitting = (one for one in (*self.together, *self.what_ifs) if self.fits_with(one))
        return min(fitting, key=lambda one: one.price, default=None)

    @property
    def cost(self) -> Price | None:
        """The price of the cheapest that fits, which is none where the command does as it is; None for nothing."""
        if self.fits_as_it_is:
            return Price()
        return None if self.fitting is None else self.fitting.price

    @property
    def fits_as_it_is(self) -> bool:
        """Return whether the command fits on the planned GPU with no change; by an estimate, may fit."""
        return self.there(self.base).fits_leaving(self.batch_size, 0)

    def fits_with(self, one: Combination) -> bool:
        """Return whether the command fits on the planned GPU with changes that were run; by an estimate, may fit."""
        if isinstance(one.traced, Unknown):
            return False
        return self.there(one.traced).fits_leaving(one.batch_size, one.beside_bytes)

    def fit_with(self, one: Combination) -> Fit:
        """Return how surely the command fits with changes, where their run ended."""
        if isinstance(one.traced, Unknown):
            return "does not fit"
        return self.there(one.traced).fit(one.batch_size, one.beside_bytes)

    def peak_bytes(self, one: Combination) -> int | Unknown:
        """Return the allocated peak on the planned GPU with changes that were run, or why their run gave none."""
        if isinstance(one.traced, Unknown):
            return one.traced
        return self.there(one.traced).at(one.batch_size).peak_allocated_bytes + one.beside_bytes

    def device_used_bytes(self, one: Combination) -> int | Unknown:
        """Return what the planned GPU holds at the peak with changes that were run, or why their run gave none."""
        if isinstance(one.traced, Unknown):
            return one.traced
        return self.there(one.traced).device_used_bytes(one.batch_size) + one.beside_bytes

    def least_used_bytes(self, one: Combination) -> int:
        """Return what a set that was run takes of the planned GPU, under the setting of the allocator that helps it."""
        assert isinstance(one.traced, Traced), "it was run"
        there = self.there(one.traced)
        found = remedy(there, one.batch_size, one.beside_bytes)
        chosen = there if found is None else found.after
        return chosen.device_used_bytes(one.batch_size) + one.beside_bytes

    @property
    def spared(self) -> tuple[Combination, ...]:
        """The changes that were not run, as they were not needed."""
        return tuple(one for one in self.tried if one.is_spared)

    @property
    def is_exact(self) -> bool:
        """Return whether kernels choose and split their work on the planned GPU as on the one that was traced."""
        here, made_on = self.gpu, self.config.device.gpu
        return (here.sm, here.multiprocessors) == (made_on.sm, made_on.multiprocessors)


def _with_workspace(trace: AffineTrace, then_bytes: int, now_bytes: int) -> AffineTrace:
    if then_bytes == now_bytes:
        return trace

    def changed(run: Timeline) -> Timeline:
        ours = {
            index for index, site in enumerate(run.site_table) if site.operator in (CUBLAS_WORKSPACE, HIPBLAS_WORKSPACE)
        }
        sizes = (now_bytes if site in ours else size for size, site in zip(run.sizes, run.sites, strict=True))
        return replace(run, sizes=tuple(sizes))

    apart = tuple((size, changed(run)) for size, run in trace.apart)
    return replace(trace, at_none=changed(trace.at_none), apart=apart)


# The runs


class Runs(Protocol):
    """An object that runs a command for its plan, such as `CommandRuns`."""

    @property
    def config(self) -> SearchConfig:
        """The command and the GPU that is traced."""

    @property
    def batch_size(self) -> int:
        """The planned batch size."""

    @property
    def wanted(self) -> tuple[str, ...]:
        """The changes that were asked for, by key; empty for none in particular."""

    def trace(self, control: Control | None, watch: Watch) -> tuple[Predicted, list[Combination], list[Combination]]:
        """Trace the command as it is; return that, the changes worth a run, and those that cannot be made."""

    def run(self, one: Combination, plan: CommandPlan, control: Control | None, watch: Watch) -> Combination:
        """Trace the command with changes made to it, in smaller passes perhaps; what goes wrong then is the answer."""


@dataclass(frozen=True)
class CommandRuns:
    """The runs of one plan.

    Attributes:
        wanted: the changes to try, by key; empty for all that can be made.
    """

    config: SearchConfig
    batch_size: int
    wanted: tuple[str, ...] = ()

    def trace(self, control: Control | None, watch: Watch) -> tuple[Predicted, list[Combination], list[Combination]]:
        """Trace the command as it is; return that, the changes worth a run, and those that cannot be made.

        Raises:
            Unusable, ChildDied, Cancelled: as `predicting.predict`.
        """
        predicted = predicting.predict(replace(self.config, change=PROPOSE), control, self.batch_size, watch=watch)
        base = _traced_in(predicted)
        reasons = {
            **dict(base.done.changes),
            MORE_RANKS: "" if base.done.is_sharded else "each rank would hold this much",
        }
        command = self.config.workload.command
        lines = {key for key in SHARDS if command is not None and sharded_line(command, 2, key) is not None}
        if base.done.is_sharded:
            reasons |= dict.fromkeys(SHARDS, "each rank holds its part already")
        elif SHARDED in lines:
            reasons[SHARDED] = ""
        reasons |= dict.fromkeys({*SHARDS} - {SHARDED, *lines}, "no option of its line asks for DeepSpeed")
        typed = {change.key: change for change in typed_changes(self.config)}
        reasons |= dict.fromkeys(typed, "")
        found = injected(self.config.device.gpu, self.config.workload.recipe.gpus)
        changes = [change for change in found if change.key in (*self.wanted, *lines) or change.key not in DEEPSPEED]
        every = (*(change for change in changes if change.key not in typed), *typed.values())
        asked = [spoken(change, self.config) for change in every if not self.wanted or change.key in self.wanted]
        runs = [change for change in asked if not reasons[change.key]]
        runs.sort(key=lambda change: change.key != SHARDED or change.price.gpus > 0)  # over the available GPUs
        refused = [
            Combination((change,), self.batch_size, traced=Unknown(reasons[change.key]))
            for change in asked
            if reasons[change.key]
        ]
        return predicted, [Combination((change,), self.batch_size) for change in runs], refused

    def run(self, one: Combination, plan: CommandPlan, control: Control | None, watch: Watch) -> Combination:
        """Trace the command with changes made to it; what goes wrong then is the answer.

        A change alone is traced as the command is: where that answers for every batch size, so will this. Others are
        traced at their micro-batch alone.

        Raises:
            Cancelled: the user ended it.
        """
        if plan.is_alone(one):
            return self._alone(one, plan.base, control, watch)
        return self._together(one, control, watch)

    def _alone(self, one: Combination, base: Traced, control: Control | None, watch: Watch) -> Combination:
        (change,) = one.changes
        changed, only_at, why = self._changed(change), base.done.only_at or None, base.done.not_affine
        found = self._trace(changed, control, watch, only_at, why)
        if isinstance(found, Unknown) and not changed.change and change.key in _FROM_OUTSIDE:
            # The line may ask for a package that is not installed: the same change from outside is nearly that.
            found = self._trace(replace(self.config, change=change.key), control, watch, only_at, why)
        if isinstance(found, Traced):
            change = with_lines(change, self.config, self.batch_size, found.done.written)
        return replace(one, changes=(change,), traced=found, is_spared=False)

    def _together(self, one: Combination, control: Control | None, watch: Watch) -> Combination:
        """Trace the command as it would be typed, with what cannot be typed made to it."""
        typed = typed_command(self.config, one.changes, one.passes)
        workload = _over(replace(self.config.workload, command=typed.command), one.gpus)
        keys = "+".join(change.key for change in typed.injected)
        samples = one.batch_size * one.passes * workload.recipe.gpus
        config = replace(self.config, workload=workload, change=keys, target_batch=samples)
        found = self._trace(config, control, watch, one.batch_size, "one size is enough")
        if typed.accumulates or isinstance(found, Unknown):
            return replace(one, traced=found)
        # Gradients of the passes before are there through the next one's.
        gradients = max((phase.breakdown[Bucket.GRADIENTS] for phase in found.at(one.batch_size).phases), default=0)
        return replace(one, traced=found, beside_bytes=gradients)

    def _trace(
        self, config: SearchConfig, control: Control | None, watch: Watch, size: int | None, not_affine: str
    ) -> Traced | Unknown:
        """Return a changed command's trace: at one size, or at all, and where that cannot be at the planned one."""
        try:
            found = predicting.predict(config, control, size, not_affine, watch).prediction.traced
            if isinstance(found, Unknown) and size is None:
                found = predicting.predict(config, control, self.batch_size, found.reason, watch).prediction.traced
        except Unusable as error:
            return Unknown(f"its run failed: {error}")
        except ChildDied as error:
            return Unknown(f"{DIED}: {error}")
        if isinstance(found, Traced) and (reasons := [why for _, why in found.done.changes if why]):
            return Unknown(reasons[0])
        return found

    def _changed(self, change: Technique) -> SearchConfig:
        workload = self.config.workload
        if change.key == MORE_RANKS:
            return replace(self.config, workload=_over(workload, 2 * workload.recipe.gpus))
        typed = typed_command(self.config, (change,))
        if typed.injected and change.key not in SHARDS:
            return replace(self.config, change=change.key)
        workload = _over(replace(workload, command=typed.command), change.gpus)
        return replace(self.config, workload=workload, change="+".join(one.key for one in typed.injected))


def _over(workload: WorkloadSpec, gpus: int) -> WorkloadSpec:
    """Return a workload over so many GPUs, if it has fewer."""
    return replace(workload, recipe=replace(workload.recipe, gpus=max(gpus, workload.recipe.gpus)))


# Its traces


_SHARDED: dict[Sharding, tuple[Bucket, ...]] = {
    "zero1": (Bucket.OPTIMIZER,),
    "zero2": (Bucket.OPTIMIZER, Bucket.GRADIENTS),
    "zero3": (Bucket.OPTIMIZER, Bucket.GRADIENTS, Bucket.PARAMETERS),
}


def techniques_of_command(plan: CommandPlan, answer: TracedAnswer) -> Techniques:
    """Return what was tried, the best first, of two as good the cheaper, and what cannot be, with the reason.

    Args:
        answer: of the command as it is, on the planned GPU.
    """
    others = [
        NotApplicable(change.key, change.name, one.traced.reason)
        for one in plan.what_ifs
        if isinstance(one.traced, Unknown)
        for change in one.changes
    ]
    by_price = sorted(_effects(plan, answer), key=lambda one: one.change.price)
    return Techniques(tuple(by_price), tuple(others)).by_help(fits=answer.fit == "fits")


def _effects(plan: CommandPlan, answer: TracedAnswer) -> Iterator[Effect]:
    if (setting := effect_on(answer)) is not None:
        yield setting
    alone = [one for one in plan.tried if plan.is_alone(one)]
    ran = [(change, one.traced) for one in alone if isinstance(one.traced, Traced) for change in one.changes]
    for change, trace in ran:
        traced = plan.there(trace)
        replay = traced.at(plan.batch_size)
        yield Effect(
            change,
            "traced",
            replay.peak_allocated_bytes,
            answer.peak_allocated_bytes - replay.peak_allocated_bytes,
            traced.fit(plan.batch_size),
            traced.settled_at or traced.max_batch_size,
            replay.peak_reserved_bytes,
            replay.breakdown,
            device_used_bytes=traced.device_used_bytes(plan.batch_size),
        )
    yield _without(answer, catalog_techniques()["offload-optimizer"], (Bucket.OPTIMIZER,), 0.0)
    if not plan.base.done.is_sharded and all(change.key != SHARDED for change, _ in ran):
        gpus = plan.ranks if plan.ranks > 1 else SHARED_BY_DEFAULT
        for stage in STAGES:
            yield _without(answer, sharded(stage, gpus, gpus - plan.ranks), _SHARDED[stage], 1 / gpus)


def _without(answer: TracedAnswer, change: Technique, buckets: Iterable[Bucket], kept: float) -> Effect:
    """Work out a peak with only a share of some buckets: the highest of the phases' peaks less what leaves of each."""
    batch_size, before, peak = answer.plan.batch_size, answer.peak_allocated_bytes, 0
    for phase in answer.traced.at(batch_size).phases:
        held = sum(phase.breakdown[bucket] for bucket in buckets)
        peak = max(peak, phase.peak_allocated_bytes - held + int(kept * held))
    saved = max(0, before - peak)
    gpu = answer.traced.gpu
    larger = replace(gpu, total_bytes=gpu.total_bytes + saved, cuda_total_bytes=gpu.cuda_total_bytes + saved)
    roomier = replace(answer.traced, gpu=larger, _runs={})
    fit, largest = roomier.fit(batch_size), roomier.max_batch_size
    used = answer.device_used_bytes - saved
    return Effect(change, "formula", before - saved, saved, fit, largest, device_used_bytes=used)


OnGpu = tuple[CommandPlan, TracedAnswer]
_LARGER_GPUS, _LARGER = 4, 1.02
"""GPUs larger than the planned one that are printed, and by which factor they are; the JSON has every one."""


def on_every_gpu(plan: CommandPlan) -> list[OnGpu]:
    """Return plan and answer on every GPU of the catalog, the smallest first, with what a list shows worked out."""
    finders: dict[int, BatchFinder] = {}
    found = []
    for gpu in sorted(gpus().values(), key=lambda gpu: (gpu.total_bytes, gpu.title)):
        there = replace(plan, elsewhere=as_beside(gpu, plan.gpu))
        traced = there.there(plan.base)
        workspace = profile_for(plan.predicted.ready.torch_version, gpu).cublas_workspace_bytes
        finder = finders.setdefault(workspace, BatchFinder(traced.trace, traced.settings))
        answer = there.answer(finder)
        _ = answer.fit, answer.free_range, answer.spare_bytes, answer.max_batch_size, answer.may_fit_batch_size
        found.append((there, answer))
    return found


def few_gpus(plan: CommandPlan, every: Sequence[OnGpu]) -> list[OnGpu]:
    """Return the smallest GPU that it fits on, the planned one, and the next larger ones that it fits on."""
    fitting = [(there, found) for there, found in every if found.fit == "fits"]
    here_bytes, larger = plan.gpu.total_bytes, dict[int, OnGpu]()
    for there, found in fitting:
        if there.gpu.total_bytes > here_bytes * _LARGER:
            larger.setdefault(round(there.gpu.total_bytes / GIB), (there, found))
    chosen = [there.gpu.name for there, _ in (*fitting[:1], *list(larger.values())[:_LARGER_GPUS])]
    return [(there, found) for there, found in every if there.gpu.name in (*chosen, plan.gpu.name)]


def largest_of_command(plan: CommandPlan) -> tuple[LargestOnGpu, ...]:
    """Return every GPU of the catalog as lists show it, the smallest first."""
    return tuple(
        LargestOnGpu(there.gpu, None, found.full_batch_size, there.is_exact, answer=found)
        for there, found in on_every_gpu(plan)
    )


# In words


SHARDING_NOT_RUN = "ZeRO is worked out from the command's own trace, not run"


def not_run_lines(entries: Sequence[NotApplicable]) -> Iterator[str]:
    """Yield why each change was not run; those that were skipped for one reason in one line."""
    skipped: defaultdict[str, list[NotApplicable]] = defaultdict(list)
    for entry in entries:
        why = entry.reason.removesuffix(f"; --what-if {entry.key} runs it")
        if why == entry.reason:
            yield f"{entry.name}: {why}"
        else:
            skipped[why].append(entry)
    for why, alike in skipped.items():
        names = ", ".join(entry.name for entry in alike)
        yield f"{why[:1].upper()}{why[1:]}: {names}; `--what-if {alike[0].key}` runs one, `--what-if all` every one"


def ranks_line(plan: CommandPlan) -> str:
    """Say what we know about other numbers of ranks."""
    if plan.base.done.is_sharded:
        return f"each of {plan.ranks} ranks holds its part; another number of ranks is another run (--gpus)"
    if plan.ranks > 1:
        return f"each rank holds this much, with {plan.ranks} ranks or another number"
    phases = plan.base.at(plan.batch_size).phases
    gradients = max((phase.breakdown[Bucket.GRADIENTS] for phase in phases), default=0)
    return (
        f"one rank; under DistributedDataParallel each of several would hold this and its buckets: "
        f"{format_bytes(gradients)} more, by formula (the gradients once more)"
    )


def batch_note(plan: CommandPlan) -> str:
    """Say why there is no other batch size; empty where there are."""
    command = plan.config.workload.command
    if not plan.base.done.only_at:
        return ""
    if command is None or command.takes_batch:
        return f"batch {plan.batch_size:,} only: {plan.base.done.not_affine}"
    size = ("--batch-size", str(plan.batch_size)) if plan.says_batch else ()
    typed = line_for_any_batch(plan.config, "plan", *size)
    return f"other batch sizes: {typed}"


def exactness(plan: CommandPlan) -> str:
    """Say what the figures of the planned GPU rest on."""
    return "exact" if plan.is_exact else f"traced on {plan.config.device.gpu.title}"
