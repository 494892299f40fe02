"""What makes a command fit that no single change does: changes together, and smaller passes for the same step.

What each change saved in its own run says which sets are likely; those are run, the cheapest first, until one fits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path

from gpumem_tui.formula.records import BF16_SINCE, OPTIMIZER_RECORDS
from gpumem_tui.formula.techniques import MORE_RANKS, Technique
from gpumem_tui.memory import Bucket, Unknown
from gpumem_tui.plan.command import CommandPlan, Together
from gpumem_tui.run.children import ChildDied
from gpumem_tui.run.control import Control, Unusable
from gpumem_tui.search import predicting
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.prediction import Traced
from gpumem_tui.workload.command import ACCUMULATION, Command

MOST_RUNS = 5
"""So many sets are run at most: work, not seconds, so that the answer is the same on a slow machine."""

_MOST_CHANGES = 4
_MOST_SIZES = 2
"""Sizes of a pass that are tried with one set of changes."""

_ACCUMULATES = re.compile(
    r"\b(gradient_accumulation_steps|accumulate_grad_batches|grad_accum(?:ulation)?(?:_steps)?)\b"
)
"""What programs call the passes of an optimizer step: transformers and nanoGPT, Lightning, many others."""
_TRAINERS = "gradient_accumulation_steps"

_HELD = (Bucket.PARAMETERS, Bucket.GRADIENTS, Bucket.OPTIMIZER)
"""What does not grow with the batch."""


def likely(plan: CommandPlan) -> list[Together]:
    """Return the sets that may fit by what each change saved alone, the cheapest first, then those of fewest passes."""
    base, whole = plan.there(plan.base), plan.batch_size
    helping = [
        (one.change, saved)
        for one in plan.what_ifs
        if isinstance(one.traced, Traced) and one.change.key != MORE_RANKS
        if (saved := base.at(whole).peak_allocated_bytes - plan.there(one.traced).at(whole).peak_allocated_bytes) > 0
    ]
    held, used_bytes = base.at(whole).breakdown, base.device_used_bytes(whole)
    growing = used_bytes - base.ready.context_bytes - sum(held[bucket] for bucket in _HELD)
    found = []
    for batch_size in _micro_batches(plan):
        share, passes = batch_size / whole, -(-whole // batch_size)
        for count in range(min(_MOST_CHANGES, len(helping)) + 1):
            for chosen in combinations(helping, count):
                changes = tuple(change for change, _ in chosen)
                if (not changes and passes == 1) or sum(one.key in OPTIMIZER_RECORDS for one in changes) > 1:
                    continue
                saved = sum(size if one.key in OPTIMIZER_RECORDS else int(size * share) for one, size in chosen)
                used = used_bytes - int(growing * (1 - share)) - saved
                if used <= plan.gpu.cuda_total_bytes:
                    found.append(Together(changes, batch_size, passes))
    found.sort(key=lambda one: (one.price, one.passes))
    kept: list[Together] = []
    for one in found:  # of one set of changes the two largest passes
        if sum(other.changes == one.changes for other in kept) < _MOST_SIZES:
            kept.append(one)
    return kept


def _micro_batches(plan: CommandPlan) -> list[int]:
    """Return the planned batch, and its halves where the command's line says the batch and so can say another."""
    command, size = plan.config.workload.command, plan.batch_size
    sizes = [size]
    if command is not None and command.says_batch and plan.config.workload.recipe.gpus == 1:
        while sizes[-1] > 1:
            sizes.append(-(-sizes[-1] // 2))
    return sizes


def confirmed(plan: CommandPlan, control: Control) -> Iterator[Together]:
    """Run what is likely, each as it would be typed; yield each with its run. Ends with the first that fits.

    Raises:
        Cancelled: the user ended it.
    """
    known = [(one.changes, one.batch_size) for one in plan.together]
    candidates = [one for one in likely(plan) if (one.changes, one.batch_size) not in known]
    for number, one in enumerate(candidates):
        if number == MOST_RUNS:
            return
        done = _run(plan, one, control)
        yield done
        if plan.fits_with(done):
            return


def _run(plan: CommandPlan, one: Together, control: Control) -> Together:
    """Trace the command as it would be typed, with what cannot be typed made to it, at that micro-batch alone."""
    typed = _typed(plan, one)
    workload = replace(plan.config.workload, command=typed.command)
    keys = "+".join(change.key for change in typed.injected)
    config = replace(plan.config, workload=workload, change=keys, target_batch=one.batch_size * one.passes)
    why = "one size is enough"
    try:
        found = predicting.predict(config, control, one.batch_size, why).prediction.traced
    except (Unusable, ChildDied) as error:
        return replace(one, traced=Unknown(f"its run failed: {error}"))
    if isinstance(found, Traced) and (reasons := [why for _, why in found.done.changes if why]):
        return replace(one, traced=Unknown(reasons[0]))
    if typed.accumulates or isinstance(found, Unknown):
        return replace(one, traced=found)
    # Gradients of the passes before are there through the next one's.
    gradients = max((phase.breakdown[Bucket.GRADIENTS] for phase in found.at(one.batch_size).phases), default=0)
    return replace(one, traced=found, beside_bytes=gradients)


def _with(words: Sequence[str], proposal: Sequence[str]) -> tuple[str, ...]:
    """Return the words with the batch as the proposal has it, in the place of the number."""
    flag = proposal[0].partition("=")[0]
    found = list(words)
    place = next(index for index, word in enumerate(found) if word.partition("=")[0] == flag)
    found[place : place + len(proposal)] = proposal
    return tuple(found)


# In the program's own words


@dataclass(frozen=True)
class _Typed:
    """A command with changes, as far as its line can say them.

    Attributes:
        injected: the changes that it does not say. `written`: what to write into the program for them.
        accumulates: it says the passes of a step, or there is one.
    """

    command: Command
    injected: tuple[Technique, ...]
    written: tuple[str, ...]
    accumulates: bool


def command_of(plan: CommandPlan, one: Together) -> tuple[str, tuple[str, ...]]:
    """Return the command to copy, and what is to be written into the program besides."""
    typed = _typed(plan, one)
    return typed.command.text_at(one.batch_size, one.passes), typed.written


def _typed(plan: CommandPlan, one: Together) -> _Typed:
    command = plan.config.workload.command
    assert command is not None, "a command is planned"
    script, words = _script(command), command.words
    written, injected = list[str](), list[Technique]()
    takes_flags = "HfArgumentParser" in script or "TrlParser" in script
    is_trainer = takes_flags or "TrainingArguments" in script or "SFTConfig" in script
    if command.proposal is not None:
        words = _with(words, command.proposal.proposed.split(" "))
    for change in one.changes:
        argument = _argument(change, plan.config) if is_trainer else ""
        if takes_flags and argument:
            words = (*words, f"--{argument.partition('=')[0]}", argument.partition("=")[2])
        else:
            injected.append(change)
            written.append(f"TrainingArguments({argument})" if argument else change.how)
    accumulates = one.passes == 1 or any(ACCUMULATION in word for word in words)
    if not accumulates and takes_flags and not any(word.lstrip("-").startswith(_TRAINERS) for word in words):
        words, accumulates = (*words, f"--{_TRAINERS}", ACCUMULATION), True
    elif not accumulates:
        name = _TRAINERS if is_trainer else "".join(_ACCUMULATES.findall(script)[:1])
        passes = f"{name} × {one.passes}" if name else ""
        written.append(passes or f"{one.passes} passes before each optimizer step, the loss divided by {one.passes}")
    return _Typed(Command(words, command.cwd), tuple(injected), tuple(written), accumulates)


def _argument(change: Technique, config: SearchConfig) -> str:
    if config.device.gpu.compute_capability < BF16_SINCE:
        return change.trainer.replace("bf16", "fp16")
    return change.trainer


@cache
def _script(command: Command) -> str:
    """Return the text of the Python file that a command runs; empty where none is named or it cannot be read."""
    for word in command.words:
        if word.endswith(".py"):
            try:
                return Path(command.cwd, word).read_text(errors="replace")
            except OSError:
                return ""
    return ""
