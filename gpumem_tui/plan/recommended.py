"""The cheapest combination that fits, as far as traces tell: the formula chooses what is traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from gpumem_tui.formula.techniques import ALLOCATOR, NotApplicable, Price, other_way
from gpumem_tui.memory import Range, Unknown, format_bytes
from gpumem_tui.plan.answers import Answer, LargestOnGpu, TracedAnswer, TraceOf, largest_by_gpu
from gpumem_tui.plan.combination import Combination, Effect, Recommended, Techniques, worth_running
from gpumem_tui.plan.combining import command_of
from gpumem_tui.plan.command import CommandPlan, techniques_of_command
from gpumem_tui.plan.dialects import besides
from gpumem_tui.plan.judgement import span
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.replayed import effect_on, fitting_with
from gpumem_tui.plan.speed import by_cost, run
from gpumem_tui.plan.techniques import (
    cheapest_but_as_it_is,
    cheapest_combination,
    compiled_or_eager,
    likely_combinations,
    room_as_traced,
    techniques,
    unchanged,
)
from gpumem_tui.search.prediction import Fit, Traced
from gpumem_tui.search.stages import deciding_words
from gpumem_tui.search.words import fit_words, rests_on, room_words, sizes_words, used_words, verdict_words, what_fits

_OTHER_TRAINING = ("lora", "qlora", "freeze-half")
"""Techniques that train less of a network; named where no traced one makes a plan fit."""

Known = Callable[[Plan], TracedAnswer | Unknown]
"""A trace's answer on a plan, or why it is missing."""


def untraced(_plan: Plan) -> Unknown:
    """Return the answer where nothing but the plan itself is traced."""
    return Unknown("not traced")


def trace_by(known: Known) -> TraceOf:
    """Return the trace itself of what `known` answers of a plan."""
    return lambda plan: found.traced if isinstance(found := known(plan), TracedAnswer) else found


def judged_at_once(
    plan: Plan, traced: Traced | Unknown, now: TracedAnswer | Unknown, known: Known
) -> tuple[Recommended, tuple[LargestOnGpu, ...]]:
    """Return what is recommended and the largest batch on every GPU, worked out while traces of the first are made.

    Args:
        traced, now: of the plan as it is; or why it is missing. `known`: as `recommended` asks it.
    """
    with ThreadPoolExecutor(1) as pool:
        best = pool.submit(recommended, plan, now, known)
        on_gpus = largest_by_gpu(plan, traced if isinstance(traced, Traced) else None, trace_by(known))
        return best.result(), on_gpus


def recommended(plan: Plan, now: TracedAnswer | Unknown, known: Known = untraced) -> Recommended:
    """Return the cheapest that a trace confirms, of those that the formula finds likely.

    The formula's choice is asked for first, then dearer ones, if it does not fit, and the cheaper ones last, which do
    not fit by formula: the traces may be cut short by time.

    Args:
        now: what a trace reports of the plan as it is; or why it is missing.
        known: asked for one plan after the other, as long as its answer may change what is recommended.
    """
    if isinstance(now, TracedAnswer) and now.fits:
        return Recommended(unchanged(plan), now)
    if isinstance(now, TracedAnswer) and (setting := fitting_with(now)) is not None:
        return Recommended(replace(unchanged(plan), changes=(setting[0],)), setting[1])
    room = room_as_traced(plan, now.known_batch_size if isinstance(now, TracedAnswer) else None)
    best = cheapest_combination(plan, room=room) if isinstance(now, Unknown) else cheapest_but_as_it_is(plan, room)
    if isinstance(best, Combination) and best.plan == plan:
        return Recommended(best, now)
    only = best if isinstance(best, Combination) and best.formula_only else None
    first = best if only is None else cheapest_combination(plan, traceable=True, room=room)
    candidates = list(likely_combinations(plan, room))
    if isinstance(first, Combination) and first.plan != plan:
        others = [one for one in candidates if one.plan != first.plan]
        candidates = [first, *sorted(others, key=lambda one: one.price < first.price)]
    found, left = _confirmed(candidates, known, None)
    other = compiled_or_eager(plan, now)  # asked last: compiling takes longer than any other trace
    found, more = _confirmed([] if isinstance(other, Unknown) else [other], known, found)
    if found is not None:
        combination, traced = found
        cheaper = only if only is not None and only.price < combination.price else None
        return Recommended(combination, traced, cheaper, tuple(one for one, _ in (*left, *more)))
    if left:
        combination, why = left[0]
        return Recommended(combination, why, only)
    if only is not None or not candidates:
        return Recommended(best, Unknown("no trace can confirm it"))
    return Recommended(Unknown("of what fits by formula, nothing does by trace"), Unknown("traced"))


_Found = tuple[Combination, TracedAnswer]


def _confirmed(
    candidates: Sequence[Combination], known: Known, found: _Found | None
) -> tuple[_Found | None, list[tuple[Combination, Unknown]]]:
    """Return the cheapest that a trace reports to fit, and those that it gives nothing of, in their order.

    Args:
        found: techniques already found to fit.
    """
    tried, left = list[Combination](), list[tuple[Combination, Unknown]]()

    def cost() -> Price | None:
        return None if found is None else found[0].price

    for one in worth_running(lambda: candidates, lambda: tried, cost, len(candidates)):
        answer = known(one.plan)
        tried.append(replace(one, traced=answer if isinstance(answer, Unknown) else answer.traced))
        if isinstance(answer, Unknown):
            left.append((tried[-1], answer))
        elif answer.fits:
            found = tried[-1], answer
        elif (setting := fitting_with(answer)) is not None:
            found = replace(tried[-1], changes=(setting[0], *one.changes)), setting[1]
    return found, left


def all_techniques(plan: Plan, now: TracedAnswer | Unknown, known: Known = untraced) -> Techniques:
    """Return every technique judged on a plan: by formula; by trace `torch.compile` and the allocator's setting.

    Args:
        now, known: as `recommended` takes them.
    """
    largest = now.known_batch_size if isinstance(now, TracedAnswer) else None
    setting = effect_on(now) if isinstance(now, TracedAnswer) else None
    traced = (*([] if setting is None else [setting]), _compiled_or_eager(plan, now, known))
    return techniques(plan, largest, traced)


def _compiled_or_eager(plan: Plan, now: TracedAnswer | Unknown, known: Known) -> Effect | NotApplicable:
    technique, other = other_way(plan.recipe), compiled_or_eager(plan, now)

    def no_help(why: str) -> NotApplicable:
        return NotApplicable(technique.key, technique.name, f"{technique.option}{why}")

    if isinstance(other, Unknown):
        return no_help(f": {other.reason}")
    if isinstance(now, Unknown):
        return no_help(f", by trace alone: {now.reason}")
    if isinstance(then := known(other.plan), Unknown):
        return no_help(f", by trace alone: {then.reason}")
    if then.traced.done.is_estimate:
        return no_help(": it cannot be followed here as a GPU would run it")
    peak_bytes = then.peak_allocated_bytes
    saved_bytes = now.peak_allocated_bytes - peak_bytes
    fit: Fit = "fits" if then.fits else "does not fit"
    found = Effect(technique, "traced", peak_bytes, saved_bytes, fit, then.max_batch_size, of_model=other.plan)
    if reason := found.no_gain(now.known_batch_size):
        return no_help(f" {reason}{', traced' if saved_bytes else ''}")
    return found


# The answer in one line


def plan_answer(
    now: Answer,
    traced: TracedAnswer | Unknown,
    best: Recommended,
    on_gpus: Sequence[LargestOnGpu] = (),
    network: str = "",
) -> str:
    """Say whether a plan fits, its largest batch, what to change, what its tokens take, and the cheapest GPU for it.

    By trace where there is one.

    For example ``Batch 64 does not fit on NVIDIA GeForce RTX 4090: 40.1 GiB missing; safe batch 18, 16 keeps 10 % free.
    To change: 4 passes of 16.``

    Args:
        on_gpus: what every GPU takes; without them the cheapest GPU is not named.
        network: what was traced, where that is not to be taken for granted.
    """
    plan = now.plan
    answer, fits = fits_answer(now, traced, network)
    change = "" if fits else _to_change(plan, best, by_trace=isinstance(traced, TracedAnswer))
    sentences = (f"{answer}.", change, _passes(now), _takes(plan), _cheapest(plan, on_gpus))
    return " ".join(filter(None, sentences))


def fits_answer(now: Answer, traced: TracedAnswer | Unknown, network: str = "") -> tuple[str, bool]:
    """Return whether a plan fits and its largest batch, without a full stop; and whether it fits.

    Args:
        network: what was traced, where that is not to be taken for granted.
    """
    plan = now.plan
    gpus = f"{plan.recipe.gpus:,} × " if plan.recipe.gpus > 1 else ""
    size, where = f"Batch {plan.batch_size:,}", f"on {gpus}{plan.gpu.title}"
    kept = f"{100 * plan.headroom:g} %"
    if isinstance(traced, TracedAnswer):
        fits = traced.fits
        verdict = f"{size} {fit_words(traced.traced, plan.batch_size)} {where}" + (
            "" if fits or traced.fit != "fits" else f", but not with {kept} free"
        )
        largest = sizes_words(traced.traced.sizes, is_estimate=traced.traced.done.is_estimate)
        largest += " a GPU" if gpus and largest else ""
        if plan.headroom and traced.known_batch_size:
            largest += f", {traced.known_batch_size:,} keeps {kept} free"
        used = used_words(traced.device_used_range, traced.traced.gpu.cuda_total_bytes)
        room = room_words(traced.free_range)
        answer = verdict_words(verdict, used, room, largest, rests_on(traced.traced, network))
    else:
        fits = now.fits
        verdict = f"{size} {'fits' if fits else 'does not fit'} by formula {where}"
        room = f"{format_bytes(abs(now.spare_bytes))} {'to spare' if fits else 'missing'}"
        largest = f"largest batch{' a GPU' if gpus else ''} ≈{now.max_batch_size:,} with {kept} free"
        needed = now.prediction.needed_bytes
        used = used_words(Range(needed, needed), now.usable_bytes)
        answer = verdict_words(verdict, used, room, largest if now.max_batch_size else "no batch fits")
    return answer, fits


def _passes(now: Answer) -> str:
    """Say how many passes make the wanted batch, where one is wanted."""
    if now.plan.target_batch is None:
        return ""
    steps, tokens = now.accumulation, now.global_batch_tokens
    passes = "1 pass makes" if steps.steps == 1 else f"{steps.steps:,} passes make"
    return f"{passes} a global batch of {steps.global_batch_size:,}{f' ({tokens:,} tokens)' if tokens else ''}."


def _to_change(plan: Plan, best: Recommended, *, by_trace: bool) -> str:
    found = best.combination
    if isinstance(found, Unknown):
        others = [one.change.name for one in techniques(plan).helping if one.fits and one.change.key in _OTHER_TRAINING]
        other = f"; by formula {' or '.join(others)} would, which trains less of it" if others else ""
        return f"Nothing known makes it fit: {found.reason}{other}."
    how = "" if isinstance(best.traced, TracedAnswer) or not by_trace else " (by formula)"
    if len(found.changes) == 1 and found.changes[0].key == ALLOCATOR:
        how = f" ({found.changes[0].how})"
    only, confirmed = best.formula_only, ""
    if only is not None and found.last_resorts and not only.last_resorts:
        confirmed = f"{only.words}, by formula alone; what a trace can confirm is "
    return f"To change: {confirmed}{found.words}{how}{found.last_resorts}."


def _takes(plan: Plan) -> str:
    """Say how fast all GPUs are together, hours and cost, where the tokens are given and the rates known."""
    found = run(plan)
    if isinstance(found, Unknown):
        return ""
    a_second = sorted(found.tokens / hours / 3600 for hours in found.hours)
    cost = "" if found.cost is None else f", cost {span(*found.cost)} USD"
    return f"{span(*a_second)} tokens/s: {span(*found.hours)} h for {found.tokens:,} tokens{cost}."


def _cheapest(plan: Plan, on_gpus: Sequence[LargestOnGpu]) -> str:
    """Say on which kind of GPU it costs least, of those that it fits on and that has a price."""
    if not (costs := by_cost(plan, on_gpus)):
        return ""
    row, cost = costs[0]
    of = "tokens" if plan.shape.seq_len else "samples"
    money = f"{span(*cost.per_million)} {cost.price.currency}"
    return f"Cheapest GPU for it: {row.gpu.whole.title}, {money} a million {of} ({cost.price.source})."


# Recommendations for a command


def command_answer(plan: CommandPlan, found: TracedAnswer) -> str:
    """Say whether a command fits, its largest batch, and what to change."""
    answer = f"{verdict_line(found)}. {change_words(plan, found)}".strip()
    return answer[:1].upper() + answer[1:]


def verdict_line(found: TracedAnswer, *, with_gpu: bool = True) -> str:
    """Say whether the command fits, and how large a batch would."""
    gpu, traced = found.plan.gpu, found.traced
    where = f" on {gpu.title}" if with_gpu else ""
    subject = what_fits(traced, found.plan.batch_size, found.plan.size)
    used, room = used_words(found.device_used_range, gpu.cuda_total_bytes), room_words(found.free_range)
    largest = sizes_words(traced.sizes, is_estimate=traced.done.is_estimate)
    rests = (*rests_on(traced), *deciding_words(traced, found.plan.batch_size))
    return verdict_words(f"{subject} {fit_words(traced, found.plan.batch_size)}{where}", used, room, largest, rests)


def change_words(plan: CommandPlan, found: TracedAnswer) -> str:
    """Say what to change where the command does not fit: the cheapest change, or changes together, that was run.

    Where none of these fits, what does by formula.
    """
    if found.traced.fits_leaving(plan.batch_size, 0):
        return ""
    if (best := plan.fitting) is not None:
        how = f" ({best.changes[0].how})" if best.passes == 1 and len(best.changes) == 1 else ""
        if how and best.batch_size != plan.batch_size:  # which `how` has
            line, written = command_of(plan, best)
            how = f" ({line}{besides(written)})"
        return f"To change: {best.words}{how}, traced: it {plan.fit_with(best)}{best.last_resorts}."
    if not plan.what_ifs:
        return ""
    ran = any(isinstance(one.traced, Traced) for one in plan.tried)
    helping = techniques_of_command(plan, found).helping
    rows = sorted((row for row in helping if row.fits), key=lambda row: row.change.price)
    why = "None of the changes that were run makes it fit" if ran else "No change has been run"
    if sets := [one for one in plan.together if len(one.changes) > 1 and isinstance(one.traced, Traced)]:
        nearest = min(sets, key=plan.least_used_bytes)
        assert isinstance(nearest.traced, Traced), "it was run"
        missing = room_words(plan.there(nearest.traced).free_range(nearest.batch_size))
        why += f"; with {nearest.words} together {missing}"
    return f"{why}; by formula this does: {rows[0].change.name} ({rows[0].change.how})." if rows else f"{why}."
