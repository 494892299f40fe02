"""How far one of a plan's numbers can go with the others as they are.

The largest micro-batch, the longest sequence, the fewest GPUs, the fewest passes of an optimizer step. By traces where
there are any, else by the closed form. Nothing is traced here: who asks shows what traces there are, and gets the plans
whose traces are wanted next, until none exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.rows import Moment
from gpumem_tui.memory import Bucket, Unknown, format_bytes
from gpumem_tui.plan.answers import headroom_of, largest_batch, on_gpu, predicted, target_of, terms_of, usable_of
from gpumem_tui.plan.combination import Combination
from gpumem_tui.plan.goals import Quantity
from gpumem_tui.plan.plan import SHAPE_LIMITS, Plan
from gpumem_tui.plan.techniques import cheapest_but_as_it_is, room_as_traced
from gpumem_tui.search.prediction import Traced
from gpumem_tui.simulator.allocator.replay import AffineTrace, NotAffine, TraceByLength

_BETTER_GUESSES = 3
_MOST_ROUNDS = 24


@dataclass(frozen=True)
class Narrowed:
    """The state of a search for a limit. `wanted`: what to run next; `why`: why there is nothing to run for that."""

    settled: bool
    wanted: tuple[int, ...] = ()
    why: str = ""


@dataclass
class EndSearch:
    """Finds the largest grid value that fits: probes a guess and its neighbour, then bisects.

    Attributes:
        refined: a better guess after some runs; None for none.
        low: the largest that fits, at first one below the least; `high`: the smallest beyond it that does not.
        gap: a value below `low` that was traced and does *not* fit (fitting is not monotonic); None if none was seen.
    """

    step: int
    most: int
    fits: Callable[[int], bool | Unknown | None]
    refined: Callable[[], int | None] = lambda: None
    low: int = 0
    high: int | None = None
    gap: int | None = None

    def around(self, guess: int) -> Narrowed:
        """Narrow down as far as the finished runs tell, and return the next ones that are wanted."""
        values = self._values(max(self.low, min(guess, self.most)))
        for wanted in values:
            found = {value: self._take(value) for value in wanted}
            if self.settled:
                return Narrowed(True)
            if missing := tuple(value for value in wanted if found[value] is None):
                return Narrowed(False, missing)
            if why := next((one for one in found.values() if isinstance(one, Unknown)), None):
                return Narrowed(False, why=why.reason)
        return Narrowed(self.settled, why="it does not settle")

    @property
    def settled(self) -> bool:
        """Return whether nothing is between what fits and what does not, or all there is fits."""
        return self.low >= self.most or (self.high is not None and self.high - self.low <= self.step)

    def _values(self, guess: int) -> Iterator[tuple[int, ...]]:
        """Yield a guess and the one after it, better ones too; then twice what fits, or the middle of the gap."""
        yield self._pair(guess)
        for _ in range(_BETTER_GUESSES):
            better = self.refined()
            yield () if better is None else self._pair(better)
        for _ in range(_MOST_ROUNDS):
            if self.high is None:
                yield (min(self.most, max(self.step, 2 * self.low)),)
            else:
                yield (self.low + (self.high - self.low) // self.step // 2 * self.step,)

    def _pair(self, guess: int) -> tuple[int, ...]:
        """Return both sides of the guessed end; two runs at least, as the next guess is from their difference."""
        guess = max(guess, self.step) if self.low == 0 and self.high is None else guess
        return tuple(one for one in (guess, guess + self.step) if self._is_open(one))

    def _is_open(self, value: int) -> bool:
        return self.low < value <= self.most and (self.high is None or value < self.high)

    def _take(self, value: int) -> bool | Unknown | None:
        found = self.fits(value)
        if found is True:
            self.low = max(self.low, value)
            if self.high is not None and self.high < self.low:  # what is in pieces is less at some larger values
                self.high, self.gap = None, self.high
        elif found is False and value > self.low:
            self.high = value if self.high is None else min(self.high, value)
        elif found is False:
            self.gap = value
        return found


def most_of(count: int, fits: Callable[[int], bool], near: int = 1) -> int:
    """Return the largest of 1 to `count` that fits, where all smaller ones do; 0 for none.

    Args:
        near: where the answer probably is: each question may take its time.
    """
    low, high, stride = 0, count + 1, 1
    near = min(max(near, 1), count)
    if count < 1:
        return 0
    if fits(near):
        low = near
        while low + stride <= count and fits(low + stride):
            low, stride = low + stride, 2 * stride
        high = min(low + stride, high)
    else:
        high = near
        while high - stride >= 1 and not fits(high - stride):
            high, stride = high - stride, 2 * stride
        low = max(high - stride, low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def first_of(count: int, fits: Callable[[int], bool]) -> int | None:
    """Return the first of `count` places that fits, where every later one does; None for none."""
    if fits(0):
        return 0
    most = most_of(count - 1, lambda place: not fits(place))
    return most + 1 if most + 1 < count else None


Known = Callable[[Plan], Traced | Unknown | None]
"""The trace of a plan's step; why there can be none; None where it was not traced so far."""

How = Literal["verified", "traced", "formula"]
"""Verified: the value was traced and fits, and the next one was traced and does not (or there is no next one). Traced:
by a replay of another trace. Formula: an estimate."""

_GRID = 128
"""Sequence lengths are answered in multiples of it, as people choose them."""
_MOST_GPUS = 1024
_FORM_RUNS = 3


@dataclass(frozen=True)
class Limit:
    """The value that was solved for one of a plan's numbers.

    Attributes:
        value: None where no value will do.
        formula: what the closed form states; None where it has no value either.
        beyond: the next value, which does not fit; None where that was not found out or none exists.
        plan: with the value; None without one.
        note: what bounds it, or why it is an estimate; empty for nothing to say.
        lift: by formula, the cheapest that gives it a value where it has none; None where nothing does.
        wanted: plans whose traces would settle more, the first first; with any, the value may change.
    """

    quantity: Quantity
    value: int | None
    formula: int | None
    how: How
    plan: Plan | None
    beyond: int | None = None
    note: str = ""
    wanted: tuple[Plan, ...] = ()
    lift: Combination | None = None


def limit(quantity: Quantity, plan: Plan, known: Known, passes: int | None = None) -> Limit:
    """Solve a plan for a number, as far as the traces tell.

    Args:
        passes: of an optimizer step, where the GPUs are asked for and the plan has a target; None for as many as it
            takes.
    """
    match quantity:
        case "batch-size":
            return _largest_batch(plan, known)
        case "seq-len":
            return _longest_sequence(plan, known)
        case "gpus":
            return _fewest_gpus(plan, known, passes)
        case "accumulation":
            return _fewest_passes(plan, known)


# The micro-batch, and the passes that follow from it


def _largest_batch(plan: Plan, known: Known) -> Limit:
    formula = largest_batch(plan)
    found = known(plan)
    how: How = "formula"
    value, note, wanted = formula, "", (plan,) if found is None else ()
    if isinstance(found, Unknown):
        note = found.reason
    elif found is not None:
        largest = on_gpu(plan, found).max_batch_size_leaving(headroom_of(plan))
        if isinstance(largest, Unknown):
            note = largest.reason
        else:
            value, how = largest, "traced"
    target = plan.target_batch
    if target is not None:
        target = max(target, value * plan.recipe.pass_micro_batches)
    with_it = replace(plan, batch_size=value, target_batch=target) if value else None
    solved = Limit("batch-size", value or None, formula or None, how, with_it, note=note, wanted=wanted)
    return _explained(solved, replace(plan, batch_size=1, target_batch=None), "1 sample", known)


def _fewest_passes(plan: Plan, known: Known) -> Limit:
    """Spread the samples of a step evenly over as few passes as the largest micro-batch allows."""
    batch = _largest_batch(plan, known)
    per_gpu = -(-target_of(plan) // plan.recipe.pass_micro_batches)

    def passes(largest: int | None) -> int | None:
        return -(-per_gpu // largest) if largest else None

    value = passes(batch.value)
    with_it = None
    if value is not None:
        with_it = replace(plan, batch_size=-(-per_gpu // value), target_batch=target_of(plan))
        over = with_it.batch_size * plan.recipe.pass_micro_batches
        with_it = replace(with_it, target_batch=max(over, target_of(plan)))
    note = batch.note
    if not note and plan.target_batch is None:
        note = "for the samples of one pass; --target-batch asks for more"
    return replace(batch, quantity="accumulation", value=value, formula=passes(batch.formula), plan=with_it, note=note)


# The sequence


def _longest_sequence(plan: Plan, known: Known) -> Limit:
    if not plan.shape.seq_len:
        return Limit("seq-len", None, None, "formula", None, note=f"{plan.shape.name} has no sequence")
    step, most = sequence_grid(plan.shape)

    def with_length(length: int) -> Plan:
        return replace(plan, shape=plan.shape.overridden(seq_len=length))

    formula = step * most_of(most // step, lambda times: _fits_by_formula(with_length(step * times)))
    runs: dict[int, Traced] = {}

    def fits(length: int) -> bool | Unknown | None:
        found = known(with_length(length))
        if isinstance(found, Traced):
            at_size = AffineTrace.constant(found.trace.at(plan.batch_size))
            runs[length] = found.with_trace(at_size)
        return _fits_by_trace(with_length(length), known)

    forms: dict[tuple[int, ...], int | None] = {}

    def refined() -> int | None:
        key = tuple(runs)
        if key not in forms:
            forms[key] = _longest_by_form(plan, runs, step, most)
        return forms[key]

    search = EndSearch(step, most, fits, refined)
    answer = search.around(formula)
    value, how = search.low, _how(settled=answer.settled)
    note = _sequence_note(plan.shape, value, most)
    if search.gap is not None:
        safe = f"{search.low:,} was traced itself, so it is safe; not every shorter one is: {search.gap:,} was traced"
        note = "; ".join(filter(None, (f"{safe} and does not fit, as the allocator's pieces differ", note)))
    if not answer.settled:
        by_form = refined()
        value, how = (formula, "formula") if by_form is None else (by_form, "traced")
        others = " and ".join(f"{length:,}" for length in sorted(runs))
        note = answer.why if by_form is None else f"by the traces at {others}, not verified: {answer.why}"
        note = note if answer.why else ""
    beyond = search.high if search.high is not None and search.high <= most else None
    solved = Limit(
        "seq-len", value or None, formula or None, how, with_length(value) if value else None, beyond, note,
        tuple(with_length(length) for length in answer.wanted),
    )  # fmt: skip
    return _explained(solved, with_length(step), f"{step} tokens", known)


def sequence_grid(shape: ModelShape) -> tuple[int, int]:
    """Return the distance of the lengths that are tried, and the longest: what a table of learned positions takes."""
    if shape.record.positions != "learned":
        return _GRID, SHAPE_LIMITS["seq_len"] // _GRID * _GRID
    step = _GRID
    while step > 1 and (3 * step > shape.max_seq_len or shape.max_seq_len % step):
        step //= 2
    return step, shape.max_seq_len


def _sequence_note(shape: ModelShape, value: int, most: int) -> str:
    if value >= most and shape.record.positions == "learned":
        return f"memory is not what bounds it: {shape.name} has {shape.max_seq_len:,} positions"
    if 0 < shape.max_seq_len < value:
        return f"{value:,} is longer than the {shape.max_seq_len:,} positions that {shape.name} was trained at"
    return ""


def _longest_by_form(plan: Plan, runs: Mapping[int, Traced], step: int, most: int) -> int | None:
    """Return the longest by the form through the last lengths that were traced; None without two of one program."""
    last = dict(list(runs.items())[-_FORM_RUNS:])
    if len(last) < 2:
        return None
    try:
        form = TraceByLength.fit({length: one.trace for length, one in last.items()})
    except NotAffine:
        return None
    here = on_gpu(plan, next(iter(last.values())))
    free_bytes = headroom_of(plan)

    def fits(times: int) -> bool:
        try:
            at = here.with_trace(form.at(step * times))
            return at.fits_leaving(plan.batch_size, free_bytes)
        except NotAffine:
            return True  # so short that what grows is extrapolated to less than nothing

    return step * most_of(most // step, fits, near=max(last) // step)


# The GPUs


def _fewest_gpus(plan: Plan, known: Known, passes: int | None) -> Limit:
    recipe = plan.recipe
    each = recipe.model_parallel
    least = recipe.least_gpus
    if plan.target_batch is not None and passes is not None:
        least *= max(1, -(-plan.target_batch // (plan.batch_size * recipe.pipelined * passes)))

    def with_gpus(gpus: int) -> Plan:
        target = plan.target_batch
        if target is not None:
            target = max(target, plan.batch_size * recipe.pipelined * max(1, gpus // each))
        sharding = "none" if gpus == 1 else recipe.sharding
        return replace(plan, recipe=replace(recipe, gpus=gpus, sharding=sharding), target_batch=target)

    if recipe.sharding == "none":
        return _unsharded_gpus(known, with_gpus(least))
    # On more GPUs than experts each holds one of a block anyway, and gathers all that they are filled up to.
    counts = _gpu_counts(least, recipe.least_gpus, plan.goals.node_gpus, _padded_experts(plan) or _MOST_GPUS)
    most = with_gpus(counts[-1])
    place = first_of(len(counts), lambda index: _fits_by_formula(with_gpus(counts[index])))
    formula = None if place is None else counts[place]
    if isinstance(why := known(with_gpus(formula or counts[0])), Unknown):
        return _explained(_by_formula("gpus", formula, with_gpus, why.reason), most, f"{counts[-1]:,} GPUs", known)
    # Searched as the last of the numbers, counted from 1, with which it does not fit: that one, and the next.
    search = EndSearch(1, len(counts), lambda last: _reversed(_fits_by_trace(with_gpus(counts[last - 1]), known)))
    answer = search.around(len(counts) if place is None else place)
    wanted = tuple(with_gpus(counts[last - 1]) for last in answer.wanted)
    if search.high is not None:
        value, beyond = counts[search.high - 1], counts[search.low - 1] if search.low else None
        return Limit("gpus", value, formula, _how(settled=answer.settled), with_gpus(value), beyond, answer.why, wanted)
    if wanted or answer.why:
        return replace(_by_formula("gpus", formula, with_gpus, answer.why), wanted=wanted)
    solved = Limit("gpus", None, formula, "traced", None, note=_padding(plan))
    return _explained(solved, most, f"{counts[-1]:,} GPUs", known)


def _padded_experts(plan: Plan) -> int | None:
    """Return the experts of a block if FSDP2 shards them by their number and fills it up; None if it does not."""
    experts, recipe = plan.shape.experts, plan.recipe
    sharded = recipe.sharding in ("zero3", "fsdp2") and recipe.expert_parallel == 1
    return experts.count if experts is not None and sharded and experts.count < _MOST_GPUS else None


def _padding(plan: Plan) -> str:
    """Say what more GPUs cost where FSDP2 shards experts: by the first dimension, which is their number, filled up."""
    experts = _padded_experts(plan)
    if experts is None:
        return ""
    filled = f"over more GPUs than a block has experts ({experts:,}) it fills them up to the number of GPUs"
    ways = gcd(experts, plan.goals.node_gpus)
    spread = replace(plan, recipe=replace(plan.recipe, expert_parallel=ways))
    fewest = _fewest_gpus(spread, lambda _: Unknown("not traced"), None).formula
    does = "spreads them" if fewest is None else f"{ways} does with ≈{fewest:,} GPUs"
    return f"FSDP2 shards by the first dimension: {filled}; --expert-parallel {does} (by formula)"


def _gpu_counts(least: int, each: int, node: int, most: int) -> list[int]:
    """Return the numbers of GPUs that can be had from `least` on: parts of a node that divide it, then whole nodes.

    Args:
        each: what every number is a multiple of: GPUs of one copy of the network, or that its experts are spread over.
        node: GPUs of a node.
        most: GPUs at most.
    """
    counts = range(least + -least % each, max(most + 1, least + each * node), each)
    return [count for count in counts if count % node == 0 or node % count == 0]


def _unsharded_gpus(known: Known, fewest: Plan) -> Limit:
    """Answer where every GPU holds everything: how many there are decides the samples of a step alone."""
    by_trace, formula = _fits_by_trace(fewest, known), _fits_by_formula(fewest)
    fits, wanted = formula, tuple[Plan, ...]()
    how: How = "formula"
    note = "unsharded, more GPUs take no memory off one: --sharding divides it"
    if isinstance(by_trace, bool):
        fits, how = by_trace, "traced"
    elif by_trace is None:
        wanted = (fewest,)
    else:
        note = f"{note}; {by_trace.reason}"
    count = fewest.recipe.gpus
    solved = Limit(
        "gpus", count if fits else None, count if formula else None, how, fewest if fits else None, None, note, wanted
    )  # fmt: skip
    return _explained(solved, fewest, f"{fewest.batch_size:,} to a GPU", known)


# All of them


def _explained(found: Limit, least: Plan, what: str, known: Known) -> Limit:
    """Say of a number without a value what is missing at its least value, and what would lift that.

    Args:
        least: the plan with that value, which does not fit; `what` it is in words.
    """
    if found.value is not None or found.wanted:
        return found
    denied = least.batch_size - 1 if _fits_by_formula(least) else None  # a trace may see it where the formula does not
    room = room_as_traced(least, denied)
    if lacked := _lacked_bytes(least, known(least)):  # the share of all by trace that must go, of the formula's
        room = min(room, predicted(least).needed_bytes / (lacked + usable_of(least)))
    lift = cheapest_but_as_it_is(least, room)
    note = "; ".join(filter(None, (f"even {what} {_missing(least, known)}", found.note)))
    return replace(found, note=note, lift=None if isinstance(lift, Unknown) else lift)


def _lacked_bytes(plan: Plan, found: Traced | Unknown | None) -> int:
    """Return what a plan that does not fit lacks by trace; 0 without one."""
    if not isinstance(found, Traced):
        return 0
    return on_gpu(plan, found).missing_bytes(plan.batch_size, headroom_of(plan))


def _missing(plan: Plan, known: Known) -> str:
    """Say how much a plan that does not fit lacks: by trace where there is one, else by formula."""
    usable = usable_of(plan)
    fixed = sum(term.size_bytes for term in terms_of(plan) if term.bucket in _FIXED and Moment.UPDATE in term.moments)
    if fixed > usable:
        alone = f"parameters, gradients and optimizer state alone take ≈{format_bytes(fixed)}"
        return f"cannot fit: {alone} of {format_bytes(usable)} that can be used"
    found = known(plan)
    if isinstance(found, Traced):
        return f"lack {format_bytes(_lacked_bytes(plan, found))} by trace"
    lacks = predicted(plan).needed_bytes - usable
    return f"lack ≈{format_bytes(max(0, lacks))} of {format_bytes(usable)} that can be used, by formula"


_FIXED = frozenset({Bucket.PARAMETERS, Bucket.GRADIENTS, Bucket.OPTIMIZER})


def _how(*, settled: bool) -> How:
    return "verified" if settled else "traced"


def _by_formula(quantity: Quantity, value: int | None, with_it: Callable[[int], Plan], note: str) -> Limit:
    return Limit(quantity, value or None, value or None, "formula", with_it(value) if value else None, note=note)


def _fits_by_formula(plan: Plan) -> bool:
    return predicted(plan).needed_bytes <= usable_of(plan)


def _fits_by_trace(plan: Plan, known: Known) -> bool | Unknown | None:
    found = known(plan)
    if not isinstance(found, Traced):
        return found
    try:
        return on_gpu(plan, found).fits_leaving(plan.batch_size, headroom_of(plan))
    except NotAffine as error:
        return Unknown(str(error))


def _reversed(found: bool | Unknown | None) -> bool | Unknown | None:
    return not found if isinstance(found, bool) else found
