"""Makes a command fit: the safe batch and its passes, what costs nothing, what was allowed, and a trial that confirms.

`fitting` is a generator of events; the last one is the command as it is to be run.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, islice

from gpumem_tui.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_NOTHING_FITS, RunError
from gpumem_tui.formula.accumulation import Accumulation, accumulation
from gpumem_tui.formula.techniques import Technique, injected, is_advisable
from gpumem_tui.memory import Range, Unknown, format_bytes
from gpumem_tui.plan.combining import OF_THE_HELD
from gpumem_tui.plan.dialects import spoken, typed_changes, typed_command, with_accumulation
from gpumem_tui.run.children import ChildDied
from gpumem_tui.run.control import Control, SideBySide, Unusable
from gpumem_tui.run.events import PROPOSE, TrialDone
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.fragmentation import EXPANDABLE, AllocatorRemedy, larger_batch
from gpumem_tui.search.passes import TRACED_PASSES, stated
from gpumem_tui.search.predicting import Predicted, WhileTracing, predicting
from gpumem_tui.search.prediction import Traced
from gpumem_tui.search.runner import TrialFinished, TrialProgress, run_trial, search
from gpumem_tui.search.strategy import Sizes
from gpumem_tui.search.verdict import Verdict
from gpumem_tui.search.words import rests_on, shortfall, used_words
from gpumem_tui.workload.command import Command

_WORTH_EXACT = 0.75
"""A batch that meets the target exactly is taken down to this share of the largest: a third more passes at most."""
MOST_TRIALS = 4
"""So many batches are tried on a real GPU, each smaller than the one before, which was out of memory."""
_STEP_BACK = 0.05
"""The share of the GPU that the next batch leaves free, once more for each that was out of memory."""
_MOST_SETS = 7
"""So many sets of changes are traced at most: all of three."""

ALLOWED = ("checkpointing", "adamw-8bit", "lora", "qlora", "autocast", "chunked-loss", "adafactor")
"""The changes that may be allowed: those that save memory and that some framework's line has words for."""
ALIASES = {"8-bit-optimizer": "adamw-8bit"}
_EVERY = Sizes()
_USUAL = ALLOWED[:3]
"""The changes that are named where nothing fits."""


# The numbers


def choose(
    safe: int,
    target: int | None,
    ranks: int = 1,
    sizes: Sizes = _EVERY,
    *,
    accumulates: bool = True,
) -> tuple[int, int]:
    """Return the batch of a pass on each GPU, and the passes of a step, as near to the target as memory allows.

    A batch that meets the target exactly is preferred where it costs little; else it is the smallest that reaches the
    target in the fewest passes.

    Args:
        safe: the largest batch that fits, one of `sizes`; 0 for none.
        target: samples wanted per optimizer step over all GPUs; None for as many as fit.
        accumulates: several passes can make a step.

    >>> choose(22, 64), choose(24, 96), choose(200, 64), choose(30, 64, accumulates=False)
    ((22, 3), (24, 4), (64, 1), (30, 1))
    """
    if target is None or not safe:
        return safe, 1
    whole = sizes.after(-(-target // ranks) - 1)
    if whole <= safe or not accumulates:
        return min(whole, safe), 1
    for size in range(safe, int(_WORTH_EXACT * safe), -1):
        if sizes.at_most(size) == size and target % (size * ranks) == 0:
            return size, target // (size * ranks)
    passes = accumulation(target, safe, ranks).steps
    return sizes.after(-(-target // (passes * ranks)) - 1), passes


# The result


@dataclass(frozen=True)
class NotMade:
    """A change that was allowed and is not made: why, and what to write for it; empty where that is not the matter."""

    change: str
    reason: str
    how: str = ""


@dataclass(frozen=True)
class Fitted:
    """A command as it is to be run.

    Attributes:
        config: of the command, with the changes in its line, and with the passes as that states them.
        safe: the largest batch that fits, of which `batch_size` may be less for the target's sake.
        remedy: the setting of the allocator; None for none.
        used: the device's bytes at the peak: of the trial, or with every unknown at its least and at its most.
        result: the trial that confirmed it; None where a trace did.
        not_made: the changes that were allowed.
    """

    config: SearchConfig
    batch_size: int
    passes: int
    safe: int
    changes: tuple[Technique, ...] = ()
    remedy: AllocatorRemedy | None = None
    traced: Traced | Unknown = field(default_factory=lambda: Unknown("not traced"), repr=False)
    used: Range = Range(0, 0)  # noqa: RUF009 - it is frozen
    result: TrialDone | None = None
    not_made: tuple[NotMade, ...] = ()

    @property
    def is_traced_only(self) -> bool:
        """Return whether a trace alone tells that it fits: no GPU of this machine, and all batch sizes are traced."""
        return self.config.device.simulated and isinstance(self.traced, Traced)

    @property
    def command(self) -> Command:
        """The command, with ``{batch}`` in its line."""
        assert self.config.workload.command is not None, "a command is made to fit"
        return self.config.workload.command

    @property
    def ranks(self) -> int:
        """Its processes; each has a GPU, and the batch."""
        return self.config.workload.recipe.pass_micro_batches

    @property
    def step(self) -> Accumulation:
        """The samples of a step."""
        made = self.batch_size * self.passes * self.ranks
        return Accumulation(self.passes, made, self.config.target_batch or made)

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables to run it with: the GPUs, and the allocator's setting."""
        gpus = self.config.terms.gpu_uuids
        found = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        return {**found, **_setting(self.remedy)}

    @property
    def line(self) -> str:
        """The command as it is typed, with its variables, and with the files that it needs written first."""
        command, size, passes = self.command, self.batch_size, self.config.passes
        variables = "".join(f"{name}={value} " for name, value in self.environment.items())
        return command.files_at(size, passes) + variables + command.text_at(size, passes)

    @property
    def words(self) -> str:
        """The batch, the passes, the memory and the changes, in a line."""
        each = f" on each of {self.ranks} GPUs" if self.ranks > 1 else ""
        step, passes = self.step, f" × {self.passes:,} passes" if self.passes > 1 else ""
        total = f" = {step.global_batch_size:,} samples a step" if passes or each else " a step"
        parts = [f"batch {self.batch_size:,}{each}{passes}{total}{self._target}"]
        total_bytes = self.config.device.gpu.cuda_total_bytes
        measured = self.result is not None and not self.config.device.simulated
        parts.append(used_words(self.used, max(total_bytes, self.used.high_bytes) if measured else total_bytes))
        if self.remedy is not None:
            parts.append("expandable segments on" if self.remedy.option == EXPANDABLE else self.remedy.option)
        parts += [f"{change.name} ({change.how})" for change in self.changes]
        if self.config.device.simulated:
            is_estimate = isinstance(self.traced, Traced) and self.traced.done.is_estimate
            parts.append(f"predicted for {self.config.where}{', an estimate' if is_estimate else ''}")
        return "; ".join(parts)

    @property
    def _target(self) -> str:
        step = self.step
        if self.config.target_batch is None or step.global_batch_size < step.target_batch:
            return ""
        if not step.exact:
            return f", {step.target_batch:,} wanted"
        is_slower = self.passes > accumulation(step.target_batch, self.safe, self.ranks).steps
        return f", as wanted ({self.safe:,} would fit)" if is_slower else ""


def _setting(remedy: AllocatorRemedy | None) -> dict[str, str]:
    return {} if remedy is None else dict([remedy.assignment.split("=", 1)])


@contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    """Have variables in the environment of what is started within."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# The way to it

FitEvent = WhileTracing | TrialProgress | TrialFinished | str | Fitted
"""The events of `fitting`: what is run meanwhile, lines for the user, and last the result."""


@dataclass(frozen=True)
class _Sized:
    """A command with changes, and the largest batch of it that fits."""

    config: SearchConfig
    changes: tuple[Technique, ...]
    predicted: Predicted
    safe: int
    sizes: Sizes
    remedy: AllocatorRemedy | None = None
    results: tuple[TrialDone, ...] = ()

    @property
    def traced(self) -> Traced | Unknown:
        """Its trace, under the allocator's setting."""
        traced = self.predicted.prediction.traced
        return traced if self.remedy is None else self.remedy.after

    @property
    def certain_bytes(self) -> int:
        """The bytes that the allocator can reserve for certain."""
        ready, gpu = self.predicted.ready, self.config.device.gpu
        context_bytes = ready.context_bytes if ready.context_range is None else ready.context_range.high_bytes
        return gpu.cuda_total_range.low_bytes - context_bytes

    @property
    def missing_bytes(self) -> int:
        """The bytes that one batch lacks where none fits; 0 if one does, or if they are not known."""
        traced = self.traced
        return 0 if self.safe or isinstance(traced, Unknown) else traced.missing_bytes(self.sizes.multiple)

    def helps(self, before: _Sized) -> bool:
        """Return whether more fits than before, or less is missing."""
        return self.safe > before.safe or self.missing_bytes < before.missing_bytes


def fitting(config: SearchConfig, allowed: Sequence[str], control: Control) -> Iterator[FitEvent]:
    """Find the batch and the passes that a command is to be run with; the last event is the result.

    Args:
        config: of a command with ``{batch}``; its headroom is left free.
        allowed: changes that may be made to its line where it needs them, by key.

    Raises:
        RunError: nothing fits, or it fails on the GPU.
        Unusable, ChildDied, Cancelled: the command as it is cannot be followed; the user ended it.
    """
    return _Fitter(config, tuple(allowed), control).run()


class _Fitter:
    def __init__(self, config: SearchConfig, allowed: tuple[str, ...], control: Control) -> None:
        command = config.workload.command
        assert command is not None, "a command is made to fit"
        self._config, self._allowed, self._control = config, allowed, control
        self._ranks = config.workload.recipe.pass_micro_batches
        self._accumulates = command.takes_accumulation
        self._traced_passes = stated(config, TRACED_PASSES if self._accumulates and config.target_batch else 1)
        self._not_made: list[NotMade] = []
        self._free_bytes = int(config.headroom * config.room.total_bytes)

    def run(self) -> Iterator[FitEvent]:
        as_it_is = yield from self._sized(replace(self._config, change=PROPOSE if self._allowed else ""), ())
        best = as_it_is
        if self._allowed:
            best = yield from self._changed(as_it_is)
        if not best.safe:
            raise RunError(self._nothing_fits(best), EXIT_NOTHING_FITS)
        yield from rests_on(best.traced)
        found = yield from self._confirmed(best)
        if lacking := self._lacking(found):
            yield lacking
        yield found

    # The largest batch

    def _sized(self, config: SearchConfig, changes: tuple[Technique, ...]) -> Generator[FitEvent, None, _Sized]:
        """Trace a command, and find its largest batch: by the trace, or by trials where that is of no even form."""
        predicted: Predicted | None = None
        for event in predicting(replace(config, passes=self._traced_passes), self._control):
            if isinstance(event, Predicted):
                predicted = event
            else:
                yield event
        assert predicted is not None, "it is predicted, or an error is raised"
        config = replace(config, change="")
        sizes, traced = Sizes(max(config.batch_multiple, predicted.multiple)), predicted.prediction.traced
        if isinstance(traced, Unknown) or isinstance(safe := self._largest(traced, sizes), Unknown):
            return (yield from self._searched(config, changes, predicted, sizes))
        most = sizes.at_most(predicted.samples or safe)
        now = _Sized(config, changes, predicted, min(safe, most), sizes)
        if self._is_whole(safe) or most < safe:
            return now
        remedy = larger_batch(traced, sizes)
        larger = 0 if remedy is None else self._largest(remedy.after, sizes)
        if remedy is None or isinstance(larger, Unknown) or larger <= safe:
            return now
        if remedy.is_of_program:
            yield f"batch {larger:,} would fit with {remedy.how}"
            return now
        return replace(now, safe=min(larger, sizes.at_most(predicted.samples or larger)), remedy=remedy)

    def _largest(self, traced: Traced, sizes: Sizes, more_bytes: int = 0) -> int | Unknown:
        found = traced.max_batch_size_leaving(self._free_bytes + more_bytes)
        return found if isinstance(found, Unknown) else sizes.at_most(found)

    def _searched(
        self, config: SearchConfig, changes: tuple[Technique, ...], predicted: Predicted, sizes: Sizes
    ) -> Generator[FitEvent, None, _Sized]:
        """Find the largest batch by trials."""
        yield "its memory is no straight line in the batch: its batch is searched by trials"
        results: list[TrialDone] = []
        verdict: Verdict | None = None
        for event in search(config, self._control, predicted):
            if isinstance(event, TrialFinished):
                results.append(event.result)
            if isinstance(event, Verdict):
                verdict = event
            elif not isinstance(event, Predicted):
                yield event
        assert verdict is not None, "a search ends with a verdict"
        if verdict.outcome in ("failed", "cancelled"):
            code = EXIT_INTERRUPTED if verdict.outcome == "cancelled" else EXIT_FAILED
            raise RunError(verdict.message, code)
        roomy, safe = verdict.with_headroom, verdict.max_batch_size
        safe = min(safe, roomy.batch_size) if roomy is not None and self._free_bytes else safe
        return _Sized(config, changes, predicted, safe, sizes, results=tuple(results))

    def _is_whole(self, safe: int) -> bool:
        """Return whether one pass of the largest batch reaches the target."""
        target = self._config.target_batch
        return target is not None and safe * self._ranks >= target

    def _is_enough(self, found: _Sized) -> bool:
        """Return whether a batch fits, and a step of it, or of several, can have the samples that are wanted."""
        can = self._config.target_batch is None or self._accumulates
        return found.safe > 0 and (can or self._is_whole(found.safe))

    # Changes that were allowed

    def _changed(self, as_it_is: _Sized) -> Generator[FitEvent, None, _Sized]:
        """Return the command with the cheapest of the allowed changes by which it fits, or reaches the target."""
        if self._is_enough(as_it_is):
            yield self._spare(self._allowed, f"not needed, as batch {as_it_is.safe:,} fits")
            return as_it_is
        offered = yield from self._offered(as_it_is)
        best = as_it_is
        for chosen in islice(_sets(offered), _MOST_SETS):
            if self._is_enough(best):
                break
            if any(one.change == change.key for one in self._not_made for change in chosen):
                continue
            command = typed_command(self._config, chosen).command
            workload = replace(self._config.workload, command=command)
            why = ""
            try:
                found = yield from self._sized(replace(self._config, workload=workload), chosen)
                why = "" if found.helps(as_it_is) else "it saves nothing here"
                best = found if found.helps(best) else best
            except (Unusable, ChildDied, RunError) as error:
                if isinstance(error, RunError) and error.exit_code == EXIT_INTERRUPTED:
                    raise
                why = f"its run failed: {error}"
            if why and len(chosen) == 1:
                yield self._spare([chosen[0].key], why)
        told = {*(one.change for one in self._not_made), *(one.key for one in best.changes)}
        if left := [one.key for one in offered if one.key not in told]:
            yield self._spare(left, f"not needed, as batch {best.safe:,} fits" if best.safe else "it makes nothing fit")
        return best

    def _offered(self, as_it_is: _Sized) -> Generator[FitEvent, None, list[Technique]]:
        """Return the allowed changes that the command's line has words for; say of the others how to have them."""
        config, traced = self._config, as_it_is.predicted.prediction.traced
        reasons = {} if isinstance(traced, Unknown) else dict(traced.done.changes)
        known = self._known
        offered = []
        for key in self._allowed:
            change = known.get(key)
            if change is None:
                yield self._spare([key], "the command's framework has no words for it")
            elif " already" in (reason := reasons.get(key, "")) or (reason and not self._says(key)):
                yield self._spare([key], reason)
            elif not self._says(key):
                yield self._spare([key], "the command's line cannot say it", spoken(change, config).how)
            else:
                offered.append(spoken(change, config))
        return offered

    def _spare(self, keys: Sequence[str], reason: str, how: str = "") -> str:
        """Note that changes are not made, and return the line for it."""
        self._not_made += (NotMade(key, reason, how) for key in keys)
        return f"--allow {','.join(keys)}: {reason}{f'; to have it, write {how}' if how else ''}"

    # The trial

    def _confirmed(self, best: _Sized) -> Generator[FitEvent, None, Fitted]:
        """Run the batch on the GPU, and smaller ones while memory runs out; a simulated GPU is asked by a trace."""
        config, safe = best.config, best.safe
        for attempt in range(1, MOST_TRIALS + 1):
            size, passes = choose(safe, config.target_batch, self._ranks, best.sizes, accumulates=self._accumulates)
            found = Fitted(
                replace(config, passes=stated(config, passes)), size, passes, best.safe, best.changes, best.remedy,
                best.traced, not_made=tuple(self._not_made),
            )  # fmt: skip
            found, why = yield from self._traced(found) if found.is_traced_only else self._tried(found, best)
            if not why:
                return found
            safe = self._smaller(best, size, attempt)
            said = f"batch {size:,} {why}"
            if not safe or attempt == MOST_TRIALS:
                break
            yield f"{said}: {safe:,} is next"
        raise RunError(f"{said}; `gpumem-tui search` finds the largest by trials", EXIT_NOTHING_FITS)

    def _traced(self, found: Fitted) -> Generator[FitEvent, None, tuple[Fitted, str]]:
        """Trace a batch with its own passes, and say why it does not fit; empty where it does."""
        size, config = found.batch_size, found.config
        traced = found.traced
        if config.passes != self._traced_passes:
            for event in predicting(config, self._control, size, "one size is enough"):
                if isinstance(event, Predicted):
                    traced = event.prediction.traced
                else:
                    yield event
            assert isinstance(traced, Traced), "a command is traced at one size, or fails"
            traced = traced if found.remedy is None else traced.under(found.remedy.after.settings)
        assert isinstance(traced, Traced), "it is traced"
        fits = traced.fits_leaving(size, self._free_bytes)
        used = traced.device_used_range(size)
        return replace(
            found, traced=traced, used=used
        ), "" if fits else f"does not fit on {config.where} with its passes"

    def _tried(self, found: Fitted, best: _Sized) -> Generator[FitEvent, None, tuple[Fitted, str]]:
        """Run a batch for a few steps, and say why it is not safe; empty where it is.

        Raises:
            RunError: it fails for another reason than memory.
        """
        size, config = found.batch_size, found.config
        alike = (one for one in best.results if one.batch_size == size and found.passes == 1)
        ran = next(alike, None)
        if ran is None:
            results: list[TrialDone] = []
            with _set(_setting(found.remedy)), closing(SideBySide(config.terms, self._control)) as runner:
                yield from run_trial(size, None, config, runner, results)
            ran = results[-1]
        if ran.outcome == "error":
            said = f"batch {size:,} fails on {config.where} for another reason than memory: {ran.detail}"
            raise RunError(f"{said}; run the command alone to see it", EXIT_FAILED)
        found = replace(found, result=ran, used=Range(ran.device_used_bytes, ran.device_used_bytes))
        if ran.outcome == "oom":
            return found, f"was out of memory on {config.where} ({shortfall(ran)})"
        is_safe = not config.device.simulated or ran.peak_reserved_bytes <= best.certain_bytes - self._free_bytes
        return found, "" if is_safe else f"may not fit on {config.where}"

    def _smaller(self, best: _Sized, failed: int, attempt: int) -> int:
        """Return the largest batch that leaves more free than one that did not fit; 0 for none."""
        safe, traced = failed - 1, best.traced
        if isinstance(traced, Traced):
            roomy = self._largest(traced, best.sizes, int(attempt * _STEP_BACK * self._config.room.total_bytes))
            safe = safe if isinstance(roomy, Unknown) else min(safe, roomy)
        else:
            safe = min(safe, int((1 - attempt * _STEP_BACK) * failed))
        return best.sizes.at_most(safe)

    # In words

    def _lacking(self, found: Fitted) -> str:
        """Say that a step has fewer samples than wanted, and what to write for passes; empty where it has as many."""
        step = found.step
        if step.global_batch_size >= step.target_batch:
            return ""
        said = f"a step has {step.global_batch_size:,} samples, not {step.target_batch:,}"
        if self._accumulates:
            return said
        assert self._config.workload.command is not None
        line = with_accumulation(self._config.workload.command)
        how = (
            f"write `{line.text}`" if line is not None else "give the program an option for its passes, and write that"
        )
        return f"{said}, as the command has no {{accumulation}}: {how}"

    def _nothing_fits(self, best: _Sized) -> str:
        command = best.config.workload.command
        assert command is not None
        missing = f": {format_bytes(best.missing_bytes)} missing" if best.missing_bytes else ""
        which = f"batch {best.sizes.multiple:,}"
        said = f"nothing fits: {which} is out of memory on {best.config.where}{missing}"
        if more := [key for key in _USUAL if key not in self._allowed and self._says(key)]:
            return f"{said}; --allow {','.join([*self._allowed, *more])} may make it fit"
        typed = best.config.typed
        gpu = typed[typed.index("--gpu") :][:2] if "--gpu" in typed else ()
        line = shlex.join(["gpumem-tui", "plan", *gpu, "--batch-size", str(best.sizes.multiple), "--"])
        return f"{said}; `{line} {command.text}` finds what would make it fit"

    def _says(self, key: str) -> bool:
        change = self._known.get(key)
        return change is not None and not typed_command(self._config, (change,)).injected

    @cached_property
    def _known(self) -> Mapping[str, Technique]:
        """Every change to the command, by key."""
        made = (*injected(self._config.device.gpu, self._config.workload.recipe.gpus), *typed_changes(self._config))
        return {one.key: one for one in made}


def _sets(offered: Sequence[Technique]) -> list[tuple[Technique, ...]]:
    """Return the sets of changes that go together, the cheapest first; so each alone is before those that have it."""
    every = (chosen for count in range(len(offered)) for chosen in combinations(offered, count + 1))
    found = [
        chosen
        for chosen in every
        if sum(one.key in OF_THE_HELD for one in chosen) <= 1 and is_advisable(chosen, offered)
    ]
    return sorted(found, key=lambda chosen: sum((one.price for one in chosen[1:]), chosen[0].price))
